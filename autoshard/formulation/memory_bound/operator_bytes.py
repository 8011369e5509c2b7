"""Minimal bytes that each operator makes a device hold, under each of its strategies: see `memory_lower_bound`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.costs.operator import extra_bytes, local_tensors
from autoshard.costs.temporaries import keeps_otherwise, saved_difference, temporary
from autoshard.formulation.memory_bound.view_storage import ViewStorage
from autoshard.ir.graph import Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import Floats
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.operators import record


@dataclass(frozen=True, eq=False)
class OperatorMoments:
    """Bytes of an operator, by strategy: those kept from its forward to its backward, and those held in addition at its
    forward, and at its backward."""

    op: str
    saved: Floats
    forward: Floats
    backward: Floats


@dataclass(frozen=True)
class _TensorPlace:
    """Operand or result `position` of an operator, and its tensor."""

    tensor: str
    position: int
    is_result: bool  # a result

    def least(self, storage: ViewStorage, strategy: Strategy) -> float:
        layout = (strategy.results if self.is_result else strategy.operands)[self.position]
        assert layout is not None, f"{self.tensor}: no layout"
        return storage.least(self.tensor, layout)


def _places(op: Op, operands: Iterable[int], results: Iterable[int]) -> Iterator[_TensorPlace]:
    named = ((op.operands[position], position) for position in operands)
    yield from (_TensorPlace(name, position, False) for name, position in named if name is not None)
    yield from (_TensorPlace(op.results[position], position, True) for position in results)


def _every(op: Op) -> Iterator[_TensorPlace]:
    return _places(op, range(len(op.operands)), range(len(op.results)))


class OperatorBytes:
    """`strategies[op]`: those that a plan may choose from. `stored[parameter]`: the least bytes of it on a device;
    absent for one that may lie elsewhere."""

    def __init__(
        self, graph: Graph, mesh: Mesh, strategies: Mapping[str, Sequence[Strategy]], stored: Mapping[str, float]
    ) -> None:
        self.graph, self.mesh, self.strategies, self.stored = graph, mesh, strategies, stored
        self.storage = ViewStorage(graph, mesh, strategies)
        self.regathered = {self.storage.root[name] for name in graph.weights}  # by the backward that needs it
        self.keeper = self._keepers()

    def moments(self) -> Iterator[OperatorMoments]:
        """Moments of each operator, in order."""
        for index, op in enumerate(self.graph.ops):
            places = list(self._saved(op, index))
            beside, gradients = list(self._beside(op, index)), list(self._gradients(op))
            rows = [self._bytes(op, strategy, places, beside, gradients) for strategy in self.strategies[op.name]]
            kept_, forward, backward = np.array(rows, dtype=float).T
            yield OperatorMoments(op.name, kept_, forward, backward)

    # --- which storages count, and where ---

    def _keepers(self) -> dict[str, tuple[int, _TensorPlace]]:
        """Storage -> the first operator that keeps it for its backward, if some operator does so first under all its
        strategies, and its position there."""
        sure: dict[str, tuple[int, _TensorPlace]] = {}
        perhaps: dict[str, tuple[int, _TensorPlace]] = {}
        for index, op in enumerate(self.graph.ops if self.graph.loss else ()):
            without = self._without(op)
            for place in _places(op, op.saved.operands, op.saved.results):
                keepers = perhaps if not place.is_result and place.position in without else sure
                keepers.setdefault(self.storage.root[place.tensor], (index, place))
        fixed = self.storage.lasting | self.regathered
        return {root: where for root, where in (perhaps | sure).items() if root not in fixed}

    def _without(self, op: Op) -> frozenset[int]:
        """Operands that the operator does not keep under some strategy."""
        operands: set[int] = set()
        for strategy in self.strategies[op.name]:
            operands.update(self._saved_otherwise(op, strategy)[0])
        return frozenset(operands)

    def _saved(self, op: Op, index: int) -> Iterator[_TensorPlace]:
        """Places that count as kept by this operator."""
        keepers = (self.keeper.get(self.storage.root[place.tensor]) for place in _every(op))
        yield from dict.fromkeys(keeper[1] for keeper in keepers if keeper is not None and keeper[0] == index)

    def _beside(self, op: Op, index: int) -> Iterator[_TensorPlace]:
        """Operands and results not counted as kept by this or an earlier operator; for parameters see `_bytes`."""
        for root, place in self._once(op):
            later = self.keeper[root][0] > index if root in self.keeper else root not in self.storage.lasting
            if later or (place.tensor in self.stored and not place.is_result):
                yield place

    def _gradients(self, op: Op) -> Iterator[_TensorPlace]:
        """Operands and results with a gradient, if the operator has a backward; of a copy only the results, whose
        gradient becomes the operand's."""
        if self.graph.loss and any(self.graph.tensor(name).requires_grad for name in op.results):
            without, moves = self.storage.lasting | self.storage.no_gradient, record(op.target).moves
            yield from (p for root, p in self._once(op) if root not in without and (p.is_result or not moves))

    def _once(self, op: Op) -> Iterator[tuple[str, _TensorPlace]]:
        """Each storage, and its first place."""
        first: dict[str, _TensorPlace] = {}
        for place in _every(op):
            first.setdefault(self.storage.root[place.tensor], place)
        yield from first.items()

    # --- how much ---

    def _bytes(
        self,
        op: Op,
        strategy: Strategy,
        places: Sequence[_TensorPlace],
        beside: Sequence[_TensorPlace],
        gradients: Sequence[_TensorPlace],
    ) -> tuple[float, float, float]:
        """(kept, forward, backward) under a strategy. A parameter is stored as it is read, or the read copy is
        additional: together no less than the least stored and what the larger of the two takes more."""
        if strategy.host:
            return 0.0, 0.0, 0.0
        locals_ = local_tensors(self.graph, op, strategy, self.mesh)
        without, extra = self._saved_otherwise(op, strategy)
        held = temporary(self.mesh, op, strategy.variant, locals_[0], strategy.operands, locals_[1])
        sizes = [one.least(self.storage, strategy) for one in places if one.is_result or one.position not in without]
        read = [place.least(self.storage, strategy) - self.stored.get(place.tensor, 0.0) for place in beside]
        own_gradients = [place.least(self.storage, strategy) for place in gradients]
        forward, backward = held.forward + sum(max(0.0, size) for size in read), held.backward + sum(own_gradients)
        return sum(sizes) + extra, forward, backward if gradients else 0.0

    def _saved_otherwise(self, op: Op, strategy: Strategy) -> tuple[tuple[int, ...], float]:
        """Operands that are not kept, and the bytes that are kept in addition to values."""
        if strategy.host or self.graph.loss is None:
            return tuple(range(len(op.operands))), 0.0
        operands, results = local_tensors(self.graph, op, strategy, self.mesh)
        if not keeps_otherwise(op, strategy.variant):
            return (), extra_bytes(self.graph, op, operands, results)
        held = saved_difference(self.mesh, op, strategy.variant, operands, strategy.operands, results)
        extra = extra_bytes(self.graph, op, operands, results) if held.extra_bytes is None else held.extra_bytes
        return held.without, extra + held.more_bytes
