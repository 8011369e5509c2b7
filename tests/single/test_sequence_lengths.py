"""A package takes sequences of another length than planned, and computes there what the model does; or it says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import workflow
from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.errors import UsageError
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.graph import FreeSize, Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.program.lower import lower
from autoshard.replay.free_sizes import CUTS
from autoshard.rules.resize.captured_length import relengthened
from autoshard.rules.resize.rebatch import rebatched
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.verification.case import Backend, check_files, make_case
from tests.models import NAMES
from tests.single.test_free_sizes import constants
from tests.slow import quick_at

HARDWARE = load_hardware("cpu-local")
WIDTH, WORDS, ROWS = 8, 11, 40


class Small(nn.Module):
    """What it does with its sequences by the ways of these names, one block, and the loss of the next word."""

    def __init__(self, methods: str) -> None:
        super().__init__()
        self.ways = [getattr(self, name) for name in methods.split()]
        self.words, self.table = nn.Embedding(WORDS, WIDTH), nn.Embedding(ROWS, WIDTH)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.register_buffer("mask", torch.ones(ROWS, ROWS, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("ids", torch.arange(ROWS), persistent=False)
        self.register_buffer("later_ids", torch.arange(ROWS) + 2, persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for method in self.ways:
            x = method(x, torch.arange(ids.shape[1], device=ids.device))
        x = x + F.scaled_dot_product_attention(x, self.layer(x), x, is_causal=True)
        loss: Tensor = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss

    # what follows the length

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2)).masked_fill(~mask, -1e9).softmax(-1) @ x

    def divided(self, x: Tensor, at: Tensor) -> Tensor:
        return x + x.sum(1, keepdim=True) / x.shape[1]

    def sliced_mask(self, x: Tensor, at: Tensor) -> Tensor:
        return self.masked(x, self.mask[: x.shape[1], : x.shape[1]])

    def window(self, x: Tensor, at: Tensor) -> Tensor:
        return self.masked(x, (at <= at[:, None]) & (at > at[:, None] - 4))

    def rotary(self, x: Tensor, at: Tensor) -> Tensor:
        angles = torch.outer(at.float(), 100 ** -(torch.arange(0, WIDTH, 2).float() / WIDTH))
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    # tables of positions

    def counted(self, x: Tensor, at: Tensor) -> Tensor:
        return x + self.table(at + 2)

    def backwards(self, x: Tensor, at: Tensor) -> Tensor:
        return x + self.table(x.shape[1] - 1 - at)

    def behind(self, x: Tensor, at: Tensor) -> Tensor:
        return x + self.table(at + x.shape[1])

    def sliced(self, x: Tensor, at: Tensor) -> Tensor:
        return x + self.table.weight[: x.shape[1]]

    def stored(self, x: Tensor, at: Tensor) -> Tensor:
        return x + self.table(self.ids[: x.shape[1]])

    def stored_too_far(self, x: Tensor, at: Tensor) -> Tensor:
        return x + self.table(self.later_ids[: x.shape[1]])

    def buckets(self, x: Tensor, at: Tensor) -> Tensor:
        """Of distances, as in T5: each near one has its own, of the far ones ever more share one."""
        apart = (at - at[:, None]).abs()
        far = 4 + (torch.log(apart.float() / 4) / 2 * 4).long()
        bucket = torch.where(apart < 4, apart, torch.minimum(far, torch.full_like(far, 7)))
        return x + self.table(bucket).sum(1)

    def computed(self, x: Tensor, at: Tensor) -> Tensor:
        return x + self.table(torch.bucketize(at, torch.tensor([2, 4, 30])))

    # what does something else

    def written_mask(self, x: Tensor, at: Tensor) -> Tensor:
        return self.masked(x, torch.tensor([[k <= q for k in range(x.shape[1])] for q in range(x.shape[1])]))

    def squared(self, x: Tensor, at: Tensor) -> Tensor:
        return x / x.shape[1] ** 2

    def root(self, x: Tensor, at: Tensor) -> Tensor:
        return x * x.shape[1] ** 0.5

    def half(self, x: Tensor, at: Tensor) -> Tensor:  # type: ignore[override]
        return x + x[:, x.shape[1] // 2].unsqueeze(1)

    def padded_to_3(self, x: Tensor, at: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, -x.shape[1] % 3)).softmax(1)[:, : x.shape[1]]

    def padded_to_7(self, x: Tensor, at: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, -x.shape[1] % 7)).softmax(1)[:, : x.shape[1]]

    def padded_tokens(self, x: Tensor, at: Tensor) -> Tensor:
        y = x.flatten(0, 1)
        return F.pad(y, (0, 0, 0, -len(y) % 2)).softmax(0)[: len(y)].view_as(x)


def small(way: str = "counted", batch: int = 4, sequence: int = 8) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Small(way), tuple(torch.randint(0, WORDS, (batch, sequence)) for _ in range(2))


SPEC = f"{__file__}:small"


@cache
def asked(spec: str, methods: str = "", sequence: int = 8) -> Graph:
    options = {"sequence": sequence} | ({"way": methods} if methods else {})
    return workflow.with_probed_sizes(workflow.read_graph(workflow.ModelRequest(spec, options)), spec, options)


def sequences(graph: Graph) -> FreeSize:
    (size,) = (size for size in graph.free_sizes if size.name == "sequence")
    return size


def check(
    spec: str,
    graph: Graph,
    mesh: str,
    strategy: str,
    sizes: dict[str, Any],
    backend: Backend = "lockstep",
    free: str = "(",
) -> None:
    """The package of a plan, as it stands, against the original at these sizes."""
    plan = search(graph, HARDWARE, SearchRequest(Mesh.parse(mesh), strategy=strategy))
    files = emit(lower(plan, graph), plan, graph)
    assert f'"sequence": {free}' in files["model_parallel.py"].partition("FREE_SIZES")[2].partition("FIXED_SIZES")[0]
    other = rebatched(relengthened(graph, sizes["sequence"]), sizes.get("batch", 4))
    steps = 3 if backend == "gloo" else 1
    proof = check_files(make_case(spec, sizes, other, steps=steps), lower(plan, other), files, backend)
    assert proof.passed, proof.failure


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("strategy", ["megatron-sp", "fsdp-tp"])
def test_library_models_at_other_lengths_on_gloo(name: str, strategy: str) -> None:
    graph = asked(NAMES[name])
    check(NAMES[name], graph, "dp=2,tp=2", strategy, {"sequence": 4}, "gloo")
    check(NAMES[name], graph, "dp=2,tp=2", strategy, {"sequence": 14, "batch": 6}, "gloo")


@pytest.mark.slow
def test_a_sequence_cut_by_an_axis_and_another_batch() -> None:
    graph = asked(NAMES["nanogpt"])
    check(NAMES["nanogpt"], graph, "tp=2", "megatron-sp", {"sequence": 14, "batch": 6}, free="(8, 2, 3, 16,")


@pytest.mark.slow
def test_what_follows_the_length() -> None:
    """Divisors, masks that are stored and computed, rotary tables, buckets of distances."""
    methods = "divided sliced_mask window rotary buckets"
    graph = asked(SPEC, methods)
    assert (sequences(graph).fixed, sequences(graph).least, sequences(graph).most) == ("", 3, ROWS)
    for length, batch in ((3, 4), (11, 6)):
        check(SPEC, graph, "dp=2", "dp", {"way": methods, "sequence": length, "batch": batch})


@pytest.mark.parametrize(
    ("way", "most"),
    quick_at(
        [("counted", ROWS - 2), ("sliced backwards", ROWS), ("behind", ROWS // 2), ("stored", ROWS), ("buckets", 64)],
        2,
        3,
        4,
    ),
)
def test_tables_bound_the_length(way: str, most: int) -> None:
    graph = asked(SPEC, way)
    assert (sequences(graph).fixed, sequences(graph).most) == ("", most)


@pytest.mark.slow
def test_a_table_in_full_can_be_used_less() -> None:
    graph = asked(SPEC, "counted", ROWS - 2)
    assert (sequences(graph).least, sequences(graph).most) == (9, ROWS - 2)
    check(SPEC, graph, "dp=2", "dp", {"way": "counted", "sequence": 12})


@pytest.mark.parametrize(
    ("way", "own", "why"),
    quick_at(
        [
            ("computed", 8, "nothing tells which rows embedding_1"),
            ("stored_too_far", 8, "nothing tells which rows embedding_1"),
            ("squared", 8, "other of div .* is 3721 in place of 647, were it to grow evenly"),
            ("root", 8, "other of mul .* is 1.73205 in place of 2.82843"),
            ("half", 8, "select index does not grow evenly"),
            ("written_mask", 8, "values of constant .* in place of"),
            ("padded_to_3", 9, "in place of"),
            ("padded_to_7", 10, "in place of"),
            ("padded_tokens", 8, "in place of"),
        ],
        1,
        2,
        3,
        8,
    ),
)
def test_fixed_where_the_model_does_something_else(way: str, own: int, why: str) -> None:
    """Padding is none, or the same, at 9, 3 and 72, or at 10, 3 and 80: the lengths that are tried must tell."""
    sequence = sequences(asked(SPEC, way, own))
    assert sequence.fixed
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(sequence.fixed)


def test_uneven_cuts_of_a_sequence_keep_its_length() -> None:
    graph = asked(SPEC, "divided", 9)
    assert sequences(graph).fixed == ""
    context = PlanningContext(graph, Mesh.parse("sp=2"), HARDWARE)
    plan = next(p for p in (random_plan(context, n) for n in range(50)) if cuts_words(p))
    code = emit(lower(plan, graph), plan, graph)["model_parallel.py"]
    fixed = code.partition("FIXED_SIZES = {")[2].partition("OPTIMIZER")[0]
    assert CUTS.format("sequence") in "".join(fixed.split('"'))


def cuts_words(plan: Plan) -> bool:
    """Does it cut the sequence of ids?"""
    return plan.inputs[0].layout.shards(1) != ()


def test_stages_keep_both() -> None:
    values = constants(asked(SPEC, "counted"), "dp=1", step=StepRequest(micro_batches=2, stages=2))
    assert sorted(values["FIXED_SIZES"]) == ["batch", "sequence"]


def test_numbers_that_are_none_at_a_length_are_refused() -> None:
    graph = asked(SPEC, "counted")
    size = sequences(graph)
    halves = replace(size, follows=tuple(replace(one, slope="1/2") for one in size.follows))
    with pytest.raises(UsageError, match="does not grow evenly"):
        relengthened(replace(graph, free_sizes=(halves,)), 9)


def test_models_without_sequences_are_asked_for_their_batch_alone() -> None:
    graph = asked_of(lambda: (nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.randn(4, 8),)))
    assert [size.name for size in graph.free_sizes] == ["batch"]


def test_a_model_without_a_batch_keeps_its_sizes() -> None:
    graph = asked_of(lambda: (nn.Threshold(0.1, 2.0), (torch.tensor(3.0),)))
    (size,) = graph.free_sizes
    assert "no input with a batch" in size.fixed


def asked_of(build: Callable[[], Any]) -> Graph:
    from autoshard.api.live_model import captured, live_model, recaptured

    module, inputs = build()
    live = live_model(module, *inputs, None, None)
    return recaptured(live, captured(live, "fp32", "adamw", False))
