"""A graph carried to another batch is the model captured there, its numbers too, or it is refused with the line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.cli.commands import main
from autoshard.errors import CaptureError, UsageError
from autoshard.graph_capture.capture import capture
from autoshard.graph_capture.dynamic_export.concrete import with_samples
from autoshard.ir.graph import FreeSize, Graph
from autoshard.ir.graph_json import dumps
from autoshard.rules.resize.captured_batch import captured_with, followed_numbers, with_numbers_of
from autoshard.rules.resize.rebatch import rebatched
from autoshard.verification import verify_package
from tests.models import NAMES
from tests.slow import quick_at

OWN = 8  # samples captured; all other sizes below are others


class Losses(nn.Module):
    """One layer, and the loss of that name."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.layer, self.name = nn.Linear(width, 5), name
        self.table = nn.Parameter(torch.randn(99, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = getattr(self, self.name)(self.layer(x), y)
        return loss

    def divisor(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, reduction="sum") / len(y)

    def elements(self, z: Tensor, y: Tensor) -> Tensor:
        return z.square().sum() * (1 / z.numel()) + 0 * y.sum()

    def deviation(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, reduction="sum") / (len(y) - 1) ** 0.5

    def literal(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, reduction="sum") / torch.tensor(float(len(y)))

    def filled(self, z: Tensor, y: Tensor) -> Tensor:
        weights = torch.full((len(y),), 1 / len(y), device=y.device)
        return (F.cross_entropy(z, y, reduction="none") * weights).sum()

    def options(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(z, 1 / len(y), self.training), y, label_smoothing=1 / len(y))

    def mask(self, z: Tensor, y: Tensor) -> Tensor:
        keep = z.new_ones(z.size(0))
        return (F.cross_entropy(z, y, reduction="none") * keep).sum() / keep.sum()

    def arange(self, z: Tensor, y: Tensor) -> Tensor:
        weights = torch.arange(len(y), device=y.device) + 1.0
        return (F.cross_entropy(z, y, reduction="none") * weights).sum()

    def downwards(self, z: Tensor, y: Tensor) -> Tensor:
        weights = torch.arange(len(y), 0, -1, device=y.device)
        return (F.cross_entropy(z, y, reduction="none") * weights).sum()

    def sliced(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z + self.table[: len(y)], y)

    def remainder(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y) * (1 + len(y) % 4)

    def half(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z[: len(y) // 2], y[: len(y) // 2])

    def least(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, reduction="sum") / min(len(y), 3)

    def branch(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z.tanh() if len(y) > 6 else z, y)

    def chunks(self, z: Tensor, y: Tensor) -> Tensor:
        return sum((F.cross_entropy(*both) for both in zip(z.split(4), y.split(4), strict=True)), z.new_zeros(()))


FOLLOWED = ("divisor", "elements", "deviation", "literal", "filled", "options", "mask", "arange")
REFUSED = ("downwards", "sliced", "half", "branch", "chunks")


def build(loss: str = "divisor", batch: int = OWN, width: int = 16) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Losses(loss, width), (torch.randn(batch, width), torch.randint(0, 5, (batch,)))


SPEC = f"{__file__}:build"


@pytest.mark.parametrize("loss", quick_at((*FOLLOWED, *REFUSED), 8))
def test_carried_to_another_batch_is_captured_there_or_refused(loss: str) -> None:
    graph = capture(SPEC, {"loss": loss})
    for samples in (4, 18):
        there = capture(SPEC, {"loss": loss, "batch": samples})
        try:
            carried = captured_with(rebatched(graph, samples), SPEC, {"loss": loss}, OWN)
        except UsageError as error:
            assert loss in REFUSED and re.search(r"test_captured_batch\.py:\d+", error.message)
        else:
            assert loss in FOLLOWED or (loss == "branch" and samples > 6)
            assert dumps(carried) == dumps(there)


def test_numbers_that_change_are_told() -> None:
    carried = rebatched(capture(SPEC, {}), 4)
    captured = captured_with(carried, SPEC, {}, OWN)
    (message,) = followed_numbers(captured, carried)
    assert re.search(r"other of div at .*test_captured_batch\.py:\d+ is 4, where 8 was captured$", message)
    assert followed_numbers(carried, carried) == []
    same = rebatched(capture(SPEC, {"loss": "mask"}), 4)
    assert captured_with(same, SPEC, {"loss": "mask"}, OWN) is same


def test_numbers_of_the_planned_batch_alone_fix_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From 3 samples on the divisor is 3; of the 2 that were planned it is 2, and of 1 there is none."""
    argv = ["plan", SPEC, "--with", "loss=least", "--devices", "2", "--global-batch", "4", "--micro-batch", "2"]
    argv += ["--stages", "1", "--hardware", "cpu-local", "--out", str(tmp_path / "package")]
    assert main(argv) == 0, capsys.readouterr().err
    text = (tmp_path / "package" / "model_parallel.py").read_text()
    assert re.search(r"^FREE_SIZES.* = \{\}$", text, re.MULTILINE)
    assert "different for 1 samples, as planned, than for the 2 captured" in " ".join(text.replace('"', "").split())


def test_long_numbers_are_cut_and_what_is_no_number_is_itself() -> None:
    graph = capture(SPEC, {"loss": "literal"})
    (constant,) = (op for op in graph.ops if op.target == "autoshard.constant")

    def having(*values: float) -> Graph:
        pairs = tuple((name, values if name == "values" else value) for name, value in constant.attributes)
        return replace(graph, ops=tuple(replace(op, attributes=pairs) if op is constant else op for op in graph.ops))

    (message,) = followed_numbers(having(*(1.5 * n for n in range(99))), having(1.0))
    assert "values of constant at" in message and "…, where (1.0,) was captured" in message and len(message) < 200
    nothing, other = having(float("nan")), having(float("inf") - float("inf"))
    assert with_numbers_of(nothing, other, OWN) is nothing and followed_numbers(nothing, other) == []
    free = replace(having(1.0), free_sizes=(FreeSize("batch", "", 1, 9),))
    assert with_numbers_of(free, having(2.0), OWN).free_sizes[0].fixed in followed_numbers(having(2.0), free)
    tried = replace(having(1.0), discovered=((constant.name, "a"),))
    with pytest.raises(UsageError, match=rf"{constant.name} .* has other arguments, and its rule was found"):
        with_numbers_of(tried, having(2.0), OWN)


@pytest.mark.parametrize("name", quick_at(["lstm", "shared_twice"], 1))
def test_models_without_such_numbers_are_left_as_they_are(name: str) -> None:
    graph = capture(NAMES[name], {})
    samples = graph.tensor(graph.inputs[0]).shape[0]
    carried = rebatched(graph, 3 * samples)
    assert captured_with(carried, NAMES[name], {}, samples) is carried


ONCE = """
import torch
from torch import nn

library = torch.library.Library("only_once", "DEF")
library.define("twice(Tensor x) -> Tensor")
torch.library.impl(library, "twice", "CompositeImplicitAutograd")(lambda x: x * 2)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).square().sum() / len(x)


def build():
    return Twice(), (torch.randn(8, 4),)
"""


def test_a_file_that_can_be_imported_only_once_is_captured_again(tmp_path: Path) -> None:
    file = tmp_path / "once.py"
    file.write_text(ONCE, encoding="utf-8")
    carried = rebatched(capture(f"{file}:build", {}), 6)
    assert captured_with(carried, f"{file}:build", {}, 8).by_op["div"].attribute("other") == 6
    file.write_text(f"{ONCE}\n", encoding="utf-8")
    with pytest.raises(CaptureError, match="can't be imported"):  # another text is not the module that there was
        capture(f"{file}:build", {})


def test_samples_are_added_in_the_same_order_in_memory() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    row, other, number = torch.arange(6).expand(2, 6), torch.zeros(7, 2), torch.tensor(2.0)
    batch = with_samples((image, row, other, number), 2, 5)
    assert batch[0].shape == (5, 3, 4, 5) and batch[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch[0][4], image[0]) and torch.equal(batch[0][3], image[1])
    assert batch[1].shape == (5, 6) and batch[1].stride() == (0, 1)
    assert batch[2] is other and batch[3] is number


def test_the_package_divides_by_its_own_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3 samples on each of 2 devices: the model divides by 6 there, and by 8 as it was captured."""
    argv = ["plan", SPEC, "--devices", "2", "--global-batch", "24", "--stages", "1", "--micro-batch", "3"]
    assert main([*argv, "--hardware", "a100-80g-sxm", "--out", str(tmp_path / "out"), "--json"]) == 0
    assert "is 6, where 8 was captured" in " ".join(json.loads(capsys.readouterr().out)["notes"])
    for sizes in ({}, {"width": 12}):  # the package itself, and its plan at other sizes
        proof = verify_package(tmp_path / "out", backend="lockstep", arguments=sizes)
        assert proof.passed and bool(proof.reduced) == bool(sizes), proof.failure


@pytest.mark.slow
def test_one_sample_on_all_devices_is_planned(tmp_path: Path) -> None:
    """Of one replica and one sample no dim tells where the batch is, and none need be cut."""
    argv = ["plan", SPEC, "--with", "loss=mask", "--devices", "2", "--global-batch", "1", "--stages", "1"]
    assert main([*argv, "--hardware", "a100-80g-sxm", "--out", str(tmp_path / "out"), "--json"]) == 0
    proof = verify_package(tmp_path / "out", backend="lockstep")
    assert proof.passed, proof.failure


def test_a_saved_graph_tells_that_its_numbers_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "graph.json"
    assert main(["trace", SPEC, "-o", str(saved)]) == 0
    argv = ["plan", str(saved), "--devices", "2", "--global-batch", "24", "--stages", "1", "--micro-batch"]
    for size, expected in (("3", True), ("4", False)):  # 2 x 4 are the samples captured
        capsys.readouterr()
        out = str(tmp_path / size)
        assert main([*argv, size, "--hardware", "a100-80g-sxm", "--out", out]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("saved graph of 8 samples, planned with 6, without the model's code" in said) == expected
        assert ("8 of div at" in said) == expected
