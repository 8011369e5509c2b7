"""A program cut into the parts of a pipeline: the parts in a row do what the program does, wherever they are cut."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.errors import UsageError
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan, StagePart, StepPlan
from autoshard.ir.program import Compute, Instruction, Program
from autoshard.program.lower import lower
from autoshard.program.module_scopes import operands_of, results_of
from autoshard.program.stage_programs import handed_to, shared_parameters, stage_programs
from autoshard.search.fixed_step import balanced_parts
from autoshard.search.fixed_styles import random_plan
from tests.captured import captured
from tests.slow import quick_at, slow, thinned


def build_t5() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(num_layers=2, num_decoder_layers=2, d_model=16, d_kv=4, d_ff=32, num_heads=4, vocab_size=50,
                      decoder_start_token_id=0, pad_token_id=0, use_cache=False)  # fmt: skip
    ids = torch.randint(1, 50, (4, 6))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids.clone()}


def build_resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=6)
    return ResNetForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 16, 16),
        "labels": torch.randint(0, 6, (4,)),
    }


@cache
def planned(name: str, seed: int = 0) -> tuple[Graph, Plan]:
    graph = captured(f"{__file__}:{name}", {})
    return graph, random_plan(PlanningContext(graph, Mesh.parse("dp=2,tp=2"), load_hardware("a100-80g-sxm")), seed)


def with_parts(plan: Plan, parts: tuple[StagePart, ...]) -> Plan:
    stages = len({part.stage for part in parts})
    virtual = len(parts) // stages
    step = StepPlan(2 * stages, "interleaved" if virtual > 1 else "1f1b", virtual, parts)
    return replace(plan, step=step)


def random_parts(graph: Graph, stages: int, source: random.Random) -> tuple[StagePart, ...]:
    starts = [0, *sorted(source.sample(range(1, len(graph.ops)), stages - 1))]
    return tuple(StagePart(n, 0, graph.ops[start].name) for n, start in enumerate(starts))


class Run:
    """A program run on symbols: each value is what made it of what, numbered so that equal ones are equal."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, what: Any) -> int:
        return self.numbers.setdefault(what, len(self.numbers))

    def run(self, program: Program, inputs: dict[str, int]) -> tuple[dict[str, int], set[int]]:
        """Its values, given those of its inputs; and what ran. Stored values are their own names."""
        known = dict(inputs)
        known |= {p.value: self.number(("stored", p.path)) for p in (*program.parameters, *program.buffers)}
        ran = set()
        for step in program.instructions:
            operands = tuple(None if name is None else known[name] for name in operands_of(step))
            what = self.number((_bare(step), operands))
            ran.add(what)
            known |= {name: self.number((what, i)) for i, name in enumerate(results_of(step))}
        return known, ran


def _bare(step: Instruction) -> Instruction:
    if isinstance(step, Compute):
        return replace(step, operands=(), results=(), regathered=(), module="", source="")
    return replace(step, operand="", result="", module="", reason="")


@pytest.mark.parametrize("name", ["build_t5", slow("build_resnet")])
@pytest.mark.parametrize("seed", thinned(range(4), 4))
def test_the_parts_in_a_row_are_the_program(name: str, seed: int) -> None:
    graph, plan = planned(name)
    stages = 2 + seed % 3
    cut = with_parts(plan, random_parts(graph, stages, random.Random(seed)))
    whole = lower(cut, graph)
    try:
        parts = stage_programs(whole, cut)
    except UsageError as error:  # a cut between the two uses of a buffer
        assert "changes in part" in error.message
        return
    run = Run()
    inputs = {tensor: run.number(("input", tensor)) for tensor in whole.inputs}
    known, _ = run.run(whole, inputs)
    handed, read = dict[str, int](), set[str]()
    updates = {}
    for part in parts:
        assert set(handed_to(part, whole)) <= set(handed)
        values, _ = run.run(part, {**handed, **{n: inputs[n] for n in part.inputs if n in inputs}})
        handed |= {value: values[value] for value in part.outputs}
        updates |= {buffer: values[new] for buffer, new in part.buffer_updates}
        read |= {*handed_to(part, whole)}
    assert handed == {value: known[value] for value in (*read, whole.loss or "")}
    assert updates == {buffer: known[new] for buffer, new in whole.buffer_updates}
    assert {p.path for part in parts for p in part.parameters} == {p.path for p in whole.parameters}
    assert {b.path for part in parts for b in part.buffers} == {b.path for b in whole.buffers}


@pytest.mark.parametrize("seed", quick_at(range(3), 0))
def test_a_cut_between_blocks_keeps_buffers_with_their_modules(seed: int) -> None:
    """Also where a plan moves the new value of a buffer to where it is stored, at the end of the program."""
    graph, plan = planned("build_resnet", seed)
    cut = with_parts(plan, balanced_parts(plan, graph, 2, 1))
    parts = stage_programs(lower(cut, graph), cut)
    held = [buffer.path for part in parts for buffer in part.buffers]
    assert sorted(held) == sorted({buffer.path for buffer in lower(plan, graph).buffers})


@pytest.mark.slow
def test_every_gradient_is_reduced_where_its_parameter_is() -> None:
    graph, plan = planned("build_t5")
    cut = with_parts(plan, balanced_parts(plan, graph, 2, 1))
    whole = lower(cut, graph)
    parts = stage_programs(whole, cut)
    once = {path for bucket in whole.gradient_buckets for path in bucket.parameters}
    for part in parts:
        held = {p.path for p in part.parameters}
        reduced = [path for bucket in part.gradient_buckets for path in bucket.parameters]
        assert sorted(reduced) == sorted(once & held)
        assert all(0 <= bucket.after < len(part.instructions) for bucket in part.gradient_buckets)


def test_a_tied_weight_stands_on_both_stages() -> None:
    graph, plan = planned("build_t5")
    cut = with_parts(plan, balanced_parts(plan, graph, 2, 1))
    parts = stage_programs(lower(cut, graph), cut)
    assert shared_parameters(parts, cut.step) == {"shared.weight": (0, 1)}


def test_masks_and_inputs_are_not_handed_on() -> None:
    """Each stage has the batch: what is made of it alone is made again."""
    graph, plan = planned("build_t5")
    cut = with_parts(plan, balanced_parts(plan, graph, 4, 1))
    whole = lower(cut, graph)
    for part in stage_programs(whole, cut)[1:]:
        values = [part.value(name) for name in handed_to(part, whole)]
        assert values and all(value.requires_grad for value in values), [v.name for v in values]


@pytest.mark.parametrize("left_out", quick_at([0, 1], 1))
def test_each_part_is_a_class_of_its_name(left_out: int) -> None:
    """Also of an exported program whose modules do not name the root."""
    graph, plan = planned("build_resnet")
    graph = replace(graph, modules=graph.modules[left_out:])
    cut = with_parts(plan, balanced_parts(plan, graph, 2, 1))
    files = emit(lower(cut, graph), cut, graph)
    for number in (0, 1):
        assert f"\nclass Part{number}(" in files[f"part_{number}.py"]


def test_a_plan_of_one_stage_is_the_program_itself() -> None:
    graph, plan = planned("build_t5")
    program = lower(plan, graph)
    assert stage_programs(program, plan) == (program,)
