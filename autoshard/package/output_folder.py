"""The output folder: filled under a temporary name, swapped into place at the end, and never anybody else's.

`manifest.json` lists what autoshard wrote with a hash, so that a folder that holds something else, or a generated file
that a user has edited since, is refused rather than overwritten. Files that a user added are kept. What a killed
process has left next to the folder is put in order by the next that reads or writes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from autoshard.errors import InvalidFileError, UsageError
from autoshard.system.files import LARGEST_FILE, parse_json, read_bytes, read_text, write_errors, write_text

MANIFEST = "manifest.json"
NESTED_FOLDER = "devices_"  # and a number: a package in the package, for so many devices
NESTED = re.compile(rf"({NESTED_FOLDER}[0-9]+)/(.+)", re.DOTALL)
KIND = "autoshard.package"
AGAIN = "make the package again with `autoshard plan`"
_OTHER_FOLDER = "--out with another folder, or move these files away"


def check_target(folder: Path) -> None:
    """UsageError unless `folder` can take a package: absent, empty, or an untouched earlier package."""
    recover(folder)
    existing = next((parent for parent in folder.absolute().parents if parent.exists()), None)
    for path in filter(None, (folder, existing)):
        if path.exists() and not path.is_dir():
            raise UsageError(f"--out {folder}: {path} is a file, expected a folder", "--out with another name")
    around = folder if folder.exists() else existing
    if around is not None and not os.access(around, os.W_OK):
        raise UsageError(f"--out {folder}: no permission to write in {around}", "--out with another folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / MANIFEST).exists():
        names = sorted(entry.name for entry in folder.iterdir())
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise UsageError(f"the output folder {folder} holds something else: {shown}", _OTHER_FOLDER)
    edited = [name for name, digests in _accepted(folder).items() if _changed(folder / name, digests)]
    if edited:
        raise UsageError(f"{folder}/{edited[0]} was edited since autoshard wrote it", _OTHER_FOLDER)


def write_package(folder: Path, files: Mapping[str, str]) -> None:
    """Write `files` (name -> text) as the package `folder`: all of them or, on any error, none."""
    check_target(folder)
    real = Path(os.path.realpath(folder))
    with _staged(real, files) as stage:
        if not real.exists():
            stage.rename(real)
        elif real in (stage.parent, Path.cwd(), *Path.cwd().parents) or not _swapped(stage, real):
            _replaced_in_place(real, stage, files)


def _swapped(stage: Path, folder: Path) -> bool:
    """The old folder goes, but for the files that the user added; False where the folder can't be renamed."""
    old = _beside(folder, _OLD)
    shutil.copymode(folder, stage)
    try:
        folder.rename(old)
    except OSError:  # where something is mounted, say
        return False
    try:
        stage.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    _bring_added(old, folder)
    return True


def _replaced_in_place(folder: Path, stage: Path, files: Mapping[str, str]) -> None:
    """Replaces a package file by file, in a folder that has to stay because processes work in it."""
    before = _manifest(folder) if (folder / MANIFEST).exists() else {}
    nested = [name for name in _accepted(folder) if NESTED.fullmatch(name)] if before else []
    write_text(folder / MANIFEST, _manifest_text(before, _manifest(stage)))
    gone = (before.keys() | {*nested}) - files.keys()
    for name in (*gone, *({*_manifests(gone)} - {*_manifests(files)})):
        (folder / name).unlink(missing_ok=True)
    for name in (*files, *_manifests(files)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).replace(folder / name)


def update_package(folder: Path, files: Mapping[str, str]) -> None:
    """Write or replace some files of an existing package, each whole or not at all, and note them in its manifest."""
    before, new = _manifest(folder), {name: _digest(text.encode()) for name, text in files.items()}
    write_text(folder / MANIFEST, _manifest_text(before, new))  # killed in between, either is right
    for name, text in {**files, MANIFEST: _manifest_text(before | new)}.items():
        write_text(folder / name, text)


# --- what a process leaves that is killed while it writes -------------------------------------------------------------

_NEW, _OLD = "partial", "older"
_PARTIAL = re.compile(r"\..+\.(\d+)\.partial")  # a file under the name that `write_text` gives it first


def _beside(folder: Path, kind: str) -> Path:
    """Name, next to the folder, for a folder that only this process uses."""
    return folder.parent / f".{folder.name[:80]}.{kind}-{os.getpid()}-{secrets.token_hex(4)}"


def recover(folder: Path) -> None:
    """Put in order what processes that are no more have left next to `folder`: a swap that was begun is ended."""
    real = Path(os.path.realpath(folder))
    left = {kind: [*_abandoned(real, kind)] for kind in (_NEW, _OLD)}
    with contextlib.suppress(OSError):  # another process may be about it, or the place can't be written to
        if left[_OLD] and not real.exists():
            whole = [new for new in left[_NEW] if _is_whole(new)]
            (whole or left[_OLD])[0].rename(real)
        for old in left[_OLD]:
            _bring_added(old, real)
        for new in left[_NEW]:
            shutil.rmtree(new, ignore_errors=True)
        for name in os.listdir(real) if (real / MANIFEST).exists() else ():
            if (match := _PARTIAL.fullmatch(name)) and not _lives(int(match[1])):
                (real / name).unlink()


def _abandoned(folder: Path, kind: str) -> Iterator[Path]:
    prefix = f".{folder.name[:80]}.{kind}-"
    for parent in (folder.parent, folder):
        try:
            names = [entry for entry in os.listdir(parent) if entry.startswith(prefix)]
        except OSError:
            continue
        for name in sorted(names):
            process, path = name.removeprefix(prefix).partition("-")[0], parent / name
            if process.isdecimal() and not _lives(int(process)) and _is_users(path):
                yield path


def _is_users(path: Path) -> bool:
    """A folder of this user's: what others put next to a package must not get into it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and (not hasattr(os, "geteuid") or status.st_uid == os.geteuid())


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _is_whole(folder: Path) -> bool:
    try:
        return all(_digest((folder / name).read_bytes()) in digests for name, digests in _accepted(folder).items())
    except (OSError, InvalidFileError):
        return False


def _bring_added(old: Path, folder: Path) -> None:
    """Moves what the user added from the old folder to the new one, then removes the old."""
    if not old.is_dir():
        return
    known = _accepted(old) if (old / MANIFEST).exists() else {}
    packaged = {*known, *_manifests(known)}
    for parent, folders, names in os.walk(old, topdown=False):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in (*names, *links):
            path = Path(parent, name).relative_to(old)
            if _PARTIAL.fullmatch(name) or path.as_posix() in packaged:
                continue
            if "__pycache__" not in path.parts and not os.path.lexists(folder / path):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (old / path).rename(folder / path)
    leftover = _beside(folder, _NEW)  # half removed it has no manifest, and nothing in it is the user's
    old.rename(leftover)
    shutil.rmtree(leftover, ignore_errors=True)


def read_file(folder: Path, name: str) -> str:
    """A text file of a package. InvalidFileError where the folder is no package or lacks the file."""
    if not (folder / MANIFEST).exists():
        raise InvalidFileError(
            f"{folder} is not a package written by autoshard: it has no {MANIFEST}",
            "autoshard plan … --out DIR, then DIR",
        )
    return read_text(folder / name, "the package's", AGAIN)


def check_unedited(folder: Path, texts: Mapping[str, str]) -> None:
    """InvalidFileError where one of these files of a package is not as autoshard wrote it: figures of a plan belong to
    its decisions, and a change of them would go unnoticed."""
    written = _manifest(folder)
    for name, text in texts.items():
        if written.get(name) != _digest(text.encode()):
            raise InvalidFileError(f"{folder / name} was edited since autoshard wrote it", AGAIN)


@contextmanager
def _staged(folder: Path, files: Mapping[str, str]) -> Iterator[Path]:
    parent = folder.absolute().parent
    missing = [path for path in (parent, *parent.parents) if not path.exists()]  # the innermost first
    stage: Path | None = None
    try:
        with write_errors(folder):
            parent.mkdir(parents=True, exist_ok=True)
            stage = _beside(folder, _NEW)
            if folder.is_dir() and not os.access(parent, os.W_OK):  # where something is mounted, say
                stage = folder / stage.name
            stage.mkdir()
            _fill(stage, files)
            yield stage
    finally:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()  # only where nothing came into it


def _fill(stage: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_text(text, encoding="utf-8")
    for manifest in reversed(_manifests(files)):  # the package's own last: with it the folder is whole
        folder = manifest.removesuffix(MANIFEST)
        texts = {name.removeprefix(folder): text for name, text in files.items() if _manifest_of(name) == manifest}
        digests = {name: _digest(text.encode()) for name, text in texts.items()}
        (stage / manifest).write_text(_manifest_text(digests), encoding="utf-8")


def _manifest_of(name: str) -> str:
    """The manifest that names the file."""
    nested = NESTED.fullmatch(name)
    return f"{nested[1]}/{MANIFEST}" if nested else MANIFEST


def _manifests(names: Iterable[str]) -> list[str]:
    return [*dict.fromkeys(map(_manifest_of, (MANIFEST, *names)))]


def nested_packages(folder: Path) -> list[Path]:
    """Packages in the package, most devices first."""
    packages = [path.parent for path in folder.glob(f"{NESTED_FOLDER}*/{MANIFEST}")]
    numbered = [path for path in packages if NESTED.fullmatch(f"{path.name}/_")]
    return sorted(numbered, key=lambda path: -int(path.name.removeprefix(NESTED_FOLDER)))


def _manifest_text(digests: Mapping[str, str], coming: Mapping[str, str] | None = None) -> str:
    """`coming`: files that are about to be written, of which each is there or not yet."""
    content: dict[str, object] = {"kind": KIND, "schema_version": 1, "files": dict(sorted(digests.items()))}
    content |= {"coming": dict(sorted(coming.items()))} if coming else {}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _manifest(folder: Path, part: str = "files") -> dict[str, str]:
    content = parse_json(read_file(folder, MANIFEST), str(folder / MANIFEST), _OTHER_FOLDER)
    files = content.get(part) if isinstance(content, dict) and content.get("kind") == KIND else None
    if files is None and part != "files":
        return {}
    if not isinstance(files, dict) or not all(_is_inside(name) for name in files):
        raise InvalidFileError(f"{folder / MANIFEST} is damaged", _OTHER_FOLDER)
    if not all(isinstance(digest, str) for digest in files.values()):
        raise InvalidFileError(f"{folder / MANIFEST} is damaged", _OTHER_FOLDER)
    return dict(files)


def _accepted(folder: Path) -> dict[str, set[str]]:
    """For each file of the package, and of those in it, the hashes that it may have."""
    digests: dict[str, set[str]] = {}
    for package in (folder, *nested_packages(folder)):
        for part in ("files", "coming"):
            for name, digest in _manifest(package, part).items():
                digests.setdefault(f"{package.name}/{name}" if package != folder else name, set()).add(digest)
    return digests


def _is_inside(name: str) -> bool:
    return bool(name.strip()) and "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts


def _changed(path: Path, digests: Container[str]) -> bool:
    """True if its hash is not among `digests`, or it is no file any more; False if nothing is there."""
    try:
        return _digest(read_bytes(path, LARGEST_FILE)) not in digests
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
