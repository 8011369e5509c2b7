"""Recurrent cells in a loop: hidden units cut, each gate's block alike, so that no weight travels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.graph_capture.capture import capture, capture_model
from autoshard.ir.graph import Op
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.rules import Strategy
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests.forced import check, variants
from tests.moved import moved_parameters
from tests.slow import quick_at, slow

CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}


class Loop(nn.Module):
    """A cell over the steps of (steps, batch, inputs), and a read-out of its last state."""

    def __init__(self, kind: str, inputs: int, hidden: int) -> None:
        super().__init__()
        self.cell = CELLS[kind](inputs, hidden)
        self.out = nn.Linear(hidden, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state = None
        for step in x:
            state = self.cell(step, state)
        last = state[0] if isinstance(state, tuple) else state
        return (self.out(last) - y).square().mean()


def loop(
    kind: str = "lstm", inputs: int = 5, hidden: int = 12, steps: int = 3, batch: int = 4
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Loop(kind, inputs, hidden), (torch.randn(steps, batch, inputs), torch.randn(batch, 3))


def cells_by(factor: str) -> Callable[[Op, Strategy], bool]:
    return lambda op, s: not op.target.endswith("_cell") or any(choice.factor == factor for choice in s.choices)


@pytest.mark.parametrize("factor", ["n", slow("b")])
@pytest.mark.parametrize("kind", ["lstm", slow("gru"), slow("rnn")])
@pytest.mark.parametrize("mesh", [slow("tp=3"), "dp=2,tp=2"])
def test_programs_are_right(kind: str, mesh: str, factor: str) -> None:
    functions, largest = check(f"{__file__}:loop", mesh, cells_by(factor), arguments={"kind": kind, "hidden": 7})
    assert factor == "b" or f"parallel_{kind}_cell" in functions
    assert largest < 1e-9


@pytest.mark.parametrize("kind", quick_at(["lstm", "gru"], 1))
def test_weights_of_a_wide_cell_stay_where_they_are(kind: str) -> None:
    """As an expert would: units over the devices, and only states travel."""
    sizes = {"kind": kind, "inputs": 1024, "hidden": 4096, "steps": 4, "batch": 32}
    graph = capture(f"{__file__}:loop", sizes)
    program = lower(search(graph, load_hardware("a100-80g-sxm"), SearchRequest(Mesh.parse("tp=4"))), graph)
    assert f"parallel_{kind}_cell" in variants(program)
    assert not {"cell.weight_ih", "cell.weight_hh"} & moved_parameters(program)


class Noise(nn.Module):
    """Reads one draw, and one tensor of zeros, twice in one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        noise, zeros = torch.rand(3, 4), torch.zeros(3, 4)
        loss: Tensor = (self.layer(x) + noise * noise + torch.hypot(zeros, zeros)).sum()
        return loss


def test_a_constant_read_twice_is_made_twice_but_random_numbers_are_drawn_once() -> None:
    graph = capture_model(Noise(), (torch.randn(3, 4),))
    targets = [op.target for op in graph.ops if not op.operands]
    assert targets.count("autoshard.random") == 1
    assert len(targets) == 3
