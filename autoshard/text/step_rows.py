"""Whole steps that a search of steps found, as rows of a table."""

from __future__ import annotations

from autoshard.ir.plan import StepTried
from autoshard.units import format_bytes, format_seconds

HEADER = ("stages", "dp", "tp", "micro-batches", "ZeRO", "recompute", "estimated", "simulated", "memory", "")


def step_cells(own: StepTried) -> tuple[str, ...]:
    """Cells under HEADER."""
    stages = f"{own.stages} x {own.virtual_stages}" if own.virtual_stages > 1 else str(own.stages)
    stages += " (gpipe)" if own.schedule == "gpipe" else ""
    second = [f"{name}={size}" for name, size in (("cp", own.context), ("ep", own.expert)) if size > 1]
    return (
        stages, str(own.replicas), ", ".join([str(own.tensor), *second]),
        f"{own.micro_batches} of {own.micro_batch}", str(own.zero),
        own.again, format_seconds(own.blocks_seconds),
        format_seconds(own.program_seconds) if own.program_seconds else "",
        format_bytes(own.peak_bytes), own.outcome,
    )  # fmt: skip
