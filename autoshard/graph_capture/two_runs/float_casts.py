"""Which casts to float32 in a forward are some in mixed precision. In the float32 that a trace runs in they change
nothing, and `.to(x.dtype)` looks like `.float()`: the forward runs under autocast, too, on tensors without values.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from autoshard.graph_capture.tracing.call_caches import attributes_put_back
from autoshard.graph_capture.tracing.exporting import fake_stand_ins, quiet
from autoshard.graph_capture.tracing.python_state import hooks_put_back
from autoshard.graph_capture.tracing.source_lines import model_frame, node_frame
from autoshard.graph_capture.tracing.unchanged_model import guarded
from autoshard.graph_capture.two_runs.autocast import autocast_as_planned
from autoshard.graph_capture.two_runs.second_call import MOST_SECONDS
from autoshard.system.isolated_process import apart

Line = tuple[str, int]  # file and number
Casts = Mapping[Line, Sequence[bool]]  # of each line those that it makes, in order: whether one makes float32 of less
_TRACED = ("aten.to.", "aten._to_copy", "aten.type_as", "aten.float")
_CASTS: frozenset[Any] = frozenset({Tensor.to, Tensor.float, Tensor.type, Tensor.type_as})


def casts_of(model: torch.nn.Module, inputs: tuple[Any, ...], precision: str) -> Casts:
    """Those of the model's code under `precision`; none where it can't be run so."""
    with quiet():
        found = apart(lambda: json.dumps(_casts_of(model, inputs, precision)), MOST_SECONDS).text
    return {(name, number): wide for name, number, wide in json.loads(found or "[]")}


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
        frame = model_frame() if func in _CASTS and isinstance(result, Tensor) else None
        if frame is not None:
            wide = result.dtype == torch.float32 and args[0].dtype in (torch.bfloat16, torch.float16)
            self.lines[frame.f_code.co_filename, frame.f_lineno].append(wide)
        return result


def widened(graph: fx.Graph, casts: Casts) -> list[fx.Node]:
    """Values that are float32 for every reader, as only casts to it read them; of others those casts."""
    made = defaultdict[Line | None, list[fx.Node]](list)
    for node in graph.nodes if casts else ():
        if str(node.target).startswith(_TRACED):
            made[node_frame(node)].append(node)
    wide = {node for line, nodes in made.items() if line for node in _wide(nodes, casts.get(line, ()))}
    found: list[fx.Node] = []
    for node in graph.nodes:
        own = [user for user in node.users if user in wide and user.args[0] is node]
        found += [node] if own and len(own) == len(node.users) else own
    return found


def _wide(nodes: list[fx.Node], casts: Sequence[bool]) -> list[fx.Node]:
    """Of the casts of a line; where a trace has more or fewer than a run, all if the run has no others."""
    if len(nodes) == len(casts):
        return [node for node, wide in zip(nodes, casts, strict=True) if wide]
    return nodes if casts and all(casts) else []
