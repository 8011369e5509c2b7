"""Text tables and JSON-ready dictionaries that the CLI prints: of a plan, a timeline and the profiles."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.cluster.hardware import backend_of, parse_hardware
from autoshard.code_text import typed
from autoshard.constraints.fusion_request import fusion_text
from autoshard.constraints.host_offers import plan_host_bytes
from autoshard.constraints.verify_request import MOST_BYTES, MOST_PROCESSES
from autoshard.costs.bands import COUNTS
from autoshard.errors import NAMED
from autoshard.ir import plan_json
from autoshard.ir.graph import Graph
from autoshard.ir.graph_json import has_code
from autoshard.ir.plan import Candidate, Fusion, Plan
from autoshard.replay.reevaluate import resimulated
from autoshard.servers.server_text import server_rows, server_title
from autoshard.simulation.step_account import StepAccount, one_stage
from autoshard.text import plan_labels
from autoshard.text.account_text import breakdown, left_open, parts, stage_breakdown, waits
from autoshard.text.answer_labels import MEMORY, STEP, certainty, gap
from autoshard.text.collective_lines import collective_counts, collective_words, collectives, group_words, move_lines
from autoshard.text.plan_figures import HOST_MEMORY, baselines, certificate_rows, error_band, figures
from autoshard.text.plan_labels import float8_words
from autoshard.text.size_table import expected_rows, open_sizes, size_table
from autoshard.text.stage_table import HEADER, short_rows
from autoshard.text.tables import WIDTH, table, wrapped
from autoshard.units import format_bandwidth, format_bytes, format_flop_rate, format_seconds

if TYPE_CHECKING:
    from autoshard.cluster.hardware import Hardware
    from autoshard.search.pareto_front import Point
    from autoshard.search.style_plans import StylePlan
    from autoshard.simulation import Timeline
    from autoshard.simulation.steps.program_step import AccountedStep

SHOWN_DTYPES = ("bfloat16", "float16", "float32")  # the first that a device has stands in the list of profiles


def summary(
    plan: Plan,
    graph: Graph,
    styles: Sequence[StylePlan] = (),
    width: int = WIDTH,
    timeline: Timeline | None = None,
    step: AccountedStep | None = None,
) -> str:
    """The printed plan, `width` columns wide: the answer, the plan block by block, where time goes, what else was
    possible. `styles`: see search/style_plans.py. `timeline`: the simulated step, whose collectives are counted;
    `step`: the whole step, for the breakdown and the stages."""
    where = f"{plan.where} ({plan.devices} devices) of {plan.hardware}"
    lines = wrapped(f"{plan.model or graph.name} on {where}, {plan.precision}, {purpose(plan, graph)}", width)
    if plan.servers.count:
        title = f"{plan.model or graph.name} on {server_title(plan)} of {plan.hardware}"
        lines = wrapped(f"{title}, {plan.precision}, {purpose(plan, graph)}", width)
    lines += ["", *_answer(plan, graph, styles, width, timeline), ""]
    lines += [*table(size_table(plan), width), ""] if plan.search.sizes else []
    if step is not None and step.timeline is not None and (plan.step.parts or plan.step.recompute):
        lines += [*table([(plan.step.word, *HEADER[1:]), *short_rows(plan, graph, step.timeline)], width), ""]
    if step is not None and len(step.account.stages) > 1:
        lines += [*table(stage_breakdown(step.account, plan.step.word), width), ""]
    lines += [*_block_table(plan, graph, width), ""]
    lines += _figures(plan, graph, timeline, step, width)
    if plan.search.meshes:
        lines += ["", *mesh_table(plan, width)]
    for note in (*plan.search.notes, *open_sizes(graph)):
        lines += wrapped(f"note: {note}", width)
    return "\n".join(lines)


def _answer(plan: Plan, graph: Graph, styles: Sequence[StylePlan], width: int, timeline: Timeline | None) -> list[str]:
    """Step time, memory, utilisation, gain over baselines, and how certain the result is."""
    shown = [figure for figure in figures(plan, graph) if figure.label != HOST_MEMORY or not plan.servers.count]
    (step, memory, *others), servers = ((figure.label, figure.words) for figure in shown), server_rows(plan)
    rows = [*expected_rows(plan), step, memory, *servers, *others]
    rows += [("in float8", words)] if (words := float8_words(plan, graph)) else []
    compared = [f"{base.label}{f' ({base.note})' * bool(base.note)}: {base.value}" for base in baselines(plan, styles)]
    rows += zip(["vs. baselines", *[""] * len(compared)], compared, strict=False)
    if plan.servers.count:  # the search was of a worker's program alone, which has no choices
        return table(rows, width)
    rows.append(("optimality", certainty(plan)))
    if timeline is not None and (words := left_open(plan, timeline)):
        rows.append(("left open", words))
    return table(rows, width)


def purpose(plan: Plan, graph: Graph) -> str:
    """The optimizer, or a note that nothing is trained."""
    if graph.loss:
        return plan.optimizer
    return "inference: no scalar output to train on" if graph.training else "inference"


def _block_table(plan: Plan, graph: Graph, width: int) -> list[str]:
    """Each distinct block: operators with their strategies, and under each what is communicated before it."""
    rows: list[Sequence[str]] = [("module", "operator", "strategy / collectives")]
    for block in plan_labels.blocks(plan, graph):
        total = sum(row.plan.forward_seconds + row.plan.backward_seconds for row in block.rows) or math.inf
        shown = [row for row in plan_labels.without_casts(block.rows, graph) if is_shown(row, plan, graph, total)]
        rows += [(block.title, "", "")] if shown else []
        for row in shown:
            rows.append((f"  {row.module}", row.op.target.partition(".")[2], row.words))
            rows += [(f"      {move}", "", "") for move in move_lines(row.moves, plan, graph)]
    return table(rows, width)


def is_shown(row: plan_labels.BlockRow, plan: Plan, graph: Graph, block_total: float) -> bool:
    """Does a summary show the op? It does if the op uses a weight, costs something, or needs communication."""
    uses_weight = any(operand in graph.weights for operand in row.op.operands)
    costly = row.plan.forward_seconds + row.plan.backward_seconds >= COUNTS * block_total
    return uses_weight or costly or any(collectives(move, plan, graph) for move in row.moves)


def _figures(plan: Plan, graph: Graph, timeline: Timeline | None, step: AccountedStep | None, width: int) -> list[str]:
    """Rows of the time breakdown, which add up to the step, and what else was simulated."""
    rows = list[tuple[str, str, str]]()
    if step is not None:
        mean = f" (mean of {len(step.account.stages)} {plan.step.word}s)" * (len(step.account.stages) > 1)
        rows = [("", seconds, f"{share:>5}  {what}") for what, seconds, share in breakdown(step.account)]
        rows[0], rows[-1] = ("time breakdown", *rows[0][1:]), ("", rows[-1][1], f"{'100%':>5}  {STEP}{mean}")
    others = [c for c in plan.search.candidates if c.outcome != "chosen"]
    names, what = ["other candidates", *[""] * len(others)], ", its micro-batch" * plan.step.is_whole
    for name, (seconds, words) in zip(names, map(candidate_words, others), strict=False):
        rows.append((name, seconds, words + what))
    one = timeline is not None and timeline.events and not plan.step.is_whole
    details = [("critical path", waits(timeline))] if timeline is not None and one else []
    details += [] if plan.servers.count else certificate_rows(plan)
    details += [("pinned", ", ".join(plan.search.pins))] if plan.search.pins else []
    details += [("fused", ", ".join(map(fusion_words, plan.fusion)))] if plan.fusion else []
    if timeline is not None and (words := collective_words(timeline, "micro-batch" if plan.step.is_whole else "step")):
        details.append(("collectives", words))
    if plan.search.cut_short:
        details.append(
            ("cut short", "search stopped early; this is the best plan so far. Raise --time-limit to continue.")
        )
    return [*table(rows, width), "", *table([*details, ("plan hash", plan_json.plan_hash(plan, graph))], width)]


def candidate_words(candidate: Candidate) -> tuple[str, str]:
    """`19.98 ms`, `only Megatron's strategies`, and its memory where that was too much."""
    too_large = f" (too large: {format_bytes(candidate.predicted_peak_bytes)})" * (candidate.outcome == "too large")
    return format_seconds(candidate.predicted_seconds), candidate.name + too_large


def mesh_table(plan: Plan, width: int = WIDTH) -> list[str]:
    """The meshes tried, the best first."""
    rows: list[Sequence[str]] = [("mesh", STEP, MEMORY, "")]
    for tried in plan.search.meshes[:NAMED]:
        has_plan = tried.predicted_seconds > 0
        step = format_seconds(tried.predicted_seconds) if has_plan else ""
        memory = format_bytes(tried.predicted_peak_bytes) if has_plan else ""
        rows.append((str(tried.mesh), step, memory, tried.outcome))
    others = plan.search.meshes[NAMED:]
    outcomes = ", ".join(f"{n} {outcome}" for outcome, n in Counter(tried.outcome for tried in others).items())
    return table(rows, width) + (wrapped(f"and {len(others)} more: {outcomes}", width) if others else [])


def front_table(points: Sequence[Point]) -> list[str]:
    """The front of time against memory: each row is faster than the next, and larger."""
    rows: list[Sequence[str]] = [("time against memory", MEMORY, "objective", "")]
    for point in points:
        if point.front:
            figures = (format_seconds(point.predicted_seconds), format_bytes(point.predicted_peak_bytes))
            fits = "" if point.fits else "above the memory limit"
            rows.append((*figures, format_seconds(point.objective_seconds), fits))
    return table(rows)


DEVICES_HEADER = ("devices", "mesh", "micro-batches", "step", "memory", "step vs. first")


def devices_table(plans: Sequence[Plan]) -> list[Sequence[str]]:
    """A row for each plan, the most devices first; all train on the same samples in a step."""
    return [DEVICES_HEADER, *(_row(plan, plans[0]) for plan in plans)]


def devices_note(plans: Sequence[Plan]) -> str:
    """Note for a job that continues from one of these plans with another; "" if nothing changes for it."""
    counts = sorted({plan.step.micro_batches for plan in plans})
    if len(counts) == 1:
        return ""
    return (
        f"steps have {' or '.join(map(str, counts))} micro-batches: the loss is the mean over them, so a loss that is "
        "a sum over samples, and batch norm, give other results with each number"
    )


def devices_text(plans: Sequence[Plan], width: int) -> str:
    """The table and the note, as printed."""
    note = devices_note(plans)
    return "\n".join(["", *table(devices_table(plans), width), *(wrapped(f"note: {note}", width) if note else []), ""])


def _row(plan: Plan, first: Plan) -> tuple[str, ...]:
    stages = f" on each of {plan.step.stages} {plan.step.word}s" if plan.step.stages > 1 else ""
    return (
        str(plan.devices),
        f"{plan.mesh}{stages}",
        str(plan.step.micro_batches),
        format_seconds(plan.step_seconds),
        format_bytes(plan.step_peak_bytes),
        f"{plan.step_seconds / first.step_seconds:.2f}x" if first.step_seconds else "",
    )


def next_command(plan: Plan, graph: Graph, out: Path | str, verified: bool = False) -> str:
    """Command to use the package. With a loss and all devices on one node: a run of train.py, on this machine's CPUs if
    the plan is small enough for them, else on a node of the plan's hardware."""
    out, hardware = Path(out), parse_hardware(plan.hardware_text)
    if graph.loss is None:
        check = "" if verified or not has_code(plan.model) else f"autoshard verify {typed(out)}; "
        page = typed(out / "README.md")
        return f"{check}{page} shows how to call the model: without a loss train.py has nothing to train"
    if (nodes := len(hardware.nodes(plan.devices))) > 1:
        return f"{typed(out / 'README.md')} says how to start it on {nodes} nodes"
    if plan.servers.count:
        device = "" if backend_of(hardware) == "gloo" else " --device cpu  # on the CPUs here"
        return f"python {typed(out / 'train_servers.py')} --steps 5{device}"
    started = f"torchrun --nproc-per-node {plan.devices} {typed(out / 'train.py')}"
    backend = backend_of(hardware)
    held = plan.devices * (plan.step.predicted_peak_bytes or plan.predicted_peak_bytes)
    if backend == "gloo" or (held <= MOST_BYTES and plan.devices <= MOST_PROCESSES):
        return f"{started} --backend gloo --steps 5" + "  # on the CPUs here" * (backend != "gloo")
    return f"{started} --backend {backend} --steps 100  # on a node of {plan.hardware}"


def timeline_summary(
    timeline: Timeline, plan: Plan, graph: Graph, compiled: bool = False, step: AccountedStep | None = None
) -> str:
    """A simulated step in a few lines: its length and certainty, each stream, the memory peak. `compiled`: True if its
    blocks are compiled."""
    whole = step.account.step_seconds if step is not None else timeline.step_seconds
    rows: list[Sequence[str]] = [("step", format_seconds(whole), str(error_band(plan, graph)))]
    if step is not None and step.timeline is not None:
        rows += [(f"  {name}", format_seconds(seconds), "") for name, seconds in parts(step.account)]
        rows.append(("memory peak", format_bytes(step.account.peak_bytes), "of the stage that holds most"))
        rows.append(("1 micro-batch", format_seconds(timeline.step_seconds), "alone, with its optimizer, on one stage"))
    for stream, seconds in timeline.busy_seconds:
        share = f"{seconds / timeline.step_seconds:.1%} of the step" if timeline.step_seconds else ""
        rows.append((f"  {stream}", format_seconds(seconds), share))
    counts = collective_counts(timeline)
    if counts:
        total = sum(count.calls for count in counts.values())
        rows.append(("collectives", str(total), f"over {group_words(counts)}"))
    for (kind, axes), count in counts.items():
        sizes = "one size" if count.sizes == 1 else f"{count.sizes} sizes"
        rows.append((f"  {kind} {'+'.join(axes)}", str(count.calls), f"{sizes}, {format_bytes(count.bytes)} in all"))
    rows.append(("memory peak", format_bytes(timeline.peak_bytes), f"{format_seconds(timeline.peak_at_seconds)} in"))
    rows += [("", format_bytes(held.bytes), f"{held.name} ({held.kind})") for held in timeline.peak_tensors[:5]]
    notes = [f"note: {note}" for note in resimulated(plan, timeline.step_seconds, compiled)]
    if timeline.events:  # streams run beside each other, and may all wait for the host
        notes = [*wrapped(f"critical path: {waits(timeline)}", WIDTH), *notes]
    return "\n".join([f"{plan.model} on {plan.mesh} of {plan.hardware}", *table(rows), *notes])


def fusion_words(fusion: Fusion) -> str:
    """`all_reduce=auto (buckets of 3 MiB)`."""
    size = f" (buckets of {format_bytes(fusion.bucket_bytes, 3)})" * (fusion.mode == "auto" and fusion.bucket_bytes > 0)
    text = f"{fusion.collective}={format_bytes(fusion.bucket_bytes)}" if fusion.mode == "size" else fusion_text(fusion)
    return text + size


def timeline_dict(timeline: Timeline, plan: Plan, graph: Graph, step: AccountedStep | None = None) -> dict[str, Any]:
    """A simulated step for `--json`, in seconds and bytes; with several micro-batches, all else is for one of them."""
    account = step.account if step is not None else one_stage(timeline)
    return {
        "step_seconds": account.step_seconds,
        "account": account.as_dict(),
        "micro_batch_seconds": timeline.step_seconds,
        "error_band": vars(error_band(plan, graph)),
        "busy_seconds": dict(timeline.busy_seconds),
        "peak_bytes": account.peak_bytes,
        "micro_batch_peak_bytes": timeline.peak_bytes,
        "peak_at_seconds": timeline.peak_at_seconds,
        "peak_tensors": [[held.name, held.kind, held.bytes] for held in timeline.peak_tensors],
        "static_bytes": timeline.static_bytes,
        "events": len(timeline.events),
        "collectives": [
            {"kind": kind, "axes": list(axes), **vars(count)}
            for (kind, axes), count in collective_counts(timeline).items()
        ],
    }


def as_dict(plan: Plan, graph: Graph, account: StepAccount | None = None) -> dict[str, Any]:
    """The plan's figures for `--json`; seconds and bytes."""
    return {
        "model": plan.model,
        "mesh": dict(plan.mesh.axes),
        "hardware": plan.hardware,
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "plan_hash": plan_json.plan_hash(plan, graph),
        "graph_hash": plan.graph_hash,
        "ops": len(graph.ops),
        "predicted_seconds": plan.step_seconds,
        "account": account.as_dict() if account is not None else None,
        "error_band": vars(error_band(plan, graph)),
        "predicted_peak_bytes": plan.step_peak_bytes,
        "host_bytes": plan_host_bytes(plan, graph),
        "capacity_bytes": plan.step_capacity_bytes if math.isfinite(plan.step_capacity_bytes) else None,
        "redistributions": len(plan.redistributions),
        "solver": plan.certificate.solver,
        "status": plan.certificate.status,
        "objective_seconds": plan.certificate.objective_seconds,
        "lower_bound_seconds": plan.certificate.lower_bound_seconds,
        "gap": gap(plan),
        "level": plan.search.level,
        "level_objective": plan.certificate.level_objective,
        "level_bound": plan.certificate.level_bound,
        "simulated_above_objective_seconds": plan.predicted_seconds - plan.certificate.objective_seconds,
        "pins": list(plan.search.pins),
        "candidates": [vars(candidate) for candidate in plan.search.candidates],
        "meshes": [vars(tried) | {"mesh": str(tried.mesh)} for tried in plan.search.meshes],
        "float8": float8_words(plan, graph),
        "servers": vars(plan.servers) if plan.servers.count else None,
        "notes": list(plan.search.notes),
        "cut_short": plan.search.cut_short,
        "dynamic": [vars(size) for size in graph.dynamic],
        "expected_seconds": plan.search.expected_seconds or None,
        "sizes": [vars(size_step) | {"sizes": dict(size_step.sizes)} for size_step in plan.search.sizes],
    }


def file_names(files: Iterable[str]) -> str:
    """`README.md, runtime/, train.py`: a folder's files are not listed."""
    names = sorted({name.partition("/")[0] + ("/" if "/" in name else "") for name in files})
    return ", ".join(names)


def _link_words(hardware: Hardware, level: int) -> str:
    """`NVLink 300 GB/s` per device, followed by the measured bandwidth, which is used instead, if there is one."""
    link = hardware.links[level]
    words = f"{link.name} {format_bandwidth(link.bandwidth, 3)}"
    if not any(figure.key == f"links[{level}].measured_bandwidth" for figure in hardware.figures):
        return words
    return f"{words} ({format_bandwidth(link.bandwidth * link.efficiency, 3)} measured)"


def profile_table(profiles: Mapping[str, Hardware], width: int | None = None) -> str:
    """One row a profile; `width`: columns of the terminal."""
    rows: list[Sequence[str]] = [("profile", "memory", "peak", "links, innermost first", "what it is")]
    for name, hardware in profiles.items():
        dtype, flops = next(
            (peak for name in SHOWN_DTYPES for peak in hardware.peaks if peak[0] == name), hardware.peaks[0]
        )
        peak = f"{format_flop_rate(flops, 3)} {dtype}"
        links = ", ".join(map(partial(_link_words, hardware), range(len(hardware.links))))
        rows.append((name, format_bytes(hardware.memory_bytes, 3), peak, links, hardware.summary))
    return "\n".join(table(rows, width))
