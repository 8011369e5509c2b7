"""`train.py --eval-data` gives the loss of `model.eval()`, or is refused with the line where that is something else."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.graph_capture.two_runs import both_modes
from autoshard.ir.graph import SAME, Graph
from autoshard.ir.graph_json import dumps, graph_hash, loads
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.verification.case import check_files, make_case
from tests.forced import forced_plan
from tests.slow import quick_at


class Head(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.kind = nn.Linear(8, 6), kind
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)
        self.noise = nn.Sequential(nn.AlphaDropout(0.2), nn.Dropout1d(0.3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = getattr(self, self.kind)(self.a(x))
        loss = F.cross_entropy(z, y)
        return loss + 10 * z.square().mean() if self.kind == "term" and self.training else loss

    def term(self, z: Tensor) -> Tensor:
        return z

    def dropped(self, z: Tensor) -> Tensor:
        return F.dropout(z, 0.5, self.training)

    def always_dropped(self, z: Tensor) -> Tensor:
        return F.dropout(z, 0.5)

    def in_place(self, z: Tensor) -> Tensor:
        """`h` is `z` itself where nothing is dropped."""
        h = F.dropout(z, 0.5, self.training)
        h.add_(1)
        return h + z

    def written_after(self, z: Tensor) -> Tensor:
        h = F.dropout(z, 0.5, self.training) + 1
        return h.add_(z)

    def noisy(self, z: Tensor) -> Tensor:
        return z + torch.randn_like(z) if self.training else z

    def scaled(self, z: Tensor) -> Tensor:
        return z * (2.0 if self.training else 1.0)

    def normed(self, z: Tensor) -> Tensor:
        return self.norm(z)

    def noises(self, z: Tensor) -> Tensor:
        return self.noise(z.unsqueeze(0)).squeeze(0)

    def attended(self, z: Tensor) -> Tensor:
        q = z.reshape(1, 1, *z.shape)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3 if self.training else 0.0).reshape(z.shape)

    def attended_with_dropout(self, z: Tensor) -> Tensor:
        q = z.reshape(1, 1, *z.shape)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).reshape(z.shape)

    def asked(self, z: Tensor) -> Tensor:
        """Which a run without values can't answer: two captures tell."""
        assert bool((z == z).all())
        return F.dropout(z, 0.5, self.training)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.LSTM(8, 8, 2, dropout=0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.rows(self.layer(x.unsqueeze(1)))[0].squeeze(1), y)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.norm(self.a(x)), y)


def build(kind: str = "dropped") -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = {"encoder": Encoder, "batch_norm": Normed}.get(kind, lambda: Head(kind))()
    return model, (torch.randn(4, 8), torch.randint(0, 6, (4,)))


SPEC = f"{__file__}:build"
ALIKE = ("dropped", "written_after", "normed", "noises", "attended", "encoder", "asked")
OTHERWISE = ("term", "in_place", "always_dropped", "noisy", "scaled", "attended_with_dropout")


@cache
def captured(kind: str) -> Graph:
    return capture(SPEC, {"kind": kind})


def files_of(kind: str) -> tuple[object, dict[str, str]]:
    graph = captured(kind)
    plan = forced_plan(graph, Mesh.parse("dp=2"), lambda op, strategy: True, 1)
    program = lower(plan, graph)
    return program, dict(emit(program, plan, graph))


@pytest.mark.parametrize("kind", quick_at(ALIKE, 0, 1, 2, 3, 4, 6))
def test_without_dropout_it_is_the_forward_of_training(kind: str) -> None:
    assert captured(kind).evaluation == SAME


@pytest.mark.parametrize("kind", OTHERWISE)
def test_what_only_training_computes_is_found_with_its_line(kind: str) -> None:
    reason = captured(kind).evaluation
    assert reason.startswith("in evaluation the model computes something else, at single/test_evaluation.py:"), reason


@pytest.mark.parametrize("kind", [kind for kind in (*ALIKE, *OTHERWISE) if kind != "in_place"])
def test_two_captures_tell_the_same_as_two_runs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.graph_capture.capture.quickly_alike", lambda *_: False)
    assert (capture(SPEC, {"kind": kind}).evaluation == SAME) == (kind in ALIKE)


def test_runs_leave_the_model_as_it_was() -> None:
    model, inputs = build("written_after")
    before = {name: id(x) for name, x in model.named_parameters()}
    model.norm.eval()
    assert both_modes.quickly_alike(model, inputs)
    assert before == {name: id(x) for name, x in model.named_parameters()}
    assert model.training and not model.norm.training


@pytest.mark.parametrize("kind", quick_at(["dropped", "encoder", "normed"], 2))
def test_evaluation_is_proved(kind: str) -> None:
    case = make_case(SPEC, {"kind": kind}, captured(kind))
    program, files = files_of(kind)
    assert "EVALUATION" not in files["model_parallel.py"] + files["evaluation.py"].partition("import")[2]
    proof = check_files(case, program, files)
    assert proof.passed, proof.failure
    assert proof.as_dict()["errors"]["evaluation"]["tensors"] == 2
    if kind != "normed":
        old, new = "mesh.random.training = False", "mesh.random.training = True"
        faulty = {**files, "evaluation.py": files["evaluation.py"].replace(old, new)}
        assert "evaluation loss" in check_files(case, program, faulty).failure


@pytest.mark.parametrize("kind", quick_at(["term", "batch_norm"], 0))
def test_what_is_refused_is_not_compared(kind: str) -> None:
    case = make_case(SPEC, {"kind": kind}, captured(kind))
    program, files = files_of(kind)
    assert check_files(case, program, files).as_dict()["errors"]["evaluation"]["tensors"] == 0
    if kind == "term":
        assert "test_evaluation.py:" in files["model_parallel.py"].partition("EVALUATION = ")[2][:300]
        assert "make_held_out" not in files["README.md"]


def test_a_graph_keeps_it_and_an_older_one_knows_nothing() -> None:
    graph = captured("term")
    content = json.loads(dumps(graph))
    assert loads(json.dumps(content)).evaluation == content.pop("evaluation") == graph.evaluation
    older = loads(json.dumps(content))
    assert older.evaluation == "" and graph_hash(older) == graph_hash(graph)
    plan = forced_plan(older, Mesh.parse("dp=2"), lambda op, strategy: True, 1)
    assert "an older version" in emit(lower(plan, older), plan, older)["model_parallel.py"]
