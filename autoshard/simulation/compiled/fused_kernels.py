"""Seconds of blocks that `torch.compile` has compiled: each kernel of `kernel_groups` reads and writes memory once.

Forward: what it reads from outside, and what anyone outside reads of it. Backward: the gradients that come in, what
they need of the forward (what was never written is recomputed from what the kernel read), and the gradients that go
out; a gradient that an addition hands on is there already. Gradients of one value from several kernels are summed by
the kernel whose backward is the last of them, or by the one that made the value. A gradient of what was broadcast (a
norm's weight) sums along other dims: one more kernel, which reads the same again. Products, attention and collectives
cost what they cost by themselves, but that the passes which cast to float8 are joined.
"""

from __future__ import annotations

from autoshard.cluster.hardware import Hardware
from autoshard.costs.compute import cast_passes, cast_seconds
from autoshard.costs.operator import compute_seconds
from autoshard.ir.graph import Graph
from autoshard.ir.local_op import local_op
from autoshard.ir.program import Compute, Program
from autoshard.program.instruction_storage import facts
from autoshard.program.weight_buckets import block_of
from autoshard.rules.algebra.float8_products import PLAIN
from autoshard.rules.operators import record
from autoshard.simulation.compiled.kernel_groups import Kernels, elements, kernel_groups, roots
from autoshard.step_corrections.software import compiled_share

REDUCTIONS = frozenset({"normalisation", "softmax"})  # of the constants of memory: kernels with a sum along rows


def fused_seconds(program: Program, graph: Graph, hardware: Hardware) -> dict[int, tuple[float, float]]:
    """Forward and backward of every instruction in a compiled kernel: those of the kernel at its last, 0 before."""
    kernels = kernel_groups(program, graph)
    seconds: dict[int, tuple[float, float]] = {}
    for number, members in enumerate(kernels.groups):
        kernel = _Kernel(program, graph, kernels, number)
        forward, backward = kernel.forward_bytes(), kernel.backward_bytes() if program.has_backward else ()
        seconds |= dict.fromkeys(members, (0.0, 0.0))
        share = compiled_share(kernel.reduces)
        seconds[members[-1]] = (_seconds(hardware, (forward,), share), _seconds(hardware, backward, share))
    return seconds | _float8_linears(program, graph, hardware)


def _float8_linears(program: Program, graph: Graph, hardware: Hardware) -> dict[int, tuple[float, float]]:
    """Linears of the blocks that cast their factors, the passes of whose casts are joined."""
    seconds: dict[int, tuple[float, float]] = {}
    share = compiled_share(reduces=False)
    for index, step in enumerate(program.instructions):
        if not isinstance(step, Compute) or not block_of(step.module) or step.target not in PLAIN or step.variant:
            continue
        operands = tuple(None if name is None else program.largest[name] for name in step.operands)
        results = tuple(program.largest[name] for name in step.results)
        op = graph.by_op[step.op]
        local = local_op(op, operands, results, 0.0, "")
        whole, eager = compute_seconds(hardware, graph, op, operands, results), cast_seconds(hardware, local)
        joined = (sum(_pass(hardware, size, share) for size in passes) for passes in cast_passes(local, joined=True))
        there, back = (total - casts + new for total, casts, new in zip(whole, eager, joined, strict=True))
        seconds[index] = (there, back if whole[1] else 0.0)
    return seconds


def _seconds(hardware: Hardware, passes: tuple[float, ...], share: float) -> float:
    return sum((_pass(hardware, size, share) for size in passes if size), 0.0)


def _pass(hardware: Hardware, size: float, share: float) -> float:
    return hardware.launch_seconds + size / (hardware.memory_bandwidth * share)


class _Kernel:
    """Kernel of one group: values by the storage that they share (`root`)."""

    def __init__(self, program: Program, graph: Graph, kernels: Kernels, number: int) -> None:
        self.program, self.graph, self.kernels, self.number = program, graph, kernels, number
        self.root = roots(program, graph)
        self.steps: list[Compute] = []
        for index in kernels.groups[number]:
            step = program.instructions[index]
            assert isinstance(step, Compute)
            self.steps.append(step)
        self.maker = {self.root[name]: step for step in self.steps for name in step.results}
        names = (name for step in self.steps for name in step.operands if name is not None)
        self.inputs = {self.root[name]: name for name in names if self.root[name] not in self.maker}
        readers = kernels.readers
        self.stored = [n for n in self.maker if n in self._outputs or {*readers.get(n, ())} - {number}]

    @property
    def _outputs(self) -> frozenset[str]:
        return frozenset(self.root[name] for name in self.program.outputs)

    @property
    def reduces(self) -> bool:
        """True if the kernel sums along a dim."""
        small = [max(self._numel(n) for n in step.results) for step in self.steps]
        sums = (size < elements(self.program, step) for size, step in zip(small, self.steps, strict=True))
        return any(record(step.target).bandwidth in REDUCTIONS for step in self.steps) or any(sums)

    def forward_bytes(self) -> float:
        return float(sum(map(self._bytes, (*self.inputs.values(), *self.stored))))

    def backward_bytes(self) -> tuple[float, ...]:
        """Bytes of each backward kernel: of inputs read whole, and of broadcast inputs."""
        arriving = [name for name in self.stored if self._differentiable(name)]
        inputs = [name for name in self.inputs if self._differentiable(name)]
        if not arriving or not inputs:
            return ()
        incoming = sum(self._parts_of(name) * self._bytes(name) for name in arriving)
        saved = sum(self._bytes(name) for name in self._needed())
        widest = max(elements(self.program, step) for step in self.steps)
        whole = [name for name in inputs if self._numel(self.inputs[name]) == widest]
        passes: list[float] = []
        if written := self._written(whole):
            others = sum(self._others(name) * self._bytes(name) for name in whole)
            passes.append(float(incoming + saved + others + written))
        if len(whole) < len(inputs):
            passes.append(float(incoming + saved))
        return tuple(passes)

    def _differentiable(self, name: str) -> bool:
        return self.program.largest[self.inputs.get(name, name)].requires_grad

    def _bytes(self, name: str) -> int:
        return self.program.largest[name].bytes

    def _numel(self, name: str) -> int:
        return self.program.largest[name].numel

    def _parts_of(self, name: str) -> int:
        """Gradients of a value that are there when the backward of its maker begins: one, where the kernel that reads
        it first sums them."""
        readers = [r for r in self.kernels.readers.get(name, ()) if r != self.number]
        return 1 if not readers or readers[0] >= 0 else len(readers)

    def _others(self, name: str) -> int:
        """Number of gradients from other kernels that this one adds to its gradient."""
        readers = self.kernels.readers[name]
        return len(readers) - 1 if readers[0] == self.number else 0

    def _needed(self) -> set[str]:
        """Values of the forward that the backward reads."""
        needed: set[str] = set()
        waiting = [name for step in self.steps for name in map(self.root.__getitem__, facts(step, self.graph).retained)]
        while waiting:
            name = waiting.pop()
            if name in self.maker and name not in self.stored:
                waiting += [self.root[n] for n in self.maker[name].operands if n is not None]
            else:
                needed.add(self.inputs.get(name, name))
        return needed

    def _written(self, whole: list[str]) -> int:
        """Bytes of gradients of the values in `whole`, those that are one tensor once, what came in not at all."""
        gradients = {self._gradient(name): name for name in whole}
        arrived = {name for name in self.stored if self._gradient(name) == name and not self._inner(name)}
        return sum(self._bytes(name) for gradient, name in gradients.items() if gradient not in arrived)

    def _inner(self, name: str) -> list[Compute]:
        """Instructions of the kernel that read it."""
        return [step for step in self.steps if any(n and self.root[n] == name for n in step.operands)]

    def _gradient(self, name: str) -> str:
        """The value whose gradient is the same tensor: an addition hands on that of its sum."""
        inner = self._inner(name)
        arrives = name in self.stored or (name in self.inputs and self._others(name) > 0)
        if arrives or len(inner) != 1 or inner[0].target != "aten.add":
            return name
        result = inner[0].results[0]
        same = self._numel(self.inputs.get(name, name)) == self._numel(result)
        return self._gradient(self.root[result]) if same else name
