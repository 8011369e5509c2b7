"""How much of a block backward runs again, of the emitted package, against what its predicted seconds count."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.emit.runtime import recompute
from autoshard.errors import UsageError
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import BlockPolicy, StepPlan
from autoshard.ir.program import Compute, Program
from autoshard.program.instruction_storage import (
    LINEAR,
    WITH_PRODUCTS,
    is_expensive,
    rerun_ids,
    reused_results,
    some_results,
)
from autoshard.program.lower import lower
from autoshard.program.step_check import check_step
from autoshard.rules.cases import ALL
from autoshard.rules.proof.operator_call import call
from autoshard.rules.proof.rule_proof import OpCase
from autoshard.search.fixed_step import repeated_blocks
from autoshard.simulation.steps.program_step import step_costs
from autoshard.verification.case import check_files, written
from autoshard.verification.ranks.loaded_package import load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from tests.forced import forced_plan
from tests.random_models import sample
from tests.single.test_recompute import SPEC, alive_after_forward, captured, case, planned
from tests.small_models import spec as small

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


@pytest.mark.slow
@pytest.mark.parametrize(("dropout", "blocks_products"), [(0.1, 4), (0.0, 3)])
def test_backward_runs_a_block_up_to_the_last_of_which_something_is_kept(dropout: float, blocks_products: int) -> None:
    """Without dropout nothing is kept behind the last product, which is then not run again."""
    usual, _ = products_in_backward(dropout, "all")
    products, program = products_in_backward(dropout, "input")
    graph, steps = capture(SPEC, {"dropout": dropout}), program.instructions
    counted = 0
    for path in repeated_blocks(graph):
        block = [i for i, step in enumerate(steps) if step.module.startswith(f"{path}.")]
        run = rerun_ids(steps, block, graph)
        linear = [i for i in run if isinstance(step := steps[i], Compute) and "linear" in step.target]
        assert len(linear) == blocks_products and all(is_expensive(steps[i].target) for i in linear)
        counted += len(linear)
    assert products - usual == counted


SOME = "some: 0 attn.c_attn, attention attn, 2 mlp.c_fc"


@pytest.mark.slow
def test_results_are_kept_one_by_one() -> None:
    """Of four linear layers of a block two are run again, as the predicted seconds have it; the code says which."""
    usual, _ = products_in_backward(0.1, "all")
    products, program = products_in_backward(0.1, SOME)
    steps, graph = program.instructions, capture(SPEC, {"dropout": 0.1})
    counted = 0
    for path in repeated_blocks(graph):
        block = [i for i, step in enumerate(steps) if step.module.startswith(f"{path}.")]
        results = some_results(steps, block, graph, path)
        assert list(results) == ["0 attn.c_attn", "attention attn", "1 attn.c_proj", "2 mlp.c_fc", "3 mlp.c_proj"]
        saved = reused_results(steps, block, SOME, graph, {})
        assert saved == {i for name in results if name in SOME for i in results[name]}
        ran = [step for i in rerun_ids(steps, block, graph) if i not in saved and isinstance(step := steps[i], Compute)]
        counted += sum(is_expensive(step.target) for step in ran)
    assert products - usual == counted == 2 * 3
    plan = replace(forced_plan(graph, Mesh.parse("dp=1"), lambda *_: True), step=program.step)
    text = emit(program, plan, graph)["model_parallel.py"]
    assert "            # kept: attn.c_attn, attn, mlp.c_fc" in text
    assert 'recomputed(block, self.random, hidden_states, keep=(0, "attention", 2))' in text


class Kept(TorchDispatchMode):
    """The operators that ran of those whose results a policy may keep."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran += [func] * (func in recompute.KEPT)
        return func(*args, **(kwargs or {}))


def kept_by_torch(op_case: OpCase) -> list[Any]:
    """Of a call of an operator; weights of linear layers are trained."""
    draw = random.Random(0)
    operands = [None if operand is None else sample(operand, draw) for operand in op_case.operands]
    for weight in operands[1:2] if op_case.target in LINEAR else ():
        assert weight is not None
        weight.requires_grad_()
    with Kept() as recorder:
        call(op_case.target, operands, dict(op_case.attributes))
    return recorder.ran


@pytest.mark.parametrize("target", sorted({case.target for case in ALL}))
def test_what_torch_keeps_by_a_policy_is_what_is_counted_as_dear(target: str) -> None:
    """Over the table: of a linear layer one product, of attention other operators, and none of what is not dear."""
    counted = is_expensive(target) or target in WITH_PRODUCTS
    for op_case in (op_case for op_case in ALL if op_case.target == target):
        ran = kept_by_torch(op_case)
        assert counted or not ran
        products = [func for func in ran if func in recompute.LINEAR]
        if target in LINEAR:
            assert len(products) == len(ran) == 1
        first = op_case.operands[0] if op_case.operands else None
        if target == "aten.scaled_dot_product_attention" and first is not None and len(first.shape) > 2:
            assert not products


@pytest.mark.slow
def test_results_are_not_kept_one_by_one_where_the_code_would_count_wrong() -> None:
    """A frozen weight may be a `bmm`; experts have products inside."""
    graph, steps = capture(SPEC, {"dropout": 0.1}), products_in_backward(0.1, "all")[1].instructions
    path = repeated_blocks(graph)[0]
    block = [i for i, step in enumerate(steps) if step.module.startswith(f"{path}.")]
    weight = next(op.operands[1] for op in graph.ops if op.module == f"{path}.mlp.c_fc")
    frozen = replace(
        graph, tensors=tuple(replace(t, requires_grad=t.requires_grad and t.name != weight) for t in graph.tensors)
    )
    assert some_results(steps, block, graph, path) and not some_results(steps, block, frozen, path)
    mixture = capture(small("mixtral"), {})
    program = lower(forced_plan(mixture, Mesh.parse("dp=1"), lambda *_: True), mixture)
    path = next(path for path in repeated_blocks(mixture))
    block = [i for i, step in enumerate(program.instructions) if step.module.startswith(f"{path}.")]
    assert any(isinstance(step := program.instructions[i], Compute) and step.target in LINEAR for i in block)
    assert not some_results(program.instructions, block, mixture, path)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [SOME, "some: 3 mlp.c_proj", "some: attention attn"])
def test_the_step_is_that_of_the_original(keep: str) -> None:
    graph = captured()
    policies = tuple(
        BlockPolicy(path, policy) for path, policy in zip(repeated_blocks(graph), (keep, "input", keep), strict=True)
    )
    plan = planned("tp=2", False, StepPlan(2, recompute=policies))
    proof = check_files(case(2), program := lower(plan, graph), emit(program, plan, graph))
    assert proof.passed, proof.failure


def test_a_policy_that_names_nothing_is_refused() -> None:
    for keep in ("some: ", "some: x attn", "some", "0 attn.c_attn"):
        step = StepPlan(recompute=(BlockPolicy("transformer.h.0", keep),))
        with pytest.raises(UsageError, match="keeps"):
            check_step(step, captured())


def test_bytes_between_forward_and_backward_are_those_predicted() -> None:
    """With dropout the CPU's attention is several operators: all keep the same of it."""
    pairs, blocks = [], repeated_blocks(captured())
    for keep in ("expensive", SOME, "some: attention attn"):
        plan = planned("dp=1", False, StepPlan(recompute=tuple(BlockPolicy(path, keep) for path in blocks)))
        costs = step_costs(plan, lower(plan, captured()), captured(), load_hardware("a100-80g-sxm")).parts[0]
        pairs.append((alive_after_forward(plan), costs.saved_bytes))
    assert pairs[0][1] > pairs[1][1] > pairs[2][1]
    assert [pair[0] - pairs[2][0] for pair in pairs] == [pair[1] - pairs[2][1] for pair in pairs]
