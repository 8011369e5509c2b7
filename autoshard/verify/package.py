"""Load an emitted package as it lies in its folder, without leaving a trace in this process or in the folder."""

from __future__ import annotations

import importlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_LOADING = threading.Lock()


@dataclass(frozen=True)
class Package:
    """The modules of one folder; several packages, each with its own `runtime`, live in one process."""

    runtime: Any
    model: Any
    train: Any


def load_package(folder: Path) -> Package:
    """Imports runtime, model_parallel and train of `folder`, under private names."""
    with _LOADING, _private_imports(folder):
        modules = [importlib.import_module(name) for name in ("runtime", "model_parallel", "train")]
    return Package(*modules)


@contextmanager
def _private_imports(folder: Path) -> Iterator[None]:
    """Imports come from `folder` first; its modules vanish from `sys.modules` afterwards, what they hid comes back.

    Compiled files go to a folder of their own: a stale one could stand for an edited source, a new one would litter.
    """
    own = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    hidden = _take(own)
    prefix = sys.pycache_prefix
    with tempfile.TemporaryDirectory(prefix="autoshard-verify-") as cache:
        sys.path.insert(0, str(folder.resolve()))
        sys.pycache_prefix = cache
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.pycache_prefix = prefix
            sys.path.remove(str(folder.resolve()))
            _take(own)
            sys.modules.update(hidden)


def _take(names: set[str]) -> dict[str, ModuleType]:
    """Removes these modules and their submodules from `sys.modules`."""
    found = [name for name in sys.modules if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in found}
