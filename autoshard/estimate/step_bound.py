"""A lower bound on a simulated step without simulating it: each stage's work, and its least waiting.

A stage starts when the first micro-batch has passed the stages before it; after its own last backward the stages before
it still run theirs. Between, it is busy with all of its slots. No order of the slots changes that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from autoshard.cluster.hardware import Hardware
from autoshard.estimate.gradient_sync import Sync, Syncs, syncs
from autoshard.estimate.layer_costs import pieces
from autoshard.estimate.optimizer_step import send_seconds, stage_parameters, tail
from autoshard.estimate.stage_layers import layers_of
from autoshard.estimate.stage_memory import StageMemory, fullest_of, stage_memory
from autoshard.estimate.stage_slots import Host, Stages
from autoshard.estimate.step import hands_on
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_program import BuiltTransformer, build
from autoshard.program.schedules.pipeline_schedule import Slot

_NO_SYNC = Sync(0, 0.0, 0.0)
_NO_SYNCS = Syncs(_NO_SYNC, _NO_SYNC, _NO_SYNC)


def program_of(model: Transformer, run: TrainingRun, hardware: Hardware) -> BuiltTransformer:
    """The program whose pieces are priced: of one replica, or of those that share experts, as one's computation does
    not depend on their number; of two if it is one device, whose loss alone would not be a sum over several, and if
    tensor parallelism shards experts: a router's gradient is then summed with that over replicas, if there are any, and
    the path of its tokens' gradients depends on that."""
    several = min(run.dp // run.ep, 2)
    alone = run.tp * run.cp * run.ep > 1 and not (model.experts and run.tp > 1)
    replicas = run.ep * (1 if alone else several)
    return build(model, replace(run, dp=replicas, shard=0), hardware)


def least_alone(model: Transformer, run: TrainingRun, built: BuiltTransformer, hardware: Hardware, host: Host) -> float:
    """Lower bound on all schedules of `run`, at any level of ZeRO: without exchange between replicas or an optimizer.
    Quicker, and lower, than `least_seconds`."""
    stages = Stages(model, replace(run, zero=0), pieces(built, hardware, run.compiled), _NO_SYNCS, host)
    return _least(stages, send_seconds(model, run, hardware), {})


def least_seconds(
    model: Transformer, run: TrainingRun, built: BuiltTransformer, hardware: Hardware, host: Host
) -> float:
    """Lower bound on the seconds of all schedules of `run`."""
    beside = hardware.constant("overlap.slowdown")
    stages = Stages(model, run, pieces(built, hardware, run.compiled), syncs(built, run, hardware), host, beside)
    named = _last_alike(model, run)
    tails = {s: sum(t for _, t in tail(built, model, run, hardware, s, stages.step_end_seconds(s))) for s in named}
    return _least(stages, send_seconds(model, run, hardware), tails)


def _least(stages: Stages, send: float, tails: Mapping[int, float]) -> float:
    """Lower bound from each stage. `tails`: seconds of a stage after its last backward; none for missing stages."""
    model, run = stages.model, stages.run
    kinds = _kinds(model, run)
    like = {kind: s for s, kind in enumerate(kinds)}

    def seconds(stage: int, kind: str, chunk: int) -> float:
        slot = Slot(kind, 0, chunk)  # type: ignore[arg-type]
        return stages.seconds(stage, slot) + send * hands_on(stage, slot, run)

    once = {(s, kind): seconds(s, kind, 0) for s in like.values() for kind in "FB"}
    bounds = []
    for stage in like.values():
        passed = [once[like[kind], "F"] for kind in kinds[:stage]]
        returned = [once[like[kind], "B"] for kind in kinds[:stage]]
        busy = sum(
            count * seconds(stage, kind, chunk)
            for chunk, count in _chunks(run, stage, kinds[stage][0])
            for kind in "FB"
        )
        ended = sum(passed) + busy * run.micro_batches
        bounds.append(ended + max(tails.get(stage, 0.0), sum(returned) + tails.get(0, 0.0)))
    return max(bounds)


def _chunks(run: TrainingRun, stage: int, layers: tuple[int, ...]) -> list[tuple[int, int]]:
    """(one chunk, number of the stage's chunks with the same work)."""

    def work(chunk: int) -> tuple[int, bool, bool]:
        part = chunk * run.pp + stage
        return layers[chunk], part == 0, part == run.pp * run.interleave - 1

    alike = {work(chunk): chunk for chunk in range(run.interleave)}
    counts = Counter(map(work, range(run.interleave)))
    return [(chunk, counts[key]) for key, chunk in alike.items()]


Kind = tuple[tuple[int, ...], bool, bool]


def _kinds(model: Transformer, run: TrainingRun) -> list[Kind]:
    """Kind of each stage, which determines its work: its layers, and the ends of the model."""
    return [(layers_of(model, run, stage), stage == 0, stage == run.pp - 1) for stage in range(run.pp)]


def _last_alike(model: Transformer, run: TrainingRun) -> set[int]:
    """The last stage of each kind, which waits longest."""
    return set({kind: stage for stage, kind in enumerate(_kinds(model, run))}.values())


def fullest(model: Transformer, run: TrainingRun, built: BuiltTransformer) -> StageMemory:
    """Memory of the fullest device, as in the estimate: the first stage has most in flight, the last the head."""
    memories = []
    kinds = _kinds(model, run)
    for stage in {kinds.index(kind) for kind in kinds}:  # of stages alike the first has most in flight
        count = stage_parameters(built, model, run, stage)
        memories.append(stage_memory(built, model, run, count, stage))
    return fullest_of(memories)
