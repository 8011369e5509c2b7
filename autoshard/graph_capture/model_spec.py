"""How a user names a model, checked as far as that goes without importing torch or the model."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

from autoshard.code_text import typed
from autoshard.errors import NAMED, InvalidFileError, UsageError
from autoshard.system.files import data_folder

KINDS = "file.py:callable, package.module:callable, file.pt2, or a graph saved by `autoshard trace`"
LOSS = "--loss"  # among the arguments of a callable: the loss function beside the model, no name of a parameter


def check_spec(spec: str, planned: bool = False) -> None:
    """UsageError or InvalidFileError where `spec` can't be a model: its form is wrong, or its file is missing."""
    place = spec if holds_graph(spec) else split_spec(spec)[0]
    if place == spec or place.endswith(".py"):
        check_file(Path(place), spec.removeprefix(place), planned)


def holds_graph(spec: str) -> bool:
    """Is it a graph, or an exported program, without the code that computed its sizes and numbers?"""
    return spec.endswith((".json", ".pt2"))


def split_spec(spec: str) -> tuple[str, str]:
    """`file.py:build` -> ("file.py", "build"). UsageError where one of the two is missing."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise UsageError(f"cannot find model {spec!r}", _callables(Path(spec.rstrip(":"))) or KINDS)
    return place, name


def check_file(path: Path, after: str = "", planned: bool = False) -> None:
    """UsageError, or InvalidFileError for a graph, where there is no such file: with those that are near and `after`.

    `planned`: a package names it, and so relative to the folder in which that was planned."""
    if not path.is_file():
        message = f"{path} is no regular file" if path.exists() else f"there is no file {path}"
        kind = UsageError if path.suffix == ".py" else InvalidFileError
        relative = f"the command in the folder where it was planned: {path} is relative to that"
        raise kind(message, relative if planned and not path.is_absolute() else _near_files(path, after) or KINDS)


def _near_files(path: Path, after: str = "") -> str:
    """Files of the same kind in that folder, else below this one, whose names are near; else an example that ships."""
    folder = path.parent if path.parent.is_dir() else Path()
    files = {str(file): file.name for pattern in ("*", "*/*") for file in folder.glob(f"{pattern}{path.suffix}")}
    files = files or {str(file): file.name for file in data_folder("examples").glob(path.name)}
    files.pop(str(path), None)
    names = difflib.get_close_matches(path.name, set(files.values()), NAMED)
    near = [file for one in names for file, name in sorted(files.items()) if name == one]
    return " or ".join(typed(Path(f"{file}{after}")) for file in near)


def _callables(path: Path) -> str:
    """The functions that a file defines, as one would name them; "" where it is no readable Python file."""
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body if path.suffix == ".py" else []
    except (OSError, ValueError, SyntaxError):
        return ""
    names = [item.name for item in body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")]
    return " or ".join(typed(Path(f"{path}:{name}")) for name in names[:NAMED])
