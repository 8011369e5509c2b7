"""All stages of a whole step as a drawing: a row a stage, forwards and backwards of every micro-batch, tails, peaks."""

from __future__ import annotations

from autoshard.html_report.picture.plot_axis import PlotAxis, PlotFrame
from autoshard.html_report.picture.svg import SIZES, document, line, number, path, rect, text
from autoshard.program.schedules.pipeline_schedule import Placed
from autoshard.simulation.step_timeline import StepTimeline
from autoshard.text.answer_labels import MEMORY, STEP
from autoshard.units import counted, format_bytes, format_seconds

FRAME = PlotFrame(980.0, 900.0, left=78.0, right=150.0, top=52.0, bottom=30.0)  # rows get lower to stay within it
ROW, BAR, LEAST_ROW = SIZES.gap, SIZES.line, SIZES.gap / 3
THIN = 1.2  # pixels: a slot that is narrower is drawn with those beside it
_CLASSES = {"F": "ink0", "B": "ink1"}


def stages_svg(timeline: StepTimeline) -> str:
    """Time to the right. Slots too narrow to see are joined with others of their kind that touch them."""
    row = max(LEAST_ROW, min(ROW, FRAME.height / timeline.stages))
    bar = BAR * row / ROW
    scale = (FRAME.end - FRAME.left) / timeline.step_seconds
    bottom = FRAME.top + row * timeline.stages
    body = [*_key(timeline), *_marks(timeline, bottom)]
    for stage in range(timeline.stages):
        y = FRAME.top + row * stage
        if row >= 11 or stage % 4 == 0:
            body.append(text(8, y + bar - 2, f"{timeline.costs.word} {stage}", class_="small"))
            message = f"{format_bytes(timeline.peak_bytes[stage])}, busy {_busy(timeline, stage):.0%}"
            body.append(text(FRAME.end + 8, y + bar - 2, message, class_="small soft"))
        body += _slots(timeline.by_stage[stage], y, bar, scale)
        body += _numbers(timeline, stage, y, bar, scale)
        body += _tail(timeline, stage, y, bar, scale)
    costs = timeline.costs
    title = f"{timeline.stages} {costs.word}s, {costs.micro_batches} micro-batches, {costs.schedule}"
    about = f"{STEP} of {format_seconds(timeline.step_seconds)}; each row is a stage, time goes to the right"
    return document(FRAME.width, bottom + FRAME.bottom, title, about, body, "stages")


def about_step(timeline: StepTimeline) -> str:
    """The picture in words."""
    count = timeline.costs.micro_batches
    through = f"{timeline.stages} {timeline.costs.word}s in {format_seconds(timeline.step_seconds)}"
    lines = [f"{counted(count, 'micro-batch')} through {through}"]
    for stage in range(timeline.stages):
        held = format_bytes(timeline.peak_bytes[stage])
        lines.append(f"{timeline.costs.word} {stage} is busy for {_busy(timeline, stage):.0%} and holds {held}")
    return "; ".join(lines) + "."


def _busy(timeline: StepTimeline, stage: int) -> float:
    return timeline.busy_seconds(stage) / timeline.step_seconds


def _key(timeline: StepTimeline) -> list[str]:
    costs = timeline.costs
    chunks = f", {costs.chunks} parts a {costs.word}" if costs.chunks > 1 else ""
    head = f"{timeline.stages} {costs.word}s, {costs.micro_batches} micro-batches, {costs.schedule}{chunks}: "
    head += f"{STEP} {format_seconds(timeline.step_seconds)}"
    body = [text(8, 18, head, class_="head")]
    for place, (name, ink) in enumerate((("forward", "ink0"), ("backward", "ink1"), ("once a step", "ink2"))):
        x = 8 + 110.0 * place
        body += [rect(x, 27, 12, 10, class_=ink), text(x + 17, 36, name, class_="small")]
    body.append(text(FRAME.end + 8, 36, f"{MEMORY}, busy", class_="small soft"))
    return body


def _marks(timeline: StepTimeline, bottom: float) -> list[str]:
    axis = PlotAxis(0.0, timeline.step_seconds, FRAME.left, FRAME.end, False)
    body = []
    for value in axis.ticks():
        x = axis.at(value)
        body.append(line(x, FRAME.top - 4, x, bottom, class_="edge", stroke_opacity="0.25"))
        body.append(text(x, bottom + 14, format_seconds(value), class_="small soft mid"))
    return body


def _slots(slots: tuple[Placed, ...], y: float, bar: float, scale: float) -> list[str]:
    """One path a kind; a gap is left between slots that are wide enough."""
    drawn: dict[str, list[tuple[float, float]]] = {"F": [], "B": []}
    for placed in slots:
        x, width = FRAME.left + placed.start_seconds * scale, placed.duration_seconds * scale
        spans = drawn[placed.slot.kind]
        if width < THIN and spans and x - sum(spans[-1]) < THIN:
            spans[-1] = spans[-1][0], x + width - spans[-1][0]
        else:
            spans.append((x, max(width - (0.6 if width > 2 * THIN else 0.0), 0.2)))
    return [
        path(
            "".join(f"M{_fine(x)} {number(y)}h{_fine(w)}v{number(bar)}h-{_fine(w)}z" for x, w in spans),
            class_=_CLASSES[kind],
        )
        for kind, spans in drawn.items()
        if spans
    ]


def _numbers(timeline: StepTimeline, stage: int, y: float, bar: float, scale: float) -> list[str]:
    """Numbers of micro-batches (`3.1` with several parts a stage) in slots that have room for them."""
    texts = []
    for placed in timeline.by_stage[stage]:
        chunk = f".{placed.slot.chunk}" if timeline.costs.chunks > 1 else ""
        words, middle = f"{placed.slot.micro_batch}{chunk}", placed.start_seconds + placed.duration_seconds / 2
        if bar >= BAR and placed.duration_seconds * scale > 8 + 6 * len(words):
            texts.append(text(FRAME.left + middle * scale, y + bar - 4, words, class_="small mid inside"))
    return texts


def _fine(value: float) -> str:
    return f"{value:.2f}"


def _tail(timeline: StepTimeline, stage: int, y: float, bar: float, scale: float) -> list[str]:
    seconds = timeline.costs.stages[stage].tail_seconds
    x = FRAME.left + (timeline.stage_seconds[stage] - seconds) * scale
    return [rect(x, y, max(seconds * scale, 0.3), bar, class_="ink2")] if seconds else []
