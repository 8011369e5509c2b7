"""A step of several micro-batches or stages: its figures, its stages as rows, and its schedule as a picture."""

from __future__ import annotations

from typing import Any

from autoshard.cluster.hardware import Hardware
from autoshard.html_report.picture.stage_row import part_words
from autoshard.html_report.picture.stages_picture import about_step, stages_svg
from autoshard.html_report.timeline_series import differences, ticks
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.simulation.program_step import simulate_plan_step
from autoshard.simulation.step_timeline import StepTimeline
from autoshard.units import counted, format_bytes, format_seconds

KEPT = {"expensive": "all but products and attention", "input": "all"}


def is_whole(plan: Plan) -> bool:
    """Is a step more than the micro-batch that the plan is of."""
    return bool(plan.step.predicted_seconds)


def whole_step(plan: Plan, program: Program, graph: Graph, hardware: Hardware) -> dict[str, Any] | None:
    """What the template shows of it; None where a step is one micro-batch on one stage that keeps all."""
    if not is_whole(plan):
        return None
    timeline = simulate_plan_step(plan, program, graph, hardware)
    step = plan.step
    size = f"{step.samples} samples" if step.samples else "the captured batch"
    text = f"{counted(step.micro_batches, 'micro-batch')} of {size}"
    text += f" through {step.stages} stages, in the order called {step.schedule}" if step.stages > 1 else ""
    text += (
        "; all that follows on this page is of one of them, as if all of the model stood on each stage. Of what runs "
    )
    text += "once a step it is given an equal part; the timeline and its table are of a step of one micro-batch."
    return {
        "text": text,
        "picture": stages_svg(timeline),
        "about": about_step(timeline),
        "rows": _rows(plan, graph, timeline),
        "data": slots(timeline, [part_words(plan, graph, number)[0] for number in range(len(timeline.costs.parts))]),
    }


def slots(timeline: StepTimeline, parts: list[str]) -> dict[str, Any]:
    """Columns for the page's script, of each stage in order of start: `start` as differences; `slot` is (micro-batch x
    chunks + chunk) x 2, one more for a backward. `parts` says what part chunk x stages + stage has."""
    chunks = timeline.costs.chunks
    return {
        "step": ticks(timeline.step_seconds),
        "chunks": chunks,
        "parts": parts,
        "stages": [
            {
                "start": differences([ticks(own.start_seconds) for own in placed]),
                "duration": [ticks(own.duration_seconds) for own in placed],
                "slot": [
                    (own.slot.micro_batch * chunks + own.slot.chunk) * 2 + (own.slot.kind == "B") for own in placed
                ],
                "tail": ticks(timeline.costs.stages[stage].tail_seconds),
                "end": ticks(timeline.stage_seconds[stage]),
            }
            for stage, placed in enumerate(timeline.by_stage)
        ],
    }


def _rows(plan: Plan, graph: Graph, timeline: StepTimeline) -> list[tuple[str, ...]]:
    """Stage, its modules, what is computed again, seconds of a micro-batch there and back, busy share, memory."""
    rows: list[tuple[str, ...]] = []
    for stage in range(timeline.stages):
        parts = [timeline.costs.part(stage, chunk) for chunk in range(timeline.costs.chunks)]
        names = [part_words(plan, graph, chunk * timeline.stages + stage) for chunk in range(timeline.costs.chunks)]
        rows.append(
            (
                str(stage),
                "; ".join(words for words, _ in names),
                _again(plan, {module for _, own in names for module in own}),
                format_seconds(sum(part.forward_seconds for part in parts)),
                format_seconds(sum(part.backward_seconds for part in parts)),
                format_seconds(timeline.costs.stages[stage].tail_seconds),
                f"{timeline.busy_seconds(stage) / timeline.step_seconds:.0%}",
                format_bytes(timeline.peak_bytes[stage]),
            )
        )
    return rows


def _again(plan: Plan, blocks: set[str]) -> str:
    kept = [keep for module, keep in plan.step.keeps.items() if module in blocks]
    keeps = {KEPT.get(keep, "all but some products and attention") for keep in kept}
    return ", ".join(sorted(keeps)) or "nothing"
