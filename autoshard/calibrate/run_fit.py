"""Constants from a real run: families of operators scaled until the predicted step is the traced one.

What both the prediction and the trace have, under one name, says how much longer a family takes: products and attention
each way, operators bound by memory by kind, collectives by protocol, the optimizer. What is then left of the step is
time in which no operator runs: Python between the operators on a CPU, so each operator's launch takes longer; on a GPU
the host that issues them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoshard.cluster.hardware import Hardware
from autoshard.costs.bands import family
from autoshard.ir.graph import Graph
from autoshard.ir.program import Compute, Program
from autoshard.redistribute import CARRIED
from autoshard.rules.operators import VARIANTS, record
from autoshard.simulation import simulate
from autoshard.solvers.common.effort import ROUNDS
from autoshard.trace_comparison.differences import Comparison, Row, compare
from autoshard.trace_comparison.measured_step import BACKWARD, UPDATE, MeasuredStep, canonical
from autoshard.units import ROUNDING

SHARES = (1e-3, 4.0)  # of a bandwidth or a rate that a constant may come to
OPTIMIZER = "memory.optimizer"
MATMUL, ATTENTION, MEMORY, COLLECTIVE = "matmul", "attention", "memory", "collective"


@dataclass(frozen=True)
class RunFit:
    """`hardware` predicts the run; `changed` are the constants changed for that, by key; `ratios`: by how much each
    family was predicted too short before. `left_out`: collectives between nodes, whose links are the profile's."""

    hardware: Hardware
    changed: tuple[str, ...]
    ratios: Mapping[str, float]
    before_seconds: float
    after_seconds: float
    measured_seconds: float
    left_out: tuple[str, ...]


def run_fit(program: Program, graph: Graph, hardware: Hardware, measured: MeasuredStep) -> RunFit:
    """The run must be one of `program`."""
    fitted = hardware
    before = _compared(program, graph, hardware, measured)
    comparison = before
    first: dict[str, float] = {}
    for _ in range(ROUNDS):  # a launch that a family shares is not scaled with its rate: the rest by repetition
        ratios = _ratios(comparison, program, hardware)
        first = first or ratios
        if all(abs(ratio - 1) < ROUNDING for ratio in ratios.values()):
            break
        fitted = _scaled(fitted, ratios)
        comparison = _compared(program, graph, fitted, measured)
    fitted = _with_host_gaps(program, graph, fitted, measured)
    after = simulate(program, graph, fitted).step_seconds
    was = dict(hardware.constants)
    changed = tuple(key for key, value in fitted.constants if value != was[key])
    left_out = tuple(r.name for r in before.collectives if _members(r) > hardware.devices_per_node and _both(r))
    return RunFit(fitted, changed, first, before.step.predicted_seconds or 0.0, after, measured.step_seconds, left_out)


def _compared(program: Program, graph: Graph, hardware: Hardware, measured: MeasuredStep) -> Comparison:
    return compare(simulate(program, graph, hardware), program, graph, measured)


def _both(row: Row) -> bool:
    return bool(row.predicted_seconds and row.measured_seconds)


def _members(row: Row) -> int:
    """Ranks of a collective's group, 0 where the trace does not say."""
    return int(row.name.partition(" of ")[2] or 0)


def _ratios(comparison: Comparison, program: Program, hardware: Hardware) -> dict[str, float]:
    """Measured over predicted time by family, of operators that both sides have."""
    kinds = {canonical(i.target): _family(i) for i in program.instructions if isinstance(i, Compute)}
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in filter(_both, comparison.operators):
        name, _, phase = row.name.partition(", ")
        group = OPTIMIZER if name == UPDATE else kinds.get(name, "")
        if group:
            _add(sums[f"{group} {phase}" if group in (MATMUL, ATTENTION) else group], row)
    for row in filter(_both, comparison.collectives):
        kind = CARRIED.get(row.name.partition(" ")[0])
        if kind and _members(row) <= hardware.devices_per_node:
            for key in (f"{COLLECTIVE}.{kind.constants}", COLLECTIVE):
                _add(sums[key], row)
    return {key: real / predicted for key, (predicted, real) in sums.items()}


def _add(sums: list[float], row: Row) -> None:
    sums[0] += row.predicted_seconds or 0.0
    sums[1] += row.measured_seconds or 0.0


def _family(instruction: Compute) -> str:
    """matmul, attention, or memory with the kind that prices it."""
    group = family(instruction.target)
    kernel = VARIANTS.get(instruction.variant) or record(instruction.target)
    return f"{MEMORY}.{kernel.bandwidth}" if group == MEMORY else group


def _scaled(hardware: Hardware, ratios: Mapping[str, float]) -> Hardware:
    """Profile with every family as much slower as it was measured."""
    constants = dict(hardware.constants)

    def longer(ratio: float, seconds: tuple[str, ...], rates: tuple[str, ...]) -> None:
        constants.update({key: constants[key] * ratio for key in seconds})
        for key in rates:
            constants[key] = min(max(constants[key] / ratio, SHARES[0]), SHARES[1])

    for name, ratio in ratios.items():
        group, _, phase = name.partition(" ")
        back = ratio / ratios.get(f"{group} forward", 1.0) if phase == BACKWARD else 1.0
        if group == MATMUL and phase == BACKWARD:
            longer(back, (), ("matmul.dgrad", "matmul.wgrad"))
        elif group == ATTENTION and phase == BACKWARD:
            longer(back, (), ("attention.backward",))
        elif group in (MATMUL, ATTENTION):
            extra = {MATMUL: "matmul.depth", ATTENTION: "attention.chain"}[group]
            longer(ratio, (f"{group}.launch", extra), (f"{group}.compute", f"{group}.memory"))
        elif group == COLLECTIVE:
            longer(ratio, ("collective.launch",), ())
        elif group.startswith("collective."):
            longer(ratio, tuple(f"{group}.{key}" for key in ("step", "setup", "setup_step")), (f"{group}.efficiency",))
        else:
            constants[group] = hardware.share(group)
            longer(ratio, (), (group,))
    kinds = [ratio for name, ratio in ratios.items() if name.startswith(f"{MEMORY}.") and name != OPTIMIZER]
    launch = hardware.launch_seconds * min(kinds, default=1.0)  # all kinds have it
    return replace(hardware, constants=tuple(constants.items()), launch_seconds=launch)


def _with_host_gaps(program: Program, graph: Graph, hardware: Hardware, measured: MeasuredStep) -> Hardware:
    """Profile with the time that no operator explains put between operators: the step is then as long as measured.
    Where it is predicted longer even with no time between, none is added."""

    def too_short(seconds: float) -> bool:
        trial = _between(hardware, seconds, measured.on_device)
        return simulate(program, graph, trial).step_seconds < measured.step_seconds

    low, high = 0.0, measured.step_seconds
    while too_short(0.0) and high - low > ROUNDING * high:
        middle = (low + high) / 2
        low, high = (middle, high) if too_short(middle) else (low, middle)
    return _between(hardware, low, measured.on_device)


def _between(hardware: Hardware, seconds: float, on_device: bool) -> Hardware:
    """Profile with `seconds` of the host per operator: ahead of the device, or before each if it computes itself."""
    constants = dict(hardware.constants)
    if on_device:
        constants["host.dispatch"] = seconds
        return replace(hardware, constants=tuple(constants.items()))
    for key in ("matmul.launch", "attention.launch"):
        constants[key] += seconds
    return replace(hardware, constants=tuple(constants.items()), launch_seconds=hardware.launch_seconds + seconds)
