"""A lower bound on a simulated step without simulating it: what every stage has to do, and what it waits for at least.

A stage starts when the first micro-batch has passed the stages before it; after its own last backward the stages before
it still run theirs. Between, it is busy with all of its slots. No order of the slots changes that.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.cluster.hardware import Hardware
from autoshard.estimate.gradient_sync import syncs
from autoshard.estimate.pieces import pieces
from autoshard.estimate.stage_layers import layers_of
from autoshard.estimate.stage_memory import StageMemory, stage_memory
from autoshard.estimate.stage_slots import Host, Stages
from autoshard.estimate.step import hands_on
from autoshard.estimate.step_tail import send_seconds, stage_parameters, tail
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_program import BuiltTransformer, build
from autoshard.simulation.pipeline_schedule import SCHEDULES, Slot

MOST_REPLICAS = 2  # of the program whose pieces are priced: what one replica computes does not depend on their number
STEADY = 4  # micro-batches a stage: with more, no more are in flight


def program_of(model: Transformer, run: TrainingRun, hardware: Hardware) -> BuiltTransformer:
    """The program of one replica, or of two, which reduce their loss."""
    return build(model, replace(run, dp=min(run.dp, MOST_REPLICAS), shard=0), hardware)


def least_seconds(
    model: Transformer, run: TrainingRun, built: BuiltTransformer, hardware: Hardware, host: Host
) -> float:
    """No schedule of `run` is faster."""
    beside = hardware.constant("overlap.slowdown")
    stages = Stages(model, run, pieces(built, hardware), syncs(built, run, hardware), host, beside)
    send = send_seconds(model, run, hardware)
    kinds = _kinds(model, run)
    like = {kind: s for s, kind in enumerate(kinds)}  # of stages alike the last waits longest
    named = set(like.values())

    def seconds(stage: int, kind: str, chunk: int) -> float:
        slot = Slot(kind, 0, chunk)  # type: ignore[arg-type]
        return stages.seconds(stage, slot) + send * hands_on(stage, slot, run)

    once = {(s, kind): seconds(s, kind, 0) for s in named for kind in "FB"}
    tails = {s: sum(t for _, t in tail(built, model, run, hardware, s, stages.step_end_seconds(s))) for s in named}
    found = []
    for stage in named:
        passed = [once[like[kind], "F"] for kind in kinds[:stage]]
        returned = [once[like[kind], "B"] for kind in kinds[:stage]]
        busy = sum(seconds(stage, kind, chunk) for kind in "FB" for chunk in range(run.interleave)) * run.micro_batches
        ended = sum(passed) + busy
        found.append(ended + max(tails[stage], sum(returned) + tails[0]))
    return max(found)


def _kinds(model: Transformer, run: TrainingRun) -> list[tuple[tuple[int, ...], bool, bool]]:
    """What tells the work of two stages apart: their layers, and the ends of the model."""
    return [(layers_of(model, run, stage), stage == 0, stage == run.pp - 1) for stage in range(run.pp)]


def fullest(model: Transformer, run: TrainingRun, built: BuiltTransformer) -> StageMemory:
    """As the estimate has it: the first stage has most in flight, the last the head."""
    micro_batches = min(run.micro_batches, STEADY * run.pp)
    found = []
    kinds = _kinds(model, run)
    for stage in {kinds.index(kind) for kind in kinds}:  # of stages alike the first has most in flight
        order = SCHEDULES[run.schedule](stage, run.pp, micro_batches, run.interleave)
        count = stage_parameters(built, model, run, stage)
        found.append(stage_memory(built, model, run, count, order, stage))
    return max(found, key=lambda memory: memory.peak)
