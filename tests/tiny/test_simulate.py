from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard import costs
from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.costs.operator import compute_seconds
from autoshard.errors import UsageError
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, GradientBucket, Program, WeightBucket
from autoshard.program.gradient_buckets import backward_ends
from autoshard.program.weight_buckets import scattered_until
from autoshard.simulation import COMPUTE, Timeline, axis_stream, chrome_trace, simulate
from autoshard.simulation.memory_curve import plan_memory
from autoshard.simulation.shared_storage import storage
from tests.small_programs import mlp

SHIPPED = load_hardware("a100-80g-sxm")
A100 = replace(SHIPPED, constants=tuple((key, 0.0 if key == "host.dispatch" else v) for key, v in SHIPPED.constants))
INFINITE = 1e30

programs = st.fixed_dictionaries(
    {
        "mesh": st.builds(
            lambda dp, tp: Mesh((("dp", dp), ("tp", tp))), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3])
        ),
        "rows": st.integers(1, 64),
        "width": st.integers(1, 64),
        "hidden": st.integers(1, 64),
        "layers": st.integers(1, 3),
        "zero": st.booleans(),
        "loss": st.booleans(),
    }
)


def run(hardware: Hardware = A100, **options) -> Timeline:
    graph, program = mlp(**options)
    return simulate(program, graph, hardware)


def same_streams_and_waits(timeline: Timeline) -> None:
    ends: dict[str, float] = {}
    for event in timeline.events:
        assert event.duration_seconds > 0
        assert event.start_seconds >= ends.get(event.stream, 0.0), f"{event.name} overlaps on {event.stream}"
        ends[event.stream] = event.end_seconds
        for index in event.waits:
            assert timeline.events[index].end_seconds <= event.start_seconds, f"{event.name} did not wait"


@given(options=programs)
def test_invariants(options):
    timeline = run(**options)
    same_streams_and_waits(timeline)
    busiest = max(seconds for _, seconds in timeline.busy_seconds)
    total = sum(seconds for _, seconds in timeline.busy_seconds)
    assert busiest * (1 - 1e-9) <= timeline.step_seconds <= total * (1 + 1e-9)
    assert timeline.step_seconds == max(event.end_seconds for event in timeline.events)
    assert timeline.peak_bytes == max(size for _, size in timeline.memory) >= timeline.static_bytes
    times = [time for time, _ in timeline.memory]
    assert times == sorted(set(times)) and times[0] == 0 and times[-1] <= timeline.step_seconds
    phases = [event.phase for event in timeline.events]
    assert phases == sorted(phases, key=["forward", "backward", "optimizer"].index)
    assert set(phases) == ({"forward", "backward", "optimizer"} if options["loss"] else {"forward"})
    assert sum(held.bytes for held in timeline.peak_tensors) <= timeline.peak_bytes * (1 + 1e-12)


@given(options=programs, factor=st.floats(1.0, 100.0))
def test_monotone_in_bandwidth_and_flops(options, factor):
    base = run(**options).step_seconds * (1 + 1e-9)
    links = tuple(replace(link, bandwidth=link.bandwidth * factor) for link in A100.links)
    peaks = tuple((dtype, peak * factor) for dtype, peak in A100.peaks)
    for better in (
        replace(A100, links=links),
        replace(A100, peaks=peaks),
        replace(A100, memory_bandwidth=A100.memory_bandwidth * factor),
        replace(A100, launch_seconds=A100.launch_seconds / factor),
    ):
        assert run(better, **options).step_seconds <= base


@given(options=programs)
def test_free_communication_leaves_computation(options):
    links = tuple(replace(link, bandwidth=INFINITE, latency_seconds=0.0) for link in A100.links)
    waits = ("launch", "step", "setup", "setup_step")
    constants = tuple(
        (key, 0.0 if key.startswith("collective.") and key.endswith(waits) else value) for key, value in A100.constants
    )
    timeline = run(replace(A100, links=links, constants=constants), **options)
    assert timeline.step_seconds == pytest.approx(timeline.busy(COMPUTE), rel=1e-9)
    assert timeline.busy(COMPUTE) == pytest.approx(run(**options).busy(COMPUTE), rel=1e-12)


@given(options=programs)
def test_one_device_is_the_sum_of_its_operators(options):
    graph, program = mlp(**options | {"mesh": Mesh.parse("dp=1,tp=1"), "zero": False})
    timeline = simulate(program, graph, A100)
    expected = 0.0
    for op in graph.ops:
        whole = {name: LocalTensor(t.shape, t.dtype, t.requires_grad) for name, t in graph.by_name.items()}
        operands = tuple(None if name is None else whole[name] for name in op.operands)
        expected += sum(compute_seconds(A100, graph, op, operands, tuple(whole[name] for name in op.results)))
    if options["loss"]:
        layout = program.parameters[0].layout
        updates = [costs.optimizer_seconds(A100, graph, p, layout, program.mesh) for p in graph.parameters]
        expected += math.fsum(updates) + A100.launch_seconds
    assert timeline.step_seconds == pytest.approx(expected, rel=1e-9)
    assert timeline.streams == (COMPUTE,)


def test_collectives_are_priced_as_the_search_prices_them():
    mesh = Mesh.parse("dp=2,tp=4")
    timeline = run(mesh=mesh, rows=64, width=256, hidden=512, layers=2)
    names = [(e.name, e.phase, e.stream, e.bytes) for e in timeline.events if e.stream != COMPUTE]
    activation, tp, dp = 32 * 256 * 4.0, axis_stream("tp"), axis_stream("dp")
    gradients = 2 * (256 * 128 + 128 + 128 * 256) * 4.0
    assert names == [
        ("all_reduce y0_tp", "forward", tp, activation),
        ("all_reduce y1_tp", "forward", tp, activation),
        ("all_reduce y0_tp_tp", "backward", tp, activation),  # the copy into the second layer
        ("all_reduce gradient bucket 0", "backward", dp, gradients),
    ]
    for event in timeline.events:
        if event.stream != COMPUTE:
            axis = {tp: 1, dp: 0}[event.stream]
            assert event.duration_seconds == costs.collective_seconds(A100, mesh, axis, "all_reduce", event.bytes)


def test_stored_shards_are_gathered_and_gathered_again():
    timeline = run(mesh=Mesh.parse("dp=4,tp=1"), rows=64, width=256, hidden=512, layers=1, zero=True)
    names = [(e.name, e.phase, e.reason) for e in timeline.events if e.stream == axis_stream("dp")]
    assert names == [
        ("all_gather w1_0_dp", "forward", "needed"),
        ("all_gather w1_0_dp", "backward", "gathered again: needed"),
        ("all_reduce gradient bucket 0", "backward", "the gradients of 2 parameters are partial sums over dp"),
        ("reduce_scatter w1_0_dp", "backward", "needed"),
    ]


def per_layer(program: Program) -> tuple[GradientBucket, ...]:
    """A bucket for each parameter, the last used first."""
    paths = [path for bucket in program.gradient_buckets for path in bucket.parameters]
    values = {p.path: p.value for p in program.parameters}
    ends = backward_ends(program.instructions, program.by_name, values.values(), {})
    buckets = [GradientBucket(("dp",), "float32", (path,), ends[values[path]]) for path in paths]
    return tuple(sorted(buckets, key=lambda bucket: -bucket.after))


def test_buckets_are_reduced_beside_backward_and_the_optimizer_waits():
    graph, program = mlp(Mesh.parse("dp=8,tp=1"), 8, 2048, 2048, 3)
    buckets = per_layer(program)
    timeline = simulate(replace(program, gradient_buckets=buckets), graph, A100)
    same_streams_and_waits(timeline)
    reductions = [e for e in timeline.events if e.name.startswith("all_reduce gradient")]
    copies = [e for e in timeline.events if e.name.startswith("copy gradient")]
    backward = {e.instruction: e for e in timeline.events if e.phase == "backward" and e.stream == COMPUTE}
    assert len(reductions) == len(copies) == len(buckets) == 9
    for bucket, copy, reduction in zip(buckets, copies, reductions, strict=True):
        assert backward[bucket.after].end_seconds <= copy.start_seconds < reduction.start_seconds
    last = max(e.end_seconds for e in backward.values())
    assert sum(e.start_seconds < last for e in copies) >= 6, "most are complete before backward has ended"
    update = timeline.events[-1]
    assert update.name == "adamw" and update.start_seconds >= max(e.end_seconds for e in timeline.events[:-1])
    late = tuple(replace(bucket, after=0) for bucket in buckets)
    assert timeline.step_seconds < simulate(replace(program, gradient_buckets=late), graph, A100).step_seconds


def test_a_flat_gradient_is_there_from_its_first_part_on():
    graph, program = mlp(Mesh.parse("dp=8,tp=1"), 8, 32, 32, 2)
    plan = plan_memory(program, graph)
    (flat,) = (span for span in plan.spans if span.held.name == "gradient bucket 0")
    spans = [span for span in plan.spans if span.held.kind == "gradient" and span.held.name in dict.fromkeys(
        path for bucket in program.gradient_buckets for path in bucket.parameters)]  # fmt: skip
    assert flat.start == min(span.last for span in spans) and flat.last == len(plan.bytes) - 1
    assert flat.held.bytes == sum({span.held.name: span.held.bytes for span in spans}.values())
    assert all(span.start == span.last for span in spans), "each is copied as soon as it is made"


def test_gradients_of_a_block_are_waited_for_at_the_next_block() -> None:
    """Not at the next bucket: one of another dtype follows at once in its own block."""
    groups = [(0, (1, 2), "bfloat16"), (0, (0,), "float32"), (1, (5,), "bfloat16"), (1, (4,), "float32")]
    buckets = [WeightBucket(("dp",), dtype, gathers, block) for block, gathers, dtype in groups]
    until = {(bucket.block, bucket.dtype): end for bucket, end in scattered_until(buckets)}
    assert until[1, "bfloat16"] == until[1, "float32"] == 1
    assert until[0, "bfloat16"] == until[0, "float32"] == 0


def test_a_bucket_over_two_axes_occupies_both():
    graph, program = mlp(Mesh.parse("dp=2,tp=2"), 8, 512, 512, 2)
    paths = program.gradient_buckets[0].parameters
    buckets = tuple(
        GradientBucket(axes, "float32", (path,)) for axes, path in zip([("dp", "tp"), ("tp",)], paths, strict=False)
    )
    timeline = simulate(replace(program, gradient_buckets=buckets), graph, A100)
    joint, single = (e for e in timeline.events if e.name.startswith("all_reduce gradient"))
    assert single.start_seconds >= joint.end_seconds
    flat = Mesh.parse("all=4")
    assert joint.duration_seconds == costs.collective_seconds(A100, flat, 0, "all_reduce", joint.bytes)


def test_the_mesh_must_fit_the_cluster():
    graph, program = mlp(Mesh.parse("dp=8,tp=4"), 8, 8, 8, 1)
    with pytest.raises(UsageError, match="at most 16"):
        simulate(program, graph, load_hardware("cpu-local"))


# --- memory ---------------------------------------------------------------------------------------------------------


def test_memory_of_one_layer_by_hand():
    """float32, rows 10, width 20, hidden 30; everything on one device."""
    timeline = run(mesh=Mesh.parse("dp=1,tp=1"), rows=10, width=20, hidden=30, layers=1)
    first, second = (20 * 30 + 30) * 4, 30 * 20 * 4
    assert timeline.static_bytes == 4 * (first + second)
    x, h, y = 10 * 20 * 4, 10 * 30 * 4, 10 * 20 * 4
    base = 3 * (first + second) + x  # without the gradients
    forward = [
        h,  # h
        h + h,  # h a
        h + y,  # a y
        h + y + y,  # a y y_tp
        h + y + 4,  # a y_tp loss
    ]
    backward = [  # saved a, with the gradients that are read and made
        h + y + 4,  # of loss and y_tp; the loss itself is gone
        h + y + y,
        h + y + h + second,
        h + h + h + second,
        h + second + first,  # of h; x needs no gradient
    ]
    graph, program = mlp(Mesh.parse("dp=1,tp=1"), 10, 20, 30, 1)
    sizes = plan_memory(program, graph).bytes
    assert [size - base for size in sizes] == [*forward, *backward, *[first + second] * 2]
    blocks = plan_memory(program, graph, block_bytes=512)
    assert timeline.peak_bytes == max(blocks.bytes) > max(sizes)
    assert all(span.held.bytes % 512 == 0 for span in blocks.spans)


@given(options=programs)
def test_memory_by_brute_force(options):
    """Each step's bytes from the definition, one storage at a time."""
    graph, program = mlp(**options)
    plan = plan_memory(program, graph)
    for step, size in enumerate(plan.bytes):
        alive = [span.held for span in plan.spans if span.start <= step <= span.last]
        assert size == pytest.approx(math.fsum(held.bytes for held in alive))
    count = len(program.instructions)
    roots = storage(program, graph).root
    for index, instruction in enumerate(program.instructions):
        names = (instruction.operand,) if isinstance(instruction, Collective) else instruction.operands
        held = {
            span.held.name for span in plan.spans if span.start <= index <= span.last and span.held.kind != "gradient"
        }
        known = {p.value for p in program.parameters} | held
        assert all(roots[name] in known for name in names if name is not None), "an operand is not in memory"
        if options["loss"] and not isinstance(instruction, Collective):
            back = {span.held.name for span in plan.spans if span.start <= 2 * count - 1 - index <= span.last}
            saved = [names[i] for i in graph.by_op[instruction.op].saved.operands]
            assert all(roots[name] in back | known for name in saved if name is not None), "a saved operand is gone"


def test_gathered_weights_are_not_kept():
    options = {"mesh": Mesh.parse("dp=4,tp=1"), "rows": 4, "width": 64, "hidden": 64, "layers": 3}
    graph, program = mlp(**options, zero=True)
    plan = plan_memory(program, graph)
    whole = 64 * 64 * 4
    for step in range(len(program.instructions)):
        gathered = [
            s
            for s in plan.spans
            if s.held.name.startswith("w1_") and s.held.kind == "activation" and s.start <= step <= s.last
        ]
        assert len(gathered) <= 1 and all(span.held.bytes == whole for span in gathered)
    assert plan.static_bytes < run(**options).static_bytes


def test_peak_tensors_are_the_largest():
    timeline = run(mesh=Mesh.parse("dp=1,tp=1"), rows=4096, width=64, hidden=256, layers=2)
    sizes = [held.bytes for held in timeline.peak_tensors]
    assert sizes == sorted(sizes, reverse=True)
    assert timeline.peak_tensors[0].kind in ("activation", "gradient")
    assert timeline.peak_tensors[0].bytes == 4096 * 256 * 4


# --- Chrome trace ---------------------------------------------------------------------------------------------------


def test_chrome_trace():
    timeline = run(mesh=Mesh.parse("dp=2,tp=2"), rows=8, width=16, hidden=32, layers=2)
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    events = trace["traceEvents"]
    threads = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert set(threads) == {COMPUTE, axis_stream("dp"), axis_stream("tp")}
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(timeline.events)
    for drawn, event in zip(complete, timeline.events, strict=True):
        assert drawn["tid"] == threads[event.stream]
        assert drawn["ts"] == pytest.approx(event.start_seconds * 1e6)
        assert drawn["dur"] == pytest.approx(event.duration_seconds * 1e6)
    counters = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert max(counters) == timeline.peak_bytes
    assert all({"ph", "pid", "tid", "name"} <= event.keys() for event in events)
