"""Which operator of autoshard's forward graph is which node of autoparallel's joint graph, and what a layout of one
says of the other. Neither torch nor autoparallel is imported.

A placement is "S" with a dim, "R" or "P". autoshard splits a linear, and both products of its backward follow; of
autoparallel's three products each chooses by itself. What the four ways to split one are called here: "rows" (of the
input), "columns" (of the result), "inner" (what is summed over), "whole".
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.ir.layout import HOST
from autoshard.ir.problem import Problem

Placements = tuple[str, ...]
ROWS, COLUMNS, INNER, WHOLE = "rows", "columns", "inner", "whole"
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "forward", "input gradient", "weight gradient"
# what a product is, and whether the weight's dims are (in, out), not (out, in) -> placement of its result -> split
SPLITS: dict[tuple[str, bool], dict[str, str]] = {
    (FORWARD, False): {"S0": ROWS, "S1": COLUMNS, "P": INNER, "R": WHOLE},
    (INPUT_GRADIENT, False): {"S0": ROWS, "S1": INNER, "P": COLUMNS, "R": WHOLE},
    (WEIGHT_GRADIENT, False): {"S0": COLUMNS, "S1": INNER, "P": ROWS, "R": WHOLE},
    (WEIGHT_GRADIENT, True): {"S0": INNER, "S1": COLUMNS, "P": ROWS, "R": WHOLE},
}
LINEAR = {"aten.linear": False, "autoshard.linear_in_out": True}
SAME = {  # operators whose result means the same in both; of autoparallel's in one module, the last ones
    "aten.embedding": "aten.embedding.default",
    "aten.layer_norm": "aten.native_layer_norm.default",
    "aten.rms_norm": "aten.mul.Tensor",  # it is spelled out there: by its weight last
    "aten.scaled_dot_product_attention": "aten._scaled_dot_product_flash_attention.default",
    "aten.add": "aten.add.Tensor",
    "aten.mul": "aten.mul.Tensor",
}
PRODUCT = "aten.mm.default"
IMPORTANCE = ("parameter", *LINEAR, "aten.scaled_dot_product_attention")  # what is fixed first; the rest as it comes


@dataclass(frozen=True)
class Operator:
    """An operator of either graph: `shape` of its first result; `forward`: of the joint graph's forward."""

    name: str
    target: str
    module: str
    shape: tuple[int, ...]
    forward: bool = True


@dataclass(frozen=True)
class Pair:
    """autoshard's `op` and what it is there: one node, or the (product, node) pairs of a linear."""

    op: Operator
    node: str = ""
    products: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Wish:
    """What `node` of theirs is to do, one of `fits` of its choices, so that it is what `kind` does here."""

    kind: str
    node: str
    fits: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Theirs:
    """Its plan and its whole problem, no layer folded, in autoshard's arrays: costs are its own, in seconds.

    `layouts[i][s]`: of the result of choice s of node i; `usable[i][s]`: each operand can be brought where s needs it.
    `operators`: node name -> what it is; `parameters`: path -> node name. `objective_seconds` is what its solver
    minimised. Seconds of CPU.
    """

    problem: Problem
    choice: tuple[int, ...]
    layouts: tuple[tuple[Placements, ...], ...]
    usable: tuple[tuple[bool, ...], ...]
    operators: Mapping[str, Operator]
    parameters: Mapping[str, str]
    objective_seconds: float
    trace_seconds: float
    plan_seconds: float


def module_path(text: str) -> str:
    """`L['self'].transformer.h.0` -> `transformer.h.0`."""
    return re.sub(r"\[(\d+)\]", r".\1", re.sub(r"^L\['\w+'\]\.?", "", text))


def in_layer(path: str) -> bool:
    """Is the module or parameter of one of the numbered layers? What is before and behind them is not."""
    return re.search(r"\.\d+(\.|$)", path) is not None


def pairs(ops: Iterable[Operator], nodes: Iterable[Operator]) -> list[Pair]:
    """Those that have a counterpart: same module, and where a module has several, as many of the same shape."""
    own: dict[tuple[str, str], list[Operator]] = defaultdict(list)
    theirs: dict[tuple[str, str], list[Operator]] = defaultdict(list)
    for op in ops:
        own[op.module, op.target].append(op)
    for node in nodes:
        theirs[node.module, node.target].append(node)
    found = []
    for (module, target), group in own.items():
        if target in LINEAR and len(group) == 1:
            found += _linear(group[0], theirs[module, PRODUCT])
        elif target in SAME:
            found += _same(group, theirs[module, SAME[target]])
    return found


def _linear(op: Operator, nodes: Sequence[Operator]) -> list[Pair]:
    """The product of the forward, and those of the backward by their shapes."""
    forward = [node for node in nodes if node.forward]
    if len(forward) != 1:
        return []
    rows = forward[0].shape[0]
    backward = [
        (INPUT_GRADIENT if node.shape[0] == rows else WEIGHT_GRADIENT, node.name) for node in nodes if not node.forward
    ]
    if len({product for product, _ in backward}) < len(backward):
        backward = []
    return [Pair(op, products=((FORWARD, forward[0].name), *backward))]


def _same(ops: Sequence[Operator], nodes: Sequence[Operator]) -> list[Pair]:
    found = []
    for shape in dict.fromkeys(op.shape for op in ops):
        own = [op for op in ops if op.shape == shape]
        theirs = [node for node in nodes if node.forward and node.shape == shape]
        if len(theirs) >= len(own) and (len(theirs) == len(own) or own[0].target == "aten.rms_norm"):
            found += [Pair(op, node.name) for op, node in zip(own, theirs[-len(own) :], strict=True)]
    return found


def splits(op: Operator, product: str, placements: Placements) -> Placements | None:
    """How the product of a linear is split by each axis, None where its result lies in no such way."""
    in_out = LINEAR[op.target] and product == WEIGHT_GRADIENT
    known = SPLITS[product, in_out]
    found = tuple(known.get(placement, "") for placement in placements)
    return found if all(found) else None


def splits_of_result(op: Operator, placements: Placements) -> Placements | None:
    """The same of autoshard's linear, by its result; None where its rows are cut elsewhere than at their first dim."""
    known = {"S0": ROWS, f"S{len(op.shape) - 1}": COLUMNS, "P": INNER, "R": WHOLE}
    found = tuple(known.get(placement, "") for placement in placements)
    return found if all(found) else None


def result_of(op: Operator, split: Placements) -> Placements:
    """Where autoshard's linear leaves its result if it is split so."""
    known = {ROWS: "S0", COLUMNS: f"S{len(op.shape) - 1}", INNER: "P", WHOLE: "R"}
    return tuple(known[one] for one in split)


def pin(kind: str, name: str, placements: Placements, axes: Sequence[str]) -> str:
    """`op:linear=Shard(0)@dp,Replicate@tp`."""
    words = {"R": "Replicate", "P": "Partial"}
    said = [f"{words.get(text) or f'Shard({text[1:]})'}@{axis}" for text, axis in zip(placements, axes, strict=True)]
    return f"{kind}:{name}={','.join(said)}"


def plain(layout: str) -> Placements:
    """autoshard's layout as printed, without its blocks, memory and what it says of gradients: `S2/3 R+` -> S2, R."""
    return tuple(re.sub(r"[/*+\[].*", "", text) for text in layout.split() if text != HOST)


def joint(wishes: Sequence[Wish], possible: Callable[[Sequence[Wish]], bool]) -> tuple[list[Wish], list[Wish]]:
    """Those that can hold together, in the order of their importance, and those that can't beside them.

    `possible` must hold of every part of what it holds of.
    """
    places: Mapping[str, int] = {kind: place for place, kind in enumerate(IMPORTANCE)}
    rest = sorted(wishes, key=lambda wish: places.get(wish.kind, len(places)))
    kept: list[Wish] = []
    left: list[Wish] = []
    while rest:
        good, bad = 0, len(rest) + 1  # of the first so many
        if possible([*kept, *rest]):
            good = len(rest)
        while bad - good > 1 and good < len(rest):
            middle = (good + bad) // 2
            good, bad = (middle, bad) if possible([*kept, *rest[:middle]]) else (good, middle)
        kept, left, rest = [*kept, *rest[:good]], [*left, *rest[good : good + 1]], rest[good + 1 :]
    return kept, left
