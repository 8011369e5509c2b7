"""Which output a training step differentiates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoshard.errors import CaptureError
from autoshard.ir.graph import Graph, Tensor

_NAMES = ("['loss']", ".loss")
_SUM = "return one loss: their sum as `loss` (in a dict or a dataclass), the others after .detach()"
_MEAN = "return its mean (or sum): one number"

_UNTRAINED = "no trainable parameter contributes to the loss"
_TRAINED = "parameters with requires_grad, and a loss that is computed from them; or --eval (training=False)"


def choose_loss(graph: Graph, called: Mapping[str, str]) -> Graph:
    """`graph` with its loss: the scalar that the forward calls `loss`, else its only scalar that has a gradient, or the
    one that all others are parts of (`return reconstruction + kl, reconstruction, kl`); none where it returns no
    floating scalar at all. `called` names the outputs; `requires_grad` must be marked.

    CaptureError where it is open which scalar is meant, or where a training step would train nothing.
    """
    scalars = [graph.tensor(name) for name in graph.outputs if _is_scalar(graph.tensor(name))]
    named = [tensor for tensor in scalars if called[tensor.name] in _NAMES]
    trained = _totals(graph, _of_inputs(graph, [tensor for tensor in scalars if tensor.requires_grad]))
    if len(named or trained) > 1:
        listed = ", ".join(_described(graph, tensor, called) for tensor in trained)
        raise CaptureError(f"the forward returns {len(trained)} losses, of which none is called loss: {listed}", _SUM)
    if not (named or trained):
        return _without(graph, called)
    loss = (named or trained)[0]
    if not loss.requires_grad:
        raise CaptureError(f"{_UNTRAINED} ({_described(graph, loss, called)})", _TRAINED)
    others = [name for name in graph.outputs if name != loss.name and graph.tensor(name).requires_grad]
    guess = others and not named and graph.outputs[0] != loss.name  # `return loss, logits` is none
    note = (f"{_described(graph, loss, called)} is the loss, and no other output",) if guess else ()
    return replace(graph, loss=loss.name, assumed=(*graph.assumed, *note))


def refuse_untrained(graph: Graph) -> Graph:
    """The graph, if its loss has a gradient still: all that is trained may have no elements."""
    if graph.loss is not None and not graph.tensor(graph.loss).requires_grad:
        raise CaptureError(f"{_UNTRAINED}, but tensors without elements", _TRAINED)
    return graph


def _of_inputs(graph: Graph, scalars: list[Tensor]) -> list[Tensor]:
    """None where all are of parameters alone, and another output is of the inputs (CLIP's temperature). Next to a
    scalar of the inputs they may be a part of the loss."""
    reached = set(graph.inputs)
    for op in graph.ops:
        if reached.intersection(o for o in op.operands if o is not None):
            reached.update(op.results)
    trained = {name for name in graph.outputs if name in reached and graph.tensor(name).requires_grad}
    return scalars if not trained or any(scalar.name in trained for scalar in scalars) else []


def _totals(graph: Graph, scalars: list[Tensor]) -> list[Tensor]:
    """The one scalar that gradients reach all others through; all of them if there is none."""
    names = {tensor.name for tensor in scalars}
    totals = [tensor for tensor in scalars if names <= _reached(graph, tensor.name)]
    return totals if len(totals) == 1 else scalars


def _reached(graph: Graph, name: str) -> set[str]:
    """`name` and every value that its gradient reaches."""
    reached = {name}
    for op in reversed(graph.ops):
        if reached.intersection(op.results):
            reached.update(o for o in op.operands if o is not None and graph.tensor(o).requires_grad)
    return reached


def _without(graph: Graph, called: Mapping[str, str]) -> Graph:
    """A model that returns no loss runs forward only. What is called one but is no number is a mistake."""
    for name in graph.outputs:
        if called[name] in _NAMES:
            shape = graph.tensor(name).shape
            raise CaptureError(f"the loss is {graph.tensor(name).dtype} of shape {shape}, not a single number", _MEAN)
    return graph


def _is_scalar(tensor: Tensor) -> bool:
    return tensor.shape == () and "float" in tensor.dtype


def _described(graph: Graph, tensor: Tensor, called: Mapping[str, str]) -> str:
    """`['cls'] at model.py:12`."""
    source = next((op.source for op in graph.ops if tensor.name in op.results), "")
    what = called[tensor.name] or "the output"
    return f"{what} at {source}" if source else what
