"""Verification of a plan against the very object that it is the plan of, in float64."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn

from autoshard.api.called_model import LiveModel
from autoshard.api.live_model import on_cpu
from autoshard.api.planned import PlannedModel
from autoshard.constraints.verify_request import MOST_PROCESSES, MOST_RANKS
from autoshard.emit import emit
from autoshard.ir.plan import Plan
from autoshard.verification.case import Backend, check_files, loaded_case
from autoshard.verification.comparison.proof import Proof
from autoshard.verification.sizing.dynamic_steps import size_words, step_sizes
from autoshard.verification.sizing.shorter_axes import counterpart
from autoshard.verification.verify_folder import by_rows


def verified(plan: PlannedModel, live: LiveModel, backend: Backend) -> Proof:
    """Proof of a plan of the object `live`, see `autoshard.verify`."""
    program, graph = plan.simulated.program, plan.graph
    run_plan: Plan = plan.plan
    if run_plan.mesh.size > MOST_RANKS:
        smaller = counterpart(run_plan, graph, graph, plan.hardware, MOST_RANKS)
        run_plan, program = smaller.plan, smaller.program
    sizes = step_sizes(graph)
    count, tables = run_plan.step.micro_batches, by_rows(run_plan)

    def load() -> tuple[nn.Module, tuple[Tensor, ...]]:
        real = on_cpu(live)
        return real.module, real.tensors

    case = loaded_case(load, graph, micro_batches=count, sizes=sizes, by_rows=tables)
    kind: Backend = "lockstep" if run_plan.devices > MOST_PROCESSES or dist.is_initialized() else backend
    proof = check_files(case, program, emit(program, run_plan, graph), kind, own_precision=True)
    proof = replace(proof, sizes=size_words(graph, sizes))
    return proof if run_plan is plan.plan else replace(proof, planned_mesh=str(plan.plan.mesh))
