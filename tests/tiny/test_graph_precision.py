"""Mixed precision as casts in the graph: where they stand, that they are shared, and what stays as it is."""

from __future__ import annotations

import pytest

from autoshard.errors import UsageError
from autoshard.graph_capture.training.float8_layers import GROUPED, HEAD, ROUTER, UNEVEN, excluded_from_float8
from autoshard.graph_capture.training.precision import apply_precision, result_dtype
from autoshard.ir.graph import Graph, Tensor
from autoshard.ir.graph_check import check
from tests.tiny.test_graph_passes import read, write

MODEL = """x:f[2,4] xi:i[2] w:f[4,4] wb:f[4] wn:f[4]
  a:f[2,4] = aten.linear(x, w, wb)
  b:f[2,4] = aten.relu(a)
  c:f[2,4] = aten.linear(b, w, None)
  d:f[2,4] = aten.add(c, x, alpha=1)
  e:f[2,4] = aten.layer_norm(d, wn, wb, normalized_shape=(4,), eps=1e-05)
  f:f[2,4] = aten.linear(e, w, None)
  g:f[2,4] = aten.layer_norm(f, wn, wb, normalized_shape=(4,), eps=1e-05)
  h:f[2,4] = aten.pow(f, exponent=3)
  i:f[] = aten.cross_entropy_loss(f, xi, None, reduction=1)
  -> g h i"""


def dtypes(graph: Graph) -> dict[str, str]:
    return {name: graph.tensor(name).dtype for op in graph.ops for name in op.results}


def test_fp32_changes_nothing() -> None:
    graph = read(MODEL)
    assert apply_precision(graph, "fp32") == graph


def test_bf16_mixed() -> None:
    graph = apply_precision(read(MODEL), "bf16-mixed")
    check(graph)
    assert [line.partition(" = ")[2] for line in write(graph)[:-1]] == [
        "aten.to(x, dtype=bfloat16)", "aten.to(w, dtype=bfloat16)", "aten.to(wb, dtype=bfloat16)",
        "aten.linear(x_bfloat16, w_bfloat16, wb_bfloat16)", "aten.relu(a)", "aten.linear(b, w_bfloat16, None)",
        "aten.add(c, x, alpha=1)", "aten.layer_norm(d, wn, wb, normalized_shape=(4,), eps=1e-05)",
        "aten.to(e, dtype=bfloat16)",        "aten.linear(e_bfloat16, w_bfloat16, None)", "aten.to(f, dtype=float32)",
        "aten.layer_norm(f_float32, wn, wb, normalized_shape=(4,), eps=1e-05)", "aten.pow(f_float32, exponent=3)",
        "aten.cross_entropy_loss(f_float32, xi, None, reduction=1)",
    ]  # fmt: skip
    low = {name for name, dtype in dtypes(graph).items() if dtype == "bfloat16"}
    assert low == {"x_bfloat16", "w_bfloat16", "wb_bfloat16", "a", "b", "c", "e_bfloat16", "f"}
    assert all(graph.tensor(p.tensor).dtype == "float32" for p in graph.parameters)
    assert graph.precision == "bf16-mixed" and graph.tensor("w_bfloat16").requires_grad


FLOAT8 = """x:f[16,32] xi:i[16] w:f[32,32] wu:f[24,32] wd:f[32,24] wi:f[32,32] wh:f[48,32]
  a:f[16,32] = aten.linear(x, w, None)
  u:f[16,24] = aten.linear(a, wu, None)
  d:f[16,32] = aten.linear(u, wd, None)
  e:f[16,32] = autoshard.linear_in_out(d, wi, None)
  s:f[16,16] = aten.matmul(e, e)
  h:f[16,48] = aten.linear(e, wh, None)
  i:f[] = aten.cross_entropy_loss(h, xi, None, reduction=1)
  -> i"""


def test_fp8_mixed() -> None:
    """Linears whose dims the kernels take, but for the head; all else as in bf16-mixed."""
    plain, graph = (apply_precision(read(FLOAT8), name) for name in ("bf16-mixed", "fp8-mixed"))
    check(graph)
    assert graph.precision == "fp8-mixed" and dtypes(graph) == dtypes(plain)
    changed = {op.name: op.target for op, old in zip(graph.ops, plain.ops, strict=True) if op.target != old.target}
    assert changed == {"a": "autoshard.float8_linear", "e": "autoshard.float8_linear_in_out"}
    expected = [("u", UNEVEN), ("d", UNEVEN), ("h", HEAD)]
    assert [(op.name, why) for op, why in excluded_from_float8(plain)] == expected
    assert [(op.name, why) for op, why in excluded_from_float8(graph)] == expected
    assert [op.saved for op in graph.ops] == [op.saved for op in plain.ops]


EXPERTS = """x:f[16,32] w:f[32,32] wg:f[16,32] wup:f[16,32,32] wdown:f[16,32,32] wh:f[48,32]
  a:f[16,32] = aten.linear(x, w, None)
  g:f[16,16] = aten.linear(a, wg, None)
  s:f[16,16] = aten.softmax(g, dim=1, dtype=None)
  b:f[16,2], c:i[16,2] = aten.topk(s, k=2, dim=1, largest=True, sorted=True)
  m:f[16,32] = autoshard.experts(a, wup, wdown, c, b, experts=16, activation='silu', gated=False)
  r:f[16,32] = aten.add(a, m, alpha=1)
  d:f[16,32] = aten.linear(r, w, None)
  h:f[16,48] = aten.linear(d, wh, None)
  -> h"""


def test_experts_and_what_chooses_them_stay_in_bfloat16() -> None:
    graph = apply_precision(read(EXPERTS), "fp8-mixed")
    assert [(op.name, why) for op, why in excluded_from_float8(graph)] == [("g", ROUTER), ("m", GROUPED), ("h", HEAD)]


def test_casts_leave_integers_and_float64_alone() -> None:
    graph = read("x:f[2,4] w:f[4,4]\n a:f[2,4] = aten.linear(x, w, None)\n -> a")
    wide = Graph(**{**vars(graph), "tensors": tuple(Tensor(t.name, t.shape, "float64") for t in graph.tensors)})
    assert write(apply_precision(wide, "bf16-mixed")) == write(wide)


def test_a_name_that_is_taken() -> None:
    graph = apply_precision(
        read("x:f[2,4] x_bfloat16:f[2,4] w:f[4,4]\n a:f[2,4] = aten.linear(x, w, None)\n -> a"), "bf16-mixed"
    )
    check(graph)
    assert graph.ops[0].results == ("x_bfloat16_",)


@pytest.mark.parametrize(
    "kinds, expected",
    [
        ([("float32", 1), ("bfloat16", 1)], "float32"),
        ([("bfloat16", 1), ("float32", 0)], "bfloat16"),
        ([("bfloat16", 0), ("float32", 0)], "float32"),
        ([("bfloat16", 1), ("float16", 1)], "float32"),
        ([("float64", 1), ("float32", 2)], "float64"),
        ([("int64", 1), ("bfloat16", 0)], "bfloat16"),
        ([("int64", 1)], None),
    ],
)
def test_promotion(kinds: list[tuple[str, int]], expected: str | None) -> None:
    assert result_dtype([Tensor("t", (2,) * rank, dtype) for dtype, rank in kinds]) == expected


def test_unknown_precision_lists_the_known() -> None:
    with pytest.raises(UsageError, match="one of fp32, bf16-mixed"):
        apply_precision(read(MODEL), "fp8")
