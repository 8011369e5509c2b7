"""A step of several micro-batches or stages: its figures, its stages as rows, and its schedule as a picture."""

from __future__ import annotations

from typing import Any

from autoshard.html_report.picture.stages_picture import about_step, stages_svg
from autoshard.html_report.timeline_series import differences, ticks
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.program.step_check import share_words
from autoshard.simulation.step_timeline import StepTimeline
from autoshard.simulation.steps.program_step import AccountedStep
from autoshard.text.stage_table import HEADER, part_words, stage_rows
from autoshard.units import counted


def whole_step(plan: Plan, graph: Graph, accounted: AccountedStep) -> dict[str, Any] | None:
    """Data of a whole step for the template; None if it is one micro-batch on one stage that keeps all."""
    timeline, step = accounted.timeline, plan.step
    if timeline is None:
        return None
    size = f"{step.samples} samples" if step.samples else "the captured batch"
    text = f"{counted(step.micro_batches, 'micro-batch')} of {size}"
    text += f" through {step.stages} {timeline.costs.word}s, schedule {step.schedule}" if step.stages > 1 else ""
    text += f"; {share_words(step, plan.mesh)}: shown is that which takes longest" if step.batch_shares else ""
    text += "."
    return {
        "text": text,
        "picture": stages_svg(timeline),
        "about": about_step(timeline),
        "rows": [(timeline.costs.word, *HEADER[1:]), *stage_rows(plan, graph, timeline)],
        "data": slots(timeline, [part_words(plan, graph, number)[0] for number in range(len(timeline.costs.parts))]),
    }


def slots(timeline: StepTimeline, parts: list[str]) -> dict[str, Any]:
    """Columns for the page's script, of each stage in order of start: `start` as differences; `slot` is (micro-batch x
    chunks + chunk) x 2, one more for a backward. `parts` says what a part has, `numbers` which it is by stage and
    chunk, `reads` what it waits for."""
    chunks = timeline.costs.chunks
    return {
        "step": ticks(timeline.step_seconds),
        "chunks": chunks,
        "word": timeline.costs.word,
        "numbers": [
            [timeline.costs.number(stage, chunk) for chunk in range(timeline.costs.chunks_of(stage))]
            for stage in range(timeline.stages)
        ],
        "reads": [timeline.costs.reads(number) for number in range(len(timeline.costs.parts))],
        "parts": parts,
        "stages": [
            {
                "start": differences([ticks(run.start_seconds) for run in placed]),
                "duration": [ticks(run.duration_seconds) for run in placed],
                "slot": [
                    (run.slot.micro_batch * chunks + run.slot.chunk) * 2 + (run.slot.kind == "B") for run in placed
                ],
                "tail": ticks(timeline.costs.stages[stage].tail_seconds),
                "end": ticks(timeline.stage_seconds[stage]),
            }
            for stage, placed in enumerate(timeline.by_stage)
        ],
    }
