"""Recipes of a captured model: how its constructor makes each buffer, and each parameter whose start has no name."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoshard.graph_capture.constructor.call_recorder import CallRecorder, values_call
from autoshard.graph_capture.tracing import LARGEST_ELEMENTS, LISTED, ONE_BY_ONE
from autoshard.ir.graph import Attribute, Parameter, Recipe, RecipeCall

CallsOf = Callable[[torch.Tensor], tuple[RecipeCall, ...]]


def recipes_of(
    values: Mapping[str, Any], parameters: Iterable[Parameter], buffers: Iterable[Parameter], calls_of: CallsOf
) -> tuple[Recipe, ...]:
    """One recipe for all that are made alike. `calls_of` is () where `init` says all, or nothing is known."""
    by_calls: dict[tuple[RecipeCall, ...], list[str]] = {}
    for stored, is_buffer in [*((p, False) for p in parameters), *((b, True) for b in buffers)]:
        value = values.get(stored.path)
        if isinstance(value, torch.Tensor) and (calls := _calls(stored, value, is_buffer, calls_of)):
            by_calls.setdefault(calls, []).append(stored.path)
    return tuple(Recipe(tuple(paths), calls) for calls, paths in by_calls.items())


def with_copies(
    values: Mapping[str, Any],
    stored: Sequence[Parameter],
    draw_of: Callable[[torch.Tensor], object],
    recipes: Sequence[Recipe],
) -> tuple[Parameter, ...]:
    """`stored`, where the constructor copied random numbers from one to another with the name of the first at the end
    of `init`: all of them are drawn as the first is."""
    fixed = {path for recipe in recipes if not is_random(recipe.calls) for path in recipe.paths}
    copies: dict[object, list[Parameter]] = {}
    for one in stored:
        value = values.get(one.path)
        if isinstance(value, torch.Tensor) and one.path not in fixed and (draw := draw_of(value)) is not None:
            copies.setdefault((draw, value.dtype, value.shape), []).append(one)
    first = {one.path: group[0].path for group in copies.values() if len(group) > 1 for one in group}
    marked = [replace(one, init=(*(one.init or ("computed",)), first.get(one.path, ""))) for one in stored]
    return tuple(new if one.path in first else one for one, new in zip(stored, marked, strict=True))


def separate_draws(
    values: Mapping[str, Any], stored: Sequence[Parameter], recorder: CallRecorder, recipes: Sequence[Recipe]
) -> tuple[str, ...]:
    """Sentence on tensors that the constructor computes from random numbers of others, such as a weight's norm."""
    computed = {path for recipe in recipes if is_random(recipe.calls) for path in recipe.paths}
    readers: dict[int, set[str]] = {}  # of each step that draws
    for one in stored if computed else ():
        value = values.get(one.path)
        for number in recorder.origin(value)[0] if isinstance(value, torch.Tensor) else ():
            call = recorder.steps[number].call
            if call is not None and is_random([call]):
                readers.setdefault(number, set()).add(one.path)
    copies = {one.path for one in stored if one.init and isinstance(one.init[-1], str) and len(one.init) > 1}
    apart = sorted({path for paths in readers.values() if len(paths) > 1 for path in (paths & computed) - copies})
    if not apart:
        return ()
    more = f" and {len(apart) - 1} more, which" if len(apart) > 1 else ", which"
    what = f"{apart[0]}{more} the constructor computes from random numbers of other parameters, may start from others"
    return (f"{what} (`train.py --weights` starts from the original's)",)


def flag_values(model: torch.nn.Module, calls_of: CallsOf) -> dict[str, torch.Tensor]:
    """The values of the integer and boolean buffers, made by their calls where the model has none."""
    flags = {
        path: buffer
        for path, buffer in model.named_buffers()
        if not buffer.is_floating_point() and not buffer.is_complex() and buffer.numel() <= ONE_BY_ONE
    }
    values = {path: _value(buffer, calls_of) for path, buffer in flags.items()}
    return {path: value for path, value in values.items() if value is not None}


def _value(buffer: torch.Tensor, calls_of: CallsOf) -> torch.Tensor | None:
    if _has_values(buffer):
        return buffer.detach().cpu().clone()
    calls = calls_of(buffer)
    return replay(calls) if calls and len(calls) <= LISTED and not is_random(calls) else None


def _calls(stored: Parameter, value: torch.Tensor, is_buffer: bool, calls_of: CallsOf) -> tuple[RecipeCall, ...]:
    calls = calls_of(value)
    if is_buffer and not is_random(calls):
        if _has_values(value):
            same = calls and len(calls) <= LISTED and _equal(replay(calls), value.detach())
            return calls if same else () if stored.init and not calls else _numbers(value)
        if len(calls) > LISTED:
            return _numbers(replay(calls))
    return calls if len(calls) <= LISTED else ()


def _numbers(value: torch.Tensor) -> tuple[RecipeCall, ...]:
    return (values_call(value),) if value.numel() <= LARGEST_ELEMENTS else ()


def _has_values(value: torch.Tensor) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type != "meta"


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [x.detach().cpu().contiguous().view(-1).view(torch.uint8) for x in (a, b)]
    return bool(torch.equal(*flat))


def is_random(calls: Sequence[RecipeCall]) -> bool:
    """True where any call draws numbers."""
    functions = [_function(call.target) for call in calls if call.target.startswith("aten.")]
    return any(torch.Tag.nondeterministic_seeded in function.tags for function in functions)


def replay(calls: Sequence[RecipeCall]) -> torch.Tensor:
    """Runs a recipe on the CPU."""
    results: list[Any] = []
    with torch.no_grad():
        for call in calls:
            results.append(_run(call, results))
    last: torch.Tensor = results[-1]
    return last


def _run(call: RecipeCall, results: list[Any]) -> Any:
    if call.target in ("values", "packed"):
        return numbers(call)
    if call.target == "result":
        return _taken(call.arguments[0], results)
    arguments = [_taken(value, results) for value in call.arguments]
    return _function(call.target)(*arguments, **{name: _taken(value, results) for name, value in call.keywords})


def _function(target: str) -> Any:
    _, name, overload = target.split(".")
    return getattr(getattr(torch.ops.aten, name), overload)


def _taken(value: Attribute, results: list[Any]) -> Any:
    if isinstance(value, tuple):
        return [_taken(item, results) for item in value]
    if isinstance(value, str) and value.startswith("%"):
        number, _, position = value[1:].partition(".")
        return results[int(number)][int(position)] if position else results[int(number)]
    return getattr(torch, value[6:]) if isinstance(value, str) and value.startswith("torch.") else value


def numbers(call: RecipeCall) -> torch.Tensor:
    """The tensor of a call `values` or `packed`."""
    name, shape, payload = call.arguments
    assert isinstance(name, str) and isinstance(shape, tuple)
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    if isinstance(payload, tuple):
        return torch.tensor(payload, dtype=dtype).reshape(shape)
    assert isinstance(payload, str)
    raw = bytearray(zlib.decompress(base64.b64decode(payload)))
    return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)
