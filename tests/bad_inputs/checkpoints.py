"""Rows of checkpoints and weights files that run code, lie about what is in them, or are no files at all.

Every row is tried in a copy of a good checkpoint; `{marker}` of a planted command is a file that must not appear.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from tests.bad_inputs import Damage, text, thing

MARKER = "planted"
DEEP = "[" * 100_000
KEY = "model.head.weight"


class Runs:
    """Unpickled, it calls a function."""

    def __init__(self, function: Callable[..., Any] = os.system, *arguments: Any) -> None:
        self.call = function, arguments or (f"touch {MARKER}",)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@dataclass(frozen=True)
class Row:
    """`says` stands in what convert.py and train.py --resume say, each of which gives `code`."""

    about: str
    says: str
    damage: Damage
    verbs: tuple[str, ...] = ("convert", "resume")
    code: int = 2

    def __str__(self) -> str:
        return self.about


def index(change: Callable[[Metadata], Any]) -> Damage:
    """The index with a change; where that returns something, this instead."""

    def damage(folder: Path) -> None:
        meta = dcp.FileSystemReader(folder).read_metadata()
        other = change(meta)
        (folder / ".metadata").write_bytes(pickle.dumps(meta if other is None else other))

    return damage


def held(name: str, change: Callable[[Any], None]) -> Damage:
    """The entry of one tensor changed."""
    return index(lambda meta: change(meta.state_dict_metadata[name]))


def place(**values: Any) -> Damage:
    """Where one tensor lies."""

    def change(meta: Metadata) -> None:
        assert meta.storage_data is not None
        for entry, info in meta.storage_data.items():
            if entry.fqn == KEY:
                for key, value in values.items():
                    setattr(info, key, value)

    return index(change)


def as_bytes(meta: Metadata) -> None:
    """torch unpickles an entry of bytes without a check."""
    meta.state_dict_metadata[KEY] = BytesStorageMetadata()


def tensors(content: bytes | None) -> Damage:
    """Every file of tensors holds this instead; only the first bytes without."""

    def damage(folder: Path) -> None:
        for path in folder.glob("*.distcp"):
            old = path.read_bytes()
            path.write_bytes(old[:100] if content is None else content.ljust(len(old), b"\0"))

    return damage


def fifo(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def saved(name: str, value: Any) -> Damage:
    """A file that torch.save wrote."""
    held = io.BytesIO()
    torch.save(value, held)
    return text(name, held.getvalue())


def each(*damages: Damage) -> Damage:
    def damage(folder: Path) -> None:
        for change in damages:
            change(folder)

    return damage


def half(name: str) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


def training(**values: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "training.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return damage


def _clear(name: str) -> Callable[[Metadata], None]:
    return lambda meta: setattr(meta, name, None)


_INDEX, _SHARD = ".metadata", "__0_0.distcp"
_NOT_PART = "which is not part of a checkpoint"
INDEXES = [
    Row("os.system as the index", f"posix.system, {_NOT_PART}", text(_INDEX, pickle.dumps(Runs()))),
    Row("os.system by protocol 0", f"posix.system, {_NOT_PART}", text(_INDEX, pickle.dumps(Runs(), 0))),
    Row("eval", f"builtins.eval, {_NOT_PART}", text(_INDEX, pickle.dumps(Runs(eval, "open('planted', 'w')")))),
    Row("exec", f"builtins.exec, {_NOT_PART}", text(_INDEX, pickle.dumps(Runs(exec, "open('planted', 'w')")))),
    Row("__import__", f"builtins.__import__, {_NOT_PART}", text(_INDEX, pickle.dumps(Runs(__import__, "this")))),
    Row("torch.load", f"torch.serialization.load, {_NOT_PART}", text(_INDEX, pickle.dumps(Runs(torch.load, "x")))),
    Row("getattr", "expected Metadata", text(_INDEX, pickle.dumps(Runs(getattr, Metadata, "__init__")))),
    Row("a module of torch", f"torch._dynamo, {_NOT_PART}", text(_INDEX, b"ctorch\n_dynamo\n.")),
    Row("in the names", f"posix.system, {_NOT_PART}", index(lambda meta: setattr(meta, "planner_data", Runs()))),
    Row("in the storage", f"posix.system, {_NOT_PART}", index(lambda meta: setattr(meta, "storage_data", {1: Runs()}))),
    Row("in a size", f"posix.system, {_NOT_PART}", held(KEY, lambda entry: setattr(entry, "size", Runs()))),
    Row("in a version", f"posix.system, {_NOT_PART}", index(lambda meta: setattr(meta, "version", Runs()))),
    Row("code as an entry", f"lacks {KEY}", each(index(as_bytes), tensors(pickle.dumps(Runs()))), ("resume",)),
    Row("bytes as an entry", "lacks head.weight", index(as_bytes), ("convert",)),
    Row("an empty index", "is damaged: Ran out of input", text(_INDEX, "")),
    Row("text", "is damaged", text(_INDEX, "hello")),
    Row("JSON", "is damaged", text(_INDEX, "{}")),
    Row("a BOM", "is damaged", text(_INDEX, "\ufeff")),
    Row("truncated", "is damaged", half(_INDEX)),
    Row("a dict", "it has dict, expected Metadata", index(lambda _: {"state_dict_metadata": {}})),
    Row("another record", "expected Metadata", index(lambda meta: meta.storage_meta)),
    Row("deep", "is damaged", text(_INDEX, b"(" * 100_000)),
    Row("no storage", "it has NoneType, expected dict", index(_clear("storage_data"))),
    Row("no tensors", "it has NoneType, expected dict", index(_clear("state_dict_metadata"))),
    Row("a path upwards", "which is no file of its folder", place(relative_path="../../secret")),
    Row("an absolute path", "which is no file of its folder", place(relative_path="/etc/passwd")),
    Row("no path", "which is no file of its folder", place(relative_path="")),
    Row("a file that is missing", "there is no file __9_9.distcp", place(relative_path="__9_9.distcp")),
    Row("a negative place", "a tensor lies at -1", place(offset=-1)),
    Row("a place beyond", "can't be read", place(offset=10**15)),
    Row("a place of text", "it has str, expected int", place(length="9")),
    Row("transforms", "its tensors are transformed", place(transform_descriptors=["zlib"])),
    Row("another shape", "head.weight", held(KEY, lambda entry: setattr(entry, "size", torch.Size([3, 3])))),
    Row("a huge shape", "head.weight", held(KEY, lambda entry: setattr(entry, "size", torch.Size([10**9, 10**9])))),
    Row("a shape as a list", "it has list, expected Size", held(KEY, lambda entry: setattr(entry, "size", [11, 8]))),
    Row("a negative shape", "a size is (-1,)", held(KEY, lambda entry: setattr(entry, "size", torch.Size([-1])))),
    Row("chunks of text", "it has str, expected list", held(KEY, lambda entry: setattr(entry, "chunks", "no"))),
    Row("a folder", "it has no file .metadata", thing(_INDEX, "folder")),
    Row("a FIFO", "it has no file .metadata", fifo(_INDEX)),
]  # fmt: skip
_RESUME = ("resume",)
OTHERS = [
    Row("os.system in a shard", "can't be read", tensors(pickle.dumps(Runs()))),
    Row("os.system in a shard by torch.save", "can't be read", saved(_SHARD, Runs())),
    Row("the start of a shard", "can't be read", tensors(None)),
    Row("an empty shard", "can't be read", text(_SHARD, "")),
    Row("a shard that is a folder", f"there is no file {_SHARD}", thing(_SHARD, "folder")),
    Row("a shard that is a loop", f"there is no file {_SHARD}", thing(_SHARD, "loop")),
    Row("a shard that is a FIFO", f"there is no file {_SHARD}", fifo(_SHARD)),
    *(
        Row(f"training.json {content[:9]!r}", "training.json", text("training.json", content), _RESUME)
        for content in ("", "[]", "{}", DEEP, "\ufeff{}", "\xff", '{"step": 1e999, "groups": [{}]}', "9" * 5000)
    ),
    Row("no training.json", "training.json is missing", thing("training.json", "missing"), _RESUME),
    Row("training.json a folder", "training.json is missing", thing("training.json", "folder"), _RESUME),
    Row("training.json a FIFO", "training.json is missing", fifo("training.json"), _RESUME),
    Row("a step of text", "training.json", training(step="1"), _RESUME),
    Row("a step below zero", "training.json", training(step=-1), _RESUME),
    Row("a seed of text", "training.json", training(seed="1"), _RESUME),
    Row("no groups", "training.json", training(groups=[]), _RESUME),
    Row("parameters in a group", "training.json", training(groups=[{"params": []}]), _RESUME),
    Row("a rate of text", "training.json", training(groups=[{"lr": "__import__('os')"}]), _RESUME),
    Row("groups of another run", "3 groups", training(groups=[{}, {}, {}]), _RESUME),
]  # fmt: skip
LOADERS = [
    Row("os.system in a loader's state", "loader-0.pt can't be read", saved("loader-0.pt", Runs()), _RESUME),
    Row("os.system, pickled", "loader-0.pt can't be read", text("loader-0.pt", pickle.dumps(Runs())), _RESUME),
    Row("an empty loader", "loader-0.pt can't be read", text("loader-0.pt", ""), _RESUME),
    Row("a list", "loader-0.pt can't be read", saved("loader-0.pt", [1]), _RESUME),
    Row("a loader that is a folder", "loader-0.pt can't be read", thing("loader-0.pt", "folder"), _RESUME),
]
_BOTH = ("weights", "to-sharded")
_EMPTY_INDEX = '{"weight_map": {"a": %s}}'
WEIGHTS = [
    Row("w.pt", "w.pt can't be read", saved("w.pt", Runs()), _BOTH),
    Row("w.pt", "w.pt can't be read", saved("w.pt", {"head.weight": Runs()}), _BOTH),
    Row("w.bin", "w.bin can't be read", text("w.bin", pickle.dumps(Runs())), _BOTH),
    Row("w.pth", "w.pth can't be read", text("w.pth", pickle.dumps(Runs(), 0)), _BOTH),
    Row("w.pt", "w.pt can't be read", text("w.pt", ""), _BOTH),
    Row("w.pt", "w.pt can't be read", text("w.pt", "PK\x03\x04hello"), _BOTH),
    Row("w.pt", "w.pt holds no state dict", saved("w.pt", [1, 2]), _BOTH),
    Row("w.pt", "is no file", thing("w.pt", "folder"), ("to-sharded",)),
    Row("w.pt", "is no file", fifo("w.pt"), _BOTH),
    Row("w.pt", "w.pt", thing("w.pt", "loop"), _BOTH),
    Row("w.pt", "lacks", saved("w.pt", {"__import__('os').system('touch planted')": torch.ones(1)}), _BOTH),
    Row("w.pt", "head.weight", saved("w.pt", {
        "table.weight": torch.ones(11, 8), "free": torch.ones(8), "head.weight": torch.ones(1),
        "head.bias": torch.ones(11),
    }), _BOTH),
    Row("w.safetensors", "can't be read", text("w.safetensors", "hello"), _BOTH),
    Row("w.safetensors", "can't be read", text("w.safetensors", b"\xff" * 8 + b"{}"), _BOTH),
    Row("w.safetensors", "is no file", fifo("w.safetensors"), _BOTH),
    Row("w.txt", "expected .safetensors, .pt or .bin", text("w.txt", ""), _BOTH),
    *(
        Row("w.json", says, text("w.json", content), ("weights",))
        for content, says in (
            (_EMPTY_INDEX % '"../../secret.safetensors"', "expected files in its folder"),
            (_EMPTY_INDEX % '"/etc/passwd"', "expected files in its folder"),
            (_EMPTY_INDEX % "1", "expected files in its folder"),
            (_EMPTY_INDEX % '"none.safetensors"', "which is not in its folder"),
            ("[]", "is no index of safetensors files"),
            (DEEP, "is no index of safetensors files"),
        )
    ),
]  # fmt: skip
ROWS = [*INDEXES, *OTHERS, *LOADERS, *WEIGHTS]
