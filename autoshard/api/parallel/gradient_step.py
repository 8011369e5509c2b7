"""A rank's model within a program's own autograd: forwards and backwards in any order, or a step of micro-batches."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from autoshard.api.parallel.boundary import full_value
from autoshard.api.parallel.rank_model import RankModel
from autoshard.emit.runtime import LossScaler, gathered_together, label_shares, reducing, regathering, whole_tensors
from autoshard.emit.runtime.flat_weights import Line
from autoshard.graph_capture.tracing import ONE_BY_ONE

_STEPS = count(1)  # forwards of this process: dropout differs in each, alike on all ranks
_DRAWN: dict[int, int] = {}  # what torch's generator gave for a forward -> its step
_LINES = count(1)


def run_on_ranks(model: RankModel, inputs: list[Tensor], step: GradientStep) -> list[Tensor]:
    """The local outputs in the original's order, from local inputs."""
    program = model.program
    model.mesh.random.step = _step_of_forward() if model.draws else next(_STEPS)
    regathers = model.source.GATHERS_AGAIN and torch.is_grad_enabled()
    with step.gathering(), regathering() if regathers else contextlib.nullcontext():
        result = model.module(*inputs)
    outputs = list(result) if isinstance(result, tuple) else [result]
    if program.loss is not None:
        outputs.insert(program.outputs.index(program.loss), outputs.pop(0))
    step.watch(outputs)
    return outputs


def _step_of_forward() -> int:
    """A new step number. A forward that torch.utils.checkpoint runs again in backward has the number of the first run:
    it is recognised by the numbers that torch's generators give, whose state is restored."""
    drawn = int(torch.randint(2**62, (), device="cpu"))
    if _backward() >= 0 and drawn in _DRAWN:
        return _DRAWN[drawn]
    step = _DRAWN[drawn] = next(_STEPS)
    while len(_DRAWN) > ONE_BY_ONE:
        _DRAWN.pop(next(iter(_DRAWN)))
    return step


def _backward() -> int:
    """The backward that this thread is in; -1 for none."""
    return int(torch._C._current_graph_task_id())


class GradientStep:
    """Sums gradients over devices during each backward through a rank's model, as in a package.

    They are added to what earlier backwards left, as by autograd. A backward that an error ended leaves that alone.
    Each forward has a line of weights that are gathered together; it lives as long as its graph.
    """

    def __init__(self, model: RankModel) -> None:
        self.model, self.open = model, contextlib.ExitStack()
        self.lines: weakref.WeakSet[Line] = weakref.WeakSet()  # of forwards without a backward so far
        self.spent: weakref.WeakSet[Line] = weakref.WeakSet()
        self.running, self.backward = False, -1

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by original name, as they are at the first forward."""
        return self.model.parameters()

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """Context of a forward: blocks of weights are gathered together, one ahead, in it and in its backward."""
        buckets = self.model.source.WEIGHT_BUCKETS
        if not buckets:
            yield
            return
        line = Line(self.model.mesh, self.parameters, buckets, next(_LINES))
        try:
            yield
        finally:
            if torch.is_grad_enabled():
                line.hide()
                self.lines.add(line)
            else:
                line.leave()

    def watch(self, outputs: list[Tensor]) -> None:
        """Begins at the first gradient that reaches one of these; where a backward makes them again, it goes on."""
        if self.running and self.backward != _backward():
            self._abandon()
        if self.model.buckets or self.model.source.WEIGHT_BUCKETS:
            for output in outputs:
                if output.grad_fn is not None:
                    output.grad_fn.register_prehook(self._begin)

    def _begin(self, _: Any) -> None:
        if not self.running:
            self.running, self.backward = True, _backward()
            self.open = contextlib.ExitStack()
            several = max(1, len(self.lines))  # a forward's gradients come by themselves
            model, parameters = self.model, self.parameters
            self.open.enter_context(reducing(model.mesh, parameters, model.buckets, several, others_complete=True))
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.running = False
        for line in self._used():
            line.finish()
            line.rewind()
        self.open.close()

    def _used(self) -> list[Line]:
        """Lines that this backward went through, moved to `spent`: in the order of their forwards, on all devices."""
        used = sorted((line for line in (*self.lines, *self.spent) if line.is_used), key=lambda line: line.number)
        for line in used:
            self.lines.discard(line)
            self.spent.add(line)
        return used

    def _abandon(self) -> None:
        self.running = False
        for line in self._used():
            line.rewind()
        ended = RuntimeError("the backward was ended by an error")
        with contextlib.suppress(RuntimeError):
            self.open.__exit__(RuntimeError, ended, None)


# --- a step of several micro-batches --------------------------------------------------------------------------------


def step_gradients(model: RankModel, batches: Sequence[Sequence[Tensor]], scaler: LossScaler | None = None) -> Tensor:
    """Makes gradients from each micro-batch's local inputs, as train.py does. Returns the mean loss, on every rank."""
    source, mesh, parameters = model.source, model.mesh, model.parameters()
    mesh.random.step = next(_STEPS)
    shares: Sequence[Sequence[Tensor]] = [()] * len(batches)
    if len(batches) > 1:
        shares = _shares(model, batches)
    losses = []
    after, backwards = (len(batches) if source.ZERO in levels else 1 for levels in ((1,), (0, 1, 2)))
    together = partial(gathered_together, mesh, parameters, source.WEIGHT_BUCKETS, after, backwards)
    nothing = contextlib.nullcontext
    reduction = reducing(mesh, parameters, model.buckets, len(batches), others_complete=True)
    with reduction, together() if source.ZERO < 3 else nothing():
        for number, (inputs, labels) in enumerate(zip(batches, shares, strict=True)):
            regather = regathering() if source.GATHERS_AGAIN else nothing()
            with mesh.micro_batch(number, labels), together() if source.ZERO == 3 else nothing(), regather:
                result = model.module(*inputs)
                loss = result[0] if isinstance(result, tuple) else result
                share = loss / len(batches)
                (share if scaler is None else scaler.scale(share)).backward()
            losses.append(loss.detach())
    name = model.program.loss
    assert name is not None
    return full_value(torch.stack(losses).mean(0), (), str(model.program.value(name).layout), mesh)


def _shares(model: RankModel, batches: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Share of each micro-batch in the labels of the step, for each mean over labels."""
    labels = model.source.build_labels(model.mesh) if model.source.LABEL_COUNTS else None
    targets = [() if labels is None else labels(*inputs) for inputs in batches]
    every = [(one,) if isinstance(one, Tensor) else one for one in targets]
    counts = model.source.LABEL_COUNTS
    weights = whole_tensors(model.module, (name for *_, name in counts))
    shares: list[list[Tensor]] = label_shares(model.mesh, every, counts, weights)
    return shares
