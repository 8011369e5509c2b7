"""A loss or gradients that are no numbers: nothing is updated with them and nothing saved, on all devices alike."""

from __future__ import annotations

import contextlib
import io
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.verification.case import written
from autoshard.verification.ranks.loaded_package import LoadedPackage, load_package
from autoshard.verification.ranks.lockstep import LockstepError, run_lockstep
from tests.forced import forced_plan
from tests.slow import quick_at

AXES = {"dp": 2, "tp": 2}


class Net(nn.Module):
    """`bad` reaches the loss and no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor, y: Tensor, bad: Tensor) -> Tensor:
        return F.mse_loss(self.norm(self.a(x)), y) + bad.mean()


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Net(), (torch.randn(4, 8), torch.randn(4, 6), torch.zeros(4, 1))


@cache
def files_of(precision: str) -> dict[str, str]:
    graph = capture(f"{__file__}:build", {}, precision)
    plan = forced_plan(graph, Mesh.parse("dp=2,tp=2"), lambda op, strategy: True, 2)
    return emit(lower(plan, graph), plan, graph)


def trained(package: LoadedPackage, *options: str) -> tuple[list[Any], str]:
    """The model of each rank after a run, and what rank 0 has printed."""
    arguments = package.train.parse_arguments(["--backend", "gloo", *options])
    package.train.take_options(arguments)
    models: dict[int, Any] = {}
    build_model = package.train.build_model

    def kept(mesh: Any) -> Any:
        models[mesh.rank] = build_model(mesh)
        return models[mesh.rank]

    package.train.build_model = kept
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            run_lockstep(AXES, lambda mesh: package.train.run(arguments, mesh), 60.0, package.runtime.ParallelMesh)
    except LockstepError as error:
        printed.write(str(error))
    package.train.build_model = build_model
    return [models[rank] for rank in sorted(models)], printed.getvalue()


def state(models: list[Any], package: LoadedPackage) -> list[Tensor]:
    return [package.runtime.local(x).clone() for model in models for x in (*model.parameters(), *model.buffers())]


LOADER = """
import torch

def make_loader():
    generator, step = torch.Generator().manual_seed(0), 0
    while True:
        step += 1
        batch = [torch.randn(size, generator=generator) for size in ((4, 8), (4, 6))] + [torch.zeros(4, 1)]
        if step in {steps}:
            batch[{place}][3] = float("{number}")
        yield tuple(batch)
"""


def loader(folder: Path, steps: set[int], place: int, number: str = "nan") -> str:
    path = folder / "data.py"
    text = LOADER.replace("{steps}", repr(steps)).replace("{place}", str(place)).replace("{number}", number)
    path.write_text(text, encoding="utf-8")
    return f"{path}:make_loader"


@pytest.mark.parametrize(("place", "number"), quick_at([(0, "nan"), (1, "inf"), (2, "inf"), (2, "nan")], 3))
def test_such_a_step_ends_the_run_on_all_devices(tmp_path: Path, place: int, number: str) -> None:
    with written(files_of("fp32")) as folder:
        package = load_package(folder)
        data = loader(tmp_path, {3}, place, number)
        models, printed = trained(package, "--steps", "5", "--data", data)
        assert "NonFinite" in printed and "step 2: loss" in printed and "step 3" not in printed, printed
        before, _ = trained(package, "--steps", "2", "--data", data)
        parameters = [[package.runtime.local(p) for m in run for p in m.parameters()] for run in (models, before)]
        assert all(map(torch.equal, *parameters))


def test_so_many_in_a_row_are_left_out(tmp_path: Path) -> None:
    with written(files_of("fp32")) as folder:
        package = load_package(folder)
        data = loader(tmp_path, {2, 3, 5}, 0)
        models, printed = trained(package, "--steps", "5", "--nonfinite", "skip:2", "--data", data)
        assert printed.count("left out") == 3 and "left out, 2 in a row" in printed and "NonFinite" not in printed
        assert all(bool(torch.isfinite(x).all()) for x in state(models, package)), "buffers, too"
        _, printed = trained(package, "--steps", "5", "--nonfinite", "skip:1", "--data", data)
        assert "NonFinite" in printed and "after 1 in a row that were left out" in printed


def test_gradients_that_overflow_under_a_scale_are_no_such_step(tmp_path: Path) -> None:
    with written(files_of("fp16-mixed")) as folder:
        package = load_package(folder)
        data = loader(tmp_path, set(), 0)
        _, printed = trained(package, "--steps", "4", "--loss-scale", str(2.0**60), "--data", data)
        assert "steps skipped 4" in printed and "NonFinite" not in printed, printed
        _, printed = trained(package, "--steps", "4", "--data", loader(tmp_path, {2}, 2))
        assert "NonFinite" in printed and "step 1" in printed and "step 2" not in printed
        _, printed = trained(package, "--steps", "9", "--loss-scale", str(2.0**-26), "--data", loader(tmp_path, {2}, 0))
        assert "NonFinite" in printed, "there is no end of overflows below any scale"


def test_what_an_update_made_no_number_of_is_not_saved() -> None:
    with written(files_of("fp32")) as folder:
        package = load_package(folder)

        def saving(mesh: Any) -> str:
            model = package.train.build_model(mesh)
            optimizer = package.train.make_optimizer(model)
            for parameter in model.parameters():
                with torch.no_grad():
                    package.runtime.local(parameter).zero_()
            judge = package.runtime.FiniteSteps(mesh, package.model.LOSS_AXES)
            judge.check_saved(model, optimizer)
            if mesh.rank == 1:
                with torch.no_grad():
                    package.runtime.local(next(model.parameters())).view(-1)[0] = math.inf
            try:
                judge.check_saved(model, optimizer)
            except package.runtime.NonFinite as error:
                return str(error)
            return ""

        said = run_lockstep(AXES, saving, 60.0, package.runtime.ParallelMesh)
        assert all("nothing is saved" in one for one in said), said


@pytest.mark.parametrize("word", ["skip", "skip:0", "skip:x", "go"])
def test_an_option_that_makes_no_sense(word: str) -> None:
    with written(files_of("fp32")) as folder:
        package = load_package(folder)
        with pytest.raises(package.batches.UserError, match="expected stop, or skip:N"):
            package.train.take_options(package.train.parse_arguments(["--nonfinite", word]))
