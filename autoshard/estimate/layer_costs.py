"""Costs of one micro-batch in each piece of a transformer, read off the simulated Program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autoshard.cluster.hardware import Hardware
from autoshard.costs.bands import family
from autoshard.estimate.gradient_sync import parameter_collectives
from autoshard.estimate.transformer_graph import EMBEDDING, HEAD, core, layer
from autoshard.estimate.transformer_program import EXPERT, LAYERS, BuiltTransformer
from autoshard.ir.program import Collective, Compute, Instruction, Program
from autoshard.program.weight_buckets import block_of
from autoshard.rules.algebra.operator_record import Product, Work
from autoshard.rules.operators import record
from autoshard.simulation import simulate
from autoshard.simulation.timeline import COMPUTE, Event

Families = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Piece:
    """Seconds of one micro-batch; `communication_seconds` of both directions are exposed communication, and
    `dispatch_seconds` the part of it in which tokens go to their experts and back.

    `kernels`: number of operators and collectives that the host starts. `families` are seconds by what prices them (see
    costs/bands.py); they add up to those of their direction.
    """

    forward_seconds: float
    backward_seconds: float
    forward_communication_seconds: float
    backward_communication_seconds: float
    forward_kernels: int
    backward_kernels: int
    forward_families: Families = ()
    backward_families: Families = ()
    forward_dispatch_seconds: float = 0.0
    backward_dispatch_seconds: float = 0.0


@dataclass(frozen=True)
class Pieces:
    """`core` is the part of `layer` that selective recomputation runs again, `recomputed` the part that recomputation
    by operators does."""

    embedding: Piece
    layer: Piece
    core: Piece
    recomputed: Piece
    head: Piece


@lru_cache(maxsize=1024)
def pieces(built: BuiltTransformer, hardware: Hardware, compiled: bool = False) -> Pieces:
    """Costs of the program's last layer, the embedding and the head; the layer may be `compiled` by `torch.compile`."""
    slot = replace(
        built.program, gradient_buckets=(), weight_buckets=()
    )  # gradients are summed once a step, beside other slots
    events = simulate(slot, built.graph, hardware, compiled).events
    last = LAYERS - 1
    saved = saved_operators(built)
    rerun = tuple(e for e in events if e.instruction not in saved)
    paths = ((EMBEDDING, events), (layer(last), events), (core(last), events), (layer(last), rerun), (HEAD, events))
    return Pieces(*(_piece(built, group, path) for path, group in paths))


def _piece(built: BuiltTransformer, events: tuple[Event, ...], path: str) -> Piece:
    once = parameter_collectives(built.program)  # a step, not a micro-batch
    inside = [e for e in events if e.instruction is not None and e.instruction not in once]
    matching = [e for e in inside if e.module == path or e.module.startswith(f"{path}.")]
    forward, backward = ([e for e in matching if e.phase == phase] for phase in ("forward", "backward"))
    return Piece(
        forward_seconds=_seconds(forward),
        backward_seconds=_seconds(backward),
        forward_communication_seconds=_exposed(forward),
        backward_communication_seconds=_exposed(backward),
        forward_kernels=_kernels(built.program, forward),
        backward_kernels=_kernels(built.program, backward),
        forward_families=_families(built, forward),
        backward_families=_families(built, backward),
        forward_dispatch_seconds=_dispatched(forward),
        backward_dispatch_seconds=_dispatched(backward),
    )


def _kernels(program: Program, events: list[Event]) -> int:
    started = {(e.instruction, e.stream == COMPUTE) for e in events if e.instruction is not None}
    return sum(isinstance(program.instructions[i], Compute) or not computed for i, computed in started)


def _families(built: BuiltTransformer, events: Sequence[Event]) -> Families:
    seconds: dict[str, float] = {"collective": _exposed(events)}
    for event in events:
        if event.stream == COMPUTE:
            name = _family(built, event)
            seconds[name] = seconds.get(name, 0.0) + event.duration_seconds
    return tuple(seconds.items())


def families(built: BuiltTransformer, hardware: Hardware, layers: int) -> dict[str, float]:
    """Seconds of the model's micro-batch by what prices them, for `layers` layers instead of those built."""
    events = [e for e in simulate(built.program, built.graph, hardware).events if e.phase != "optimizer"]
    inside = [e for e in events if block_of(e.module)]
    block_count = max(1, len({block_of(e.module) for e in inside}))
    totals: dict[str, float] = {}
    for times, group in ((layers / block_count, inside), (1.0, [e for e in events if not block_of(e.module)])):
        for name, seconds in _families(built, [e for e in group if e.instruction is not None]):
            totals[name] = totals.get(name, 0.0) + times * seconds
    return totals


def _family(built: BuiltTransformer, event: Event) -> str:
    """Family that prices an event; a copy that belongs to a collective is memory traffic."""
    assert event.instruction is not None
    instruction = built.program.instructions[event.instruction]
    return family(built.graph.by_op[instruction.op].target) if isinstance(instruction, Compute) else "memory"


def _seconds(events: Sequence[Event]) -> float:
    """Seconds in which an event runs: a ring of attention communicates keys during attention to earlier ones."""
    total = end = 0.0
    for event in sorted(events, key=lambda event: event.start_seconds):
        total += max(0.0, event.end_seconds - max(end, event.start_seconds))
        end = max(end, event.end_seconds)
    return total


def _exposed(events: Sequence[Event]) -> float:
    """Seconds of exposed communication."""
    return _seconds(events) - _seconds([event for event in events if event.stream == COMPUTE])


def _dispatched(events: Sequence[Event]) -> float:
    """Seconds of exposed communication in which nothing but tokens travels between experts."""
    return _exposed(events) - _exposed([event for event in events if EXPERT not in event.axes])


KEPT_COLLECTIVE = "reduce_scatter"


def saved_operators(built: BuiltTransformer, index: int = LAYERS - 1) -> frozenset[int]:
    """Positions, in the program, of operators of layer `index` that are not recomputed: every second product from the
    first on, attention, and reduce-scatters (torchtitan's `_save_list` and its policy)."""
    path = layer(index)
    positions: set[int] = set()
    products = 0
    for position, instruction in enumerate(built.program.instructions):
        if instruction.module != path and not instruction.module.startswith(f"{path}."):
            continue
        if _is_product(instruction):
            products += 1
            if products % 2:
                positions.add(position)
        elif _is_saved(instruction):
            positions.add(position)
    return frozenset(positions)


def _is_product(instruction: Instruction) -> bool:
    return not isinstance(instruction, Collective) and isinstance(record(instruction.target).work, Product)


def _is_saved(instruction: Instruction) -> bool:
    if isinstance(instruction, Collective):
        return instruction.forward == KEPT_COLLECTIVE
    return record(instruction.target).work is Work.ATTENTION
