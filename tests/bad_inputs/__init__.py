"""Bad inputs as a table: what is typed and what is damaged -> exit code and what the one message says.

A row is checked by `check`: the code, one message with something to try, no traceback, nothing on stdout, and a folder
that is afterwards as it was before, temporary files included.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autoshard.cli import commands
from autoshard.ir import graph_json
from tests.graphs import mlp_graph

Damage = Callable[[Path], None]
GRAPH, PROFILE, PLAN = "mlp.graph.json", "mine.toml", "pkg/plan.json"
P = f"plan {GRAPH} --mesh dp=2,tp=2 --hardware a100-80g-sxm --out o"
MODEL = """\
import torch
from torch import nn
{top}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        {forward}

def build():
    {build}
    return Model(), (torch.ones(4, 8),)
{bottom}
"""


UNDER_WAY = (
    "capturing", "searching", "proving", "calibrating", "verifying", "simulating", "rendering", "comparing", "writing",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """`typed` as in a shell; `says` stands in the message. `damage` is done to a folder of good files before."""

    typed: str
    code: int
    says: str
    damage: Damage | None = None
    about: str = ""

    def __str__(self) -> str:
        return f"{self.typed} {self.about}".replace("\n", " ")[:90]


def good_files(folder: Path) -> None:
    """A graph, a package of it, a profile and a model: what rows damage."""
    (folder / GRAPH).write_text(graph_json.dumps(mlp_graph(2)), encoding="utf-8")
    (folder / "model.py").write_text(model_text(), encoding="utf-8")
    words = ["plan", str(folder / GRAPH), "--mesh", "dp=2,tp=2", "--hardware", "a100-80g-sxm"]
    assert commands.main([*words, "--strategy", "megatron", "--out", str(folder / "pkg")]) == 0
    plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    (folder / PROFILE).write_text(plan["hardware_text"], encoding="utf-8")


def model_text(
    forward: str = "return self.layer(x).sum()", build: str = "pass", top: str = "", bottom: str = ""
) -> str:
    return MODEL.format(forward=forward, build=build, top=top, bottom=bottom)


def check(
    row: Row, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the row in a copy of the good files."""
    folder, temporary = tmp_path / "w", tmp_path / "t"
    shutil.copytree(good, folder)
    temporary.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if row.damage is not None:
        row.damage(folder)
    before = state(tmp_path)
    capsys.readouterr()
    code = commands.main(shlex.split(row.typed))
    printed = capsys.readouterr()
    said = [line for line in printed.err.splitlines() if not line.startswith(UNDER_WAY)]
    assert code == row.code, printed.err
    assert row.says in printed.err, printed.err
    assert [line for line in said if line.startswith("autoshard: ")] == said[:1], printed.err
    assert "\n  try: " in printed.err, printed.err
    assert "Traceback" not in printed.err and "this is a bug" not in printed.err, printed.err
    assert len(printed.err) < 3000, "one sentence"
    assert printed.out == ""
    assert state(tmp_path) == before, "something is left behind"
    assert not {"antigravity", "this"} & sys.modules.keys(), "something is imported that a file names"


def state(folder: Path) -> dict[str, bytes | str]:
    """Every file with its content, every other thing with its kind; torch's own caches left out."""
    entries: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if "__pycache__" in name or "torchinductor" in name:
            continue
        plain = path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 22
        entries[name] = path.read_bytes() if plain else "folder" if path.is_dir() else "other"
    return entries


# --- what is damaged ---


def text(name: str, content: str | bytes) -> Damage:
    """The file holds this instead."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def swap(name: str, old: str, new: str) -> Damage:
    """The first `old` of a text file becomes `new`."""

    def damage(folder: Path) -> None:
        content = (folder / name).read_text(encoding="utf-8")
        assert old in content, old
        (folder / name).write_text(content.replace(old, new, 1), encoding="utf-8")

    return damage


def at(name: str, place: str, value: Any) -> Damage:
    """A value of a JSON file: `at(GRAPH, "tensors.0.shape", [8])`; `...` removes it."""

    def damage(folder: Path) -> None:
        data = json.loads((folder / name).read_text(encoding="utf-8"))
        *path, last = [int(key) if key.lstrip("-").isdigit() else key for key in place.split(".")]
        inner = data
        for key in path:
            inner = inner[key]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
        (folder / name).write_text(json.dumps(data), encoding="utf-8")

    return damage


def thing(name: str, kind: str) -> Damage:
    """Instead of the file there is a folder, a pipe that nobody writes to, a symbolic link to itself or to nothing, an
    endless device, or nothing."""

    def damage(folder: Path) -> None:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        targets = {"loop": path.name, "dangling": "nowhere", "endless": "/dev/zero", "empty": "/dev/null"}
        if kind in targets:
            path.symlink_to(targets[kind])
        elif kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)

    return damage
