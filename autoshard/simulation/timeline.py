"""Result of a simulation: events on streams, and a memory curve. All times are seconds from the start of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Phase = Literal["forward", "backward", "recompute", "optimizer"]
COMPUTE = "compute"
HOST_MEMORY, HOST_LINK = "host memory", "host link"  # look-ups on the host, and what passes the link to it


def axis_stream(axis: str) -> str:
    """The name of the communication stream of a mesh axis."""
    return f"communication {axis}"


class Event(NamedTuple):
    """Something that one stream did. `bytes` is what a collective moves or a computation makes, on one device.

    `instruction` is the position in the program (None for buckets and the optimizer), `waits` the positions in
    `Timeline.events` of what had to end first. `collective` is what is communicated over `axes`, "" for a computation.
    `lanes`: where it is shown, if not on the streams of its axes.
    """

    name: str
    stream: str
    start_seconds: float
    duration_seconds: float
    phase: Phase
    bytes: float
    module: str
    reason: str
    instruction: int | None = None
    waits: tuple[int, ...] = ()
    collective: str = ""
    axes: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.duration_seconds

    @property
    def streams(self) -> tuple[str, ...]:
        """Streams that it occupies: a collective over joined axes is shown on the first, and keeps every one busy."""
        return self.lanes or tuple(map(axis_stream, self.axes)) or (self.stream,)


@dataclass(frozen=True)
class Held:
    """A tensor in memory. `kind`: parameter, gradient, optimizer, buffer, input, activation, extra or working."""

    name: str
    kind: str
    bytes: float


@dataclass(frozen=True)
class Timing:
    """Times at which things run, without what they hold; as in `Timeline`."""

    events: tuple[Event, ...]
    starts: tuple[float, ...]

    @property
    def step_seconds(self) -> float:
        return max((event.end_seconds for event in self.events), default=0.0)


@dataclass(frozen=True)
class Timeline:
    """`memory` is the curve as (seconds, bytes) steps: bytes from that time on. `peak_tensors`: largest first.

    `starts[step]`: when a step of the memory plan begins (see simulation/memory_curve.py).
    """

    events: tuple[Event, ...]
    step_seconds: float
    busy_seconds: tuple[tuple[str, float], ...]  # per stream
    memory: tuple[tuple[float, float], ...]
    peak_bytes: float
    peak_at_seconds: float
    peak_tensors: tuple[Held, ...]
    static_bytes: float  # parameters, gradients, optimizer state and buffers
    starts: tuple[float, ...] = ()

    def busy(self, stream: str) -> float:
        return dict(self.busy_seconds).get(stream, 0.0)

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(stream for stream, _ in self.busy_seconds)

    @property
    def communication_seconds(self) -> float:
        """Seconds of all collectives, each counted once, and of the link to the host."""
        return sum(e.duration_seconds for e in self.events if e.stream not in (COMPUTE, HOST_MEMORY))
