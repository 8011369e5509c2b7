"""A checkpoint of one mesh on every other, and in the original class: every number of model and optimizer is the same.

Trained on tp=2 (a fused projection in blocks, heads cut, a vocabulary that two do not divide), loaded on tp=4,
dp=2,tp=2 and one process; what tp=4 goes on with and saves, tp=2 loads.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.graph_capture.load_model import load_model
from autoshard.ir.mesh import Mesh
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests import launched
from tests.checkpoint_worker import State, run_ranks
from tests.models import NAMES
from tests.slow import slow

MESHES = {"tp2": "tp=2", "tp4": "tp=4", "mixed": "dp=2,tp=2", "alone": "dp=1"}
RANKS = {"tp2": 2, "tp4": 4, "mixed": 4, "alone": 1}


@pytest.fixture(scope="module", params=[slow("nanogpt_slow"), slow("llama")])
def packages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    root = tmp_path_factory.mktemp(request.param)
    graph, hardware = capture(NAMES[request.param], {}), load_hardware("cpu-local")
    for name, text in MESHES.items():
        plan = search(graph, hardware, SearchRequest(Mesh.parse(text), strategy="megatron"))
        write_package(root / name, emit(lower(plan, graph), plan, graph))
    return NAMES[request.param], root


def assert_same(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def test_every_mesh_and_the_original_class_see_the_same_numbers(packages: tuple[str, Path], tmp_path: Path) -> None:
    spec, root = packages
    trained = run_ranks(root / "tp2", RANKS["tp2"], tmp_path / "none", tmp_path / "saved", steps=2)
    slots = {name.partition(": ")[2] for name in trained}
    assert slots == {"", "exp_avg", "exp_avg_sq", "step"} and any("bias" in n or "rotary" in n for n in trained)
    for name in ("mixed", "alone"):
        assert_same(run_ranks(root / name, RANKS[name], tmp_path / "saved"), trained)
    further = run_ranks(root / "tp4", RANKS["tp4"], tmp_path / "saved", tmp_path / "again", steps=1)
    assert not torch.equal(*(next(iter(state.values())) for state in (further, trained)))
    assert_same(run_ranks(root / "tp2", RANKS["tp2"], tmp_path / "again"), further)

    convert = [root / "mixed" / "convert.py", "--to-original", tmp_path / "again", tmp_path / "back.pt"]
    launched.run(convert).check_returncode()
    model, _ = load_model(spec, {}, device="cpu")
    model.load_state_dict(torch.load(tmp_path / "back.pt", weights_only=True))
    state = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])
    assert_same({name: state[name] for name in further if ": " not in name}, {
        name: value for name, value in further.items() if ": " not in name
    })  # fmt: skip
