"""`estimate --compiled`: which kernels a compiler makes of a layer, the bytes that they pass, and what a step gains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.cli.commands import main
from autoshard.cluster.hardware import load_hardware
from autoshard.costs.compute import cast_passes
from autoshard.errors import UsageError
from autoshard.estimate.layer_costs import pieces, saved_operators
from autoshard.estimate.step import estimate
from autoshard.estimate.text.reserved_memory import reserved_memory
from autoshard.estimate.transformer import FSDP, TrainingRun, Transformer
from autoshard.estimate.transformer_graph import layer, transformer_graph
from autoshard.estimate.transformer_program import BuiltTransformer, build
from autoshard.ir.graph_check import check
from autoshard.ir.local_op import local_op
from autoshard.ir.program import Compute
from autoshard.rules.algebra.operator_record import Product, Work
from autoshard.rules.operators import record
from autoshard.simulation import simulate
from autoshard.simulation.compiled.fused_kernels import _Kernel, fused_seconds
from autoshard.simulation.compiled.kernel_groups import kernel_groups

H100 = load_hardware("h100-80g-sxm")
LLAMA = Transformer(
    8, 2048, 16, 2048, 32000, 16, 5632, "swiglu", "flash", "rotary", "rms_norm", bias=False, tied=False
)  # fmt: skip
ONE = TrainingRun(4, 4)
STREAM = 4 * 2048 * 2048 * 2  # bytes of the residual stream
WIDE = 5632 / 2048  # of the feed-forward layer, in streams


def kernels_of(built: BuiltTransformer) -> dict[str, _Kernel]:
    """Of the last layer, by their operators."""
    kernels = kernel_groups(built.program, built.graph)
    all_kernels = [_Kernel(built.program, built.graph, kernels, number) for number in range(len(kernels.groups))]
    selected = [kernel for kernel in all_kernels if kernel.steps[0].module.startswith(layer(1))]
    return {" ".join(step.target.partition(".")[2] for step in kernel.steps): kernel for kernel in selected}


def streams(sizes: tuple[float, ...]) -> list[float]:
    return [round(size / STREAM, 2) for size in sizes]


def test_a_layer_is_six_kernels_between_its_products() -> None:
    built = build(LLAMA, ONE, H100)
    kernels = kernels_of(built)
    rotation = "rotate_half mul mul add"
    assert [*kernels] == ["rms_norm", rotation, "add rms_norm", "silu mul", "add"]  # the rotation twice
    groups = kernel_groups(built.program, built.graph).groups
    targets = [built.program.instructions[i] for group in groups for i in group]
    assert all(record(i.target).work is None for i in targets if isinstance(i, Compute))


def test_kernels_read_and_write_once() -> None:
    """By hand: streams that each kernel passes forward, and backward (then that of the norm's weight)."""
    kernels = kernels_of(build(LLAMA, ONE, H100))
    assert round(kernels["silu mul"].forward_bytes() / STREAM, 2) == round(3 * WIDE, 2)  # gate, up, product
    assert streams(kernels["silu mul"].backward_bytes()) == [round(5 * WIDE, 2)]  # its gradient, both, both gradients
    assert round(kernels["add rms_norm"].forward_bytes() / STREAM, 1) == 4  # two, their sum, the norm
    # Gradients of the norm from up and gate and of the sum from the next layer, the sum; one gradient for both.
    assert streams(kernels["add rms_norm"].backward_bytes()) == [5.0, 4.0]
    # From q, k and v, the input, what the sum after attention hands on; the gradient.
    assert streams(kernels["rms_norm"].backward_bytes()) == [6.0, 4.0]
    assert kernels["add"].backward_bytes() == ()  # it hands its gradient on


def test_a_norm_costs_the_same_however_it_is_written() -> None:
    apart = replace(LLAMA, norm="rms_norm_apart")
    check(transformer_graph(apart, 4, "bf16", "adamw").graph)
    whole, spelled = (pieces(build(model, ONE, H100), H100, compiled=True).layer for model in (LLAMA, apart))
    assert spelled.forward_seconds == pytest.approx(whole.forward_seconds, rel=1e-3)
    assert spelled.backward_seconds == pytest.approx(whole.backward_seconds, rel=1e-3)
    eager, eager_apart = (pieces(build(model, ONE, H100), H100).layer for model in (LLAMA, apart))
    assert eager_apart.forward_seconds > eager.forward_seconds


@pytest.mark.parametrize("model", [LLAMA, Transformer(4, 1024, 16, 1024, 50304, attention="unfused", dropout=True)])
@pytest.mark.parametrize("tp", [1, 4])
def test_only_what_lies_between_products_is_joined(model: Transformer, tp: int) -> None:
    built = build(model, TrainingRun(4, 4, tp=tp, sequence_parallel=tp > 1), H100)
    eager, compiled = (pieces(built, H100, is_compiled) for is_compiled in (False, True))
    for name in ("matmul", "attention", "collective"):
        for families in ("forward_families", "backward_families"):
            before, after = (dict(getattr(step.layer, families)).get(name, 0.0) for step in (eager, compiled))
            assert after == pytest.approx(before, rel=1e-9)
    assert compiled.layer.forward_kernels < eager.layer.forward_kernels
    assert compiled.layer.forward_seconds < eager.layer.forward_seconds
    for end in ("embedding", "head"):  # in no block
        before, after = getattr(eager, end), getattr(compiled, end)
        assert after.backward_seconds == pytest.approx(before.backward_seconds, rel=1e-9)
        assert after.forward_kernels == before.forward_kernels


def test_every_kernel_stands_between_the_same_products() -> None:
    """An operator that comes after a product which reads its kernel is in another kernel: the sum that ends a layer."""
    built = build(LLAMA, ONE, H100)
    kernels = kernels_of(built)
    assert kernels["add rms_norm"].number != kernels["add"].number
    seconds = fused_seconds(built.program, built.graph, H100)
    for number, members in enumerate(kernel_groups(built.program, built.graph).groups):
        assert seconds[members[-1]][0] > 0, number
        assert all(seconds[index] == (0.0, 0.0) for index in members[:-1])


def test_experts_cost_what_they_cost() -> None:
    """They are products, though their record says nothing of it."""
    model = replace(LLAMA, experts=8, top_k=2)
    built = build(model, ONE, H100)
    groups = kernel_groups(built.program, built.graph).groups
    assert "autoshard.experts" not in {getattr(built.program.instructions[i], "target", "") for g in groups for i in g}
    seconds = []
    for compiled in (False, True):
        events = simulate(built.program, built.graph, H100, compiled).events
        seconds.append([e.duration_seconds for e in events if e.name.startswith("experts")])
    assert seconds[0] and seconds[0] == pytest.approx(seconds[1])


def test_casts_to_float8_are_joined() -> None:
    built = build(LLAMA, TrainingRun(4, 4, precision="fp8-mixed"), H100)
    linear = next(i for i in built.program.instructions if getattr(i, "target", "") == "autoshard.float8_linear")
    assert isinstance(linear, Compute)
    local = local_op(
        built.graph.by_op[linear.op],
        tuple(None if n is None else built.program.largest[n] for n in linear.operands),
        tuple(built.program.largest[n] for n in linear.results), 0.0, "",
    )  # fmt: skip
    for eager, joined in zip(cast_passes(local), cast_passes(local, joined=True), strict=True):
        assert sum(joined) < sum(eager)
        assert len(joined) < len(eager)
    plain, compiled = (pieces(built, H100, is_compiled).layer for is_compiled in (False, True))
    assert dict(compiled.forward_families)["matmul"] < dict(plain.forward_families)["matmul"]


def test_a_compiled_step_is_a_style_of_its_own() -> None:
    run = TrainingRun(16, 2, 8, zero=3, precision=FSDP, overlap=True)
    eager, compiled = (estimate(LLAMA, replace(run, compiled=is_compiled), H100) for is_compiled in (False, True))
    assert compiled.step_seconds < eager.step_seconds
    assert compiled.memory == eager.memory
    assert compiled.band != eager.band
    with pytest.raises(UsageError, match="compiled"):
        estimate(LLAMA, replace(run, compiled=True, software="autoshard", precision="bf16-mixed"), H100)


def test_the_command_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = "--layers 4 --hidden 1024 --heads 16 --sequence 1024 --vocabulary 50304 --batch 8"
    for options in ("", "--compiled", "--recompute operators", "--norm rms_norm_apart"):
        assert main(["estimate", "--hardware", "h100-80g-sxm", *numbers.split(), *options.split(), "--json"]) == 0
    assert '"compiled": true' in capsys.readouterr().out
    for options, shown in (([], False), (["--compiled"], True)):
        assert main(["estimate", "--hardware", "h100-80g-sxm", *numbers.split(), *options]) == 0
        assert ("ZeRO 0, layers compiled" in capsys.readouterr().out) is shown


def test_operators_keep_every_second_product_and_attention() -> None:
    built = build(LLAMA, ONE, H100)
    saved = [built.program.instructions[i] for i in sorted(saved_operators(built))]
    names = [i.module.removeprefix(f"{layer(1)}.") for i in saved]
    assert names == ["attention.q", "attention.v", "attention.core", "feedforward.up", "feedforward.down"]
    works = [record(i.target).work for i in saved if isinstance(i, Compute)]
    assert all(isinstance(work, Product) or work is Work.ATTENTION for work in works)


def test_recomputation_by_operators_lies_between_none_and_all() -> None:
    run = TrainingRun(32, 4, 8, zero=3, precision=FSDP, overlap=True)
    steps = [estimate(LLAMA, replace(run, recompute=recompute), H100) for recompute in ("none", "operators", "full")]  # type: ignore[arg-type]
    assert steps[0].step_seconds < steps[1].step_seconds < steps[2].step_seconds
    assert steps[0].memory.peak > steps[1].memory.peak > steps[2].memory.peak
    for step in steps:
        reserved = reserved_memory(step.model, step.run, H100)
        assert reserved is not None and reserved >= 0.98 * step.memory.peak
