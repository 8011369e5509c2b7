"""Models as they come: keyword, dict and nested inputs, ModelOutputs, a loss function beside the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from autoshard.api.live_model import called_with
from autoshard.cli.commands import main
from autoshard.errors import CaptureError, InvalidFileError, UsageError, UserError
from autoshard.graph_capture import call_record
from autoshard.graph_capture.call_form import Taken, arguments_of, call_by, model_call, rebuilt
from autoshard.graph_capture.capture import capture
from autoshard.graph_capture.model_spec import LOSS
from tests.slow import slow

HERE = f"{__file__}:"


class Head(nn.Module):
    """Takes a nested batch, returns a dict; `labels` are not its business."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)

    def forward(self, batch: dict[str, Any], scale: float = 1.0) -> dict[str, Tensor]:
        return {"logits": self.layer(batch["x"]) * scale + batch["more"][0], "features": batch["x"]}


def head() -> tuple[nn.Module, dict[str, Any], Tensor]:
    batch = {"x": torch.randn(4, 8), "more": [torch.randn(4, 6), "text"]}
    return Head(), {"batch": batch, "scale": 2.0}, torch.randint(0, 6, (4,))


def labelled() -> tuple[nn.Module, dict[str, Any]]:
    model, batch, labels = head()
    return model, {**batch, "labels": labels}


class Open(nn.Module):
    """As models of transformers: its forward takes any keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)

    def forward(self, x: Tensor, **others: Any) -> tuple[Tensor, dict[str, Any]]:
        assert not set(others) - {"mask"}, others
        return self.layer(x) * others.get("mask", 1), {"x": x, "kept": (None, 3)}


def open_ended() -> tuple[nn.Module, dict[str, Any]]:
    return Open(), {"mask": torch.ones(4, 1), "x": torch.randn(4, 8), "labels": torch.randint(0, 6, (4,))}


def plain() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Open(), (torch.randn(4, 8),)


def first_by_name(output: tuple[Tensor, Any], labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output[0], labels)


def language_model() -> tuple[nn.Module, dict[str, Tensor]]:
    """As transformers has it: a ModelOutput, with a cache that holds no tensor of its own."""
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=19, n_positions=8, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(0, 19, (4, 8))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def cross_entropy(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"], target)


def by_name(outputs: dict[str, Tensor], *, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"], labels)


def no_tensors() -> tuple[nn.Module, dict[str, Any]]:
    return Head(), {"batch": {"x": 1}}


def three_without_loss() -> tuple[nn.Module, Tensor, Tensor]:
    return nn.Linear(2, 2), torch.randn(2, 2), torch.randn(2, 2)


@pytest.mark.parametrize(
    ("name", "loss", "inputs"),
    [
        slow("head", "cross_entropy", ["batch_x", "batch_more_0", "target"]),
        ("labelled", "by_name", ["batch_x", "batch_more_0", "labels"]),
        slow("open_ended", "first_by_name", ["mask", "x", "labels"]),
        slow("language_model", "", ["input_ids", "labels"]),
    ],
)
def test_plan_and_verify(name: str, loss: str, inputs: list[str], tmp_path: Path) -> None:
    """The package's inputs have the batch's names; it computes what the original model and loss do."""
    arguments = {LOSS: HERE + loss} if loss else {}
    graph = capture(HERE + name, arguments)
    assert list(graph.inputs) == inputs
    assert graph.loss == graph.outputs[0]
    out = tmp_path / "out"
    options = ["--mesh", "dp=2,tp=2", "--hardware", "cpu-local", "--strategy", "random:1", "--out", str(out)]
    loss_options = [LOSS, HERE + loss] if loss else []
    assert main(["plan", HERE + name, *loss_options, *options]) == 0
    assert LOSS in (out / "model_parallel.py").read_text().partition("from __future__")[0] or not loss
    assert main(["verify", str(out), "--backend", "lockstep"]) == 0  # from the plan alone


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: capture(HERE + "labelled", {}), UsageError, "the forward of Head takes no 'labels'"),
        (lambda: capture(HERE + "labelled", {LOSS: HERE + "cross_entropy"}), UsageError, "nor does a loss function"),
        (lambda: capture(HERE + "three_without_loss", {}), UsageError, "targets are given, but no loss function"),
        (lambda: capture(HERE + "no_tensors", {}), CaptureError, "inputs"),
        (lambda: capture(HERE + "head", {LOSS: HERE + "no_such"}), UsageError, "there is no function 'no_such'"),
    ],
)
def test_what_is_refused(call: Callable[[], object], kind: type[UserError], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_values_keep_their_form() -> None:
    """Named tuples, dataclasses, constants; a tensor that comes twice in an output is one."""
    x, y = torch.zeros(1), torch.ones(1)
    taken = Taken()
    form = taken.form([{"a": x, "b": (1, None, y)}, x], "", shared=True)
    assert [id(t) for t in taken.tensors] == [id(x), id(y)]
    assert rebuilt(form, ["first", "second"]) == [{"a": "first", "b": (1, None, "second")}, "first"]
    other = Taken()
    assert other.form([{"a": y, "b": (1, None, x)}, x], "", shared=True) != form  # another tensor comes twice


@pytest.mark.parametrize(
    ("name", "loss", "given"),
    [
        ("labelled", "by_name", lambda: labelled()[1]),
        ("open_ended", "first_by_name", lambda: open_ended()[1]),
        ("plain", "", lambda: plain()[1]),
        ("language_model", "", lambda: language_model()[1]),
    ],
)
def test_a_graph_tells_how_its_model_is_called(name: str, loss: str, given: Callable[[], Any]) -> None:
    """What is read back takes the same call, in any order of its keywords, and no other; it returns the same."""
    graph = capture(HERE + name, {LOSS: HERE + loss} if loss else {}, training=bool(loss) or name == "language_model")
    call = call_record.read(graph.call, graph.inputs, "it")
    model, batch = globals()[name]()[0], given()
    args, kwargs = ((), dict(reversed(batch.items()))) if isinstance(batch, dict) else (batch, {})
    same, tensors = called_with(model, call, args, kwargs, targets=0)
    assert same.form == call.form
    assert [x.shape for x in call.in_order(tensors)] == [graph.tensor(n).shape for n in graph.inputs]
    more = "scale" if name == "labelled" else "further"
    other, _ = called_with(model, call, args, {**kwargs, more: 1}, targets=0)
    assert other.form != call.form
    assert call.returned is not None
    returned = rebuilt(call.returned, [f"output {i}" for i in range(len(graph.outputs))])
    if not loss:
        assert type(returned) is type(model(*args, **kwargs))
    if name == "plain":
        assert returned == ("output 0", {"x": "output 1", "kept": (None, 3)})
    if name == "language_model":
        assert returned.loss == "output 0" and returned.logits == "output 1"


def test_what_a_damaged_call_says() -> None:
    for text, kind, words in (
        ("", UsageError, "does not say how its model is called"),
        ("{}", InvalidFileError, "is damaged: its call is KeyError"),
        ('{"arguments": {"kind": "os:system", "keys": [], "items": []}}', UsageError, "a system of os"),
        ('{"arguments": {"kind": "pathlib:Path", "keys": [], "items": []}}', InvalidFileError, "no container"),
        ('{"arguments": {"kind": "no.such:Output", "keys": [], "items": []}}', UsageError, "which is not imported"),
    ):
        with pytest.raises(kind, match=words):
            call_record.read(text, (), "the graph")


def test_a_call_leaves_what_it_stands_for() -> None:
    model, batch, target = head()
    call, tensors = model_call(arguments_of(model, batch, target, cross_entropy), (), cross_entropy)
    expected = cross_entropy(model(**batch), target)
    for _ in range(2):  # a model that was called so before is not called through both
        call_by(model, call)
    assert torch.equal(model(*tensors), expected)
