"""Weights of the original model in safetensors files, of which each rank reads its part.

One file, a folder, or the index of a model split into several files (`model.safetensors.index.json`), as Hugging Face
saves them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

INDEX = "model.safetensors.index.json"


class SavedTensor:
    """A tensor in a file; `self[...]` reads only that part."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        self.shape = tuple(file.get_slice(name).get_shape())

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        whole = not self.shape or not part  # a number has no slice
        read: Tensor = self._file.get_tensor(self._name) if whole else self._file.get_slice(self._name)[part]
        return read


class WeightFiles(Mapping[str, SavedTensor]):
    """Names to tensors of all files. Only headers are read."""

    def __init__(self, path: str | Path) -> None:
        """Raises OSError, ImportError, or ValueError for a damaged or missing file."""
        self._files: dict[str, Any] = {}
        for file in files_of(Path(path)):
            opened = _opened(file)
            self._files |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> SavedTensor:
        return SavedTensor(self._files[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def files_of(path: Path) -> list[Path]:
    """Safetensors files that `path` stands for."""
    if path.is_dir():
        if not (path / INDEX).exists():
            files = sorted(path.glob("*.safetensors"))
            if not files:
                raise ValueError(f"{path} holds no .safetensors file")
            return files
        path = path / INDEX
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file")
    if path.suffix != ".json":
        return [path]
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path.name} is no index of safetensors files") from None
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise ValueError(f"{path.name} names {outside[0]!r}, expected files in its folder")
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise ValueError(f"{path.name} names {missing[0]}, which is not in its folder")
    return [path.parent / name for name in names]


def _opened(file: Path) -> Any:
    try:
        import safetensors
    except ImportError:
        raise ImportError("a .safetensors file needs the package safetensors: pip install safetensors") from None
    try:
        return safetensors.safe_open(file, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file.name} can't be read: {str(error).partition(chr(10))[0]}") from None
