"""Memory that the caching allocator reserves for an estimate: its layers unrolled, their tensors allocated.

The program has two layers. Those of the model are copies of them: forward as the first, except the last one; backward
as the last, except the first one. A recomputed layer has its kept tensors from the start of its backward on. Two
micro-batches, or two steps if each drops its gradients, follow each other. A kernel's working memory is in pieces of
its largest tensor in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.cluster.hardware import Hardware
from autoshard.estimate.layer_costs import saved_operators
from autoshard.estimate.optimizer_step import stage_parameters
from autoshard.estimate.stage_memory import WORKING, loss_copies, span_bytes
from autoshard.estimate.state_bytes import (
    FLOAT32_BYTES,
    gathered_outside,
    gathered_weights,
    layer_gradients,
    resident,
    scattering,
)
from autoshard.estimate.text.caching_allocator import Life, reserved_bytes
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_graph import HEAD, core, layer
from autoshard.estimate.transformer_program import LAYERS, BuiltTransformer, build
from autoshard.ir.program import Compute, Program
from autoshard.program.module_scopes import results_of
from autoshard.simulation.memory_curve import Span, plan_memory
from autoshard.simulation.working_memory import local_tensor
from autoshard.step_corrections.software import held_bytes

PASSES = 2
_FRONT, _FIRST, _LAST, _HEAD = range(4)  # parts of the program: what is before the layers, two of them, the rest


def reserved_memory(model: Transformer, run: TrainingRun, hardware: Hardware) -> float | None:
    """Reserved bytes of a device; None with pipeline stages, whose order of slots is not modelled."""
    if run.pp > 1:
        return None
    step = _UnrolledStep(build(model, run, hardware), model, run)
    lives = [(0, PASSES * step.length - 1, size) for size in step.resident()]
    for number in range(PASSES):
        shift = number * step.length
        lives += [(first + shift, last + shift, size) for first, last, size in step.lives()]
    return float(reserved_bytes(lives) + held_bytes(run.software, run.precision).outside)


class _UnrolledStep:
    """The forward and backward of all layers, as steps: a step of the program, or one in a copy of a layer."""

    def __init__(self, built: BuiltTransformer, model: Transformer, run: TrainingRun) -> None:
        self.built, self.model, self.run = built, model, run
        self.program: Program = replace(built.program, gradient_buckets=(), weight_buckets=())
        self.modules = [getattr(i, "module", "") for i in self.program.instructions]
        first, last, head = (self._first_of(path) for path in (layer(0), layer(LAYERS - 1), HEAD))
        self.starts, self.count = (0, first, last, head), len(self.modules)
        self.each = max(last - first, head - last)
        self.forward = first + self.each * model.layers + self.count - head
        self.length = 2 * self.forward + 2
        alone = plan_memory(replace(self.program, loss=None), built.graph)
        self.gathered = held_bytes(run.software, run.precision).gathered_inputs > 0
        self.read_last = {span.held.name: span.last for span in alone.spans if span.held.kind == "activation"}

    def _first_of(self, path: str) -> int:
        return next(i for i, module in enumerate(self.modules) if module == path or module.startswith(f"{path}."))

    def at(self, step: int, copy: int) -> int:
        """Time of a step of the program; in that copy of a layer, if it belongs to a layer."""
        if step >= 2 * self.count:
            return 2 * self.forward + step - 2 * self.count
        if step >= self.count:
            return 2 * self.forward - 1 - self.at(2 * self.count - 1 - step, copy)
        part = self.part(step)
        within = step - self.starts[part]
        return within + (0, *[self.starts[_FIRST] + self.each * copy] * LAYERS, self._head)[part]

    @property
    def _head(self) -> int:
        return self.starts[_FIRST] + self.each * self.model.layers

    def part(self, step: int) -> int:
        """The part that a step of the program's forward or backward is in."""
        position = min(step, 2 * self.count - 1 - step) if step < 2 * self.count else 0
        return max(part for part, start in enumerate(self.starts) if position >= start)

    def resident(self) -> tuple[float, ...]:
        """Resident bytes: weights and states; gradients if a micro-batch finds those of another."""
        counts = stage_parameters(self.built, self.model, self.run, 0)
        weights, gradients, optimizer = resident(self.built, self.run, counts)
        outermost = gathered_outside(self.built, self.run, counts, self.model.layers)
        return weights, outermost, gradients * self.run.keeps_gradients, optimizer * (not self.run.offload)

    def lives(self) -> Iterator[Life]:
        """The lives of tensors in one micro-batch."""
        yield from self._weights()
        spans = plan_memory(self.program, self.built.graph).spans
        if self.run.recompute == "operators":
            alive = [s for s in spans if s.start < self.count <= s.last]
            yield from self._cached({span.held.name for span in alive})
        for span in spans:
            if self._is_transient(span):
                for origin, gone in self._copies(span):
                    yield from self._lives_of(span, origin, gone)

    def _cached(self, alive: set[str]) -> Iterator[Life]:
        """Lives of results that recomputation by operators keeps though no backward reads them, for every layer."""
        for step in saved_operators(self.built):
            sizes = {name: self.program.largest[name].bytes for name in results_of(self.program.instructions[step])}
            for copy in range(self.model.layers):
                at = self.at(step, copy)
                yield from ((at, 2 * self.forward - 1 - at, float(sizes[name])) for name in sizes if name not in alive)

    def _is_transient(self, span: Span) -> bool:
        """Does the span come and go with a micro-batch? Gradients of parameters are in `_weights`."""
        if span.held.kind == WORKING:
            return not self.model.fused_loss
        return span.held.kind in ("activation", "extra", "gradient") and span.last < 2 * self.count

    def _copies(self, span: Span) -> Iterator[tuple[int, int]]:
        """Pairs of layer copies: the one in which a span is made, and the one in which it ends."""
        origin, gone, top = self.part(span.start), self.part(span.last), self.model.layers - 1
        if origin == _FIRST and span.start < self.count:
            ends = 1 if gone == _LAST else 0
            yield from ((copy, copy + ends) for copy in range(top))
        elif origin == _LAST and span.start >= self.count and gone in (_FIRST, _LAST):
            ends = 1 if gone == _FIRST else 0
            yield from ((copy, copy - ends) for copy in range(top, 0, -1))
        else:
            yield (top if origin == _LAST else 0, 0 if gone == _FIRST else top)

    def _lives_of(self, span: Span, origin: int, gone: int) -> Iterator[Life]:
        first, last, size = self.at(span.start, origin), self.at(span.last, gone), span.held.bytes
        if span.held.kind == WORKING:
            pieces = self._pieces(span)
            yield from [(first, last, size / pieces)] * pieces
        elif span.start < self.count <= span.last:
            yield from self._saved_lives(span, origin, (first, last, size))
        else:
            yield first, last, size

    def _saved_lives(self, span: Span, origin: int, whole: Life) -> Iterator[Life]:
        """Lives of a value kept for backward: all the time, recomputed there, or as a shard in between."""
        first, last, size = whole
        end = self._recomputed(span.start)
        read = self.read_last.get(span.held.name, span.start)
        shard = span_bytes(span, self.built, self.gathered)
        if end is not None and self.part(read) == self.part(span.start):  # no layer hands it on
            yield first, self.at(read, origin), size
            yield self.at(2 * self.count - 1 - end, origin), last, size
        elif shard < size:
            yield first, self.at(read, origin), size
            yield first, last, shard
            yield self.at(2 * self.count - 1 - read, origin), last, size
        else:
            yield first, last, size

    def _recomputed(self, step: int) -> int | None:
        """Last step recomputed together with this step of the forward; None if it is not recomputed."""
        part = self.part(step)
        if part not in (_FIRST, _LAST) or self.run.recompute == "none":
            return None
        if self.run.recompute == "full":
            return (*self.starts, self.count)[part + 1] - 1
        if self.run.recompute == "operators":
            saved = saved_operators(self.built, part - _FIRST)
            return None if step in saved else (*self.starts, self.count)[part + 1] - 1
        path = core(part - _FIRST)
        inside = [i for i, module in enumerate(self.modules) if module == path or module.startswith(f"{path}.")]
        return inside[-1] if step in inside else None

    def _pieces(self, span: Span) -> int:
        """Pieces of a kernel's working memory: each as large as its largest tensor in float32."""
        position = min(span.start, 2 * self.count - 1 - span.start)
        instruction = self.program.instructions[position]
        named = (*(instruction.operands if isinstance(instruction, Compute) else ()), *results_of(instruction))
        values = [self.program.value(name) for name in named if name is not None]
        largest = max(local_tensor(value, self.program.mesh).numel for value in values)
        return max(1, round(span.held.bytes / (FLOAT32_BYTES * largest)))

    def _weights(self) -> Iterator[Life]:
        """Lives of layers' gathered weights and scattered gradients, and of new gradients."""
        run, built = self.run, self.built
        gathers, ahead, end = gathered_weights(built, run), int(run.overlap), self.length - 1
        of_layer = layer_gradients(built, run) * (not run.keeps_gradients)
        begun, loss = self.starts[_FIRST], self._head + self.count - self.starts[_HEAD]
        for copy in range(self.model.layers):
            start = begun + self.each * copy
            back = 2 * self.forward - start - self.each
            if gathers and run.zero == 3:
                yield max(0, start - ahead * self.each), start + self.each - 1, gathers
                yield max(loss, back - ahead * self.each), back + self.each - 1, gathers
            elif gathers:
                yield start, back + self.each - 1, gathers
            yield back, back + (1 + ahead) * self.each - 1, scattering(built, run, 1)
            yield back + self.each - 1, end, of_layer
        copies = held_bytes(run.software, run.precision).parallel_loss_copies * (run.tp > 1)
        yield loss, loss, loss_copies(self.model, run) * copies
