"""How much of a block backward runs again, of the emitted package, against what its predicted seconds count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import BlockPolicy, StepPlan
from autoshard.ir.program import Compute, Program
from autoshard.program.instruction_storage import run_again
from autoshard.program.lower import lower
from autoshard.search.whole_step import repeated_blocks
from autoshard.simulation.program_step import is_expensive
from autoshard.verification.case import written
from autoshard.verification.ranks.loaded_package import load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from tests.forced import forced_plan
from tests.single.test_recompute import SPEC

PRODUCTS = frozenset(("mm", "addmm"))


class Products(TorchDispatchMode):
    """How many products ran."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in PRODUCTS
        return func(*args, **(kwargs or {}))


def products_in_backward(dropout: float, keep: str) -> tuple[int, Program]:
    graph = capture(SPEC, {"dropout": dropout})
    plan = forced_plan(graph, Mesh.parse("dp=1"), lambda *_: True)
    policies = tuple(BlockPolicy(path, keep) for path in repeated_blocks(graph))
    plan = replace(plan, step=StepPlan(recompute=policies))
    program = lower(plan, graph)
    with written(emit(program, plan, graph)) as folder:
        package = load_package(Path(folder))

    def run(mesh: Any) -> int:
        model = package.model.build_model(mesh)
        package.runtime.init_parameters(model, 0)
        ids = torch.randint(0, 40, (4, 8))
        loss = model(ids, ids)  # and logits
        with Products() as products:
            loss[0].backward()
        return products.count

    return run_lockstep({"dp": 1}, run, mesh_type=package.runtime.ParallelMesh)[0], program


@pytest.mark.parametrize(("dropout", "blocks_products"), [(0.1, 4), (0.0, 3)])
def test_backward_runs_a_block_up_to_the_last_of_which_something_is_kept(dropout: float, blocks_products: int) -> None:
    """Without dropout nothing is kept behind the last product, which is then not run again."""
    usual, _ = products_in_backward(dropout, "all")
    found, program = products_in_backward(dropout, "input")
    graph, steps = capture(SPEC, {"dropout": dropout}), program.instructions
    counted = 0
    for path in repeated_blocks(graph):
        own = [i for i, step in enumerate(steps) if step.module.startswith(f"{path}.")]
        run = run_again(steps, own, graph)
        linear = [i for i in run if isinstance(step := steps[i], Compute) and "linear" in step.target]
        assert len(linear) == blocks_products and all(is_expensive(steps[i].target) for i in linear)
        counted += len(linear)
    assert found - usual == counted
