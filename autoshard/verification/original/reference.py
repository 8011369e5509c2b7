"""Runs the original model on one device in float64, for comparison with every rank's tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.graph_capture.tracing.call_caches import attributes_put_back, leaves
from autoshard.graph_capture.tracing.python_state import modes_put_back
from autoshard.graph_capture.two_runs.modes import set_mode
from autoshard.ir.graph import SAME, Graph
from autoshard.program.label_counts import label_means
from autoshard.verification.original.float64 import exact_precision, limits_of, widened
from autoshard.verification.original.micro_batches import at, label_shares, sharing
from autoshard.verification.original.optimizers import Stepping
from autoshard.verification.original.random_draws import exact_dropout

State = dict[str, torch.Tensor]
MakeOptimizer = Callable[[list[torch.nn.Parameter]], Stepping]
Batch = Sequence[torch.Tensor]

CLIP = 0.1  # of a step's norm or of 1: rounding noise in gradients that are truly zero stays far below AdamW's eps
TIGHT_STEPS = (True, False, True)  # clipped or not, in turns


@dataclass(frozen=True)
class ReferenceStep:
    """One optimizer step of the reference: global tensors, of its micro-batches one after another. `norm` is the
    gradients' norm before clipping."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    norm: float
    parameters: State
    buffers: State
    max_norm: float = math.inf

    @property
    def clipped(self) -> bool:
        return self.norm > self.max_norm


@dataclass(frozen=True)
class Reference:
    """`parameters` and `buffers` are those before the first step, `gradients` the first step's, before clipping.
    `micro_batches`: of each step. `evaluation`: outputs of `model.eval()` for the first micro-batch, before the first
    step, if a package evaluates; `not_evaluated`: why they can't be compared."""

    parameters: State
    buffers: State
    gradients: State
    steps: tuple[ReferenceStep, ...]
    seed: int
    micro_batches: int = 1
    evaluation: tuple[torch.Tensor, ...] = ()
    not_evaluated: str = ""

    @property
    def clipped_steps(self) -> int:
        return sum(step.clipped for step in self.steps)

    @property
    def finite(self) -> bool:
        """Is every output and gradient a number?"""
        outputs = (output for step in self.steps for output in step.outputs)
        return all(bool(torch.isfinite(x).all()) for x in (*outputs, *self.gradients.values()))


def run_reference(
    module: torch.nn.Module,
    graph: Graph,
    batches: Sequence[Batch],
    make_optimizer: MakeOptimizer,
    seed: int,
    literal: torch.dtype = torch.float32,
    micro_batches: int = 1,
) -> Reference:
    """Trains `module` (already randomised, float64) one step for each global batch; without a loss, only runs it.

    Numbers in its code are rounded as in `literal`. A batch has the inputs of its micro-batches one after another.
    """
    before = _parameters(module), _buffers(module)
    first = batches[0][: len(batches[0]) // micro_batches]
    evaluation, why = _evaluation(module, graph, first, seed, literal)
    gradients: State = {}
    steps = []
    for grads, step in trained(module, graph, batches, make_optimizer, seed, literal, micro_batches=micro_batches):
        gradients = gradients or grads
        steps.append(step)
    return Reference(*before, gradients, tuple(steps), seed, micro_batches, evaluation, why)


def _evaluation(
    module: torch.nn.Module, graph: Graph, inputs: Batch, seed: int, literal: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], str]:
    """Outputs in evaluation, if packages of the graph evaluate, and the reason if they can't be compared."""
    if graph.evaluation != SAME or graph.loss is None or graph.buffer_updates:
        return (), ""
    first = _buffers(module)
    try:
        with (
            modes_put_back(module),
            attributes_put_back(module),
            exact_precision(literal, graph.precision == "fp32"),
            limits_of(literal),
            exact_dropout(seed, 0) as drawing,
        ):
            module.eval()
            outputs = outputs_of(module(*widened(inputs)))
    except Exception as error:  # the model's own code
        return (), f"--eval-data: the original fails after model.eval() ({type(error).__name__})"
    finally:
        with torch.no_grad():
            for path, buffer in module.named_buffers():
                buffer.copy_(first[path])
    if drawing.drawn:
        return (), "--eval-data: the model draws random numbers after model.eval(), too"
    return tuple(output.detach().clone() for output in outputs), ""


def trained(
    module: torch.nn.Module,
    graph: Graph,
    batches: Sequence[Batch],
    make_optimizer: MakeOptimizer,
    seed: int,
    literal: torch.dtype = torch.float32,
    max_norms: Sequence[float] = (),
    micro_batches: int = 1,
) -> Iterator[tuple[State, ReferenceStep]]:
    """Gradients before clipping (of the first step) and outcome of each step. `max_norms`: chosen if not given."""
    if not isinstance(module, torch.fx.GraphModule):  # an exported program keeps the mode it was exported in
        set_mode(module, graph.training)
    trainable = [p for p in module.parameters() if p.requires_grad]
    first = _buffers(module)
    with exact_precision(literal, graph.precision == "fp32"):
        optimizer = make_optimizer(trainable) if graph.loss is not None else None
        for number, batch in enumerate(batches):
            module.zero_grad(set_to_none=True)
            with limits_of(literal):
                outputs = accumulated(module, graph, widened(batch), seed, number, micro_batches)
            norm = _gradient_norm(trainable) if graph.loss else 0.0
            gradients = _gradients(module) if number == 0 else {}
            max_norm = max_norms[number] if max_norms else _max_norm(norm, number)
            if optimizer is not None:
                torch.nn.utils.clip_grad_norm_(trainable, max_norm)
                optimizer.step()
            detached = tuple(output.detach().clone() for output in outputs)
            buffers = _buffers(module) | {path: first[path] for path in refilled(module, first)}
            yield gradients, ReferenceStep(tuple(batch), detached, norm, _parameters(module), buffers, max_norm)
    module.zero_grad(set_to_none=True)


def _max_norm(norm: float, number: int) -> float:
    tight = TIGHT_STEPS[number % len(TIGHT_STEPS)]
    return CLIP * min(norm, 1.0) if tight else norm / CLIP  # active, or leaving the gradients as they are


def accumulated(
    module: torch.nn.Module, graph: Graph, batch: Batch, seed: int, step: int, micro_batches: int, scale: float = 1.0
) -> list[torch.Tensor]:
    """Outputs of each micro-batch of a step, one after another; the gradients are those of the mean of the losses,
    times `scale`."""
    count = len(batch) // micro_batches
    batches = [batch[i * count : (i + 1) * count] for i in range(micro_batches)]
    shares = None
    if micro_batches > 1 and graph.loss is not None:
        shares = label_shares(module, batches, seed, step, [*graph.once(label_means).values()])
    all_outputs: list[torch.Tensor] = []
    for number, inputs in enumerate(batches):
        counting = sharing(shares[number]) if shares is not None else contextlib.nullcontext()
        with exact_dropout(seed, at(step, number), graph), torch.set_grad_enabled(graph.loss is not None):
            with counting:
                outputs = outputs_of(module(*as_captured(graph, inputs)))
            if graph.loss is not None:
                (outputs[graph.outputs.index(graph.loss)] / micro_batches * scale).backward()
        all_outputs += [output.detach().clone() for output in outputs]  # one may be a parameter, which the step changes
    return all_outputs


def as_captured(graph: Graph, batch: Batch) -> list[torch.Tensor]:
    """Copies of the batch that require a gradient if the captured inputs did, as reentrant checkpoints need."""
    pairs = zip(batch, graph.inputs, strict=True)
    return [x.detach().requires_grad_() if graph.tensor(name).requires_grad else x.clone() for x, name in pairs]


def _gradient_norm(trainable: list[torch.nn.Parameter]) -> float:
    densify(trainable)
    norms = [p.grad.norm() for p in trainable if p.grad is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


def densify(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Makes sparse gradients dense, as a package's are; no optimizer but SGD takes sparse ones."""
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.to_dense()


def outputs_of(result: Any) -> list[torch.Tensor]:
    """Distinct tensors of `result`, in the order of the capture."""
    tensors = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _gradients(module: torch.nn.Module) -> State:
    return {
        path: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for path, p in module.named_parameters()
        if p.requires_grad
    }


def _parameters(module: torch.nn.Module) -> State:
    return {path: p.detach().clone() for path, p in module.named_parameters()}


def refilled(module: torch.nn.Module, first: State) -> list[str]:
    """Buffers that had other sizes at `first`: a forward stores values in them (ConViT's positions), which a package
    recomputes while its buffer keeps its initial value."""
    return [path for path, b in module.named_buffers() if path in first and b.shape != first[path].shape]


def _buffers(module: torch.nn.Module) -> State:
    return {path: b.detach().clone() for path, b in module.named_buffers()}
