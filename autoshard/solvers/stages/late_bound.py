"""What a device waits for after its last backward: collectives that run once a step, each as its block's backward ends.

Blocks end in the reverse of the model's order, and their collectives take turns. So after the backward of block j, with
the blocks before it still to run, those of blocks 0 to j are left:

    exposed >= max over j of (sum_{i <= j} late_i - sum_{i < j} backward_i)

Of what is hidden the backward that it is hidden beside takes a part longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.ir.problem import Floats
from autoshard.solvers.stages.stage_problem import StageProblem


def late_seconds(late: Sequence[float] | Floats, backward: Sequence[float] | Floats, beside: float) -> Floats:
    """[k]: of the first k blocks, exactly where each has a collective; `beside`: the part of what is hidden."""
    total, hidden = (np.concatenate([[0.0], np.cumsum(own)]) for own in (late, backward))
    exposed = np.concatenate([[0.0], np.maximum.accumulate(np.maximum(total[1:] - hidden[:-1], 0.0))])
    found: Floats = exposed + min(beside, 1.0) * (total - exposed)
    return found


def least_late(problem: StageProblem, places: Sequence[int]) -> Floats:
    """[end]: below that of the first stage, where it ends at so many of `places`, whatever points its blocks have: they
    hide most where they take longest. Of several chunks the first one's backward is the last."""
    fronts = [problem.fronts[kind] for kind in problem.line]
    first = problem.of_stage(0)  # whose backward is the last
    longest = [float(first[kind].backward_seconds.max()) for kind in problem.line]
    found = late_seconds([front.late_seconds for front in fronts], longest, problem.late_beside)
    ends = np.array(places)
    if problem.chunks > 1:
        start, stop = problem.run
        ends = np.minimum(ends, start) + np.maximum(np.minimum(ends, stop) - start, 0) // problem.chunks
    least: Floats = found[ends]
    return least
