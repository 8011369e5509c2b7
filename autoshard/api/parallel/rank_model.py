"""Model of this rank: the source that emission writes, run from memory on the runtime that packages get a copy of."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard.emit import header_of, runtime
from autoshard.emit.model_file import model_file
from autoshard.emit.runtime import ParallelMesh, assign, local, sharding
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.ir.plan_json import plan_hash
from autoshard.ir.program import Program, ProgramParameter
from autoshard.program.module_scopes import random_index

_OTHER = "parallelize the model that was planned"
_RUNNING = threading.Lock()


@dataclass(frozen=True, eq=False)
class RankModel:
    """`module` takes this rank's parts of the inputs and returns those of the outputs, the loss first."""

    module: nn.Module
    source: ModuleType
    mesh: ParallelMesh
    program: Program
    graph: Graph

    @property
    def buckets(self) -> Any:
        return self.source.GRADIENT_BUCKETS

    @cached_property
    def draws(self) -> bool:
        """True if the model draws random numbers, as dropout does."""
        return any(random_index(step) is not None for step in self.program.instructions)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by original name, a tied one once."""
        return {sharding(p).name: p for p in self.module.parameters()}


def check_one_stage(plan: Plan) -> None:
    """UsageError for a plan with stages, and one whose devices take unequal shares of the batch."""
    if plan.step.batch_shares:
        message = "a model in a program of your own computes equal shares of the batch, and this plan's are not"
        raise UsageError(message, "autoshard.write and the package's train.py; or batch_shares='equal'")
    if plan.step.parts:
        message = f"a model in a program of your own runs on one stage, and this plan's step has {plan.step.stages}"
        raise UsageError(
            message, "autoshard.write and the package's train.py; or a plan without stages: micro_batches=8"
        )


def rank_model(plan: Plan, graph: Graph, program: Program, mesh: ParallelMesh) -> RankModel:
    """The model of this rank, uninitialised."""
    check_one_stage(plan)
    source = _run(model_file(program, header_of(program, plan, graph)), plan_hash(plan, graph))
    return RankModel(source.build_model(mesh), source, mesh, program, graph)


def _run(text: str, name: str) -> ModuleType:
    """Runs the text of a `model_parallel.py` as a module. Tracebacks show its lines; `runtime` is ours."""
    module = ModuleType(f"autoshard_plan_{name}")
    module.__file__ = file = f"<model_parallel.py of plan {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    code = compile(text, file, "exec", dont_inherit=True)
    with _RUNNING:
        hidden = sys.modules.get("runtime")
        sys.modules["runtime"] = runtime
        try:
            exec(code, module.__dict__)
        finally:
            sys.modules.pop("runtime")
            if hidden is not None:
                sys.modules["runtime"] = hidden
    sys.modules[module.__name__] = module
    return module


def fill(model: RankModel, state: Mapping[str, Tensor]) -> None:
    """Fills parameters and buffers from rank 0's whole tensors, one at a time: every rank has room for one.

    UsageError where the model has others than the plan.
    """
    known = {path for one, _ in stored(model.program) for path in (one.path, *one.ties)}
    unknown = sorted(set(state) - known)
    if unknown:
        raise UsageError(f"the plan has no parameter or buffer {unknown[0]}, which the model has", _OTHER)
    for tensor in (*model.module.parameters(), *model.module.buffers()):
        spec = sharding(tensor)
        name = next((name for name in (spec.name, *spec.ties) if name in state), None)
        if name is None:
            raise UsageError(f"the model has no parameter or buffer {spec.name}", _OTHER)
        whole = state[name]
        if tuple(whole.shape) != spec.shape:
            raise UsageError(
                f"{name}: expected shape {spec.shape}, got {tuple(whole.shape)}", "the model that was planned"
            )
        assign(tensor, _from_rank_0(whole, model.mesh, local(tensor).dtype))


def _from_rank_0(whole: Tensor, mesh: ParallelMesh, dtype: Any) -> Tensor:
    received = torch.empty(whole.shape, dtype=dtype, device=mesh.device)
    if mesh.rank == 0:
        if whole.is_meta:
            raise UsageError(
                "the model of rank 0 is on the meta device: it has no values", "model.to_empty and its init"
            )
        received.copy_(whole.detach())
    if dist.get_world_size() > 1:
        dist.broadcast(received, src=0)
    return received


def stored(program: Program) -> tuple[tuple[ProgramParameter, bool], ...]:
    """Every parameter (True) and buffer (False) that the model stores."""
    return (*((p, True) for p in program.parameters), *((b, False) for b in program.buffers))
