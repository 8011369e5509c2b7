"""Tables of a step's stages: what each runs, recomputes, takes and holds, by the programs of its parts."""

from __future__ import annotations

from itertools import accumulate

from autoshard.cluster.hardware import parse_hardware
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan, StepTried
from autoshard.program.weight_buckets import block_of
from autoshard.simulation.step_timeline import StepTimeline
from autoshard.units import format_bytes, format_seconds

HEADER = ("stage", "modules", "recompute", "forward", "backward")
KEPT = {
    "expensive": "all but matmuls and attention",
    "input": "all",
    "communicated": "all but collectives",
    "expensive+communicated": "all but matmuls, attention and collectives",
}


def part_words(plan: Plan, graph: Graph, number: int) -> tuple[str, list[str]]:
    """Name of a part of the model, `the start, h.0 … h.5`, and its blocks."""
    names, parts = [op.name for op in graph.ops], plan.step.parts
    first = [names.index(part.first_op) for part in parts] or [0]
    ops = graph.ops[first[number] : (*first, len(names))[number + 1]]
    if plan.step.placed:
        modules = list(dict.fromkeys(op.module for op in graph.ops if op.name in parts[number].ops and op.module))
        more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
        return (", ".join(modules[:3]) or parts[number].first_op) + more, modules
    blocks = [path for path in dict.fromkeys(block_of(op.module) for op in ops) if path]
    said = [blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]}"] if blocks else []
    said = (["the start"] if number == 0 else []) + said + (["the end"] if number == len(first) - 1 else [])
    return ", ".join(said), blocks


def stage_words(plan: Plan, graph: Graph, stage: int) -> str:
    """The parts of a stage in words, in the order of the model."""
    return "; ".join(part_words(plan, graph, number)[0] for number in plan.step.parts_of(stage))


def short_rows(plan: Plan, graph: Graph, timeline: StepTimeline) -> list[tuple[str, ...]]:
    """Rows of `stage_rows` for a terminal, with the common prefix of all paths left out."""
    parts = range(len(plan.step.parts))
    paths = [path for number in parts for path in part_words(plan, graph, number)[1]]
    shared = paths[0].rpartition(".")[0] + "." if paths else ""
    shared = shared if all(path.startswith(shared) for path in paths) else ""
    return [
        (stage, has.replace(shared, "") if shared else has, *cells)
        for stage, has, *cells in stage_rows(plan, graph, timeline)
    ]


def stage_rows(plan: Plan, graph: Graph, timeline: StepTimeline) -> list[tuple[str, ...]]:
    """Stage, its modules, what is recomputed, seconds of one micro-batch in forward and backward."""
    rows: list[tuple[str, ...]] = []
    hardware = parse_hardware(plan.hardware_text)
    firsts = [0, *accumulate(mesh.size for mesh in plan.meshes)]
    for stage in range(timeline.stages):
        kind = hardware.of_ranks(firsts[stage], plan.meshes[stage].size).name if hardware.kinds else ""
        numbers = plan.step.parts_of(stage)
        parts = [timeline.costs.parts[number] for number in numbers]
        names = [part_words(plan, graph, number) for number in numbers]
        rows.append(
            (
                f"{stage}, {kind}" if kind else str(stage),
                "; ".join(words for words, _ in names),
                _recompute_text(plan, {module for _, paths in names for module in paths}),
                format_seconds(sum(part.forward_seconds for part in parts)),
                format_seconds(sum(part.backward_seconds for part in parts)),
            )
        )
    return rows


def _recompute_text(plan: Plan, blocks: set[str]) -> str:
    policies = [keep for module, keep in plan.step.keeps.items() if module in blocks]
    keeps = {KEPT.get(keep, "all but some matmuls and attention") for keep in policies}
    return ", ".join(sorted(keeps)) or "nothing"


STEP_HEADER = ("stages", "dp", "tp", "micro-batches", "ZeRO", "recompute", "estimated", "simulated", "memory", "")


def step_cells(tried: StepTried) -> tuple[str, ...]:
    """Cells under STEP_HEADER."""
    stages = f"{tried.stages} x {tried.virtual_stages}" if tried.virtual_stages > 1 else str(tried.stages)
    stages += " (gpipe)" if tried.schedule == "gpipe" else ""
    second = [f"{name}={size}" for name, size in (("cp", tried.context), ("ep", tried.expert)) if size > 1]
    return (
        stages, str(tried.replicas), ", ".join([str(tried.tensor), *second]),
        f"{tried.micro_batches} of {tried.micro_batch}", str(tried.zero),
        tried.again, format_seconds(tried.blocks_seconds),
        format_seconds(tried.program_seconds) if tried.program_seconds else "",
        format_bytes(tried.peak_bytes), tried.outcome,
    )  # fmt: skip
