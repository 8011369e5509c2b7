"""Steps of a weight from its storage to its use: collectives, and casts to another precision.

Values gathered on the way are not kept for backward: the backward of each operator that needs one remakes it by the
same steps. Which operators these are is decided here, from the graph; costs, simulator, emitted code and verification
follow it. Around a cast, values move in the low precision and gradients in the high one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autoshard.ir.graph import CAST, Graph
from autoshard.ir.layout import Layout, Shard, parse_placement
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import PlanStep
from autoshard.ir.program import Collective, Compute, Instruction, LocalValue, Program
from autoshard.program.instruction_storage import facts
from autoshard.program.module_scopes import results_of
from autoshard.redistribute import COLLECTIVES
from autoshard.redistribute.steps import clean_cut

_FLAT = ("all_gather", "reduce_scatter")  # what weights do together


def weight_steps(
    instructions: Sequence[Instruction], parameters: Iterable[str], values: Mapping[str, LocalValue]
) -> dict[str, tuple[int, ...]]:
    """Value -> the instructions that make it from a parameter, if these are only collectives and casts.

    `parameters` are values as stored: each is made from nothing.
    """
    steps: dict[str, tuple[int, ...]] = dict.fromkeys(parameters, ())
    for index, instruction in enumerate(instructions):
        source = source_of(instruction)
        result = results_of(instruction)[0] if source in steps else ""
        if result and source is not None and "float" in values[result].dtype:
            steps[result] = (*steps[source], index)
    return steps


def weight_ways(program: Program) -> dict[str, tuple[int, ...]]:
    """Value -> `weight_steps` that make it in this program; use `program.once(weight_ways)`."""
    return weight_steps(program.instructions, [p.value for p in program.parameters], program.by_name)


def source_of(instruction: Instruction) -> str | None:
    """Operand of a collective or a cast; None for other instructions."""
    if isinstance(instruction, Collective):
        return instruction.operand
    return instruction.operands[0] if instruction.target == CAST and not instruction.variant else None


def gathered_weights(program: Program) -> frozenset[str]:
    """Values made from weights that were gathered for use."""
    steps = program.once(weight_ways)
    regathered = {i for i, step in enumerate(program.instructions) if isinstance(step, Collective) and step.regathered}
    return frozenset(name for name, chain in steps.items() if not regathered.isdisjoint(chain))


def careful_casts(program: Program) -> frozenset[str]:
    """Results of casts of weights around which anything moves: their gradients are reduced in the precision before the
    cast, and gathered values are cast again."""
    if not program.has_backward:
        return frozenset()
    steps = program.once(weight_ways)
    moved = {chain[-1] for chain in steps.values() if chain and isinstance(program.instructions[chain[-1]], Collective)}
    moved |= {i for chain in steps.values() for i in chain if not moved.isdisjoint(chain)}
    casts = {i for i in moved if isinstance(program.instructions[i], Compute)}
    return frozenset(results_of(program.instructions[i])[0] for i in casts)


def with_gathers(
    instructions: Sequence[Instruction],
    values: Mapping[str, LocalValue],
    parameters: Sequence[str],
    graph: Graph,
    recomputed: Iterable[str] = (),
    once: frozenset[int] = frozenset(),
) -> tuple[Instruction, ...]:
    """Instructions, marked with what backward gathers again and the precision in which gradients are reduced.

    Nothing is gathered again in the modules `recomputed`, whose gathers backward reruns with all else, nor where a
    weight is gathered `once` a step.
    """
    if graph.loss is None:
        return tuple(instructions)
    steps = weight_steps(instructions, parameters, values)
    rerun = {i for i, step in enumerate(instructions) if any(_within(step.module, path) for path in recomputed)}
    gathering = {i for chain in steps.values() for i in chain if _gathers(instructions[i])} - rerun - once
    gathered = {name for name, chain in steps.items() if not gathering.isdisjoint(chain)}
    views: dict[str, str] = {}  # view of a gathered weight -> the weight
    marked: list[Instruction] = []
    for index, instruction in enumerate(instructions):
        if isinstance(instruction, Collective):
            said = index in gathering, _gradient_dtype(instruction, steps, instructions, values), index in once
            if said != (instruction.regathered, instruction.gradient_dtype, instruction.once):
                instruction = replace(instruction, regathered=said[0], gradient_dtype=said[1], once=said[2])
        elif results_of(instruction)[:1] != () and results_of(instruction)[0] not in steps:
            known = facts(instruction, graph)
            for position, source in known.aliases.items():
                operand = known.operands[source]
                if operand is not None and (operand in gathered or operand in views):
                    views[known.results[position]] = views.get(operand, operand)
            saved = dict.fromkeys(views.get(name, name) for name in known.retained)
            gathers = tuple(name for name in saved if name in gathered and index not in rerun)
            if gathers != instruction.regathered:
                instruction = replace(instruction, regathered=gathers)
        marked.append(instruction)
    return tuple(marked)


def _within(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def _gathers(instruction: Instruction) -> bool:
    return isinstance(instruction, Collective) and COLLECTIVES[instruction.forward].gathers


def _gradient_dtype(
    step: Collective,
    steps: Mapping[str, tuple[int, ...]],
    instructions: Sequence[Instruction],
    values: Mapping[str, LocalValue],
) -> str:
    """Dtype of the parameter if a weight was cast before this step, else ""."""
    chain = steps.get(step.operand, ())
    stored = source_of(instructions[chain[0]]) if chain else None
    dtype = values[stored].dtype if stored is not None else ""
    return dtype if dtype != values[step.operand].dtype else ""


def weight_path(steps: Sequence[PlanStep], layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> list[PlanStep]:
    """Steps that a weight of `shape`, stored in `layout`, really takes: in the form in which a block's weights go
    together. A plan prices each redistribution alone; one gather and one scatter for many weights are cheaper."""
    joined: list[PlanStep] = []
    for step in _gathered_first(_scattered(steps)):
        both = _at_once(joined[-1], step, layout, shape, mesh) if joined else None
        if both is not None:
            joined[-1] = both
        else:
            joined.append(step)
    return joined


def _gathered_first(steps: Sequence[PlanStep]) -> list[PlanStep]:
    """Steps with gathers moved before masks over other axes: only stored values go together with others."""
    ordered: list[PlanStep] = []
    for step in steps:
        place = len(ordered)
        while place and (step.forward, step.backward) == _FLAT and _goes_after(ordered[place - 1], step):
            place -= 1
        ordered.insert(place, step)
    return ordered


def _goes_after(masking: PlanStep, gather: PlanStep) -> bool:
    return masking.forward == "mask" and {*masking.axes}.isdisjoint(gather.axes)


def _at_once(one: PlanStep, other: PlanStep, layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> PlanStep | None:
    """Two gathers, one after the other, as one over the axes of both; None if their shards are not one shard."""
    if any((step.forward, step.backward) != _FLAT for step in (one, other)):
        return None
    axes = sorted(mesh.index(axis) for axis in (*one.axes, *other.axes))
    shards = [(axis, layout.placements[axis]) for axis in axes]
    before = dict(zip((*one.axes, *other.axes), (*one.before, *other.before), strict=True))
    after = dict(zip((*one.axes, *other.axes), (*one.after, *other.after), strict=True))
    inner = tuple((axis, shard) for axis, shard in shards if isinstance(shard, Shard))
    if len(inner) < len(axes) or len({shard.dim for _, shard in inner}) > 1:
        return None
    if any(parse_placement(before[mesh.names[axis]]) != shard for axis, shard in inner):
        return None
    dim = inner[0][1].dim
    outer = tuple((axis, shard) for axis, shard in layout.shards(dim) if axis not in axes)
    if any(axis > axes[0] for axis, _ in outer) or clean_cut(shape[dim], outer, inner, mesh) is None:
        return None
    names = tuple(mesh.names[axis] for axis in axes)
    return replace(
        one, axes=names, before=tuple(map(before.__getitem__, names)), after=tuple(map(after.__getitem__, names))
    )


def _scattered(steps: Sequence[PlanStep]) -> list[PlanStep]:
    """Steps of a weight, in which a gather whose gradient is next all-reduced and sliced reduce-scatters it at once.

    A small all-reduce may be cheaper than a reduce-scatter alone, but the weights of a block go together."""
    joined: list[PlanStep] = []
    for step in steps:
        last = joined[-1] if joined else None
        ways = [(item.forward, item.backward) for item in (last, step) if item is not None]
        if last is not None and ways == [("all_gather", "slice"), ("", "all_reduce")] and {*last.axes} <= {*step.axes}:
            count, left = len(last.axes), tuple(axis for axis in step.axes if axis not in last.axes)
            joined[-1] = replace(last, after=step.after[:count], backward="reduce_scatter")
            if left:
                joined.append(replace(step, axes=left, before=step.before[: len(left)], after=step.after[: len(left)]))
            continue
        joined.append(step)
    return joined
