"""What a norm holds only while it runs, by hand, in multiples of its input."""

from __future__ import annotations

import pytest

from autoshard.costs.temporaries import temporary
from autoshard.ir.layout import Layout
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.variant_record import Temporary
from tests.rule_graphs import one_op


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("target", "operands"),
    [("layer_norm", "xww"), ("layer_norm", "x--"), ("layer_norm", "x"), ("rms_norm", "xw")],
)
def test_a_norm_whose_dim_is_cut(target: str, operands: str, dtype: str) -> None:
    """Backward: the gradient before a weight, and all products of its size but one: one of two, of rms none. In half
    precision those products are in float32, and forward and backward hold what is made of the input in float32."""
    x, weight = LocalTensor((4, 8), dtype, True), LocalTensor((8,), dtype, True)
    given = tuple({"x": x, "w": weight, "-": None}[letter] for letter in operands)
    _, op = one_op(f"aten.{target}", [None if own is None else own.shape for own in given], [x.shape])
    layouts = tuple(None if own is None else Layout.parse(f"S{len(own.shape) - 1}") for own in given)
    found = temporary(Mesh.parse("tp=2"), op, f"parallel_{target}", given, layouts, (x,))
    half = x.bytes if dtype == "bfloat16" else 0
    wide = x.numel * 4
    before_weight = x.bytes if "w" in operands else 0
    assert found == Temporary(2 * half, before_weight + wide * (target == "layer_norm") + 6 * half)
