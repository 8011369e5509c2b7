"""Source lines a user can find: of an exception, and of an exported node."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from traceback import FrameSummary, StackSummary, walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch
from torch.fx import proxy
from torch.fx.experimental.proxy_tensor import PythonKeyTracer

from autoshard.code_text import WIDTH

_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), "<")
_MACHINERY = tuple(f"/site-packages/{name}/" for name in ("sympy", "mpmath", "hypothesis"))  # called by torch, or by gc
_SITE = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
MOST_SHOWN = 2 * WIDTH  # characters: a list of missing keys may be long
_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\S+))?')


def blame(error: BaseException) -> str:
    """One line: `file.py:12 in `code of that line`: what went wrong`, the innermost line of the model's own code."""
    place = culprit(error)
    what = headline(error)
    return f"{place}: {what}" if place else what


def headline(error: BaseException) -> str:
    """The exception's first line of text, with its type, and what follows while a line only announces it by a colon."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_path(error.filename)}:{error.lineno}: SyntaxError: {error.msg}"
    if isinstance(error, SystemExit):
        return "it ended the program: " + (str(error) if str(error).startswith("os.") else f"sys.exit({error})")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    end = next((n for n, line in enumerate(lines) if not line.endswith(":")), len(lines)) + 1
    what = f"{type(error).__name__}: {' '.join(lines[:end])}".removesuffix(": ")
    return what if len(what) <= MOST_SHOWN else f"{what[: MOST_SHOWN - 1]}…"


def culprit(error: BaseException) -> str:
    """`file.py:12 `code``: the innermost frame that is not torch's, autoshard's or Python's; "" if there is none."""
    location = _raised_in(error)
    return quote(location[0].f_code.co_filename, location[1]) if location is not None else ""


def _raised_in(error: BaseException) -> tuple[FrameType, int] | None:
    """Frame of `culprit`, and the line of it that ran; None if there is none."""
    frames: list[tuple[FrameType, int]] = []
    seen: BaseException | None = error
    while seen is not None and not frames:
        frames = [(frame, line) for frame, line in walk_tb(seen.__traceback__) if is_visible(frame.f_code.co_filename)]
        seen = seen.__cause__ or seen.__context__
    return frames[-1] if frames else None


def library_function(error: BaseException) -> str:
    """`library.module.Class.method`, the function of `culprit`, where it is an installed library's; else ""."""
    location = _raised_in(error)
    if location is None:
        return ""
    module = str(location[0].f_globals.get("__name__", ""))
    if module.partition(".")[0] not in packages_distributions():
        return ""
    return f"{module}.{location[0].f_code.co_qualname.partition('.<locals>')[0]}"


def here() -> str:
    """`file.py:12 `code`` of the innermost frame of the model's own code that is running now; "" if there is none."""
    frame = model_frame()
    return quote(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def model_frame() -> FrameType | None:
    """The innermost running frame that is not torch's, autoshard's or Python's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_visible(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def quote(filename: str, line: int) -> str:
    """`folder/file.py:12 `the line's text``."""
    text = linecache.getline(filename, line).strip()
    return f"{short_path(filename)}:{line} `{text}`" if text else f"{short_path(filename)}:{line}"


def short_path(filename: str) -> str:
    """The last two components: no machine's own folders."""
    return "/".join(Path(filename).parts[-2:])


@contextlib.contextmanager
def noting_calls() -> Iterator[None]:
    """Context in which an exported node's frames include the functions that a forward calls; torch leaves out all that
    aren't called `forward`. They are read from Python's stack: torch's own way took a quarter of an export."""
    if not hasattr(proxy, "CapturedTraceback") or not hasattr(PythonKeyTracer, "_filter_traceback_frames"):
        yield  # another torch: names are the callers'
        return
    usual = proxy.CapturedTraceback, PythonKeyTracer._filter_traceback_frames
    proxy.CapturedTraceback, PythonKeyTracer._filter_traceback_frames = _ModelFrames, lambda _, frames: frames
    try:
        yield
    finally:
        proxy.CapturedTraceback, PythonKeyTracer._filter_traceback_frames = usual


class _ModelFrames:
    """Replacement for torch's CapturedTraceback."""

    @classmethod
    def extract(cls) -> type[_ModelFrames]:
        return cls

    @staticmethod
    def summary() -> StackSummary:
        frames = [*walk_stack(sys._getframe(1))][::-1]
        begun = itertools.dropwhile(lambda entry: entry[0].f_code.co_name != "forward", frames)
        called = [(frame.f_code, line) for frame, line in begun if is_visible(frame.f_code.co_filename)]
        return StackSummary.from_list([FrameSummary(code.co_filename, line, code.co_name) for code, line in called])


def node_frame(node: Any) -> tuple[str, int] | None:
    """File and line of the innermost frame of the forward that made an exported node, torch's own left out."""
    visible = node_frames(node)
    return visible[-1] if visible else None


def node_frames(node: Any) -> list[tuple[str, int]]:
    """All of them, outermost first."""
    return [frame for frame, _ in node_calls(node)]


def node_calls(node: Any) -> list[tuple[tuple[str, int], str]]:
    """The same, each with the name of its function."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return [((name, int(line)), function) for name, line, function in frames if is_visible(name)]


def node_source(node: Any) -> str:
    """`folder/file.py:12` of an exported node, "" where unknown."""
    frame = node_frame(node)
    return f"{short_path(frame[0])}:{frame[1]}" if frame else ""


def node_quote(node: Any) -> str:
    """Source line of an exported node, with its text; the operator's name if there is no line."""
    frame = node_frame(node)
    return quote(*frame) if frame else f"operator {node.name}"


@cache
def is_visible(filename: str) -> bool:
    """Is it a file of the model's own, or of a library other than torch and autoshard?"""
    if filename.startswith(_HIDDEN[:2]) or any(part in filename for part in _MACHINERY):
        return False
    return not filename.startswith(_HIDDEN) or "site-packages" in filename or filename.startswith(_SITE)
