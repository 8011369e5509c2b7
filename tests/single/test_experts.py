"""Mixtures of experts: folded at capture, cut by their experts, tokens sent to them and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autoshard.cluster.hardware import load_hardware
from autoshard.emit.runtime.experts import parallel_experts
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Op
from autoshard.ir.layout import REPLICATE, Layout, Shard
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.rules import Strategy
from autoshard.rules.operators.experts import experts_keep
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.simulation.memory_curve import plan_memory
from tests.forced import check, forced_plan
from tests.models import NAMES
from tests.moved import moved_parameters
from tests.slow import quick_at, slow
from tests.small_models import spec


def experts_by(choice: str) -> Callable[[Op, Strategy], bool]:
    """Every block of experts has this choice on some axis, and tokens go to experts by this choice alone."""

    def fits(op: Op, strategy: Strategy) -> bool:
        choices = {str(c) for c in strategy.choices}
        return op.target != "autoshard.experts" or (choice in choices and not choices & {"t+e"} - {choice})

    return fits


@pytest.mark.parametrize("form", quick_at(["batched_mm", "grouped_mm"], 1))
def test_both_forms_of_the_library_fold_into_one_operator(form: str) -> None:
    graph = capture(spec("mixtral"), {"form": form})
    (block,) = (op for op in graph.ops if op.target == "autoshard.experts")
    assert [graph.tensor(name or "").shape for name in block.operands] == [
        (16, 16),
        (4, 24, 16),
        (4, 16, 12),
        (16, 2),
        (16, 2),
    ]
    assert dict(block.attributes) == {"experts": 4, "activation": "silu", "gated": True}
    assert block.module.endswith("mlp.experts")
    inside = [op for op in graph.ops if op.module.startswith(block.module) and op is not block]
    assert inside == []  # nothing of the block is left, and no weight is gathered for each token


@pytest.mark.parametrize(
    ("name", "blocks"), [slow("mixtral", 2), slow("qwen3_moe", 2), slow("deepseek_v3", 1), ("gpt_oss", 2)]
)
def test_models_of_the_library(name: str, blocks: int) -> None:
    graph = capture(NAMES[name], {})
    assert sum(op.target == "autoshard.experts" for op in graph.ops) == blocks


class Lookalike(torch.nn.Module):
    """As a block of experts, but for one thing."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(4, 12, 6))
        self.down = torch.nn.Parameter(torch.randn(4, 6, 6))
        self.router = torch.nn.Linear(6, 4)
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        ids = chosen.reshape(-1)
        rows = x.repeat(2, 1) if self.wrong == "order of tokens" else x.repeat_interleave(2, 0)
        first, second = torch.bmm(self.up[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        gated = (
            first * torch.nn.functional.silu(second)
            if self.wrong == "gate"
            else torch.nn.functional.silu(first) * second
        )
        other = ids.roll(1) if self.wrong == "experts" else ids
        output = torch.bmm(self.down[other], gated.unsqueeze(-1)).squeeze(-1) * weights.reshape(-1).unsqueeze(-1)
        shape = (2, len(x), 6) if self.wrong == "sum" else (len(x), 2, 6)
        return output.view(*shape).sum(0 if self.wrong == "sum" else 1).square().mean()


def lookalike(wrong: str = "") -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return Lookalike(wrong), (torch.randn(8, 6),)


@pytest.mark.parametrize("wrong", ["", "order of tokens", "gate", "experts", "sum"])
def test_only_what_is_a_block_is_folded(wrong: str) -> None:
    graph = capture(f"{__file__}:lookalike", {"wrong": wrong})
    assert any(op.target == "autoshard.experts" for op in graph.ops) == (not wrong)


@pytest.mark.parametrize(
    ("mesh", "choice", "arguments"),
    [
        ("dp=2,ep=2", "t+e", {"form": "grouped_mm"}),
        slow("ep=3", "t+e", {"experts": 5, "batch": 3}),
        slow("dp=2,tp=2", "e", {}),
        slow("tp=2", "f", {}),
    ],
)
def test_mixtral_with_its_experts_cut(mesh: str, choice: str, arguments: dict[str, object]) -> None:
    functions, largest = check(spec("mixtral"), mesh, experts_by(choice), (1,), arguments)
    assert ("dispatched_experts" if choice == "t+e" else "parallel_experts") in functions
    assert largest < 1e-9


@pytest.mark.parametrize("form", quick_at(["batched_mm", "grouped_mm"], 0))
def test_experts_with_biases_fold_whole(form: str) -> None:
    graph = capture(NAMES["gpt_oss"], {"form": form, "layers": 1})
    (block,) = (op for op in graph.ops if op.target == "autoshard.experts")
    shapes = [(32, 32), (4, 32, 96), (4, 48, 32), (32, 2), (32, 2), (4, 96), (4, 32)]
    assert [graph.tensor(name or "").shape for name in block.operands] == shapes
    expected = {"experts": 4, "activation": "clipped", "gated": True, "limit": 7.0, "alpha": 1.702}
    assert dict(block.attributes) == expected
    assert [op for op in graph.ops if op.module.startswith(block.module) and op is not block] == []


@pytest.mark.slow
@pytest.mark.parametrize("choice", [slow("e"), "t+e", slow("f")])
def test_experts_with_biases(choice: str) -> None:
    functions, largest = check(NAMES["gpt_oss"], "dp=2,tp=2", experts_by(choice), arguments={"layers": 1})
    assert ("dispatched_experts" if choice == "t+e" else "parallel_experts") in functions
    assert largest < 1e-9


def test_weights_of_many_experts_stay_where_they_are() -> None:
    """As an expert would: experts over the devices; only tokens, or their results, travel."""
    graph = capture(NAMES["gpt_oss"], {"layers": 1, "experts": 32, "intermediate_size": 4096})
    program = lower(search(graph, load_hardware("a100-80g-sxm"), SearchRequest(Mesh.parse("tp=4"))), graph)
    weights = {p.path for p in program.parameters if ".experts." in p.path and p.path.endswith("_proj")}
    assert len(weights) == 2
    assert not weights & moved_parameters(program)


class BiasedLookalike(torch.nn.Module):
    """As experts with biases, but for one thing."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.up, self.up_bias = torch.nn.Parameter(torch.randn(4, 6, 8)), torch.nn.Parameter(torch.randn(4, 8))
        self.down, self.down_bias = torch.nn.Parameter(torch.randn(4, 4, 6)), torch.nn.Parameter(torch.randn(4, 6))
        self.router = torch.nn.Linear(6, 4)
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        ids = chosen.reshape(-1)
        rows = x.repeat_interleave(2, 0).unsqueeze(1)
        bias = self.up_bias[ids.flip(0) if self.wrong == "bias" else ids]
        inner = torch.bmm(rows, self.up[ids]).squeeze(1) + bias
        gate, up = inner.chunk(2, -1) if self.wrong == "halves" else (inner[:, ::2], inner[:, 1::2])
        gate = gate.clamp(min=-5.0 if self.wrong == "gate" else None, max=5.0)
        up = up.clamp(min=-4.0 if self.wrong == "limit" else -5.0, max=5.0)
        output = (up + (2 if self.wrong == "one" else 1)) * (gate * torch.sigmoid(gate * 1.5))
        output = torch.bmm(output.unsqueeze(1), self.down[ids]).squeeze(1) + self.down_bias[ids]
        output = output * weights.reshape(-1).unsqueeze(-1)
        return output.view(len(x), 2, 6).sum(1).square().mean()


def biased_lookalike(wrong: str = "") -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return BiasedLookalike(wrong), (torch.randn(8, 6),)


@pytest.mark.parametrize("wrong", quick_at(["", "bias", "halves", "gate", "limit", "one"], 0, 2))
def test_only_what_is_a_block_with_biases_is_folded(wrong: str) -> None:
    graph = capture(f"{__file__}:biased_lookalike", {"wrong": wrong})
    assert any(op.target == "autoshard.experts" for op in graph.ops) == (not wrong)


class _Half:
    """One of two devices that experts are cut over."""

    size, index = 2, 0


@pytest.mark.parametrize("shared", ["whole", "inner", "experts"])
@pytest.mark.parametrize("form", ["silu gated", "relu gated", "gelu", "relu", "clipped"])
def test_what_autograd_keeps_of_experts_is_what_a_plan_counts(form: str, shared: str) -> None:
    """The runtime's own saved tensors, but for the indices that sort rows, on one device of two: of a cut inner dim the
    half between the products, of cut experts the rows whose experts are here."""
    tokens, width, inner, count, k = 32, 12, 20, 4, 2
    activation, gated, biased = form.removesuffix(" gated"), "gated" in form or form == "clipped", form == "clipped"
    part, here = inner // (2 if shared == "inner" else 1), count // (2 if shared == "experts" else 1)
    x = torch.randn(tokens, width, requires_grad=True)
    up_shape = (here, width, 2 * part) if biased else (here, part * (1 + gated), width)
    up = torch.randn(up_shape, requires_grad=True)
    down = torch.randn((here, part, width) if biased else (here, width, part), requires_grad=True)
    biases = (torch.randn(here, 2 * part), torch.randn(here, width)) if biased else ()
    chosen = torch.tensor([[0, 2], [1, 3]]).repeat(tokens // 2, 1)  # half of the pairs on each device
    weights = torch.rand(tokens, k, requires_grad=True)
    pointers = {t.untyped_storage().data_ptr() for t in (x, up, down, weights, *biases)}
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float32 and tensor.untyped_storage().data_ptr() not in pointers:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        parallel_experts(
            x,
            up,
            down,
            chosen,
            weights,
            *biases,
            experts=count,
            activation=activation,
            gated=gated,
            limit=7.0,
            alpha=1.7,
            cut=[_Half()] if shared == "experts" else [],  # type: ignore[list-item]
        )
    operands = (x, up, down, chosen, weights, *biases)
    options = (("experts", count), ("activation", activation), ("gated", gated))
    op = Op("experts", "autoshard.experts", tuple("xudcwab"[: len(operands)]), options, ("y",), "")
    places = [
        Layout((Shard(0),)) if shared == "experts" and n in (1, 2) else Layout((REPLICATE,))
        for n in range(len(operands))
    ]
    local = tuple(LocalTensor(tuple(t.shape), "float32", True) for t in operands)
    predicted = experts_keep(Mesh((("ep", 2),)), op, local, tuple(places), ())
    measured = sum(storage.nbytes() for storage in saved.values())
    assert predicted.extra_bytes == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("tp", [slow(1), 2, slow(4), slow(8)])
def test_a_captured_plan_shares_what_experts_keep(tp: int) -> None:
    """In its Program's own accounting: what lies between the products falls with the devices that share it."""
    sizes = {"hidden": 16, "inner": 64, "experts": 4, "batch": 4, "sequence": 8}
    graph = capture(spec("mixtral"), {"form": "grouped_mm", **sizes})

    def inner(op: Op, strategy: Strategy) -> bool:
        return op.target != "autoshard.experts" or tp == 1 or str(strategy.choices[0]) == "f"

    program = lower(forced_plan(graph, Mesh((("tp", tp),)), inner), graph)
    (block,) = (op.name for op in graph.ops if op.target == "autoshard.experts")
    (held_bytes,) = (
        s.held.bytes for s in plan_memory(program, graph).spans if s.held.kind == "extra" and s.held.name == block
    )
    pairs = 4 * 8 * 2
    assert held_bytes == 4 * pairs * (16 + 4 * 64 / tp + 16)
