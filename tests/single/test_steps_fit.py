"""A searched whole step fits the memory limit by its own program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoshard.api import verbs
from autoshard.api.step_answer import planned_step
from autoshard.constraints.step_request import StepRequest
from autoshard.errors import InfeasibleError
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.rules.resize.rebatch import batch_size
from autoshard.search.search_request import SearchRequest
from autoshard.whole_step_search.blocks.block_splits import block_splits
from tests.single.test_joint_search import GPT2, hardware


@pytest.mark.parametrize("level", [0, 2])
def test_the_program_of_a_step_fits_where_it_holds_more_than_its_blocks(level: int) -> None:
    """As with tensors of a few bytes, each of which takes a whole block of the allocator."""
    sizes = {"batch": 4, "sequence": 8, "n_layer": 3, "n_embd": 32, "n_head": 4, "vocabulary": 64}
    model = verbs.capture(str(GPT2), arguments=sizes)
    step = StepRequest(global_batch=8, micro_batch=4, recompute="none,full", stages=1)
    wanted = SearchRequest(devices=1, step=step, level=level)
    free = planned_step(model, hardware(), wanted).result
    limit = free.best.peak_bytes
    assert free.best.program_bytes > limit, "this model's blocks count no less"
    answer = planned_step(model, hardware(), replace(wanted, memory_limit_bytes=limit))
    assert answer.result.best.program_bytes <= limit == answer.plan.plan.capacity_bytes
    assert answer.result.best.problem.capacity_bytes < limit
    assert answer.result.bound == pytest.approx(free.bound), "the bound is of the limit"
    assert "searched within" in " ".join(answer.plan.plan.search.step_messages)
    with pytest.raises(InfeasibleError, match="no plan was found whose step fits in") as caught:
        least = planned_step(model, hardware(), replace(wanted, level=1)).result.best
        planned_step(model, hardware(), replace(wanted, memory_limit_bytes=least.peak_bytes))
    assert not caught.value.proven


@pytest.mark.slow
def test_searches_of_less_room_come_to_fit_split_no_block_anew_and_try_what_lies_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a step of 2,000,000 bytes holds more than its blocks, proportion alone came to none that fits."""
    sizes = {"batch": 4, "sequence": 8, "n_layer": 6, "n_embd": 32, "n_head": 4, "vocabulary": 64}
    model = verbs.capture(str(GPT2), arguments=sizes)
    split: list[tuple[str, int]] = []

    def counted(graph: Graph, mesh: Mesh, *args: Any) -> Any:
        split.append((str(mesh), batch_size(graph)))
        return block_splits(graph, mesh, *args)

    monkeypatch.setattr("autoshard.whole_step_search.front_store.block_splits", counted)
    wanted = SearchRequest(devices=2, step=StepRequest(global_batch=8))
    free = planned_step(model, hardware(), wanted).result.best
    once = len(split)
    tight = replace(wanted, memory_limit_bytes=0.85 * free.program_bytes)
    result = planned_step(model, hardware(), tight).result
    assert result.best.program_bytes <= 0.85 * free.program_bytes
    assert result.best.problem.capacity_bytes < 0.85 * free.program_bytes, "one search is enough"
    assert len(split) == 2 * once
    monkeypatch.setattr("autoshard.api.step_answer.ROUGHLY", 1.0)
    assert result.best.program_seconds < planned_step(model, hardware(), tight).result.best.program_seconds
