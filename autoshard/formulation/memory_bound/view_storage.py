"""Storage that each tensor shares in the unsharded graph, and the least of it that a device can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.costs.device_bytes import activation_bytes
from autoshard.formulation.storage_layouts import as_stored
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.program.instruction_storage import aliases_of
from autoshard.rules.algebra.strategy import Strategy


class ViewStorage:
    """`root[tensor]`: the tensor that first held its storage; a program has one storage of it, or one for each layout.

    `lasting`: roots that no operator makes: inputs, parameters and buffers. `no_gradient`: roots of which some view has
    no gradient.
    """

    def __init__(self, graph: Graph, mesh: Mesh, strategies: Mapping[str, Sequence[Strategy]]) -> None:
        self.graph, self.mesh, self.strategies = graph, mesh, strategies
        stored = [p.tensor for p in (*graph.parameters, *graph.buffers)]
        self.lasting = frozenset((*graph.inputs, *stored))
        self.root = {name: name for name in self.lasting}
        self.viewed: dict[str, tuple[str, str]] = {}  # view -> (what it is a view of, the operator that makes it)
        for op in graph.ops:
            aliases = aliases_of(op)
            for position, name in enumerate(op.results):
                source = op.operands[aliases[position]] if position in aliases else None
                self.root[name] = name if source is None else self.root[source]
                if source is not None:
                    self.viewed[name] = source, op.name
        self.no_gradient = frozenset(r for name, r in self.root.items() if not graph.tensor(name).requires_grad)
        self._sizes: dict[tuple[str, Layout], float] = {}
        self._under: dict[str, dict[Layout, float]] = {}

    def least(self, tensor: str, layout: Layout) -> float:
        """Bytes of the storage of `tensor` if it is read in `layout`: its own, or that of the tensor it is a view of,
        under the view's cheapest strategy."""
        key = tensor, layout
        if key not in self._sizes:
            size_bytes = activation_bytes(self.graph.tensor(tensor), layout, self.mesh)
            viewed = self._views(tensor).get(as_stored(layout), size_bytes) if tensor in self.viewed else size_bytes
            self._sizes[key] = min(size_bytes, viewed)
        return self._sizes[key]

    def _views(self, tensor: str) -> dict[Layout, float]:
        """Layout of a view, as its operator makes it -> the least bytes of the tensor it is a view of."""
        if tensor not in self._under:
            source, name = self.viewed[tensor]
            op, sizes = self.graph.by_op[name], self._under.setdefault(tensor, {})
            result, operand = op.results.index(tensor), op.operands.index(source)
            for strategy in self.strategies[name]:
                before, after = strategy.operands[operand], as_stored(strategy.results[result])
                assert before is not None, f"{name}: a view of nothing"
                sizes[after] = min(sizes.get(after, float("inf")), self.least(source, before))
        return self._under[tensor]
