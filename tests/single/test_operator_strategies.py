"""Strategies in the model's own code: nothing alone, pins once captured, errors that name dims and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.constraints.shard_counts import of_operands, operand_shapes
from autoshard.errors import CaptureError, UserError
from autoshard.ir import graph_json
from autoshard.program.lower import chosen_strategies

X = torch.randn(16, 32)


class Net(nn.Module):
    """The documented example: MatMul ((2, 4), (4, 1)) -> ReLU ((8, 1))."""

    def __init__(self, **matmul: Any) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(torch.randn(32, 16) / 6), nn.Linear(16, 8)
        self.matmul = matmul

    def forward(self, x: Tensor) -> Tensor:
        y = autoshard.operator(torch.matmul, **self.matmul)(x, self.w)
        with autoshard.strategy(in_strategy=((8, 1),)):
            y = torch.relu(y)
        return (self.head(y) ** 2).mean()


def counts(plan: autoshard.api.planned.PlannedModel, target: str) -> list[Any]:  # type: ignore[name-defined]
    chosen = chosen_strategies(plan.plan, plan.graph)
    ops = [op for op in plan.graph.ops if op.target == target]
    mesh = plan.plan.mesh
    return [of_operands(chosen[op.name], operand_shapes(plan.graph, op), mesh) for op in ops]


@pytest.mark.parametrize("mesh", ["a=2,b=4", "a=2,b=2,c=2"])
def test_the_documented_example(mesh: str) -> None:
    """Several axes give a count of 4 on the second mesh: the search decides which."""
    model = Net(in_strategy=((2, 4), (4, 1)))
    alone = model(X)
    plan = autoshard.plan(model, X, hardware="cpu-local", mesh=mesh)
    assert counts(plan, "autoshard.linear_in_out") == [((2, 4), (4, 1), None)]  # without a bias
    assert counts(plan, "aten.relu") == [((8, 1),)]
    assert {op.decided_by for op in plan.plan.ops if op.op in ("linear_in_out", "relu")} == {"pin"}
    assert autoshard.verify(plan).passed
    assert torch.equal(model(X), alone)
    assert graph_json.loads(graph_json.dumps(plan.graph)) == plan.graph
    assert all("\0" not in op.source for op in plan.graph.ops)


@pytest.mark.slow
def test_a_layer_a_result_and_a_layout() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(32, 16), nn.Linear(16, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = autoshard.operator(self.one, ((2, 2), (1, 2)), out_strategy=((4, 1),))(x)  # the bias is free
            return autoshard.operator(self.two, "Shard(1)@b")(x.relu()).square().mean()

    plan = autoshard.plan(Layers(), X, hardware="cpu-local", mesh="a=2,b=2")
    assert counts(plan, "aten.linear")[0][:2] == ((2, 2), (1, 2))
    moved = [r for r in plan.plan.redistributions if r.tensor == "linear"]
    assert [str(r.target) for r in moved] == ["S0 S0"]
    assert str(chosen_strategies(plan.plan, plan.graph)["linear_1"].results[0].placements[1]) == "S1"
    assert autoshard.verify(plan).passed


def test_what_is_wrong_with_a_strategy_in_the_code_is_told_with_its_line() -> None:
    class Zero(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = autoshard.operator(torch.relu, in_strategy=((0, 1),))(x)
            return output

    with pytest.raises(CaptureError, match="a dim is cut at least once, got 0") as raised:
        autoshard.capture(Zero(), torch.randn(4, 8), training=False)
    assert "test_operator_strategies.py" in raised.value.message and raised.value.hint.startswith("in_strategy=")


@pytest.mark.parametrize(
    ("strategies", "mesh", "words"),
    [
        ({"in_strategy": ((2, 4), (2, 1))}, "a=2,b=4", "must be sharded equally, got 4 and 2"),  # D4
        ({"in_strategy": ((4, 2), (2, 4))}, "a=2,b=4", "it needs 32 devices"),  # X5
        ({"in_strategy": ((8, 1), (1, 1), (1,))}, "a=2,b=4", "operand 2 is absent"),  # X7
        ({"in_strategy": ((0, 1), (1, 1))}, "a=2,b=4", "at least once, got 0"),  # X9
        ({"in_strategy": ((3, 1), (1, 1))}, "a=2,b=4", "3 shards are no product of axis sizes"),  # X3
        ({"in_strategy": ((2, 4), (4, 1)), "out_strategy": ((4, 1),)}, "a=2,b=4", "2 or 8 times .*, not 4"),  # X1
        ({"in_strategy": ((8,), (1, 1))}, "a=2,b=4", "has 2 dims"),
        ({"in_strategy": 4}, "a=2,b=4", "expected a tuple"),
        ({}, "a=2,b=4", "neither in_strategy nor out_strategy"),
    ],
)
def test_rejected(strategies: dict[str, Any], mesh: str, words: str) -> None:
    """The cases that the original rejects, each with its reason."""
    with pytest.raises(UserError, match=words) as caught:
        autoshard.plan(Net(**strategies), X, hardware="cpu-local", mesh=mesh)
    assert caught.value.hint


def test_an_operator_that_capture_leaves_out() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return autoshard.operator(nn.functional.dropout, ((2, 1),))(x, 0.5, False).cos()

    call: Callable[[], object] = lambda: autoshard.capture(Model(), X, training=False)  # noqa: E731
    with pytest.raises(UserError, match="is for an operator that capture leaves out"):
        call()


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.w)


def total(output: Tensor) -> Tensor:
    return output.sum()


W = torch.randn(64, 64)
BATCHED = torch.randn(8, 16, 32, 32)
TWO = {"mesh": "a=4", "stages": 2, "micro_batches": 4, "loss": total}
PAIR = nn.Sequential(Product(), Product())


class Pairs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.matmul(x, y)


@pytest.mark.parametrize(
    ("model", "inputs", "said", "words", "hint"),
    [
        (Product(), W, {"pins": ["op:matmul=((2, 4), (4, 1))"]}, "no op is called 'matmul'", "linear_in_out"),
        (Pairs(), (BATCHED, BATCHED), {"pins": ["op:matmul=((2,1,1,1),(1,1,1,4))"], "training": False},
         "dim 0 of operand 0 and dim 0 of .* are one loop .* got 2 and 1", "((2, 1, 1, 1), (2, 1, 1, 4))"),  # X11
        (nn.ReLU(), W, {"dataset_strategy": ((3, 1),), "training": False},
         "3 shards are no product of axis sizes of a=2,b=4: 1, 2, 4, 8", "((4, 1),) or ((2, 1),)"),  # X17
        (nn.ReLU(), W, {"dataset_strategy": ((8, 1), (8,)), "training": False}, "2 entries, but there are 1", ""),
        (nn.ReLU(), W, {"dataset_strategy": ((8,),), "training": False}, r"has 2 dims .*, but \(8,\) cuts 1", ""),
        (nn.ReLU(), W, {}, "no trainable parameter", "training=False"),
        (PAIR, W, TWO | {"stages": 16, "micro_batches": 16}, "3 operators can't be cut into 16 parts", ""),  # X21
        (PAIR, W, TWO | {"devices": 10}, "mesh a=4 has 4 devices on each of 2 stages, but devices=10", ""),  # X21
        (PAIR, W, TWO | {"pins": ["stage:0=1", "stage:1=0"]}, "a stage may not decrease along", ""),  # X23
        (PAIR, W, TWO | {"pins": ["0=((8, 1), (1, 1))"]}, "8 shards are no product of axis sizes", "((4, 1), "),  # X25
        (PAIR, W, TWO | {"micro_batches": 1}, "1 micro-batch for 2 stages", ""),  # F3
        (PAIR, W, {"stages": "auto"}, "a program has a fixed step", "--global-batch"),
        (PAIR, W, {"mode": "semi_auto_paralel"}, "unknown mode 'semi_auto_paralel'", "semi-auto"),
    ],
)  # fmt: skip
def test_rejected_with_its_reason(model: nn.Module, inputs: Any, said: dict[str, Any], words: str, hint: str) -> None:
    """Further ones, of plans."""
    with pytest.raises(UserError, match=words) as caught:
        autoshard.plan(model, inputs, hardware="cpu-local", **{"mesh": "a=2,b=4", **said})
    assert hint in caught.value.hint and caught.value.hint


def test_24_devices() -> None:
    """The original's recursive search asks for a power of two (X19); here any number will do."""
    plan = autoshard.plan(Product(), torch.randn(96, 64), hardware="a100-80g-sxm", devices=24, solver="recursive")
    assert plan.plan.mesh.size == 24
