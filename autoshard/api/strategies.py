"""Arguments of `shard` for inputs, outputs, parameters and data, as pins and layouts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.constraints.count_layouts import layout_with
from autoshard.constraints.shard_counts import Counts
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph
from autoshard.ir.layout import REPLICATE, Layout, Shard
from autoshard.ir.mesh import Mesh

# Cut counts, or a layout such as "Shard(0)@dp", or what the search finds. Of a table in unequal parts their lengths.
How = tuple[Any, ...] | str | None
FULL, PARALLEL = "full_batch", "data_parallel"
EXAMPLE = "in_strategy=((4, 2), None), one entry a tensor"


@dataclass(frozen=True)
class Strategies:
    """Strategies given to `shard`; None: not given. `dataset`: full_batch, data_parallel, or counts per input."""

    inputs: tuple[How, ...] | None = None
    outputs: tuple[How, ...] | None = None
    parameters: tuple[tuple[str, How], ...] = ()
    dataset: str | tuple[Counts, ...] = FULL

    def counts(self) -> list[Counts]:
        """Shard counts that a mesh must have."""
        said = [*(self.inputs or ()), *(self.outputs or ()), *(how for _, how in self.parameters)]
        said += [] if isinstance(self.dataset, str) else [*self.dataset]
        return [
            tuple(cut if isinstance(cut, int) else len(cut) for cut in how) for how in said if isinstance(how, tuple)
        ]


def strategies(
    in_strategy: Any, out_strategy: Any, parameter_plan: Mapping[str, Any] | None, dataset_strategy: Any
) -> Strategies:
    """Strategies checked as far as possible without tensors. UsageError names one that is not valid."""
    if not isinstance(dataset_strategy, str):
        dataset_strategy = _entries("dataset_strategy", dataset_strategy)
        if dataset_strategy is None or not all(isinstance(one, tuple) for one in dataset_strategy):
            raise UsageError(
                f"dataset_strategy {dataset_strategy!r}: expected counts per input", f"{FULL!r}, {PARALLEL!r}"
            )
    elif dataset_strategy not in (FULL, PARALLEL):
        near = difflib.get_close_matches(dataset_strategy, (FULL, PARALLEL), 1, 0.0)[0]
        raise UsageError(
            f"unknown dataset_strategy {dataset_strategy!r}", f"dataset_strategy={near!r}, or counts per input"
        )
    if parameter_plan is not None and not isinstance(parameter_plan, Mapping):
        raise UsageError(f"parameter_plan is {type(parameter_plan).__name__}, expected a dict", "{'fc.weight': (4, 1)}")
    plan = {
        name.removeprefix("self."): _how(f"parameter_plan {name!r}", how, parts=True)
        for name, how in (parameter_plan or {}).items()
    }
    inputs, outputs = _entries("in_strategy", in_strategy), _entries("out_strategy", out_strategy)
    return Strategies(inputs, outputs, tuple(plan.items()), dataset_strategy)


def _entries(name: str, entries: Any) -> tuple[How, ...] | None:
    if entries is None:
        return None
    if not isinstance(entries, tuple | list):
        raise UsageError(f"{name} is {type(entries).__name__}, expected a tuple with an entry for each tensor", EXAMPLE)
    return tuple(_how(f"{name}[{number}]", how) for number, how in enumerate(entries))


def _how(what: str, how: Any, parts: bool = False) -> How:
    """`parts`: may a dim have the lengths of its parts in place of their count?"""
    if how is None or isinstance(how, str):
        return how
    if parts and isinstance(how, tuple | list) and any(isinstance(cut, tuple | list) for cut in how):
        _how(what, [len(cut) if isinstance(cut, tuple | list) else cut for cut in how])
        return tuple(_how(what, cut) if isinstance(cut, tuple | list) else cut for cut in how)
    if not isinstance(how, tuple | list) or not all(type(count) is int for count in how):
        raise UsageError(f"{what} is {how!r}: expected whole numbers, one a dim, a layout, or None", EXAMPLE)
    if any(count < 1 for count in how):
        raise UsageError(f"{what} is {how!r}: a dim is cut at least once, got {min(how)}", EXAMPLE)
    return tuple(how)


# --- with a graph ---------------------------------------------------------------------------------------------------


def pins(said: Strategies, graph: Graph, outputs: Sequence[str], lifted: Mapping[str, str]) -> tuple[str, ...]:
    """Pins. `outputs`: the tensors that the function returns; `lifted`: a function's parameters -> their inputs."""
    inputs = [name for name in graph.inputs if name not in lifted.values()]
    texts = []
    for kind, strategy, names in (("input", said.inputs, inputs), ("output", said.outputs, outputs)):
        if strategy is not None and len(strategy) != len(names):
            entries = f"{kind[:-3]}_strategy has {len(strategy)} entries"
            raise UsageError(
                f"{entries}, but there are {len(names)} tensors: {', '.join(names)}",
                f"one entry for each {kind}, None where it is to be searched",
            )
        for name, how in zip(names, strategy or (), strict=False):
            if how is not None:
                _check_rank(f"{kind} {name}", how, graph.tensor(name).shape)
                texts.append(f"input:{name}={_pin(how)}" if kind == "input" else _result_pin(graph, name, how))
    return (*texts, *(_parameter_pin(graph, name, how, lifted) for name, how in said.parameters if how is not None))


def _check_rank(what: str, how: How, shape: tuple[int, ...]) -> None:
    if isinstance(how, tuple) and len(how) != len(shape):
        raise UsageError(
            f"{what} has {len(shape)} dims {list(shape)}, but {how} cuts {len(how)}", "a count for each dim"
        )


def _pin(how: How) -> str:
    return f"({how},)" if isinstance(how, tuple) else str(how)


def _result_pin(graph: Graph, name: str, how: How) -> str:
    op = graph.producers.get(name)
    if op is None:
        raise UsageError(f"the output {name} is an input of the function", "in_strategy says how it lies")
    if not isinstance(how, tuple):
        return f"op:{op.name}={how}"
    cuts = tuple(how if result == name else None for result in op.results)
    return f"op:{op.name}={(None,) * len(op.operands)} -> {cuts}"


def _parameter_pin(graph: Graph, name: str, how: How, lifted: Mapping[str, str]) -> str:
    paths = {path: one.tensor for one in (*graph.parameters, *graph.buffers) for path in (one.path, *one.ties)}
    paths |= lifted
    if name not in paths:
        near = difflib.get_close_matches(name, paths, 3, 0.3) or sorted(paths)[:3] or ["no parameter_plan"]
        raise UsageError(f"parameter_plan: there is no parameter {name!r}", " or ".join(near))
    _check_rank(name, how, graph.tensor(paths[name]).shape)
    return f"input:{lifted[name]}={_pin(how)}" if name in lifted else f"parameter:{name}={_pin(how)}"


def dataset_pins(dataset_strategy: Any, graph: Graph, devices: int) -> tuple[str, ...]:
    """Pins of a plan's inputs as its batches come. `full_batch` has none: each rank takes its part of a batch."""
    dataset = strategies(None, None, None, dataset_strategy).dataset
    if dataset == FULL:
        return ()
    shapes = {name: graph.tensor(name).shape for name in graph.inputs}
    if isinstance(dataset, str):
        return tuple(f"input:{name}=(({devices}{', 1' * (len(s) - 1)},),)" for name, s in shapes.items() if s)
    if len(dataset) != len(shapes):
        message = (
            f"dataset_strategy has {len(dataset)} entries, but there are {len(shapes)} inputs: {', '.join(shapes)}"
        )
        raise UsageError(message, "one entry for each input")
    for (name, shape), counts in zip(shapes.items(), dataset, strict=True):
        _check_rank(f"input {name}", counts, shape)
    return tuple(f"input:{name}={_pin(counts)}" for name, counts in zip(shapes, dataset, strict=True))


def outside(said: Strategies, number: int, rank: int, mesh: Mesh, name: str) -> Layout:
    """Layout of input or output `number` in the eager program; what has no dims is whole everywhere."""
    if said.dataset == FULL or rank == 0:
        return Layout.replicated(mesh)
    if said.dataset == PARALLEL:
        return Layout(tuple(Shard(0) if size > 1 else REPLICATE for size in mesh.sizes))
    if number >= len(said.dataset):
        raise UsageError(
            f"dataset_strategy has {len(said.dataset)} entries, but {name} is tensor {number + 1}", "one a tensor"
        )
    counts = said.dataset[number]
    assert isinstance(counts, tuple)
    if len(counts) != rank:
        raise UsageError(
            f"{name} has {rank} dims, but its dataset_strategy {counts} cuts {len(counts)}", "a count a dim"
        )
    return layout_with(counts, mesh, name)
