"""Everything that a function refers to; on several processes: tests/shard_worker.py `referred`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.api.parallel.function_module import FunctionModule
from autoshard.api.parallel.function_references import references
from autoshard.errors import UsageError
from tests.shard_worker import Task

LAYERS: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 2)]
TASK, ROW, STEP = Task(LAYERS), [1.5, {"deep": (2.5, torch.ones(1))}], Task(LAYERS).run
FILE = types.ModuleType("settings")
FILE.RATE = 3.5  # type: ignore[attr-defined]


def helper(x: Tensor) -> Tensor:
    return x * FILE.RATE


@pytest.mark.parametrize(
    ("fn", "found"),
    [
        (TASK.run, {"layers.0", "layers.1", "scale"}),
        (TASK, {"layers.0", "layers.1", "scale"}),
        (lambda x: STEP(x), {"STEP.layers.0", "STEP.layers.1", "STEP.scale"}),
        (lambda x: LAYERS[0](x) * ROW[0], {"LAYERS.0", "LAYERS.1", "ROW.0", "ROW.1.deep.0", "ROW.1.deep.1"}),
        (lambda x, by=ROW: x * by[0], {"by.0", "by.1.deep.0", "by.1.deep.1"}),
        (functools.partial(lambda x, by: x * by, by=2.0), {"by"}),
        (lambda x: helper(x), {"helper.FILE.RATE"}),
        (torch.no_grad()(lambda x: x * FILE.RATE), {"func.FILE.RATE"}),
        (lambda x: torch.relu(x), set()),
    ],
)
def test_all_of_them(fn: Callable[..., Any], found: set[str]) -> None:
    assert {path for path in references(fn) if "ctx_factory" not in path} == found


def test_what_changes_is_seen_and_what_nothing_reads_is_not() -> None:
    module = FunctionModule(lambda x: TASK.run(x) * ROW[1]["deep"][1])  # type: ignore[index]
    assert len(module.referred()) == 4
    before = module.constants()
    TASK.calls += 1
    assert module.constants() == before
    tensor = ROW[1]["deep"][1]  # type: ignore[index]
    for change in (lambda: setattr(TASK, "scale", 7.0), lambda: tensor.add_(1), lambda: ROW.__setitem__(0, 1)):
        change()
        assert module.constants() != before
        before = module.constants()


def test_layers_of_a_set_are_refused() -> None:
    layers, numbers = {*LAYERS}, {1, 2}
    with pytest.raises(UsageError, match="the set layers"):
        references(lambda x: [layer(x) for layer in layers])
    assert references(lambda x: x * len(numbers)) == {"numbers": "['1', '2']"}
