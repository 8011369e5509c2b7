"""torch.export with dynamic dims: what it is given for declared sizes, and its refusals in a user's words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autoshard.errors import CaptureError, UsageError
from autoshard.graph_capture.dynamic_export.concrete import resized
from autoshard.graph_capture.dynamic_export.kept_symbols import as_if_traced, keeping_symbols
from autoshard.graph_capture.dynamic_sizes.declared import Declared, Shape, dims_of, of_model, parse
from autoshard.graph_capture.dynamic_sizes.numbers import MOST_POINTS, MOST_UNITS, TENSOR_FOR_FLOAT
from autoshard.graph_capture.tracing.own_gradients import begin_trace
from autoshard.graph_capture.tracing.source_lines import culprit, headline, is_visible, quote
from autoshard.ir.dynamic import DynamicSize

_HINT = (
    f"sizes as whole numbers, not as lengths of Python loops or in math.sqrt ({TENSOR_FOR_FLOAT}); "
    "or leave this size out of the dynamic ones"
)


@dataclass(frozen=True)
class DynamicDims:
    """Declared sizes with the dims that have them, by position of the input. `examples`: their example sizes."""

    sizes: tuple[tuple[Declared, tuple[tuple[int, int], ...]], ...]
    examples: tuple[int, ...]
    others: tuple[int, ...]  # sizes of other dims

    @property
    def planned(self) -> tuple[int, ...]:
        """Largest of each size; without a limit, that of the example, or the first above."""
        largest = []
        for (declared, _), example in zip(self.sizes, self.examples, strict=True):
            symbol = declared.symbol
            units = max(1, -(-(example - symbol.remainder) // symbol.divisor))
            largest.append(symbol.most or max(symbol.least, units * symbol.divisor + symbol.remainder))
        return tuple(largest)

    def sizes_of(self, inputs: Sequence[str]) -> tuple[DynamicSize, ...]:
        """Dynamic sizes as a graph has them, with inputs of these names."""
        return tuple(
            DynamicSize(
                size.name,
                size.symbol.least,
                size.symbol.most,
                size.symbol.divisor,
                size.symbol.remainder,
                tuple((inputs[number], dim) for number, dim in dims),
            )
            for size, dims in self.sizes
        )

    def traced_inputs(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The example inputs with sizes to trace with: at least 2 units (torch fixes 0 and 1), and no other dim's."""
        traced, taken = list(inputs), {*self.others}
        for declared, dims in self.sizes:
            symbol = declared.symbol
            first = max(2, (symbol.least - symbol.remainder) // symbol.divisor)
            last = (symbol.most - symbol.remainder) // symbol.divisor if symbol.most else first + 200
            options = [k * symbol.divisor + symbol.remainder for k in range(first, min(last, first + 200) + 1)]
            size = next((size for size in options if size not in taken), options[0])
            taken.add(size)
            for number, dim in dims:
                traced[number] = resized(traced[number], dim, size)
        return tuple(traced)

    def shapes(self, count: int) -> tuple[dict[int, Any], ...]:
        """Shapes as `torch.export.export` takes them, for `count` inputs."""
        shapes: list[dict[int, Any]] = [{} for _ in range(count)]
        for declared, dims in self.sizes:
            dim_of = _dim(declared)
            for number, dim in dims:
                shapes[number][dim] = dim_of
        return tuple(shapes)


def _dim(declared: Declared) -> Any:
    """torch's Dim: `divisor * _n + remainder`. Its least is 2 in a trace, whatever was declared."""
    symbol = declared.symbol
    limits = {"min": max(1, (symbol.least - symbol.remainder) // symbol.divisor)}
    if symbol.most:
        limits["max"] = (symbol.most - symbol.remainder) // symbol.divisor
    if symbol.divisor == 1:
        return torch.export.Dim(declared.name, **limits)
    dim = symbol.divisor * torch.export.Dim(f"_{declared.name}", **limits)
    return dim + symbol.remainder if symbol.remainder else dim


def dynamic_dims(model: torch.nn.Module, inputs: Sequence[torch.Tensor], texts: Sequence[str]) -> DynamicDims | None:
    """Dynamic dims that `texts` declare, or else the model's `set_inputs`; None if neither does. UsageError if two
    sizes have one dim, or dims of one size differ in the example inputs."""
    call = getattr(model.forward, "call", None)
    names = call.names if call else list(inspect.signature(model.forward).parameters)[: len(inputs)]
    names = [*names, *map(str, range(len(names), len(inputs)))]
    shapes = [Shape(n, tuple(x.shape), x.dtype.is_floating_point) for n, x in zip(names, inputs, strict=True)]
    declared = parse(texts) or of_model(model, shapes)
    if not declared:
        return None
    sizes = tuple((size, dims_of(size, shapes)) for size in declared)
    seen: dict[tuple[int, int], str] = {}
    examples: list[int] = []
    for size, dims in sizes:
        for place in dims:
            if place in seen:
                message = f"dim {place[1]} of {shapes[place[0]].name} is both {seen[place]} and {size.name}"
                raise UsageError(message, "one size for a dim: NAME=…@INPUT.DIM")
            seen[place] = size.name
        lengths = {shapes[number].sizes[dim] for number, dim in dims}
        if len(lengths) > 1:
            listed = ", ".join(f"{shapes[n].name}.{dim} ({shapes[n].sizes[dim]})" for n, dim in dims)
            raise UsageError(
                f"the dims of {size.name} differ in the example inputs: {listed}", "a size for each of them"
            )
        examples.extend(lengths)
    others = (size for n, shape in enumerate(shapes) for dim, size in enumerate(shape.sizes) if (n, dim) not in seen)
    return DynamicDims(sizes, tuple(examples), tuple(others))


_SIZE = re.compile(r"L\['(\w+)'\](?:\[(\d+)\])?\.size\(\)\[(\d+)\]")  # of an input, or of one of starred ones


@dataclass
class Guards:
    """Guards of a trace: (condition on its symbols, the model's line that asks it); and the source of each symbol."""

    checks: list[tuple[Any, str]] = field(default_factory=list)
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)  # symbol -> (input, dim)


@contextmanager
def noting_guards(names: Sequence[str]) -> Iterator[Guards]:
    """Collect the guards of what is traced within. `names`: of the forward's inputs."""
    usual, guards = ShapeEnv.produce_guards_verbose, Guards()
    created = ShapeEnv.create_symbol

    def produce(self: Any, *args: Any, **kwargs: Any) -> Any:
        guards.checks = [(guard.expr, _line(guard.sloc)) for guard in self.guards]
        return usual(self, *args, **kwargs)

    def create(self: Any, val: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        symbol = created(self, val, source, *args, **kwargs)
        place = _SIZE.search(source.name if isinstance(source.name, str) else source.name())
        if place:
            number = int(place[2]) if place[2] else names.index(place[1]) if place[1] in names else -1
            guards.sources[str(symbol)] = number, int(place[3])
        return symbol

    ShapeEnv.produce_guards_verbose, ShapeEnv.create_symbol = produce, create
    try:
        yield guards
    finally:
        ShapeEnv.produce_guards_verbose, ShapeEnv.create_symbol = usual, created


def _line(sloc: Any) -> str:
    """The innermost line of the model's own code in what torch notes of a guard."""
    for frame in (getattr(sloc, "framework_loc", None), getattr(sloc, "maybe_user_loc", None)):
        if frame is not None and is_visible(frame.filename):
            return quote(frame.filename, frame.lineno or 0)
    return ""


def fixed_size(error: BaseException, dims: DynamicDims, guards: Guards) -> CaptureError | None:
    """The refusal where `error` says that the model fixes a declared size; else None."""
    text = str(error)
    by_place = {place: size.name for size, places in dims.sizes for place in places}
    names = {symbol: by_place[place] for symbol, place in guards.sources.items() if place in by_place}
    used = [symbol for symbol in names if re.search(rf"\b{symbol}\b", text)]
    if "specialized it to be a constant" in text or "Constraints violated" in text:
        named = [size.name for size, _ in dims.sizes if re.search(rf"\b_?{size.name}\b", text)]
        name = named[0] if named else dims.sizes[0][0].name
        symbols = [symbol for symbol, other in names.items() if other == name]
        lines = [line for guard, line in guards.checks if line and {str(s) for s in guard.free_symbols} & {*symbols}]
        at = f" at {lines[-1]}" if lines else ""
        constant = re.search(rf"_?{name} as dynamic but your code specialized it to be a constant \((\d+)\)", text)
        bullets = [line.strip(" -") for line in text.splitlines() if line.strip().startswith("-")]
        why = (
            f"the model fixes it to {constant[1]}{at}"
            if constant
            else f"{bullets[0] if bullets else headline(error)}{at}"
        )
        return CaptureError(f"{name} can't be dynamic: {why}", _HINT)
    if not used:
        return None
    message = headline(error)
    for symbol in used:
        message = re.sub(rf"\b{symbol}\b", names[symbol], message)
    place = culprit(error)
    at = f" at {place}" if place else ""
    return CaptureError(f"{names[used[0]]} can't be dynamic{at}: {message}", _HINT)


def check_guards(dims: DynamicDims, guards: Guards) -> None:
    """CaptureError where a condition that the trace met does not hold for all declared sizes."""
    by_place = {place: size for size, places in dims.sizes for place in places}
    declared = {symbol: by_place[place] for symbol, place in guards.sources.items() if place in by_place}
    for guard, line in guards.checks:
        symbols = sorted(guard.free_symbols, key=str)
        known = {declared[str(symbol)].name: declared[str(symbol)] for symbol in symbols if str(symbol) in declared}
        if not symbols or any(str(symbol) not in declared for symbol in symbols):
            continue
        # Torch's own conditions, without a line, are of dims of 1: the least sizes may make one, and are verified.
        ranges = [[*_sizes(size)][0 if line else 1 :] for size in known.values()]
        each = ranges if len(ranges) == 1 else [_spread(span) for span in ranges]
        for sizes in product(*each):
            at = dict(zip(known, sizes, strict=True))
            if not _holds(guard, {symbol: at[declared[str(symbol)].name] for symbol in symbols}):
                where = f" at {line}" if line else ""
                listed = ", ".join(f"{name} {size}" for name, size in at.items())
                message = f"{' and '.join(known)} can't be dynamic over the whole range: with {listed} the model takes"
                raise CaptureError(f"{message} another branch{where}", _SIDES)


def _spread(sizes: list[int]) -> list[int]:
    """The ends of as many parts as a range has points: of several symbols all combinations are tried."""
    return sorted({sizes[n * (len(sizes) - 1) // MOST_POINTS] for n in range(MOST_POINTS + 1)}) if sizes else []


_SIDES = "ranges that stay on one side; or a plan for each side"


def _sizes(declared: Declared) -> Iterator[int]:
    """Allowed sizes from 2 on (of 0 and 1 torch asks nothing in a trace). Of a long range some, evenly spread, with
    both ends."""
    symbol = declared.symbol
    first = (symbol.least - symbol.remainder) // symbol.divisor
    last = (symbol.most - symbol.remainder) // symbol.divisor if symbol.most else first + 10 * MOST_UNITS
    step = max(1, (last - first) // MOST_UNITS)
    for n in (*range(first, last, step), last):
        size = n * symbol.divisor + symbol.remainder
        if size > 1:
            yield size


def _holds(guard: Any, values: dict[Any, int]) -> bool:
    condition = guard.subs(values)
    return bool(condition.free_symbols) or bool(condition)


def export_with(dims: DynamicDims, module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    """torch.export with these dims as symbols. CaptureError, with the model's line, where it fixes one of them."""
    try:
        return _exported(dims, module, inputs)
    except CaptureError as error:
        try:
            begin_trace()
            with as_if_traced():
                return _exported(dims, module, inputs)
        except Exception:
            raise error from error.__cause__


def _exported(dims: DynamicDims, module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    shapes = dims.shapes(len(inputs))
    with noting_guards(list(inspect.signature(module.forward).parameters)) as guards, keeping_symbols():
        try:
            exported = torch.export.export(module, inputs, strict=False, dynamic_shapes=_by_argument(module, shapes))
        except Exception as error:
            fixed = fixed_size(error, dims, guards)
            if fixed is None:
                raise
            raise fixed from error
    check_guards(dims, guards)
    return exported


def _by_argument(module: torch.nn.Module, shapes: tuple[dict[int, Any], ...]) -> Any:
    """Shapes as the forward takes its inputs: one by one, or all in one starred argument."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    starred = bool(parameters) and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
    return (shapes,) if starred else shapes
