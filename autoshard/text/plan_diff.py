"""Differences between two plans of a model: decisions, repeated modules grouped, and their estimated cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoshard.errors import ROWS
from autoshard.ir.graph import Graph
from autoshard.ir.plan import OpPlan, Plan
from autoshard.program.step_check import share_words
from autoshard.replay.reevaluate import origin
from autoshard.text.answer_labels import MEMORY, STEP
from autoshard.text.explain import fold, named_decisions
from autoshard.text.plan_summary import purpose
from autoshard.text.tables import table, wrapped
from autoshard.units import ROUNDING, counted, format_bytes, format_seconds, signed_seconds


@dataclass(frozen=True)
class ChangedDecision:
    """A decision, or `times` equal ones of repeated modules; `seconds`: what the second plan's cost more, together."""

    name: str
    one: str
    other: str
    seconds: float
    times: int = 1


@dataclass(frozen=True)
class Difference:
    """`missing`: decisions that only one of the plans has, when they are of different graphs. `runs`: the precision and
    the optimizer of each.

    Figures are those that each plan was made with; `notes` report another version or profile.
    """

    one: Plan
    other: Plan
    changes: tuple[ChangedDecision, ...]
    same: int
    runs: tuple[str, ...]
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Decision:
    name: str
    said: str
    seconds: float


def diff(one: Plan, graph: Graph, other: Plan, other_graph: Graph) -> Difference:
    """Decisions answer to each other by name."""
    first, second = _decided(one, graph), _decided(other, other_graph)
    common = [key for key in first if key in second]
    changed = [key for key in common if first[key].said != second[key].said]
    missing = [d.name for a, b in ((first, second), (second, first)) for key, d in a.items() if key not in b]
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for key in changed:
        groups.setdefault((fold(first[key].name), first[key].said, second[key].said), []).append(key)
    named = {group: {first[key].name for key in keys} for group, keys in groups.items()}
    shown = [group[0] if len(names) > 1 else min(names) for group, names in named.items()]
    shared = Counter(shown)  # such as casts of one module that now differ from each other
    rows = []
    for name, ((_, said, other_said), keys) in zip(shown, groups.items(), strict=True):
        seconds = sum(second[key].seconds - first[key].seconds for key in keys)
        label = f"{name} ({keys[0][1]})" if shared[name] > 1 else name
        rows.append(ChangedDecision(label, said, other_said, seconds, len(keys)))
    rows.sort(key=lambda row: -abs(row.seconds))
    notes = [f"{name}: {note}" for name, plan in (("A", one), ("B", other)) for note in origin(plan)]
    runs = tuple(f"{plan.precision}, {purpose(plan, traced)}" for plan, traced in ((one, graph), (other, other_graph)))
    return Difference(one, other, tuple(rows), len(common) - len(changed), runs, tuple(missing), tuple(notes))


def _decided(plan: Plan, graph: Graph) -> dict[tuple[str, str], _Decision]:
    decisions = {}
    for (kind, key), name, words, decided in named_decisions(plan, graph):
        seconds = decided.parts.compute_seconds + decided.parts.communication_seconds
        decisions[kind, key if isinstance(decided, OpPlan) else decided.path] = _Decision(name, words, seconds)
    return decisions


def text(delta: Difference, width: int | None = None) -> str:
    """The two predictions, then a line for each group of decisions that differ; `width`: columns of the terminal."""
    lines = table([("", "A", "B", "B - A"), *_figures(delta)], width)
    if delta.missing:
        names = ", ".join(delta.missing[:5]) + (" …" if len(delta.missing) > 5 else "")
        message = f"the graphs differ: {len(delta.missing)} decisions are in one plan only: {names}"
        lines += ["", *([message] if width is None else wrapped(message, width))]
    if not delta.changes:
        same = (
            f"the {delta.same} that both have are the same"
            if delta.missing
            else f"all {delta.same} decisions are the same"
        )
        same += ", but not the step" if _steps_differ(delta.one, delta.other) else ""
        return "\n".join([*lines, "", same, *_notes(delta)])
    differ = sum(change.times for change in delta.changes)
    lines += ["", f"{differ} decisions differ, {delta.same} are the same", ""]
    rows: list[Sequence[str]] = [("choice of", "A", "B", "B costs more")]
    rows += map(_cells, delta.changes[:ROWS])
    more = delta.changes[ROWS:]
    if not more and not delta.missing:
        unchanged, total = map(signed_seconds, remaining_seconds(delta))
        rows += [("the other choices, fed otherwise", "", "", unchanged), ("all choices", "", "", total)]
    return "\n".join([*lines, *table(rows, width), *([f"and {len(more)} more groups"] if more else []), *_notes(delta)])


def _notes(delta: Difference) -> list[str]:
    return [f"note: {note}" for note in delta.notes]


def remaining_seconds(delta: Difference) -> tuple[float, float]:
    """Seconds that choices which stay cost more by what now reaches them, and that all choices do."""
    one, other = (plan.certificate.objective_seconds for plan in (delta.one, delta.other))
    unchanged = other - one - sum(change.seconds for change in delta.changes)
    return unchanged if abs(unchanged) > ROUNDING * max(one, other) else 0.0, other - one


def seconds_row(name: str, a: float, b: float) -> tuple[str, str, str, str]:
    return name, format_seconds(a), format_seconds(b), signed_seconds(b - a)


def bytes_row(name: str, a: float, b: float) -> tuple[str, str, str, str]:
    return name, format_bytes(a), format_bytes(b), ("-" if b < a else "+") + format_bytes(abs(b - a))


def _figures(delta: Difference) -> list[Sequence[str]]:
    one, other = delta.one, delta.other
    return [
        ("mesh", str(one.mesh), str(other.mesh), ""),
        ("hardware", one.hardware, other.hardware, ""),
        ("run", *delta.runs, ""),
        ("level", str(one.search.level), str(other.search.level), ""),
        ("step", _step_words(one), _step_words(other), ""),
        seconds_row(STEP, one.step_seconds, other.step_seconds),
        seconds_row("objective", one.certificate.objective_seconds, other.certificate.objective_seconds),
        bytes_row(MEMORY, one.step_peak_bytes, other.step_peak_bytes),
    ]


def _steps_differ(one: Plan, other: Plan) -> bool:
    first, second = (replace(plan.step, predicted_seconds=0.0, predicted_peak_bytes=0.0) for plan in (one, other))
    return (first, one.buckets) != (second, other.buckets)


def _step_words(plan: Plan) -> str:
    """`4 micro-batches, 2 places, 1f1b`, and the blocks that are recomputed."""
    step = plan.step
    words = [counted(step.micro_batches, "micro-batch")]
    words += [counted(step.stages, step.word), step.schedule] if step.parts else []
    words += [f"ZeRO {step.zero}"] * (step.zero != 3)  # 3 also stands for nothing asked
    words += [share_words(step, plan.mesh)] if step.batch_shares else []
    words += [f"{counted(len(step.keeps), 'block')} recomputed"] if step.keeps else []
    words += [f"{len(plan.buckets) + 1} buckets of sizes"] if plan.buckets else []
    return ", ".join(words)


def _cells(change: ChangedDecision) -> Sequence[str]:
    name = f"{change.name} ({change.times}x)" if change.times > 1 else change.name
    return name, change.one, change.other, signed_seconds(change.seconds)


def as_dict(delta: Difference) -> dict[str, Any]:
    """Dict for `--json`: seconds and bytes, second plan minus first."""
    one, other = delta.one, delta.other
    return {
        "predicted_seconds": other.step_seconds - one.step_seconds,
        "objective_seconds": other.certificate.objective_seconds - one.certificate.objective_seconds,
        "predicted_peak_bytes": other.step_peak_bytes - one.step_peak_bytes,
        "changes": [asdict(change) for change in delta.changes],
        "same": delta.same,
        "missing": list(delta.missing),
        "notes": list(delta.notes),
    }
