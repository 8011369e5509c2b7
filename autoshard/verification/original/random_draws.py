"""Replaces the original model's random numbers by numbers that the shards can repeat."""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.emit.runtime.random_tensors import chosen, exact_values
from autoshard.emit.runtime.randomness import Step, dropout_mask
from autoshard.errors import UsageError
from autoshard.graph_capture.tracing.fills import INITIALISERS
from autoshard.ir.graph import Graph
from autoshard.rules.operators import drops_all, is_random

_UNSUPPORTED = {"randperm", "rrelu_with_noise", "poisson", "geometric_", "cauchy_", "log_normal_"}
# operator -> (kind, the arguments after the drawn tensor or its shape: their defaults), see `runtime.random_tensors`
_DRAWN: dict[str, tuple[str, tuple[float, float]]] = {
    "rand": ("uniform", (0.0, 1.0)), "rand_like": ("uniform", (0.0, 1.0)), "uniform_": ("uniform", (0.0, 1.0)),
    "randn": ("normal", (0.0, 1.0)), "randn_like": ("normal", (0.0, 1.0)), "normal_": ("normal", (0.0, 1.0)),
    "exponential_": ("exponential", (1.0, 0.0)),
    "normal": ("normal", (0.0, 1.0)), "randint": ("integers", (0, 1)), "randint_like": ("integers", (0, 1)),
}  # fmt: skip
_IN_PLACE = ("uniform_", "normal_", "exponential_")


class ExactDropout(TorchDispatchMode):
    """The n-th mask drawn is the mask of operator n: a function of (seed, step, operator, global index). The `unread`
    ones, by position, belong to no operator of the program, and the others are counted without them; the `undrawn`
    operators, by number, draw in the program alone.

    On the CPU, dropout of every kind, in attention too, draws by one `bernoulli_` an operator. An operator is
    identified by the state of the generator: activation checkpointing restores that, and so draws the same mask again.
    """

    def __init__(self, seed: int, step: Step, unread: Sequence[int] = (), undrawn: Sequence[int] = ()) -> None:
        super().__init__()
        self.seed, self.step, self.unread, self.undrawn = seed, step, unread, undrawn
        self.numbers: dict[bytes, int] = {}

    @property
    def drawn(self) -> int:
        """Number of operators that have drawn."""
        return len(self.numbers)

    def _number(self) -> int:
        """Number of the operator that draws now; advances the generator."""
        state = torch.default_generator.get_state().numpy().tobytes()
        torch.rand(())
        position = self.numbers.setdefault(hashlib.blake2b(state).digest(), len(self.numbers))
        number = position - bisect(self.unread, position)
        for skipped in self.undrawn:
            number += skipped <= number
        return -1 - position if position in self.unread else number

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

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
        if name in INITIALISERS and isinstance(args[0], torch.nn.Parameter):
            return func(*args, **kwargs)  # of a module that the first forward makes: no operator of the program
        if name in _DRAWN:
            return self._random(func, name, args, kwargs)
        if name == "bernoulli" and func is aten.bernoulli.default:
            return (self._uniform(args[0].shape) < args[0]).to(args[0].dtype)
        if name == "multinomial":
            return self._multinomial(*args)
        if name in _UNSUPPORTED:
            raise UsageError(
                f"the model draws random numbers by {func}, which verification can't repeat on the shards",
                "pass random tensors as inputs",
            )
        return func(*args, **kwargs)

    def _random(self, func: Any, name: str, args: Any, kwargs: Any) -> torch.Tensor:
        """Random numbers for the operator, with the shape and dtype of its own call."""
        kind, numbers = _DRAWN[name]
        number = self._number()
        output = args[0] if name in _IN_PLACE else func(*args, **kwargs)
        if name in (*_IN_PLACE, "normal"):
            parameters = [*args[1:3], *numbers[len(args[1:3]) :]] if name in _IN_PLACE else args[:2]
            first, second = (kwargs.get(key, value) for key, value in zip(_names(name), parameters, strict=True))
        elif kind == "integers":
            bounds = [value for value in args[name.endswith("_like") :] if isinstance(value, int)]
            first, second = (0, *bounds) if len(bounds) == 1 else bounds
        else:
            first, second = numbers
        return output.copy_(exact_values(self.seed, self.step, number, output.shape, kind, first, second))

    def _uniform(self, shape: Sequence[int]) -> torch.Tensor:
        return exact_values(self.seed, self.step, self._number(), shape, "uniform", 0.0, 1.0)

    def _multinomial(self, p: torch.Tensor, count: int, replacement: bool = False, **_: Any) -> torch.Tensor:
        shape = (*p.shape[:-1], count) if replacement else p.shape
        return chosen(p.double(), self._uniform(shape), count, replacement)

    def _mask(self, shape: Sequence[int], p: float) -> torch.Tensor:
        return dropout_mask(self.seed, self.step, self._number(), shape, p)


def _names(name: str) -> tuple[str, str]:
    return {"uniform_": ("from", "to"), "exponential_": ("lambd", "")}.get(name, ("mean", "std"))


@contextmanager
def exact_dropout(seed: int, step: Step, graph: Graph | None = None) -> Iterator[ExactDropout]:
    """Replaces random numbers inside. `graph`: the program's, if some of its numbers are not the original's."""
    drawing = [op for op in graph.ops if is_random(op)] if graph else []
    undrawn = [number for number, op in enumerate(drawing) if drops_all(op)]
    unread = graph.unread_draws if graph else ()
    with torch.random.fork_rng(devices=[]), ExactDropout(seed, step, unread, undrawn) as mode:
        torch.manual_seed(seed)
        yield mode
