"""What one micro-batch costs in each piece of a transformer, read off the simulated Program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from autoshard.estimate.graph import EMBEDDING, HEAD, core, layer
from autoshard.estimate.program import LAYERS, Built
from autoshard.hardware import Hardware
from autoshard.program.model import Compute, Program
from autoshard.simulate import simulate
from autoshard.simulate.timeline import COMPUTE, Event


@dataclass(frozen=True)
class Piece:
    """Seconds of one micro-batch; `communication_seconds` of both is the part on communication streams.

    `kernels`: how many operators the host starts (it hardly matters to it whether they communicate too).
    """

    forward_seconds: float
    backward_seconds: float
    forward_communication_seconds: float
    backward_communication_seconds: float
    forward_kernels: int
    backward_kernels: int


@dataclass(frozen=True)
class Pieces:
    """`core` is the part of `layer` that selective recomputation runs again."""

    embedding: Piece
    layer: Piece
    core: Piece
    head: Piece


@lru_cache(maxsize=1024)
def pieces(built: Built, hardware: Hardware) -> Pieces:
    """Of the last layer of the program, the embedding and the head."""
    program = built.program
    events = simulate(program, built.graph, hardware).events
    last = LAYERS - 1
    return Pieces(*(_piece(program, events, path) for path in (EMBEDDING, layer(last), core(last), HEAD)))


def _piece(program: Program, events: tuple[Event, ...], path: str) -> Piece:
    own = [e for e in events if e.instruction is not None and (e.module == path or e.module.startswith(f"{path}."))]
    forward, backward = ([e for e in own if e.phase == phase] for phase in ("forward", "backward"))
    return Piece(
        _seconds(forward),
        _seconds(backward),
        _seconds([e for e in forward if e.stream != COMPUTE]),
        _seconds([e for e in backward if e.stream != COMPUTE]),
        _kernels(program, forward),
        _kernels(program, backward),
    )


def _kernels(program: Program, events: list[Event]) -> int:
    computed = [e.instruction for e in events if e.instruction is not None and e.stream == COMPUTE]
    return sum(isinstance(program.instructions[index], Compute) for index in computed)


def _seconds(events: list[Event]) -> float:
    return sum(event.duration_seconds for event in events)
