"""What the problem offers where a tensor is stored."""

from __future__ import annotations

from autoshard.cluster.hardware import load_hardware
from autoshard.formulation.formulate import formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.graph import Graph, Op, Parameter, Tensor
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import split


def test_a_buffer_is_stored_only_as_it_can_be_held_unflattened() -> None:
    """A view of a table of 16 as (4, 4), cut on both dims, asks for `S0 S0/4`: two kinds of shard on one dim."""
    tensors = (Tensor("table", (16,), "float32"), Tensor("view", (4, 4), "float32"))
    op = Op("view", "aten.reshape", ("table",), (("shape", (4, 4)),), ("view",))
    graph = Graph("hand", tensors, (), (), (Parameter("table", "table"),), (op,), ("view",), None)
    mesh = Mesh.parse("dp=2,tp=2")
    formulation = formulate(PlanningContext(graph, mesh, load_hardware("a100-80g-sxm")))
    requested = {s.operands[0] for site in formulation.sites if site.kind == "op" for s in site.strategies}
    assert Layout.parse("S0 S0/4") in requested
    (stored,) = [site.layouts for site in formulation.sites if site.kind == "buffer"]
    assert Layout.parse("S0 R") in stored and Layout.parse("R S0/4") in stored
    for layout in stored:
        split((16,), layout)
