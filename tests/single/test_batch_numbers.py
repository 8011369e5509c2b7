"""Numbers that follow the batch are written so: the code of one plan computes the original's step at other batches."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit, header_of
from autoshard.emit.model_file import model_file
from autoshard.errors import UsageError
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Compute, Instruction, Program
from autoshard.program.lower import lower
from autoshard.replay.other_sizes import at_other_sizes
from autoshard.rules.resize.rebatch import rebatched
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.verification.case import check_files, make_case
from tests.graphs import mlp_graph
from tests.slow import slow

HARDWARE = load_hardware("cpu-local")


class Block(nn.Module):
    """As many heads as samples, and positions that begin with as many."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, sequence, width)), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.embed, self.token = nn.Embedding(24, width), nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(2))
        self.head = nn.Linear(width, 24)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = torch.cat([self.token.expand(len(ids), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x[:, 1:]).flatten(0, 1), labels.flatten())


def model(batch: int = 8) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Model(8, 32), (torch.randint(0, 24, (batch, 8)), torch.randint(0, 24, (batch, 8)))


class Named(Model):
    def forward(self, batch: Tensor, rows: Tensor) -> Tensor:
        return super().forward(batch, rows)


def named(batch: int = 8) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Named(8, 32), model(batch)[1]


SPEC = f"{__file__}:model"


@cache
def captured() -> Graph:
    return capture(SPEC, {})


def planned(style: str, mesh: str = "dp=2,tp=2") -> Plan:
    """A plan of a known style, or at random where `style` is a seed."""
    if style.isdecimal():
        return random_plan(PlanningContext(captured(), Mesh.parse(mesh), HARDWARE), int(style))
    return search(captured(), HARDWARE, SearchRequest(Mesh.parse(mesh), strategy=style))


@pytest.mark.parametrize("style", ["fsdp-tp", slow("megatron-sp")])
def test_one_package_takes_other_batches(style: str) -> None:
    plan, graph = planned(style), captured()
    files = emit(lower(plan, graph), plan, graph)
    assert re.search(r"^        batch = \w+\.shape\[0\]$", files["model_parallel.py"], re.MULTILINE)
    other = rebatched(graph, 4)
    proof = check_files(make_case(SPEC, {"batch": 4}, other), lower(plan, other), files)
    assert proof.passed, proof.failure


def test_inputs_keep_their_names() -> None:
    graph = capture(f"{__file__}:named", {})
    plan = search(graph, HARDWARE, SearchRequest(Mesh.parse("dp=2"), strategy="dp"))
    files = emit(lower(plan, graph), plan, graph)
    text = files["model_parallel.py"]
    assert "def forward(self, batch: Tensor, rows: Tensor)" in text and "batch_size = batch.shape[0]" in text
    proof = check_files(make_case(f"{__file__}:named", {}, graph), lower(plan, graph), files)
    assert proof.passed, proof.failure


def test_a_number_that_equals_the_batch_by_chance_stays() -> None:
    plan = planned("dp", "dp=2")
    text = emit(lower(plan, captured()), plan, captured())["model_parallel.py"]
    assert ".reshape(batch, 9, 3, 8, 4)" in text  # 8 heads and 8 words stay, 8 samples are 4 on each device
    assert ".expand(batch, 1, 32)" in text and ".reshape(8 * batch, 24)" in text
    assert "shape=(2 * batch, 9, 32)" in text  # of what dropout draws, over all devices


def test_cuts_that_depend_on_the_batch_keep_their_numbers() -> None:
    """In as many blocks as samples."""
    plan = planned("0")
    assert "/8" in "".join(str(layout) for r in plan.redistributions for layout in (r.source, r.target))
    program = lower(plan, captured())
    assert not at_other_sizes(program, plan, captured())
    assert "batch" not in emit(program, plan, captured())["model_parallel.py"].partition("class Holder")[2]


def test_gathers_that_another_batch_does_not_allow_keep_their_numbers() -> None:
    """Of 7 samples 2 x 2 devices hold what one cut in 4 leaves; of 14 they do not."""
    graph = mlp_graph(layers=2, batch=7, hidden=12)
    plan = random_plan(PlanningContext(graph, Mesh.parse("dp=2,tp=2"), HARDWARE), 37)
    program = lower(plan, graph)
    with pytest.raises(UsageError, match=r"of \(14, 12\)"):
        lower(plan, rebatched(graph, 14))
    assert not at_other_sizes(program, plan, graph)


def test_code_that_does_not_follow_the_batch_keeps_its_numbers() -> None:
    """A number of the other program that is not in proportion: the code of both differs."""
    plan = planned("dp", "dp=2")
    program, header = lower(plan, captured()), header_of(lower(plan, captured()), plan, captured())
    others = header.others
    assert others and "batch = " in model_file(program, header)

    def wrong(other: Program) -> Program:
        return replace(other, instructions=tuple(grown(step) for step in other.instructions))

    text = model_file(program, replace(header, others=others.each(wrong)))
    assert ".reshape(4, 9, 3, 8, 4)" in text and "batch = " not in text


def grown(step: Instruction) -> Instruction:
    """Of one kind of operator, a size that is more than the batch says."""
    if not isinstance(step, Compute) or step.target != "aten.expand":
        return step
    (name, sizes), *others = step.attributes
    assert isinstance(sizes, tuple)
    return replace(step, attributes=((name, (9, *sizes[1:])), *others))
