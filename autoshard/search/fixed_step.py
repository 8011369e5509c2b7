"""The step plan that a user fixed: micro-batches, and stages cut at block boundaries by predicted seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from autoshard.cluster.device_kinds import rank_words
from autoshard.cluster.hardware import Hardware, parse_hardware
from autoshard.constraints.model_request import recomputed_blocks, with_requests
from autoshard.constraints.recomputed_blocks import called_modules, torn_modules
from autoshard.constraints.step_request import AUTO, EQUAL, NO_PLACES, RECOMPUTE, TENSORS, StagePin, StepRequest
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import KEEP_ALL, PLACED_FIELDS, BlockPolicy, PlacePlan, Plan, StagePart, StepPlan
from autoshard.program.schedules.placed_parts import parts_on, placed_parts
from autoshard.program.step_check import (
    check_counts,
    check_step,
    dealt,
    micro_batches_of,
    recompute_obstacle,
    share_words,
)
from autoshard.program.weight_buckets import block_of
from autoshard.search.places.place_search import PlacedFound, searched_places
from autoshard.units import format_seconds

NO_CALL = "it is a list, and its modules make a single operator each"


def with_step(plan: Plan, graph: Graph, request: StepRequest) -> Plan:
    """`plan` with the step that `request` fixes, and the model's own modules. UsageError if there is none."""
    request = with_requests(request, graph)
    count = check_request(graph, request)
    stages, virtual = request.fixed_stages(), request.virtual_stages or 1
    assert isinstance(virtual, int)
    recompute, reasons = _policies(graph, request.recompute, count)
    places = tuple((pin.path, pin.stage) for pin in request.places)
    notes = [f"{path} is not recomputed: {why}" for path, why in reasons.items() if why]
    if request.place == NO_PLACES:
        notes.append("place() has no effect: --place none, or a model on one device")
    if request.place == AUTO and stages > 1:
        whole = replace(plan, step=StepPlan(count, request.order, recompute=recompute, zero=plan.step.zero))
        best = searched_places(whole, graph, places, stages, predicted)
        parts = parts_on(graph, best.places)
        notes.append(_choice_words(best, stages))
    elif places and stages > 1:
        parts = placed_parts(graph, places)
    else:
        speeds = _stage_speeds(plan, graph, stages)
        parts = balanced_parts(plan, graph, stages, virtual, request.pins, speeds) if stages > 1 else ()
    step = StepPlan(count, request.order, virtual, parts, recompute, zero=plan.step.zero, places=places)
    check_step(step, graph)
    plan = replace(plan, step=step, search=replace(plan.search, notes=(*plan.search.notes, *notes)))
    return without_torn(plan, graph)


def with_place_plans(plan: Plan, request: StepRequest, searched: Callable[[Mesh, int], Plan]) -> Plan:
    """`plan` with decisions on the meshes that places have for themselves. `searched`: the plan of a mesh whose first
    rank is passed."""
    by_place = request.place_meshes
    meshes = [by_place.get(place, plan.mesh) for place in range(max(by_place, default=-1) + 1)]
    firsts = [0, *accumulate(mesh.size for mesh in meshes)]
    plans = ((n, searched(mesh, firsts[n])) for n, mesh in enumerate(meshes) if n in by_place and mesh != plan.mesh)
    decided = ((place, {name: getattr(place_plan, name) for name in PLACED_FIELDS}) for place, place_plan in plans)
    return replace(plan, place_plans=tuple(PlacePlan(place, **fields) for place, fields in decided))


def _choice_words(best: PlacedFound, count: int) -> str:
    gap = 1 - best.bound_seconds / best.seconds if best.seconds else 0.0
    return (
        f"places: the shortest step found over {count} is {format_seconds(best.seconds)}; no assignment of modules is "
        f"below {format_seconds(best.bound_seconds)} (gap {gap:.0%})"
    )


def check_request(graph: Graph, request: StepRequest) -> int:
    """Number of micro-batches of a step. UsageError for mistakes independent of the plan that a search finds."""
    if request.recompute == TENSORS:
        message = "--recompute tensors is for steps that are searched for: memory prices say which results are kept"
        raise UsageError(message, "--global-batch and --devices, without --mesh")
    if request.open_ or request.micro_batch is not None:
        message = "auto, lists and --micro-batch are for steps that are searched for: for a global batch on devices"
        raise UsageError(message, "--global-batch and --devices, without --mesh")
    shared = {"--context-parallel": request.context_parallel, "--expert-parallel": request.expert_parallel}
    for option in (option for option, said in shared.items() if said is not None):
        message = f"{option} is for steps that are searched for, for a global batch on devices: --mesh has its own axes"
        raise UsageError(message, "--global-batch and --devices, without --mesh")
    request.check_place_meshes()
    stages, virtual = request.fixed_stages(), request.virtual_stages or 1
    assert isinstance(virtual, int)
    count = request.micro_batches or 1
    if request.global_batch is not None:
        count = micro_batches_of(graph, request.global_batch)
    elif request.micro_batches is None and stages > 1 and not (request.places or request.place == AUTO):
        raise UsageError(f"--stages {stages} needs micro-batches to keep them busy", f"--micro-batches {4 * stages}")
    if request.place == AUTO:
        return count
    if request.places:
        placed_parts(graph, [(pin.path, pin.stage) for pin in request.places])
        return count
    check_counts(count, stages, virtual, request.order)
    if virtual == 1:
        check_order(graph, request.pins, stages)
    return count


def _policies(graph: Graph, recompute: str | None, count: int) -> tuple[tuple[BlockPolicy, ...], dict[str, str]]:
    """Policies of blocks in a step of `count` micro-batches, and for each omitted block why. `recompute` None: as the
    model's own modules ask."""
    blocks = repeated_blocks(graph)
    called = {path: called_modules(graph, path) for path in blocks}
    if recompute is None:
        known = tuple(dict.fromkeys(module for path in blocks for module in (path, *called[path])))
        keeps = recomputed_blocks(graph, known, inside=True)
    else:
        keeps = dict.fromkeys(blocks, RECOMPUTE[recompute])
    wanted = {path: keep for path, keep in keeps.items() if keep != KEEP_ALL}
    called |= {path: called_modules(graph, path) for path in wanted if path not in called}
    reasons = {path: NO_CALL for path in wanted if not called[path]}
    each = {module: keep for path, keep in wanted.items() for module in called[path]}
    reasons |= {path: recompute_obstacle(graph, path, count) for path in each}
    return tuple(BlockPolicy(path, keep) for path, keep in each.items() if not reasons[path]), reasons


def without_torn(plan: Plan, graph: Graph) -> Plan:
    """`plan` that keeps all of the modules that the code can't call by themselves, with a note on each."""
    torn = torn_modules(plan, graph)
    if not torn:
        return plan
    recompute = tuple(policy for policy in plan.step.recompute if policy.module not in torn)
    notes = [f"{path} is not recomputed: it is called several times, by other code each time" for path in torn]
    search = replace(plan.search, notes=(*plan.search.notes, *notes))
    return replace(plan, step=replace(plan.step, recompute=recompute), search=search)


def predicted(plan: Plan, graph: Graph) -> Plan:
    """Plan with the predicted time of its whole step, if that is more than one micro-batch."""
    from autoshard.program.lower import lower
    from autoshard.simulation.steps.program_step import simulate_plan_step, stage_hardware

    step = plan.step
    if not step.is_whole:
        return plan
    program, hardware = lower(plan, graph), parse_hardware(plan.hardware_text)
    outcome = simulate_plan_step(plan, program, graph, hardware)
    rooms = [stage.usable_memory_bytes for stage in stage_hardware(hardware, program)]
    peak, room = max(zip(outcome.peak_bytes, rooms, strict=True), key=lambda pair: pair[0] / pair[1])
    step = replace(step, predicted_seconds=outcome.step_seconds, predicted_peak_bytes=peak)
    return replace(plan, step=replace(step, capacity_bytes=room if hardware.kinds else 0.0))


def with_ranks(plan: Plan) -> Plan:
    """Plan with notes on which ranks are of which kind of devices, and what that means for mixed stages."""
    hardware = parse_hardware(plan.hardware_text)
    if not hardware.kinds:
        return plan
    firsts = accumulate((mesh.size for mesh in plan.meshes), initial=0)
    spans = any(hardware.of_ranks(n, mesh.size) == hardware for n, mesh in zip(firsts, plan.meshes, strict=False))
    wide = "a mesh over several kinds is priced as if all its devices were the slowest, with the least memory"
    words = rank_words(hardware), share_words(plan.step, plan.mesh) or wide * spans
    note = "; ".join(filter(None, words))
    return replace(plan, search=replace(plan.search, notes=(*plan.search.notes, note)))


def repeated_blocks(graph: Graph) -> tuple[str, ...]:
    """Outermost items of the model's lists of modules, in order."""
    blocks = dict.fromkeys(block_of(op.module) for op in graph.ops)
    return tuple(path for path in blocks if path)


def _stage_speeds(plan: Plan, graph: Graph, stages: int) -> tuple[float, ...]:
    """Seconds of each stage's kind of devices for a micro-batch of the model, relative to the first stage's."""
    from autoshard.program.lower import lower
    from autoshard.simulation.engine import timed

    hardware = parse_hardware(plan.hardware_text)
    if not hardware.kinds or stages == 1:
        return (1.0,) * stages
    size, program = plan.mesh.size, lower(plan, graph)
    kinds = [hardware.of_ranks(stage * size, size) for stage in range(stages)]
    seconds = {kind: timed(program, graph, kind, among=True).step_seconds for kind in dict.fromkeys(kinds)}
    return tuple(seconds[kind] / seconds[kinds[0]] for kind in kinds)


def balanced_parts(
    plan: Plan,
    graph: Graph,
    stages: int,
    virtual: int,
    pins: tuple[StagePin, ...] = (),
    speeds: Sequence[float] = (),
) -> tuple[StagePart, ...]:
    """Parts, `stages * virtual`, whose longest is as short as splits between blocks allow. `speeds`: of each stage,
    times the predicted seconds."""
    count = stages * virtual
    seconds = [op.forward_seconds + op.backward_seconds for op in plan.ops]
    ends = [0.0]
    for op_seconds in seconds:
        ends.append(ends[-1] + op_seconds)
    if virtual == 1:
        check_order(graph, pins, stages)
    wanted = _pinned(graph, pins)
    starts = _boundaries(graph, count, wanted)
    return tuple(
        StagePart(number % stages, number // stages, graph.ops[start].name)
        for number, start in enumerate(_cut(starts, ends, count, speeds or (1.0,) * stages, wanted))
    )


def _boundaries(graph: Graph, count: int, wanted: dict[int, int]) -> list[int]:
    """Operators where a part may begin: between blocks; if too few, between blocks inside these, or anywhere."""
    modules = [op.module for op in graph.ops]
    pinned = {i for i in wanted if wanted.get(i - 1) != wanted[i]} | {i + 1 for i in wanted if i + 1 not in wanted}
    for of in (block_of, _innermost, None):
        starts = {i for i in range(len(modules)) if of is None or i == 0 or of(modules[i]) != of(modules[i - 1])}
        starts |= {i for i in pinned if i < len(modules)}
        if len(starts) >= count:
            return sorted(starts)
    raise UsageError(f"{len(modules)} operators can't be cut into {count} parts", f"--stages {len(modules)}")


def _innermost(module: str) -> str:
    """Module path up to its last number."""
    parts = module.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdecimal()), default=-1)
    return ".".join(parts[: last + 1])


def _pinned(graph: Graph, pins: tuple[StagePin, ...]) -> dict[int, int]:
    """Operator -> stage that a pin wants it on. UsageError for a pin that matches nothing, or if stages decrease."""
    wanted: dict[int, int] = {}
    for pin in pins:
        members = [i for i, op in enumerate(graph.ops) if op.module == pin.path or op.module.startswith(f"{pin.path}.")]
        if not members:
            raise UsageError(f"pin stage:{pin.path}={pin.stage}: the model has no such module", "autoshard trace MODEL")
        for i in members:
            if wanted.setdefault(i, pin.stage) != pin.stage:
                message = f"pins put {graph.ops[i].module} on stage {wanted[i]} and on stage {pin.stage}"
                raise UsageError(message, "one of them")
    return wanted


def check_order(graph: Graph, pins: tuple[StagePin, ...], stages: int) -> None:
    """Raises UsageError if a stage decreases along the data flow, or none is left for a stage."""
    wanted = _pinned(graph, pins)
    order = sorted(wanted)
    for before, after in pairwise(order):
        if wanted[after] < wanted[before]:
            first, second = graph.ops[before].module, graph.ops[after].module
            message = (
                f"{first} is on stage {wanted[before]}, and {second}, which comes after it, on stage {wanted[after]}"
            )
            raise UsageError(
                f"{message}: a stage may not decrease along the data flow", "stages that grow in the order of the data"
            )
    unused = [stage for stage in range(stages) if stage not in wanted.values()]
    if unused and len(order) == len(graph.ops):
        message = f"stage {unused[0]} of {stages} is not used: every module is on another"
        raise UsageError(message, f"--stages {len(set(wanted.values()))}")


def _cut(
    starts: list[int], ends: list[float], count: int, speeds: Sequence[float], wanted: dict[int, int]
) -> list[int]:
    """First operator of each part, by dynamic programming over `starts`."""
    stages = len(speeds)
    places = [*starts, len(ends) - 1]
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, -1)}]  # per number of parts: end -> (longest, start)
    allowed = [
        [all(wanted.get(i, s) == s for i in range(places[p], places[p + 1])) for p in range(len(starts))]
        for s in range(stages)
    ]
    for number in range(count):
        fits = allowed[number % stages]
        here: dict[int, tuple[float, int]] = {}
        for start, (longest, _) in best[-1].items():
            end = start
            while end < len(starts) and fits[end]:
                end += 1
                value = max(longest, (ends[places[end]] - ends[places[start]]) * speeds[number % stages])
                if end not in here or value < here[end][0]:
                    here[end] = value, start
        best.append(here)
    if len(starts) not in best[-1]:
        raise UsageError(
            "no cut keeps the pins of stages: a stage may not decrease along the data flow, and each must be used",
            "pins whose stages grow in the order in which the model calls its modules",
        )
    place, firsts = len(starts), []
    for number in range(count, 0, -1):
        place = best[number][place][1]
        firsts.append(places[place])
    return firsts[::-1]


# --- unequal shares of the batch ---


def with_batch_shares(plan: Plan, graph: Graph, wanted: str | None) -> Plan:
    """Plan of a whole step in the shares that are `wanted`: a number of slices for each coordinate of the mesh's first
    axis, or for each kind of its devices; AUTO, or None on several kinds: those with the shortest step, if that is
    shorter than in equal shares. UsageError if they can't be."""
    hardware = parse_hardware(plan.hardware_text)
    if wanted == EQUAL or (wanted is None and not may_be_unequal(plan, graph, hardware)):
        return plan
    if wanted not in (None, AUTO):
        return predicted(replace(plan, step=replace(plan.step, batch_shares=_said(plan, hardware, wanted))), graph)
    try:
        shares = best_shares(plan, graph, hardware)
        unequal = predicted(replace(plan, step=replace(plan.step, batch_shares=shares)), graph)
    except UsageError as error:
        if wanted == AUTO:
            raise
        return _noted(plan, f"equal shares of the batch on several kinds of devices: {error.message}")
    if unequal.step_seconds >= plan.step_seconds or len(set(shares)) == 1:
        return plan
    equal = f"unequal shares of the batch: {format_seconds(unequal.step_seconds)}, in equal ones"
    return _noted(unequal, f"{equal} {format_seconds(plan.step_seconds)}")


def may_be_unequal(plan: Plan, graph: Graph, hardware: Hardware) -> bool:
    """True if devices of several kinds work on equal parts of several micro-batches."""
    several = plan.step.micro_batches > 1 and not plan.step.parts and not graph.dynamic
    return several and hardware.of_ranks(0, plan.mesh.size) == hardware and bool(hardware.kinds)


def best_shares(plan: Plan, graph: Graph, hardware: Hardware) -> tuple[int, ...]:
    """Shares by the time of a slice on the devices of each coordinate. UsageError if the step can't have them."""
    from autoshard.program.lower import lower
    from autoshard.simulation.steps.program_step import measured_shares, slice_seconds

    count = plan.mesh.sizes[0]
    least = (1,) * (count - 1) + (plan.step.micro_batches * count - count + 1,)
    program = lower(replace(plan, step=replace(plan.step, batch_shares=least)), graph)  # says why it can't be
    every = measured_shares(plan, program, graph, hardware)
    return dealt([slice_seconds(measured, plan) for _, measured in every], plan.step.micro_batches * count)


def _said(plan: Plan, hardware: Hardware, wanted: str) -> tuple[int, ...]:
    """Shares that the user typed, a number for each coordinate."""
    words = [word.strip() for word in wanted.split(",")]
    if not all(word.isdecimal() for word in words):
        message = f"--batch-shares {wanted}: expected auto, equal, or numbers of slices with commas"
        raise UsageError(message, "--batch-shares auto")
    numbers, count = tuple(map(int, words)), plan.mesh.sizes[0]
    each = [hardware.of_ranks(n * plan.mesh.size // count, plan.mesh.size // count) for n in range(count)]
    kinds = list(dict.fromkeys(each))
    if len(numbers) == len(kinds) < count:
        return tuple(numbers[kinds.index(kind)] for kind in each)
    return numbers


def _noted(plan: Plan, note: str) -> Plan:
    return replace(plan, search=replace(plan.search, notes=(*plan.search.notes, note)))
