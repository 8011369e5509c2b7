"""The view rule against a memory of plain indices: a reshape is a view exactly if strides can say it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir.graph import Op, Tensor
from autoshard.rules.algebra.view_strides import contiguous, viewed
from autoshard.rules.operators import record


def places(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Where each element lies, in row-major order."""
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in product(*map(range, shape))]


def some_view(shape: Sequence[int], wanted: list[int]) -> bool:
    """Brute force: do any strides over `shape` read the elements at `wanted`? They can only be the first steps."""
    steps = contiguous(shape)
    strides = [wanted[step] - wanted[0] if size > 1 else 0 for size, step in zip(shape, steps, strict=True)]
    return places(shape, strides) == wanted


SHAPES = st.sampled_from(
    [s for n in range(1, 5) for s in product((1, 2, 3, 4, 6, 12, 24), repeat=n) if math.prod(s) == 24]
)


@given(SHAPES, st.randoms(use_true_random=False), SHAPES)
def test_viewed(shape: tuple[int, ...], random: object, target: tuple[int, ...]) -> None:
    assert hasattr(random, "shuffle")
    order = list(range(len(shape)))
    random.shuffle(order)
    inner = contiguous([shape[d] for d in order])
    strides = tuple(inner[order.index(d)] for d in range(len(shape)))
    new_strides = viewed(shape, strides, target)
    wanted = places(shape, strides)
    assert (new_strides is not None) == some_view(target, wanted)
    if new_strides is not None:
        assert places(target, new_strides) == wanted


def test_expanded_dims() -> None:
    assert viewed((3, 4), (0, 1), (3, 2, 2)) == (0, 2, 1)
    assert viewed((3, 4), (0, 1), (12,)) is None
    assert viewed((), (), (1, 1)) is not None


@pytest.mark.parametrize(
    ("target", "attributes", "there"),
    [
        ("expand", {}, lambda x: np.broadcast_to(x, (5, 4, 2, 7, 3))),
        ("transpose", {"dim0": 1, "dim1": 3}, lambda x: x.swapaxes(1, 3)),
        ("permute", {"dims": (3, 0, 2, 1)}, lambda x: x.transpose(3, 0, 2, 1)),
        ("slice", {"dim": 3, "step": 2}, lambda x: x[..., ::2]),
        ("select", {"dim": 1}, lambda x: x[:, 0]),
    ],
)
def test_views_have_the_strides_of_numpy(target: str, attributes: dict[str, Any], there: Callable[[Any], Any]) -> None:
    x = np.arange(24).reshape(2, 3, 4, 1).transpose(2, 0, 3, 1)
    before, after = (Tensor("t", array.shape, "float32", True) for array in (x, there(x)))
    view = record(f"aten.{target}").view
    assert view is not None
    strides = view(Op("y", f"aten.{target}", ("x",), tuple(attributes.items()), ("y",)), before, (1, 12, 1, 4), [after])
    assert strides == [tuple(step // x.itemsize for step in there(x).strides)]
