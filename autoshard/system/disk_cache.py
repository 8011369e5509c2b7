"""Cache of results on disk: bytes under a name that holds all that they depend on.

A cache never fails and never returns anything wrong: what is not whole, not readable or not its own counts as absent,
and what can't be written is not kept. Files are written under a temporary name and renamed, each with a checksum of its
name and content; those used longest ago are deleted once all together are too large. Nothing read is ever run: the
content is JSON and arrays of numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from functools import cache
from pathlib import Path

import numpy

from autoshard.system.files import data_folder, read_bytes

VARIABLE = "AUTOSHARD_CACHE"  # a folder, or one of OFF
OFF = frozenset({"off", "no", "none", "0", "false"})
MOST_BYTES = 256 << 20  # of all files together
_MAGIC = b"autoshard cache 1\n"
_OWN = re.compile(r"^[a-z]+-[0-9a-f]{40}\.cache$|^\.[a-z]+-[0-9a-f]{40}\.cache\.\w+\.partial$")
_DIGEST = hashlib.sha256().digest_size


class DiskCache:
    """Files of one folder. `faults`: why it could not be written, a sentence each; `used`: what was found in it."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self.faults: list[str] = []
        self.used: list[str] = []

    def read(self, kind: str, key: str) -> bytes | None:
        """Bytes written last under this name; None if they are absent or not as written."""
        path = self._path(kind, key)
        try:
            if path.stat().st_size > self.most_bytes:
                return None
            content = read_bytes(path, self.most_bytes)
        except (OSError, ValueError):
            return None
        body = content[len(_MAGIC) + _DIGEST :]
        if content[: len(_MAGIC) + _DIGEST] != _MAGIC + _checksum(path.name, body):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used last
        self.used.append(kind)
        return body

    def write(self, kind: str, key: str, body: bytes) -> None:
        """Write all of it or nothing, whoever else writes or reads."""
        path = self._path(kind, key)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial.write_bytes(_MAGIC + _checksum(path.name, body) + body)
            partial.replace(path)
            self._trim()
        except (OSError, ValueError) as error:
            message = f"the cache {self.folder} is not written: {getattr(error, 'strerror', None) or error}"
            if message not in self.faults:
                self.faults.append(message)
        finally:
            with contextlib.suppress(OSError, ValueError):
                partial.unlink(missing_ok=True)

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / f"{kind}-{key}.cache"

    def _trim(self) -> None:
        """Removes those used longest ago, of which what killed processes left is soon one; no file of another name."""
        files: list[tuple[float, int, str]] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # another process removed it
                    known = entry.stat(follow_symlinks=False)
                    if _OWN.match(entry.name):
                        files.append((known.st_mtime, known.st_size, entry.path))
        size = sum(file_bytes for _, file_bytes, _ in files)
        for _, file_bytes, path in sorted(files):
            if size <= self.most_bytes:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            size -= file_bytes


def _checksum(name: str, body: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + body).digest()


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/autoshard/searches`, or the same under ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "autoshard" / "searches"


def named_folder(said: str | Path | bool | None) -> Path | None:
    """The folder that a program, or else the environment, names; None where neither does, or it is turned off."""
    setting = os.environ.get(VARIABLE, "") if said is None or said is True else said
    return Path(setting) if setting and str(setting).strip().lower() not in OFF else None


def is_off(said: str | Path | bool | None) -> bool:
    """True if a program (False), or else the environment, turns the cache off."""
    setting = os.environ.get(VARIABLE, "") if said is None or said is True else said
    return setting is False or str(setting).strip().lower() in OFF


def disk_cache(said: str | Path | bool | None = None) -> DiskCache | None:
    """The cache in the folder that is named, or else in the user's own; None where it is turned off."""
    if is_off(said):
        return None
    try:
        return DiskCache(named_folder(said) or default_folder())
    except RuntimeError:  # there is no home
        return None


def key_of(*parts: object) -> str:
    """A name for what depends on `parts` (by their `repr`), on autoshard's code and constants, and on the libraries."""
    return hashlib.sha256(repr((code_version(), libraries(), parts)).encode("utf-8", "surrogatepass")).hexdigest()[:40]


@cache
def libraries() -> tuple[str, ...]:
    """Versions of the libraries that plans come from, from the names of folders next to numpy's."""
    beside = sorted(path.stem for path in Path(numpy.__file__).resolve().parents[1].glob("*-*.dist-info"))
    known = dict(name.split("-", 1) for name in beside)
    return tuple(known.get(name) or _version(name) for name in ("numpy", "scipy", "highspy"))


def _version(name: str) -> str:
    from importlib.metadata import version  # 30 ms

    return version(name)


@cache
def code_version() -> str:
    """Changes with autoshard's code and constants: another one may find another plan."""
    hasher = hashlib.sha256()
    roots = {Path(__file__).resolve().parents[1]: "*.py", data_folder("costmodels"): "*.toml"}
    for root, kind in roots.items():
        for path in sorted(root.rglob(kind)):
            hasher.update(path.relative_to(root).as_posix().encode() + b"\n" + path.read_bytes())
    return hasher.hexdigest()
