"""Proofs of rules: shard random inputs, run the local operator on every device, combine, and compare.

For every strategy: operands are sharded by their layouts, the operator runs with its localised arguments, and the
results must combine to the whole operator's. Then each device receives the gradient of its result as the pair (value,
gradient) says, and the gradients of the operands must combine too. A value is summed over the axes where it is
`Partial`, a gradient over those where it is `R+`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from autoshard.ir.graph import Attribute, Graph, Op
from autoshard.ir.graph import Tensor as GraphTensor
from autoshard.ir.layout import PARTIAL, REPLICATE_PARTIAL, Layout, local_sizes
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.instance import bind
from autoshard.rules.algebra.notation import Rule
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.enumerate import derive, find, strategies
from autoshard.rules.granularities import Granularities, Refinements, granularities
from autoshard.rules.localise import LocalCall, localise
from autoshard.rules.operator_table import facts_of
from autoshard.rules.operators import is_random
from autoshard.rules.proof.operator_call import call, evaluate
from autoshard.units import ROUNDING

if TYPE_CHECKING:
    from torch import Tensor

Side = Literal["value", "gradient"]
PARTIAL_SUM = {"value": PARTIAL, "gradient": REPLICATE_PARTIAL}
# Runs work(rank, context) on every device and returns the results in rank order; the context is what variants get.
Run = Callable[[Callable[[int, Any], Any]], list[Any]]
# (context, local op, operands) -> result of a variant; the context is None for the whole operator on one device
RunVariant = Callable[[Any, LocalCall, "Sequence[Tensor | None]"], Any]
# (target, operands, attributes, number of results) -> results of the operator on one device, as packages call it
RunCall = Callable[[str, "Sequence[Tensor | None]", Mapping[str, Any], int], "list[Tensor]"]


@dataclass(frozen=True)
class Operand:
    """A random operand: normal where floating, uniform in [low, high) otherwise. `gradient` False: it needs none;
    `positive`: at least 1/2; `unit`: between 0 and 1."""

    shape: tuple[int, ...]
    dtype: str = "float64"
    low: int = 0
    high: int = 2
    gradient: bool = True
    positive: bool = False
    unit: bool = False

    @property
    def requires_grad(self) -> bool:
        return self.gradient and self.dtype.startswith("float")


@dataclass(frozen=True)
class OpCase:
    """One operator to prove: its operands (None where absent) and all its attributes."""

    target: str
    operands: tuple[Operand | None, ...]
    attributes: tuple[tuple[str, Attribute], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """`failure` is "" where the strategy is right; `skipped` says why it was not run.

    `error` is the largest |got - wanted| / max(1, largest |wanted|) of any result or gradient.
    """

    strategy: Strategy
    failure: str = ""
    skipped: str = ""
    error: float = 0.0


def one_op_graph(case: OpCase) -> Graph:
    """Graph of this one operator; result shapes come from running it."""
    inputs = [None if operand is None else f"x{position}" for position, operand in enumerate(case.operands)]
    op = Op("op", case.target, tuple(inputs), case.attributes, ())
    results = _listed(call(op.target, random_operands(case, 0), dict(case.attributes)))
    facts = [
        GraphTensor(name, operand.shape, operand.dtype, operand.requires_grad)
        for name, operand in zip(inputs, case.operands, strict=True)
        if name is not None and operand is not None
    ]
    differentiable = any(tensor.requires_grad for tensor in facts)
    outs = [
        GraphTensor(f"y{i}", tuple(t.shape), str(t.dtype).split(".")[1], differentiable and t.is_floating_point())
        for i, t in enumerate(results)
    ]
    names = tuple(tensor.name for tensor in outs)
    present = tuple(name for name in inputs if name is not None)
    return Graph(
        name="proof",
        tensors=(*facts, *outs),
        inputs=present,
        parameters=(),
        buffers=(),
        ops=(replace(op, results=names),),
        outputs=names,
        loss=None,
    )


def prove(
    case: OpCase,
    mesh: Mesh,
    rule: str = "",
    refined: Refinements = (),
    run: Run | None = None,
    run_variant: RunVariant | None = None,
    seed: int = 0,
    run_call: RunCall | None = None,
) -> list[Verdict]:
    """Tries every strategy of the case on the mesh. `rule` replaces the table's; `refined` adds (blocks, unit) to them.

    Without `run_variant`, strategies that need a variant of the runtime are skipped. Without `run`, the devices work
    one after another. `run_call` is how a device calls the operator; by default by its schema.
    """
    graph = one_op_graph(case)
    offered = offered_by(graph, mesh, rule, refined)
    return [verdict(case, graph, strategy, mesh, run, run_variant, seed, run_call) for strategy in offered]


def offered_by(graph: Graph, mesh: Mesh, rule: str = "", refined: Refinements = ()) -> tuple[Strategy, ...]:
    """Strategies of the case's one operator, by the table or by `rule`."""
    op = graph.ops[0]
    if not rule:
        refinements = Granularities({op.name: refined}) if refined else granularities(graph, mesh)
        return strategies(graph, op, mesh, refinements)
    operands = [None if name is None else facts_of(graph.tensor(name)) for name in op.operands]
    results = [facts_of(graph.tensor(name)) for name in op.results]
    return derive(bind(Rule.parse(rule), operands, results), refined, mesh)


def verdict(
    case: OpCase,
    graph: Graph,
    strategy: Strategy,
    mesh: Mesh,
    run: Run | None = None,
    run_variant: RunVariant | None = None,
    seed: int = 0,
    run_call: RunCall | None = None,
) -> Verdict:
    """Tries one strategy of the case, whose graph `one_op_graph` made."""
    if strategy.variant and run_variant is None:
        return Verdict(strategy, skipped=f"needs the runtime's {strategy.variant}")
    proof = _Proof(case, graph, strategy, mesh, seed, run_call or _by_schema)
    try:
        failure = proof.failure(run or _one_by_one(mesh), run_variant)
        return Verdict(strategy, failure=failure, error=proof.error)
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError, NameError, SyntaxError) as error:
        return Verdict(strategy, failure=f"{type(error).__name__}: {error}")


def _by_schema(
    target: str, operands: Sequence[Tensor | None], attributes: Mapping[str, Any], results: int
) -> list[Tensor]:
    return _listed(call(target, operands, attributes))


def _one_by_one(mesh: Mesh) -> Run:
    return lambda work: [work(rank, None) for rank in range(mesh.size)]


class _Proof:
    """One strategy of one operator, with its random operands and incoming gradients."""

    def __init__(
        self, case: OpCase, graph: Graph, strategy: Strategy, mesh: Mesh, seed: int, run_call: RunCall
    ) -> None:
        import torch

        self.graph, self.op, self.strategy, self.mesh = graph, graph.ops[0], strategy, mesh
        self.case, self.run_call = case, run_call
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.whole = random_operands(case, seed)
        self.error = 0.0

    def failure(self, run: Run, run_variant: RunVariant | None) -> str:
        """Description of what does not combine ("" = everything does)."""
        results, gradients_in, gradients = self._whole(run_variant)
        parts = [self._split(t, layout, "value") for t, layout in zip(self.whole, self.strategy.operands, strict=True)]
        incoming = [
            self._split(g, layout, "gradient") for g, layout in zip(gradients_in, self.strategy.results, strict=True)
        ]
        local = localise(self.graph, self.op, self.strategy, self.mesh)

        def work(rank: int, context: Any) -> tuple[list[Tensor], list[Tensor | None]]:
            operands = [None if part is None else part[rank] for part in parts]
            return self._device(rank, operands, [g and g[rank] for g in incoming], local, context, run_variant)

        devices = run(work)
        for i, (result, layout) in enumerate(zip(results, self.strategy.results, strict=True)):
            reason = self._compare([values[i] for values, _ in devices], result, layout, "value")
            if reason:
                return f"result {i}: {reason}"
        for i, (gradient, operand_layout) in enumerate(zip(gradients, self.strategy.operands, strict=True)):
            if gradient is not None and operand_layout is not None:
                reason = self._compare([grads[i] for _, grads in devices], gradient, operand_layout, "gradient")
                if reason:
                    return f"gradient of operand {i}: {reason}"
        return ""

    def _whole(self, run_variant: RunVariant | None) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None]]:
        """Results, random incoming gradients and operand gradients of the whole operator (drawn by its variant)."""
        import torch

        leaves = self.whole
        if is_random(self.op):
            assert run_variant is not None
            repeat = find(self.graph, self.op, self.mesh, Granularities({}), " ".join("=" for _ in self.mesh.axes))
            results = _listed(run_variant(None, localise(self.graph, self.op, repeat, self.mesh), leaves))
        else:
            results = _listed(call(self.op.target, leaves, dict(self.op.attributes)))
        incoming = [
            torch.randn(r.shape, generator=self.generator, dtype=r.dtype) if r.requires_grad else None for r in results
        ]
        return [r.detach() for r in results], incoming, _gradients(results, incoming, leaves)

    def _device(
        self, rank: int, operands: list[Tensor | None], incoming: list[Tensor | None], local: LocalCall, context: Any,
        run_variant: RunVariant | None,
    ) -> tuple[list[Tensor], list[Tensor | None]]:  # fmt: skip
        needed = [t is not None and t.requires_grad for t in self.whole]
        leaves = [None if t is None else t.requires_grad_(need) for t, need in zip(operands, needed, strict=True)]
        values = {name: evaluate(value, self.mesh, self.mesh.coordinates(rank)) for name, value in local.attributes}
        if local.variant:
            assert run_variant is not None
            results = _listed(run_variant(context, replace(local, attributes=tuple(values.items())), leaves))
        else:
            results = self.run_call(local.target, leaves, values, len(self.op.results))
        return [r.detach() for r in results], _gradients(results, incoming, leaves)

    def _split(self, tensor: Tensor | None, layout: Layout | None, side: Side) -> list[Tensor] | None:
        """Part of `tensor` on each device: its indices, of a random partial sum if the side is summed."""
        if tensor is None or layout is None:
            return None
        partials: dict[tuple[int, ...], Tensor] = {}
        summed = [axis for axis, placement in enumerate(layout.placements) if placement == PARTIAL_SUM[side]]
        keys = list(itertools.product(*(range(self.mesh.sizes[axis]) for axis in summed)))
        for key in keys[1:]:
            partials[key] = _like(tensor, self.generator)
        partials[keys[0]] = tensor.detach() - sum(partials.values()) if partials else tensor.detach()
        result = []
        for rank in range(self.mesh.size):
            coordinates = self.mesh.coordinates(rank)
            key = tuple(coordinates[axis] for axis in summed)
            result.append(self._held(partials[key], layout, coordinates).clone())
        return result

    def _held(self, tensor: Tensor, layout: Layout, coordinates: Sequence[int]) -> Tensor:
        import torch

        for dim, size in enumerate(local_sizes(tensor.shape, layout, self.mesh)):
            indices = [i for start, stop in size.intervals(self.mesh, coordinates) for i in range(start, stop)]
            tensor = tensor.index_select(dim, torch.tensor(indices, dtype=torch.int64))
        return tensor

    def _compare(self, parts: Sequence[Tensor | None], whole: Tensor, layout: Layout, side: Side) -> str:
        """Reason why the parts, summed over the summed axes, are not the right indices of the whole on every device."""
        summed = [axis for axis, placement in enumerate(layout.placements) if placement == PARTIAL_SUM[side]]
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for rank, part in enumerate(parts):
            coords = self.mesh.coordinates(rank)
            if part is None:
                return f"device {rank} has none"
            groups.setdefault(tuple(0 if axis in summed else c for axis, c in enumerate(coords)), []).append(part)
        for coordinates, group in groups.items():
            wanted = self._held(whole, layout, coordinates)
            if any(part.shape != wanted.shape for part in group):
                return f"at {coordinates} expected shape {tuple(wanted.shape)}, got {tuple(group[0].shape)}"
            error, reason = _difference(sum(group[1:], group[0]), wanted)
            self.error = max(self.error, error)
            if reason:
                return f"at {coordinates} with {layout}: {reason}"
        return ""


def _difference(got: Tensor, wanted: Tensor) -> tuple[float, str]:
    """Error relative to the largest wanted (at least 1), and what is wrong ("" = nothing)."""
    if not wanted.is_floating_point():
        return 0.0, "" if bool((got == wanted).all()) else "values differ"
    finite = wanted.isfinite()
    if not bool((finite == got.isfinite()).all()):
        return 0.0, "infinities differ"
    if not bool(finite.any()):
        return 0.0, ""
    error = float((got - wanted)[finite].abs().max())
    relative = error / max(1.0, float(wanted[finite].abs().max()))
    return relative, "" if relative <= ROUNDING else f"largest error {error:.3g}"


def _like(tensor: Tensor, generator: Any) -> Tensor:
    """Part of a sum, from millionths to thousands: it may be of any size, whatever the sum is. With numbers near one
    `clamp(-50, 50)` looks linear; products of larger ones would round too much to be compared."""
    import torch

    sizes = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) * 30 - 20
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * sizes.exp2()


def _gradients(
    results: list[Tensor], incoming: Sequence[Tensor | None], leaves: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of the leaves that need one; zeros where the results do not depend on them."""
    import torch

    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    pairs = [(r, g) for r, g in zip(results, incoming, strict=True) if g is not None and r.requires_grad]
    if not wanted or not pairs:
        return [None if leaf is None or not leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves]
    grads = torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    filled = iter(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, wanted, strict=True))
    return [next(filled) if leaf is not None and leaf.requires_grad else None for leaf in leaves]


def random_operands(case: OpCase, seed: int) -> list[Tensor | None]:
    """Operands of the case, leaves that need their gradients."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    result: list[Tensor | None] = []
    for operand in case.operands:
        if operand is None:
            result.append(None)
            continue
        dtype = getattr(torch, operand.dtype)
        if dtype.is_floating_point:
            tensor = torch.randn(operand.shape, generator=generator, dtype=dtype)
            tensor = tensor.abs() + 0.5 if operand.positive else tensor.sigmoid() if operand.unit else tensor
            tensor = tensor.requires_grad_(operand.requires_grad)
        else:
            tensor = torch.randint(operand.low, operand.high, operand.shape, generator=generator).to(dtype)
        result.append(tensor)
    return result


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def failures(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Lines, one for each strategy that is wrong."""
    for verdict in verdicts:
        if verdict.failure:
            yield f"{verdict.strategy}: {verdict.failure}"
