"""Receive buffers of a stage: as many as its schedule has at once, and none is written to while it is read."""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, schedules

from autoshard.emit.runtime.receive_buffers import ReceivingStage
from autoshard.simulation.pipeline_schedule import ReceiveBuffers, receive_buffers
from autoshard.simulation.step_timeline import PartCosts, StageCosts, StepCosts, simulate_step
from autoshard.verification.ranks.rank_processes import run_processes
from tests.receiving_worker import MICRO_BATCHES, STAGES, batch, loss, whole


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("receiving")
    run_processes("tests.receiving_worker", [str(folder)], STAGES, 240.0)
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(STAGES)]


@cache
def alone(chunks: int) -> list[list[torch.Tensor]]:
    """The gradients of two steps, by part."""
    parts = whole(chunks)
    for x in (*batch(), *batch()):
        loss(torch.nn.Sequential(*parts)(x[None]), x).backward()
    return [[p.grad for p in part.parameters() if p.grad is not None] for part in parts]


def wrong(ranks: list[dict[str, Any]], name: str, chunks: int) -> float:
    """The largest difference of a gradient."""
    found = {int(part): grads for rank in ranks for part, grads in rank[name]["gradients"].items()}
    return max(
        float((torch.tensor(grad, dtype=torch.float64) - expected).abs().max())
        for part, grads in found.items()
        for grad, expected in zip(grads, alone(chunks)[part], strict=True)
    )


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_a_stage_has_the_buffers_that_are_predicted(ranks: list[dict[str, Any]], schedule: str, chunks: int) -> None:
    assert wrong(ranks, schedule, chunks) < 1e-12
    assert [rank[schedule]["left"] for rank in ranks] == [0] * STAGES
    predicted = receive_buffers(schedule, STAGES, MICRO_BATCHES, chunks)
    most = {int(part): ReceiveBuffers(*found) for rank in ranks for part, found in rank[schedule]["most"].items()}
    for part, own in enumerate(predicted):
        assert own.inputs == most[part].inputs
        slack = 1 if schedule == "interleaved" else 0
        assert own.gradients - slack <= most[part].gradients <= own.gradients


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_a_stage_holds_what_it_sent_as_is_predicted(ranks: list[dict[str, Any]], schedule: str, chunks: int) -> None:
    """Of tensors as large as each other: received, sent, and sent long ago."""
    last = STAGES * chunks - 1
    parts = tuple(PartCosts(1.0, 2.0, float(n < last), 0.0, float(n > 0)) for n in range(last + 1))
    made = simulate_step(StepCosts(schedule, MICRO_BATCHES, parts, (StageCosts(),) * STAGES))
    for rank, peak in zip(ranks, made.peak_bytes, strict=True):
        slack = 1 if chunks == 1 else 2 * chunks  # gradients come one after the other when all else is sent
        assert peak - slack <= rank[schedule]["together"] <= peak


def test_one_too_few_is_seen(ranks: list[dict[str, Any]]) -> None:
    """That micro-batches have MICRO_BATCHES - 1 buffers in turn, where GPipe has all of them at once."""
    assert wrong(ranks, "one too few", 1) > 1e-3


@pytest.mark.parametrize("stages", [2, 3, 5, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_the_interleaved_order_is_torchs(stages: int, chunks: int, rounds: int) -> None:
    """Each stage has room for what torch's own order of receives and backwards makes, and for little more."""
    count = stages * rounds
    predicted = receive_buffers("interleaved", stages, count, chunks)
    given = SimpleNamespace(n_local_stages=chunks, pp_group_size=stages, _n_microbatches=count,
                            n_microbatches=count, microbatches_per_round=stages)  # fmt: skip
    make = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations
    orders = {rank: make(given, rank) for rank in range(stages)}  # type: ignore[arg-type]
    orders = {rank: schedules._add_reduce_grad(schedules._add_unshard_reshard(own), count)  # type: ignore[arg-type]
              for rank, own in orders.items()}  # fmt: skip
    full = schedules._add_send_recv(orders, lambda part: part % stages, stages * chunks)  # type: ignore[arg-type]
    for stage in range(stages):
        held: dict[tuple[str, int], int] = {}
        most = 0
        for action in full[stage]:
            kind = action.computation_type.name
            if kind in ("RECV_F", "RECV_B"):
                key = (kind, action.stage_index)
                held[key] = held.get(key, 0) + 1
            if kind == "FULL_BACKWARD":
                for name in ("RECV_F", "RECV_B"):
                    if (name, action.stage_index) in held:
                        held[name, action.stage_index] -= 1
            most = max(most, sum(held.values()))
        expected = sum(map(sum, predicted[stage::stages]))
        assert most <= expected <= 2 * most + 3


def test_the_first_transfers_are_received_as_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.9 opens its connections with an int64 that is received as a float32: gloo ends the process."""

    def of_torch_2_9(_: PipelineStage) -> list[Any]:
        return [SimpleNamespace(tensor=torch.zeros(1)), SimpleNamespace(tensor=torch.tensor(1))]

    monkeypatch.setattr(PipelineStage, "_get_init_p2p_neighbors_ops", of_torch_2_9)
    first = ReceivingStage._get_init_p2p_neighbors_ops(object.__new__(ReceivingStage))
    assert len({(transfer.tensor.dtype, transfer.tensor.numel()) for transfer in first}) == 1
