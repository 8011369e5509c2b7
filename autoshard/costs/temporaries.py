"""Temporary bytes of an operator's forward or backward, in addition to operands, results, gradients and what autograd
keeps: local copies inside kernels of several steps, and what a variant of the runtime has received."""

from __future__ import annotations

from autoshard.ir.graph import Op
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.operator_record import Operator
from autoshard.rules.algebra.variant_record import KeptTensors, Layouts, LocalTensors, OperatorVariant, Temporary
from autoshard.rules.operators import VARIANTS, record


def temporary(
    mesh: Mesh, op: Op, variant: str, operands: LocalTensors, layouts: Layouts, results: LocalTensors
) -> Temporary:
    """Temporary bytes of an operator on local operands that lie in `layouts`."""
    holds = _kernel(op, variant).holds
    return holds(mesh, op, operands, layouts, results) if holds else Temporary()


def saved_difference(
    mesh: Mesh, op: Op, variant: str, operands: LocalTensors, layouts: Layouts, results: LocalTensors
) -> KeptTensors:
    """Difference between what is kept for backward and what the operator itself keeps."""
    keeps = _kernel(op, variant).keeps
    return keeps(mesh, op, operands, layouts, results) if keeps else KeptTensors()


def keeps_otherwise(op: Op, variant: str) -> bool:
    """True if `saved_difference` is there for this operator and variant."""
    return _kernel(op, variant).keeps is not None


def _kernel(op: Op, variant: str) -> Operator | OperatorVariant:
    return VARIANTS[variant] if variant else record(op.target)
