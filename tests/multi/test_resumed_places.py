"""What one placement saves, another goes on with: places that hold nothing, and a buffer that one place reads twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import StepPlan
from autoshard.program.lower import lower
from autoshard.program.schedules.placed_parts import op_places, parts_on
from autoshard.search.fixed_step import predicted
from autoshard.search.fixed_styles import random_plan
from benchmarks import fuzz
from tests.differential import Mismatch
from tests.resumed import Resumed
from tests.slow import slow

MODEL = """
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.randn(4))

    def forward(self, x):
        return x * self.bank

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)
        self.scale, self.drop = Scale(), nn.Dropout(0.2)
        self.head.weight.requires_grad_(False)

    def forward(self, ids, labels):
        x = self.scale(self.drop(self.scale(self.words(ids))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

def build():
    return Model().double(), (torch.randint(11, (4, 3)), torch.randint(11, (4, 3)))
"""
FIRST = {"": 0, "drop": 0, "words": 1, "scale": 1, "head": 2}  # rank 0 has no weight, buffer or optimizer
SECOND = {"": 0, "drop": 1, "words": 0, "scale": 0, "head": 0}
PLANTED = (
    ("runtime/checkpoint.py", 'return int(training["step"])', 'return int(training["step"]) + 1'),
    (
        "runtime/checkpoint.py",
        "_fill(wanted, ",
        '_fill({k: v for k, v in wanted.items() if k[-4:] != "_avg"}, ',
    ),
    ("runtime/checkpoint.py", "wanted[key][1] is not spec", "wanted[key][1] is None"),
    ("start_state.py", "options.seed = saved_seed(last_checkpoint(options.resume))", "options.seed = 0"),
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("resumed") / "model.py"
    path.write_text(MODEL, encoding="utf-8")
    return f"{path}:build"


@cache
def files(spec: str, second: bool) -> tuple[Mapping[str, str], int]:
    """A package, and its processes."""
    graph, hardware = capture(spec, {}), load_hardware("cpu-local")
    parts = parts_on(graph, op_places(graph, SECOND if second else FIRST))
    plan = random_plan(PlanningContext(graph, Mesh.parse("dp=2" if second else "dp=1"), hardware), 1)
    plan = predicted(replace(plan, step=StepPlan(1, "1f1b", 1, parts)), graph)
    return dict(emit(lower(plan, graph), plan, graph)), plan.devices


def test_each_goes_on_with_what_the_other_saves(spec: str) -> None:
    line = Resumed(2)
    line.join(*files(spec, second=False))
    line.join(*files(spec, second=True))
    line.close()
    assert line.resumed == 2


@pytest.mark.slow
def test_what_is_not_resumed_is_seen(spec: str) -> None:
    line = Resumed(len(PLANTED) + 1)
    line.join(*files(spec, second=False))
    for path, right, wrong in PLANTED:
        texts, ranks = files(spec, second=True)
        assert right in texts[path]
        with pytest.raises((Mismatch, RuntimeError)):  # what is not loaded may be any numbers: the run ends with inf
            line.join({**texts, path: texts[path].replace(right, wrong)}, ranks)
    line.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2400, slow(2462)])
def test_random_placements_that_failed_once(seed: int) -> None:
    """A buffer that places of two meshes hold, each in other parts, is saved once; what a part gathers for each use
    under ZeRO 2 is in no bucket of what is gathered once."""
    row = fuzz.run_places(seed, debug=True)
    fuzz._LINES.pop(seed // fuzz.EACH).close()
    assert row.end == fuzz.RIGHT
