"""Functions of the emitted train.py and convert.py, called as a library."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture_model
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.search.fixed_styles import random_plan
from autoshard.verification.case import written
from autoshard.verification.ranks.loaded_package import LoadedPackage, load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from tests.hangs import HANGS
from tests.slow import quick_at


class Rotary(nn.Module):
    """A table that the constructor computes and no state dict holds; statistics that one does."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("table", torch.linspace(0.5, 2.0, 8), persistent=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.norm(self.project(x)) * self.table
        return nn.functional.mse_loss(x, target)


@pytest.fixture(scope="module")
def package() -> LoadedPackage:
    """Of a model without values, whose constructor nobody watched."""
    with torch.device("meta"):
        return package_of(Rotary())


def package_of(model: nn.Module, *inputs: Tensor) -> LoadedPackage:
    graph = capture_model(model, inputs or (torch.randn(16, 8), torch.randn(16, 8)))
    plan = random_plan(PlanningContext(graph, Mesh.parse("dp=2,tp=2"), load_hardware("cpu-local")), 3)
    with written(emit(lower(plan, graph), plan, graph)) as folder:
        return load_package(folder)


def prepared(package: LoadedPackage, weights: Path | None) -> list[dict[str, Tensor]]:
    """The whole model after train.py's own preparation, as every rank sees it."""
    options = argparse.Namespace(resume=None, weights=None if weights is None else str(weights), seed=0)

    def rank(mesh: Any) -> dict[str, Tensor]:
        model = package.model.build_model(mesh)
        package.train.prepare(model, package.train.make_optimizer(model), options, mesh.rank)
        tensors = (*model.parameters(), *model.buffers())
        return {package.runtime.sharding(t).name: package.runtime.full_tensor(t) for t in tensors}

    return run_lockstep({"dp": 2, "tp": 2}, rank)


def test_a_buffer_that_no_state_dict_holds_comes_from_the_weights_file(
    package: LoadedPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Rotary()
    torch.save({**model.state_dict(), **dict(model.named_buffers())}, tmp_path / "all.pt")
    known = package.train.prepare.__globals__
    monkeypatch.setitem(known, "read_weights", lambda path: torch.load(path, weights_only=True))
    for state in prepared(package, tmp_path / "all.pt"):
        assert torch.equal(state["table"], model.table)
        assert torch.equal(state["project.weight"], model.project.weight)
        assert torch.equal(state["norm.running_var"], torch.ones(8))


def test_a_buffer_that_nothing_gives_is_an_error_that_names_it(package: LoadedPackage) -> None:
    with pytest.raises(Exception, match="table"):
        prepared(package, None)


def test_one_rank_says_what_starts_from_a_guess(
    package: LoadedPackage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(package.train.prepare.__globals__, "fill_unsaved", lambda *_: None)
    prepared(package, None)
    (note,) = capsys.readouterr().out.splitlines()
    assert note.startswith("note: 8 parameters start from a guess") and note.count(",") == 4 and note.endswith("...")


def test_a_buffer_that_the_constructor_computes_starts_so_and_may_lack_in_a_weights_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, model = package_of(Rotary()), Rotary()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    known = package.train.prepare.__globals__
    monkeypatch.setitem(known, "read_weights", lambda path: torch.load(path, weights_only=True))
    for weights in (None, tmp_path / "state.pt"):
        for state in prepared(package, weights):
            assert torch.equal(state["table"], model.table)
            assert torch.equal(state["norm.running_var"], torch.ones(8))


def test_batches_by_name_by_place_global_or_local(package: LoadedPackage) -> None:
    full = {"x": torch.randn(16, 8), "target": torch.randn(16, 8)}

    def rank(mesh: Any) -> list[bool]:
        parts = package.batches.checked(full, mesh)
        rechecked = package.batches.checked(tuple(parts), mesh)
        fits = [
            tuple(part.shape) == package.batches.local_shape(name, mesh) for name, part in zip(full, parts, strict=True)
        ]
        return [*fits, *(torch.equal(a, b) for a, b in zip(parts, rechecked, strict=True))]

    assert all(all(checks) for checks in run_lockstep({"dp": 2, "tp": 2}, rank))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(16, 8)}, "lacks target"),
        ((torch.zeros(16, 8),), r"must hold 2 tensors \(x, target\), got 1"),
        ((torch.zeros(16, 9), torch.zeros(16, 8)), r"input 'x': expected the global shape \(16, 8\) or the local"),
        ((torch.zeros(16, 8, dtype=torch.int64), torch.zeros(16, 8)), "expected torch.float32, got torch.int64"),
        (("text", torch.zeros(16, 8)), "expected a tensor, got str"),
        (3, "got int"),
    ],
)
def test_a_wrong_batch_says_what_was_expected(package: LoadedPackage, batch: Any, message: str) -> None:
    with pytest.raises(Exception, match=message):
        run_lockstep({"dp": 2, "tp": 2}, lambda mesh: package.batches.checked(batch, mesh))


def test_synthetic_batches_are_parts_of_one_global_batch(package: LoadedPackage) -> None:
    def rank(mesh: Any) -> list[Tensor]:
        whole = torch.randn(16, 8, generator=torch.Generator().manual_seed(5 * 1_000_003 + 7))
        return [next(package.batches.synthetic_batches(mesh, 5, 7))[0], package.batches.local_part("x", whole, mesh)]

    for mine, expected in run_lockstep({"dp": 2, "tp": 2}, rank):
        assert torch.equal(mine, expected)


class Offsets(nn.Module):
    """Columns of categories in one table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, 5, 12, 23]))
        self.table = nn.Embedding(27, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x[:, None] + self.offsets).square().mean()


class Edges(nn.Module):
    """Widths of boxes, which no row of the table is for where the edges are drawn from all edges."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x[..., 2] - x[..., 0]).square().mean() + self.table(x[..., 1] * 2).square().mean()


def _columns(*bounds: tuple[int, int], rows: tuple[int, ...] = (64,)) -> Tensor:
    return torch.stack([torch.randint(low, high, rows) for low, high in bounds], -1)


@pytest.mark.parametrize(
    ("model", "example"),
    quick_at(
        [
            (Offsets, _columns((0, 5), (0, 7), (0, 11), (0, 4))),
            (Edges, _columns((0, 9), (0, 16), (16, 32), rows=(8, 8))),
        ],
        1,
    ),
)
def test_synthetic_integers_keep_to_the_range_of_their_column(model: type[nn.Module], example: Tensor) -> None:
    package, original = package_of(model(), example), model()

    def rank(mesh: Any) -> list[Tensor]:
        batches = package.batches.synthetic_batches(mesh, 0, 0)
        return [next(batches)[0] for _ in range(20)]

    drawn = torch.stack(run_lockstep({"dp": 2, "tp": 2}, rank)[0])
    assert drawn.unique(dim=0).shape[0] == 20
    for batch in drawn:
        original(batch)  # IndexError where a number is past the table


def test_columns_of_another_count_are_drawn_from_all_ranges(package: LoadedPackage) -> None:
    drawn = package.batches._by_column((64, 9), (2, 4), (3, 8), torch.Generator().manual_seed(0))
    assert drawn.shape == (64, 9) and drawn.unique().tolist() == [2, 3, 4, 5, 6, 7]


def test_a_rank_imports_no_compiler() -> None:
    """Dynamo and inductor, for which nothing asks before a model is built: they take longer than the rest."""
    code = "import autoshard.emit.runtime, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANGS)
    heavy = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor.debug", "torch.distributed.pipelining"}
    assert not heavy & {*done.stdout.split()}
