"""Kinds of strategy and of redistribution that a plan and its program execute.

A kind is written `aten.linear: n/` (the factor n in blocks; `*` if split in units), with the variant and `uneven` if
they apply; a redistribution `S -> R+`, with `joined`, `blocked` and `uneven`, or `exchange`.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoshard import redistribute
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import Layout, Shard, local_sizes
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Collective, Program
from autoshard.program.lower import chosen_strategies
from autoshard.rules.algebra.float8_products import runs_in_bfloat16
from autoshard.rules.algebra.strategy import Choice, Strategy

BUCKET = "gradient bucket"


def plan_kinds(plan: Plan, graph: Graph) -> set[str]:
    """The kinds of strategy that a plan of this graph uses."""
    chosen = chosen_strategies(plan, graph)
    return {
        kind
        for name, strategy in chosen.items()
        for kind in strategy_kinds(graph, graph.by_op[name], strategy, plan.mesh)
    }


def strategy_kinds(graph: Graph, op: Op, strategy: Strategy, mesh: Mesh) -> Iterator[str]:
    """One kind for each axis that has more than one device."""
    variant = f" by {strategy.variant}" if strategy.variant else ""
    variant += " in bfloat16" if runs_in_bfloat16(graph, op, strategy, mesh) else ""
    for axis, choice in enumerate(strategy.choices):
        if mesh.sizes[axis] > 1:
            uneven = " uneven" if _is_uneven(graph, op, strategy, axis, mesh) else ""
            yield f"{op.target}{variant}: {_plain(choice)}{uneven}"


def _plain(choice: Choice) -> str:
    if choice.kind != "factor":
        return str(choice)
    if isinstance(choice.unit, tuple):
        return f"{choice.factor}[]"
    return choice.factor + ("/" if choice.blocks > 1 else "") + ("*" if choice.unit > 1 else "")


def _is_uneven(graph: Graph, op: Op, strategy: Strategy, axis: int, mesh: Mesh) -> bool:
    pairs = [*zip(op.operands, strategy.operands, strict=True), *zip(op.results, strategy.results, strict=True)]
    return any(
        name is not None and layout is not None and _cut_unevenly(graph.tensor(name).shape, layout, axis, mesh)
        for name, layout in pairs
    )


def _cut_unevenly(shape: tuple[int, ...], layout: Layout, axis: int, mesh: Mesh) -> bool:
    placement = layout.placements[axis]
    return isinstance(placement, Shard) and not local_sizes(shape, layout, mesh)[placement.dim].is_even(mesh)


# --- redistributions ------------------------------------------------------------------------------------------------


def program_kinds(program: Program) -> set[str]:
    """The kinds of redistribution that a program executes."""
    kinds = {BUCKET} if program.gradient_buckets else set()
    for instruction in program.instructions:
        if isinstance(instruction, Collective):
            value = program.value(instruction.operand)
            step = redistribute.step_of(instruction, program.mesh)
            kinds.add(step_kind(value.shape, value.layout, step, program.mesh))
    return kinds


def step_kind(shape: tuple[int, ...], layout: Layout, step: redistribute.Step, mesh: Mesh) -> str:
    """Kind of a redistribution step: `S -> R+ joined`, with the kinds of one axis, or `exchange`."""
    shards = [p for p in (*step.before, *step.after) if isinstance(p, Shard)]
    blocked = " blocked" if any((shard.blocks, shard.unit) != (1, 1) for shard in shards) else ""
    layouts = (layout, step.applied(layout))
    uneven = " uneven" if any(_cut_unevenly(shape, x, axis, mesh) for x in layouts for axis in step.axes) else ""
    if step.by_index:
        return f"{step.forward}{blocked}{uneven}"
    joined = " joined" if len(step.axes) > 1 else ""
    return f"{redistribute.kind(step.before[0])} -> {redistribute.kind(step.after[0])}{joined}{blocked}{uneven}"


def only_at_full_size(full: tuple[Plan, Graph, Program], small: tuple[Plan, Graph, Program]) -> list[str]:
    """The kinds that a plan executes at full size and its counterpart at reduced sizes does not."""

    def kinds(plan: Plan, graph: Graph, program: Program) -> set[str]:
        return plan_kinds(plan, graph) | program_kinds(program)

    return sorted(kinds(*full) - kinds(*small))
