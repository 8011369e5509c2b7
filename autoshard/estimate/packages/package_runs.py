"""The best packages for a transformer by its numbers: whole-step search over blocks sharded as in Megatron-LM.

As for a captured model, the blocks' costs find the best steps, and the best of these are priced by their own programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.cluster.hardware import Hardware
from autoshard.constraints.step_request import RECOMPUTE
from autoshard.errors import InfeasibleError, UsageError
from autoshard.estimate.best_runs import BestRuns, best_runs
from autoshard.estimate.packages.package_blocks import (
    LAYER,
    MEGATRON_SP,
    MegatronStore,
    block_store,
    line_of,
    problem_of,
)
from autoshard.estimate.packages.package_estimate import package_estimate
from autoshard.estimate.packages.package_program import Layers
from autoshard.estimate.packages.package_step import layers_by_keep, priced
from autoshard.estimate.run_space import RunSpace, check_none
from autoshard.estimate.stage_layers import balanced
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import Estimate
from autoshard.estimate.transformer import Recompute, Schedule, TrainingRun, Transformer, is_possible
from autoshard.search.objectives import SPEED
from autoshard.step_corrections.software import PACKAGES
from autoshard.system.process_memory import infrequent_gc
from autoshard.whole_step_search.best_first import Problem, best_steps
from autoshard.whole_step_search.config_space import ConfigSpace, ParallelConfig, RejectedConfigs, parallel_configs
from autoshard.whole_step_search.front_store import measured_replicas
from autoshard.whole_step_search.solved_steps import SolvedStep
from autoshard.whole_step_search.step_levels import OBJECTIVES

WORDS: tuple[Recompute, ...] = ("none", "selective", "full")


def best_runs_any(
    space: RunSpace, hardware: Hardware, count: int, host: Host | None = None, front: bool = False
) -> BestRuns:
    """Like `best_runs`, for packages too. UsageError if their front is requested."""
    if space.run.software != PACKAGES:
        return best_runs(space, hardware, count, host, front)
    if front:
        raise UsageError(
            f"--pareto is not offered for --software {PACKAGES}", "without --software, or without --pareto"
        )
    with infrequent_gc():
        return package_runs(space, hardware, count, host)


def package_runs(space: RunSpace, hardware: Hardware, count: int, host: Host | None = None) -> BestRuns:
    """The `count` fastest that were found. InfeasibleError if none fits, UsageError if a setting suits none."""
    if space.run.stage_layers:
        raise UsageError("--search finds the layers of stages, got --stage-layers", "leave them out")
    adjusted, log = priced(hardware, space.model, host), RejectedConfigs()
    replicas = space.fixed.get("dp")
    divided = [c for c in parallel_configs(_outer(space), adjusted, log) if replicas in (None, c.replicas)]
    choices = [choice for choice in divided if is_possible(space.model, _run(space, choice))]
    if not choices:
        check_none(space, (_run(space, choice) for choice in divided))
        message = f"nothing divides: no configuration of {space.devices} devices of {hardware.name} suits the model"
        raise InfeasibleError(
            f"{message} and the batch of {space.run.batch}", "more devices, or another batch or model"
        )
    offered = _offered(space)
    problems = list(_problems(space, choices, offered, adjusted))
    store = _store(space, _sequences(space, choices[0].tensor)[0], measured_replicas(choices), adjusted)
    outcome = best_steps(OBJECTIVES[SPEED], problems, store.line, log, count)
    steps = (outcome.best, *outcome.others)[:count]
    estimates = [_estimate(space, step, adjusted) for step in steps]
    estimates.sort(key=lambda row: (not row.memory.fits(hardware), row.step_seconds, row.memory.peak))
    return BestRuns(tuple(estimates), outcome.considered, None, outcome.solved, outcome.bound)


def _outer(space: RunSpace) -> ConfigSpace:
    """Configuration space with the fixed settings, in the terms of the whole-step search."""
    model, fixed = space.model, space.fixed

    def only(name: str) -> tuple[int, ...] | None:
        return (fixed[name],) if name in fixed else None  # type: ignore[return-value]

    return ConfigSpace(
        space.devices, space.run.batch, model.layers + 2, model.layers, only("pp"), only("interleave"), None,
        only("tp"), only("micro_batch"), only("zero"), _offered(space),
    )  # fmt: skip


def _offered(space: RunSpace) -> tuple[Recompute, ...]:
    """Ways to recompute that a layer may take."""
    pinned = space.fixed.get("recompute")
    return tuple(word for word in WORDS if pinned in (None, word))


def _run(space: RunSpace, choice: ParallelConfig) -> TrainingRun:
    schedule: Schedule = "interleaved" if choice.virtual_stages > 1 else "1f1b"
    return replace(
        space.run, dp=choice.replicas, tp=choice.tensor, pp=choice.stages, schedule=schedule,
        interleave=choice.virtual_stages, micro_batch=choice.micro_batch, zero=choice.zero, sequence_parallel=False,
        recompute=_offered(space)[0],
    )  # fmt: skip


def _sequences(space: RunSpace, tensor: int) -> tuple[bool, ...]:
    """Sequence parallelism off and on, where possible and not fixed."""
    if tensor == 1 or space.model.sequence % tensor:
        return (False,)
    return (True,) if space.fixed.get("sequence_parallel") else (False, True)


def _store(space: RunSpace, cut: bool, replicas: int, hardware: Hardware) -> MegatronStore:
    run = space.run
    return block_store(space.model, run.precision, run.optimizer, cut, replicas, hardware)


def _problems(
    space: RunSpace, choices: Sequence[ParallelConfig], offered: tuple[Recompute, ...], hardware: Hardware
) -> Iterator[Problem]:
    """Problems with small micro-batches first: if one layer alone is too much for a device, a larger one is, too. The
    cost of shards is measured with the first."""
    room, replicas = hardware.usable_memory_bytes, measured_replicas(choices)
    too_much: dict[tuple[int, bool], int] = {}
    for choice in sorted(choices, key=lambda choice: choice.micro_batch):
        for cut in _sequences(space, choice.tensor):
            key = choice.tensor, cut
            if choice.micro_batch >= too_much.get(key, choice.micro_batch + 1):
                continue
            store = _store(space, cut, replicas, hardware)
            costs = store.costs(choice.inner, choice.micro_batch)[0].costs
            if min(size for _, size in costs[LAYER].working_bytes) > room:
                too_much[key] = choice.micro_batch
                continue
            yield problem_of(space.model, choice, store, offered, hardware, room)


def _estimate(space: RunSpace, step: SolvedStep, hardware: Hardware) -> Estimate:
    """Estimate by the programs of its parts, which may be a few percent above the costs of blocks."""
    problem, plan, model = step.problem, step.plan, space.model
    kinds, parts = line_of(model), []
    for part in plan.parts:
        layers: dict[str, int] = {}
        for k in range(part.first, part.stop):
            if kinds[k] == LAYER:
                keep = problem.keeps[LAYER][plan.points[k]]
                layers[keep] = layers.get(keep, 0) + 1
        parts.append(layers)
    cut = step.split is not None and step.split.name == MEGATRON_SP
    run = replace(
        _run(space, problem.choice), sequence_parallel=cut, stage_layers=_uneven(model, parts), recompute=_most(parts)
    )  # fmt: skip
    return package_estimate(model, run, parts, hardware)


def _uneven(model: Transformer, parts: Sequence[Layers]) -> tuple[int, ...]:
    """Layers of the parts, if they are not as even as possible."""
    counts = tuple(sum(layers.values()) for layers in parts)
    return () if counts == balanced(model.layers, len(counts)) else counts


def _most(parts: Sequence[Layers]) -> Recompute:
    """Recomputation of most layers."""
    counts = layers_by_keep(parts)
    return max(WORDS, key=lambda word: counts.get(RECOMPUTE[word], 0))
