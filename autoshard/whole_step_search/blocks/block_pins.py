"""Pins in a search of whole steps, where meshes differ: what they leave of the splits of a replica.

A pin refers to the mesh of a stage: the axes dp (replicas), cp or ep if there is one, and tp, or counts of all its
devices together. Replicas split the batch and nothing else, so a strategy of a replica's devices is one of the whole
mesh, or one of several: it stays if one of these satisfies the pin.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoshard.constraints import shard_counts
from autoshard.constraints.apply_pins import choices_left, label
from autoshard.constraints.pin_names import Named, named
from autoshard.constraints.pins import ON_HOST, Pin, parse_pin
from autoshard.errors import UsageError
from autoshard.formulation.fewer_choices import narrowed
from autoshard.formulation.formulate import Formulation, Site, sites_of
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Layout, Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import Problem
from autoshard.rules.algebra.strategy import Strategy
from autoshard.whole_step_search.blocks.block_line import Marks
from autoshard.whole_step_search.blocks.context_expert_axes import CONTEXT, EXPERT, TENSOR
from autoshard.whole_step_search.blocks.stage_axes import DATA, INNER, REPLICAS, in_space, same_inside

EVERY_AXIS = Mesh(tuple((name, 1) for name in (REPLICAS, CONTEXT, EXPERT, TENSOR)))
SECOND = {CONTEXT: "context", EXPERT: "expert"}  # axes that a mesh may have, as options say them
OTHERWISE = "--mesh dp=2,tp=2 --stages 1: a mesh and stages that are given"


class PinRefused(UsageError):
    """Error: no choice on some mesh satisfies `pin`; `reason` says why."""

    def __init__(self, pin: str, error: UsageError, reason: str = "") -> None:
        super().__init__(error.message + reason, error.hint)
        self.pin = pin


def pins_together(reason: str) -> PinRefused:
    """Error for pins that leave no common choice, among themselves or with the space of whole steps."""
    return PinRefused("", UsageError(f"pins: {reason}", OTHERWISE))


def style_refused(style: str, reason: str) -> PinRefused:
    return PinRefused(style, UsageError(f"--strategy {style}: {reason}", "--strategy best"))


@dataclass(frozen=True)
class Left:
    """Choices that pins leave on one mesh, equal if these are: strategies of operators on a replica's axes; layouts of
    stored tensors on a stage's axes; splits inside a replica in which readers take a tensor. `sharded`: parameters are
    in shards over the replicas."""

    ops: tuple[tuple[str, frozenset[Strategy]], ...] = ()
    stored: tuple[tuple[Named, frozenset[Layout]], ...] = ()
    taken: tuple[tuple[str, shard_counts.Counts], ...] = ()
    sharded: bool = False

    def narrowed(self, formulation: Formulation) -> Formulation:
        """`formulation`, of a replica's mesh, restricted to what is left. UsageError if nothing is."""
        ops, stored, taken = dict(self.ops), dict(self.stored), dict(self.taken)
        keep: dict[int, list[int]] = {}
        for number, site in enumerate(formulation.sites):
            key = site.kind, site.name
            if site.kind == "op" and site.name in ops:
                keep[number] = [n for n, strategy in enumerate(site.strategies) if strategy in ops[site.name]]
            elif key in stored:
                keep[number] = [n for n, layout in enumerate(site.layouts) if self._is_inside(layout, stored[key])]
            if not keep.get(number, [0]):
                name = label(formulation.graph, site)
                raise pins_together(f"they leave nothing of {name} on {formulation.mesh}")
        closed = {v: list(targets) for v, targets in _targets(formulation, taken)}
        return narrowed(formulation, keep, closed)

    def _is_inside(self, inner: Layout, wanted: Collection[Layout]) -> bool:
        """Is `inner` one of `wanted` inside a replica? A tensor used whole may be stored in shards there."""

        def alike(layout: Layout) -> bool:
            pairs = zip(layout.placements[INNER:], inner.placements, strict=True)
            return all(there == here or (self.sharded and not isinstance(here, Shard)) for there, here in pairs)

        return any(map(alike, wanted))

    def storage(self, formulation: Formulation) -> Formulation:
        """`formulation`, of the mesh of a stage, with parameters stored as pins leave them, if they can be."""
        wanted = dict(self.stored)
        keep = {}
        for number, site in enumerate(formulation.sites):
            layouts = wanted.get((site.kind, site.name), frozenset())
            if fitting := [n for n, layout in enumerate(site.layouts) if layout in layouts]:
                keep[number] = fitting
        return narrowed(formulation, keep) if keep else formulation


NOTHING_SAID = Left()


@dataclass(frozen=True, eq=False)
class StepPins:
    """Pins as typed, `WHAT=HOW`, with what each names in the whole graph."""

    texts: tuple[str, ...] = ()
    names: tuple[tuple[Named, ...], ...] = ()
    known: dict[Mesh, tuple[Pin, ...]] = field(default_factory=dict)

    def on(self, mesh: Mesh) -> tuple[Pin, ...]:
        """Pins parsed for the mesh of a stage. PinRefused if it lacks an axis that a pin names."""
        if mesh not in self.known:
            self.known[mesh] = tuple(_parsed(text, mesh) for text in self.texts)
        return self.known[mesh]

    @cached_property
    def everything(self) -> frozenset[Named]:
        return frozenset(name for names in self.names for name in names)

    def marks(self, graph: Graph) -> Marks:
        """Operator -> what pins demand of it, of what it reads from storage, and of how it takes its operands. Equal
        blocks with equal marks stay equal."""
        marks: dict[str, list[Hashable]] = {}
        for text, pin, names in zip(self.texts, self.on(EVERY_AXIS), self.names, strict=True):
            how = text.partition("=")[2].strip()
            for kind, name in names:
                readers = graph.by_op[name].results if kind == "op" else (name,)
                if kind == "op":
                    marks.setdefault(name, []).append(how)
                for read in readers if kind != "op" or pin.out_cuts is not None else ():
                    for op, position in graph.consumers[read]:
                        marks.setdefault(op.name, []).append((position, how))
        return {name: tuple(values) for name, values in marks.items()}

    def left(
        self,
        small: PlanningContext,
        wide: PlanningContext,
        batch: Mapping[str, int],
        sharded: bool,
    ) -> Left:
        """Choices that the pins leave in `small`, of one replica's samples on its mesh; `wide` has the samples of all
        replicas, on a mesh that splits dim `batch[tensor]`. PinRefused if a pin leaves nothing."""
        mesh, inner = wide.mesh, small.mesh
        pins, there = self.on(mesh), sites_of(wide, self.everything)
        inside = sites_of(small, {key for key in there if key[0] == "op"})
        whole = Formulation(wide, Problem((), (), float("inf"), 0), (), ())
        sites = {key: _in_space(site, wide.graph, batch, mesh, sharded) for key, site in there.items()}
        ops: dict[str, frozenset[Strategy]] = {}
        stored: dict[Named, frozenset[Layout]] = {}
        taken: dict[str, shard_counts.Counts] = {}
        for text, pin, names in zip(self.texts, pins, self.names, strict=True):
            for key in (name for name in names if name in sites):
                try:
                    sites[key] = _fitting(whole, sites[key], pin)
                    taken |= dict(_taken(whole, pin, key, batch))
                except UsageError as error:
                    raise PinRefused(text, error, _of_shards(key, mesh, sharded)) from None
                site = sites[key]
                if site.kind == "op":
                    every = inside[key].strategies
                    fitting = [s for s in every if inner.size == 1 or any(same_inside(f, s) for f in site.strategies)]
                    ops[site.name] = frozenset(fitting)
                else:
                    stored[key] = frozenset(site.layouts)
        message = sharded and any(kind == "parameter" for kind, _ in stored)
        return Left(tuple(ops.items()), tuple(stored.items()), tuple(taken.items()), message)


def step_pins(graph: Graph, texts: Sequence[str]) -> StepPins:
    """Pins read from `texts`. UsageError if one can't be read, names nothing, or asks for the memory of the host."""
    pins = StepPins(tuple(texts))
    for pin in pins.on(EVERY_AXIS):
        if pin.memory == ON_HOST:
            message = (
                f"pin {pin.text!r}: tables in the memory of hosts are not offered where a whole step is searched for"
            )
            raise UsageError(f"{message} (--global-batch with --devices alone)", OTHERWISE)
    return replace(pins, names=tuple(tuple(named(graph, pin)) for pin in pins.on(EVERY_AXIS)))


def _of_shards(key: Named, mesh: Mesh, sharded: bool) -> str:
    """Sentence on how parameters lie over replicas, which their pin may contradict; "" if it plays no part."""
    if key[0] != "parameter" or mesh.sizes[DATA] == 1:
        return ""
    return (
        f"; ZeRO has parameters in shards over {REPLICAS}"
        if sharded
        else f"; without ZeRO they are whole over {REPLICAS}"
    )


def _parsed(text: str, mesh: Mesh) -> Pin:
    """Pin parsed for the mesh; the device's memory is dropped from it, as everything lies there anyway."""
    try:
        pin = parse_pin(text, mesh)
    except UsageError as error:
        options = [f"--{name}-parallel auto" for axis, name in SECOND.items() if f"@{axis}" in text]
        hint = " and ".join(options) if options and mesh != EVERY_AXIS else error.hint
        raise PinRefused(text, UsageError(error.message, hint)) from None
    return pin if pin.memory == ON_HOST else replace(pin, memory="")


def _fitting(formulation: Formulation, site: Site, pin: Pin) -> Site:
    fitting = choices_left(formulation, site, pin)
    if site.kind == "op":
        return replace(site, strategies=tuple(site.strategies[n] for n in fitting))
    return replace(site, layouts=tuple(site.layouts[n] for n in fitting))


def _in_space(site: Site, graph: Graph, batch: Mapping[str, int], mesh: Mesh, sharded: bool) -> Site:
    """`site` with the choices of a whole step: replicas split the batch, and hold parameters whole or in shards."""
    replicas = mesh.sizes[DATA] > 1
    if site.kind == "op":
        op = graph.by_op[site.name]
        every = site.strategies
        return replace(site, strategies=tuple(s for s in every if not replicas or in_space(op, s, batch)))
    cut = {layout: isinstance(layout.placements[DATA], Shard) for layout in site.layouts}
    if site.kind == "parameter":
        if not any(p.trainable for p in graph.parameters if p.tensor == site.name):
            return site
        shards = sharded and any(cut.values())
        return replace(site, layouts=tuple(layout for layout, is_cut in cut.items() if is_cut == shards))
    dim = batch.get(site.name)
    free = (layout for layout, is_cut in cut.items() if not is_cut or layout.placements[DATA].dim == dim)  # type: ignore[union-attr]
    return replace(site, layouts=tuple(free))


def _taken(
    formulation: Formulation, pin: Pin, key: Named, batch: Mapping[str, int]
) -> Iterator[tuple[str, shard_counts.Counts]]:
    """Pairs (result, counts inside a replica in which readers are to take it), for a pin with counts of all devices."""
    if pin.out_cuts is None:
        return
    graph, mesh = formulation.graph, formulation.mesh
    if key[0] != "op":
        raise UsageError(
            f"pin {pin.text!r}: only an operator has results to cut", f"{pin.text.partition('->')[0].strip()!r}"
        )
    results = graph.by_op[key[1]].results
    matched = shard_counts.matched(pin.out_cuts, len(results), [(name, graph.tensor(name).shape) for name in results])
    if isinstance(matched, str):
        raise UsageError(f"pin {pin.text!r}: {matched}", "a count for each dim of each result")
    for name, counts in zip(results, matched, strict=True):
        dim, replicas = batch.get(name), mesh.sizes[DATA]
        if counts is None:
            continue
        if dim is not None and counts[dim] % replicas:
            message = (
                f"pin {pin.text!r}: dim {dim} of {name} has the batch, which {replicas} replicas cut, not {counts[dim]}"
            )
            raise UsageError(message, OTHERWISE)
        yield name, tuple(n // replicas if d == dim else n for d, n in enumerate(counts))


def _targets(formulation: Formulation, taken: Mapping[str, shard_counts.Counts]) -> Iterator[tuple[int, list[int]]]:
    """Pairs (value, the layouts in which its readers may take it). UsageError if no layout fits."""
    for v, value in enumerate(formulation.values):
        if value.tensor in taken and not value.tied:
            wanted = taken[value.tensor]
            cuts = [shard_counts.counts(layout, len(wanted), formulation.mesh) for layout in value.targets]
            fitting = [t for t, cut in enumerate(cuts) if cut == wanted]
            if not fitting:
                raise pins_together(f"no consumer of {value.tensor} takes it cut {wanted} on {formulation.mesh}")
            yield v, fitting
