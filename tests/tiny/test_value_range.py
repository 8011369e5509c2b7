"""Where whole numbers of a graph go: bounds that tensors hold are not known."""

from __future__ import annotations

import pytest

from autoshard.rules.value_range import GIVEN, Lengthened
from tests.rule_graphs import Shape, one_op


@pytest.mark.parametrize(
    ("operands", "numbers", "known"),
    [
        ([(4,)], {"min": 0, "max": 3}, True),
        ([(4,)], {"min": 0}, True),
        ([(4,), None, None], {"max": 3}, True),
        ([(4,), (4,)], {}, False),
        ([(4,), None, (4,)], {}, False),
    ],
)
def test_clamped(operands: list[Shape | None], numbers: dict[str, int], known: bool) -> None:
    graph, op = one_op("aten.clamp", operands, [(4,)], tuple(range(len(operands))), **numbers)
    assert Lengthened(graph, {}).range(op.results[0]) == (GIVEN if known else None)
