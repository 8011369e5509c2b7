"""The best whole step of a captured model: stages, micro-batches, recomputation, ZeRO and the mesh, together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoshard.api.planned import CapturedModel, PlannedModel
from autoshard.cluster.device_kinds import orders, used
from autoshard.cluster.hardware import Hardware
from autoshard.constraints.fusion_request import read_fusion
from autoshard.constraints.model_request import asks_to_recompute
from autoshard.constraints.size_histogram import SizePoint, points_for
from autoshard.constraints.step_request import AUTO, RECOMPUTE, SEARCHED, TENSORS, StepRequest
from autoshard.errors import InfeasibleError, UsageError
from autoshard.graph_capture.dynamic_sizes.numbers import resized
from autoshard.ir.graph import Graph
from autoshard.ir.plan import KEEP_SOME, Plan, SizeStep
from autoshard.replay.command_line import dynamic_text
from autoshard.replay.expected_step import expected_styles
from autoshard.replay.resize import reapply
from autoshard.replay.sized_plans import Sized, SizedRequest
from autoshard.rules.resize.captured_batch import captured_with
from autoshard.rules.resize.rebatch import batch_size
from autoshard.search.build_plan import Origin
from autoshard.search.fixed_step import predicted, with_ranks
from autoshard.search.memory_fit import TIGHTER, no_step_within
from autoshard.search.objectives import SPEED
from autoshard.search.search_request import SearchRequest
from autoshard.search.style_plans import StylePlan, style_plans
from autoshard.simulation.fusion_sizes import with_unused_fusion
from autoshard.solvers.common.effort import LOOSE, ROUGHLY, ROUNDS
from autoshard.solvers.common.result import fits
from autoshard.text import step_text
from autoshard.units import counted
from autoshard.whole_step_search.config_space import ParallelConfig
from autoshard.whole_step_search.front_store import FrontStores
from autoshard.whole_step_search.joint_plan import confirmed, joint_plan, step_seconds
from autoshard.whole_step_search.solved_steps import JointResult
from autoshard.whole_step_search.step_request_space import searched_step, with_mesh


@dataclass(frozen=True, eq=False)
class StepAnswer:
    """Result of a joint search, and its plan: of the graph at the batch of its micro-batch."""

    result: JointResult
    plan: PlannedModel
    program_seconds: float


def planned_step(model: CapturedModel, hardware: Hardware, wanted: SearchRequest) -> StepAnswer:
    """Best step. UsageError for settings that this search lacks, InfeasibleError where nothing divides or fits."""
    samples = next((size.name for size in model.graph.dynamic if any(dim == 0 for _, dim in size.dims)), None)
    if samples is not None:
        message = f"--global-batch says how many samples a step has, and {samples} can change in each step"
        raise UsageError(message, with_mesh(model.graph, wanted))
    origin = replace(model.origin, fusion=read_fusion(wanted.fuse))
    hardware, joint, graph, plan = _of_orders(model.graph, hardware, wanted, origin)
    if wanted.sizes:
        joint, graph, plan = _expected(joint, hardware, origin, wanted)
    dynamic = (dynamic_text(graph),) if graph.dynamic else ()
    known = captured_with(graph, origin.model, dict(origin.arguments), batch_size(model.graph), dynamic)
    if known is not graph:
        sizes = plan.search.sizes
        graph, plan = joint_plan(joint, hardware, origin, known)
        plan = replace(plan, search=replace(plan.search, sizes=sizes))
    steps, sentences = step_text.steps(joint), step_text.sentences(joint)
    options = _fixed_request(wanted.step, joint, model.graph).text
    options += f" --strategy {wanted.strategy}" if wanted.strategy != "best" else ""
    plan = replace(plan, search=replace(plan.search, step_options=options, steps=steps, step_messages=sentences))
    plan = with_ranks(with_unused_fusion(plan, graph))
    planned = PlannedModel(plan, graph, hardware, styles=_styles(plan, graph, hardware))
    return StepAnswer(joint, planned, step_seconds(plan))


def _styles(plan: Plan, graph: Graph, hardware: Hardware) -> tuple[StylePlan, ...]:
    """Plans in known styles, with the mean step over the plan's sizes, if it has any."""
    largest = style_plans(plan, graph, hardware)
    points = [SizePoint(row.sizes, row.weight) for row in plan.search.sizes]
    graphs = [resized(graph, dict(point.sizes)) for point in points]
    there = [predicted(reapply(plan, graph, at, hardware), at) for at in graphs]
    each = [style_plans(sized, at, hardware) for sized, at in zip(there, graphs, strict=True)]
    return expected_styles(largest, each, points) if points else largest


def _expected(
    joint: JointResult, hardware: Hardware, origin: Origin, wanted: SearchRequest
) -> tuple[JointResult, Graph, Plan]:
    """Step with the least expected time over the sizes, among those found at the largest sizes that fit there: it was
    the third to eighth best there in 6 of 8 trials."""
    points = points_for(wanted.sizes, joint.line.graph.dynamic)
    candidates: list[tuple[JointResult, Graph, Sized]] = []
    every = joint.best, *joint.others
    for one in every:
        reordered = replace(joint, best=one, others=tuple(other for other in every if other is not one))
        graph, plan = joint_plan(reordered, hardware, origin)
        evaluator = SizedRequest(
            graph, hardware, wanted, points, [resized(graph, dict(point.sizes)) for point in points]
        )
        if evaluator.holds(plan) or not candidates:
            peak = plan.peak_within(joint.room_bytes)
            reordered = replace(reordered, best=replace(one, program_seconds=plan.step_seconds, program_bytes=peak))
            candidates.append((reordered, graph, Sized(str(one.problem.choice), plan, evaluator.steps(plan))))
    best = min(candidates, key=lambda one: one[2].expected(points))
    least = [min(times) for times in zip(*(one.seconds for *_, one in candidates), strict=True)]
    rows = tuple(
        SizeStep(point.sizes, point.weight, step, there, 0.0)
        for point, step, there in zip(points, best[2].seconds, least, strict=True)
    )
    note = f"expected step of the best of {counted(len(candidates), 'step')} that were found at the largest sizes"
    search = replace(best[2].plan.search, sizes=rows, notes=(*best[2].plan.search.notes, note))
    return best[0], best[1], replace(best[2].plan, search=search)


def _fixed_request(step: StepRequest, joint: JointResult, graph: Graph) -> StepRequest:
    """Request for exactly this step: all that was found outside its blocks is fixed, so that the search is quick."""
    choice = joint.best.problem.choice
    several = choice.stages > 1
    return replace(
        step,
        context_parallel=choice.context if choice.context > 1 else None,
        expert_parallel=choice.expert if choice.expert > 1 else None,
        stages=choice.stages,
        virtual_stages=choice.virtual_stages if several else None,
        schedule=choice.schedule if several else None,
        recompute=step.recompute if asks_to_recompute(graph) else _recompute_text(step, joint),
        micro_batch=choice.micro_batch,
        zero=None if step.enable_parallel_optimizer else choice.zero,
        pins=step.pins if several else (),
    )


def _recompute_text(step: StepRequest, joint: JointResult) -> str | None:
    """Kinds of recompute that its blocks have, of those that were asked for."""
    problem, blocks = joint.best.problem, joint.line.blocks
    pairs = zip(problem.kinds, joint.best.plan.points, strict=True)
    keeps = {problem.keeps[kind][point] for block, (kind, point) in zip(blocks, pairs, strict=True) if block.module}
    requested = SEARCHED if step.recompute in (None, AUTO) else str(step.recompute).split(",")
    words = [word for word in dict.fromkeys((*requested, TENSORS)) if _keeps_word(word, keeps)]
    return ",".join(words) or step.recompute


def _keeps_word(word: str, keeps: set[str]) -> bool:
    some = any(keep.startswith(KEEP_SOME) for keep in keeps)
    return some if word == TENSORS else RECOMPUTE[word] in keeps


def _of_orders(
    graph: Graph, hardware: Hardware, wanted: SearchRequest, origin: Origin
) -> tuple[Hardware, JointResult, Graph, Plan]:
    """Fastest step found for any order of the kinds of devices, with the lower bound on all."""
    wanted.check_kinds(hardware)
    answers: list[tuple[Hardware, JointResult, Graph, Plan]] = []
    refused: list[InfeasibleError] = []
    for order in orders(hardware):
        ordered = used(order, wanted.devices or 1)
        try:
            answers.append((ordered, *_fitting(graph, ordered, wanted, origin)))
        except InfeasibleError as error:
            refused.append(error)
    if not answers:
        raise refused[0]
    hardware, joint, graph, plan = min(answers, key=lambda each: each[3].step_seconds)
    least = min(each[1].bound for each in answers)
    if least < joint.bound:
        joint = replace(joint, bound=least)
        graph, plan = joint_plan(joint, hardware, origin)
    return hardware, joint, graph, plan


def _fitting(
    graph: Graph, hardware: Hardware, wanted: SearchRequest, origin: Origin
) -> tuple[JointResult, Graph, Plan]:
    """Best step whose own program fits. Where that holds more than its blocks' costs state, they are given that much
    less room; where this makes the step slower, limits between are tried. InfeasibleError where none is found."""
    limit = hardware.usable_memory_bytes if wanted.memory_limit_bytes is None else wanted.memory_limit_bytes
    stores = FrontStores(graph, hardware)
    first = _best_answer(graph, hardware, wanted, origin, limit, stores)
    sizes, too_much, room, fitting = [first.bytes], limit, limit, first if fits(first.bytes, limit) else None

    def within(room: float) -> _JointAnswer:
        narrower = replace(first.request, memory_limit_bytes=room)
        return _best_answer(graph, hardware, narrower, origin, limit, stores, first.result)

    for attempt in range(ROUNDS):
        if fitting is not None:
            break
        too_much, room = room, room * (limit / sizes[-1]) ** 2**attempt * TIGHTER
        try:
            candidate = within(room)
        except InfeasibleError:
            break
        sizes.append(candidate.bytes)
        fitting = candidate if fits(candidate.bytes, limit) else None
    if fitting is None:
        raise no_step_within(limit, min(sizes), first.plan)
    slow = first.seconds * (1 + LOOSE)
    while too_much - room > ROUGHLY * too_much and wanted.level == SPEED and fitting.seconds > slow:
        middle = (room + too_much) / 2
        try:
            candidate = within(middle)
        except (InfeasibleError, UsageError):
            break
        if fits(candidate.bytes, limit):
            room, fitting = middle, min(fitting, candidate, key=lambda step: step.seconds)
        else:
            too_much = middle
    return fitting.result, fitting.graph, fitting.plan


@dataclass(frozen=True, eq=False)
class _JointAnswer:
    """`result` of a joint search, its plan of `graph`, and the `request` for it."""

    result: JointResult
    graph: Graph
    plan: Plan
    request: SearchRequest

    @property
    def bytes(self) -> float:
        """Peak bytes of its own program."""
        return self.result.best.program_bytes

    @property
    def seconds(self) -> float:
        return self.result.best.program_seconds


def _best_answer(
    graph: Graph,
    hardware: Hardware,
    wanted: SearchRequest,
    origin: Origin,
    limit_bytes: float,
    stores: FrontStores,
    wider: JointResult | None = None,
) -> _JointAnswer:
    """Best step that can be made a plan. Which weights or buffers parts of a model may not share is known of the parts
    alone: where the best can't be made, a search of fewer parts follows, as far as the request allows that.
    `limit_bytes` limits programs, among which those that fit are chosen; `wider`: the result within a larger limit,
    with its bound on all."""
    joint = replace(searched_step(graph, hardware, wanted, stores, wider is None), limit_bytes=limit_bytes)
    joint = replace(joint, bound=wider.bound) if wider else joint
    try:
        return _JointAnswer(*confirmed(joint, hardware, origin), wanted)
    except UsageError as error:
        fewer = _fewer_parts(wanted, joint.best.problem.choice)
        if fewer is None:
            raise
        answer = _best_answer(graph, hardware, fewer, origin, limit_bytes, stores, wider)
        return replace(answer, result=replace(answer.result, undivided=((error.message, 1), *answer.result.undivided)))


def _fewer_parts(wanted: SearchRequest, choice: ParallelConfig) -> SearchRequest | None:
    """Request with one part a stage, else with one stage; None where that was not left open."""
    step = wanted.step
    if choice.virtual_stages > 1 and step.virtual_stages in (None, AUTO) and step.schedule in (None, AUTO):
        return replace(wanted, step=replace(step, virtual_stages=1))
    if choice.stages > 1 and step.stages in (None, AUTO) and not step.pins and step.schedule in (None, AUTO):
        return replace(wanted, step=replace(step, stages=1, virtual_stages=None))
    return None
