"""What a search of whole steps leaves out of its space, with the reason."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.api.planned import CapturedModel
from autoshard.api.step_answer import planned_step
from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StagePin, StepRequest
from autoshard.errors import InfeasibleError, UsageError
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import FreeSize, Graph
from autoshard.rules.resize.captured_length import follows_of, slopes_of
from autoshard.rules.resize.rebatch import rebatched
from autoshard.search.search_request import SearchRequest
from autoshard.whole_step_search.config_space import ConfigSpace, RejectedConfigs, parallel_configs, what_divides
from autoshard.whole_step_search.step_request_space import searched_step

A100 = load_hardware("a100-80g-sxm")


class Small(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def build(layers: int = 2) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Small(layers), (torch.randn(4, 8),)


def graph_of(layers: int) -> Graph:
    return capture(f"{__file__}:build", {"layers": layers})


def test_a_micro_batch_that_the_model_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule may not fit one sample alone; others are searched."""

    def carried(graph: Graph, samples: int) -> Graph:
        if samples == 1:
            raise UsageError("index joins the batch with something else")
        return rebatched(graph, samples)

    monkeypatch.setattr("autoshard.whole_step_search.front_store.rebatched", carried)
    wanted = SearchRequest(devices=1, step=StepRequest(global_batch=8, micro_batch="1,2"))
    result = searched_step(graph_of(2), load_hardware("a100-80g-sxm"), wanted)
    assert result.best.problem.choice.micro_batch == 2
    assert ("micro-batches of 1: index joins the batch with something else", 1) in result.undivided


def test_a_saved_graph_of_many_layers_is_searched() -> None:
    """It says which of its numbers follow the length of sequences; the blocks that are left out have some of them."""
    graph = graph_of(5)
    follows = follows_of({f"{op.results[0]} 0": Fraction(1) for op in graph.ops[:-1]})
    saved = replace(graph, free_sizes=(FreeSize("sequence", "", 2, 64, follows),))
    wanted = SearchRequest(devices=2, step=StepRequest(global_batch=16, micro_batch=2))
    answer = planned_step(CapturedModel(saved), load_hardware("a100-80g-sxm"), wanted)
    assert slopes_of(answer.plan.graph.free_sizes[0]).keys() == slopes_of(saved.free_sizes[0]).keys()


def test_what_is_not_said_of_stages_is_searched() -> None:
    """A schedule, parts of a stage, or a pin, without a number of stages."""
    graph, hardware = graph_of(6), load_hardware("a100-80g-sxm")

    def found(**said: object) -> tuple[int, int, str]:
        step = StepRequest(global_batch=16, **said)  # type: ignore[arg-type]
        step.check(searched=True)
        choice = searched_step(graph, hardware, SearchRequest(devices=4, step=step)).best.problem.choice
        return choice.stages, choice.virtual_stages, choice.schedule

    assert found(virtual_stages=2)[1:] == (2, "interleaved")
    assert found(schedule="gpipe")[2] in ("gpipe", "1f1b")  # this one where there is one stage
    assert found(pins=(StagePin("layers.5", 1),))[0] >= 2
    for said in ({"virtual_stages": 2}, {"schedule": "gpipe"}, {"pins": (StagePin("layers.5", 1),)}):
        with pytest.raises(UsageError, match="about stages, and there is one"):
            StepRequest(global_batch=16, **said).check()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a stage may not decrease"):
        found(pins=(StagePin("layers.0", 1), StagePin("layers.5", 0)))
    with pytest.raises(InfeasibleError, match="a pin names stage 4, and there would be 2 stages") as raised:
        found(pins=(StagePin("layers.5", 4),))
    assert raised.value.hint == "other numbers of devices or samples"


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ({"global_batch": 30, "micro_batch": 4}, "--global-batch 28 or 32"),
        ({"global_batch": 17, "stages": 2, "micro_batch": 4}, "--global-batch 16 or 20"),
        ({"global_batch": 3, "stages": 4}, "--global-batch 4"),
        ({"global_batch": 16, "stages": 3}, "--stages 1, 2, 4, or other numbers of devices or samples"),
    ],
)
def test_a_batch_that_does_not_divide_says_what_would(said: dict[str, int], hint: str) -> None:
    wanted = SearchRequest(devices=4, step=StepRequest(**said))  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match="no way to divide") as raised:
        searched_step(graph_of(6), load_hardware("a100-80g-sxm"), wanted)
    assert raised.value.hint == hint


def test_no_number_of_choices_is_nought() -> None:
    for option in ("stages", "virtual_stages", "micro_batch"):
        step = StepRequest(global_batch=16, **{option: "0,2"})  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} 0,2: expected auto, or numbers from 1 on"):
            searched_step(graph_of(2), load_hardware("a100-80g-sxm"), SearchRequest(devices=2, step=step))


@pytest.mark.parametrize("batch", [1, 5, 12, 30])
@pytest.mark.parametrize("micro_batch", [(1,), (3,), (4, 6), None])
def test_the_nearest_batches_that_divide_are_named(batch: int, micro_batch: tuple[int, ...] | None) -> None:
    configs = ConfigSpace(6, batch, 6, 4, stages=(3,), micro_batch=micro_batch)
    dividing = [b for b in range(1, 99) if any(parallel_configs(replace(configs, global_batch=b), A100))]
    below, above = [b for b in dividing if b < batch][-1:], [b for b in dividing if b > batch][:1]
    assert what_divides(configs, A100) == f"--global-batch {' or '.join(map(str, below + above))}"


def test_a_micro_batch_far_above_the_batch_is_answered_at_once() -> None:
    configs = ConfigSpace(8, 64, 6, 4, micro_batch=(1 << 40,))
    assert what_divides(configs, A100) == f"--global-batch {1 << 40}"


@pytest.mark.parametrize(
    ("fixed", "reason"),
    [
        ({"pinned": True}, "pins of stages leave one part to a stage"),
        ({"micro_batch": (8,)}, "take micro-batches in groups, one for each stage"),
        ({"virtual_stages": (3,)}, "that the parts divide: there are 4"),
    ],
)
def test_why_stages_have_no_more_parts_is_said(fixed: dict[str, Any], reason: str) -> None:
    log = RejectedConfigs()
    configs = ConfigSpace(2, 24, 6, 4, **({"stages": (2,), "virtual_stages": (2,), "micro_batch": (2,)} | fixed))
    assert not list(parallel_configs(configs, A100, log))
    assert any(reason in message for message in log.reasons), log.reasons


def test_every_outer_choice_divides() -> None:
    configs = ConfigSpace(8, 24, 6, 4)
    choices = list(parallel_configs(configs, A100))
    assert len(set(choices)) == len(choices)
    for choice in choices:
        assert choice.stages * choice.replicas * choice.tensor == 8
        assert choice.replicas * choice.micro_batch * choice.micro_batches == 24
        assert choice.micro_batches >= choice.stages and choice.stages <= 6
        assert choice.virtual_stages == 1 or (
            choice.micro_batches % choice.stages == 0 and 4 % choice.virtual_stages == 0
        )
    sizes = {(c.stages, c.tensor) for c in choices}
    assert sizes == {(s, t) for s, t in itertools.product((1, 2, 4), (1, 2, 4, 8)) if s * t <= 8}
    alone = {c.micro_batch for c in choices if (c.stages, c.replicas) == (1, 1)}
    assert alone == {1, 2, 3, 4, 6, 8, 12, 24}, "the best one need not be a power of two"
