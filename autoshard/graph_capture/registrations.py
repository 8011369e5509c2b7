"""Which Python code registers the operators of a graph that are not torch's own, so that a package can run it too."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from torch._library.custom_ops import OPDEFS

from autoshard.graph_capture.load_model import FILE_PREFIX
from autoshard.ir.graph import OWN_NAMESPACES, Graph, Registration

_FIND = "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); print(s.origin if s else '')"


def note_registrations(graph: Graph) -> Graph:
    """The graph with the module of each operator that neither torch nor this package registers."""
    by_module: dict[str, list[str]] = {}
    for target in dict.fromkeys(op.target for op in graph.ops):
        if target.partition(".")[0] not in OWN_NAMESPACES:
            by_module.setdefault(_registering_module(target), []).append(target)
    return replace(
        graph, registrations=tuple(_registration(module, tuple(by_module[module])) for module in sorted(by_module))
    )


def _registering_module(target: str) -> str:
    """Module that registers an operator, by name; "" if not known."""
    qualified = target.replace(".", "::", 1)
    definition = OPDEFS.get(qualified)
    if definition is not None:
        return str(inspect.unwrap(definition._init_fn).__module__)
    kernel = torch._library.simple_registry.singleton.find(qualified).fake_impl.kernel
    return _module_at(kernel.source) if kernel is not None else ""


def _module_at(source: str) -> str:
    """The imported module of a place, `file:line`."""
    path = source.rpartition(":")[0]
    return next((name for name, module in [*sys.modules.items()] if getattr(module, "__file__", None) == path), "")


def _registration(name: str, targets: tuple[str, ...]) -> Registration:
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if module is None or not path or name == "__main__" or name.startswith("torch."):
        return Registration("", targets)  # a script may do anything when run again; torch stands for code it forgot
    if "." in name or hasattr(module, "__path__") or not path.endswith(".py") or _is_installed(module):
        return Registration(name, targets)
    return Registration(name.removeprefix(FILE_PREFIX), targets, importlib.util.decode_source(Path(path).read_bytes()))


def _is_installed(module: ModuleType) -> bool:
    """Does a fresh interpreter, started anywhere, find this module by its name?"""
    command = [sys.executable, "-P", "-c", _FIND, module.__name__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return False
    path = done.stdout.strip()
    return bool(path) and Path(path).resolve() == Path(str(module.__file__)).resolve()
