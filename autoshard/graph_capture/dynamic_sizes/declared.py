"""Which dims of which inputs a user declares dynamic: read from the command line, or from `set_inputs` in the model's
file, and matched with the inputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.errors import UsageError
from autoshard.graph_capture.dynamic_sizes.sequence_inputs import sequence_dims
from autoshard.graph_capture.dynamic_sizes.symbol import Symbol

BATCH, SEQUENCE = "batch", "sequence"
_EXAMPLE = "--dynamic batch=8..512/8,sequence=128..4096/64"
_ONE = re.compile(
    r"(?P<name>\w+)=(?:(?P<least>\d{1,12})?\.\.(?P<most>\d{1,12})?)?(?:/(?P<divisor>\d{1,12}))?(?:\+(?P<rest>\d{1,12}))?"
    r"(?P<dims>(?:@\w+\.\d{1,3})*)"
)
_INPUTS = "_autoshard_inputs"


@dataclass(frozen=True)
class Declared:
    """A dynamic size. `dims`: (number or name of an input, dim); () for those that its name means."""

    name: str
    symbol: Symbol
    dims: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Shape:
    """An example input: its name, shape, and whether it holds floats."""

    name: str
    sizes: tuple[int, ...]
    floats: bool


def parse(texts: Iterable[str]) -> tuple[Declared, ...]:
    """Parse options like `batch=8..512/8,sequence=128..4096/64` or `width=32..256/32@pixels.3`. Raises UsageError."""
    by_name: dict[str, Declared] = {}
    for text in (part.strip() for option in texts for part in option.split(",")):
        match = _ONE.fullmatch(text)
        if match is None:
            message = f"--dynamic {text!r}: expected NAME=MIN..MAX/DIVISOR+REMAINDER, and @INPUT.DIM for other dims"
            raise UsageError(message, _EXAMPLE)
        name = match["name"]
        if name in by_name or not name.isidentifier():
            raise UsageError(
                f"--dynamic {text!r}: {name} is " + ("named twice" if name in by_name else "no name"), _EXAMPLE
            )
        divisor, remainder = int(match["divisor"] or 1), int(match["rest"] or 0)
        try:
            symbol = Symbol(int(match["most"] or 0), int(match["least"] or 1), divisor, remainder, name=name)
        except UsageError as error:
            raise UsageError(f"--dynamic {text}: {error.message.partition(': ')[2]}", _EXAMPLE) from None
        dims = tuple(
            (place.rpartition(".")[0], int(place.rpartition(".")[2])) for place in match["dims"].split("@")[1:]
        )
        if not dims and name not in (BATCH, SEQUENCE):
            message = f"--dynamic {text}: no dims are named, and {name} is neither {BATCH} nor {SEQUENCE}"
            raise UsageError(message, f"--dynamic {text}@INPUT.DIM, such as {name}=32..256/32@0.2")
        by_name[name] = Declared(name, symbol, dims)
    return tuple(by_name.values())


def set_inputs(model: Any, *inputs: Any) -> Any:
    """Declare which dims of the inputs of `model` are dynamic, as `Cell.set_inputs` of MindSpore does; returns it.

    Each of `inputs` is the shape of one input: ints, `None` (any size) and `Symbol`s; or something with a `shape` like
    this. The same Symbol on several dims is one size. A plan of the model is then one for all of these sizes.
    """
    for number, one in enumerate(inputs):
        shape = getattr(one, "shape", one)
        if not isinstance(shape, Sequence) or isinstance(shape, str):
            message = f"set_inputs: input {number} is {type(one).__name__}, expected a shape of ints, None and Symbols"
            raise UsageError(message, "set_inputs(model, (Symbol(divisor=8), 784))")
        for size in shape:
            if size is not None and not isinstance(size, Symbol) and type(size) is not int:
                message = f"set_inputs: input {number} has the size {size!r}, expected an int, None or a Symbol"
                raise UsageError(message, "set_inputs(model, (Symbol(divisor=8), 784))")
    object.__setattr__(model, _INPUTS, tuple(tuple(getattr(one, "shape", one)) for one in inputs))
    return model


def of_model(model: Any, shapes: Sequence[Shape]) -> tuple[Declared, ...]:
    """Sizes that `set_inputs` declared. UsageError if they do not fit the example inputs."""
    declared = getattr(model, _INPUTS, None)
    if declared is None:
        return ()
    if len(declared) != len(shapes):
        message = f"set_inputs was given {len(declared)} inputs, and the model is called with {len(shapes)}"
        raise UsageError(message, f"one shape for each of {', '.join(shape.name for shape in shapes)}")
    symbols: dict[int, tuple[Symbol, list[tuple[str, int]]]] = {}
    for number, (sizes, shape) in enumerate(zip(declared, shapes, strict=True)):
        if len(sizes) != len(shape.sizes):
            raise UsageError(
                f"set_inputs: {shape.name} has {len(shape.sizes)} dims, got {len(sizes)}", f"{shape.sizes}"
            )
        for dim, (size, example) in enumerate(zip(sizes, shape.sizes, strict=True)):
            if type(size) is int and size != example:
                message = f"set_inputs: dim {dim} of {shape.name} is {example} in the example input, got {size}"
                raise UsageError(message, "a Symbol for a size that changes")
            symbol = Symbol() if size is None else size
            if isinstance(symbol, Symbol):
                symbols.setdefault(id(symbol), (symbol, []))[1].append((str(number), dim))
    return tuple(_named(list(symbols.values())))


def _named(symbols: Sequence[tuple[Symbol, list[tuple[str, int]]]]) -> Iterator[Declared]:
    taken = {symbol.name for symbol, _ in symbols if symbol.name}
    for symbol, dims in symbols:
        usual = {0: BATCH, 1: SEQUENCE}.get(dims[0][1], "")
        spare = (f"size_{n}" for n in range(1, len(symbols) + 1))
        name = symbol.name or next(candidate for candidate in (usual, *spare) if candidate and candidate not in taken)
        taken.add(name)
        yield Declared(name, symbol, tuple(dims))


def dims_of(declared: Declared, shapes: Sequence[Shape]) -> tuple[tuple[int, int], ...]:
    """The (input, dim) pairs, by position. UsageError where there are none, or one is not there."""
    names = [shape.name for shape in shapes]
    if declared.dims:
        pairs = []
        for name, dim in declared.dims:
            number = int(name) if name.isdecimal() else names.index(name) if name in names else -1
            if not 0 <= number < len(shapes) or dim >= len(shapes[number].sizes):
                there = ", ".join(f"{shape.name} ({'x'.join(map(str, shape.sizes)) or 'no dims'})" for shape in shapes)
                raise UsageError(f"{declared.name}: there is no dim {name}.{dim}; the inputs are {there}", _EXAMPLE)
            pairs.append((number, dim))
        return tuple(dict.fromkeys(pairs))
    if declared.name == BATCH:
        counts = [shape.sizes[0] for shape in shapes if shape.sizes]
        batch = max(counts, key=counts.count, default=0)
        dims = tuple((n, 0) for n, shape in enumerate(shapes) if shape.sizes[:1] == (batch,))
    else:
        _, every = sequence_dims([shape.sizes for shape in shapes], [shape.floats for shape in shapes])
        dims = tuple((n, dim) for n, axes in enumerate(every) for dim in axes)
    if not dims:
        message = f"--dynamic {declared.name}: no input has a dim that is known to be its {declared.name}"
        raise UsageError(message, f"name the dims: --dynamic {declared.name}=…@INPUT.DIM")
    return dims
