"""What a user sees when the model they named is missing, broken, or can't be captured: one sentence."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from autoshard.errors import CaptureError, InvalidFileError, UsageError, UserError
from autoshard.graph_capture.capture import capture
from autoshard.graph_capture.load_model import load_model, verify_arguments
from tests.slow import slow

MODEL = """
import torch
from torch import nn

VERIFY = {"size": 2}

class Model(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = nn.Linear(size, 1)

    def forward(self, x):
        BODY

def build(size: int = 3, batch: int = 4):
    return Model(size), (torch.ones(batch, size),)

def other():
    return build()[0]

def no_tensors():
    return build()[0], {"x": 4, "y": [None]}

def needs(size):
    return build(size)

def raises():
    sizes = []
    return sizes[0]

def other_weights():
    Model(size=2).load_state_dict(nn.Linear(2, 1).state_dict())

def many_other_weights():
    nn.Sequential(*(nn.Linear(1, 1) for _ in range(99))).load_state_dict({})

def reads_a_value():
    rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
    return build()
"""


@pytest.fixture
def model(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(body: str = "return self.layer(x).sum()", text: str = MODEL) -> str:
        path = tmp_path / "mine.py"
        path.write_text(text.replace("BODY", textwrap.indent(textwrap.dedent(body), " " * 8).strip()))
        return str(path)

    return write


def message(kind: type[UserError], call: object) -> str:
    assert callable(call)
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert len(text.splitlines()) <= 2 and len(text) < 600, text
    return text


BROKEN = [
    ("if x.sum() > 0:\n    x = x + 1\nreturn self.layer(x).sum()", "mine.py:13 `if x.sum() > 0:`", "a tensor's value"),
    ("return self.layer(x[: int(x.sum())])", "mine.py:13 `return self.layer(x[: int(x.sum())])`", "a tensor's value"),
    ("x = x * x.max().item()\nreturn self.layer(x).sum()", "mine.py:13 `x = x * x.max().item()`", "a tensor's value"),
    ("return self.layer(x[x > 0]).sum()", "mine.py:13 `return self.layer(x[x > 0]).sum()`", ""),
    ("n = len(set(x.sum(1).long().tolist()))\nreturn x.sum() * n", "mine.py:13 `n = len(set(", "a tensor's value"),
    ("y = torch.sparse.mm(torch.sparse_coo_tensor(x[:2].long(), x[0], (9, 4)), x)\nreturn y.sum()",
     "mine.py:13 `y = torch.sparse.mm(", "layout sparse_coo are not supported"),
    ("y = x.nonzero()\nreturn y.float().sum()", "mine.py:13 `y = x.nonzero()`", "a tensor's value"),
    ("return self.layer(x).sum(), set()", "its forward returns a set, which is no tensor", "return the loss alone"),
    ("y = x @ x\nreturn y.sum()", "mine.py:13 `y = x @ x`", "with a mask that hides something"),
    ("return self.missing(x)", "mine.py:13 `return self.missing(x)`", "missing"),
    ("y = x.numpy()\nreturn self.layer(x).sum()", "mine.py:13 `y = x.numpy()`", ""),
    ("with torch.autocast('cpu'):\n    y = self.layer(x)\nreturn y", "mine.py:13 `with torch.auto", "autocast"),
    ("y = torch.func.grad(lambda u: self.layer(u).sum())(x)\nreturn y.sum()", "mine.py:13 `y = t", "differentiates"),
    ("y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.layer(x),))\nreturn y.sum()", "mine.py:13 `y = t",
     "the model uses cond"),
]  # fmt: skip


@pytest.mark.parametrize("training", [True, slow(False)])
@pytest.mark.parametrize("body, place, reason", BROKEN)
def test_the_line_that_breaks_the_capture_is_named(  # type: ignore[no-untyped-def]
    model, body: str, place: str, reason: str, training: bool
) -> None:
    spec = model(body) + ":build"
    text = message(CaptureError, lambda: capture(spec, {}, training=training))
    assert place in text and reason in text, text


def test_a_branch_in_a_library_is_told_as_what_a_user_can_not_edit(model, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A library is what is installed: a package with what `pip` notes of it."""
    (tmp_path / "gatelib").mkdir()
    (tmp_path / "gatelib/gates.py").write_text(
        "class Gate:\n    def gated(self, x):\n        return x if x.sum() > 0 else -x\n"
    )
    (tmp_path / "gatelib-1.0.dist-info").mkdir()
    (tmp_path / "gatelib-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: gatelib\nVersion: 1.0\n")
    (tmp_path / "gatelib-1.0.dist-info/RECORD").write_text("gatelib/gates.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = model("from gatelib.gates import Gate\nreturn self.layer(Gate().gated(x)).sum()") + ":build"
    text = message(CaptureError, lambda: capture(spec, {}))
    assert "gatelib/gates.py:3 `return x if x.sum() > 0 else -x`" in text
    assert "a setting of gatelib with which" in text and "in the place of gatelib.gates.Gate.gated" in text, text
    user_spec = model("return self.layer(x).sum() if x.sum() > 0 else x") + ":build"
    text = message(CaptureError, lambda: capture(user_spec, {}))
    assert "follow from sizes" in text and "a setting of" not in text, text


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
def test_a_sparse_tensor_is_refused_where_it_is_made(tmp_path, layout: str) -> None:  # type: ignore[no-untyped-def]
    """Here as a buffer."""
    text = "import torch\nfrom torch import nn\n\n\ndef build():\n    model = nn.Linear(4, 4)\n"
    text += f"    model.adjacency = nn.Buffer(torch.eye(4).to_sparse(layout=torch.{layout}))\n"
    text += "    return model, (torch.rand(4, 4),)\n"
    (tmp_path / "mine.py").write_text(text)
    said = message(CaptureError, lambda: capture(f"{tmp_path}/mine.py:build", {}))
    assert "mine.py:7 `model.adjacency = " in said and f"layout {layout}" in said and "index_add" in said


def test_missing_callable_lists_those_there_are(model) -> None:  # type: ignore[no-untyped-def]
    text = message(UsageError, lambda: capture(model() + ":bild", {}))
    names = "build, many_other_weights, needs, no_tensors, other, other_weights, raises, reads_a_value"
    assert "'bild'" in text and names in text


@pytest.mark.parametrize(
    "spec, words",
    [
        ("nowhere/model.py:build", "no file nowhere/model.py"),
        ("no_such_package.model:build", "no module 'no_such_package.model'"),
        ("model.py", "cannot find model 'model.py'"),
    ],
)
def test_missing_file_or_module(spec: str, words: str) -> None:
    assert words in message(UsageError, lambda: capture(spec, {}))


def test_the_callables_own_error_is_told_with_its_line(model) -> None:  # type: ignore[no-untyped-def]
    text = message(CaptureError, lambda: load_model(model() + ":raises", {}))
    assert "mine.py:29 `return sizes[0]`: IndexError: list index out of range" in text, text


def test_a_line_that_only_announces_the_error_takes_the_next(model) -> None:  # type: ignore[no-untyped-def]
    text = message(CaptureError, lambda: load_model(model() + ":other_weights", {}))
    assert 'state_dict for Model: Missing key(s) in state_dict: "layer.weight", "layer.bias".' in text, text
    text = message(CaptureError, lambda: load_model(model() + ":many_other_weights", {}))
    assert 'Missing key(s) in state_dict: "0.weight"' in text and "…" in text, text


def test_a_file_that_does_not_import(model) -> None:  # type: ignore[no-untyped-def]
    text = message(CaptureError, lambda: load_model(model(text="import torch\nx = 1 / 0\n") + ":build", {}))
    assert "mine.py:2 `x = 1 / 0`: ZeroDivisionError" in text
    text = message(CaptureError, lambda: load_model(model(text="def build(:\n") + ":build", {}))
    assert "mine.py:1: SyntaxError" in text


@pytest.mark.parametrize("name, words", [("other", "returned Model"), ("no_tensors", "example inputs as dict")])
def test_wrong_return_type(model, name: str, words: str) -> None:  # type: ignore[no-untyped-def]
    assert words in message(CaptureError, lambda: load_model(f"{model()}:{name}", {}))


def test_arguments_are_checked(model) -> None:  # type: ignore[no-untyped-def]
    spec = model()
    text = message(UsageError, lambda: capture(spec + ":build", {"width": 3}))
    assert "no argument 'width'" in text and "size=3, batch=4" in text
    assert "'size'" in message(UsageError, lambda: capture(spec + ":needs", {}))


@pytest.mark.parametrize("option", [{"precision": "fp8"}, {"optimizer": "lion"}])
def test_unknown_options(model, option: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    assert "one of" in message(UsageError, lambda: capture(model() + ":build", {}, **option))


def test_a_constructor_that_reads_values_is_built_for_real(model) -> None:  # type: ignore[no-untyped-def]
    graph = capture(model() + ":reads_a_value", {})
    assert [op.target for op in graph.ops] == ["aten.linear", "aten.sum"]


def test_verify_arguments(model) -> None:  # type: ignore[no-untyped-def]
    assert verify_arguments(model() + ":build") == {"size": 2}
    assert verify_arguments(model(text=MODEL.replace("VERIFY", "OTHER")) + ":build") == {}
    assert "VERIFY" in message(
        UsageError, lambda: verify_arguments(model(text=MODEL.replace('{"size": 2}', "3")) + ":build")
    )
    wrong = MODEL.replace('{"size": 2}', '{"width": 2}')
    assert "'width'" in message(UsageError, lambda: verify_arguments(model(text=wrong) + ":build"))
    assert verify_arguments(model(text=MODEL.replace('{"size": 2}', "{}")) + ":needs") == {}  # --with gives what lacks


def test_example_inputs_are_valid_when_built_for_real() -> None:
    for name, sizes in (("mlp", {}), ("lenet", {}), ("gpt2", {"n_layer": 1, "n_embd": 48})):
        model, inputs = load_model(f"examples/{name}.py:build", sizes, device="cpu")
        assert torch.isfinite(model(*inputs))
        assert all(not torch.equal(value[0], value[1]) for value in inputs if value.dim() > 1)
        _, (*_, labels) = load_model(f"examples/{name}.py:build", sizes, device="cpu")
        assert name == "mlp" or labels.dtype == torch.int64


def save_exported(path: Path, device: str) -> str:
    with torch.device(device):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))
        model[2].weight = model[0].weight
        inputs = (torch.ones(2, 3),)
    torch.export.save(torch.export.export(model, inputs, strict=False), path)
    return str(path)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_exported_program(tmp_path: Path, device: str) -> None:
    spec = save_exported(tmp_path / "saved.pt2", device)
    graph = capture(spec, {})
    assert [op.target for op in graph.ops] == ["aten.linear", "aten.relu", "aten.linear"]
    assert [op.module for op in graph.ops] == ["0", "1", "2"] and graph.name == "saved"
    if device == "cpu":
        assert [(p.path, p.ties) for p in graph.parameters] == [
            ("0.weight", ("2.weight",)),
            ("0.bias", ()),
            ("2.bias", ()),
        ]
    model, inputs = load_model(spec, {}, device="cpu")
    assert model(*inputs).shape == (2, 3) and model(*inputs).device.type == "cpu"
    assert verify_arguments(spec) == {}
    assert "takes no arguments" in message(UsageError, lambda: load_model(spec, {"size": 3}))


def test_not_an_exported_program(tmp_path: Path) -> None:
    (tmp_path / "other.pt2").write_text("hello")
    assert "other.pt2" in message(InvalidFileError, lambda: capture(str(tmp_path / "other.pt2"), {}))
    assert "no file" in message(InvalidFileError, lambda: capture(str(tmp_path / "none.pt2"), {}))
