"""Calls and results of a model as flat tensors: keywords, nested inputs, ModelOutputs, a loss."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.errors import CaptureError, UsageError

_LACKS = "return the targets too, `return model, inputs, targets`, or a batch (a dict) with the labels that it names"
_UNUSED = "leave it out of the inputs, or give the loss function an argument of this name"


# --- values as a form and tensors -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSlot:
    """Placeholder for tensor number `index` of a value."""

    index: int


@dataclass(frozen=True)
class FixedValue:
    """Part of a value that holds no tensor."""

    value: Any


@dataclass(frozen=True)
class Container:
    """A tuple, list, mapping or dataclass. `keys` are those of the latter two."""

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Form, ...]


Form = TensorSlot | FixedValue | Container


@dataclass
class Taken:
    """Tensors of a value in order, each once, and their names; `left_out` are parts that hold none."""

    tensors: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def form(self, value: Any, name: str, *, shared: bool = False) -> Form:
        """The form of `value`. `shared`: a tensor that occurs twice is one; objects without a form are left out."""
        if isinstance(value, Tensor):
            known = next((i for i, x in enumerate(self.tensors) if x is value), None) if shared else None
            if known is None:
                self.tensors.append(value)
                self.names.append(name)
            return TensorSlot(len(self.tensors) - 1 if known is None else known)
        if not isinstance(value, list | tuple | Mapping) and not dataclasses.is_dataclass(type(value)):
            if shared and not isinstance(value, int | float | str | bool | None):
                self.left_out.append(f"{name} ({type(value).__name__})")
                return FixedValue(None)
            return FixedValue(value)
        keys, items = _parts(value)
        prefix = f"{name}_" if name else ""
        inner = tuple(
            self.form(item, f"{prefix}{key}", shared=shared)
            for key, item in zip(keys or range(len(items)), items, strict=True)
        )
        return Container(type(value), keys, inner)


def _parts(value: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """(keys, items) of a container."""
    if isinstance(value, list | tuple):
        return getattr(value, "_fields", ()), list(value)
    if dataclasses.is_dataclass(value):
        names = tuple(one.name for one in dataclasses.fields(value) if one.init)
        return names, [getattr(value, name) for name in names]
    return tuple(value.keys()), list(value.values())


def rebuilt(form: Form, tensors: Sequence[Any]) -> Any:
    """Value with this form, built from other tensors."""
    if isinstance(form, TensorSlot):
        return tensors[form.index]
    if isinstance(form, FixedValue):
        return form.value
    items = [rebuilt(item, tensors) for item in form.items]
    if issubclass(form.kind, list | tuple):
        return form.kind(*items) if form.keys else form.kind(items)
    pairs = dict(zip(form.keys, items, strict=True))
    if dataclasses.is_dataclass(form.kind):
        return form.kind(**pairs)
    return pairs if form.kind is dict else form.kind(pairs)  # type: ignore[call-arg]


# --- a call ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    """Arguments of `model(*args, **kwargs)`, and those of the loss function in addition to the model's output."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Any, ...] = ()
    labels: Mapping[str, Any] = field(default_factory=dict)


LossFunction = Callable[..., Any]


def arguments_of(model: nn.Module, inputs: Any, targets: Any = None, loss: LossFunction | None = None) -> Arguments:
    """`inputs`: a tensor, a tuple of positional arguments, or a dict of keyword arguments (a batch).

    Keys of a batch that the forward does not take are the loss function's; if the forward takes any (`**kwargs`), those
    that only the loss function names. Raises UsageError for a key that neither takes.
    """
    target_args = () if targets is None else tuple(targets) if isinstance(targets, tuple | list) else (targets,)
    if loss is None and target_args:
        hint = "--loss torch.nn.functional:cross_entropy, or loss=... in a program"
        raise UsageError("targets are given, but no loss function", hint)
    if not isinstance(inputs, Mapping):
        args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        return _with_loss(Arguments(args, {}, target_args), loss)
    taken, named = _keywords(user_forward(model)), _named(user_forward(model))
    of_loss = [] if loss is None else _named(loss)[1:]  # after the model's output
    kwargs = {
        str(key): value
        for key, value in inputs.items()
        if (key in taken if taken is not None else key in named or key not in of_loss)
    }
    other = {str(key): value for key, value in inputs.items() if str(key) not in kwargs}
    if other:
        wanted = None if loss is None else _keywords(loss)
        unknown = [key for key in other if loss is None or (wanted is not None and key not in wanted)]
        if unknown:
            what = f"the forward of {type(model).__name__} takes no {unknown[0]!r}"
            raise UsageError(f"{what}, nor does a loss function" if loss is not None else what, _UNUSED)
    return _with_loss(Arguments((), kwargs, target_args, other), loss)


def _with_loss(arguments: Arguments, loss: LossFunction | None) -> Arguments:
    """Checks the loss function's arguments. Raises UsageError if it does not take those of its calls."""
    if loss is None:
        return arguments
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):
        return arguments
    try:
        signature.bind("output", *arguments.targets, **arguments.labels)
    except TypeError as error:
        name = getattr(loss, "__name__", type(loss).__name__)
        more = f", {len(arguments.targets)} targets and {len(arguments.labels)} labels of the batch"
        raise UsageError(f"the loss function {name} is called with the model's output{more}: {error}", _LACKS) from None
    return arguments


def _named(function: Callable[..., Any]) -> list[str]:
    """Names of a function's parameters, in order."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _keywords(function: Callable[..., Any]) -> set[str] | None:
    """Names that a function takes by keyword; None if it takes any, or has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


@dataclass
class ModelCall:
    """One way to call a model, on flat tensors. `returned` and `left_out` are known after a run.

    `loss` is called with the model's output, the targets, and the labels by name. `sums`: "never"; "missing", if the
    model returns no number; or "always" returns the sum of all floating outputs as the loss, for a caller that
    continues with the outputs. `order`: positions of the tensors among a graph's inputs; () if unchanged.
    """

    form: Form
    names: tuple[str, ...]
    loss: LossFunction | None = None
    sums: str = "never"
    returned: Form | None = None
    summed: bool = False
    left_out: tuple[str, ...] = ()
    order: tuple[int, ...] = ()

    def in_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a call in the order of the graph's inputs."""
        places = self.order or range(len(tensors))
        return [x for _, x in sorted(zip(places, tensors, strict=True), key=lambda pair: pair[0])]

    def forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """A forward of flat tensors, in the order of `names`, that returns flat tensors by name (one alone: itself)."""
        original = user_forward(model)

        def forward(*tensors: Tensor) -> Any:
            call: Arguments = rebuilt(self.form, tensors)
            result = original(*call.args, **call.kwargs)
            if self.loss is not None:
                result = self.loss(result, *call.targets, **call.labels)
            return self._flat(result)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in self.names]
        flat: Any = forward
        flat.__signature__ = inspect.Signature(parameters)
        flat.original_forward, flat.call = original, self
        return forward

    def _flat(self, result: Any) -> Any:
        taken = Taken()
        self.returned = taken.form(result, "", shared=True)
        self.left_out = tuple(taken.left_out)
        floating = [x for x in taken.tensors if x.is_floating_point()]
        alone = any(x.dim() == 0 for x in floating)
        self.summed = bool(floating) and (self.sums == "always" or (self.sums == "missing" and not alone))
        if self.summed:
            total = torch.stack([x.sum().float() for x in floating]).sum() if len(floating) > 1 else floating[0].sum()
            return {"loss": total} | {f"output_{i}": x for i, x in enumerate(taken.tensors)}
        if isinstance(self.returned, TensorSlot):
            return result
        return dict(zip(_unique(taken.names), taken.tensors, strict=True))


def model_call(
    arguments: Arguments, positions: Sequence[str] = (), loss: LossFunction | None = None, sums: str = "never"
) -> tuple[ModelCall, tuple[Tensor, ...]]:
    """The call, and the tensors of these arguments. `positions` names the positional arguments."""
    taken = Taken()
    every = [*positions, *(f"input_{i}" for i in range(len(positions), len(arguments.args)))]
    args = tuple(taken.form(value, name) for value, name in zip(arguments.args, every, strict=False))
    kwargs = taken.form(dict(arguments.kwargs), "")
    several = len(arguments.targets) > 1
    targets = tuple(taken.form(x, f"target_{i}" if several else "target") for i, x in enumerate(arguments.targets))
    labels = taken.form(dict(arguments.labels), "")
    items = (Container(tuple, (), args), kwargs, Container(tuple, (), targets), labels)
    form = Container(Arguments, tuple(one.name for one in dataclasses.fields(Arguments)), items)
    if not taken.tensors:
        raise CaptureError("the example inputs hold no tensor", "a tuple or dict with the tensors of one batch")
    return ModelCall(form, tuple(_unique(taken.names)), loss, sums), tuple(taken.tensors)


def positions_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's positional arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _unique(names: Sequence[str]) -> list[str]:
    """Python names, each once."""
    unique: list[str] = []
    for name in names:
        plain = re.sub(r"\W", "_", name) or "output"
        plain = f"x_{plain}" if plain[0].isdigit() else plain
        number = 2
        while (candidate := plain if number == 2 and plain not in unique else f"{plain}_{number}") in unique:
            number += 1
        unique.append(candidate)
    return unique


def user_forward(model: nn.Module) -> Callable[..., Any]:
    """The forward that the user wrote."""
    forward: Callable[..., Any] = getattr(model.forward, "original_forward", model.forward)
    return forward


def by_name(model: nn.Module, arguments: Arguments) -> Arguments:
    """All arguments by keyword, in the order of the forward, independent of how a caller passes them.

    Those equal to their default are left out. Unchanged if the forward takes arguments by position only.
    """
    signature = inspect.signature(user_forward(model))
    kinds = {p.kind for p in signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
        return arguments
    try:
        bound = signature.bind(*arguments.args, **arguments.kwargs)
    except TypeError as error:
        raise UsageError(f"the inputs are no call of the model: {error}", f"its forward takes {signature}") from None
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= dict(sorted(value.items()))
        elif parameter.default is inspect.Parameter.empty or value is not parameter.default:
            named[name] = value
    return Arguments((), named, arguments.targets, arguments.labels)


def call_by(model: nn.Module, call: ModelCall) -> nn.Module:
    """Changes `model` in place: it is then called with the flat tensors of `call`."""
    model.forward = call.forward_of(model)
    return model


def all_plain(inputs: Any) -> bool:
    """Does a model take these inputs unchanged: a tuple or list of tensors?"""
    return isinstance(inputs, tuple | list) and all(isinstance(item, torch.Tensor) for item in inputs)
