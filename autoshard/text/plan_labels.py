"""Plans in a reader's words: what each strategy does, why others are not offered, and rows in distinct blocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from autoshard import rules
from autoshard.errors import NAMED, UserError
from autoshard.graph_capture.training.float8_layers import excluded_from_float8
from autoshard.ir.graph import CAST, Graph, Op
from autoshard.ir.layout import Layout, Partial, Replicate, Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import OpPlan, Plan, RedistributionPlan, TensorPlan
from autoshard.program.lower import chosen_strategies
from autoshard.rules import explain, instance
from autoshard.rules.algebra.float8_products import PLAIN, UNIT, runs_in_bfloat16
from autoshard.rules.algebra.strategy import Choice, Strategy
from autoshard.rules.granularities import Granularities
from autoshard.rules.operators import record
from autoshard.rules.strategy_text import axis_words, is_batch

T = TypeVar("T")
SERVED = "rows on the parameter servers"
_NUMBER = re.compile(r"(^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True)
class BlockRow:
    """One op of a block: `module` is relative to the block, `moves` the redistributions made for it."""

    module: str
    op: Op
    plan: OpPlan
    strategy: Strategy
    words: str
    moves: tuple[RedistributionPlan, ...]

    @property
    def result(self) -> str:
        return str(self.strategy.results[0]) if self.strategy.results else ""


@dataclass(frozen=True)
class Block:
    """Consecutive equal blocks, written once: `names` are the module paths of all of them."""

    names: tuple[str, ...]
    rows: tuple[BlockRow, ...]

    @property
    def title(self) -> str:
        first, last = self.names[0] or "(top level)", self.names[-1]
        return first if len(self.names) == 1 else f"{first} … {last} ({len(self.names)}x)"


def blocks(plan: Plan, graph: Graph) -> tuple[Block, ...]:
    """The ops in execution order, grouped by block, with equal neighbours folded. Cached for a plan: each part of a
    report calls it."""
    return known_of(_blocks, plan, graph)


def known_of(make: Callable[[Plan, Graph], T], plan: Plan, graph: Graph) -> T:
    """Result of `make(plan, graph)`, computed once for a plan and its graph."""
    known = plan.once(_known)
    key = make.__qualname__, id(graph)
    if key not in known:
        known[key] = graph, make(plan, graph)
    return cast(T, known[key][1])


def _known(plan: Plan) -> dict[tuple[str, int], tuple[Graph, Any]]:
    """Cache by function name and graph address; it keeps each graph, so that no other graph gets its address."""
    return {}


def _blocks(plan: Plan, graph: Graph) -> tuple[Block, ...]:
    groups: list[tuple[str, list[BlockRow]]] = []
    for row, owner in _rows(plan, graph):
        if not groups or groups[-1][0] != owner:
            groups.append((owner, []))
        groups[-1][1].append(row)
    folded: list[Block] = []
    for owner, rows in groups:
        last = folded[-1] if folded else None
        if last and _family(last.names[-1]) == _family(owner) and _signature(last.rows) == _signature(rows):
            folded[-1] = Block((*last.names, owner), last.rows)
        else:
            folded.append(Block((owner,), tuple(rows)))
    return tuple(folded)


def without_casts(rows: tuple[BlockRow, ...], graph: Graph) -> tuple[BlockRow, ...]:
    """Rows without the casts of weights (mixed precision); what moves for a cast is listed with its first reader."""
    place = {row.op.name: index for index, row in enumerate(rows)}
    by_index: dict[int, BlockRow] = {}
    for index, row in sorted(enumerate(rows), reverse=True):  # a cast of a cast hands on what it was given
        current = by_index.setdefault(index, row)
        cast = row.op.target == CAST and row.op.results[0] in graph.weights
        readers = (
            [place[user.name] for user, _ in graph.consumers[row.op.results[0]] if user.name in place] if cast else []
        )
        if readers:
            first = min(readers)
            by_index[first] = replace(by_index[first], moves=(*current.moves, *by_index[first].moves))
            del by_index[index]
    return tuple(by_index[index] for index in sorted(by_index))


def _rows(plan: Plan, graph: Graph) -> list[tuple[BlockRow, str]]:
    """Each op's row with the module path of its block: up to the first number, as h.0 in h.0.attn."""
    granularities = rules.granularities(graph, plan.mesh)
    ops = {op.name: op for op in graph.ops}
    moves: dict[str, list[RedistributionPlan]] = {}
    for move in plan.redistributions:
        moves.setdefault(move.consumers[0], []).append(move)
    rows = []
    for decided in plan.ops:
        op = ops[decided.op]
        strategy = rules.find(graph, op, plan.mesh, granularities, decided.strategy)
        owner = _block_of(op.module)
        module = op.module[len(owner) :].lstrip(".")
        served = f", {SERVED}" if plan.servers.count and strategy.host else ""
        shown = replace(strategy, host=False) if served else strategy
        words = strategy_words(op, shown, graph, plan.mesh) + served
        rows.append((BlockRow(module, op, decided, strategy, words, tuple(moves.get(op.name, ()))), owner))
    return rows


def _block_of(module: str) -> str:
    match = _NUMBER.search(module)
    return module[: match.end(2)] if match else ""


def _family(owner: str) -> str | None:
    """Module path without its number, equal for blocks of one family; None for the model itself."""
    return _NUMBER.sub(r"\1#", owner) if owner else None


def _signature(rows: tuple[BlockRow, ...] | list[BlockRow]) -> tuple[object, ...]:
    return tuple(
        (
            row.module,
            row.op.target,
            str(row.strategy),
            row.plan.decided_by,
            tuple(_move_key(move) for move in row.moves),
        )
        for row in rows
    )


def _move_key(move: RedistributionPlan) -> tuple[object, ...]:
    return (str(move.source), str(move.target), move.steps)


def strategy_words(op: Op, strategy: Strategy, graph: Graph, mesh: Mesh) -> str:
    """`column-parallel over tp, batch split over dp`; axes of size 1 say nothing."""
    said: dict[str, list[str]] = {}
    for axis in range(len(strategy.choices)):
        if mesh.sizes[axis] > 1:
            said.setdefault(axis_words(op, strategy, axis, graph), []).append(mesh.names[axis])
    discovered = " (discovered)" if graph.rule_of.get(op.name) else ""
    words = ", ".join(f"{what} over {' and '.join(axes)}" for what, axes in said.items()) or "whole"
    return words + (", on the host" if strategy.host else "") + discovered


def runner_up_words(decided: OpPlan | TensorPlan, plan: Plan, graph: Graph, known: Granularities) -> str:
    """The best other choice in words and as plans write it, "" if there is none; only as the plan has it if it is not
    offered any more."""
    notation = decided.parts.runner_up
    if not notation:
        return ""
    if isinstance(decided, TensorPlan):
        return f"{placement_words(Layout.parse(notation), plan.mesh)} [{notation}]"
    op = graph.by_op[decided.op]
    try:
        other = rules.find(graph, op, plan.mesh, known, notation)
    except UserError:
        return notation
    return f"{strategy_words(op, other, graph, plan.mesh)} [{notation}]"


def dim_words(op: Op, position: int, dim: int, name: str, graph: Graph) -> str:
    """Name for a split of dim `dim` of tensor `name`, the operand at `position`."""
    named = (record(op.target).split_words or {}).get((position, dim))
    return named or ("batch split" if dim == 0 and is_batch(graph, name) else f"dim {dim} of {name} split")


def placement_words(layout: Layout, mesh: Mesh) -> str:
    """`dim 0 over dp, copied over tp`: a stored tensor's layout in words; axes of size 1 say nothing."""
    said: dict[str, list[str]] = {}
    for placement, name, size in zip(layout.placements, mesh.names, mesh.sizes, strict=True):
        if size > 1:
            said.setdefault(_placement(placement), []).append(name)
    words = ", ".join(f"{what} over {' and '.join(axes)}" for what, axes in said.items()) or "whole"
    return words + (", in host memory" if layout.host else "")


def stored_words(stored: TensorPlan, plan: Plan) -> str:
    """Layout of a stored tensor, in the notation of layouts and in words."""
    if plan.servers.count and stored.layout.host:
        return SERVED
    return f"{stored.layout}: {placement_words(stored.layout, plan.mesh)}"


def _placement(placement: Shard | Replicate | Partial) -> str:
    if isinstance(placement, Shard):
        return f"dim {placement.dim} cut" + (f" in each of {placement.blocks} blocks" if placement.blocks > 1 else "")
    return "copied" if isinstance(placement, Replicate) else "a partial sum"


SHARDS = f"a shard has rows or a dim that are no multiple of {UNIT}"


def float8_words(plan: Plan, graph: Graph) -> str:
    """`12 of 13 linear layers; in bfloat16 lm_head (no other layer follows: …)`; "" in other precisions."""
    if plan.precision != "fp8-mixed":
        return ""
    marked = [op for op in graph.ops if op.target in PLAIN]
    chosen = chosen_strategies(plan, graph)
    uneven = [op for op in marked if runs_in_bfloat16(graph, op, chosen[op.name], plan.mesh)]
    in_bfloat16 = [*excluded_from_float8(graph), *((op, SHARDS) for op in uneven)]
    reasons: dict[str, list[str]] = {}
    for op, reason in in_bfloat16:
        reasons.setdefault(reason, []).append(op.module or op.name)
    words = f"{len(marked) - len(uneven)} of {len(marked) + len(in_bfloat16) - len(uneven)} linear layers"
    message = "; ".join(f"{_named_layers(names)} ({reason})" for reason, names in reasons.items())
    words += f"; in bfloat16 {message}" if message else ""
    return f"{words}; no kernel in float8 was measured: the profile's peak, at the efficiency of bfloat16's"


def _named_layers(names: list[str]) -> str:
    """The first names, and the number of those left out."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def unavailable_strategies(graph: Graph, op: Op, mesh: Mesh, granularities: Granularities) -> list[str]:
    """`heads split over tp: some device would hold nothing: 12 units over 5 devices`, a line for each split and reason.

    Only splits over one axis, and dims that no axis may split; combinations of axes are left out.
    """
    axes_of: dict[tuple[str, str], list[str]] = {}
    for text, reason in explain(graph, op, mesh, granularities):
        choice_text, _, axis = text.partition("@")
        if text == op.target:
            axes_of.setdefault(("any split", reason), [])
        elif " " in text or (axis and mesh.axis_size(axis) == 1):
            continue
        else:
            choice = Choice.parse(choice_text)
            if choice.kind == "factor":
                words = _factor_words(graph, op, choice.factor) + _refined(choice)
                axes = axes_of.setdefault((words, reason.removeprefix(f"{choice.factor}: ")), [])
                axes += [axis] if axis and axis not in axes else []
    return [
        f"{words} over {' or '.join(axes)}: {reason}" if axes else f"{words}: {reason}"
        for (words, reason), axes in axes_of.items()
    ]


def _refined(choice: Choice) -> str:
    if isinstance(choice.unit, tuple):
        return f" in parts of {', '.join(map(str, choice.unit))}"
    blocks = f" in each of {choice.blocks} blocks" if choice.blocks > 1 else ""
    return blocks + (f" in units of {choice.unit}" if choice.unit > 1 else "")


def _factor_words(graph: Graph, op: Op, factor: str) -> str:
    """Name for a split of the factor, by the first operand or result that has it."""
    rule = instance(graph, op).rule
    terms = [*zip(op.operands, rule.operands, strict=False), *zip(op.results, rule.results, strict=False)]
    for position, (name, term) in enumerate(terms):
        for dim, part in enumerate(term.dims if term is not None and name is not None else ()):
            if factor in part.factors:
                assert name is not None
                return dim_words(op, position, dim, name, graph)
    return f"split of {factor}"
