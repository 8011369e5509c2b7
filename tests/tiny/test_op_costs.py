from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard import costs
from autoshard.cluster.hardware import load_hardware
from autoshard.costs.compute import attention_flops, local_op_seconds, one_product_seconds, product_flops
from autoshard.costs.variants import variant_collectives
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph, Op, Parameter, Saved, Tensor
from autoshard.ir.layout import Layout
from autoshard.ir.local_op import LocalOp, LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.strategy import Choice, Strategy
from autoshard.rules.algebra.variant_record import Inside
from autoshard.rules.operators import record

A100, H100 = load_hardware("a100-80g-sxm"), load_hardware("h100-80g-sxm")


def tensor(*shape: int, dtype: str = "bfloat16", grad: bool = True) -> LocalTensor:
    return LocalTensor(shape, dtype, grad)


def op(target: str, operands: list[LocalTensor | None], results: list[LocalTensor], **more) -> LocalOp:
    return LocalOp(f"aten.{target}", tuple(operands), tuple(results), **more)


def counted(*loops: int) -> float:
    """Multiplications and additions of a loop nest, one by one."""
    return sum(2.0 for _ in itertools.product(*map(range, loops)))


@pytest.mark.parametrize(
    ("local", "loops"),
    [
        (op("linear", [tensor(2, 3, 4), tensor(5, 4), tensor(5)], [tensor(2, 3, 5)]), (2, 3, 5, 4)),
        (op("addmm", [tensor(5), tensor(3, 4), tensor(4, 5)], [tensor(3, 5)]), (3, 5, 4)),
        (op("bmm", [tensor(2, 3, 4), tensor(2, 4, 5)], [tensor(2, 3, 5)]), (2, 3, 5, 4)),
        (op("matmul", [tensor(2, 1, 3, 4), tensor(4, 5)], [tensor(2, 1, 3, 5)]), (2, 3, 5, 4)),
        (op("conv2d", [tensor(2, 4, 6, 6), tensor(8, 4, 3, 3), None], [tensor(2, 8, 4, 4)]), (2, 8, 4, 4, 4, 3, 3)),
        (op("conv2d", [tensor(2, 4, 6, 6), tensor(8, 1, 3, 3), None], [tensor(2, 8, 4, 4)]), (2, 8, 4, 4, 1, 3, 3)),
    ],
    ids=lambda value: value.target if isinstance(value, LocalOp) else "",
)
def test_flops_are_those_of_the_loops(local, loops):
    assert product_flops(local, record(local.target).work) == counted(*loops)


def test_causal_attention_does_half():
    query, key, value = tensor(2, 3, 7, 4), tensor(2, 3, 7, 4), tensor(2, 3, 7, 5)
    whole = op("scaled_dot_product_attention", [query, key, value, None], [tensor(2, 3, 7, 5)])
    assert attention_flops(whole) == counted(2, 3, 7, 7, 4) + counted(2, 3, 7, 7, 5)
    assert attention_flops(replace(whole, causal=True)) == attention_flops(whole) / 2


def test_the_attribute_makes_it_causal():
    graph, attention = _attention(8192, ("is_causal", True))
    plain, other = _attention(8192, ("is_causal", False))
    mesh = Mesh.parse("tp=1")
    layout = Layout.parse("R")
    strategy = Strategy((Choice("repeat"),), (layout,) * 3, (layout,))
    causal = costs.op_seconds(A100, mesh, graph, attention, strategy)
    whole = costs.op_seconds(A100, mesh, plain, other, strategy)
    fixed = fixed_attention_seconds(8192, 128)
    assert (whole[0] - fixed) / (causal[0] - fixed) == pytest.approx(2, rel=0.05)
    back = fixed_attention_seconds(2.5 * 8192, 128)
    assert (whole[1] - back) / (whole[0] - fixed) == pytest.approx(2.5 / A100.constant("attention.backward"), rel=0.05)


def fixed_attention_seconds(keys: float, head: int) -> float:
    """Of an attention on the A100, whatever its queries: the launch, and the walk of one block along all keys."""
    return A100.constant("attention.launch") + A100.constant("attention.chain") * keys * head / 128


def _attention(length: int, attribute: tuple[str, bool]) -> tuple[Graph, Op]:
    tensors = tuple(Tensor(name, (1, 16, length, 128), "bfloat16", True) for name in "qkvo")
    op = Op("o", "aten.scaled_dot_product_attention", ("q", "k", "v"), (attribute,), ("o",))
    return Graph("g", tensors, ("q", "k", "v"), (), (), (op,), ("o",), "o"), op


EIGHTHS = st.integers(1, 512).map(lambda eighth: 8 * eighth)  # rows of bfloat16 that start at multiples of 16 bytes


@given(m=st.integers(1, 4096), n=EIGHTHS, k=EIGHTHS, factor=st.floats(1.0, 8.0))
def test_soft_maximum_bounds_and_monotony(m, n, k, factor):
    local = op("mm", [tensor(m, k), tensor(k, n)], [tensor(m, n)])
    flops, size = 2 * m * n * (k + A100.constant("matmul.fill")), 2 * (m * k + k * n + m * n)
    arithmetic = flops / (312e12 * A100.constant("matmul.compute"))
    traffic = size / (2039e9 * A100.constant("matmul.memory"))
    forward = local_op_seconds(A100, local)[0]
    walk = A100.constant("matmul.depth") * (1 - math.exp(-k / A100.constant("matmul.split")))
    kernel = forward - A100.constant("matmul.launch") - walk
    assert max(arithmetic, traffic) * (1 - 1e-6) <= kernel <= (arithmetic + traffic) * (1 + 1e-6)
    faster = replace(A100, memory_bandwidth=A100.memory_bandwidth * factor)
    stronger = replace(A100, peaks=tuple((dtype, peak * factor) for dtype, peak in A100.peaks))
    assert local_op_seconds(faster, local)[0] <= forward and local_op_seconds(stronger, local)[0] <= forward
    for more in ((m + 1, n, k), (m, n + 8, k), (m, n, k + 8)):
        larger = op("mm", [tensor(more[0], more[2]), tensor(more[2], more[1])], [tensor(more[0], more[1])])
        assert all(b >= a for a, b in zip(local_op_seconds(A100, local), local_op_seconds(A100, larger), strict=True))


@pytest.mark.parametrize(("words", "slow"), [(50257, True), (50260, True), (50264, False), (50304, False)])
def test_rows_that_start_at_no_multiple_of_16_bytes_are_slow_both_ways(words, slow):
    """GPT-2's vocabulary: more words can take less time. Only half precision, and no convolution, is so."""

    def seconds(count: int, dtype: str = "bfloat16") -> tuple[float, float]:
        x, w, y = (tensor(*shape, dtype=dtype) for shape in ((4096, 1024), (count, 1024), (4096, count)))
        return local_op_seconds(A100, op("linear", [x, w, None], [y]))

    unpadded, padded = seconds(words), seconds(50304)
    assert all((a > 1.5 * b) == slow for a, b in zip(unpadded, padded, strict=True))
    assert all(a <= b for a, b in zip(seconds(words, "float32"), seconds(50304, "float32"), strict=True))
    image = [tensor(8, 3, 33, 33), tensor(5, 3, 3, 3), None], [tensor(8, 5, 31, 31)]
    odd, plain = (local_op_seconds(hardware, op("conv2d", *image)) for hardware in (A100, _without_misaligned()))
    assert odd == plain


def _without_misaligned():
    return replace(A100, constants=tuple((k, 1.0 if k == "matmul.misaligned" else v) for k, v in A100.constants))


def test_backward_has_one_product_for_each_operand_that_needs_a_gradient():
    def seconds(*grads: bool) -> tuple[float, float]:
        x, w, b = (tensor(*s, grad=g) for s, g in zip([(512, 256), (128, 256), (128,)], grads, strict=True))
        return local_op_seconds(A100, op("linear", [x, w, b], [tensor(512, 128)]))

    def product(m: int, n: int, k: int, relative: str) -> float:
        size = 2.0 * (m * k + k * n + m * n)
        return one_product_seconds(A100, "bfloat16", 2.0 * m * n * k, k, size, A100.constant(f"matmul.{relative}"))

    forward, nothing = seconds(False, False, False)
    assert nothing == 0
    of_input, of_weight = product(512, 256, 128, "dgrad"), product(256, 128, 512, "wgrad")
    assert seconds(False, True, False) == (forward, pytest.approx(of_weight))
    assert seconds(True, False, False) == (forward, pytest.approx(of_input))
    assert seconds(True, True, False) == (forward, pytest.approx(of_input + of_weight))
    bias = seconds(True, True, True)[1] - seconds(True, True, False)[1]
    rows = (512 * 128 + 128) * 2 / (A100.memory_bandwidth * A100.constant("memory.default"))
    assert bias == pytest.approx(A100.launch_seconds + rows)


def test_gradients_of_weights_are_slower_than_those_of_inputs():
    large = op("linear", [tensor(8192, 8192), tensor(8192, 8192), None], [tensor(8192, 8192)])
    inputs = replace(large, operands=(large.operands[0], tensor(8192, 8192, grad=False), None))
    weights = replace(large, operands=(tensor(8192, 8192, grad=False), large.operands[1], None))
    assert local_op_seconds(A100, weights)[1] > 1.03 * local_op_seconds(A100, inputs)[1]


def test_elementwise_counts_bytes():
    x = tensor(1024, 1024)
    forward, backward = local_op_seconds(A100, op("gelu", [x], [x], saved=Saved(operands=(0,))))
    per_byte = 1 / (A100.memory_bandwidth * A100.constant("memory.activation"))
    assert forward == pytest.approx(A100.launch_seconds + 2 * 2**21 * per_byte)
    assert backward == pytest.approx(A100.launch_seconds + 3 * 2**21 * per_byte)  # saved, its gradient, the result's


@pytest.mark.parametrize(
    ("left", "right", "passes"),
    [
        (tensor(64, 64), tensor(64, 64, grad=False), 0),  # the gradient is handed on
        (tensor(64, 64), tensor(64, 64), 3 * 64 * 64 * 2),  # a residual: two gradients are added where it began
        (tensor(64, 64), tensor(64), (64 * 64 + 64) * 2),  # a bias: its gradient is a sum
    ],
)
def test_backward_of_an_addition(left, right, passes):
    backward = local_op_seconds(A100, op("add", [left, right], [tensor(64, 64)]))[1]
    bandwidth = A100.memory_bandwidth * A100.constant("memory.elementwise")
    assert backward == pytest.approx(passes and A100.launch_seconds + passes / bandwidth)


def test_embedding_reads_rows_forward_and_fills_the_table_backward():
    ids = tensor(64, dtype="int64", grad=False)
    small = op("embedding", [tensor(1000, 32), ids], [tensor(64, 32)])
    large = op("embedding", [tensor(50000, 32), ids], [tensor(64, 32)])
    assert local_op_seconds(A100, small)[0] == local_op_seconds(A100, large)[0]
    assert local_op_seconds(A100, small)[1] < local_op_seconds(A100, large)[1]


@pytest.mark.parametrize("target", ["view", "transpose", "permute", "unsqueeze", "t"])
def test_views_are_free(target):
    assert local_op_seconds(A100, op(target, [tensor(4, 6)], [tensor(6, 4)])) == (0, 0)


def test_a_slice_is_free_forward_and_fills_its_gradient_backward():
    forward, backward = local_op_seconds(A100, op("slice", [tensor(4096, 4096)], [tensor(1, 4096)]))
    assert forward == 0
    assert backward > 2**25 / A100.memory_bandwidth


def test_a_reshape_costs_a_copy_only_where_it_copies():
    copied = op("reshape", [tensor(64, 64)], [tensor(4096)])
    assert local_op_seconds(A100, copied)[0] > A100.launch_seconds
    assert local_op_seconds(A100, replace(copied, saved=Saved(aliases=((0, 0),)))) == (0, 0)


def test_a_missing_dtype_is_a_usage_error():
    local = op("mm", [tensor(4, 4), tensor(4, 4)], [tensor(4, 4)])
    with pytest.raises(UsageError, match="bfloat16"):
        local_op_seconds(load_hardware("ascend-910a"), local)


# --- under a strategy -----------------------------------------------------------------------------------------------


def linear_graph(loss: str | None = "y") -> tuple[Graph, Op]:
    tensors = tuple(
        Tensor(name, shape, "float32", name != "x")
        for name, shape in (("x", (64, 96)), ("w", (128, 96)), ("y", (64, 128)))
    )
    op = Op("y", "aten.linear", ("x", "w", None), (), ("y",), saved=Saved(operands=(0, 1)))
    return Graph("g", tensors, ("x",), (Parameter("w", "w"),), (), (op,), ("y",), loss), op


def strategy(*layouts: str | None, variant: str = "") -> Strategy:
    parsed = [None if layout is None else Layout.parse(layout) for layout in layouts]
    assert parsed[-1] is not None
    return Strategy((Choice("repeat"),), tuple(parsed[:-1]), (parsed[-1],), variant)


@pytest.mark.parametrize(
    ("layouts", "x", "w", "y"),
    [
        (("R", "R", None, "R"), (64, 96), (128, 96), (64, 128)),
        (("S0", "R+", None, "S0"), (16, 96), (128, 96), (16, 128)),
        (("R+", "S0", None, "S1"), (64, 96), (32, 96), (64, 32)),
        (("S1", "S1", None, "P"), (64, 24), (128, 24), (64, 128)),
    ],
)
def test_a_strategy_is_priced_as_its_local_operator(layouts, x, w, y):
    graph, op = linear_graph()
    mesh = Mesh.parse("tp=4")
    local = LocalOp(
        "aten.linear",
        (tensor(*x, dtype="float32", grad=False), tensor(*w, dtype="float32"), None),
        (tensor(*y, dtype="float32"),),
        Saved(operands=(0, 1)),
    )
    assert costs.op_seconds(A100, mesh, graph, op, strategy(*layouts)) == local_op_seconds(A100, local)


def test_the_device_that_holds_most_is_priced():
    graph, op = linear_graph()
    even, uneven = strategy("R+", "S0", None, "S1"), strategy("S0", "R+", None, "S0")
    mesh = Mesh.parse("tp=5")  # 64 rows over 5 devices: 13; 128 columns: 26
    assert (
        costs.op_seconds(A100, mesh, graph, op, uneven)[0]
        > costs.op_seconds(A100, Mesh.parse("tp=8"), graph, op, uneven)[0]
    )
    assert costs.op_seconds(A100, mesh, graph, op, even)[0] == pytest.approx(
        local_op_seconds(A100, LocalOp(
            "aten.linear", (tensor(64, 96, dtype="float32"), tensor(26, 96, dtype="float32"), None),
            (tensor(64, 26, dtype="float32"),),
        ))[0]
    )  # fmt: skip


def test_without_a_loss_there_is_no_backward():
    graph, op = linear_graph(loss=None)
    assert costs.op_seconds(A100, Mesh.parse("tp=4"), graph, op, strategy("R", "R", None, "R"))[1] == 0


def test_cross_entropy_over_the_vocabulary_pays_its_collectives():
    mesh = Mesh.parse("dp=2,tp=4")
    logits, target = tensor(64, 1000, dtype="float32"), tensor(64, dtype="int64", grad=False)
    layouts = (Layout.parse("S0 S1"), Layout.parse("S0 R"))
    op = Op("loss", "aten.cross_entropy_loss", ("x", "t"), (), ("l",))
    inside = variant_collectives(mesh, op, "parallel_cross_entropy", (logits, target), layouts)
    assert inside == Inside(((1, "all_reduce", 64 * 4.0), (1, "all_reduce", 2 * 64 * 4.0), (0, "all_reduce", 8.0)))
    assert variant_collectives(mesh, op, "", (logits, target), layouts) == Inside()


@pytest.mark.parametrize("rows", [64, 60])
def test_a_product_that_float8_kernels_do_not_take_costs_as_in_bfloat16(rows: int):
    local = LocalOp("autoshard.float8_linear", (tensor(rows, 128), tensor(256, 128), None), (tensor(rows, 256),))
    float8, plain = (local_op_seconds(H100, one) for one in (local, replace(local, target="aten.linear")))
    assert (float8 == plain) == (rows == 60)


def attention(layout: str, variant: str, mesh: Mesh, causal: bool = True, length: int = 4096) -> tuple[float, float]:
    """Seconds of an attention of `length` positions whose queries, keys and values lie in `layout`."""
    tensors = tuple(Tensor(name, (1, 8, length, 64), "bfloat16", True) for name in "qkvy")
    attrs = (("is_causal", causal),)
    op = Op("y", "aten.scaled_dot_product_attention", ("q", "k", "v"), attrs, ("y",), saved=Saved(operands=(0, 1, 2)))
    graph = Graph("g", tensors, ("q", "k", "v"), (), (), (op,), ("y",), "y")
    return costs.op_seconds(A100, mesh, graph, op, strategy(*[layout] * 4, variant=variant))


def test_attention_along_the_sequence_pays_for_the_last_device_and_its_collectives():
    """Without a causal mask a cut saves all but the launch and the walk along all keys; under one, the last of two
    devices has 3/4 of all scores, where a plain attention computes half of them."""
    mesh, one = Mesh.parse("sp=2"), Mesh.parse("sp=1")
    size = 2 * 8 * 4096 * 64 * 2.0  # all keys and values
    gather, scatter = (costs.collective_seconds(A100, mesh, 0, kind, size) for kind in ("all_gather", "reduce_scatter"))
    forward, backward = attention("S2", "parallel_attention", mesh, causal=False)
    whole = attention("R", "", one, causal=False)
    fixed, back = fixed_attention_seconds(4096, 64), fixed_attention_seconds(2.5 * 4096, 64)
    assert forward - gather - fixed == pytest.approx((whole[0] - fixed) / 2, rel=0.15)
    assert backward - gather - scatter - back == pytest.approx((whole[1] - back) / 2, rel=0.15)
    causal = attention("S2", "parallel_attention", mesh)[0] - gather - fixed
    assert causal == pytest.approx(0.75 * (attention("R", "", one)[0] - fixed), rel=0.25)  # less traffic, too


def test_a_ring_hides_its_blocks_behind_the_computation():
    """Long sequences: only the computation is seen. Short ones: only the blocks."""
    mesh = Mesh.parse("sp=2")
    ring, gathered = attention("S2", "ring_attention", mesh), attention("S2", "parallel_attention", mesh)
    assert ring[0] < gathered[0] and ring[1] < gathered[1]
    op, block = Op("y", "aten.scaled_dot_product_attention", (), (), ()), tensor(8, 4, dtype="bfloat16")
    inside = variant_collectives(mesh, op, "ring_attention", (None, block, block), (Layout.parse("S0"),) * 3)
    assert inside.beside
    assert inside.forward == ((0, "all_gather", 2 * 2 * 64.0),)
    assert inside.backward == ((0, "all_gather", 256.0), (0, "all_gather", 4 * 256.0))  # in float32, and once more


def test_a_balanced_ring_shares_the_work_and_pays_for_the_exchange():
    """Of long sequences on eight devices the last has 7.5 of 8 blocks, of balanced ones all have four; queries, keys,
    values and the result are exchanged beside nothing, unless the whole model has that order."""
    mesh = Mesh.parse("sp=8")
    ring, balanced, reordered = (
        attention("S2", f"{name}ring_attention", mesh, length=65536) for name in ("", "balanced_", "reordered_")
    )
    assert reordered == pytest.approx([time * 4 / 7.5 for time in ring], rel=0.15)
    size = 4 * 8 * 65536 // 8 * 64 * 2.0
    exchange = costs.collective_seconds(A100, mesh, 0, "all_to_all", size * 8 / 7)
    passes = 4 * size / (A100.memory_bandwidth * A100.constant("memory.default"))
    for time, other in zip(balanced, ring, strict=True):
        assert time - exchange - passes == pytest.approx(other * 4 / 7.5, rel=0.05)
    op, block = Op("y", "aten.scaled_dot_product_attention", (), (), ()), tensor(8, 4, dtype="bfloat16")
    inside = variant_collectives(mesh, op, "balanced_ring_attention", (block,) * 3, (Layout.parse("S0"),) * 3)
    assert inside.forward == ((0, "all_gather", 8 * 2 * 64.0), (0, "all_to_all", 4 * 64.0 * 8 / 7))
    assert inside.beside == {"all_gather"}


def test_norms_pay_for_their_statistics():
    """The count, mean and squares of each row and device in one gather; backward two sums of each row."""
    mesh, x = Mesh.parse("dp=2,tp=4"), tensor(16, 8, 100, dtype="float32")
    layout = (Layout.parse("S0 S2"),)
    norm = Op("y", "aten.layer_norm", ("x",), (("normalized_shape", (400,)),), ("y",))
    inside = variant_collectives(mesh, norm, "parallel_layer_norm", (x,), layout)
    assert inside == Inside(((1, "all_gather", 4 * 2 * 128 * 4.0),), ((1, "all_reduce", 2 * 128 * 4.0),))
    batch = Op("y", "aten.batch_norm", ("x",), (), ("y",))
    inside = variant_collectives(mesh, batch, "synchronised_batch_norm", (x,), layout)
    assert [call[:2] for call in inside.forward] == [(0, "all_gather"), (1, "all_gather")]
    assert inside.backward == ((0, "all_reduce", 2 * 8 * 4.0), (1, "all_reduce", 2 * 8 * 4.0))


def test_saved_beside_values_follows_the_largest_tensor():
    tensors = (Tensor("x", (64, 1000), "float32", True), Tensor("t", (64,), "int64"), Tensor("l", (), "float32", True))
    op = Op("l", "aten.cross_entropy_loss", ("x", "t"), (), ("l",), saved=Saved(operands=(1,), extra_bytes=256004))
    graph = Graph("g", tensors, ("x", "t"), (), (), (op,), ("l",), "l")
    mesh = Mesh.parse("dp=2,tp=4")
    whole, cut = strategy("R R", "R R", "R R"), strategy("S0 S1", "S0 R", "P R")
    assert costs.saved_bytes(graph, op, whole, mesh) == 256004
    assert costs.saved_bytes(graph, op, cut, mesh) == 256004 / 8
    assert costs.saved_bytes(replace(graph, loss=None), op, whole, mesh) == 0


def test_a_variant_is_priced_as_the_runtime_computes_it():
    graph = Graph(
        "g",
        (Tensor("x", (4096, 50000), "float32", True), Tensor("l", (), "float32", True)),
        ("x",),
        (),
        (),
        (),
        (),
        "l",
    )
    op = Op("l", "aten.cross_entropy_loss", ("x",), (), ("l",))
    one, two = Mesh.parse("dp=1"), Mesh.parse("dp=2")
    variant = "parallel_cross_entropy"
    plain = costs.local_seconds(A100, one, graph, op, strategy("R", "R"))
    cut = costs.local_seconds(A100, two, graph, op, strategy("S1", "R", variant=variant))
    passes = 8 * 4096 * 25000 * 4 / (A100.memory_bandwidth * A100.constant("memory.default"))
    assert cut[0] == pytest.approx(passes, rel=0.01) and cut[0] > plain[0]
    rows = costs.local_seconds(A100, two, graph, op, strategy("S0", "P", variant=variant))
    assert rows == pytest.approx([time / 2 for time in plain], rel=0.05), "torch's own kernels, where classes are whole"
    low = replace(graph, tensors=tuple(replace(x, dtype="bfloat16") for x in graph.tensors))
    assert costs.local_seconds(A100, two, low, op, strategy("S0", "P", variant=variant))[0] > 2 * rows[0]


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "trainable", "loss", "copies"),
    [("adamw", True, "y", 4), ("sgd", True, "y", 2), ("adamw", False, "y", 1), ("adamw", True, None, 1)],
)
def test_parameter_bytes(optimizer, trainable, loss, copies):
    graph, _ = linear_graph(loss)
    graph = replace(graph, optimizer=optimizer)
    mesh, parameter = Mesh.parse("dp=2,tp=3"), Parameter("w", "w", trainable=trainable)
    size = 128 * 96 * 4
    assert costs.parameter_bytes(graph, parameter, Layout.parse("R R"), mesh) == copies * size
    assert costs.parameter_bytes(graph, parameter, Layout.parse("S0 R"), mesh) == copies * size / 2
    assert costs.parameter_bytes(graph, parameter, Layout.parse("R S0"), mesh) == copies * 43 * 96 * 4  # 128 over 3
    seconds = costs.optimizer_seconds(A100, graph, parameter, Layout.parse("R R"), mesh)
    assert (seconds == 0) == (copies == 1)
    assert costs.optimizer_seconds(A100, graph, parameter, Layout.parse("S0 R"), mesh) == pytest.approx(seconds / 2)


def test_activation_bytes():
    mesh = Mesh.parse("dp=2,tp=2")
    assert costs.activation_bytes(Tensor("a", (5, 6), "bfloat16"), Layout.parse("S0 S1"), mesh) == 3 * 3 * 2
