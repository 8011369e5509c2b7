"""Sizes of buckets by the cost model: a collective of m bytes takes t = alpha m + beta.

Of M bytes in n buckets, n beta and all that is moved overlap backward; the last bucket, of alpha M / n, after it. Their
sum is least with buckets of sqrt(M beta / alpha) bytes: larger ones delay, smaller ones cost their starts. Fusion
options without effect in a plan are reported, too.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autoshard.cluster.hardware import Hardware
from autoshard.costs.collective import joint_seconds, per_byte_seconds
from autoshard.ir.graph import FUSION, Graph
from autoshard.ir.plan import Fusion, Plan
from autoshard.ir.program import Program


def with_sizes(plan: Plan, graph: Graph, hardware: Hardware) -> Plan:
    """The plan with the sizes of what is to be fused by the cost model."""
    if all(fusion.mode != "auto" for fusion in plan.fusion):
        return plan
    from autoshard.program.lower import lower

    program = lower(replace(plan, fusion=()), graph)
    fusion = tuple(_sized(entry, program, hardware) if entry.mode == "auto" else entry for entry in plan.fusion)
    return replace(plan, fusion=fusion)


def _sized(fusion: Fusion, program: Program, hardware: Hardware) -> Fusion:
    totals = _totals(program, fusion.collective)
    if not totals:
        return fusion
    names = max(totals, key=lambda axes: totals[axes])
    axes = tuple(program.mesh.index(name) for name in names)
    start = joint_seconds(hardware, program.mesh, axes, fusion.collective, 1.0)
    per_byte = per_byte_seconds(hardware, program.mesh, axes, fusion.collective)
    if per_byte == 0:
        return replace(fusion, bucket_bytes=totals[names])
    return replace(fusion, bucket_bytes=float(math.ceil(math.sqrt(totals[names] * start / per_byte))))


def _totals(program: Program, collective: str) -> dict[tuple[str, ...], float]:
    """Axes -> bytes of all buckets over them."""
    from autoshard.program.weight_buckets import bucket_bytes as gathered
    from autoshard.simulation.memory_curve import bucket_bytes as reduced

    totals: dict[tuple[str, ...], float] = {}
    if collective == "all_reduce":
        for bucket in program.gradient_buckets:
            totals[bucket.axes] = totals.get(bucket.axes, 0.0) + reduced(program, bucket)
    else:
        for weights in program.weight_buckets:
            totals[weights.axes] = totals.get(weights.axes, 0.0) + gathered(program, weights)
    return totals


def with_unused_fusion(plan: Plan, graph: Graph) -> Plan:
    """Plan with a note on each `--fuse`, and each fusion of a module, that has no effect or only in part."""
    requested = dict.fromkeys(path for path, what in graph.module_requests if what.startswith(f"{FUSION}:"))
    if not plan.fusion and not requested:
        return plan
    from autoshard.program.lower import lower
    from autoshard.program.stage_programs import stage_programs

    program = lower(replace(plan, fusion=()), graph)
    parts = stage_programs(program, plan) if plan.step.parts else (program,)
    notes = tuple(note for fusion in plan.fusion if (note := _unused(fusion, parts)))
    if requested and any(fusion.collective == "all_reduce" for fusion in plan.fusion):
        notes += (f"comm_fusion of {', '.join(requested)} is ignored: --fuse all_reduce goes before",)
    else:
        moved = [path for part in parts for bucket in part.gradient_buckets for path in bucket.parameters]
        left = [module for module in requested if module and not any(path.startswith(f"{module}.") for path in moved)]
        notes += (f"comm_fusion of {', '.join(left)} is ignored: no gradient there is all-reduced",) * bool(left)
    return replace(plan, search=replace(plan.search, notes=(*plan.search.notes, *notes)))


def _unused(fusion: Fusion, parts: tuple[Program, ...]) -> str:
    if fusion.collective != "all_reduce":
        return "" if any(part.weight_buckets for part in parts) else f"{_said(fusion)}: this plan gathers no weights"
    most = max(sum(len(bucket.parameters) for bucket in part.gradient_buckets) for part in parts)
    if not most:
        return f"{_said(fusion)}: this plan all-reduces no gradients"
    beyond = ", ".join(str(number) for number in fusion.first if number >= most)
    where = "a stage all-reduces at most" if len(parts) > 1 else "this plan all-reduces"
    return f"{_said(fusion)} at {beyond}: {where} {most} gradients, counted from 0" if beyond else ""


def _said(fusion: Fusion) -> str:
    return f"--fuse is ignored of {fusion.collective}"
