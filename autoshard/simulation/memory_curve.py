"""Memory of one device at each step: a step is the forward (or backward) of an instruction, or the optimizer.

Static: parameters, optimizer state, buffers and inputs. A value lives from its instruction to its last use, or where
autograd keeps it until the backward of the first that saved it; values that share storage count once. The gradient of a
value lives from the backward of its last consumer to that of its producer. A weight gathered from its shard is kept as
the shard, and whole again only in the backward that needs it; one of a bucket that stays whole is there until its
gradient is complete, whether a backward reads it or not. Where a value has several consumers, the gradient of each is
held in addition to the sum of those before. `working`: what operators, variants of the runtime and redistributions hold
while they run (costs.temporaries, costs.buffers); a fused optimizer holds nothing. The gradient of a parameter lives
from the backward of its last use to the end of the step, as train.py drops it before the next; where steps accumulate,
for the whole step. One that is reduced in a bucket is separate until the backward of its first use completes it, and
then in the flat tensor, which is made for the first that comes. A weight that is gathered once a step is whole all the
time where steps accumulate, and so is its flat gradient under ZeRO 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from autoshard.costs.device_bytes import parameter_parts
from autoshard.errors import ROWS
from autoshard.ir.graph import DTYPE_BYTES, Graph
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.program import Compute, GradientBucket, Program
from autoshard.program.gradient_buckets import backward_ends
from autoshard.program.instruction_storage import InstructionStorage, facts
from autoshard.program.module_scopes import results_of
from autoshard.program.weight_buckets import gradient_ready_at, parameter_paths
from autoshard.rules.operators import record
from autoshard.simulation.shared_storage import storage
from autoshard.simulation.timeline import Held
from autoshard.simulation.weight_spans import flat_gradients, flat_weights, whole_weights
from autoshard.simulation.working_memory import saved_extra, working

_PASSES_ON = frozenset({"aten.add", "aten.clone", "aten.to"})


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
        return tuple(sorted(alive, key=lambda held: (-held.bytes, held.name, held.kind))[:ROWS])


def bucket_bytes(program: Program, bucket: GradientBucket) -> float:
    """Bytes of the bucket's flat tensor that is all-reduced."""
    values = {p.path: p.value for p in program.parameters}
    numel = sum(program.largest[values[path]].numel for path in bucket.parameters)
    return float(numel * DTYPE_BYTES[bucket.dtype])


def step_count(program: Program) -> int:
    """Forward steps; with a loss backward steps (of i: 2 * instructions - 1 - i), gradient buckets, the optimizer."""
    return 2 * len(program.instructions) + 2 if program.has_backward else len(program.instructions)


def plan_memory(program: Program, graph: Graph, *, accumulates: bool = False, block_bytes: float = 1.0) -> MemoryPlan:
    """Memory of a plan. `accumulates`: an earlier step left gradients, to which this one adds. `block_bytes`: each
    tensor takes a multiple of them, as the device's allocator does; `static_bytes` is of the tensors alone. Made once
    for a program: the report asks for it again."""
    known, key = program.once(_known), (id(graph), accumulates, block_bytes)
    if key not in known:
        known[key] = graph, _plan_memory(program, graph, accumulates, block_bytes)
    return known[key][1]


def _known(program: Program) -> dict[object, tuple[Graph, MemoryPlan]]:
    """Cache by address of the graph, which is kept so that no other graph gets it."""
    return {}


def _plan_memory(program: Program, graph: Graph, accumulates: bool, block_bytes: float) -> MemoryPlan:
    lives = _Lives(program, graph, accumulates)
    steps = max(1, step_count(program))
    static = [Span(held, 0, steps - 1) for held in _static(program, graph)]
    gradients = lives.gradients()
    spans = (*static, *gradients, *lives.spans())
    lasting = [
        span.held.bytes for span in (*static, *gradients) if span.held.kind != "input" and span.last == steps - 1
    ]
    blocks = tuple(_in_blocks(span, block_bytes) for span in spans) if block_bytes > 1 else spans
    return MemoryPlan(levels(blocks, steps), blocks, sum(lasting))


def _in_blocks(span: Span, block_bytes: float) -> Span:
    size = math.ceil(span.held.bytes / block_bytes) * block_bytes
    return span if size == span.held.bytes else replace(span, held=replace(span.held, bytes=size))


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
    for role, stored in ((role, stored) for role, group in kinds for stored in group):
        parameter = parameters[program.value(stored.value).tensor]
        parts = parameter_parts(graph, parameter, stored.layout, program.mesh)
        named = (role, parts[0]), ("optimizer", parts[2])
        held += [Held(stored.path, kind, size) for kind, size in named if size]
    held += [Held(name, "input", float(program.largest[name].bytes)) for name in program.inputs]
    return held


class _Lives:
    """First and last forward use of every storage, and which instructions keep it for their backward."""

    def __init__(self, program: Program, graph: Graph, accumulates: bool) -> None:
        self.program, self.graph, self.accumulates = program, graph, accumulates
        self.storage = storage(program, graph)
        values = [p.value for p in program.parameters]
        self.whole = whole_weights(program)
        together = [p for bucket in program.weight_buckets if bucket.once for p in bucket.gathers]
        self.once = {results_of(program.instructions[position])[0] for position in together}
        self.ends = backward_ends(
            program.instructions, program.by_name, values, gradient_ready_at(program.weight_buckets)
        )
        buckets = [(bucket, parameter_paths(program, bucket)) for bucket in program.weight_buckets]
        self.scattered = {path: min(bucket.gathers) for bucket, paths in buckets for path in paths}
        self.maker: dict[str, int] = {}
        self.used: dict[str, int] = {}
        self.keepers: dict[str, list[int]] = {}  # storage -> the instructions that keep it
        # A gradient is of a storage, or of a view of another size: a part, or expanded. `owner`: value -> whose it is.
        self.owner: dict[str, str] = {}
        self.views: dict[str, int] = {}  # views with a gradient of their own -> the instructions that make them
        self.read: dict[str, int] = {}  # owner -> its last reader
        self.users: dict[str, list[int]] = {}  # owner -> the instructions whose backward makes a gradient of it
        self.extra_saved: dict[int, tuple[tuple[int, ...], float]] = {}  # instruction -> see `saved_extra`
        for index, instruction in enumerate(program.instructions):
            if isinstance(instruction, Compute):
                self.extra_saved[index] = saved_extra(program, graph, instruction)
            self._visit(index, facts(instruction, graph))

    def _visit(self, index: int, known: InstructionStorage) -> None:
        root = self.storage.root
        for name in (*known.operands, *known.results):
            if name is not None:
                self.used[root[name]] = index
        for position, name in enumerate(known.results):
            source = known.operands[known.aliases[position]] if position in known.aliases else None
            self.owner[name] = name
            if root[name] == name:
                self.maker[name] = index
            elif source is not None and self.program.largest[name].bytes == self.program.largest[source].bytes:
                self.owner[name] = self.owner.get(source, source)
            else:
                self.views[name] = index
        views = any(name in self.views for name in known.results)
        for position, name in enumerate(known.operands):
            if name is None or (position in known.aliases.values() and not views):
                continue
            owner = self.owner.get(name, name)
            self.read[owner] = index
            users = self.users.setdefault(owner, [])
            passed = self._passes_on(index) or (owner in self.views and self._moves(index))
            if not passed and (index not in users or self._makes_another(index, name, known, position)):
                users.append(index)
        without = self.extra_saved[index][0] if index in self.extra_saved else ()
        for name in known.retained_without(without):
            self.keepers.setdefault(root[name], []).append(index)

    def _passes_on(self, index: int) -> bool:
        """True if backward gives the operands the gradient of the result itself."""
        instruction = self.program.instructions[index]
        return isinstance(instruction, Compute) and instruction.target in _PASSES_ON

    def _moves(self, index: int) -> bool:
        """True if backward only moves the result's gradient, as that of a copy."""
        instruction = self.program.instructions[index]
        return isinstance(instruction, Compute) and record(instruction.target).moves

    def _makes_another(self, index: int, name: str, known: InstructionStorage, position: int) -> bool:
        """Does backward make one more gradient of what an earlier operand shows? `temporary` counts both of x * x."""
        instruction = self.program.instructions[index]
        counted = not isinstance(instruction, Compute) or record(instruction.target).holds is not None
        return not (name in known.operands[:position] and counted)

    def spans(self) -> list[Span]:
        last = len(self.program.instructions) - 1
        ends = dict.fromkeys((self.storage.root[name] for name in self.program.outputs), last)
        if self.program.has_backward and not self.program.step.parts:  # beside the loss, a step has them until its end
            others = {name for name in self.program.outputs if name != self.program.loss}
            ends |= dict.fromkeys((self.storage.root[name] for name in others), self._mirror(0))
        spans = []
        for name, maker in self.maker.items():
            held = Held(name, "activation", float(self.program.largest[name].bytes))
            forward = Span(held, maker, ends.get(name, self.used[name]))
            spans += [forward] if not self.program.has_backward else self._backward(name, maker, forward)
        if not self.program.has_backward:
            return [*spans, *self._working()]
        flat = (*flat_weights(self.program, self.storage.regathers), *flat_gradients(self.program, self.accumulates))
        return [*spans, *self._view_gradients(), *self._extras(), *self._working(), *(Span(*entry) for entry in flat)]

    def gradients(self) -> list[Span]:
        """Spans of the parameters' gradients, from each one's last use, whose backward comes first. None without a
        loss: the step has no backward, whatever the program reduces when its caller runs one."""
        if not self.program.has_backward:
            return []
        end, spans = step_count(self.program) - 1, self._flat_gradients()
        flat = {path for bucket in self.program.gradient_buckets for path in bucket.parameters}
        for p in (p for p in self.program.parameters if p.trainable and not p.layout.host):
            held = Held(p.path, "gradient", float(self.program.largest[p.value].bytes))
            born = self._born(p.path, p.value, end)
            complete = self._complete(p.value) if p.path in flat else end
            spans += [Span(held, 0 if self.accumulates else born, complete), *self._summands(held, p.value)]
        return spans

    def _born(self, path: str, value: str, end: int) -> int:
        """Step where backward makes a parameter's first gradient part: with others, by their reduce-scatter."""
        if path in self.scattered:
            return self._mirror(self.scattered[path])
        return self._mirror(self.used[value]) if value in self.used else end - 1

    def _flat_gradients(self) -> list[Span]:
        """The buckets, each from the first of its gradients on."""
        end, values = step_count(self.program) - 1, {p.path: p.value for p in self.program.parameters}
        spans = []
        for number, bucket in enumerate(self.program.gradient_buckets):
            first = min(self._complete(values[path]) for path in bucket.parameters)
            held = Held(f"gradient bucket {number}", "gradient", bucket_bytes(self.program, bucket))
            spans.append(Span(held, first, end))
        return spans

    def _complete(self, name: str) -> int:
        """Step at which backward has made the last part of a parameter's gradient."""
        return self._mirror(self.ends.get(name, 0))

    def _summands(self, held: Held, name: str) -> list[Span]:
        """Spans of what each use but the last adds to the gradient. The last may be several, of views of one tensor."""
        users = list(self.users.get(name, []))
        if self.read.get(name) in users:
            users.remove(self.read[name])
        return [Span(held, self._mirror(user), self._mirror(user)) for user in users]

    def _local(self, name: str) -> LocalTensor:
        return self.program.largest[name]

    def _mirror(self, index: int) -> int:
        """The backward step of an instruction."""
        return 2 * len(self.program.instructions) - 1 - index

    def _backward(self, name: str, maker: int, forward: Span) -> list[Span]:
        """The value with what keeps it alive, and its gradient, from its last consumer's backward to its producer's."""
        spans, held = [forward], forward.held
        if name in self.whole:
            spans = [Span(held, forward.start, self._mirror(maker))]  # until its gradient is complete
            if self.accumulates and name in self.once:
                spans = [Span(replace(held, kind="parameter"), 0, step_count(self.program) - 1)]
        elif name in self.storage.gathers:
            spans += [Span(held, self._mirror(index), self._mirror(index)) for index in self.keepers.get(name, [])]
        elif name in self.keepers:
            spans = [Span(held, forward.start, max(forward.last, self._mirror(self.keepers[name][0])))]
        if self.program.value(name).requires_grad:
            grad = Held(name, "gradient", held.bytes)
            spans += self._gradient(grad, self.read.get(name, self.used[name]), maker)
        return spans

    def _gradient(self, held: Held, read: int, maker: int) -> list[Span]:
        """A gradient from its last reader's backward to its maker's, and what others add to it."""
        return [Span(held, self._mirror(read), self._mirror(maker)), *self._summands(held, held.name)]

    def _view_gradients(self) -> list[Span]:
        spans = []
        for name, maker in self.views.items():
            if name in self.read and self.program.value(name).requires_grad:
                held = Held(name, "gradient", float(self.program.largest[name].bytes))
                first, *others = self._gradient(held, self.read[name], maker)
                # that of a copy becomes the view's: it is counted after the copy's backward
                spans += [first, *others] if self.users[name] else [replace(first, start=first.start + 1)]
        return spans

    def _extras(self) -> list[Span]:
        """Spans of what operators keep in addition to values: masks, statistics."""
        spans = []
        for index, (_, size) in self.extra_saved.items():
            instruction = self.program.instructions[index]
            assert isinstance(instruction, Compute)
            spans += [Span(Held(instruction.op, "extra", size), index, self._mirror(index))] if size else []
        return spans

    def _working(self) -> list[Span]:
        spans = []
        for index, size in enumerate(working(self.program, self.graph, self.storage)):
            instruction = self.program.instructions[index]
            name = instruction.op if isinstance(instruction, Compute) else instruction.result
            spans += [Span(Held(name, "working", size.forward), index, index)] if size.forward else []
            if size.backward and self._has_backward(index):
                step = self._mirror(index)
                spans.append(Span(Held(name, "working", size.backward), step, step))
        return spans

    def _has_backward(self, index: int) -> bool:
        values = map(self.program.value, results_of(self.program.instructions[index]))
        return self.program.has_backward and any(value.requires_grad for value in values)
