"""Calls and results of a model as JSON text in a graph, so that a plan read from a file is called alike.

Classes are stored by name and looked up among imported modules only; a file contains no code.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autoshard.errors import InvalidFileError, UsageError
from autoshard.graph_capture.call_form import (
    Arguments,
    Container,
    FixedValue,
    Form,
    LossFunction,
    ModelCall,
    Taken,
    TensorSlot,
    by_name,
    model_call,
    rebuilt,
)

_AGAIN = "plan the model again"
_PLAIN = (bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True)
class Described:
    """A constant that JSON does not have, by its text: equal if the texts are."""

    text: str

    def __eq__(self, other: object) -> bool:
        return self.text == (other.text if isinstance(other, Described) else repr(other))

    def __hash__(self) -> int:
        return hash(self.text)


def record(model: nn.Module, inputs: tuple[Any, ...], program: Any) -> str:
    """Call record of `model`, just exported with these flat inputs as `program`; "" if names can't describe its call.

    Arguments are those of the model's own forward, by keyword if it takes them so.
    """
    call: ModelCall | None = getattr(model.forward, "call", None)
    markers = tuple(torch.empty(0, device="meta") for _ in inputs)
    arguments = Arguments(markers) if call is None else rebuilt(call.form, markers)
    named_call, order = model_call(by_name(model, arguments), call.names[: len(arguments.args)] if call else ())
    slots = [next(i for i, marker in enumerate(markers) if marker is x) for x in order]
    returned = _plain_result(program) if call is None else call.returned
    if returned is None or len(set(slots)) != len(inputs):
        return ""
    described = {
        "arguments": _text_of(named_call.form),
        "order": slots,
        "returned": _text_of(returned),
        "has_loss": call is not None and call.loss is not None,
        "summed": call is not None and call.summed,
    }
    return json.dumps(described, separators=(",", ":"), allow_nan=False)


def _plain_result(program: Any) -> Form | None:
    """Result form of a model that is exported unwrapped; tensors count as in `Graph.outputs`, each once."""
    (returned,) = next(iter(reversed(program.graph.nodes))).args
    markers: dict[Any, torch.Tensor] = {}
    leaves = [
        markers.setdefault(leaf, torch.empty(0, device="meta")) if isinstance(leaf, torch.fx.Node) else leaf
        for leaf in returned
    ]
    taken = Taken()
    form = taken.form(torch.utils._pytree.tree_unflatten(leaves, program.call_spec.out_spec), "", shared=True)
    in_order = [x is y for x, y in zip(taken.tensors, markers.values(), strict=False)]
    return form if all(in_order) and len(taken.tensors) == len(markers) else None


def _text_of(form: Form) -> Any:
    if isinstance(form, TensorSlot):
        return {"tensor": form.index}
    if isinstance(form, FixedValue):
        value = form.value
        plain = isinstance(value, _PLAIN) and not (isinstance(value, float) and not math.isfinite(value))
        return {"value": value} if plain and type(value) in _PLAIN else {"described": repr(value)}
    kind = f"{form.kind.__module__}:{form.kind.__qualname__}"
    keys = [_text_of(FixedValue(key)) for key in form.keys]
    return {"kind": kind, "keys": keys, "items": [_text_of(item) for item in form.items]}


def read(text: str, names: tuple[str, ...], where: str) -> ModelCall:
    """The call of a graph with these inputs. Raises UsageError if the text has none, or a class is not imported."""
    if not text:
        raise UsageError(f"{where} does not say how its model is called", f"{_AGAIN}: autoshard.plan(model, inputs, …)")
    try:
        message = json.loads(text)
        arguments, returned = _form(message["arguments"]), _form(message["returned"])
        has_loss, summed = bool(message["has_loss"]), bool(message["summed"])
        order = tuple(int(place) for place in message["order"])
        call_names = tuple(names[place] for place in order)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InvalidFileError(f"{where} is damaged: its call is {type(error).__name__}: {error}", _AGAIN) from None
    loss = _loss_of(arguments) if has_loss else None
    return ModelCall(arguments, call_names, loss, "never", returned, summed, order=order)


def _loss_of(arguments: Any) -> LossFunction:
    """Stand-in for the loss function, which the plan's program contains, with the same arguments."""

    def loss(output: Any, *targets: Any, **labels: Any) -> Any:
        raise AssertionError("the loss is part of the plan's program")

    kind = inspect.Parameter
    labels = [kind(str(key), kind.KEYWORD_ONLY) for key in arguments.items[arguments.keys.index("labels")].keys]
    untyped: Any = loss
    first = [kind("output", kind.POSITIONAL_ONLY), kind("targets", kind.VAR_POSITIONAL)]
    untyped.__signature__ = inspect.Signature([*first, *labels])
    return loss


def _form(entry: Any) -> Form:
    if "tensor" in entry:
        return TensorSlot(int(entry["tensor"]))
    if "value" in entry or "described" in entry:
        return FixedValue(_constant(entry))
    return Container(_class(entry["kind"]), tuple(_constant(key) for key in entry["keys"]),
                     tuple(_form(item) for item in entry["items"]))  # fmt: skip


def _constant(entry: Any) -> Any:
    return entry["value"] if "value" in entry else Described(str(entry["described"]))


def _class(name: str) -> type:
    """An imported container class. Raises UsageError that names the module if it is not imported."""
    module, _, path = name.partition(":")
    container: Any = sys.modules.get(module)
    for part in path.split("."):
        container = getattr(container, part, None)
    if not isinstance(container, type):
        raise UsageError(f"the model takes or returns a {path} of {module}, which is not imported", f"import {module}")
    if not (dataclasses.is_dataclass(container) or issubclass(container, list | tuple | Mapping)):
        raise InvalidFileError(f"{name} is no container", _AGAIN)
    return container
