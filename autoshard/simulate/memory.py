"""What is in one device's memory at each step: a step is the forward (or backward) of one instruction, or the optimizer.

Static: parameters, gradients, optimizer state, buffers and inputs. A value lives from its instruction to its last use, or
where autograd keeps it until the backward of the first that saved it; values that share storage count once. The
gradient of a value lives from the backward of its last consumer to that of its producer. No allocator is modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoshard.costs.compute import VIEWS, LocalTensor
from autoshard.costs.memory import parameter_parts
from autoshard.costs.operator import extra_share
from autoshard.graph.model import DTYPE_BYTES, Graph, Op, Saved
from autoshard.layout import LocalSize
from autoshard.mesh import Mesh
from autoshard.program.model import Collective, Compute, Instruction, Program, Value
from autoshard.simulate.timeline import Held
from autoshard.simulate.transfers import shares_storage

PEAK_TENSORS = 12


@dataclass(frozen=True)
class Span:
    """`held` is in memory at steps start <= step <= last."""

    held: Held
    start: int
    last: int


@dataclass(frozen=True)
class MemoryPlan:
    """`bytes[step]` in memory at each step, with the spans behind them."""

    bytes: tuple[float, ...]
    spans: tuple[Span, ...]
    static_bytes: float

    @property
    def peak_step(self) -> int:
        return int(np.argmax(self.bytes))

    def largest(self, step: int) -> tuple[Held, ...]:
        """The largest tensors at a step, equals in order of name."""
        alive = [span.held for span in self.spans if span.start <= step <= span.last]
        return tuple(sorted(alive, key=lambda held: (-held.bytes, held.name, held.kind))[:PEAK_TENSORS])


def local_tensor(value: Value, mesh: Mesh) -> LocalTensor:
    """The value on the device that holds most."""
    return LocalTensor(_largest(value.local_shape, mesh), value.dtype, value.requires_grad)


@lru_cache(maxsize=65536)
def _largest(sizes: tuple[LocalSize, ...], mesh: Mesh) -> tuple[int, ...]:
    return tuple(size.largest(mesh) for size in sizes)


def step_count(program: Program) -> int:
    """Forward steps, and with a loss backward steps and the optimizer: backward of i is step 2 * instructions - 1 - i."""
    return 2 * len(program.instructions) + 1 if program.loss is not None else len(program.instructions)


def plan_memory(program: Program, graph: Graph) -> MemoryPlan:
    lives = _Lives(program, graph)
    steps = max(1, step_count(program))
    static = [Span(held, 0, steps - 1) for held in _static(program, graph)]
    spans = (*static, *lives.spans(steps))
    delta = np.zeros(steps + 1)
    for span in spans:
        delta[span.start] += span.held.bytes
        delta[span.last + 1] -= span.held.bytes
    static_bytes = sum(span.held.bytes for span in static if span.held.kind != "input")
    return MemoryPlan(tuple(np.maximum(np.cumsum(delta)[:-1], 0.0).tolist()), spans, static_bytes)


def _static(program: Program, graph: Graph) -> list[Held]:
    parameters = {p.tensor: p for p in (*graph.parameters, *graph.buffers)}
    held = []
    for stored in (*program.parameters, *program.buffers):
        parameter = parameters[program.value(stored.value).tensor]
        parts = parameter_parts(graph, parameter, stored.layout, program.mesh)
        names = ("parameter" if stored in program.parameters else "buffer", "gradient", "optimizer")
        held += [Held(stored.path, kind, size) for kind, size in zip(names, parts, strict=True) if size]
    held += [Held(name, "input", _bytes(program.value(name), program.mesh)) for name in program.inputs]
    return held


def _bytes(value: Value, mesh: Mesh) -> float:
    return float(math.prod(_largest(value.local_shape, mesh)) * DTYPE_BYTES[value.dtype])


class _Lives:
    """First and last forward use of every storage, and which instructions save it."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self.program, self.graph = program, graph
        fixed = {p.value for p in (*program.parameters, *program.buffers)} | set(program.inputs)
        self.root = {name: name for name in fixed}
        self.fixed = fixed
        self.made: dict[str, int] = {}
        self.used: dict[str, int] = {}
        self.saved: dict[str, int] = {}  # storage -> the first instruction that saves it
        self.extra: list[tuple[str, float, int]] = []
        for index, instruction in enumerate(program.instructions):
            self._visit(index, instruction)
        for name in program.outputs:
            self.used[self.root.get(name, name)] = len(program.instructions) - 1

    def _visit(self, index: int, instruction: Instruction) -> None:
        operands, results, aliases, saved = _facts(instruction, self.graph)
        for name in operands:
            if name is not None:
                self.used[self.root[name]] = index
        for position, name in enumerate(results):
            source = operands[aliases[position]] if position in aliases else None
            self.root[name] = self.root[source] if source is not None else name
            if source is None:
                self.made[name] = self.used[name] = index
        kept = [operands[i] for i in saved.operands] + [results[i] for i in saved.results]
        for kept_name in kept:
            if kept_name is not None:
                self.saved.setdefault(self.root[kept_name], index)
        if saved.extra_bytes and isinstance(instruction, Compute):
            self.extra.append((instruction.op, self._extra_bytes(instruction), index))

    def _extra_bytes(self, instruction: Compute) -> float:
        op = self.graph.by_op[instruction.op]
        results = tuple(local_tensor(self.program.value(name), self.program.mesh) for name in instruction.results)
        return op.saved.extra_bytes * extra_share(self.graph, op, results)

    def spans(self, steps: int) -> list[Span]:
        differentiable = self.program.loss is not None
        mirror: Callable[[int], int] = lambda index: 2 * len(self.program.instructions) - 1 - index  # noqa: E731
        spans = []
        for name, made in self.made.items():
            value = self.program.value(name)
            size = _bytes(value, self.program.mesh)
            keeps = differentiable and name in self.saved
            last = mirror(self.saved[name]) if keeps else self.used[name]
            spans.append(Span(Held(name, "activation", size), made, last))
            if differentiable and value.requires_grad:
                # A gradient is allocated by the last consumer's backward, or seeds the loss at its own.
                spans.append(Span(Held(name, "gradient", size), mirror(self.used[name]), mirror(made)))
        if differentiable:
            spans += [Span(Held(name, "extra", size), index, mirror(index)) for name, size, index in self.extra]
        return spans


Facts = tuple[tuple[str | None, ...], tuple[str, ...], dict[int, int], Saved]


def _facts(instruction: Instruction, graph: Graph) -> Facts:
    """(operands, results, result position -> operand position whose storage it shares, what autograd saves)."""
    if isinstance(instruction, Collective):
        aliases = {0: 0} if shares_storage(instruction.before, instruction.after) else {}
        return (instruction.operand,), (instruction.result,), aliases, Saved()
    op: Op = graph.by_op[instruction.op]
    aliases = dict(op.saved.aliases)
    if op.target in VIEWS and not aliases:
        aliases = dict.fromkeys(range(len(op.results)), 0)
    return instruction.operands, instruction.results, aliases, op.saved
