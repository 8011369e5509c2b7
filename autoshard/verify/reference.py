"""The original model, run on one device in float64: what every rank's tensors are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoshard.emit.runtime.drawing import chosen, exact_values
from autoshard.emit.runtime.randomness import dropout_mask
from autoshard.errors import UsageError
from autoshard.graph.model import Graph
from autoshard.verify.float64 import exact_precision, widened

State = dict[str, torch.Tensor]
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

CLIP_FRACTION = 0.1  # of the first step's norm: clipping is active in each step
CLIP_MOST = 0.1  # keeps rounding noise in gradients that are truly zero far below AdamW's eps
_UNSUPPORTED = {"randperm", "rrelu_with_noise", "poisson", "geometric_", "cauchy_", "log_normal_"}
# operator -> (kind, the arguments after the drawn tensor or its shape: their defaults), see `runtime.drawing`
_DRAWN: dict[str, tuple[str, tuple[float, float]]] = {
    "rand": ("uniform", (0.0, 1.0)), "rand_like": ("uniform", (0.0, 1.0)), "uniform_": ("uniform", (0.0, 1.0)),
    "randn": ("normal", (0.0, 1.0)), "randn_like": ("normal", (0.0, 1.0)), "normal_": ("normal", (0.0, 1.0)),
    "exponential_": ("exponential", (1.0, 0.0)),
    "normal": ("normal", (0.0, 1.0)), "randint": ("integers", (0, 1)), "randint_like": ("integers", (0, 1)),
}  # fmt: skip
_IN_PLACE = ("uniform_", "normal_", "exponential_")


class ExactDropout(TorchDispatchMode):
    """The n-th mask drawn is the mask of operator n: a function of (seed, step, operator, global index).

    On the CPU, dropout of every kind, in attention too, draws by one `bernoulli_` an operator.
    """

    def __init__(self, seed: int, step: int) -> None:
        super().__init__()
        self.seed, self.step, self.drawn = seed, step, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func in (aten.bernoulli_.float, aten.bernoulli.p):
            keep = args[1] if len(args) > 1 else kwargs.get("p", 0.5)  # the dispatcher drops defaults
            mask = self._mask(args[0].shape, 1 - keep).to(args[0].dtype)
            return args[0].copy_(mask) if func is aten.bernoulli_.float else mask
        if func is aten.native_dropout.default and args[2] is not False:
            x, p = args[0], args[1]
            mask = self._mask(x.shape, p)
            return x * mask / (1 - p), mask
        name = func._schema.name.removeprefix("aten::")
        if name in _DRAWN:
            return self._random(func, name, args, kwargs)
        if name == "bernoulli" and func is aten.bernoulli.default:
            return (self._values(args[0].shape, "uniform", 0.0, 1.0) < args[0]).to(args[0].dtype)
        if name == "multinomial":
            return self._multinomial(*args)
        if name in _UNSUPPORTED:
            raise UsageError(
                f"the model draws random numbers by {func}, which verification can't repeat on the shards",
                "pass random tensors as inputs",
            )
        return func(*args, **kwargs)

    def _random(self, func: Any, name: str, args: Any, kwargs: Any) -> torch.Tensor:
        """What the operator would draw: its own call tells shape and dtype."""
        kind, numbers = _DRAWN[name]
        made = args[0] if name in _IN_PLACE else func(*args, **kwargs)
        if name in (*_IN_PLACE, "normal"):
            given = [*args[1:3], *numbers[len(args[1:3]) :]] if name in _IN_PLACE else args[:2]
            first, second = (kwargs.get(key, value) for key, value in zip(_names(name), given, strict=True))
        elif kind == "integers":
            bounds = [value for value in args[name.endswith("_like") :] if isinstance(value, int)]
            first, second = (0, *bounds) if len(bounds) == 1 else bounds
        else:
            first, second = numbers
        return made.copy_(self._values(made.shape, kind, first, second))

    def _values(self, shape: Sequence[int], kind: str, first: float, second: float) -> torch.Tensor:
        values = exact_values(self.seed, self.step, self.drawn, shape, kind, first, second)
        self.drawn += 1
        return values

    def _multinomial(self, p: torch.Tensor, count: int, replacement: bool = False, **_: Any) -> torch.Tensor:
        shape = (*p.shape[:-1], count) if replacement else p.shape
        return chosen(p.double(), self._values(shape, "uniform", 0.0, 1.0), count, replacement)

    def _mask(self, shape: Sequence[int], p: float) -> torch.Tensor:
        mask = dropout_mask(self.seed, self.step, self.drawn, shape, p)
        self.drawn += 1
        return mask


def _names(name: str) -> tuple[str, str]:
    return {"uniform_": ("from", "to"), "exponential_": ("lambd", "")}.get(name, ("mean", "std"))


@contextmanager
def exact_dropout(seed: int, step: int) -> Iterator[ExactDropout]:
    with ExactDropout(seed, step) as mode:
        yield mode


@dataclass(frozen=True)
class Step:
    """One optimizer step of the reference: global tensors. `norm` is the gradients' norm before clipping."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    norm: float
    parameters: State
    buffers: State


@dataclass(frozen=True)
class Reference:
    """`parameters` and `buffers` are those before the first step, `gradients` the first step's, before clipping."""

    parameters: State
    buffers: State
    gradients: State
    steps: tuple[Step, ...]
    max_norm: float
    seed: int

    @property
    def clipped_steps(self) -> int:
        return sum(step.norm > self.max_norm for step in self.steps)


def run_reference(
    module: torch.nn.Module,
    graph: Graph,
    batches: Sequence[Sequence[torch.Tensor]],
    make_optimizer: MakeOptimizer,
    seed: int,
) -> Reference:
    """Train `module` (already randomised, float64) one step for each global batch; without a loss, only run it."""
    if not isinstance(module, torch.fx.GraphModule):  # an exported program keeps the mode it was exported in
        module.train(graph.training)
    before_parameters, before_buffers = _parameters(module), _buffers(module)
    trainable = [p for p in module.parameters() if p.requires_grad]
    gradients: State = {}
    max_norm = 0.0
    steps = []
    with exact_precision():
        optimizer = make_optimizer(trainable) if graph.loss is not None else None
        for number, batch in enumerate(batches):
            module.zero_grad(set_to_none=True)
            with exact_dropout(seed, number), torch.set_grad_enabled(optimizer is not None):
                outputs = _outputs(module(*widened(batch)))
                norm = _backward(outputs[graph.outputs.index(graph.loss)], trainable) if graph.loss else 0.0
            if number == 0:
                max_norm = min(CLIP_FRACTION * norm, CLIP_MOST)
                gradients = _gradients(module)
            if optimizer is not None:
                torch.nn.utils.clip_grad_norm_(trainable, max_norm)
                optimizer.step()
            kept = tuple(output.detach().clone() for output in outputs)
            steps.append(Step(tuple(batch), kept, norm, _parameters(module), _buffers(module)))
    module.zero_grad(set_to_none=True)
    return Reference(before_parameters, before_buffers, gradients, tuple(steps), max_norm, seed)


def _backward(loss: torch.Tensor, trainable: list[torch.nn.Parameter]) -> float:
    """Gradients of `loss`; gives their norm."""
    loss.backward()
    norms = [p.grad.norm() for p in trainable if p.grad is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


def _outputs(result: Any) -> list[torch.Tensor]:
    """The distinct tensors, in order, as capture lists them."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _gradients(module: torch.nn.Module) -> State:
    return {
        path: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for path, p in module.named_parameters()
        if p.requires_grad
    }


def _parameters(module: torch.nn.Module) -> State:
    return {path: p.detach().clone() for path, p in module.named_parameters()}


def _buffers(module: torch.nn.Module) -> State:
    return {path: b.detach().clone() for path, b in module.named_buffers()}
