"""Program + costs -> Timeline: streams, events, memory curve; and its Chrome trace."""

from autoshard.simulation.chrome_trace import chrome_trace
from autoshard.simulation.engine import simulate
from autoshard.simulation.timeline import COMPUTE, Event, Held, Timeline, axis_stream

__all__ = ["COMPUTE", "Event", "Held", "Timeline", "axis_stream", "chrome_trace", "simulate"]
