"""Turns a chosen step into a plan: the split of every block on the mesh of one stage, its parts, what blocks keep.

The graph is that of one micro-batch of all replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from autoshard.cluster.hardware import Hardware
from autoshard.constraints.apply_pins import pinned_nodes
from autoshard.constraints.recomputed_blocks import called_modules
from autoshard.errors import UsageError
from autoshard.graph_capture.model_spec import holds_graph
from autoshard.ir.graph import Attribute, Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import KEEP_ALL, KEEPS, BlockPolicy, Plan, StagePart, StepPlan
from autoshard.rules.resize.captured_batch import followed_numbers
from autoshard.rules.resize.rebatch import batch_size, rebatched
from autoshard.search.build_plan import Origin, plan_of, priced
from autoshard.search.fixed_step import predicted, without_torn
from autoshard.search.objectives import MEMORY, RATIO
from autoshard.search.shortest_step import MOST_LIKELY
from autoshard.solvers.common.result import fits, without_proof
from autoshard.units import counted, format_bytes, format_seconds
from autoshard.whole_step_search.blocks.block_line import shortened
from autoshard.whole_step_search.blocks.replicated_split import replicated_split
from autoshard.whole_step_search.blocks.stage_axes import REPLICAS
from autoshard.whole_step_search.solved_steps import JointResult, SolvedStep

_NUMBERS = frozenset(
    (
        "self",
        "other",
        "fill_value",
        "exponent",
        "alpha",
        "value",
        "values",
        "p",
        "label_smoothing",
        "scale",
        "min",
        "max",
    )
)


def joint_plan(
    joint: JointResult, hardware: Hardware, origin: Origin, known: Graph | None = None
) -> tuple[Graph, Plan]:
    """Graph of a micro-batch and plan of `joint.best`, predicted from its own program. If its unequal shares of the
    batch are not possible, the shares are equal, with a note.

    `known`: that graph, if it is known better than by resizing the captured one.
    """
    shares = joint.best.problem.batch_shares(joint.best.plan)
    try:
        return _joint_plan(joint, hardware, origin, known, shares if len(set(shares)) > 1 else ())
    except UsageError as error:
        if not shares:
            raise
        graph, plan = _joint_plan(joint, hardware, origin, known, ())
        note = f"equal shares of the batch on several kinds of devices: {error.message}"
        return graph, replace(plan, search=replace(plan.search, notes=(*plan.search.notes, note)))


def _joint_plan(
    joint: JointResult, hardware: Hardware, origin: Origin, known: Graph | None, shares: tuple[int, ...]
) -> tuple[Graph, Plan]:
    best, line = joint.best, joint.line
    choice = best.problem.choice
    carried = rebatched(line.graph, choice.replicas * choice.micro_batch)
    graph = known or carried
    assert best.split is not None
    pins = joint.pins.on(Mesh(((REPLICAS, choice.replicas), *choice.inner)))
    stored, solution = replicated_split(
        replace(line, graph=graph), line.graph, shortened(line), best.split, choice.replicas, choice.zero > 0, hardware,
        choice.micro_batches, pins,
    )  # fmt: skip
    plan = plan_of(stored, solution, origin, joint.room_bytes, "search", pinned_nodes(stored, pins))
    step = StepPlan(
        choice.micro_batches, choice.schedule, choice.virtual_stages, _parts(best, joint), _block_policies(best, joint),
        samples=choice.replicas * choice.micro_batch, zero=choice.zero or 3,
        batch_shares=shares,
    )  # fmt: skip
    priced_plan = priced(without_torn(replace(plan, step=step), graph), graph, hardware)
    note = "searched together (stages, micro-batches, recomputation, ZeRO, mesh): "
    if joint.level == RATIO:
        note += f"{format_seconds(best.overhead)} of communication and replicated work per step, mean over devices "
        note += "(cost model of blocks, without pipeline bubbles)"
    elif joint.level == MEMORY:
        note += (
            f"{format_bytes(best.peak_bytes)} on the fullest device (cost model of blocks), at most {joint.gap:.2%} "
        )
        note += "above the lower bound for all plans searched"
    else:
        note += (
            f"{format_seconds(best.seconds)} (cost model of blocks), at most {joint.gap:.2%} above the lower bound for "
        )
        note += "all plans searched, whatever their schedule"
    search = replace(
        priced_plan.search,
        level=joint.level,
        pins=joint.pins.texts,
        notes=(
            *priced_plan.search.notes,
            note,
            *other_averages(line.graph, step.samples),
            *(
                literal_count_notes(line.graph, step.samples)
                if holds_graph(origin.model)
                else followed_numbers(graph, carried)
            ),
        ),
    )
    return graph, _certified(predicted(replace(priced_plan, search=search), graph), best)


def _certified(plan: Plan, best: SolvedStep) -> Plan:
    """Plan without a proof for its micro-batch alone, as its split was chosen for the whole step."""
    by_level = {RATIO: best.overhead, MEMORY: plan.step_peak_bytes}
    objective = by_level.get(plan.search.level, plan.predicted_seconds)
    return replace(plan, certificate=without_proof(plan.certificate, objective))


def confirmed(joint: JointResult, hardware: Hardware, origin: Origin) -> tuple[JointResult, Graph, Plan]:
    """The best step by its own program, fitting ones first. After the first, others are made into plans while the
    blocks' costs say that they are better than the best fitting program so far and, while none fits, those that would
    fit if their programs exceeded the blocks' costs by as much. Level 0 minimises costs of blocks alone."""
    plans: list[tuple[SolvedStep, Graph, Plan]] = []
    left = [joint.best, *joint.others]

    def by_program(step: SolvedStep) -> tuple[float, float]:
        both = step.program_seconds, step.program_bytes
        return {RATIO: (step.overhead, step.program_seconds), MEMORY: both[::-1]}.get(joint.level, both)

    def fit(step: SolvedStep) -> bool:
        return fits(step.program_bytes, joint.room_bytes)

    for step in left[:MOST_LIKELY]:
        if step.value(joint.level) >= min(
            (by_program(other)[0] for other, *_ in plans if fit(other)), default=math.inf
        ):
            break
        times = min((1.0 if fit(other) else other.program_bytes / other.peak_bytes for other, *_ in plans), default=1.0)
        if not fits(step.peak_bytes * times, joint.room_bytes):
            continue
        left.remove(step)
        graph, plan = joint_plan(replace(joint, best=step), hardware, origin)
        program = step_seconds(plan), plan.peak_within(joint.room_bytes)
        plans.append((replace(step, program_seconds=program[0], program_bytes=program[1]), graph, plan))
    plans.sort(key=lambda entry: (not fit(entry[0]), *by_program(entry[0])))
    best, graph, plan = plans[0]
    return replace(joint, best=best, others=(*(step for step, *_ in plans[1:]), *left)), graph, plan


def step_seconds(plan: Plan) -> float:
    """Predicted seconds of the whole step, from the plan's own program."""
    return plan.step.predicted_seconds or plan.predicted_seconds


def _parts(best: SolvedStep, joint: JointResult) -> tuple[StagePart, ...]:
    if best.problem.choice.stages == 1:
        return ()
    blocks, ops = joint.line.blocks, joint.line.graph.ops
    return tuple(StagePart(part.stage, part.chunk, ops[blocks[part.first].first].name) for part in best.plan.parts)


def _block_policies(best: SolvedStep, joint: JointResult) -> tuple[BlockPolicy, ...]:
    """Policy of each block; for a module that occurs several times, the one that keeps least."""
    problem, keeps = best.problem, dict[str, str]()
    for k, point in enumerate(best.plan.points):
        keep = problem.keeps[problem.kinds[k]][point]
        for path in called_modules(joint.line.graph, joint.line.blocks[k].module) if keep != KEEP_ALL else ():
            keeps[path] = _less(keep, keeps.get(path, keep))
    return tuple(BlockPolicy(path, keep) for path, keep in keeps.items())


def _less(keep: str, other: str) -> str:
    """The policy that keeps less; for two different ones that keep some results, the one that keeps none of them."""
    known = [policy for policy in (keep, other) if policy in KEEPS]
    if not known:
        return keep if keep == other else KEEPS[-1]
    least = max(known, key=KEEPS.index)
    return least if len(known) == 2 or least == KEEPS[-1] else keep if other in KEEPS else other


def other_averages(graph: Graph, samples: int) -> list[str]:
    """Note if batch norm in training averages over another number of samples than in the captured model."""
    batch = batch_size(graph)
    averaging = [op for op in graph.ops if op.target == "aten.batch_norm" and dict(op.attributes).get("training")]
    if samples == batch or not averaging:
        return []
    norms = counted(len(averaging), "batch norm")
    return [f"{norms} of {samples} samples together, where the model was captured with {batch}: other averages"]


def literal_count_notes(graph: Graph, samples: int) -> list[str]:
    """Notes for a graph without its model's code: it does not show which numbers Python computed from the batch (`loss
    / len(x)`), and all stay unchanged. Lists those that may be: the samples or elements of an input."""
    batch = batch_size(graph)
    if samples == batch:
        return []
    counts = {float(count) for name in graph.inputs for count in _counts(graph.tensor(name).shape, batch)}
    numbers = counts | {1 / count for count in counts}
    suspects: dict[str, None] = {}
    for op in graph.ops:
        for name, value in op.attributes:
            if name in _NUMBERS and _number(value) in numbers:
                suspects[f"{_number(value):g} of {op.target.partition('.')[2]} at {op.source or op.module}"] = None
    note = (
        f"a saved graph of {batch} samples, planned with {samples}, without the model's code: numbers that it computed "
    )
    note += "of its batch are not known, and stay; plan from the model itself"
    return [f"{note}, since these may be such: {'; '.join(suspects)}" if suspects else note]


def _counts(shape: tuple[int, ...], batch: int) -> Iterator[int]:
    """The batch times each product of other dims."""
    if shape[:1] == (batch,) and batch:
        dims = [size for size in shape[1:] if size > 1]
        for length in range(len(dims) + 1):
            yield from (batch * math.prod(subset) for subset in combinations(dims, length))


def _number(value: Attribute) -> float | None:
    if isinstance(value, tuple) and len(value) == 1:  # of a constant
        value = value[0]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
