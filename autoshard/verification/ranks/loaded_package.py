"""Loads an emitted package from its folder, without changes to this process or the folder."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from autoshard.errors import CheckError
from autoshard.graph_capture.tracing.source_lines import blame
from autoshard.system.guard import guarded_folder

_LOADING = threading.Lock()


@dataclass(frozen=True)
class RankTensors:
    """Local outputs of each micro-batch and, by original name, local gradients after their reduction and before
    clipping."""

    outputs: list[Any]
    gradients: dict[str, torch.Tensor]


class GradientRecorder:
    """Replaces the package's `compute_gradients`, which its `train_step` calls, and records each rank's results.

    `accumulate` replaces its `accumulate_gradients`.
    """

    def __init__(
        self, runtime: Any, compute_gradients: Any, accumulate_gradients: Any = None, shared: bool = False
    ) -> None:
        """`shared`: devices compute unequal shares of each micro-batch."""
        self.runtime, self.compute_gradients = runtime, compute_gradients
        self.accumulate_gradients, self.shared = accumulate_gradients, shared
        self.seen: dict[int, RankTensors] = {}

    def __call__(self, model: torch.nn.Module, mesh: Any, inputs: Any, **options: Any) -> Any:
        outputs = self.compute_gradients(model, mesh, inputs, **options)
        self._note(model, mesh, [outputs])
        return outputs

    def accumulate(self, model: torch.nn.Module, mesh: Any, micro_batches: Any, **options: Any) -> Any:
        """Calls `accumulate_gradients`, which returns the losses, and records what the model returns beside them."""
        seen: list[Any] = []
        watch = model.register_forward_hook(lambda _, inputs, result: seen.append(result))
        try:
            outputs = self.accumulate_gradients(model, mesh, micro_batches, **options)
        finally:
            watch.remove()
        each = [result if isinstance(result, tuple) else (result,) for result in seen if not self.shared]
        self._note(model, mesh, each or outputs)
        return outputs

    def _note(self, model: torch.nn.Module, mesh: Any, outputs: list[Any]) -> None:
        gradients = {self.runtime.sharding(p).name: self._local(p) for p in model.parameters() if p.requires_grad}
        copies = tree_map_only(torch.Tensor, lambda x: x.detach().clone(), outputs)  # one may be a parameter
        self.seen[mesh.global_rank] = RankTensors(copies, gradients)

    def _local(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        local: torch.Tensor = self.runtime.local(gradient)
        return local.detach().clone()

    def take(self, rank: int) -> RankTensors:
        if rank not in self.seen:
            message = "train_step in train.py no longer calls compute_gradients, so its gradients can't be seen"
            raise CheckError(message, "the call back into train_step, or the package made again")
        return self.seen.pop(rank)


@dataclass(frozen=True)
class LoadedPackage:
    """Modules of one folder; several packages, each with a separate `runtime`, live in one process."""

    runtime: Any
    model: Any
    train: Any
    recorder: GradientRecorder
    batches: Any = None
    initial: Any = None
    evaluation: Any = None
    server_plan: Any = None
    server_run: Any = None  # of a package for parameter servers


def load_package(folder: Path) -> LoadedPackage:
    """Imports runtime, model_parallel and train of `folder`, under private names."""
    with _LOADING, _private_imports(folder):
        modules: list[Any] = [importlib.import_module(name) for name in ("runtime", "model_parallel", "train")]
        others = [_if_there(folder, name) for name in ("batches", "initial", "evaluation", "server_plan")]
        run = importlib.import_module("runtime.servers.server_run") if others[-1] is not None else None
    runtime, model, train = modules
    accumulate = getattr(train, "accumulate_gradients", None)  # not there in packages of older versions
    recorder = GradientRecorder(
        runtime, train.compute_gradients, accumulate, getattr(model, "BATCH_SHARES", None) is not None
    )
    train.compute_gradients, train.accumulate_gradients = recorder, recorder.accumulate
    batches, initial, evaluation, plan = others
    return LoadedPackage(runtime, model, train, recorder, batches, initial, evaluation, plan, run)


def _if_there(folder: Path, name: str) -> Any:
    """Module `name` of the package; None if it has none, as in older versions."""
    return importlib.import_module(name) if (folder / f"{name}.py").exists() else None


@contextmanager
def _private_imports(folder: Path) -> Iterator[None]:
    """Imports come from `folder` first; afterwards its modules vanish from `sys.modules`, those they hid return.

    Compiled files go to a separate folder: a stale one could stand for an edited source, a new one would litter.
    """
    modules = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    hidden = _take(modules)
    prefix = sys.pycache_prefix
    with guarded_folder("autoshard-verify-") as cache:
        sys.path.insert(0, str(folder.resolve()))
        sys.pycache_prefix = str(cache)
        importlib.invalidate_caches()
        try:
            yield
        except SystemExit as error:
            raise ImportError(blame(error)) from error
        finally:
            sys.pycache_prefix = prefix
            sys.path.remove(str(folder.resolve()))
            _take(modules)
            sys.modules.update(hidden)


def _take(names: set[str]) -> dict[str, ModuleType]:
    """Removes these modules and their submodules from `sys.modules`."""
    loaded = [name for name in sys.modules if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in loaded}
