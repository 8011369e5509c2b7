"""The collectives inside the variants of the runtime, forward and backward: what search prices and simulation runs."""

from __future__ import annotations

from autoshard.ir.graph import Op
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.variant_record import Inside, Layouts, LocalTensors
from autoshard.rules.operators import VARIANTS


def variant_collectives(mesh: Mesh, op: Op, variant: str, operands: LocalTensors, layouts: Layouts) -> Inside:
    """The collectives that a variant makes on local operands that lie in `layouts`."""
    known = VARIANTS.get(variant)
    return known.collectives(mesh, op, operands, layouts) if known and known.collectives else Inside()
