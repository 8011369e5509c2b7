"""The fastest configurations that fit, searched in order of a lower bound: unsimulated ones can't be faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, nsmallest

from autoshard.cluster.hardware import Hardware
from autoshard.costs.host_memory import host_of as host_of_node
from autoshard.errors import InfeasibleError
from autoshard.estimate.run_space import RunSpace, check_none, configurations, runs
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import Estimate, estimate, host_of
from autoshard.estimate.step_bound import fullest, least_alone, least_seconds, program_of
from autoshard.estimate.transformer import TrainingRun
from autoshard.step_corrections.software import with_software
from autoshard.units import ROUNDING, format_bytes


@dataclass(frozen=True)
class BestRuns:
    """`best`: fastest first. Of `possible` configurations `fitting` (None: not counted) fit the memory and `simulated`
    were simulated; no other one takes less than `others_seconds` (infinite if all were simulated). `front`, if
    requested: fastest first, those that no other one beats in both time and memory."""

    best: tuple[Estimate, ...]
    possible: int
    fitting: int | None
    simulated: int
    others_seconds: float
    front: tuple[Estimate, ...] = ()


class _MicroBatches:
    """Micro-batch sizes that fit: if no way to save memory lets one fit, none lets a larger one fit, except one that
    leaves no gradients to a micro-batch after it."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], dict[int, bool]] = {}

    def hopeless(self, run: TrainingRun) -> bool:
        """True if a smaller micro-batch did not fit in any way. Sizes come ascending, each with all its ways."""
        by_size = self.known.setdefault(self._key(run), {})
        if run.keeps_gradients and any(not fitted for size, fitted in by_size.items() if size < run.micro_batch):
            return True
        by_size.setdefault(run.micro_batch, False)
        return False

    def fits(self, run: TrainingRun) -> None:
        self.known[self._key(run)][run.micro_batch] = True

    def _key(self, run: TrainingRun) -> tuple[int, ...]:
        return run.tp, run.pp, run.dp, run.cp, run.interleave, run.sequence_parallel


def best_runs(
    space: RunSpace, hardware: Hardware, count: int, host: Host | None = None, front: bool = False
) -> BestRuns:
    """The `count` fastest of a space. InfeasibleError if none fits, UsageError if a setting suits none."""
    model = space.model
    priced = with_software(hardware, space.run.software, model.fused_attention, model.fused_loss)
    if space.run.offload:
        host_of_node(hardware)
    own_host = host or host_of(hardware, space.run.software)
    alone: dict[TrainingRun, float] = {}
    fitting: list[tuple[float, int, TrainingRun]] = []
    peaks: list[float] = []  # of `fitting`
    possible, least, tried = 0, float("inf"), _MicroBatches()
    for number, run in enumerate(runs(space, hardware)):
        possible += 1
        if tried.hopeless(run):
            continue
        built = program_of(model, run, hardware)
        memory = fullest(model, run, built)
        least = min(least, memory.peak)
        if memory.fits(hardware):
            tried.fits(run)
            key = replace(run, zero=0)
            if key not in alone:
                alone[key] = least_alone(model, run, built, priced, own_host)
            fitting.append((alone[key], number, run))
            peaks.append(memory.peak)
    if not possible:
        check_none(space, configurations(space, hardware))
    if not fitting:
        raise InfeasibleError(_none_fits(space, hardware, possible, least), "more devices, or a smaller batch or model")
    results: list[Estimate] = []
    others = float("inf")

    def exact(run: TrainingRun) -> float:
        return least_seconds(model, run, program_of(model, run, hardware), priced, own_host)

    for bound, run in best_first(fitting, exact):
        if len(results) >= count and bound >= nsmallest(count, (m.step_seconds for m in results))[-1] * (1 - ROUNDING):
            others = bound
            break
        results.append(estimate(model, run, hardware, host))
    on_front: tuple[Estimate, ...] = ()
    if front:
        known = {result.run: result for result in results}
        ordered = [
            (bound, run) for _, (bound, _, run) in sorted(zip(peaks, fitting, strict=True), key=lambda pair: pair[0])
        ]
        on_front = front_of(ordered, exact, lambda run: known.get(run) or estimate(model, run, hardware, host))
    results.sort(key=lambda m: (m.step_seconds, m.memory.peak))
    return BestRuns(tuple(results[:count]), possible, len(fitting), len(results), others, on_front)


def front_of(
    runs: Iterable[tuple[float, TrainingRun]],
    exact: Callable[[TrainingRun], float],
    simulated: Callable[[TrainingRun], Estimate],
) -> tuple[Estimate, ...]:
    """The Pareto front of step time and memory, fastest first; `runs` are (bound, run), the leanest first. Runs whose
    bounds prove them slower are not simulated."""
    front: list[Estimate] = []
    for bound, run in runs:
        best = front[-1].step_seconds if front else float("inf")
        if bound >= best or exact(run) >= best or (candidate := simulated(run)).step_seconds >= best:
            continue
        if front and front[-1].memory.peak >= candidate.memory.peak:
            front.pop()
        front.append(candidate)
    return tuple(reversed(front))


def best_first(
    runs: list[tuple[float, int, TrainingRun]], exact: Callable[[TrainingRun], float]
) -> Iterator[tuple[float, TrainingRun]]:
    """Runs by the `exact` bound, ascending; it is computed only for those whose first bound, in (bound, number, run),
    is not above it."""
    heap = [(bound, number, False, run) for bound, number, run in runs]
    heapify(heap)
    while heap:
        bound, number, is_exact, run = heappop(heap)
        if is_exact:
            yield bound, run
        else:
            heappush(heap, (exact(run), number, True, run))


def _none_fits(space: RunSpace, hardware: Hardware, possible: int, least: float) -> str:
    where = f"{space.devices} devices of {hardware.name}"
    if not possible:
        return f"nothing divides: no configuration of {where} suits the model and the batch of {space.run.batch}"
    room = format_bytes(hardware.usable_memory_bytes)
    host = f", and {format_bytes(hardware.host_memory_bytes)} of its host" if space.run.offload else ""
    needed = f"the one with the least memory needs {format_bytes(least)}, {room} may be used{host}"
    return f"none of {possible} configurations fits {where}: {needed}"
