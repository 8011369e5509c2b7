"""Program + costs -> Timeline: streams, events, memory curve; and its Chrome trace."""

from autoshard.simulate.chrome_trace import chrome_trace, write
from autoshard.simulate.engine import simulate
from autoshard.simulate.timeline import COMPUTE, Event, Held, Timeline, axis_stream

__all__ = ["COMPUTE", "Event", "Held", "Timeline", "axis_stream", "chrome_trace", "simulate", "write"]
