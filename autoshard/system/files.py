"""Files that a user named: read and written so that every fault is one sentence with the file in it.

A file is read up to a size, JSON and TOML up to a depth; what is written is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from autoshard.errors import CaptureError, InvalidFileError, UsageError, UserError

MOST_DIGITS = sys.float_info.max_10_exp  # of a whole number: with more it is no float
LARGEST_FILE = 1 << 30  # bytes of a graph, a plan, a timeline: of a large model's step it has hundreds of megabytes
LARGEST_TOML = 1 << 20  # bytes: profiles and pins are written by hand
_ELSEWHERE = "a path in a folder that exists and that you may write to"


def read_text(path: Path, what: str, hint: str, most_bytes: int = LARGEST_FILE) -> str:
    """UTF-8 text of at most `most_bytes`. InvalidFileError: `can't read {what} {path}: …`."""
    try:
        return read_bytes(path, most_bytes).decode("utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise InvalidFileError(f"can't read {what} {path}: {error.strerror}", hint) from None
    except UnicodeDecodeError:
        raise InvalidFileError(f"can't read {what} {path}: not a text file", hint) from None
    except ValueError as error:  # a null byte in the name
        raise InvalidFileError(f"can't read {what} {str(path)!r}: {error}", hint) from None


def read_bytes(path: Path, most_bytes: int = LARGEST_FILE) -> bytes:
    """Read a regular file of at most `most_bytes`. OSError names what it is instead: opening a pipe never returns."""
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))
    return content


def check_regular(path: Path) -> None:
    """OSError where there is nothing, or what can't be read as a file is."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def parse_json(text: str, where: str, hint: str) -> Any:
    """InvalidFileError: `{where} is not JSON: …`; NaN and Infinity are no JSON, and no object has a key twice."""
    try:
        return json.loads(
            text, parse_constant=_no_number, parse_int=_whole, parse_float=_finite, object_pairs_hook=_distinct
        )
    except RecursionError:
        raise InvalidFileError(f"{where} is not JSON that can be read: it is nested too deep", hint) from None
    except ValueError as error:
        raise InvalidFileError(f"{where} is not JSON: {error}", hint) from None


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _whole(word: str) -> int:
    if len(word) > MOST_DIGITS:
        raise ValueError(f"a number of {len(word)} digits")
    return int(word)


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"{word[:20]} is no number that a computer has")
    return number


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Dict of the pairs. ValueError if two keys are equal: JSON allows it, and a reader would take one of them."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:60]!r} stands in an object twice")
    return entries


def parse_toml(text: str, where: str, hint: str) -> dict[str, Any]:
    """InvalidFileError: `{where} is not TOML: …`."""
    try:
        parsed = tomllib.loads(text)
        _check_sizes(parsed)
        return parsed
    except RecursionError:
        raise InvalidFileError(f"{where} is not TOML that can be read: it is nested too deep", hint) from None
    except ValueError as error:
        raise InvalidFileError(f"{where} is not TOML: {error}", hint) from None


def _check_sizes(value: Any) -> None:
    """Whole numbers of TOML may have any number of digits."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_sizes(item)
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError(f"a number of {value.bit_length()} bits")


def write_text(path: Path, text: str) -> None:
    """Write a text file under a temporary name, then rename. UsageError where it can't be written."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes under a temporary name, then rename. A device or a pipe, such as /dev/null, stays; so does a link."""
    with write_errors(path):
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(content)
            return
        path = Path(os.path.realpath(path)) if path.is_symlink() else path
    partial = partial_of(path)
    with write_errors(path), removed_on_error(partial):
        partial.write_bytes(content)
        partial.replace(path)


def partial_of(path: Path) -> Path:
    """Temporary name next to `path`. UsageError where `path` can't name a file."""
    if not path.name or path.is_dir():
        raise UsageError(f"can't write {path}: it is a folder, expected the name of a file", f"{path / 'NAME'}")
    return path.with_name(f".{path.name[:80]}.{os.getpid()}.partial")


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Raise what the system reports against writing `path` as a UsageError."""
    try:
        yield
    except OSError as error:
        hint = "a disk with free space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else _ELSEWHERE
        raise UsageError(f"can't write {path}: {error.strerror or error}", hint) from None
    except ValueError as error:  # a null byte in the name
        raise UsageError(f"can't write {str(path)!r}: {error}", _ELSEWHERE) from None


@contextlib.contextmanager
def removed_on_error(partial: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, ValueError):
            partial.unlink(missing_ok=True)
        raise


# What the system refuses whatever a program does. Others, such as a file that is not there, would be our own fault.
REFUSED = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM,
     errno.EIO, errno.ENOMEM, errno.EAGAIN, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
)  # fmt: skip
NEEDED = ("torch", "numpy", "scipy", "networkx", "pulp", "highspy", "matplotlib", "jinja2", "rich")


def as_user_error(error: Exception) -> UserError | None:
    """UserError that says what the system refused or lacks; None if the error is a bug."""
    if isinstance(error, OSError) and error.errno in REFUSED:
        where = f"{error.filename}: " if error.filename else ""
        return UsageError(f"{where}{error.strerror}", "`df -h`, `ulimit -a` and the permissions show what is short")
    if isinstance(error, MemoryError):
        return UsageError("there is not enough memory", "a smaller model, or a machine with more")
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in NEEDED:
        return UsageError(f"{error.name} can't be imported: {error}", "pip install autoshard, or what the line names")
    return None


def ended(stopped: SystemExit) -> CaptureError:
    """A model's code called `sys.exit`."""
    code = "" if stopped.code is None else repr(stopped.code)
    return CaptureError(
        f"the model's code ended the program: sys.exit({code})",
        'the call under `if __name__ == "__main__":`, so that importing the file only defines things',
    )


_PACKAGE = Path(__file__).resolve().parents[1]


def data_folder(name: str) -> Path:
    """The folder `name`: `autoshard/_data/` in a wheel, next to the package in a clone."""
    wheel = _PACKAGE / "_data" / name
    return wheel if wheel.is_dir() else _PACKAGE.parent / name
