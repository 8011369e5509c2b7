"""A checkpoint's `.metadata`, read as data: torch pickles it, and unpickling calls whatever a file names.

Only the names below are known, and none of the real objects is called: each becomes a bare record; torch's own classes
are made from the records once everything was checked.
"""

from __future__ import annotations

import inspect
import json
import pickle
import warnings
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_KNOWN = {
    *((_METADATA, name) for name in (
        "Metadata", "StorageMeta", "MetadataIndex", "TensorStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    (_FILES, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # of a member of the enumeration, in some versions of Python
    *((module, f"{system}Path") for module in ("pathlib", "pathlib._local") for system in ("Posix", "Windows")),
}  # fmt: skip


class _Record:
    """Stand-in for an object of the file: its constructor's arguments, and its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, cast(Any, None)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class IndexReader(dcp.FileSystemReader):
    """torch's checkpoint reader, whose index is read by `read_index`."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return read_index(Path(self.path))


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A separate record class for each name, so that nothing in the file can change another."""
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) not in _KNOWN:
            raise ValueError(f"it names {module}.{name}, which is not part of a checkpoint: it may be code to run")
        return type(name, (_Record,), {})


def read_index(folder: str | Path) -> Metadata:
    """The tensors of a checkpoint and their positions. ValueError says what is wrong with it.

    Anything that is no tensor is left out: torch would unpickle it without a check.
    """
    folder = Path(folder)
    path = folder / ".metadata"
    if not path.is_file():
        raise ValueError(f"{folder} is no checkpoint: it has no file .metadata")
    try:
        with path.open("rb") as file:
            metadata = _metadata(_IndexReader(file).load(), folder)
    except _UNREADABLE as error:
        message = f"its .metadata is damaged: {str(error).partition(chr(10))[0] or type(error).__name__}"
        raise ValueError(f"the checkpoint {folder} can't be read: {message}") from None
    return metadata


def step_folders(folder: str | Path) -> list[Path]:
    """Checkpoints in a folder of --save, by step."""
    folders = [path for path in Path(folder).glob("step-*") if path.name[5:].isdecimal() and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name[5:]))


def newest_whole(folder: str | Path, prefix: str = "") -> Path | None:
    """The newest readable checkpoint there; for each later one, a printed line says why it is skipped."""
    for path in reversed(step_folders(folder)):
        try:
            read_index(path)
            json.loads((path / "training.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            print(f"{prefix}{path} is left out: {error}", flush=True)
        else:
            return path
    return None


_UNREADABLE = (
    ValueError, TypeError, KeyError, AttributeError, IndexError, EOFError, OverflowError, MemoryError, ImportError,
    RuntimeError, pickle.UnpicklingError,
)  # fmt: skip


def load_tensors(tensors: dict[str, Tensor], folder: str | Path, alone: bool = False) -> None:
    """`dcp.load` with this index. Raises ValueError if a file of the checkpoint is damaged. `alone`: independent of
    what other ranks read, since stages need other tensors."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # where it is meant: `alone`
    try:
        if not alone:
            dcp.load(tensors, storage_reader=IndexReader(folder))
        elif "no_dist" in inspect.signature(dcp.load).parameters:
            dcp.load(tensors, storage_reader=IndexReader(folder), no_dist=True)
        else:  # as torch 2.6 has it
            cast(Any, dcp).load_state_dict(tensors, IndexReader(folder), no_dist=True)
    except CheckpointException as error:
        cause = next(cause for cause, _ in error.failures.values())
        raise ValueError(f"the checkpoint {folder} can't be read: {fault_of(cause)}") from None


def fault_of(error: BaseException) -> str:
    """Error message for a file, without torch's advice to load it without checks."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, pickle.UnpicklingError):
        lines = [line for line in lines if "nsupported" in line or "GLOBAL" in line] or ["it holds more than tensors"]
    return lines[0].partition(". Please use")[0].strip()


def _metadata(read: Any, folder: Path) -> Metadata:
    state = _state(read, "Metadata")
    tensors = {}
    for name, entry in _of(state["state_dict_metadata"], dict).items():
        if type(entry).__name__ != "BytesStorageMetadata":
            tensors[_of(name, str)] = _tensor(_state(entry, "TensorStorageMetadata"))
    held = _of(state["storage_data"], dict)
    places = dict(_place(_state(key, "MetadataIndex"), _state(info, "_StorageInfo")) for key, info in held.items())
    places = {index: info for index, info in places.items() if index.fqn in tensors}
    for name in sorted({info.relative_path for info in places.values()}):
        if not (folder / name).is_file():
            raise ValueError(f"there is no file {name}")
    metadata = Metadata(state_dict_metadata=cast(Any, tensors))
    metadata.storage_data, metadata.storage_meta = places, StorageMeta()
    if isinstance(state.get("version"), str):
        cast(Any, metadata).version = state["version"]
    return metadata


def _tensor(state: dict[str, Any]) -> TensorStorageMetadata:
    (dtype, *_) = _record(state["properties"], "TensorProperties").state
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in _of(state["chunks"], list)]
    return TensorStorageMetadata(
        TensorProperties(dtype=_of(dtype, torch.dtype)),
        _size(state["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _place(index: dict[str, Any], info: dict[str, Any]) -> tuple[MetadataIndex, _StorageInfo]:
    path, offset, number = _of(info["relative_path"], str), index.get("offset"), index.get("index")
    if not path or Path(path).name != path:
        raise ValueError(f"it places a tensor in {path!r}, which is no file of its folder")
    if info.get("transform_descriptors"):
        raise ValueError("its tensors are transformed, as by compression")
    start, length = (_of(info[key], int) for key in ("offset", "length"))
    if min(start, length) < 0:
        raise ValueError(f"a tensor lies at {start}, {length} bytes long")
    location = MetadataIndex(
        _of(index["fqn"], str),
        None if offset is None else _size(offset),
        None if number is None else _of(number, int),
    )
    return location, _StorageInfo(path, start, length)


def _record(value: Any, name: str) -> _Record:
    if not isinstance(value, _Record) or type(value).__name__ != name:
        raise ValueError(f"it has {type(value).__name__}, expected {name}")
    return value


def _state(value: Any, name: str) -> dict[str, Any]:
    return cast(dict[str, Any], _of(_record(value, name).state, dict))


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it has {type(value).__name__}, expected {kind.__name__}")
    return value


def _size(value: Any) -> torch.Size:
    size = torch.Size(_of(value, torch.Size))
    if any(length < 0 for length in size):
        raise ValueError(f"a size is {tuple(size)}")
    return size
