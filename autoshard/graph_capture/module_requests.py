"""Requests for the training step that a model sets on its modules, in MindSpore's words: `block.pipeline_stage = 1`,
`model.micro_size = 8`, `block.comm_fusion = 2`, `recompute(block)`, `place(block, "worker", 1)`.

They do nothing where the model runs alone. A capture reads them; command-line options take precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

from autoshard.errors import CaptureError, UsageError
from autoshard.ir.graph import FUSION

_Module = TypeVar("_Module", bound=nn.Module)
_AGAIN = "_autoshard_recompute"
_PLACE = "_autoshard_place"
STAGE, PLACE, COUNT, RECOMPUTE = "stage", "place", "micro_batches", "recompute"  # FUSION is the graph's
KEEPING = f"{RECOMPUTE}:communicated"


def recompute(
    module: _Module, mp_comm_recompute: bool = True, parallel_optimizer_comm_recompute: bool | None = None
) -> _Module:
    """`module`, whose blocks backward recomputes from their inputs. Once a module; its holder takes precedence.

    `mp_comm_recompute=False`: what collectives of activations give inside is kept, and they don't run again. Weights
    that are stored in shards are gathered again: if the last keyword asks for something else, the plan reports that it
    has no effect. UsageError for a second call on one module.
    """
    if hasattr(module, _AGAIN):
        raise UsageError(f"recompute() of {type(module).__name__} for the second time", "one call for each module")
    ignored = []
    if parallel_optimizer_comm_recompute is False:
        ignored.append("are gathered again, whatever parallel_optimizer_comm_recompute says")
    object.__setattr__(module, _AGAIN, (RECOMPUTE if mp_comm_recompute else KEEPING, tuple(ignored)))
    return module


class PlacedFunction(nn.Module):
    """A function as a module, so that what it runs can have a place."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.function(*arguments, **options)


def place(what: Any, role: str, rank: int) -> Any:
    """`what`, a module, all of which worker `rank` runs; of a function, a module that calls it.

    As `Cell.place` and `Primitive.place` of MindSpore: the innermost place around an operator counts, and what has none
    goes where its inputs are. It does nothing where the model runs alone: a plan splits the model by it. UsageError for
    a role other than "worker" (or MS_WORKER) and a rank that is no number from 0 on.
    """
    if role not in ("worker", "MS_WORKER"):
        raise UsageError(f"place: role is {role!r}, expected 'worker' (or MindSpore's 'MS_WORKER')", "'worker'")
    if type(rank) is not int or rank < 0:
        raise UsageError(f"place: rank is {rank!r}, expected an int from 0 on", 'place(module, "worker", 0)')
    if not isinstance(what, nn.Module):
        if not callable(what):
            message = f"place of {type(what).__name__}: expected a module or a function"
            raise UsageError(message, 'place(model.fc1, "worker", 0)')
        what = PlacedFunction(what)
    object.__setattr__(what, _PLACE, rank)
    return what


def module_requests(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """(module path, what it asks for), in the order of the model. CaptureError for a value that can't be."""
    return tuple(_requests(model))


def ignored_requests(model: nn.Module) -> tuple[str, ...]:
    """Sentences on keywords that count for nothing."""
    return tuple(
        f"weights of {path or type(module).__name__}, which is recomputed, {sentence}"
        for path, module in model.named_modules()
        for sentence in getattr(module, _AGAIN, ("", ()))[1]
    )


def _requests(model: nn.Module) -> Iterator[tuple[str, str]]:
    recomputed: list[str] = []
    for path, module in model.named_modules():
        stage = vars(module).get("pipeline_stage")
        if stage is not None:
            yield path, f"{STAGE}:{_number(stage, f'pipeline_stage of {path}', 0)}"
        if hasattr(module, _PLACE):
            yield path, f"{PLACE}:{getattr(module, _PLACE)}"
        together = vars(module).get("comm_fusion")
        if together is not None:
            yield path, f"{FUSION}:{_number(together, f'comm_fusion of {path}', 0)}"
        if hasattr(module, _AGAIN) and not any(_within(path, outer) for outer in recomputed):
            recomputed.append(path)
            yield path, getattr(module, _AGAIN)[0]
    count = vars(model).get("micro_size")
    if count is not None:
        yield "", f"{COUNT}:{_number(count, 'micro_size', 1)}"


def _number(value: object, what: str, least: int) -> int:
    if type(value) is not int or value < least:
        raise CaptureError(f"{what} is {value!r}, expected an int from {least} on", f"{what.split()[0]} = {least}")
    return value


def _within(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")
