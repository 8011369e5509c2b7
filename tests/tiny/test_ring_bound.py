"""Attention in a ring, as a resource of the step's bound and in the simulated step."""

from __future__ import annotations

import math

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.formulation.formulate import formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.formulation.step_resources import step_resources
from autoshard.ir.graph import Graph, Op, Parameter, Saved, Tensor
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import objective
from autoshard.solvers.heuristics.random_plans import random_choice
from tests.step_times import step_seconds


def ring_graph(length: int) -> Graph:
    """An attention whose operands are made of one input."""
    shape = (1, 8, length, 64)
    tensors = [
        Tensor("x", shape, "bfloat16", True),
        Tensor("t", shape, "bfloat16"),
        Tensor("y", shape, "bfloat16", True),
        Tensor("loss", (), "bfloat16", True),
    ]
    parameters, ops = [], []
    for name in "qkv":
        tensors += [Tensor(f"w_{name}", (64,), "bfloat16", True), Tensor(name, shape, "bfloat16", True)]
        parameters.append(Parameter(f"w_{name}", f"w_{name}"))
        ops.append(Op(name, "aten.mul", ("x", f"w_{name}"), (), (name,), "", "a.py:1", Saved((0, 1))))
    target, causal = "aten.scaled_dot_product_attention", (("is_causal", True),)
    ops.append(Op("y", target, ("q", "k", "v"), causal, ("y",), "", "a.py:2", Saved((0, 1, 2), (0,))))
    ops.append(Op("loss", "aten.mse_loss", ("y", "t"), (("reduction", 1),), ("loss",), "", "a.py:3", Saved((0, 1))))
    return Graph("ring", tuple(tensors), ("x", "t"), tuple(parameters), (), tuple(ops), ("loss",), "loss")


@pytest.mark.parametrize("variant", ["ring_attention", "balanced_ring_attention"])
def test_rings_over_two_axes_take_turns_on_links_of_alike_speed(variant: str) -> None:
    """In a node over PCIe, and between nodes: neither hides the other, in the bound as in the step."""
    hardware, mesh = load_hardware("l40s-48g"), Mesh.parse("a=2,b=8")
    formulation = formulate(PlanningContext(ring_graph(16384), mesh, hardware))
    number, site = next((n, site) for n, site in enumerate(formulation.sites) if site.kind == "op" and site.name == "y")
    both = [s.variant == variant and str(s.operands[1]) == "S2 S2" for s in site.strategies].index(True)
    resources = step_resources(formulation)
    for seed in range(3):
        choice = list(random_choice(formulation.problem, seed))
        choice[number] = both
        assert math.isfinite(objective(formulation.problem, choice))
        least = resources.longest(resources.least_used(choice))
        assert 0.3 < least / step_seconds(formulation, tuple(choice)) <= 1 + 1e-9
