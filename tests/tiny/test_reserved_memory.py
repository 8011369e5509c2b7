"""Memory that allocators reserve: torch's by its rules, and the C library's in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.stage_memory import layer_saved
from autoshard.estimate.step import estimate
from autoshard.estimate.text.caching_allocator import Life, reserved_bytes
from autoshard.estimate.text.estimate_text import as_dict, text
from autoshard.estimate.text.reserved_memory import _UnrolledStep, reserved_memory
from autoshard.estimate.transformer import FSDP, TrainingRun, Transformer
from autoshard.estimate.transformer_program import build
from autoshard.simulation.memory_curve import plan_memory

# --- the caching allocator ---


MIB = 2**20
A100 = load_hardware("a100-80g-sxm")
MODEL = Transformer(4, 256, 8, 128, 1000, bias=False)
RUN = TrainingRun(8, 8, precision="fp32")


@pytest.mark.parametrize(
    ("lives", "expected"),
    [
        ([(0, 0, 1.0)], 2 * MIB),
        ([(0, 0, MIB)] * 3, 4 * MIB),  # two a small segment
        ([(0, 0, 5 * MIB)] * 4, 20 * MIB),
        ([(0, 0, 11 * MIB)], 12 * MIB),
        ([(0, 0, 100 * MIB), (1, 1, 60 * MIB), (1, 1, 40 * MIB)], 100 * MIB),  # what is left of a block serves
        ([(0, 0, 100 * MIB), (1, 1, 60 * MIB), (1, 1, 50 * MIB)], 150 * MIB),
        ([(0, 0, 30 * MIB), (0, 0, 30 * MIB), (1, 1, 60 * MIB)], 120 * MIB),  # two segments never join
        ([(0, 0, 60 * MIB), (1, 1, 30 * MIB), (1, 1, 30 * MIB), (2, 2, 60 * MIB)], 60 * MIB),  # neighbours do
        ([(0, 0, 60 * MIB), (1, 9, 20 * MIB), (2, 2, 60 * MIB)], 120 * MIB),  # what stays splits what is free
        ([(0, 0, 60 * MIB), (0, 0, 20 * MIB), (1, 9, 20 * MIB), (2, 2, 60 * MIB)], 80 * MIB),  # the smallest that holds
    ],
)
def test_the_allocators_rules(lives: list[Life], expected: int) -> None:
    assert reserved_bytes(lives) == expected


def peak(model: Transformer, run: TrainingRun) -> float:
    """Of what one micro-batch makes, unrolled."""
    step = _UnrolledStep(build(model, run, A100), model, run)
    weights = {*step._weights()}
    lives = [life for life in step.lives() if life not in weights]
    return max(sum(size for first, last, size in lives if first <= turn <= last) for turn in range(step.length))


def test_two_layers_unrolled_are_the_program() -> None:
    built = build(MODEL, RUN, A100)
    program = replace(built.program, gradient_buckets=(), weight_buckets=())
    memory = plan_memory(program, built.graph)
    spans = [s for s in memory.spans if s.held.kind in ("activation", "extra", "gradient", "working")]
    spans = [s for s in spans if s.last < 2 * len(program.instructions)]
    wanted = max(sum(s.held.bytes for s in spans if s.start <= t <= s.last) for t in range(len(memory.bytes)))
    assert peak(replace(MODEL, layers=2), RUN) == wanted


def test_a_layer_more_keeps_what_a_layer_keeps() -> None:
    """And computed again its input alone."""
    each = layer_saved(build(MODEL, RUN, A100), False)
    for recompute, more in (("none", each.layer), ("selective", each.layer - each.core), ("full", each.input)):
        run = replace(RUN, recompute=recompute)  # type: ignore[arg-type]
        few, many = (peak(replace(MODEL, layers=layers), run) for layers in (3, 8))
        assert (many - few) / 5 == pytest.approx(more, rel=0.01), recompute


def test_an_estimate_tells_what_is_reserved() -> None:
    run = TrainingRun(32, 8, 4, zero=3, precision=FSDP, overlap=True, recompute="full", software="fsdp")
    estimated = estimate(MODEL, run, A100)
    reserved = reserved_memory(MODEL, run, A100)
    assert reserved is not None and 0.95 * estimated.memory.peak < reserved < 2 * estimated.memory.peak
    assert as_dict(estimated, A100)["reserved_bytes"] == reserved
    assert "reserved by the caching allocator" in text(estimated, A100)
    stages = estimate(MODEL, replace(run, pp=2), A100)
    assert as_dict(stages, A100)["reserved_bytes"] is None and "reserved" not in text(stages, A100)
    assert reserved_memory(replace(MODEL, layers=1), run, A100) is not None


# --- freed memory that stays: in a process of its own, for it holds to its end ---


_RELEASED = """
import ctypes, resource, sys
from autoshard.system.process_memory import keep_freed
if not keep_freed():
    sys.exit("not taken")
def touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(200 << 20)
    del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first, second = touched(), touched()
assert second < 0.1 * first + 20, (first, second)
"""


def run(**said: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    return subprocess.run([sys.executable, "-c", _RELEASED], capture_output=True, text=True, env=env | said)


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_what_is_freed_is_there_for_the_next_table() -> None:
    done = run()
    if "not taken" in done.stderr:
        pytest.skip("another C library")
    assert done.returncode == 0, done.stderr


def test_what_the_environment_says_goes_before() -> None:
    assert "not taken" in run(MALLOC_ARENA_MAX="2").stderr
