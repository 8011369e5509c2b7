"""The output folder: filled under a temporary name, moved into place at the end, and never anybody else's.

`manifest.json` lists what autoshard wrote with a hash, so that a folder that holds something else, or a generated file
that a user has edited since, is refused rather than overwritten. Files that a user added are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from autoshard.errors import InvalidFileError, UsageError
from autoshard.system.files import parse_json, read_bytes, read_text, told, write_text

MANIFEST = "manifest.json"
KIND = "autoshard.package"
AGAIN = "make the package again with `autoshard plan`"
LARGEST_FILE = 1 << 32  # bytes: a timeline of a large model's step has hundreds of megabytes
_OTHER_FOLDER = "--out with another folder, or move these files away"


def check_target(folder: Path) -> None:
    """UsageError unless `folder` can take a package: absent, empty, or an untouched earlier package."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} is a file, expected a folder", "--out with another name")
    existing = next((parent for parent in folder.absolute().parents if parent.exists()), None)
    if existing is not None and not os.access(folder if folder.exists() else existing, os.W_OK):
        raise UsageError(f"--out {folder}: no permission to write in {existing}", "--out with another folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / MANIFEST).exists():
        names = sorted(entry.name for entry in folder.iterdir())
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise UsageError(f"the output folder {folder} holds something else: {shown}", _OTHER_FOLDER)
    edited = [name for name, digest in _manifest(folder).items() if _changed(folder / name, digest)]
    if edited:
        raise UsageError(f"{folder}/{edited[0]} was edited since autoshard wrote it", _OTHER_FOLDER)


def write_package(folder: Path, files: Mapping[str, str]) -> None:
    """Write `files` (name -> text) as the package `folder`: all of them or, on any error, none."""
    check_target(folder)
    with _staged(folder, files) as stage:
        if not folder.exists():
            stage.rename(folder)
            return
        for name in _manifest(folder) if (folder / MANIFEST).exists() else ():
            if name not in files:
                (folder / name).unlink(missing_ok=True)
        for name in (*files, MANIFEST):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (stage / name).replace(folder / name)


def update_package(folder: Path, files: Mapping[str, str]) -> None:
    """Write or replace some files of an existing package, each whole or not at all, and note them in its manifest."""
    digests = _manifest(folder) | {name: _digest(text.encode()) for name, text in files.items()}
    for name, text in {**files, MANIFEST: _manifest_text(digests)}.items():
        write_text(folder / name, text)


def read_file(folder: Path, name: str) -> str:
    """A text file of a package. InvalidFileError where the folder is no package or lacks the file."""
    if not (folder / MANIFEST).exists():
        raise InvalidFileError(
            f"{folder} is not a package written by autoshard: it has no {MANIFEST}",
            "autoshard plan … --out DIR, then DIR",
        )
    return read_text(folder / name, "the package's", AGAIN)


def check_unedited(folder: Path, texts: Mapping[str, str]) -> None:
    """InvalidFileError where one of these files of a package is not as autoshard wrote it: figures of a plan are those
    of its decisions, and nobody could tell that they were changed."""
    written = _manifest(folder)
    for name, text in texts.items():
        if written.get(name) != _digest(text.encode()):
            raise InvalidFileError(f"{folder / name} was edited since autoshard wrote it", AGAIN)


@contextmanager
def _staged(folder: Path, files: Mapping[str, str]) -> Iterator[Path]:
    parent = folder.absolute().parent
    made = [own for own in (parent, *parent.parents) if not own.exists()]  # the innermost first
    stage: Path | None = None
    try:
        with told(folder):
            parent.mkdir(parents=True, exist_ok=True)
            stage = Path(tempfile.mkdtemp(prefix=f".{folder.name[:80]}.partial-", dir=parent))
            _fill(stage, files)
            yield stage
    finally:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
        for own in made:
            with contextlib.suppress(OSError):
                own.rmdir()  # only where nothing came into it


def _fill(stage: Path, files: Mapping[str, str]) -> None:
    stage.chmod(0o777 & ~_umask())
    for name, text in files.items():
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_text(text, encoding="utf-8")
    digests = {name: _digest(text.encode()) for name, text in files.items()}
    (stage / MANIFEST).write_text(_manifest_text(digests), encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _manifest_text(digests: Mapping[str, str]) -> str:
    content = {"kind": KIND, "schema_version": 1, "files": dict(sorted(digests.items()))}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _manifest(folder: Path) -> dict[str, str]:
    content = parse_json(read_file(folder, MANIFEST), str(folder / MANIFEST), _OTHER_FOLDER)
    files = content.get("files") if isinstance(content, dict) and content.get("kind") == KIND else None
    if not isinstance(files, dict) or not all(_is_inside(name) for name in files):
        raise InvalidFileError(f"{folder / MANIFEST} is damaged", _OTHER_FOLDER)
    if not all(isinstance(digest, str) for digest in files.values()):
        raise InvalidFileError(f"{folder / MANIFEST} is damaged", _OTHER_FOLDER)
    return dict(files)


def _is_inside(name: str) -> bool:
    return bool(name.strip()) and "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts


def _changed(path: Path, digest: str) -> bool:
    """Where it is no file any more, too."""
    try:
        return _digest(read_bytes(path, LARGEST_FILE)) != digest
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
