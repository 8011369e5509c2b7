"""The output folder: whole or absent, also where a process was killed, and never anybody else's."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoshard.emit.runtime import put_in_place
from autoshard.errors import InvalidFileError, UsageError
from autoshard.package import output_folder
from autoshard.package.output_folder import MANIFEST, recover, update_package, write_package
from autoshard.system.files import write_text

# --- the output folder: whole or absent, and never anybody else's ---


FILES = {"train.py": "print()\n", "plan.json": "{}\n"}


def names(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*") if entry.is_file())


def test_a_new_folder(tmp_path: Path) -> None:
    output_folder.write_package(tmp_path / "a" / "b", FILES)
    assert names(tmp_path) == ["a/b/manifest.json", "a/b/plan.json", "a/b/train.py"]


def test_replaced_and_tidied_but_the_users_files_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    output_folder.write_package(out, {**FILES, "old.py": "x\n"})
    (out / "data.py").write_text("mine\n", encoding="utf-8")
    (out / "__pycache__").mkdir()
    output_folder.write_package(out, {**FILES, "train.py": "new\n"})
    assert names(out) == ["data.py", "manifest.json", "plan.json", "train.py"]
    assert (out / "train.py").read_text(encoding="utf-8") == "new\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


NESTED = FILES | {"devices_2/train.py": "print(2)\n", "devices_2/runtime/a.py": "", "devices_1/train.py": "print(1)\n"}


def test_packages_in_a_package(tmp_path: Path) -> None:
    """Each has its manifest, and is noted in by itself; they go with the package, but for the user's files."""
    out = tmp_path / "out"
    write_package(out, NESTED)
    assert [path.name for path in output_folder.nested_packages(out)] == ["devices_2", "devices_1"]
    assert "devices_2/train.py" not in json.loads((out / MANIFEST).read_text())["files"]
    update_package(out / "devices_2", {"verification.json": "{}\n"})
    (out / "devices_2" / "runtime" / "mine.py").write_text("mine\n", encoding="utf-8")
    write_package(out, FILES | {"devices_4/train.py": "print(4)\n"})
    assert names(out) == [
        "devices_2/runtime/mine.py",
        *("devices_4/manifest.json", "devices_4/train.py", "manifest.json", "plan.json", "train.py"),
    ]
    (out / "devices_4" / "train.py").write_text("edited\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"devices_4/train\.py was edited"):
        write_package(out, FILES)


def test_packages_in_a_package_that_processes_work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path / "out", NESTED)
    monkeypatch.chdir(tmp_path / "out")
    write_package(tmp_path / "out", FILES | {"devices_2/train.py": "new\n"})
    expected = ["devices_2/manifest.json", "devices_2/train.py", "manifest.json", "plan.json", "train.py"]
    assert names(tmp_path / "out") == expected
    output_folder.check_target(tmp_path / "out")


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    output_folder.write_package(tmp_path, FILES)
    assert names(tmp_path) == ["manifest.json", "plan.json", "train.py"]


def test_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"holds something else: thesis\.tex"):
        output_folder.write_package(tmp_path, FILES)
    assert names(tmp_path) == ["thesis.tex"]


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    output_folder.write_package(tmp_path, FILES)
    (tmp_path / "train.py").write_text("edited\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"train\.py was edited"):
        output_folder.write_package(tmp_path, FILES)
    assert (tmp_path / "train.py").read_text(encoding="utf-8") == "edited\n"


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("", encoding="utf-8")
    for target in ("out", "out/inside", "out/inside/more"):
        with pytest.raises(UsageError, match=r"/out is a file, expected a folder"):
            output_folder.check_target(tmp_path / target)
    with pytest.raises(UsageError):
        output_folder.write_package(tmp_path / "out" / "inside", FILES)


def test_a_folder_in_one_that_can_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume that is mounted in a container: only the volume is the user's."""
    folder = tmp_path / "mounted"
    (folder / ".mounted.partial-999999999-0").mkdir(parents=True)  # of a process that was killed
    monkeypatch.setattr(output_folder.os, "access", lambda path, _: Path(path) == folder)
    inode = folder.stat().st_ino
    for _ in range(2):
        write_package(folder, FILES)
        assert folder.stat().st_ino == inode
        assert sorted(path.name for path in folder.iterdir()) == sorted([MANIFEST, *FILES])
    monkeypatch.setattr(output_folder.os, "access", lambda path, _: Path(path) == tmp_path)
    with pytest.raises(UsageError, match=r"no permission to write in .*/mounted\n"):
        output_folder.check_target(folder)


def test_a_pipe_and_a_link_stay_what_they_are(tmp_path: Path) -> None:
    """As root a report written to /dev/null took its place, for all processes of the machine."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "report")
    assert os.read(reader, 100) == b"report" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_text(tmp_path / "link", "report")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_text(encoding="utf-8") == "report"


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't write"):
        output_folder.write_package(tmp_path / "out", {**FILES, "bad.py": "\ud800"})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="No space left on device\n  try: a disk with free space"):
        write_text(Path("/dev/full"), "report")


def test_update(tmp_path: Path) -> None:
    output_folder.write_package(tmp_path, FILES)
    output_folder.update_package(tmp_path, {"report.html": "<p>\n"})
    output_folder.check_target(tmp_path)
    assert output_folder.read_file(tmp_path, "report.html") == "<p>\n"
    assert names(tmp_path) == ["manifest.json", "plan.json", "report.html", "train.py"]


def test_reading_what_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match="not a package"):
        output_folder.read_file(tmp_path, "plan.json")
    output_folder.write_package(tmp_path, FILES)
    with pytest.raises(InvalidFileError, match=r"can't read .*graph\.json"):
        output_folder.read_file(tmp_path, "graph.json")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"kind": "autoshard.package"}', '{"kind": "autoshard.package", "files": {"../x": ""}}']
)
def test_a_damaged_manifest(tmp_path: Path, text: str) -> None:
    output_folder.write_package(tmp_path, FILES)
    (tmp_path / output_folder.MANIFEST).write_text(text, encoding="utf-8")
    with pytest.raises(InvalidFileError, match=r"manifest\.json is (damaged|not JSON)"):
        output_folder.check_target(tmp_path)


# --- a checkpoint's folder appears whole, and what stood there before is whole until then ---


class Killed(BaseException):
    pass


def _write(folder: Path, word: str) -> None:
    folder.mkdir()
    (folder / "one").write_text(word)


def test_a_folder_replaces_an_older_one(tmp_path: Path) -> None:
    _write(tmp_path / "step-2", "old")
    _write(tmp_path / "step-2.partial", "new")
    put_in_place(tmp_path / "step-2")
    assert [(path.name, (path / "one").read_text()) for path in tmp_path.iterdir()] == [("step-2", "new")]


@pytest.mark.parametrize("renames", [0, 1])
def test_killed_in_between_both_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int) -> None:
    _write(tmp_path / "step-2", "old")
    _write(tmp_path / "step-2.partial", "new")
    done, rename = [], os.replace

    def replace(source: object, target: object) -> None:
        if len(done) == renames:
            raise Killed
        done.append(target)
        rename(str(source), str(target))

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(Killed):
        put_in_place(tmp_path / "step-2")
    assert sorted((path / "one").read_text() for path in tmp_path.iterdir()) == ["new", "old"]
    monkeypatch.undo()
    put_in_place(tmp_path / "step-2")
    assert [(path.name, (path / "one").read_text()) for path in tmp_path.iterdir()] == [("step-2", "new")]


# --- a process that is killed while it writes a package: what it leaves can be read, and written over ---


KILLS = 20
WRITER = """
import itertools, sys
from pathlib import Path
from autoshard.package.output_folder import update_package, write_package
folder = Path(sys.argv[1])
print("begun", flush=True)
for n in itertools.count():
    files = {f"runtime/f{i}.py": f"{n}\\n" * 200 for i in range(20)} | {"plan.json": f"{n}\\n" * 200}
    write_package(folder, files | {f"only{n % 2}.py": "x\\n"})
    update_package(folder, {"report.html": f"{n}\\n", "verification.json": f"{n}\\n"})
"""
ROOT = Path(__file__).resolve().parents[2]


def _is_consistent(folder: Path) -> None:
    digests = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    for name, digest in digests["files"].items():
        actual = hashlib.sha256((folder / name).read_bytes()).hexdigest() if (folder / name).exists() else ""
        assert actual in {digest, digests.get("coming", {}).get(name)}, name
    texts = {path.read_text(encoding="utf-8") for path in (folder / "runtime").iterdir()}
    assert texts == {(folder / "plan.json").read_text(encoding="utf-8")}
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there - {"mine.txt", "checkpoints/step-1/data"} <= {MANIFEST, *digests["files"], *digests.get("coming", {})}


def test_killed_at_random_moments(tmp_path: Path) -> None:
    folder, moments = tmp_path / "out", random.Random(0)
    write_package(folder, {"plan.json": "0\n"})
    (folder / "mine.txt").write_text("mine", encoding="utf-8")
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "checkpoints" / "step-1" / "data").write_text("mine", encoding="utf-8")
    for _ in range(KILLS):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, env=env) as writer:
            assert writer.stdout is not None and writer.stdout.readline()
            time.sleep(0.02 + 0.05 * moments.random())
            writer.send_signal(signal.SIGKILL)
        recover(folder)
        _is_consistent(folder)
        output_folder.check_target(folder)
        assert (folder / "mine.txt").read_text(encoding="utf-8") == "mine"
        assert (folder / "checkpoints" / "step-1" / "data").read_text(encoding="utf-8") == "mine"
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("renames", range(5))
def test_killed_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int) -> None:
    """Without a chance to clean up, which a kill does not give."""
    folder, done, rename = tmp_path / "out", [], Path.rename
    write_package(folder, {"plan.json": "old\n"})
    (folder / "mine.txt").write_text("mine", encoding="utf-8")

    def killing(self: Path, target: Path) -> Path:
        if len(done) >= renames:
            raise Killed
        done.append(target)
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killing)
        patched.setattr(output_folder.shutil, "rmtree", lambda *_, **__: None)
        patched.setattr(output_folder.os, "getpid", lambda: 2**22 + 7)  # no process has it
        if renames < 4:
            with pytest.raises(Killed):
                write_package(folder, {"plan.json": "new\n"})
        else:
            write_package(folder, {"plan.json": "new\n"})
    output_folder.check_target(folder)
    assert (folder / "plan.json").read_text(encoding="utf-8") == ("old\n" if renames == 0 else "new\n")
    assert (folder / "mine.txt").read_text(encoding="utf-8") == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_between_an_updates_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for written in range(4):
        folder, done, write = tmp_path / str(written), [], output_folder.write_text
        write_package(folder, {"plan.json": "{}\n", "report.html": "old"})

        def killing(path: Path, text: str) -> None:
            if len(done) == written:  # noqa: B023
                raise Killed
            done.append(path)  # noqa: B023
            write(path, text)  # noqa: B023

        with monkeypatch.context() as patched:
            patched.setattr(output_folder, "write_text", killing)
            with pytest.raises(Killed):
                update_package(folder, {"report.html": "new", "verification.json": "{}\n"})
        output_folder.check_target(folder)
        update_package(folder, {"report.html": "newer"})
        output_folder.check_target(folder)


def test_from_within_the_folder_it_stays_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path / "out", {"plan.json": "old\n", "old.py": ""})
    monkeypatch.chdir(tmp_path / "out")
    write_package(Path("."), {"plan.json": "new\n"})
    assert sorted(os.listdir()) == [MANIFEST, "plan.json"] and Path("plan.json").read_text("utf-8") == "new\n"
    output_folder.check_target(Path("."))


def test_what_others_put_beside_a_package_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path / "out", {"plan.json": "{}\n"})
    planted = tmp_path / f".out.older-{2**22 + 7}-1"
    planted.mkdir()
    (planted / "typing.py").write_text("", encoding="utf-8")
    monkeypatch.setattr(output_folder.os, "geteuid", lambda: os.getuid() + 1)
    recover(tmp_path / "out")
    assert not (tmp_path / "out" / "typing.py").exists()
