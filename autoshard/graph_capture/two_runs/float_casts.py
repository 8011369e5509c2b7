"""Which casts to float32 in a forward are some in mixed precision. In the float32 that a trace runs in they change
nothing, and `.to(x.dtype)` looks like `.float()`: the forward runs under autocast, too, on tensors without values.
In its trace such a cast is one of a copy: float32 as float32 is the very same tensor, and whatever reads, writes or
returns the one would seem to do so to the other.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from autoshard.graph_capture.tracing.call_caches import attributes_put_back
from autoshard.graph_capture.tracing.exporting import Exporter, fake_stand_ins, quiet
from autoshard.graph_capture.tracing.python_state import hooks_put_back
from autoshard.graph_capture.tracing.source_lines import model_frame
from autoshard.graph_capture.tracing.unchanged_model import guarded
from autoshard.graph_capture.two_runs.autocast import autocast_as_planned
from autoshard.graph_capture.two_runs.second_call import MOST_SECONDS
from autoshard.system.isolated_process import apart

Line = tuple[str, int]  # file and number
Casts = Mapping[Line, Sequence[bool]]  # of each line those that it makes, in order: whether one makes float32 of less
_TRACED = ("aten.to.", "aten._to_copy", "aten.type_as", "aten.float")
_COPY = torch.ops.aten.alias_copy.default  # which models do not call themselves
_CASTS: frozenset[Any] = frozenset({Tensor.to, Tensor.float, Tensor.type, Tensor.type_as})


def casts_of(model: torch.nn.Module, inputs: tuple[Any, ...], precision: str) -> Casts:
    """Casts in the model's code under `precision`; none if it can't be run under that."""
    with quiet():
        text = apart(lambda: json.dumps(_casts_of(model, inputs, precision)), MOST_SECONDS).text
    return {(name, number): wide for name, number, wide in json.loads(text or "[]")}


def _casts_of(model: torch.nn.Module, inputs: tuple[Any, ...], precision: str) -> list[tuple[str, int, list[bool]]]:
    casts = _Casts()
    with fake_stand_ins(model, inputs, always=True) as arguments, guarded():
        try:
            with attributes_put_back(model), hooks_put_back(model), autocast_as_planned(precision), casts:
                model(*arguments)
        except (Exception, SystemExit):  # of the model's own code, or a question for values
            return []
    return [(*line, wide) for line, wide in casts.lines.items()]


class _Casts(TorchFunctionMode):
    """`lines`: see Casts."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Line, list[bool]] = defaultdict(list)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (line := _line(func, args, kwargs)) is not None:
            wide = result.dtype == torch.float32 and args[0].dtype in (torch.bfloat16, torch.float16)
            self.lines[line].append(wide)
        return result


def set_apart(casts: Casts, by: Exporter, model: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    """The program that `by` exports, in which each cast of `casts` that makes float32 of less reads a copy."""
    with _SetApart(casts):
        return by(model, inputs)


class _SetApart(TorchFunctionMode):
    def __init__(self, casts: Casts) -> None:
        super().__init__()
        self.casts, self.count = casts, Counter[Line]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        line = _line(func, args, kwargs)
        if line is not None and line in self.casts:
            known, number = self.casts[line], self.count[line]
            self.count[line] += 1
            if known[number] if number < len(known) else all(known):
                args = (_COPY(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _line(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Line | None:
    """Line of the model for a cast; None for other calls, like the question `x.type()`."""
    frame = model_frame() if func in _CASTS and (len(args) > 1 or kwargs or func is Tensor.float) else None
    return (frame.f_code.co_filename, frame.f_lineno) if frame else None


def put_back(graph: fx.Graph) -> frozenset[fx.Node]:
    """The casts that were set apart, of what they were: in place."""
    wide: set[fx.Node] = set()
    for node in graph.find_nodes(op="call_function", target=_COPY):
        wide |= {user for user in node.users if str(user.target).startswith(_TRACED)}
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return frozenset(wide)


def widened(graph: fx.Graph, wide: Collection[fx.Node]) -> list[fx.Node]:
    """Values that are float32 for every reader, as only these casts read them; of others the casts."""
    values: list[fx.Node] = []
    for node in graph.nodes if wide else ():
        casts = [user for user in node.users if user in wide and user.args[0] is node]
        values += [node] if casts and len(casts) == len(node.users) else casts
    return values
