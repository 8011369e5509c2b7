"""Random operators: those that a plan can draw alike on replicas, and an error for the rest."""

from __future__ import annotations

import torch

from autoshard.errors import CaptureError
from autoshard.graph_capture.passes.recurrent_layers import RECURRENT  # which took out their dropout
from autoshard.ir.graph import Graph, Op
from autoshard.rules.operators import record

_HINT = "torch.rand, randn, randint, bernoulli, multinomial or dropout; or pass random tensors as inputs"


def refuse_random(graph: Graph) -> Graph:
    """`graph` itself. Raises CaptureError that names the line of an operator whose numbers would differ on replicas."""
    for op in graph.ops:
        if _draws(op):
            place = op.source or op.module or op.name
            what = f"{op.target} draws random numbers that replicas can't draw identically, at {place}"
            raise CaptureError(what, _HINT)
    return graph


def _draws(op: Op) -> bool:
    attributes = dict(op.attributes)
    drawn = record(op.target).draws is not None or op.target in RECURRENT
    if drawn or attributes.get("train") is False or attributes.get("training") is False:
        return False
    namespace, _, name = op.target.partition(".")
    packet = getattr(torch.ops.aten, name, None) if namespace == "aten" else None
    tags = (getattr(packet, overload).tags for overload in packet.overloads()) if packet is not None else ()
    return any(torch.Tag.nondeterministic_seeded in op_tags for op_tags in tags)
