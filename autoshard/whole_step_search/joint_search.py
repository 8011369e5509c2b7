"""Finds the best whole step of a space: every outer choice with each split of its blocks, the best at the requested
level.

No plan of the space is better than the bound, in whatever order its undivided forwards and backwards run that its
devices' memory allows (level 2). The space: every outer choice; every block split over a replica's devices in one of
the ways that were found; each block keeping all, the expensive results, or its input and, if asked for, the results of
collectives in addition to these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np

from autoshard.cluster.hardware import Hardware
from autoshard.constraints.recomputed_blocks import called_modules
from autoshard.errors import InfeasibleError
from autoshard.ir.graph import Graph
from autoshard.ir.plan import KEEP_SOME, PLAIN
from autoshard.program.step_check import recompute_obstacle
from autoshard.search.objectives import SPEED
from autoshard.whole_step_search.best_first import Later, Problem, best_steps
from autoshard.whole_step_search.blocks.block_costs import BlockCosts
from autoshard.whole_step_search.blocks.block_line import BlockLine
from autoshard.whole_step_search.blocks.block_pins import PinRefused, StepPins
from autoshard.whole_step_search.blocks.block_splits import BlockSplit, SplitRequest
from autoshard.whole_step_search.config_space import (
    ConfigSpace,
    ParallelConfig,
    RejectedConfigs,
    parallel_configs,
    what_divides,
)
from autoshard.whole_step_search.front_store import FrontStore, FrontStores, SplitCosts, measured_replicas
from autoshard.whole_step_search.solved_steps import JointResult
from autoshard.whole_step_search.step_costs import StepProblem
from autoshard.whole_step_search.step_levels import OBJECTIVES


def joint_search(
    graph: Graph,
    hardware: Hardware,
    space: ConfigSpace,
    capacity_bytes: float,
    *,
    stage_of: dict[int, int] | None = None,
    recompute: Mapping[int, str] = MappingProxyType({}),
    count: int = 8,
    level: int = SPEED,
    pins: StepPins | None = None,
    request: SplitRequest | None = None,
    tell: Callable[[str], None] = lambda text: None,
    stores: FrontStores | None = None,
    bounded: bool = True,
) -> JointResult:
    """The best step of `space`: the fastest; at level 1 the one that needs least memory, at level 0 the one with the
    least overhead. `stage_of`: blocks that a pin puts on a stage; `recompute`: policies of kinds of blocks that are
    recomputed in any case; `pins` and `request` hold in every split of the blocks; `stores`: of earlier
    searches of this graph and hardware; `bounded`: False if another search has the bound, and the fastest is found
    without one. InfeasibleError if no step fits, UsageError if no mesh satisfies a pin or a style."""
    pins = pins or StepPins()
    log = RejectedConfigs()
    choices = list(parallel_configs(space, hardware, log))
    stores = stores or FrontStores(graph, hardware)
    store = stores.of(measured_replicas(choices), pins, request or SplitRequest(), tell)
    line = store.line
    why_not = {size: store.not_carried(size) for size in {choice.micro_batch for choice in choices}}
    for choice in choices:
        if why_not[choice.micro_batch]:
            log.no(f"micro-batches of {choice.micro_batch}: {why_not[choice.micro_batch]}")
    choices = [choice for choice in choices if not why_not[choice.micro_batch]]
    if hardware.kinds and any(choice.virtual_stages > 1 for choice in choices):
        log.no("several parts of each stage: stages of several kinds of devices have one")
        choices = [choice for choice in choices if choice.virtual_stages == 1]
    kinds = tuple(block.kind for block in line.blocks)
    named = {block.kind for block in line.blocks if block.module and _is_recomputable(graph, block.module)}
    offered = [(recompute[kind],) if kind in recompute else space.keeps for kind in range(max(kinds) + 1)]
    keeps = tuple(policies if kind in named else ("all",) for kind, policies in enumerate(offered))

    def problems_of(own_choices: list[ParallelConfig]) -> list[Problem]:
        splits = {choice: _pinned_splits(store, choice, log) for choice in own_choices}
        for choice in sorted(own_choices, key=lambda choice: -choice.micro_batch):  # where the host hides least
            for costed in splits[choice] if choice.zero else ():
                store.sharded(costed)
        problems: list[Problem] = []
        for choice in own_choices:
            for costed in splits[choice]:
                allowed = _allowed(stage_of or {}, choice.stages, len(kinds))
                sharded = store.sharded(costed) if choice.zero else ()
                there = tuple(_keeps(*pair) for pair in zip(keeps, costed.costs, strict=True))
                problem = StepProblem(choice, kinds, costed.costs, there, hardware, capacity_bytes, allowed, sharded)
                problems.append((_of_kinds(problem, store, costed, graph, space), costed.split))
        for message in _not_some(space, line, named, problems):
            if message not in log.reasons:
                log.no(message)
        return problems

    if not choices:
        reasons = "; ".join(f"{reason} ({n})" for reason, n in log.reasons.items())
        message = f"no way to divide {space.devices} devices and {space.global_batch} samples: {reasons}"
        raise InfeasibleError(message, what_divides(space, hardware))
    later = _later(choices, store, problems_of) if level == SPEED else []
    problems = problems_of([choice for choice in choices if len(choice.inner) == 1] if later else choices)
    if not problems:  # of one axis pins leave none
        problems, later = [problem for group in later for problem in group.problems()], []
        _check_pins(store, problems)
    result = best_steps(OBJECTIVES[level], problems, line, log, count, tell, later, bounded)
    return replace(result, fronts=len(store.computed), pins=pins)


def _of_kinds(
    problem: StepProblem, store: FrontStore, costed: SplitCosts, graph: Graph, space: ConfigSpace
) -> StepProblem:
    """`problem` with a separate problem for the kind of devices of each stage or, with one stage, of each replica, if
    there are several kinds and replicas may take unequal shares: they wait for each other only at the end of a step."""
    choice, hardware = problem.choice, problem.hardware
    shared = choice.zero < 2 and choice.expert == 1 and choice.micro_batches > 1
    shared = shared and not (space.equal_shares or graph.buffer_updates or graph.dynamic)
    count = choice.stages if choice.stages > 1 else choice.replicas if shared else 1
    size = problem.mesh.size // count
    each = [hardware.of_ranks(number * size, size) for number in range(count)]
    if len(set(each)) == 1 and each[0] == hardware:
        return problem
    by_hardware: dict[Hardware, StepProblem] = {hardware: problem}
    for kind in dict.fromkeys(each):
        if kind not in by_hardware:
            of = store.of_kind(kind)
            same = of.same_split(costed)
            sharded = of.sharded(same) if choice.zero else ()
            room = problem.capacity_bytes * kind.usable_memory_bytes / hardware.usable_memory_bytes
            changed = replace(problem, costs=same.costs, hardware=kind, capacity_bytes=room, sharded=sharded)
            by_hardware[kind] = replace(changed, cluster=hardware)
    problems = tuple(by_hardware[kind] for kind in each)
    return replace(problem, by_stage=problems) if choice.stages > 1 else replace(problem, by_replica=problems)


def _pinned_splits(store: FrontStore, choice: ParallelConfig, log: RejectedConfigs) -> tuple[SplitCosts, ...]:
    """Splits of an outer choice that satisfy the pins; if there are none, the log says why, by an example of each
    pin."""
    try:
        return store.splits(choice)
    except PinRefused as error:
        log.no(store.example(error).message)
        return ()


def _check_pins(store: FrontStore, problems: list[Problem]) -> None:
    if not problems and store.nearest is not None:
        raise store.nearest[1]


def _later(
    choices: list[ParallelConfig], store: FrontStore, problems_of: Callable[[list[ParallelConfig]], list[Problem]]
) -> list[Later]:
    """Choices with a second axis, if there are others to begin with: a split over two axes takes longest to find."""
    meshes = dict.fromkeys(choice.inner for choice in choices if len(choice.inner) > 1)
    if len({choice.inner for choice in choices} - meshes.keys()) == 0:
        return []
    later = []
    for inner in meshes:
        of_mesh = [choice for choice in choices if choice.inner == inner]
        least = min(map(store.least_seconds, of_mesh))
        later.append(Later(tuple(of_mesh), least, partial(problems_of, of_mesh)))
    return later


def _keeps(offered: tuple[str, ...], costs: BlockCosts) -> tuple[str, ...]:
    """Policies for a kind of block: those offered, with `KEEP_SOME` replaced by the ways found. Policies that keep
    collectives' results are left out of a block that has none."""
    kept_bytes = dict(costs.saved_bytes)
    some = [keep for keep in kept_bytes if keep.startswith(KEEP_SOME)]
    plain = {keep for keep in PLAIN if PLAIN[keep] in offered and kept_bytes[keep] == kept_bytes[PLAIN[keep]]}
    wanted = [keep for keep in offered if keep not in plain]
    return tuple(policy for keep in wanted for policy in (some if keep == KEEP_SOME else [keep])) or ("all",)


def _not_some(
    space: ConfigSpace, line: BlockLine, named: set[int], problems: Iterable[tuple[StepProblem, BlockSplit | None]]
) -> Iterator[str]:
    """Note for each kind of block whose results can't be kept one by one, although that is asked for."""
    offered = {kind for problem, _ in problems for kind, keeps in enumerate(problem.keeps) if _has_some(keeps)}
    for kind in sorted(named - offered) if KEEP_SOME in space.keeps else ():
        block = next(block for block in line.blocks if block.kind == kind)
        message = "it is not called by itself, or has other matmuls than those of several linear layers and attention"
        yield f"results of {block.module}, kept one by one: {message}"


def _has_some(keeps: tuple[str, ...]) -> bool:
    return any(keep.startswith(KEEP_SOME) for keep in keeps)


def _is_recomputable(graph: Graph, path: str) -> bool:
    """Can the whole block be recomputed?"""
    called = called_modules(graph, path)
    return bool(called) and not any(recompute_obstacle(graph, module, 2) for module in called)


def _allowed(stage_of: dict[int, int], stages: int, blocks: int) -> np.ndarray | None:
    if not stage_of:
        return None
    allowed = np.ones((stages, blocks), bool)
    for block, stage in stage_of.items():
        allowed[:, block] = np.arange(stages) == stage
    return allowed
