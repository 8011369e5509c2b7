"""Losses in whole models: weighted means over all devices, means over labels in any expression."""

from __future__ import annotations

import pytest
import torch

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.costs.temporaries import saved_difference
from autoshard.emit import emit
from autoshard.emit.runtime import parallel_cross_entropy
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Op
from autoshard.ir.layout import Layout
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.rules import Strategy
from autoshard.search.fixed_step import with_step
from autoshard.search.fixed_styles import random_plan
from autoshard.text.collective_lines import move_lines
from autoshard.verification.case import check_files, make_case
from tests.forced import check
from tests.label_models import LOSSES as LABEL_LOSSES
from tests.label_models import build
from tests.rule_graphs import one_op
from tests.slow import quick_at, slow
from tests.small_models import LOSSES, spec

# --- losses in whole models under plans that cut their rows and classes: weighted means are over all devices ---


def cut_losses(op: Op, strategy: Strategy) -> bool:
    """Every loss is cut on every axis."""
    is_loss = op.results and (op.target.endswith(("_loss", "_loss_nd", "_logits")) or "kl_div" in op.target)
    is_loss = is_loss or op.target == "aten.binary_cross_entropy"
    return not is_loss or all(choice.kind == "factor" for choice in strategy.choices)


@pytest.mark.parametrize(("mesh", "smoothing"), [slow("tp=2", 0.1), slow("dp=2,tp=2", 0.0), ("tp=3", 0.2)])
def test_weights_of_classes(mesh: str, smoothing: float) -> None:
    functions, largest = check(spec("weighted"), mesh, cut_losses, (1, 2), {"smoothing": smoothing})
    assert {"parallel_cross_entropy", "parallel_nll_loss"} <= functions
    assert largest < 1e-9


@pytest.mark.parametrize("kind", quick_at(LOSSES, 2))
def test_means_of_every_kind(kind: str) -> None:
    functions, largest = check(spec("regression"), "dp=2,tp=2", cut_losses, (1,), {"kind": kind})
    assert kind == "kl" or "parallel_loss" in functions  # a batch mean is a sum and a quotient
    assert largest < 1e-9


# --- means over labels keep their share of a step's labels, on one stage and on two ---


SPEC = f"{build.__code__.co_filename}:build"
RUN = ("scaled", "auxiliary", "the same twice", "stacked", "likelihood", "ignored", "masked", "positions")
NOT_COUNTED = ("unreduced", "of probabilities")


@pytest.mark.parametrize("name", quick_at(LABEL_LOSSES, 15))
def test_the_step_is_that_of_the_original(name: str) -> None:
    graph = capture(SPEC, {"name": name})
    plan = random_plan(PlanningContext(graph, Mesh.parse("tp=2"), load_hardware("cpu-local")), 1)
    one = with_step(plan, graph, StepRequest(micro_batches=3))
    program = lower(one, graph)
    files = emit(program, one, graph)
    assert files["model_parallel.py"].count("counted(") == len(program.label_counts)
    assert bool(program.label_counts) == (name not in NOT_COUNTED)
    two = with_step(plan, graph, StepRequest(micro_batches=2, stages=2))
    parts = [text for file, text in emit(lower(two, graph), two, graph).items() if file.startswith("part_")]
    assert sum(text.count("counted(") for text in parts) == len(program.label_counts)
    if name in RUN:
        case = make_case(SPEC, {"name": name}, graph, steps=2, micro_batches=3)
        proof = check_files(case, program, files)
        assert proof.passed, proof.failure


@pytest.mark.parametrize("shape", [(6, 10), (4, 10, 3)])
def test_what_a_cross_entropy_keeps_is_said(shape: tuple[int, ...]) -> None:
    """But for the number of labels."""
    x, labels = torch.randn(shape).bfloat16().requires_grad_(), torch.randint(10, (shape[0], *shape[2:]))
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda item: saved.append(item.nbytes) or item, lambda item: item):
        parallel_cross_entropy(x, labels, size=10)
    _, op = one_op("aten.cross_entropy_loss", [shape, tuple(labels.shape)], [()], (1,))
    operands = (LocalTensor(shape, "bfloat16", True), LocalTensor(tuple(labels.shape), "int64", False))
    said = saved_difference(
        Mesh.parse("dp=2"), op, "parallel_cross_entropy", operands, (Layout.parse("S0"),) * 2, operands[:1]
    )
    assert said.extra_bytes == sum(saved) - torch.float32.itemsize


def test_a_buffer_that_is_communicated_is_named_by_its_path() -> None:
    graph = capture(spec("weighted"), {"classes": 8})
    [buffer] = graph.buffers
    count = 0
    for seed in range(1, 9):
        plan = random_plan(PlanningContext(graph, Mesh.parse("tp=2"), load_hardware("cpu-local")), seed)
        for move in plan.redistributions:
            if move.tensor == buffer.tensor and (lines := move_lines([move], plan, graph)):
                assert lines[0].startswith("weights: ")
                count += 1
    assert count
