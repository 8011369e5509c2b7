"""Whole steps on few devices: the searched plan against every plan of the space, each simulated.

python -m benchmarks.small_steps [--devices 4] [--write]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.joint.blocks.block_line import block_line
from autoshard.joint.config_space import ConfigSpace, parallel_configs
from autoshard.joint.front_store import FrontStore, measured_replicas
from autoshard.joint.joint_search import joint_search
from autoshard.joint.step_costs import StepProblem
from autoshard.simulation.step_timeline import simulate_step
from benchmarks import harness
from tests.stage_brute_force import every_plan

PROFILE = "a100-80g-sxm"
ALLOWED = 1.005  # of the best step
FREE = 1e15  # bytes: what fits is asked of the simulated step alone


@dataclass(frozen=True)
class Case:
    """`room`: of the memory that the fastest step needs."""

    title: str
    devices: int
    batch: int
    layers: int
    width: int
    room: float


CASES = tuple(
    Case(f"{layers} layers of {width}", devices, batch, layers, width, room)
    for devices, batch, layers, width in ((4, 8, 3, 256), (4, 16, 3, 1024), (8, 16, 3, 1024), (16, 16, 2, 2048))
    for room in (1.0, 0.7)
)


def every_step(space: ConfigSpace, graph: Graph, hardware: Hardware) -> Iterator[tuple[float, float]]:
    """(seconds, bytes of the fullest device) of every plan. Equal blocks of a part can't be exchanged: what keeps most
    needs least room at the end."""
    line = block_line(graph)
    choices = list(parallel_configs(space, hardware))
    store = FrontStore(line, hardware, replicas=measured_replicas(choices))
    for choice in sorted(choices, key=lambda choice: -choice.micro_batch):  # shards are measured with the largest one
        for own in store.costs(choice.inner, choice.micro_batch) if choice.zero else ():
            store.sharded(own)
    kinds = tuple(block.kind for block in line.blocks)
    named = {block.kind for block in line.blocks if block.module}
    keeps = tuple(space.keeps if kind in named else ("all",) for kind in range(max(kinds) + 1))
    for choice in choices:
        for own in store.costs(choice.inner, choice.micro_batch):
            sharded = store.sharded(own) if choice.zero else ()
            problem = StepProblem(choice, kinds, own.costs, keeps, hardware, FREE, None, sharded)
            for plan in every_plan(problem.stage_problem):
                made = simulate_step(problem.step_costs(plan))
                yield made.step_seconds, max(made.peak_bytes)


def row(case: Case) -> tuple[str, bool]:
    """A line of the table, and whether the searched plan is near enough to the best."""
    sizes = {"batch": 4, "sequence": 128, "n_layer": case.layers, "n_embd": case.width, "n_head": 4, "vocabulary": 1000}
    graph, hardware = capture(harness.GPT2, sizes, "bf16-mixed"), load_hardware(PROFILE)
    line = block_line(graph)
    space = ConfigSpace(case.devices, case.batch, len(line.blocks), max(map(len, line.runs())))
    capacity = case.room * joint_search(graph, hardware, space, hardware.usable_memory_bytes).best.peak_bytes
    begun = time.process_time()
    found = joint_search(graph, hardware, space, capacity)
    seconds = time.process_time() - begun
    fitting = [own for own, peak in every_step(space, graph, hardware) if peak <= capacity]
    ratio, bound = found.best.seconds / min(fitting), found.bound_seconds / min(fitting)
    text = harness.cells(
        f"{case.title}, batch {case.batch}", case.devices, f"{case.room:.0%}", f"{len(fitting):,}", f"{seconds:.1f} s",
        found.best.problem.choice, f"{found.best.seconds * 1e3:.3f} ms", f"{ratio - 1:.2%}", f"{1 - bound:.2%}",
    )  # fmt: skip
    return text, 1 - 1e-9 <= ratio <= ALLOWED and bound <= 1 + 1e-9


HEADER = ("model", "devices", "memory", "plans that fit", "search", "chosen", "step", "above", "bound")


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--devices", type=int, help="cases of so many devices alone")
    options = parser.parse_args()
    good = True

    def rows() -> Iterator[str]:
        nonlocal good
        for case in CASES:
            if options.devices in (None, case.devices):
                text, near = row(case)
                good &= near
                yield text

    lines = harness.table(HEADER, rows(), 1)
    if options.write:
        harness.put("small_steps", [harness.machine(), "", *lines])
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
