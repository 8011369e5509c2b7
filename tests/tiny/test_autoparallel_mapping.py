"""What is said of autoparallel's plans in autoshard's words, and back, is the same split of the same product."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from autoshard.ir.problem import Node, Problem, Value, objective
from autoshard.solvers.heuristics import brute_force
from benchmarks import autoparallel_carried, autoparallel_mapping, beside_autoparallel
from benchmarks.autoparallel_mapping import (
    COLUMNS,
    FORWARD,
    INNER,
    INPUT_GRADIENT,
    ROWS,
    WEIGHT_GRADIENT,
    WHOLE,
    Operator,
    Pair,
    Theirs,
    Wish,
)

ROWS_IN_ALL, IN, OUT = 4, 6, 8
LINEAR = Operator("linear", "aten.linear", "mlp.fc", (2, 2, OUT))
CONV = Operator("linear_in_out", "autoshard.linear_in_out", "attn.c", (2, 2, OUT))


def _local(split: str, half: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Input (rows, in), weight (out, in) and gradient of the result (rows, out) of one of two devices."""
    draw = np.random.default_rng(0)
    x, weight, gradient = (draw.standard_normal(s) for s in ((ROWS_IN_ALL, IN), (OUT, IN), (ROWS_IN_ALL, OUT)))
    cut = {
        ROWS: ((0, x), (0, gradient)),
        COLUMNS: ((0, weight), (1, gradient)),
        INNER: ((1, x), (1, weight)),
        WHOLE: (),
    }
    found = {id(array): np.split(array, 2, dim)[half] for dim, array in cut[split]}
    return tuple(found.get(id(array), array) for array in (x, weight, gradient))  # type: ignore[return-value]


def _product(product: str, in_out: bool, split: str, half: int) -> np.ndarray:
    x, weight, gradient = _local(split, half)
    if product == FORWARD:
        return x @ weight.T
    if product == INPUT_GRADIENT:
        return gradient @ weight
    return x.T @ gradient if in_out else gradient.T @ x


@pytest.mark.parametrize("op", [LINEAR, CONV])
@pytest.mark.parametrize("product", [FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT])
@pytest.mark.parametrize("placement", ["S0", "S1", "P", "R"])
def test_a_product_of_a_split_linear_lies_so(op: Operator, product: str, placement: str) -> None:
    found = autoparallel_mapping.splits(op, product, (placement,))
    assert found is not None
    in_out = autoparallel_mapping.LINEAR[op.target]
    halves = [_product(product, in_out, found[0], half) for half in range(2)]
    combined = {
        "S0": lambda: np.concatenate(halves, 0),
        "S1": lambda: np.concatenate(halves, 1),
        "P": lambda: halves[0] + halves[1],
        "R": lambda: halves[0],
    }[placement]()
    np.testing.assert_allclose(combined, _product(product, in_out, WHOLE, 0))


def test_a_result_and_its_split_are_one_thing() -> None:
    for split in itertools.product((ROWS, COLUMNS, INNER, WHOLE), repeat=2):
        assert autoparallel_mapping.splits_of_result(LINEAR, autoparallel_mapping.result_of(LINEAR, split)) == split
    assert autoparallel_mapping.splits_of_result(LINEAR, ("S1", "R")) is None  # the sequence: no rows of a flat matrix
    assert autoparallel_mapping.splits(LINEAR, FORWARD, ("P(avg)",)) is None


def test_words() -> None:
    assert autoparallel_mapping.plain("S2/3 R+ S0*64 P S1[10+20] R host") == ("S2", "R", "S0", "P", "S1", "R")
    assert autoparallel_mapping.module_path("L['self'].transformer.h[0].attn") == "transformer.h.0.attn"
    assert autoparallel_mapping.module_path("L['self']") == ""
    layers = ("model.layers.0.mlp", "transformer.h.11", "layers.3.weight", "model.norm", "lm_head", "conv1.weight", "")
    assert [autoparallel_mapping.in_layer(path) for path in layers] == [True] * 3 + [False] * 4
    text = autoparallel_mapping.pin("op", "linear", ("S0", "P"), ("dp", "tp"))
    assert text == "op:linear=Shard(0)@dp,Partial@tp"


def test_operators_are_matched_by_module_shape_and_order() -> None:
    flat = (4, OUT)
    norm = Operator("norm", "aten.rms_norm", "norm", (2, 2, IN))
    sums = [Operator(name, "aten.add", "block", (2, 2, IN)) for name in ("add", "add_1")]
    lone = Operator("add_2", "aten.add", "other", (2, 2, IN))
    nodes = [
        Operator("mm", "aten.mm.default", "mlp.fc", flat),
        Operator("mul", "aten.mul.Tensor", "norm", (2, 2, IN)),
        Operator("mul_1", "aten.mul.Tensor", "norm", (2, 2, IN)),
        Operator("sum", "aten.add.Tensor", "block", (2, 2, IN)),
        Operator("iota", "aten.add.Tensor", "block", (2,)),
        Operator("sum_1", "aten.add.Tensor", "block", (2, 2, IN)),
        Operator("sum_2", "aten.add.Tensor", "other", (2, 2, IN)),
        Operator("sum_3", "aten.add.Tensor", "other", (2, 2, IN)),
        Operator("mm_1", "aten.mm.default", "mlp.fc", (OUT, IN), forward=False),
        Operator("mm_2", "aten.mm.default", "mlp.fc", (4, IN), forward=False),
        Operator("mul_2", "aten.mul.Tensor", "norm", (2, 2, IN), forward=False),
    ]
    products = ((FORWARD, "mm"), (WEIGHT_GRADIENT, "mm_1"), (INPUT_GRADIENT, "mm_2"))
    assert autoparallel_mapping.pairs([LINEAR, norm, *sums, lone], nodes) == [
        Pair(LINEAR, products=products), Pair(norm, "mul_1"), Pair(sums[0], "sum"), Pair(sums[1], "sum_1")
    ]  # fmt: skip


def test_what_can_hold_together_is_kept_in_order() -> None:
    draw = random.Random(0)
    for _ in range(200):
        names = [str(n) for n in range(8)]
        apart = {frozenset(draw.sample(names, 2)) for _ in range(draw.randrange(8))} | {
            frozenset([draw.choice(names)]) for _ in range(draw.randrange(2))
        }
        possible = lambda some, apart=apart: not any(pair <= {w.node for w in some} for pair in apart)  # noqa: E731
        wishes = [Wish(draw.choice(("parameter", "aten.add", "aten.linear")), name, (0,)) for name in names]
        kept, left = autoparallel_mapping.joint(wishes, possible)
        expected: list[Wish] = []
        for wish in sorted(wishes, key=lambda w: ("parameter", "aten.linear", "aten.add").index(w.kind)):
            expected += [wish] if possible([*expected, wish]) else []
        assert kept == expected
        assert {w.node for w in kept} | {w.node for w in left} == set(names)
        assert possible(kept)


def test_without_a_checkout_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no checkout of github\.com/meta-pytorch/autoparallel in .*: clone it"):
        beside_autoparallel._their_plan(tmp_path, tmp_path / "none.pickle", "model.py:build", {}, "dp=2")


def test_a_restricted_problem_costs_what_agrees() -> None:
    """Two nodes, the second wants what the first can't be moved to: that wish goes, the other stays."""
    costs = np.array([[0.0, 1.0], [1.0, np.inf]])
    nodes = (Node("a", np.array([5.0, 1.0]), np.zeros(2)), Node("b", np.array([1.0, 0.0]), np.zeros(2)))
    every = np.arange(2)
    value = Value("", 0, (1,), every, (every,), costs, np.zeros(2), ((0, 0),))
    theirs = Theirs(Problem(nodes, (value,)), (0, 0), (), (), {}, {}, 0.0, 0.0, 0.0)
    wishes = [Wish("aten.add", "b", (1,)), Wish("parameter", "a", (1,))]
    kept, left = autoparallel_mapping.joint(wishes, lambda some: autoparallel_carried._possible(theirs, some))
    assert (kept, left) == ([wishes[1]], [wishes[0]])
    restricted = autoparallel_carried._restricted(theirs, kept)
    assert objective(restricted, (0, 0)) == np.inf
    assert brute_force.solve(restricted).choice == (1, 0)
