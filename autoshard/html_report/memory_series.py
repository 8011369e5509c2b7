"""One device's memory as what lives when: the page stacks it by kind, and lists what is alive at a moment."""

from __future__ import annotations

import math
from typing import Any

from autoshard.html_report.memory_table import KINDS
from autoshard.html_report.timeline_series import NameTable, differences, ticks
from autoshard.ir.plan import Plan
from autoshard.simulation import Timeline
from autoshard.simulation.memory_curve import MemoryPlan


def memory_series(memory: MemoryPlan, plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """Columns of the spans: text, kind, bytes, first and last step; `starts`: when each step begins, as differences.

    Tensors that are equal in all but their name stay apart: a click shows each.
    """
    names, kinds = NameTable(), list(KINDS)
    spans = sorted(memory.spans, key=lambda span: (span.start, span.last, kinds.index(span.held.kind), span.held.name))
    return {
        "kinds": kinds,
        "kind_words": list(KINDS.values()),
        "starts": differences([ticks(seconds) for seconds in timeline.starts]),
        "name": [names.number(span.held.name) for span in spans],
        "kind": [kinds.index(span.held.kind) for span in spans],
        "bytes": [round(span.held.bytes) for span in spans],
        "first": differences([span.start for span in spans]),
        "length": [span.last - span.start for span in spans],
        "names": names.texts(),
        "limit": round(plan.capacity_bytes) if math.isfinite(plan.capacity_bytes) else None,
        "peak": timeline.peak_bytes,
    }
