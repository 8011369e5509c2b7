"""Random operators: those that a plan can draw alike on replicas, and a clear word about all others."""

from __future__ import annotations

import torch

from autoshard.errors import CaptureError
from autoshard.graph.model import Graph, Op

DRAWN = frozenset({
    "autoshard.random", "aten.alpha_dropout", "aten.bernoulli", "aten.dropout", "aten.feature_alpha_dropout",
    "aten.feature_dropout", "aten.multinomial", "aten.scaled_dot_product_attention",
})  # fmt: skip
_RECURRENT = frozenset({"aten.gru", "aten.lstm", "aten.rnn_relu", "aten.rnn_tanh"})


def refuse_random(graph: Graph) -> Graph:
    """`graph` itself. Raises CaptureError that names the line of an operator whose numbers would differ on replicas."""
    for op in graph.ops:
        if _draws(op):
            raise CaptureError(_what(op), _hint(op))
    return graph


def _draws(op: Op) -> bool:
    given = dict(op.attributes)
    if op.target in DRAWN or given.get("train") is False or given.get("training") is False:
        return False
    if op.target in _RECURRENT:
        return bool(given.get("dropout")) and bool(given.get("train"))
    namespace, _, name = op.target.partition(".")
    packet = getattr(torch.ops.aten, name, None) if namespace == "aten" else None
    tags = (getattr(packet, overload).tags for overload in packet.overloads()) if packet is not None else ()
    return any(torch.Tag.nondeterministic_seeded in own for own in tags)


def _what(op: Op) -> str:
    place = op.source or op.module or op.name
    if op.target in _RECURRENT:
        return f"{op.target} draws dropout between its layers inside, which replicas can't draw alike, at {place}"
    return f"{op.target} draws random numbers that replicas can't draw alike, at {place}"


def _hint(op: Op) -> str:
    if op.target in _RECURRENT:
        return "one layer each, with nn.Dropout between them; or dropout=0"
    return "torch.rand, randn, randint, bernoulli, multinomial or dropout; or pass random tensors as inputs"
