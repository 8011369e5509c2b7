"""Linears whose input's gradient is summed beside the weight product: the order in backward, and the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.emit.runtime.axis import Axis
from autoshard.emit.runtime.column_parallel import column_parallel, shared_column_parallel
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.program.early_reductions import early_linears
from autoshard.program.lower import chosen_strategies, lower
from autoshard.program.program_check import check
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.verification.case import check_files, make_case
from tests.slow import slow

MODELS = Path(__file__).parents[1] / "models"
LLAMA, GPT2 = f"{MODELS / 'decoders.py'}:llama", f"{MODELS / 'decoders.py'}:gpt2"


class Told:
    """A transport of two devices that hold the same: what it is asked, in order; nothing is there before the wait."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def all_reduce(self, x: Tensor, op: str = "sum") -> Callable[[], object]:
        total = 2 * x
        x.fill_(math.nan)
        self.log.append("start")
        return lambda: (self.log.append("wait"), x.copy_(total))

    def all_gather(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        return torch.cat([x, x])

    def reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        return 2 * x[: lengths[0]]

    def start_reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        part = 2 * x[: lengths[0]]
        self.log.append("start")
        return lambda: (self.log.append("wait"), part)[1]


class Products(TorchDispatchMode):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.log.append("product")
        return op(*args, **(kwargs or {}))


def made() -> tuple[Axis, Told, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    transport = Told()
    axis = Axis("tp", 2, 0, transport, cast(Any, None), ("tp",))  # type: ignore[arg-type]
    shapes = ((3, 4, 5), (6, 5), (6,))
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    return axis, transport, x, weight, bias


def backward(transport: Told, result: Tensor) -> list[str]:
    transport.log.clear()
    with Products(transport.log):
        (result * torch.linspace(0, 1, result.numel(), dtype=result.dtype).view(result.shape)).sum().backward()
    return transport.log


def gradients(*tensors: Tensor) -> list[Tensor]:
    grads = [cast(Tensor, x.grad).clone() for x in tensors]
    for x in tensors:
        x.grad = None
    return grads


def test_the_sum_starts_before_the_weight_product_and_is_waited_for_after_it() -> None:
    axis, transport, x, weight, bias = made()
    assert backward(transport, column_parallel(x, axis, weight, bias)) == ["product", "start", "product", "wait"]
    grads = gradients(x, weight, bias)
    backward(transport, F.linear(x, weight, bias))
    wanted = gradients(x, weight, bias)
    torch.testing.assert_close(grads, [2 * wanted[0], *wanted[1:]])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dim", [None, 0])
def test_under_autocast_gradients_are_the_same(shared: bool, dim: int | None) -> None:
    """Autocast leaves float64 alone, but goes another way through the code."""
    axis, transport, x, weight, bias = made()
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            options = {"dim": dim, "size": None if dim is None else 2 * len(x)}
            if shared:
                whole, result = shared_column_parallel(x, axis, weight, bias, **options)
                result = torch.cat([result.tanh(), F.linear(whole.sin(), weight)])
            else:
                result = column_parallel(x, axis, weight, bias, **options)
        backward(transport, result)
        results.append([result, *gradients(x, weight, bias)])
    torch.testing.assert_close(*results)


def test_what_others_add_is_summed_with_it() -> None:
    axis, transport, x, weight, bias = made()

    def use(whole: Tensor, result: Tensor) -> Tensor:
        return result.tanh() + F.linear(whole.sin(), weight)

    assert backward(transport, use(*shared_column_parallel(x, axis, weight, bias)))[-3:] == ["start", "product", "wait"]
    grads = gradients(x, weight, bias)
    backward(transport, use(x, F.linear(x, weight, bias)))
    wanted = gradients(x, weight, bias)
    torch.testing.assert_close(grads, [2 * wanted[0], *wanted[1:]])


def test_of_a_gathered_input_each_device_gets_its_part() -> None:
    axis, transport, x, weight, _ = made()
    assert backward(transport, column_parallel(x, axis, weight, dim=1)) == ["product", "start", "product", "wait"]
    grads = gradients(x, weight)
    whole = torch.cat([x.detach(), x.detach()], 1).requires_grad_()
    backward(transport, F.linear(whole, weight))
    wanted = gradients(whole, weight)
    torch.testing.assert_close(grads, [2 * wanted[0][:, :4], wanted[1]])


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    axis, transport, x, weight, bias = made()
    {"x": x, "weight": weight}[frozen].requires_grad_(False)
    log = backward(transport, column_parallel(x, axis, weight, bias))
    assert log == (["product"] if frozen == "x" else ["product", "start", "wait"])
    assert (x.grad is None, weight.grad is None) == (frozen == "x", frozen == "weight")


@pytest.mark.parametrize("turned", [False, True])
def test_a_gradient_lies_in_memory_as_its_weight(turned: bool) -> None:
    """Also one that is held as (in, out): else autograd copies it."""
    axis, _, x, weight, bias = made()
    held = (weight.t().contiguous() if turned else weight).detach().requires_grad_()
    strides = []
    held.register_hook(lambda gradient: strides.append(gradient.stride()))
    for linear in (lambda w: column_parallel(x, axis, w, bias), lambda w: F.linear(x, w, bias)):
        linear(held.t() if turned else held).sum().backward()
    assert strides == [held.stride()] * 2


def test_within_autocast_it_is_a_copy_and_a_linear() -> None:
    axis, _, x, weight, bias = made()
    low = [t.detach().float().requires_grad_() for t in (x, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        result = column_parallel(low[0], axis, low[1], low[2])
    result.float().sum().backward()
    assert result.dtype == torch.bfloat16 and all(t.grad is not None and t.grad.dtype == torch.float32 for t in low)


def test_it_has_its_shape_without_memory() -> None:
    axis, _, x, weight, bias = made()
    whole, result = shared_column_parallel(x.to("meta"), axis, weight.to("meta"), bias.to("meta"))
    assert (whole.shape, result.shape) == ((3, 4, 5), (3, 4, 6))


@pytest.mark.parametrize(
    ("spec", "mesh", "style", "precision", "call"),
    [
        slow(GPT2, "tp=2", "megatron", "fp32", "column_parallel("),
        slow(LLAMA, "tp=2", "megatron-sp", "fp32", "dim=1)"),
        (LLAMA, "dp=2,tp=2", "fsdp-tp", "bf16-mixed", "hidden_states, query_states = shared_column_parallel("),
        slow(GPT2, "tp=3", "megatron-sp", "bf16-mixed", "column_parallel("),
    ],
)
def test_packages_compute_what_the_model_does(spec: str, mesh: str, style: str, precision: str, call: str) -> None:
    graph = capture(spec, {"batch": 6}, precision)
    plan = search(graph, load_hardware("a100-80g-sxm"), SearchRequest(Mesh.parse(mesh), strategy=style))
    program = lower(plan, graph)
    check(program, graph, chosen_strategies(plan, graph))
    files = emit(program, plan, graph)
    code = files["model_parallel.py"]
    early = len(early_linears(program.instructions))
    assert early >= 4 and call in code
    note = f"{early} reductions of gradients overlap a product of weights"
    assert note in files["README.md"] and "CUDA_DEVICE_MAX_CONNECTIONS=1" in files["README.md"]
    assert ("compare both on your cluster" in files["README.md"]) == (style != "megatron")
    proof = check_files(make_case(spec, {"batch": 6}, graph), program, files)
    assert proof.passed, proof.failure


@pytest.mark.slow
def test_without_such_sums_linears_stay_as_they_are() -> None:
    graph = capture(GPT2, {"batch": 4}, "fp32")
    for mesh in ("dp=1", "dp=2"):
        plan = search(graph, load_hardware("a100-80g-sxm"), SearchRequest(Mesh.parse(mesh), strategy="dp"))
        files = emit(lower(plan, graph), plan, graph)
        assert "F.linear(" in files["model_parallel.py"] and "column_parallel" not in files["model_parallel.py"]
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in files["README.md"]
