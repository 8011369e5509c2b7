"""What is in one device's memory at each step: a step is the forward (or backward) of an instruction, or the optimizer.

Static: parameters, gradients, optimizer state, buffers and inputs. A value lives from its instruction to its last
use, or where autograd keeps it until the backward of the first that saved it; values that share storage count once. The
gradient of a value lives from the backward of its last consumer to that of its producer. A weight gathered from its
shard is kept as the shard, and whole again only in the backward that needs it. Where a value has several consumers, the
gradient of each is beside the sum of those before. `working`: what operators and the runtime's variants hold while they
run (costs.temporaries); a fused optimizer holds nothing. Gradients of parameters count for the whole step, as when
steps accumulate. No allocator is modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoshard.costs.compute import LocalTensor
from autoshard.costs.memory import parameter_parts
from autoshard.costs.operator import extra_bytes
from autoshard.costs.temporaries import temporary
from autoshard.graph.model import DTYPE_BYTES, Graph
from autoshard.layout import LocalSize
from autoshard.mesh import Mesh
from autoshard.program.model import Compute, GradientBucket, Program, Value
from autoshard.simulate.storage import Facts, facts, storage
from autoshard.simulate.timeline import Held

PEAK_TENSORS = 12
_PASSES_ON = frozenset({"aten.add", "aten.clone", "aten.to"})
BUCKETS_IN_FLIGHT = 2  # as the runtime: one more is flattened before the oldest is written back


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

    def bytes_of(self, *kinds: str) -> tuple[float, ...]:
        """`bytes` of some kinds alone."""
        return levels([span for span in self.spans if span.held.kind in kinds], len(self.bytes))

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


def bucket_bytes(program: Program, bucket: GradientBucket) -> float:
    """Of the flat tensor that is all-reduced."""
    values = {p.path: p.value for p in program.parameters}
    numel = sum(local_tensor(program.value(values[path]), program.mesh).numel for path in bucket.parameters)
    return float(numel * DTYPE_BYTES[bucket.dtype])


def step_count(program: Program) -> int:
    """Forward steps; with a loss backward steps (of i: 2 * instructions - 1 - i), gradient buckets, the optimizer."""
    return 2 * len(program.instructions) + 2 if program.loss is not None else len(program.instructions)


def plan_memory(program: Program, graph: Graph) -> MemoryPlan:
    lives = _Lives(program, graph)
    steps = max(1, step_count(program))
    static = [Span(held, 0, steps - 1) for held in _static(program, graph)]
    spans = (*static, *lives.spans(), *_bucket_spans(program, steps))
    static_bytes = sum(span.held.bytes for span in static if span.held.kind != "input")
    return MemoryPlan(levels(spans, steps), spans, static_bytes)


def levels(spans: Iterable[Span], steps: int) -> tuple[float, ...]:
    """Bytes at each step."""
    delta = np.zeros(steps + 1)
    for span in spans:
        delta[span.start] += span.held.bytes
        delta[span.last + 1] -= span.held.bytes
    return tuple(np.maximum(np.cumsum(delta)[:-1], 0.0).tolist())


def _static(program: Program, graph: Graph) -> list[Held]:
    parameters = {p.tensor: p for p in (*graph.parameters, *graph.buffers)}
    held = []
    kinds = [("parameter", program.parameters), ("buffer", program.buffers)]
    for own, stored in ((own, stored) for own, group in kinds for stored in group):
        parameter = parameters[program.value(stored.value).tensor]
        parts = parameter_parts(graph, parameter, stored.layout, program.mesh)
        names = (own, "gradient", "optimizer")
        held += [Held(stored.path, kind, size) for kind, size in zip(names, parts, strict=True) if size]
    held += [Held(name, "input", _bytes(program.value(name), program.mesh)) for name in program.inputs]
    return held


def _bytes(value: Value, mesh: Mesh) -> float:
    return float(math.prod(_largest(value.local_shape, mesh)) * DTYPE_BYTES[value.dtype])


def _bucket_spans(program: Program, steps: int) -> list[Span]:
    """The flat copies in flight, at their largest."""
    sizes = [bucket_bytes(program, bucket) for bucket in program.gradient_buckets]
    window = BUCKETS_IN_FLIGHT + 1
    largest = max((sum(sizes[first : first + window]) for first in range(len(sizes))), default=0.0)
    return [Span(Held("flat gradient buckets", "gradient", largest), steps - 2, steps - 2)] if largest else []


class _Lives:
    """First and last forward use of every storage, and which instructions keep it for their backward."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self.program, self.graph = program, graph
        self.storage = storage(program, graph)
        self.made: dict[str, int] = {}
        self.used: dict[str, int] = {}
        self.kept: dict[str, list[int]] = {}  # storage -> the instructions that keep it
        self.users: dict[str, list[int]] = {}  # storage -> the instructions that make it a gradient of its own
        for index, instruction in enumerate(program.instructions):
            self._visit(index, facts(instruction, graph))

    def _visit(self, index: int, known: Facts) -> None:
        root = self.storage.root
        for name in (*known.operands, *known.results):
            if name is not None:
                self.used[root[name]] = index
        for name in known.results:
            if root[name] == name:
                self.made[name] = index
        for position, name in enumerate(known.operands):
            if name is not None and position not in known.aliases.values() and not self._passes_on(index):
                self.users.setdefault(root[name], []).append(index)
        for name in known.kept:
            self.kept.setdefault(root[name], []).append(index)

    def _passes_on(self, index: int) -> bool:
        """Whether backward gives the operands the gradient of the result itself."""
        instruction = self.program.instructions[index]
        return isinstance(instruction, Compute) and instruction.target in _PASSES_ON

    def spans(self) -> list[Span]:
        last = len(self.program.instructions) - 1
        outputs = {self.storage.root[name] for name in self.program.outputs}
        spans = []
        for name, made in self.made.items():
            held = Held(name, "activation", _bytes(self.program.value(name), self.program.mesh))
            forward = Span(held, made, last if name in outputs else self.used[name])
            spans += [forward] if self.program.loss is None else self._backward(name, made, forward)
        return [*spans, *(self._extras() if self.program.loss is not None else []), *self._working()]

    def _local(self, name: str) -> LocalTensor:
        return local_tensor(self.program.value(name), self.program.mesh)

    def _mirror(self, index: int) -> int:
        """The backward step of an instruction."""
        return 2 * len(self.program.instructions) - 1 - index

    def _backward(self, name: str, made: int, forward: Span) -> list[Span]:
        """The value with what keeps it alive, and its gradient, from its last consumer's backward to its producer's."""
        spans, held = [forward], forward.held
        if name in self.storage.gathers:
            spans += [Span(held, self._mirror(index), self._mirror(index)) for index in self.kept.get(name, [])]
        elif name in self.kept:
            spans = [Span(held, forward.start, self._mirror(self.kept[name][0]))]
        if self.program.value(name).requires_grad:
            spans.append(Span(Held(name, "gradient", held.bytes), self._mirror(self.used[name]), self._mirror(made)))
            earlier = [self._mirror(user) for user in self.users.get(name, []) if user != self.used[name]]
            spans += [Span(Held(name, "gradient", held.bytes), step, step) for step in earlier]
        return spans

    def _extras(self) -> list[Span]:
        """What operators keep beside values: masks, statistics."""
        spans = []
        for index, instruction in enumerate(self.program.instructions):
            if isinstance(instruction, Compute):
                op = self.graph.by_op[instruction.op]
                operands = tuple(None if name is None else self._local(name) for name in instruction.operands)
                results = tuple(self._local(name) for name in instruction.results)
                size = extra_bytes(self.graph, op, operands, results)
                spans += [Span(Held(op.name, "extra", size), index, self._mirror(index))] if size else []
        return spans

    def _working(self) -> list[Span]:
        spans = []
        for index, instruction in enumerate(self.program.instructions):
            if not isinstance(instruction, Compute):
                continue
            names, op = instruction.operands, self.graph.by_op[instruction.op]
            operands = tuple(None if name is None else self._local(name) for name in names)
            layouts = tuple(None if name is None else self.program.value(name).layout for name in names)
            size = temporary(self.program.mesh, op, instruction.variant, operands, layouts)
            there, back = Held(op.name, "working", size.forward), Held(op.name, "working", size.backward)
            spans += [Span(there, index, index)] if there.bytes else []
            if back.bytes and self.program.loss is not None:
                spans.append(Span(back, self._mirror(index), self._mirror(index)))
        return spans
