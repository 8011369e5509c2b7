"""What a simulated step must add up to: bytes moved, and the longest chain of what waits for what."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster.hardware import load_hardware
from autoshard.ir.graph import DTYPE_BYTES
from autoshard.ir.layout import largest_shape
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, Program
from autoshard.redistribute import LOCAL
from autoshard.simulation import COMPUTE, simulate
from tests.small_programs import mlp

A100 = load_hardware("a100-80g-sxm")
programs = st.fixed_dictionaries(
    {
        "mesh": st.builds(
            lambda dp, tp: Mesh((("dp", dp), ("tp", tp))), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3])
        ),
        "rows": st.integers(1, 16).map(lambda n: 12 * n),
        "width": st.integers(1, 16).map(lambda n: 12 * n),
        "hidden": st.integers(1, 16).map(lambda n: 12 * n),
        "layers": st.integers(1, 3),
        "zero": st.booleans(),
    }
)


def whole_bytes(program: Program, name: str, axes: tuple[str, ...]) -> float:
    """Of a value, in one group of `axes`: as if none of these cut it. All sizes divide here."""
    value = program.value(name)
    local = math.prod(largest_shape(value.shape, value.layout, program.mesh)) * DTYPE_BYTES[value.dtype]
    cut = [axis for axis in axes if str(value.layout.placements[program.mesh.index(axis)]).startswith("S")]
    return float(local * math.prod(program.mesh.axis_size(axis) for axis in cut))


@settings(max_examples=60, deadline=None)
@given(options=programs)
def test_bytes_are_conserved(options):
    """A collective moves its group's whole value, each way once; a bucket each partial gradient, once."""
    graph, program = mlp(**options)
    timeline = simulate(program, graph, A100)
    moved = Counter()
    for event in timeline.events:
        if event.stream != COMPUTE and event.instruction is not None and "again" not in event.reason:
            moved[event.instruction, event.phase] += event.bytes
    for position, step in enumerate(program.instructions):
        ways = {"forward": step.forward, "backward": step.backward} if isinstance(step, Collective) else {}
        for phase, action in ways.items():
            alone = math.prod(program.mesh.axis_size(axis) for axis in getattr(step, "axes", ())) == 1
            no_gradient = phase == "backward" and not program.value(step.operand).requires_grad
            if not action or action in LOCAL or alone or no_gradient:
                continue
            size = moved.pop((position, phase))
            assert size == whole_bytes(program, step.operand, step.axes) == whole_bytes(program, step.result, step.axes)
    assert not moved
    summed = sum(e.bytes for e in timeline.events if e.name.startswith("all_reduce gradient bucket"))
    named = [name for bucket in program.gradient_buckets for name in bucket.parameters]
    assert len(named) == len(set(named))
    assert summed == sum(whole_bytes(program, name, ()) for name in named)


@settings(max_examples=60, deadline=None)
@given(options=programs)
def test_a_step_takes_at_least_its_longest_chain(options):
    timeline = simulate(*reversed(mlp(**options)), A100)
    longest: list[float] = []
    for event in timeline.events:
        longest.append(event.duration_seconds + max((longest[index] for index in event.waits), default=0.0))
    assert max(longest) <= timeline.step_seconds * (1 + 1e-9)
    assert len(longest) > 1 and max(longest) > 0
