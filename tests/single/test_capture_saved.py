"""The saved-for-backward facts against what autograd really keeps, op by op."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.graph_capture.capture import capture, capture_model
from autoshard.graph_capture.load_model import verify_arguments
from autoshard.ir.graph import Graph, Op
from tests.interpreter import call
from tests.slow import slow


def kept_by_autograd(op: Op, graph: Graph) -> tuple[set[int], set[int], int]:
    """Operand positions, result positions and other bytes that autograd saves when `op` runs on its own."""
    operands = [None if name is None else example(graph, name) for name in op.operands]
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        results = run_as_accelerator(op, operands)
    inputs = {storage(value): i for i, value in enumerate(operands) if value is not None}
    if op.target == "aten.batch_norm":  # the real op updates operands 3 and 4 in place
        inputs |= {storage(results[1]): 3, storage(results[2]): 4}
    outputs = {storage(value): i for i, value in enumerate(results) if storage(value) not in inputs}
    places = {storage(value): value for value in saved}
    extra = sum(value.untyped_storage().nbytes() for place, value in places.items() if place not in inputs | outputs)
    return {i for p, i in inputs.items() if p in places}, {i for p, i in outputs.items() if p in places}, extra


def run_as_accelerator(op: Op, operands: list[Any]) -> list[torch.Tensor]:
    """Fused dropout keeps a byte mask on accelerators; the CPU would multiply by a floating one."""
    if op.target == "aten.dropout":
        return [torch.native_dropout(operands[0], op.attribute("p"), True)[0]]
    if op.target == "aten.scaled_dot_product_attention":
        op = replace(op, attributes=tuple((n, 0.0 if n == "dropout_p" else v) for n, v in op.attributes))
    return call(op, operands)


def example(graph: Graph, name: str) -> torch.Tensor:
    tensor = graph.tensor(name)
    dtype = getattr(torch, tensor.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=dtype)
    return torch.rand(tensor.shape, dtype=dtype).add_(0.1).requires_grad_(tensor.requires_grad)


def storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def disagreements(graph: Graph) -> list[str]:
    wrong = []
    for op in graph.ops:
        said = (set(op.saved.operands), set(op.saved.results), op.saved.extra_bytes)
        if said != (saved := kept_by_autograd(op, graph)):
            wrong.append(f"{op.name}: said {said}, autograd {saved}")
    return wrong


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("name", ["mlp", "lenet", slow("gpt2")])
def test_examples(name: str, precision: str) -> None:
    spec = f"examples/{name}.py:build"
    assert disagreements(capture(spec, verify_arguments(spec), precision)) == []


class Many(nn.Module):
    """Operators beyond those of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.table = nn.Parameter(torch.rand(4, 6))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        f = nn.functional
        y = f.avg_pool2d(f.silu(self.norm(self.conv(x))), 2)
        y = f.gelu(y) * torch.sigmoid(y) / (y.exp() + 1.0)
        y = torch.where(mask, y, y.rsqrt()).masked_fill(mask, 0.5)
        z = torch.cat([y.mean((2, 3)) @ self.table, y.sum((2, 3)) @ self.table]).softmax(-1).log()
        z = z[index] + z.log_softmax(-1)[index] - (z.abs().sqrt().sin() - z.cos()).index_select(0, index)
        return torch.bmm(z[None], z.t()[None]).pow(2).clamp(-3.0, 3.0).mean()


def test_other_operators() -> None:
    graph = capture_model(Many(), (torch.rand(2, 2, 6, 6), torch.rand(2, 4, 2, 2) < 0.5, torch.tensor([1, 0, 2, 3])))
    assert disagreements(graph) == []


def test_unknown_operator_keeps_its_floating_operands() -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.hypot(x, self.weight).sum()

    (op, _) = capture_model(Unknown(), (torch.rand(3),)).ops
    assert (op.target, op.saved.operands) == ("aten.hypot", (0, 1))


def test_views_share_storage_and_copies_do_not() -> None:
    graph = capture("examples/gpt2.py:build", verify_arguments("examples/gpt2.py:build"))
    real = {"aten.split", "aten.reshape", "aten.transpose", "aten.unsqueeze", "aten.slice"}
    for op in graph.ops:
        assert bool(op.saved.aliases) == (op.target in real and op.name != "reshape_9"), op
    labels = graph.producers["reshape_9"]
    assert labels.operands == ("slice_1",)  # the shifted labels are no view of the padded ones
