"""What kernels of the runtime hold while they run, and keep for backward, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.costs.temporaries import saved_difference, temporary
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
    inputs = tuple({"x": x, "w": weight, "-": None}[letter] for letter in operands)
    _, op = one_op(f"aten.{target}", [None if tensor is None else tensor.shape for tensor in inputs], [x.shape])
    layouts = tuple(None if tensor is None else Layout.parse(f"S{len(tensor.shape) - 1}") for tensor in inputs)
    held = temporary(Mesh.parse("tp=2"), op, f"parallel_{target}", inputs, layouts, (x,))
    half = x.bytes if dtype == "bfloat16" else 0
    wide = x.numel * 4
    before_weight = x.bytes if "w" in operands else 0
    assert held == Temporary(2 * half, before_weight + wide * (target == "layer_norm") + 6 * half)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_keeps_the_keys_that_it_gathers_and_its_mask(causal: bool) -> None:
    """Each of two devices has half of the queries and of the keys: it keeps its keys and values side by side, and the
    mask of its queries and all keys in the dtype of the scores."""
    q, k = LocalTensor((2, 3, 4, 5), "bfloat16", True), LocalTensor((2, 3, 6, 5), "bfloat16", True)
    whole = [(2, 3, 8, 5), (2, 3, 12, 5), (2, 3, 12, 5)]
    _, op = one_op("aten.scaled_dot_product_attention", [*whole], [whole[0]], is_causal=causal)
    saved = saved_difference(Mesh.parse("sp=2"), op, "parallel_attention", (q, k, k), (Layout.parse("S2"),) * 3, (q,))
    assert saved.without == (1, 2) and saved.more_bytes == 2 * k.bytes + causal * 4 * 12 * 2


def test_a_tensor_multiplied_by_itself_has_two_gradients_before_their_sum() -> None:
    x = LocalTensor((4, 8), "float32", True)
    _, op = one_op("aten.mul", [x.shape, x.shape], [x.shape])
    for names, more in ((("x0", "x1"), 0), (("x0", "x0"), x.bytes)):
        same = replace(op, operands=names)
        held = temporary(Mesh.parse("dp=1"), same, "", (x, x), (Layout.parse("R"),) * 2, (x,))
        assert held == Temporary(0.0, more)
