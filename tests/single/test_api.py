"""The Python interface in one process: a notebook's."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune

import autoshard
from autoshard.errors import CaptureError, InvalidFileError, UsageError, UserError
from autoshard.graph_capture import call_record
from autoshard.ir.plan_json import dumps
from autoshard.system import disk_cache
from tests.api_worker import Frozen, Tied
from tests.hangs import HANGS
from tests.slow import quick_at, thinned

BATCH = {"ids": torch.randint(0, 12, (8, 4)), "labels": torch.randint(0, 12, (8,))}
ROWS = torch.randn(8, 16)
WHERE = {"hardware": "cpu-local", "mesh": "dp=2,tp=2"}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def captured() -> autoshard.api.planned.CapturedModel:
    return autoshard.capture(mlp(), ROWS)


def test_importing_is_light() -> None:
    code = "import sys, autoshard; print(sorted({'torch', 'numpy'} & set(sys.modules)), autoshard.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS)
    assert done.stdout.startswith("[] ['Symbol', '__version__', 'capture'"), done.stderr


def test_every_name_is_there() -> None:
    """Verbs that are folders, too, are called as verbs before and after the folder is imported."""
    for name in {*autoshard.__all__} - {"__version__"}:
        assert callable(getattr(autoshard, name))
    assert "inputs" in inspect.signature(autoshard.capture).parameters
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        _ = autoshard.plann  # type: ignore[attr-defined]


def test_from_a_model_to_a_package(tmp_path: Path) -> None:
    model = Tied().train(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    captured = autoshard.capture(model, BATCH)
    assert captured.graph.inputs == ("ids", "labels") and "parameters" in str(captured)
    plan = autoshard.plan(captured, **WHERE, pins={"head": "Shard(0)@dp"}, memory_limit="1 GiB")
    assert plan.plan.search.pins == ("head=Shard(0)@dp",)
    proof = autoshard.verify(plan)
    assert proof.passed, proof.summary()
    assert autoshard.simulate(plan).step_seconds == plan.plan.predicted_seconds
    assert "<html" in autoshard.report(plan, tmp_path / "report.html")
    assert (tmp_path / "report.html").is_file()
    folder = autoshard.write(plan, tmp_path / "package")
    assert autoshard.load_plan(folder).plan == plan.plan
    assert not model.training and all(torch.equal(model.state_dict()[name], old) for name, old in before.items())
    assert type(model.forward) is type(Tied().forward)  # the model is as it was


@pytest.mark.parametrize("seed", thinned(range(3), 3))
def test_any_plan_is_read_back(tmp_path: Path, seed: int) -> None:
    """One that moves a buffer's new value to where it is stored, too; with the way its model is called."""
    plan = autoshard.plan(Tied(), BATCH, **WHERE, strategy=f"random:{seed}")
    read = autoshard.load_plan(autoshard.write(plan, tmp_path / "package"))
    assert read.plan == plan.plan and replace(read.graph, free_sizes=()) == plan.graph
    assert read.graph.free_sizes[0].fixed == ""  # found out as the package was written
    call = call_record.read(read.graph.call, read.graph.inputs, "it")
    assert plan.live is not None
    assert (call.form, call.returned) == (plan.live.call.form, plan.live.call.returned)


def test_the_same_as_the_command_line(tmp_path: Path) -> None:
    """A model by name: the very plan of the command, and its verification at reduced sizes."""
    from autoshard.cli.commands import main

    assert (
        main(["plan", "examples/mlp.py:build", "--mesh", "dp=2", "--hardware", "cpu-local", "--out", f"{tmp_path}/o"])
        == 0
    )
    plan = autoshard.plan("examples/mlp.py:build", hardware="cpu-local", mesh="dp=2")
    assert dumps(plan.plan) == (tmp_path / "o" / "plan.json").read_text()
    assert autoshard.verify(plan, arguments={"features": 16}).passed


def test_a_plan_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same graph, profile and request, and no other."""
    from autoshard import workflow

    x, model, calls = torch.randn(8, 16), mlp(), []
    monkeypatch.setattr(workflow, "make_plan", lambda *a, planner=workflow.make_plan: calls.append(1) or planner(*a))
    first = autoshard.plan(model, x, **WHERE, cache=tmp_path)
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    second = autoshard.plan(mlp(), x, **WHERE)
    assert dumps(first.plan) == dumps(second.plan) and len(calls) == 1
    autoshard.plan(model, x, **WHERE, level="memory")
    autoshard.plan(model, x[:4], **WHERE)
    assert len(calls) == 3
    monkeypatch.setattr(disk_cache, "code_version", lambda: "of another autoshard")
    autoshard.plan(model, x, **WHERE)
    assert len(calls) == 4
    monkeypatch.undo()
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    whole = {path: path.read_bytes() for path in tmp_path.glob("plan-*.cache")}
    for path, content in whole.items():
        path.write_bytes(content[: len(content) // 2])
    for level in ("speed", "memory"):
        autoshard.plan(model, x, **WHERE, level=level)
    assert sum(path.read_bytes() == content for path, content in whole.items()) == 2  # made anew, the very same


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: autoshard.plan(mlp(), torch.randn(8, 16), hardware="cpu-local"), UsageError, "neither a mesh nor"),
        (lambda: autoshard.plan(mlp(), torch.randn(8, 16), **WHERE, solvr="ilp"), UsageError, "no setting 'solvr'"),
        (lambda: autoshard.plan(mlp(), torch.randn(8, 16), **WHERE, devices=8), UsageError, "devices=8"),
        (lambda: autoshard.plan(mlp(), hardware="cpu-local", devices=[4, 2]), UsageError, "folder, also=others"),
        (lambda: autoshard.plan(mlp(), hardware="cpu-local", devices=0), UsageError, "devices=0: expected a whole"),
        (lambda: autoshard.plan(mlp(), **WHERE), UsageError, "needs example inputs"),
        (lambda: autoshard.plan(nn.Linear, torch.ones(8, 4), **WHERE), UsageError, "got <class .*Linear"),  # type: ignore[arg-type]
        (lambda: autoshard.plan(mlp(), ROWS, hardware="cpu-local", mesh=4), UsageError, "mesh=4: expected names"),  # type: ignore[arg-type]
        (lambda: autoshard.plan(mlp(), ROWS, **WHERE, micro_batches="4"), UsageError, "'4': expected a whole number"),
        (lambda: autoshard.verify(autoshard.plan(mlp(), ROWS, **WHERE), backend="nccl"), UsageError, "backend 'nccl'"),  # type: ignore[arg-type]
        (lambda: autoshard.plan(captured(), ROWS, **WHERE), UsageError, "inputs can't be set for a captured"),
        (lambda: autoshard.plan(captured(), precision="bf16-mixed", **WHERE), UsageError, "precision can't be set"),
        (lambda: autoshard.plan(captured(), training=False, **WHERE), UsageError, "training can't be set"),
        (lambda: autoshard.plan("examples/mlp.py:build", torch.ones(1), **WHERE), UsageError, "its own inputs"),
        (lambda: autoshard.plan("examples/no.py:build", **WHERE), UsageError, "no file"),
        (lambda: autoshard.capture(mlp(), (1, 2)), UsageError, "the inputs are no call of the model"),
        (lambda: autoshard.capture(Tied(), {"ids": 1}), CaptureError, "hold no tensor"),
        (lambda: autoshard.capture(Tied(), {**BATCH, "mask": 1}), UsageError, "takes no 'mask'"),
        (lambda: autoshard.load_plan("no/such/package"), InvalidFileError, "there is no package"),
        (
            lambda: autoshard.write(autoshard.plan(mlp(), torch.randn(8, 16), **WHERE), "nowhere"),
            UsageError,
            "returns no loss",
        ),
    ],
)
def test_what_is_refused(call: Callable[[], object], kind: type[UserError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        call()
    assert caught.value.hint


def test_a_loss_by_name_and_targets() -> None:
    x, t = torch.randn(8, 16), torch.randint(0, 8, (8,))
    plans = [
        autoshard.plan(mlp(), x, targets=t, loss=loss, **WHERE)
        for loss in (cross_entropy, "torch.nn.functional:cross_entropy")
    ]
    assert plans[0].plan.ops == plans[1].plan.ops and autoshard.verify(plans[0]).passed


def test_layouts_and_strategies_as_data() -> None:
    x, t = torch.randn(8, 16), torch.randint(0, 8, (8,))
    pins = {"0.weight": ((2, 2),), "0": ((2, 1), (2, 1), None)}
    plan = autoshard.plan(mlp(), x, targets=t, loss=cross_entropy, **WHERE, pins=pins)
    weight = autoshard.parameter_layouts(plan)["0.weight"]
    assert weight["shape"] == [32, 16] and weight["local_shape"] == [16, 8] and weight["counts"] == [2, 2]
    assert sorted(axis for dim in weight["dims"] for axis in dim) == ["dp", "tp"] and weight["decided_by"] == "pin"
    rows = autoshard.operator_strategies(plan)
    assert [row["target"] for row in rows] == [op.target for op in plan.graph.ops]
    assert rows[0]["counts"][:2] == [[2, 1], [2, 1]] and rows[0]["result_counts"] == [[2, 2]]
    assert [move["tensor"] for move in rows[0]["moved"]] and json.loads(json.dumps(rows)) == rows
    assert "= aten.linear(input, p_0_weight" in autoshard.strategies_text(plan).splitlines()[0]


def test_the_package_of_an_object(tmp_path: Path) -> None:
    """Its plan says that there is no code to verify it with; a plan of another model is no part of it."""
    x, t = torch.randn(8, 16), torch.randint(0, 8, (8,))
    options = {"targets": t, "loss": cross_entropy, "hardware": "cpu-local"}
    plan = autoshard.plan(mlp(), x, **options, mesh="dp=2")
    other = autoshard.plan(nn.Linear(16, 8), x, **options, mesh="dp=4")
    with pytest.raises(UsageError, match="has other parameters"):
        autoshard.write(plan, tmp_path / "package", also=[other])
    assert not (tmp_path / "package").exists()
    autoshard.write(plan, tmp_path / "package", also=[autoshard.plan(mlp(), x, **options, mesh="dp=4")])
    with pytest.raises(UsageError, match="made from an object, a Sequential"):
        autoshard.verify(autoshard.load_plan(tmp_path / "package"))


def test_a_part_stays_in_evaluation(capfd: pytest.CaptureFixture[str]) -> None:
    """As the model does; its state dict is the original's, complex numbers too."""
    model, x = Frozen(), torch.randn(8, 8)
    plan = autoshard.plan(model, x, **WHERE)
    assert "evaluation mode is meant to stay for original.1, original.2" in capfd.readouterr().err
    assert not plan.graph.buffer_updates and autoshard.verify(plan).passed
    parallel = autoshard.parallelize(model, autoshard.plan(model, x, hardware="cpu-local", mesh="dp=1"))
    assert torch.allclose(parallel(x), model(x))
    state = parallel.full_state_dict()
    assert {name: (value.shape, value.dtype) for name, value in state.items()} == {
        name: (value.shape, value.dtype) for name, value in model.state_dict().items()
    }
    parallel.load_state_dict({name: 2 * value for name, value in state.items()})
    assert torch.equal(parallel.full_state_dict()["turns"], 2 * state["turns"])


class Similar(nn.Module):
    """As CLIP: features, and a temperature that is a number, but no loss."""

    def __init__(self, beside: bool = False) -> None:
        super().__init__()
        self.features, self.scale, self.beside = mlp(), nn.Parameter(torch.tensor(0.5)), beside

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.features(x)
        return y, y.square().mean() if self.beside else self.scale.exp()


def test_a_number_of_parameters_alone_is_no_loss() -> None:
    """All outputs have gradients; beside a loss, a backward from another output is an error."""
    where = {"hardware": "cpu-local", "mesh": "dp=1"}
    model, x = Similar(), torch.randn(8, 16)
    parallel = autoshard.parallelize(model, autoshard.plan(model, x, **where))
    for each in (model, parallel):
        y, scale = each(x)
        (y * scale).square().mean().backward()
    for name, parameter in parallel.named_parameters():
        gradient: Any = parameter.grad
        assert torch.allclose(gradient.full_tensor(), model.get_parameter(name).grad), name  # type: ignore[arg-type]
    model = Similar(beside=True)
    y, loss = autoshard.parallelize(model, autoshard.plan(model, x, **where))(x)
    with pytest.raises(UsageError, match="another output than the loss"):
        (y.sum() + loss).backward()


@pytest.mark.parametrize("name", quick_at(["weight_norm", "prune"], 0))
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_weights_that_are_computed_before_a_forward(name: str) -> None:
    """`copy.deepcopy` refuses them."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    if name == "prune":
        prune.random_unstructured(model[0], "weight", 0.3)
    else:
        nn.utils.weight_norm(model[0])
    proof = autoshard.verify(autoshard.plan(model, torch.randn(4, 8), **WHERE))
    assert proof.passed, proof.failure


def test_a_backward_that_fails_is_the_models_own() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x).sigmoid()
            return (h.add_(1) * x).sum()

    plan = autoshard.plan(Written(), torch.randn(4, 4), **WHERE)
    with pytest.raises(CaptureError, match=r"the model itself fails.*modified by an inplace operation"):
        autoshard.verify(plan)
