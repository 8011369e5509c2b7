"""Pins applied to a formulation: which choices stay at which node, or the reason why none does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autoshard.constraints import shard_counts
from autoshard.constraints.pin_names import named
from autoshard.constraints.pins import ON_DEVICE, ON_HOST, Pin, Want
from autoshard.errors import NAMED, InfeasibleError, UsageError
from autoshard.formulation.fewer_choices import narrowed
from autoshard.formulation.formulate import Formulation, Site
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Layout, Partial, Replicate, Shard, normalise, parse_placement
from autoshard.ir.mesh import Mesh
from autoshard.rules import explain, instance
from autoshard.rules.algebra.nesting import parts_problem
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.dynamic_strategies import needs_divisor
from autoshard.rules.granularities import granularities
from autoshard.rules.host_tables import SUMMED
from autoshard.rules.operators import record
from autoshard.rules.strategy_text import axis_words
from autoshard.solvers.common.arc_consistency import Fences
from autoshard.units import format_bytes

_NARROWER = "a pattern that matches less, or one of the two pins only"
_RESULTS = "after ->, a count for each dim of each result: {}"


@dataclass(frozen=True, eq=False)
class Pinned:
    """`formulation`: only the choices of `whole` that the pins leave. `nodes`: those that a pin decided about."""

    formulation: Formulation
    nodes: frozenset[int]
    whole: Formulation
    pins: tuple[Pin, ...]


def pinned(formulation: Formulation, pins: Sequence[Pin]) -> Pinned:
    """Raises UsageError where a pin names nothing, is not offered (with the nearest that are), or two disagree."""
    keep: dict[int, list[int]] = {}
    taken: dict[int, list[int]] = {}
    by: dict[int, Pin] = {}
    for pin in pins:
        for node in (n for n in nodes_of(formulation, pin) if not pin.memory or _has_memory(formulation, n, pin)):
            fitting = choices_left(formulation, formulation.sites[node], pin)
            both = [s for s in keep.get(node, fitting) if s in fitting]
            if not both:
                name = label(formulation.graph, formulation.sites[node])
                raise UsageError(f"pins {str(by[node])!r} and {pin.text!r} contradict each other at {name}", _NARROWER)
            keep[node], by[node] = both, pin
            if pin.out_cuts is not None:
                taken |= _taken(formulation, node, pin, both)
    return Pinned(narrowed(formulation, keep, taken), frozenset(keep), formulation, tuple(pins))


def excluding(fixed: Pinned, nodes: Sequence[int], wants: Sequence[Want], memory: str) -> list[str]:
    """Pins that keep the nodes from doing what is wanted: each that does so alone, or else all of them. Empty where
    pins are not the reason, as far as forbidden pairs of choices show."""

    def possible(pins: Sequence[Pin]) -> bool:
        left = pinned(fixed.whole, pins).formulation
        try:
            Fences(narrowed(left, {n: fitting_choices(left, left.sites[n], wants, memory) for n in nodes}).problem)
        except InfeasibleError:
            return False
        return True

    if not possible(()) or possible(fixed.pins):
        return []
    return [pin.text for pin in fixed.pins if not possible([pin])] or [pin.text for pin in fixed.pins]


def pinned_nodes(formulation: Formulation, pins: Sequence[Pin]) -> frozenset[int]:
    """The nodes that the pins decide about. UsageError where a pin names nothing."""
    return frozenset(node for pin in pins for node in nodes_of(formulation, pin))


def nodes_of(formulation: Formulation, pin: Pin) -> list[int]:
    """The nodes that the pin names. UsageError where it names nothing."""
    number = {(site.kind, site.name): n for n, site in enumerate(formulation.sites)}
    return sorted(number[key] for key in named(formulation.graph, pin))


def label(graph: Graph, site: Site) -> str:
    if site.kind != "op":
        return {stored.tensor: stored.path for stored in (*graph.parameters, *graph.buffers)}.get(site.name, site.name)
    op = graph.by_op[site.name]
    return f"{op.name} ({op.target}{f' in {op.module}' if op.module else ''})"


# --- what it leaves -------------------------------------------------------------------------------------------------


def choices_left(formulation: Formulation, site: Site, pin: Pin) -> list[int]:
    """Choices of the site that fit the pin, at least one; only the graph, mesh and profile of `formulation` count.
    UsageError where there is none."""
    if pin.memory:
        return _in_memory(formulation, site, pin)
    if pin.cuts is not None:
        return _cut(formulation, site, pin, pin.cuts)
    fitting = fitting_choices(formulation, site, pin.wants)
    if not fitting:
        raise UsageError(*refusal(formulation, site, pin.wants, f"pin {pin.text!r}: "))
    return fitting


def _has_memory(formulation: Formulation, node: int, pin: Pin) -> bool:
    """True if a pin of a memory applies to this node; of a module or pattern, only its look-ups are meant."""
    site = formulation.sites[node]
    exact = len(nodes_of(formulation, pin)) == 1
    return exact or site.kind != "op" or record(formulation.graph.by_op[site.name].target).on_host


def _in_memory(formulation: Formulation, site: Site, pin: Pin) -> list[int]:
    """The choices in the memory that a pin names, of those that fit the rest of it."""
    layout_pin = replace(pin, memory="")
    every = choices_left(formulation, site, layout_pin) if pin.wants or pin.cuts is not None else range(_count(site))
    fitting = [s for s in every if (site.strategies or site.layouts)[s].host == (pin.memory == ON_HOST)]
    if not fitting:
        raise UsageError(*not_in_memory(formulation, site, pin.what, pin.memory, f"pin {pin.text!r}: "))
    return fitting


def not_in_memory(formulation: Formulation, site: Site, what: str, memory: str, quoted: str) -> tuple[str, str]:
    """(what that memory does not offer and why, the nearest that it does)."""
    mesh, host = formulation.mesh, memory == ON_HOST
    choices: Sequence[Strategy | Layout] = site.strategies or site.layouts
    offered = [choice_text(site, s, mesh) for s, choice in enumerate(choices) if choice.host == host]
    message = f"{quoted}{label(formulation.graph, site)} offers nothing like that in the memory of the {memory}"
    if offered:
        why = f" (a table lies there as it is looked up in; {SUMMED})" if host else ""
        return message + why, f"the nearest offered: {_listed(offered)}"
    has = format_bytes(formulation.hardware.host_memory_bytes)
    return f"{message} (no part of it fits the {has} of a device there)", f"--pin '{what}={ON_DEVICE}'"


def _count(site: Site) -> int:
    return len(site.strategies or site.layouts)


def fitting_choices(formulation: Formulation, site: Site, wants: Sequence[Want], memory: str = "") -> list[int]:
    """The choices that do what is wanted in the layout of the tensor, or of the operator's first result. `memory`: as
    of a pin."""
    choices: Sequence[Strategy | Layout] = site.strategies or site.layouts
    fitting = [s for s, score in enumerate(_scores(formulation, site, wants)) if score == len(wants)]
    return [s for s in fitting if not memory or choices[s].host == (memory == ON_HOST)]


def _scores(formulation: Formulation, site: Site, wants: Sequence[Want]) -> list[int]:
    """Number of the wants that each choice fulfils."""
    graph, mesh = formulation.graph, formulation.mesh
    if site.kind != "op":
        shape = graph.tensor(site.name).shape
        return [sum(_does(layout, None, want, mesh, shape) for want in wants) for layout in site.layouts]
    op = graph.by_op[site.name]
    shape = graph.tensor(op.results[0]).shape

    def does(strategy: Strategy, want: Want) -> bool:
        if want.kind == "words":
            return axis_words(op, strategy, mesh.index(want.axis), graph) == want.text
        return _does(strategy.results[0], strategy, want, mesh, shape)

    return [sum(does(strategy, want) for want in wants) for strategy in site.strategies]


def _does(layout: Layout, strategy: Strategy | None, want: Want, mesh: Mesh, shape: Sequence[int]) -> bool:
    axis = mesh.index(want.axis)
    placement = layout.placements[axis]
    if want.kind == "shard":
        return isinstance(placement, Shard) and placement.dim == (want.dim + len(shape) if want.dim < 0 else want.dim)
    if want.kind == "choice":
        choice = strategy.choices[axis] if strategy else None
        return choice is not None and want.text in (str(choice), choice.factor)
    if want.kind == "exact":
        exact = parse_placement(want.text)
        if isinstance(exact, Shard) and exact.dim >= len(shape):
            return False
        return placement == exact or normalise(layout.replace(axis, exact), shape, mesh) == layout
    if want.kind == "words":
        return False  # a stored tensor has no strategy
    return isinstance(placement, Replicate if want.kind == "replicate" else Partial)


def refusal(formulation: Formulation, site: Site, wants: Sequence[Want], quoted: str) -> tuple[str, str]:
    """(what is not offered and why, the nearest that is)."""
    graph, mesh = formulation.graph, formulation.mesh
    reasons = [reason for want in wants for reason in _reasons(formulation, site, want)]
    why = f" ({'; '.join(dict.fromkeys(reasons))})" if reasons else ""
    text, kind = ",".join(map(str, wants)), "strategy" if site.kind == "op" else "layout"
    message = f"{quoted}{label(graph, site)} offers no {kind} with {text} on {mesh}{why}"
    scores = _scores(formulation, site, wants)
    best = sorted(range(len(scores)), key=lambda s: -scores[s])
    return message, "the nearest offered: " + _listed(choice_text(site, s, mesh) for s in best)


def choice_text(site: Site, choice: int, mesh: Mesh) -> str:
    """A choice as one could pin it: `Shard(0)@dp,Replicate@tp`; of an operator, the layout of its first result."""
    if site.kind != "op":
        return layout_text(site.layouts[choice], mesh)
    strategy = site.strategies[choice]
    return layout_text(strategy.results[0], mesh) + (f",{ON_HOST}" if strategy.host else "")


def layout_text(layout: Layout, mesh: Mesh) -> str:
    placements = [f"{_torch_text(p)}@{name}" for p, name in zip(layout.placements, mesh.names, strict=True)]
    return ",".join([*placements, *([ON_HOST] if layout.host else [])])


def _torch_text(placement: Shard | Replicate | Partial) -> str:
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})" if (placement.blocks, placement.unit) == (1, 1) else str(placement)
    return type(placement).__name__


def _listed(texts: Iterable[str]) -> str:
    return " or ".join(list(dict.fromkeys(texts))[:NAMED])


def _reasons(formulation: Formulation, site: Site, want: Want) -> list[str]:
    """Reasons why an axis can't do that here, as far as the operator's rule says."""
    graph, mesh = formulation.graph, formulation.mesh
    tensor = graph.tensor(site.name if site.kind != "op" else graph.by_op[site.name].results[0])
    rank = len(tensor.shape)
    placed = parse_placement(want.text) if want.kind == "exact" else None
    dim = placed.dim if isinstance(placed, Shard) else want.dim + rank if want.dim < 0 else want.dim
    if (want.kind == "shard" or isinstance(placed, Shard)) and not 0 <= dim < rank:
        return [f"it has {rank} dims"]
    if isinstance(placed, Shard) and isinstance(placed.unit, tuple):
        return [parts_problem(tensor.shape[placed.dim], mesh.axis_size(want.axis), placed.unit)]
    if site.kind != "op":
        if want.kind != "shard" and not isinstance(placed, Shard):
            return []
        if message := needs_divisor(graph, tensor.name, dim, mesh.axis_size(want.axis)):
            return [message]
        few = tensor.shape[dim] < mesh.axis_size(want.axis)
        return [f"dim {dim} of {tensor.shape[dim]} leaves devices with nothing"] if few else []
    op = graph.by_op[site.name]
    factors: tuple[str, ...] = (want.text.partition("/")[0],)
    if want.kind == "shard":
        factors = tuple(instance(graph, op).rule.results[0].dims[dim].factors)
    if want.kind == "choice" and not {*factors} & {*instance(graph, op).rule.factors, "=", "+"}:
        return [f"its rule is {instance(graph, op)}"]
    if want.kind == "words":
        named = dict.fromkeys(axis_words(op, strategy, mesh.index(want.axis), graph) for strategy in site.strategies)
        return [f"over {want.axis} it offers: {', '.join(named)}"]
    left_out = explain(graph, op, mesh, granularities(graph, mesh))
    wanted = {*factors, *(f"{factor}@{want.axis}" for factor in factors)}
    return [f"{name}: {reason}" for name, reason in left_out if name in wanted or name == op.target]


def _cut(formulation: Formulation, site: Site, pin: Pin, wanted: Sequence[tuple[int, ...] | None]) -> list[int]:
    """Choices with these shard counts; UsageError with the reason and the nearest."""
    graph, mesh = formulation.graph, formulation.mesh
    if site.kind == "op":
        shapes = shard_counts.operand_shapes(graph, graph.by_op[site.name])
        offered = [shard_counts.of_operands(s, shapes, mesh) for s in site.strategies]
        cuts = shard_counts.matched(wanted, len(graph.by_op[site.name].operands), shapes)
        bound = instance(graph, graph.by_op[site.name])
        reason = shard_counts.problem(cuts, bound, mesh) if not isinstance(cuts, str) else cuts
    else:
        offered = [(shard_counts.counts(layout, len(graph.tensor(site.name).shape), mesh),) for layout in site.layouts]
        cuts = shard_counts.matched(wanted, 1, [(site.name, graph.tensor(site.name).shape)])
        reason = shard_counts.impossible(cuts, mesh) if not isinstance(cuts, str) else cuts
    uneven = next((lengths for _, _, lengths in pin.parts if len(lengths) not in mesh.sizes), None)
    if uneven:
        reason = f"{len(uneven)} parts of given lengths need one axis of {len(uneven)} devices, the mesh is {mesh}"
    if isinstance(cuts, str):
        rows = offered
    elif reason:
        rows = sorted(offered, key=lambda offer: shard_counts.distance(cuts, offer))
    else:
        fitting = [s for s, offer in enumerate(offered) if shard_counts.agree(cuts, offer)]
        fitting = [s for s in fitting if _in_parts(formulation, site, s, pin)]
        if fitting:
            return fitting
        rows = sorted(offered, key=lambda offer: shard_counts.distance(cuts, offer))
        reason = _divisor_reason(graph, site, cuts) or _rule_reason(formulation, site) or "no strategy cuts so"
    name = label(graph, site)
    texts = list(dict.fromkeys(map(shard_counts.text, rows)))
    more = f" ({len(texts)} in all)" if len(texts) > NAMED else ""
    raise UsageError(f"pin {pin.text!r}: {name}: {reason}", f"the nearest offered: {_listed(texts)}{more}")


def _in_parts(formulation: Formulation, site: Site, choice: int, pin: Pin) -> bool:
    """True if the choice shards in the parts that the pin lists."""
    operands: Sequence[Layout | None] = (site.layouts[choice],) if site.kind != "op" else ()
    if site.kind == "op":
        layouts = site.strategies[choice].operands
        operands = layouts if len(pin.cuts or ()) == len(layouts) else [item for item in layouts if item is not None]
    return all(
        any(shard.unit == lengths for _, shard in layout.shards(dim))
        for operand, dim, lengths in pin.parts
        for layout in [operands[operand]]
        if layout is not None
    )


def _divisor_reason(graph: Graph, site: Site, wanted: Sequence[tuple[int, ...] | None]) -> str:
    """Reason why some dynamic size does not allow the shard counts; "" if all do."""
    names = graph.by_op[site.name].operands if site.kind == "op" else (site.name,)
    for name, counts in zip(names, wanted, strict=False):
        for dim, count in enumerate(counts or ()):
            if name is not None and (message := needs_divisor(graph, name, dim, count)):
                return message
    return ""


def _rule_reason(formulation: Formulation, site: Site) -> str:
    if site.kind != "op":
        return ""
    graph, mesh = formulation.graph, formulation.mesh
    left_out = explain(graph, graph.by_op[site.name], mesh, granularities(graph, mesh))
    single = [f"{name}: {reason}" for name, reason in left_out if " " not in name]
    return "; ".join(dict.fromkeys(single[:2]))


def _free(results: Sequence[str], graph: Graph) -> str:
    """Shard counts that leave every result whole: `((1, 1),)`."""
    return str(tuple((1,) * len(graph.tensor(name).shape) for name in results))


def _taken(formulation: Formulation, node: int, pin: Pin, fitting: Sequence[int]) -> dict[int, list[int]]:
    """Value -> the layouts in which its consumers may take it, for results whose cuts the pin says."""
    graph, mesh = formulation.graph, formulation.mesh
    site = formulation.sites[node]
    if site.kind != "op" or pin.out_cuts is None:
        without = pin.text.partition("->")[0].strip()
        raise UsageError(f"pin {pin.text!r}: only an operator has results to cut", f"--pin {without!r}")
    results = graph.by_op[site.name].results
    cuts = shard_counts.matched(pin.out_cuts, len(results), [(name, graph.tensor(name).shape) for name in results])
    if isinstance(cuts, str):
        raise UsageError(f"pin {pin.text!r}: {label(graph, site)}: {cuts}", _RESULTS.format(_free(results, graph)))
    allowed: dict[int, list[int]] = {}
    for position, wanted in enumerate(cuts):
        if wanted is None:
            continue
        reason = shard_counts.result_problem(wanted, [site.strategies[s].results[position] for s in fitting], mesh)
        if reason:
            raise UsageError(f"pin {pin.text!r}: {label(graph, site)}: {reason}", "other counts after ->, or none")
        for v, value in enumerate(formulation.values):
            if value.tensor == results[position] and not value.tied:
                offered = [shard_counts.counts(layout, len(wanted), mesh) for layout in value.targets]
                allowed[v] = [t for t, cut in enumerate(offered) if cut == wanted]
                if not allowed[v]:
                    near = "the nearest offered: " + _listed(shard_counts.text([cut]) for cut in offered)
                    raise UsageError(f"pin {pin.text!r}: no consumer of {value.tensor} takes it so", near)
    return allowed
