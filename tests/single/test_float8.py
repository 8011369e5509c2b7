"""Linear layers in float8: how exact their products are, what they hold, and that faults are seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.emit import emit
from autoshard.emit.runtime import float8
from autoshard.emit.runtime.axis import Axis
from autoshard.emit.runtime.column_parallel import column_parallel
from autoshard.emit.runtime.float8 import Scaled, float8_linear, scaled
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Op
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Compute, Program
from autoshard.program.lower import lower
from autoshard.rules.algebra.float8_products import holds
from autoshard.verification.case import Case, check_files, make_case
from autoshard.verification.training_precision import TrainingPrecisionStep
from tests.forced import forced_plan
from tests.meter import Meter
from tests.models.decoders import gpt2, llama
from tests.single.test_column_parallel import Told
from tests.slow import slow

# A number m * 2^e of p bits of mantissa, rounded to nearest, is away by a uniform part of half a unit, 2^(e - p - 1).
# With m spread evenly by its logarithm over [1, 2), the root of the mean square of that is 2^-p / sqrt(12) *
# sqrt(mean(m^-2)) of the number, with mean(m^-2) = 3 / (8 ln 2). The errors of two factors add up as squares do.
E4M3, E5M2 = (2.0**-p / math.sqrt(12) * math.sqrt(3 / (8 * math.log(2))) for p in (3, 2))
FORWARD, BACKWARD = math.hypot(E4M3, E4M3), math.hypot(E4M3, E5M2)  # 3.8 % and 5.9 %
NEAR = 0.1  # of these; another format of one factor is at least a fifth away


def errors(in_out: bool = False) -> dict[str, float]:
    """Of a linear's result and gradients, relative to their norms."""
    torch.manual_seed(0)
    weight = torch.randn(96, 64).bfloat16()
    weight = weight.t().contiguous().t() if in_out else weight
    tensors = [torch.randn(3, 32, 64).bfloat16(), weight, torch.randn(96).bfloat16()]
    gradient = torch.randn(3, 32, 96).bfloat16()
    rounded = results(float8_linear, tensors, gradient)
    exact = results(F.linear, [x.double() for x in tensors], gradient.double())
    assert rounded["weight"].stride() == weight.stride()  # else autograd copies it
    return {name: float((rounded[name].double() - exact[name]).norm() / exact[name].norm()) for name in exact}


def results(linear: Callable[..., Tensor], operands: list[Tensor], gradient: Tensor) -> dict[str, Tensor]:
    x, weight, bias = (t.detach().requires_grad_() for t in operands)
    output = linear(x, weight, bias)
    output.backward(gradient)
    return {"result": output.detach(), "x": cast(Tensor, x.grad), "weight": cast(Tensor, weight.grad)}


def is_as_exact_as_its_formats(errors: dict[str, float]) -> bool:
    wanted = {"result": FORWARD, "x": BACKWARD, "weight": BACKWARD}
    return all(abs(error / wanted[name] - 1) < NEAR for name, error in errors.items())


@pytest.mark.parametrize("in_out", [False, True])
def test_products_are_as_exact_as_their_formats(in_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of backward with all bits that the kernel sums with, which on a CPU are as many in forward."""
    kernel, fast = torch._scaled_mm, list[bool]()
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **kw: fast.append(kw["use_fast_accum"]) or kernel(*a, **kw))
    assert is_as_exact_as_its_formats(errors(in_out)) and fast == [True, False, False]


def _unscaled(left: Scaled, right: Scaled) -> tuple[Scaled, Scaled]:
    return Scaled(left.values, torch.ones(())), right


def _inverted(left: Scaled, right: Scaled) -> tuple[Scaled, Scaled]:
    return left, Scaled(right.values, 1 / right.scale)


@pytest.mark.parametrize("fault", [_unscaled, _inverted])
def test_a_scale_forgotten_or_inverted_is_seen(fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = float8.product
    monkeypatch.setattr(float8, "product", lambda a, b, *args, **more: right(*fault(a, b), *args, **more))
    assert not is_as_exact_as_its_formats(errors())


@pytest.mark.parametrize("kinds", ["e5m2 e4m3", "e4m3 e4m3", "e5m2 e5m2"])
def test_another_format_is_seen(kinds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    monkeypatch.setattr(float8, "formats", lambda: tuple(known[kind] for kind in kinds.split()))
    assert not is_as_exact_as_its_formats(errors())


def test_small_gradients_beside_large_ones_are_kept() -> None:
    """e4m3 ends 2^-18 below its largest number, e5m2 2^-32."""
    weight = torch.eye(16).bfloat16()
    x = torch.zeros(16, 16).bfloat16().requires_grad_()
    gradient = (2.0 ** -torch.arange(0, 32, 2)).diag().bfloat16()
    float8_linear(x, weight).backward(gradient)
    torch.testing.assert_close(x.grad, gradient)


@pytest.mark.parametrize("shape, dtype", [((15, 16), "bfloat16"), ((16, 16), "float64"), ((0, 16), "bfloat16")])
def test_what_does_not_fit_is_a_plain_linear(shape: tuple[int, ...], dtype: str) -> None:
    x, weight = (torch.randn(s).to(getattr(torch, dtype)) for s in (shape, (32, 16)))
    assert torch.equal(float8_linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e33])
def test_zeros_and_extremes_stay_numbers(value: float) -> None:
    """Above 1e33 sums of products of 448, times one scale after the other, overflow in torch's kernel of some CPUs."""
    x, weight = torch.full((16, 16), value).bfloat16(), torch.eye(16).bfloat16()
    output = float8_linear(x, weight)
    assert bool(torch.isfinite(output).all()) and (value < 1e-12 or torch.equal(output, x))


@pytest.mark.parametrize("value", [0.0, 1e-30, 3e38])
def test_casts_of_zeros_and_extremes_are_numbers(value: float) -> None:
    x = torch.full((16, 16), value).bfloat16()
    cast = scaled(x)
    assert bool(torch.isfinite(cast.values.float()).all()) and bool(torch.isfinite(cast.scale))
    assert value < 1e-12 or torch.equal((cast.values.float() * cast.scale).bfloat16(), x)


def test_a_compiler_takes_it_whole() -> None:
    torch.manual_seed(0)
    operands = [torch.randn(s).bfloat16() for s in ((32, 64), (48, 64), (48,))]
    gradient = torch.randn(32, 48).bfloat16()
    compiled = torch.compile(float8_linear, backend="aot_eager", fullgraph=True)
    outputs, wanted = (results(linear, operands, gradient) for linear in (compiled, float8_linear))
    assert all(torch.equal(outputs[name], wanted[name]) for name in wanted)


def test_column_parallel_makes_the_same_products() -> None:
    axis = Axis("tp", 2, 0, Told(), cast(Any, None), ("tp",))  # type: ignore[arg-type]
    torch.manual_seed(0)
    operands = [torch.randn(s).bfloat16() for s in ((2, 16, 32), (48, 32), (48,))]
    gradient = torch.randn(2, 16, 48).bfloat16()
    outputs = results(lambda x, *args: column_parallel(x, axis, *args, float8=True), operands, gradient)
    wanted = results(float8_linear, operands, gradient)
    wanted["x"] = 2 * wanted["x"]  # of two devices
    assert all(torch.equal(outputs[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("rows, inputs, outputs", [(32, 64, 48), (160, 16, 32), (16, 48, 256), (16, 256, 48)])
def test_what_it_holds_while_it_runs(rows: int, inputs: int, outputs: int, in_out: bool) -> None:
    x = torch.randn(rows, inputs).bfloat16().requires_grad_()
    stored = torch.randn((inputs, outputs) if in_out else (outputs, inputs)).bfloat16().requires_grad_()
    meter = Meter([x, stored])
    with meter:
        meter.phase = "forward"
        result = float8_linear(x, stored.t() if in_out else stored)
        forward = meter.peak("forward")[0]
        gradient = torch.ones_like(result)
        meter.phase = "backward"
        grads = torch.autograd.grad(result, (x, stored), gradient)
        backward = meter.peak("backward")[0] - result.nbytes - gradient.nbytes
    target = "autoshard.float8_linear" + "_in_out" * in_out
    locals_ = [LocalTensor(tuple(t.shape), "bfloat16", True) for t in (x, stored, result)]
    op = Op("a", target, ("x", "w"), (), ("y",))
    said = holds(Mesh.parse("dp=1"), op, (*locals_[:2],), (None, None), (locals_[2],))
    gradients = sum(t.nbytes for t in grads)
    assert said.forward - 64 <= forward <= said.forward + result.nbytes + 64, (forward, said)
    assert said.backward - 64 <= backward <= said.backward + gradients + 64, (backward, said)


def build_llama() -> tuple[nn.Module, Any]:
    return llama(batch=4, sequence=16)


def build_gpt2() -> tuple[nn.Module, Any]:
    return gpt2(batch=4, sequence=16)


@cache
def made(name: str, mesh: str, seed: int = 0) -> tuple[Case, Program, dict[str, str]]:
    spec = f"{__file__}:build_{name}"
    graph = capture(spec, {}, "fp8-mixed")
    plan = forced_plan(graph, Mesh.parse(mesh), lambda op, strategy: True, seed, "h100-80g-sxm")
    program = lower(plan, graph)
    return make_case(spec, {}, graph), program, emit(program, plan, graph)


@pytest.mark.parametrize("name, mesh", [("llama", "dp=2"), slow("gpt2", "tp=2")])
def test_packages(name: str, mesh: str) -> None:
    """All but the head; in float64, and in their own precision as near as the original in float8."""
    case, program, files = made(name, mesh)
    targets = [step.target for step in program.instructions if isinstance(step, Compute) and "linear" in step.target]
    assert [target for target in targets if "float8" not in target] == ["aten.linear"]
    assert "float8_linear(" in files["model_parallel.py"] and "## Float8" in files["README.md"]
    assert isinstance(case.native_step, TrainingPrecisionStep)
    proof = check_files(case, program, files, own_precision=True)
    assert proof.passed and not proof.unverified, proof.failure


@pytest.mark.slow
def test_a_package_that_forgets_a_scale_is_found() -> None:
    case, program, files = made("gpt2", "tp=2")
    old, new = "scale_a=left.scale", "scale_a=left.scale * 0 + 1"
    assert old in files["runtime/float8.py"]
    faulty = {**files, "runtime/float8.py": files["runtime/float8.py"].replace(old, new)}
    proof = check_files(replace(case, noise=None), program, faulty, own_precision=True)
    assert not proof.passed
    assert "failed: precision " in proof.failure, proof.failure
