"""Steps of dynamic sizes in words: the expected step, and a row for each size of the histogram."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.graph_capture.dynamic_sizes.graph_numbers import sizes_of, words
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.text.answer_labels import STEP
from autoshard.units import format_seconds


def step_name(graph: Graph) -> str:
    """Label of the predicted step: of the largest sizes if sizes are dynamic."""
    return "step, largest sizes" if graph.dynamic else STEP


def expected_rows(plan: Plan) -> list[tuple[str, str]]:
    """The mean step over the histogram, and the gain of a plan for each size; nothing without a histogram."""
    rows = plan.search.sizes
    if not rows:
        return []
    expected, best = plan.search.expected_seconds, sum(size_step.weight * size_step.best_seconds for size_step in rows)
    lost = expected / best - 1 if best else 0.0
    expected_row = [("expected step", f"{format_seconds(expected)} over {len(rows)} sizes")]
    words = f"{lost:.1%} slower than a plan for each size" if lost >= 5e-4 else "best at every size"
    what = f"{len(plan.buckets) + 1} buckets of sizes" if plan.buckets else "one plan for all"
    return expected_row + [(what, words)] * (plan.search.level == 2)


def open_sizes(graph: Graph) -> list[str]:
    """Sentences on sizes without an upper limit."""
    at = sizes_of(graph)
    return [
        f"{size.name} has no upper limit: memory and step are of {at[size.name]}"
        for size in graph.dynamic
        if not size.most
    ]


def size_table(plan: Plan) -> list[Sequence[str]]:
    """Rows by size: share, step, the best plan's step at that size, and the lower bound."""
    rows: list[Sequence[str]] = [("sizes", "share", "step", "best plan there", "lower bound")]
    shown = 5 if plan.search.level == 2 else 3  # at other levels nothing is compared by time
    for size_step in plan.search.sizes:
        names = [name for name, _ in size_step.sizes]
        rows.append(
            (
                words(names, tuple(size for _, size in size_step.sizes)),
                f"{size_step.weight:.1%}",
                format_seconds(size_step.seconds),
                format_seconds(size_step.best_seconds),
                format_seconds(size_step.bound_seconds) if size_step.bound_seconds else "none",
            )
        )
    return [row[:shown] for row in rows]


def size_words(graph: Graph) -> str:
    """The sizes that a plan is for, with those of its predicted step."""
    at = sizes_of(graph)
    return "; ".join(f"{size.name} is {size.words()} (largest step: {at[size.name]})" for size in graph.dynamic)
