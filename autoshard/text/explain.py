"""Explanation of a plan: the cost parts of every choice, what comes next, and what another choice would cost."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoshard import solvers
from autoshard.cluster.hardware import Hardware
from autoshard.constraints.apply_pins import (
    Pinned,
    choice_text,
    excluding,
    fitting_choices,
    label,
    nodes_of,
    not_in_memory,
    pinned,
    pinned_nodes,
    refusal,
)
from autoshard.constraints.host_offers import offered
from autoshard.constraints.pins import ON_HOST, Pin, parse_pin, parse_wants, said_memory
from autoshard.costs.bands import COUNTS
from autoshard.errors import NAMED, ROWS, InfeasibleError, UsageError
from autoshard.formulation.fewer_choices import narrowed
from autoshard.formulation.formulate import TIE_SECONDS, Formulation, Site
from autoshard.formulation.planning_context import context_of
from autoshard.ir.graph import CAST, Graph
from autoshard.ir.plan import OpPlan, Parts, Plan
from autoshard.ir.problem import Problem
from autoshard.program.lower import lower
from autoshard.replay.command_line import command
from autoshard.replay.reevaluate import Decided, chosen, decisions, said, today
from autoshard.rules import find, granularities
from autoshard.rules.strategy_text import plain_words
from autoshard.search.build_plan import Origin, plan_of, priced
from autoshard.search.cached.search_cache import formulated as formulated_once
from autoshard.search.objectives import SPEED, Levelled, solve_level
from autoshard.search.shortest_step import StepSearch
from autoshard.simulation import simulate
from autoshard.simulation.steps.server_step import served_hardware, worker_program
from autoshard.solvers.common.result import Solution
from autoshard.styles.known_styles import STYLES, in_style
from autoshard.text import plan_labels
from autoshard.text.account_text import left_open
from autoshard.text.answer_labels import MEMORY, STEP, gap
from autoshard.text.plan_figures import certificate_rows
from autoshard.text.stage_table import STEP_HEADER, step_cells
from autoshard.text.tables import table, wrapped
from autoshard.units import format_bytes, format_seconds, signed_seconds
from autoshard.whole_step_search.optimizer_shards import DECIDED as BY_ZERO

_PARTS = ("compute", "replicated", "communication", "memory")
_NUMBER = re.compile(r"(?<=\.)\d+(?=[. ]|$)")


@dataclass(frozen=True)
class ExplainedChoice:
    """One choice, or `times` equal ones of repeated blocks: their parts are added up, and the next best one."""

    name: str
    choice: str
    parts: Parts
    runner_up: str
    decided_by: str
    times: int = 1


@dataclass(frozen=True)
class WhyNot:
    """The best plan with another choice at `where`; `reason` where there is none. Differences are to the plan."""

    where: str
    how: str
    reason: str = ""
    choice: str = ""
    objective_seconds: float = 0.0
    predicted_seconds: float = 0.0
    predicted_peak_bytes: float = 0.0
    level_objective: float = 0.0
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Explained:
    """`rows` are what was asked for; the total is over all choices of the plan, `outputs` the rest of it.

    All figures are of one time: today's; `notes` list what has changed since the plan was made.
    """

    plan: Plan
    rows: tuple[ExplainedChoice, ...]
    total: Parts
    outputs_seconds: float
    why_not: WhyNot | None = None
    notes: tuple[str, ...] = ()
    left_open: str = ""  # what a large gap is made of


def explain(
    plan: Plan, graph: Graph, hardware: Hardware, what: str | None, how: str | None, folder: str = "DIR"
) -> Explained:
    """`what` names an operator, module, parameter, input or pattern (None: all), `how` what it should do instead;
    `folder` is for what an error proposes.

    Raises UsageError where `what` names nothing, or `how` can't be read.
    """
    if how is not None:
        _check_question(plan, graph, what, how, folder)
    there = how is not None and said_memory(how)[1] == ON_HOST
    fixed = formulated(plan, graph, hardware, [Pin(str(what), f"{what}={how}", memory=ON_HOST)] if there else [])
    formulation = fixed.formulation
    now = today(plan, formulation)
    plan, why = now.plan, None
    if what is None:
        rows = _folded(list(_rows(plan, graph, None)))
    else:
        nodes = nodes_of(formulation, Pin(what, what))
        rows = list(_rows(plan, graph, {(formulation.sites[n].kind, formulation.sites[n].name) for n in nodes}))
        if how is not None:
            why = (
                _why_not(plan, fixed, nodes, what, how)
                if now.offered
                else WhyNot(what, how, f"{now.notes[-1]}; plan again")
            )
    total, outputs = _total(plan), plan.search.outputs_seconds
    return Explained(plan, tuple(rows), total, outputs, why, now.notes, _left_open(plan, graph, hardware))


def _check_question(plan: Plan, graph: Graph, what: str | None, how: str, folder: str) -> None:
    """Raise UsageError if `how` is a style, or `what` is None."""
    style = plain_words(how).replace(" ", "-")
    if style in STYLES:
        other = f"{command(plan, graph)} --strategy {style} --out {shlex.quote(f'{folder}-{style}')}"
        message = f"--why-not {how!r}: {STYLES[style].title} is a style of the whole plan, which is planned by itself"
        raise UsageError(message, f"{other} && autoshard diff {shlex.quote(folder)} {shlex.quote(f'{folder}-{style}')}")
    wanted, memory = said_memory(how)
    if what is None:
        if wanted or not memory:
            parse_wants(wanted, plan.mesh, f"--why-not {how!r}")
        costliest = max(plan.ops, key=lambda op: op.forward_seconds + op.backward_seconds, default=None)
        where = costliest.op if costliest else "WHAT"
        raise UsageError(
            "--why-not needs to know where: name an operator, a module or a parameter",
            f"autoshard explain {shlex.quote(folder)} {where} --why-not {shlex.quote(how)}",
        )


def _left_open(plan: Plan, graph: Graph, hardware: Hardware) -> str:
    share = gap(plan)
    return left_open(plan, simulate(lower(plan, graph), graph, hardware)) if share and share >= COUNTS else ""


def _rows(plan: Plan, graph: Graph, names: set[tuple[str, str]] | None) -> Iterable[ExplainedChoice]:
    known = granularities(graph, plan.mesh)
    for (kind, key), name, words, decided in named_decisions(plan, graph):
        if names is None or (kind, key) in names:
            is_op = isinstance(decided, OpPlan)
            label = f"{name} ({key})" if is_op and names is not None else name
            notation = decided.strategy if isinstance(decided, OpPlan) else decided.layout
            other = plan_labels.runner_up_words(decided, plan, graph, known)
            yield ExplainedChoice(label, f"{words} [{notation}]", decided.parts, other, decided.decided_by)


def named_decisions(plan: Plan, graph: Graph) -> Iterable[tuple[tuple[str, str], str, str, Decided]]:
    """(kind, key), name and what is decided in words, of every decision. Keys are names of operators and tensors."""
    known = granularities(graph, plan.mesh)
    for kind, decided in decisions(plan):
        if isinstance(decided, OpPlan):
            op = graph.by_op[decided.op]
            strategy = find(graph, op, plan.mesh, known, decided.strategy)
            words = plan_labels.strategy_words(op, strategy, graph, plan.mesh)
            yield (kind, op.name), f"{op.module} {op.target.partition('.')[2]}".strip(), words, decided
        else:
            words = plan_labels.placement_words(decided.layout, plan.mesh)
            yield (kind, decided.name), f"{kind} {decided.path}", words, decided


def fold(name: str) -> str:
    """`h.3.mlp` as `h.#.mlp`: the same for all blocks of a kind."""
    return _NUMBER.sub("#", name)


def _folded(rows: Sequence[ExplainedChoice]) -> list[ExplainedChoice]:
    """Rows that differ in the number of their block only, as one, the most expensive first."""
    groups: dict[tuple[str, str, str], list[ExplainedChoice]] = {}
    for row in rows:
        groups.setdefault((fold(row.name), row.choice, row.decided_by), []).append(row)
    folded = [
        replace(group[0], name=name if len(group) > 1 else group[0].name, parts=_sum(group), times=len(group))
        for (name, _, _), group in groups.items()
    ]
    return sorted(folded, key=lambda row: -(row.parts.compute_seconds + row.parts.communication_seconds))


def _sum(rows: Sequence[ExplainedChoice]) -> Parts:
    parts = _added(row.parts for row in rows)
    return replace(parts, runner_up=rows[0].parts.runner_up, runner_up_seconds=rows[0].parts.runner_up_seconds)


def _added(parts: Iterable[Parts]) -> Parts:
    every = list(parts)
    return Parts(
        sum(p.compute_seconds for p in every),
        sum(p.repeated_seconds for p in every),
        sum(p.communication_seconds for p in every),
        sum(p.memory_bytes for p in every),
    )


def _total(plan: Plan) -> Parts:
    return _added(decided.parts for _, decided in decisions(plan))


# --- another choice -------------------------------------------------------------------------------------------------


def formulated(plan: Plan, graph: Graph, hardware: Hardware, wanted: Sequence[Pin] = ()) -> Pinned:
    """The problem that the plan solves, its style and pins applied; what is `wanted` of host memory is offered, too."""
    if plan.servers.count:
        (plan, _, graph), hardware = worker_program(plan, graph), served_hardware(hardware)
    context = context_of(plan, graph, hardware)
    formulation = formulated_once(None, context).within(plan.capacity_bytes)
    pins = [parse_pin(pin, plan.mesh) for pin in plan.search.pins]
    there = {tensor.name for tensor in plan.parameters if tensor.layout.host}
    if on_host := offered(formulation, [*pins, *wanted], plan.capacity_bytes) | there:
        formulation = formulated_once(None, replace(context, on_host=on_host)).within(plan.capacity_bytes)
    free = pinned_nodes(formulation, pins) | _stored_by_zero(plan, formulation)
    for name in _styles(plan):
        formulation = in_style(formulation, name, free)
    return pinned(formulation, pins)


def _stored_by_zero(plan: Plan, formulation: Formulation) -> set[int]:
    """Nodes of weights, and of their casts, that ZeRO decided after the style."""
    stored = {parameter.name for parameter in plan.parameters if parameter.decided_by == BY_ZERO}
    stored |= {op.name for op in formulation.graph.ops if op.target == CAST and op.operands[0] in stored}
    return {n for n, site in enumerate(formulation.sites) if site.name in stored}


def _styles(plan: Plan) -> set[str]:
    return {op.decided_by for op in plan.ops} & STYLES.keys()


def _why_not(plan: Plan, fixed: Pinned, nodes: Sequence[int], what: str, how: str) -> WhyNot:
    """The best plan in which all `nodes` do as `how` says."""
    formulation, (wanted, memory) = fixed.formulation, said_memory(how)
    wants = parse_wants(wanted, plan.mesh, f"--why-not {how!r}") if wanted or not memory else ()
    keep = {n: fitting_choices(formulation, formulation.sites[n], wants, memory) for n in nodes}
    whole = fixed.whole
    for n, fitting in keep.items():
        site = whole.sites[n]
        if fitting or fitting_choices(whole, site, wants, memory):
            continue
        if _styles(plan):
            return WhyNot(what, how, f"it is not of --strategy {', '.join(_styles(plan))}; plan again without it")
        elsewhere = fitting_choices(whole, site, wants)
        reasons = not_in_memory(whole, site, what, memory, "") if elsewhere else refusal(whole, site, wants, "")
        return WhyNot(what, how, "; ".join(reasons))
    if pins := excluding(fixed, list(nodes), wants, memory):
        which, without = ("a pin", "it") if len(pins) == 1 else ("pins", "them")
        return WhyNot(what, how, f"{which} decided this: {', '.join(pins)}; plan again without {without}")
    now = chosen(plan, formulation)
    if all(now.get(n) in fitting for n, fitting in keep.items()):
        return WhyNot(what, how, "this is already the chosen strategy")
    small = narrowed(formulation, keep)
    try:
        levelled = _by_step(plan, small) or solve_level(
            small, plan.search.level, plan.capacity_bytes, lambda problem: _solved(plan, problem)
        )
    except InfeasibleError as error:
        return WhyNot(what, how, error.message)
    return _compared(plan, small, levelled, nodes, what, how)


def _by_step(plan: Plan, small: Formulation) -> Levelled | None:
    """Result as the plan was found, if that was by the seconds of a step."""
    if plan.search.level != SPEED or plan.certificate.solver != "auto":
        return None
    choice = StepSearch(small).first()
    if choice is None:
        return None
    solution = Solution(small.problem, choice, 0.0, "auto")
    return Levelled(solution, solution.objective, 0.0)


def _solved(plan: Plan, problem: Problem) -> Solution:
    return solvers.solve(problem, plan.certificate.solver if plan.certificate.solver in solvers.SOLVERS else "dp")


def _compared(plan: Plan, small: Formulation, levelled: Levelled, nodes: Sequence[int], what: str, how: str) -> WhyNot:
    other = plan_of(small, levelled.solution, Origin(), plan.capacity_bytes, "search")
    other = priced(other, small.graph, small.hardware)
    labels = {_label(small.graph, kind, decided) for kind, decided in _of(plan, small, nodes)}
    before = {_label(small.graph, kind, d): said(d) for kind, d in decisions(plan)}
    after = {_label(small.graph, kind, d): said(d) for kind, d in decisions(other)}
    changed = tuple(f"{name}: {before[name]} -> {text}" for name, text in after.items() if before[name] != text)
    first = small.sites[nodes[0]]
    return WhyNot(
        what,
        how,
        choice=choice_text(first, levelled.solution.choice[nodes[0]], plan.mesh),
        objective_seconds=other.certificate.objective_seconds,
        predicted_seconds=other.predicted_seconds,
        predicted_peak_bytes=other.predicted_peak_bytes,
        level_objective=other.predicted_seconds if plan.search.level == SPEED else levelled.objective,
        changed=tuple(line for line in changed if line.partition(": ")[0] not in labels),
    )


def _of(plan: Plan, formulation: Formulation, nodes: Sequence[int]) -> list[tuple[str, Decided]]:
    names = {(formulation.sites[n].kind, formulation.sites[n].name) for n in nodes}
    return [(kind, d) for kind, d in decisions(plan) if (kind, d.op if isinstance(d, OpPlan) else d.name) in names]


def _label(graph: Graph, kind: str, decided: Decided) -> str:
    return label(graph, Site(kind, decided.op if isinstance(decided, OpPlan) else decided.name))


# --- as text --------------------------------------------------------------------------------------------------------


def text(explained: Explained, width: int | None = None) -> str:
    """The table of cost parts, and the answer to "why not"; `width`: columns of the terminal, None for any."""
    plan = explained.plan
    simulated = (_step_name(plan), f"{format_seconds(plan.predicted_seconds)} (simulated)")
    whole = [(STEP, format_seconds(plan.step_seconds))] if plan.step.is_whole else []
    result = [*_costs(explained, width), "", *table([*certificate_rows(plan), simulated, *whole], width)]
    if explained.left_open:
        result += _fitted(f"left open: {explained.left_open}", width)
    if plan.search.steps:
        result += ["", "whole steps:", *table([STEP_HEADER, *map(step_cells, plan.search.steps)], width)]
        result += [line for message in plan.search.step_messages for line in _fitted(message, width)]
    if explained.why_not:
        result += ["", *_why_lines(plan, explained.why_not, width)]
    result += [line for note in explained.notes for line in _fitted(f"note: {note}", width)]
    return "\n".join(result)


def _fitted(line: str, width: int | None) -> list[str]:
    return [line] if width is None else wrapped(line, width)


def _costs(explained: Explained, width: int | None) -> list[str]:
    """A line a choice; where the terminal is too narrow for that, its name and strategy above its figures."""
    shown = explained.rows[:ROWS] if not explained.why_not else explained.rows
    hidden = explained.rows[len(shown) :]
    outputs = format_seconds(explained.outputs_seconds, 4)
    whole = explained.total.communication_seconds + explained.outputs_seconds
    summary = [(f"{len(hidden)} more", *_cells(_added(row.parts for row in hidden)))] if hidden else []
    summary += [("outputs", "0 s", "0 s", outputs, "0 B")] if explained.outputs_seconds > TIE_SECONDS else []
    summary += [("all choices", *_cells(replace(explained.total, communication_seconds=whole)))]
    rows = [_row_cells(row) for row in shown]
    wide = [(name, choice, *cells, *others) for name, choice, cells, others in rows]
    wide += [(name, "", *cells, "", "", "") for name, *cells in summary]
    lines = table([("choice of", "", *_PARTS, "runner-up", "costs more", "decided by"), *wide])
    if width is None or max(map(len, lines)) <= width:
        return lines
    blank = ("",) * (len(_PARTS) + 1)
    narrow: list[tuple[str, ...]] = [("", *_PARTS, "runner-up")]
    for name, choice, cells, (runner_up, more, by) in rows:
        head = f"{name}: {choice}" + (f", by {by}" if by != "search" else "")
        narrow += [(head, *blank), (" ", *cells, f"{runner_up} {more}".strip())]
    for name, *figures in summary:
        narrow += [(name, *blank), (" ", *figures, "")]
    return table(narrow, width)


def _row_cells(row: ExplainedChoice) -> tuple[str, str, tuple[str, ...], tuple[str, str, str]]:
    """Name, choice, figures; and the runner-up, what it costs more, who decided."""
    name = f"{row.name} ({row.times}x)" if row.times > 1 else row.name
    extra = signed_seconds(row.parts.runner_up_seconds) if row.runner_up else ""
    return name, row.choice, _cells(row.parts), (row.runner_up or "none", extra, row.decided_by)


def _cells(parts: Parts) -> tuple[str, str, str, str]:
    seconds = (parts.compute_seconds, parts.repeated_seconds, parts.communication_seconds)
    compute, repeated, communication = (format_seconds(x, 4) for x in seconds)
    return compute, repeated, communication, format_bytes(parts.memory_bytes, 4)


def _why_lines(plan: Plan, why: WhyNot, width: int | None) -> list[str]:
    lines = [f"why not {why.how} at {why.where}?"]
    if why.reason:
        return [*lines, *_fitted(f"  {why.reason}", width)]
    apart = why.objective_seconds - plan.certificate.objective_seconds
    step = why.predicted_seconds - plan.predicted_seconds
    rows = [
        ("  objective", f"{format_seconds(why.objective_seconds)}, {_more(apart, plan.certificate.objective_seconds)}"),
        (f"  {_step_name(plan)}", f"{format_seconds(why.predicted_seconds)}, {_more(step, plan.predicted_seconds)}"),
        (
            f"  {MEMORY}",
            f"{format_bytes(why.predicted_peak_bytes)}, was {format_bytes(plan.predicted_peak_bytes)}",
        ),
    ]
    lines += table([("  chosen instead", why.choice), *rows], width)
    shown = why.changed[:NAMED]
    more = f" and {len(why.changed) - len(shown)} more" if len(why.changed) > len(shown) else ""
    lines.append(f"  other decisions that change with it: {len(why.changed) or 'none'}")
    listed = [part for line in shown for part in _fitted(f"    {line}", width)]
    return lines + listed + ([f"   {more}"] if more else [])


def _step_name(plan: Plan) -> str:
    """Name of the step whose seconds the search minimised."""
    return "micro-batch, average" if plan.step.is_whole else STEP


def _more(seconds: float, whole: float) -> str:
    if not seconds:
        return "the same"
    return f"{format_seconds(abs(seconds), 3)} ({abs(seconds) / whole:.2%}) {'more' if seconds > 0 else 'less'}"


def as_dict(explained: Explained) -> dict[str, Any]:
    """Dict for `--json`: seconds and bytes. `why_not` compares with its `instead_of`: of several micro-batches both are
    of one."""
    plan, why = explained.plan, explained.why_not
    instead_of = {
        "objective_seconds": plan.certificate.objective_seconds,
        "predicted_seconds": plan.predicted_seconds,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "level_objective": plan.certificate.level_objective,
    }
    return {
        "rows": [asdict(row) for row in explained.rows],
        "total": asdict(explained.total),
        "outputs_seconds": explained.outputs_seconds,
        "objective_seconds": plan.certificate.objective_seconds,
        "lower_bound_seconds": plan.certificate.lower_bound_seconds,
        "level": plan.search.level,
        "level_objective": plan.certificate.level_objective,
        "level_bound": plan.certificate.level_bound,
        "gap": gap(plan),
        "predicted_seconds": plan.step_seconds,
        "why_not": asdict(why) | {"instead_of": instead_of} if why else None,
        "notes": list(explained.notes),
        "left_open": explained.left_open,
        "steps": [asdict(tried) for tried in plan.search.steps],
        "step_messages": list(plan.search.step_messages),
    }
