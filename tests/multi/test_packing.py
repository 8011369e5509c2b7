"""Documents packed into rows: batches that hold each once, and losses that are those of the documents alone."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_model
from torch import Tensor, nn

from autoshard import plan
from autoshard.api.verbs import write
from autoshard.verification.ranks.loaded_package import _private_imports
from tests.launched import torchrun
from tests.slow import slow

WORDS, WIDTH = 19, 16
SIZES = "batch=4..8/4,sequence=8..16/8@0.1@1.1@2.1"


class Rows(nn.Module):
    """A decoder of rows of documents; `numbering` makes the mask of positions, or of the number of each document."""

    def __init__(self, numbering: Callable[[Tensor], Tensor] | None, shifts: bool) -> None:
        super().__init__()
        self.kept, self.shifts = numbering, shifts
        self.table, self.places, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Embedding(16, WIDTH),
            nn.Linear(WIDTH, WORDS),
        )

    def run(self, ids: Tensor, labels: Tensor, marks: Tensor) -> Tensor:
        length = ids.shape[1]
        x = (self.table(ids) + (self.places(marks) if isinstance(self, ByPositions) else 0))[:, None]
        before = torch.arange(length)[:, None] >= torch.arange(length)
        number = torch.zeros_like(marks) if self.kept is None else self.kept(marks)
        mask = (number[:, :, None] == number[:, None]) & before
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None])[:, 0]
        x, y = (x[:, :-1], labels[:, 1:]) if self.shifts else (x, labels)
        return F.cross_entropy(self.head(x).reshape(-1, WORDS), y.reshape(-1))


class ByPositions(Rows):
    def forward(self, ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        return self.run(ids, labels, position_ids)


class ByDocuments(Rows):
    def forward(self, ids: Tensor, labels: Tensor, documents: Tensor) -> Tensor:
        return self.run(ids, labels, documents)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    return torch.randint(0, WORDS, (8, 16)), torch.randint(0, WORDS, (8, 16)), torch.arange(16).expand(8, 16).clone()


def begun(positions: Tensor) -> Tensor:
    return (positions == 0).cumsum(1)


def same(number: Tensor) -> Tensor:
    return number


def shifted() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ByPositions(begun, shifts=True), inputs()


def in_place() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ByDocuments(same, shifts=False), inputs()


def mixed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ByPositions(None, shifts=True), inputs()


def still() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Nothing is known of its mask: a head of zeros makes all losses equal."""
    model, inputs = mixed()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model, inputs


def package(folder: Path, name: str) -> Path:
    dp_plan = plan(f"{__file__}:{name}", mesh="dp=2", hardware="cpu-local", dynamic=SIZES)
    write(dp_plan, folder / "package")
    (folder / "data.py").write_text(
        "import torch\n"
        "def documents():\n"
        "    g = torch.Generator().manual_seed(3)\n"
        "    for n in 30 * [5, 3, 16, 7, 2, 9, 1, 4]:\n"
        f"        yield torch.randint(0, {WORDS}, (n,), generator=g)\n"
        "def long():\n"
        "    yield torch.zeros(17, dtype=torch.long)\n"
    )
    return folder / "package"


@contextmanager
def packing(folder: Path) -> Iterator[ModuleType]:
    with _private_imports(folder):
        yield importlib.import_module("packing")


def documents(lengths: list[int]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(0, WORDS, (n,), generator=draw) for n in lengths]


def alone(model: nn.Module, docs: list[Tensor], first_counts: bool) -> Tensor:
    """The mean over all labels, each document a batch of its own."""
    losses, counts = [], []
    for document in docs:
        labels = document.clone()
        if not first_counts:
            labels[0] = -100
        count = int((labels != -100).sum())
        if count:
            third = torch.arange(len(document)) if isinstance(model, ByPositions) else torch.zeros_like(document)
            losses.append(model(document[None], labels[None], third[None]) * count)
            counts.append(count)
    return torch.stack(losses).sum() / sum(counts)


@pytest.mark.parametrize(("name", "first_counts"), [("shifted", False), ("in_place", True)])
def test_packed_documents_have_the_loss_that_they_have_alone(tmp_path: Path, name: str, first_counts: bool) -> None:
    """In float64, of the original; every document stands in one row, once and whole."""
    model = globals()[name]()[0].double()
    draw = random.Random(4)
    with packing(package(tmp_path, name)) as module:
        for _ in range(20):
            docs = documents([draw.randint(1, 16) for _ in range(draw.randint(1, 40))])
            batches = list(module.packed(docs, first_counts))
            assert all(x.shape == (8, 16) for batch in batches for x in batch.values())
            counts = [int((batch["labels"] != -100).sum()) for batch in batches]
            assert sum(counts) == sum(len(one) - (not first_counts) for one in docs)
            losses = [model(*batch.values()) * count for batch, count in zip(batches, counts, strict=True) if count]
            if losses:
                loss = torch.stack(losses).sum() / sum(counts)
                assert torch.allclose(loss, alone(model, docs, first_counts), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "first_counts"), [("shifted", False), ("in_place", True)])
def test_a_run_packs_its_documents(tmp_path: Path, name: str, first_counts: bool) -> None:
    """The first loss is that of the original, each document alone."""
    folder, model = package(tmp_path, name), globals()[name]()[0]
    save_model(model, str(tmp_path / "weights.safetensors"))
    options = ("--backend", "gloo", "--steps", 2, "--pack", "--data", f"{tmp_path}/data.py:documents")
    ended = torchrun(folder / "train.py", 2, *options, "--weights", tmp_path / "weights.safetensors")
    assert ended.returncode == 0, ended.stderr
    with packing(folder) as module:
        spec = importlib.util.spec_from_file_location("given", tmp_path / "data.py")  # type: ignore[attr-defined]
        data = importlib.util.module_from_spec(spec)  # type: ignore[attr-defined]
        spec.loader.exec_module(data)
        first = next(module.packed(data.documents(), first_counts))
    first_loss = re.search(r"step 1: loss ([0-9.]+)", ended.stdout)
    assert first_loss is not None and float(first_loss[1]) == pytest.approx(model(*first.values()).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "loader", "message"),
    [
        ("mixed", "documents", "the tokens of one document change the loss of another"),
        slow("still", "documents", "with these weights no token changes the loss of a later one"),
        slow("shifted", "long", "a document of 17 tokens: expected one length, from 1 to 16"),
    ],
)
def test_what_can_not_be_packed_is_refused(tmp_path: Path, name: str, loader: str, message: str) -> None:
    folder = package(tmp_path, name)
    save_model(globals()[name]()[0], str(tmp_path / "weights.safetensors"))
    options = ("--backend", "gloo", "--pack", "--data", f"{tmp_path}/data.py:{loader}")
    ended = torchrun(folder / "train.py", 2, *options, "--weights", tmp_path / "weights.safetensors")
    assert ended.returncode == 2 and message in ended.stderr
