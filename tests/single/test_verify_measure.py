"""The error measure, and the batches and random state that leave nothing hidden from it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autoshard.ir.graph import Graph, Op, Tensor
from autoshard.verification.comparison.tolerances import THRESHOLD, compare, first_failure, largest, summarise
from autoshard.verification.original.batches import integer_ranges, varied_inputs
from autoshard.verification.original.randomise import randomise_state

# --- the error measure, and that nothing slips past it ---


def d(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_relative_to_the_largest_element() -> None:
    error = compare("gradient", "w", 3, 1, d(1.0, 2.0 + 4e-9), d(1.0, 2.0), 2.0)
    assert error.error == pytest.approx(2e-9)
    assert error.failed and "gradient w on rank 3 in step 1" in str(error)
    assert not compare("gradient", "w", 3, 1, d(1.0, 2.0 + 1e-10), d(1.0, 2.0), 2.0).failed


def test_tensors_that_are_zero_are_measured_by_their_kind() -> None:
    assert not compare("gradient", "k.bias", 0, 1, d(1e-17), d(0.0), 1.0).failed
    assert compare("gradient", "k.bias", 0, 1, d(1e-14), d(0.0), 1.0).failed


def test_what_rounding_does_is_allowed_and_no_more() -> None:
    assert not compare("gradient", "k.bias", 0, 1, d(1e-14), d(1e-16), 1.0, noise=2e-14).failed
    assert compare("gradient", "k.bias", 0, 1, d(3e-14), d(1e-16), 1.0, noise=2e-14).failed
    assert compare("gradient", "w", 0, 1, d(1.0 + 1e-6), d(1.0), 1.0, noise=1e-3).failed


def test_after_the_first_step_more_rounding_is_allowed_and_no_more_than_measured() -> None:
    """Batch norm over four samples and AdamW: the original itself moves by 1e-7 in its third step."""
    assert compare("output", "loss", 0, 1, d(1.0 + 3e-7), d(1.0), 1.0, noise=1e-6).failed
    assert not compare("output", "loss", 0, 2, d(1.0 + 3e-7), d(1.0), 1.0, noise=1e-6).failed
    assert compare("output", "loss", 0, 2, d(1.0 + 3e-7), d(1.0), 1.0, noise=1e-8).failed
    assert compare("output", "loss", 0, 3, d(1.0 + 3e-5), d(1.0), 1.0, noise=1e-3).failed


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "missing"),
        (d(1.0), "shape (1,), expected (2,)"),
        (d(1.0, math.nan), "NaN"),
        (d(1.0, math.inf), "inf"),
        (torch.tensor([1.0, 2.0]), "float32"),
    ],
)
def test_what_cannot_be_compared_fails(found: torch.Tensor | None, words: str) -> None:
    error = compare("parameter", "w", 1, 1, found, d(1.0, 2.0), 2.0)
    assert error.failed and words in error.problem and words in str(error)


def test_an_expected_nan_is_a_failure_too() -> None:
    assert compare("output", "loss", 0, 1, d(1.0), d(math.nan), 1.0).failed


def test_empty_and_integer_tensors() -> None:
    assert not compare("parameter", "w", 3, 1, torch.empty(0, 4, dtype=torch.float64), torch.empty(0, 4), 1.0).failed
    assert compare("buffer", "count", 0, 1, torch.tensor([3]), torch.tensor([4]), 4.0).failed


def test_the_summary_names_the_worst_of_each_kind() -> None:
    errors = [
        compare("gradient", "a", 0, 1, d(1.0), d(1.0), 1.0),
        compare("gradient", "b", 1, 1, d(1.1), d(1.0), 1.0),
        compare("gradient", "c", 2, 1, d(math.nan), d(1.0), 1.0),
        compare("output", "loss", 0, 1, d(1.0), d(1.0), 1.0),
    ]
    by_kind = {worst.kind: worst for worst in summarise(errors)}
    assert by_kind["gradient"].count == 3 and by_kind["gradient"].failed
    assert by_kind["gradient"].worst is not None and by_kind["gradient"].worst.name == "c"
    assert not by_kind["output"].failed and by_kind["buffer"].count == 0
    assert THRESHOLD == 1e-9


def test_largest() -> None:
    assert largest([d(1.0, -3.0), torch.empty(0)]) == 3.0
    assert largest([]) == 0.0


def test_the_first_failure_is_where_it_begins() -> None:
    errors = [
        compare("output", "loss", 0, 2, d(2.0), d(1.0), 1.0),
        compare("gradient", "a", 0, 1, d(1.1), d(1.0), 1.0),
        compare("gradient", "b", 1, 1, d(1.3), d(1.0), 1.0),
        compare("parameter", "a", 0, 1, d(9.0), d(1.0), 1.0),
    ]
    first = first_failure(errors)
    assert first is not None and (first.kind, first.name, first.rank) == ("gradient", "b", 1)
    assert first_failure([compare("output", "loss", 0, 1, d(1.0), d(1.0), 1.0)]) is None


# --- random state: nothing is left that hides a fault ---


BUFFERS = ("mask", "ids", "batch_norm.running_var", "batch_norm.running_mean")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.batch_norm = nn.Embedding(50, 8), nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 50)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]), persistent=False)
        self.register_buffer("folded", torch.ones(3))
        self.register_buffer("ids", torch.arange(3))


def test_state() -> None:
    model = Net()
    randomise_state(model, 0, BUFFERS)
    assert model.head.weight is model.embedding.weight
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point():
            assert value.dtype == torch.float64, name
        if name not in ("mask", "ids", "folded", "batch_norm.num_batches_tracked"):
            assert torch.isfinite(value).all() and value.detach().flatten().unique().numel() == value.numel(), name
    assert 0.7 < model.norm.weight.mean() < 1.3 and model.norm.weight.std() > 0.05
    assert abs(model.head.bias.mean()) < 0.2
    assert (model.batch_norm.running_var > 0).all()
    assert model.mask[0, 1] == -torch.inf and model.mask[0, 0] == 0
    assert model.folded.tolist() == [1, 1, 1]
    assert model.ids.tolist() == [0, 1, 2]


def test_the_seed_decides() -> None:
    first, second, third = Net(), Net(), Net()
    for model, seed in ((first, 0), (second, 0), (third, 1)):
        randomise_state(model, seed, BUFFERS)
    assert torch.equal(first.head.weight, second.head.weight)
    assert not torch.equal(first.head.weight, third.head.weight)


def test_mildly_keeps_signs_and_zeros() -> None:
    model = Net()
    model.norm.bias.data = torch.tensor([-2.0, 0.0] * 4)
    randomise_state(model, 0, BUFFERS, mildly=True)
    assert ((model.norm.weight > 0.8) & (model.norm.weight < 1.2)).all() and model.norm.weight.std() > 0.01
    assert model.norm.bias[1::2].tolist() == [0] * 4 and (model.norm.bias[::2] < -1.6).all()
    assert model.mask[0, 1] == -torch.inf


def test_vectors_of_one_number_stay_near_it() -> None:
    model = nn.PReLU(6, init=0.25)
    randomise_state(model, 0, ())
    assert (model.weight > 0).all() and model.weight.unique().numel() == 6


# --- batches from examples: what they mean stays, equal samples do not ---


def language_model() -> Graph:
    """ids -> embedding -> logits; labels padded, shifted and flattened into a cross entropy, as Hugging Face does."""
    tensors = (
        Tensor("x", (4, 3), "float32"), Tensor("ids", (4, 6), "int64"), Tensor("labels", (4, 6), "int64"),
        Tensor("positions", (4, 6), "int64"), Tensor("table", (50, 8), "float32", True),
        Tensor("e", (4, 6, 8), "float32", True),
        Tensor("padded", (4, 7), "int64"), Tensor("shifted", (4, 6), "int64"), Tensor("flat", (24,), "int64"),
        Tensor("logits", (24, 50), "float32", True), Tensor("loss", (), "float32", True),
        Tensor("far", (4, 6), "int64"),
    )  # fmt: skip
    ops = (
        Op("embedding", "aten.embedding", ("table", "ids"), (), ("e",)),
        Op("pad", "aten.pad", ("labels",), (), ("padded",)),
        Op("slice", "aten.slice", ("padded",), (), ("shifted",)),
        Op("view", "aten.view", ("shifted",), (), ("flat",)),
        Op("add", "aten.add", ("positions",), (), ("far",)),
        Op("loss", "aten.cross_entropy_loss", ("logits", "flat"), (("ignore_index", -7),), ("loss",)),
    )
    return Graph("lm", tensors, ("x", "ids", "labels", "positions"), (), (), ops, ("loss",), "loss")


def test_ranges_of_integer_inputs() -> None:
    ranges = integer_ranges(language_model())
    assert set(ranges) == {"ids", "labels"}
    assert (ranges["ids"].high, ranges["ids"].ignored) == (50, None)
    assert (ranges["labels"].high, ranges["labels"].ignored) == (50, -7)


def varied(*examples: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    return varied_inputs(language_model(), list(examples), seed)


ZEROS = torch.zeros(4, 6, dtype=torch.int64)
POSITIONS = torch.arange(6).expand(4, 6)


def test_placeholders_are_drawn() -> None:
    x, ids, labels, positions = varied(torch.zeros(4, 3), ZEROS, ZEROS, POSITIONS)
    assert x.dtype == torch.float64 and x.unique().numel() == 12
    for batch in (x, ids, labels):
        assert len({tuple(row.tolist()) for row in batch}) == 4
    assert int(ids.min()) >= 0 and int(ids.max()) < 50
    ignored = (labels == -7).sum(-1).tolist()
    assert ignored[0] == 0 and len(set(ignored)) > 2 and int(labels.max()) < 50
    assert torch.equal(positions, POSITIONS)
    assert torch.equal(varied(torch.zeros(4, 3), ZEROS, ZEROS, POSITIONS)[1], ids)
    assert not torch.equal(varied(torch.zeros(4, 3), ZEROS, ZEROS, POSITIONS, seed=1)[1], ids)


def test_samples_change_places_together_and_keep_their_values() -> None:
    torch.manual_seed(0)
    x, ids = torch.rand(4, 3), torch.randint(0, 50, (4, 6))
    marks = torch.tensor([[number] * 6 for number in range(4)])
    orders = set()
    for seed in range(8):
        new_x, new_ids, labels, new_marks = varied(x, ids, ids, marks, seed=seed)
        order = new_marks[:, 0]
        orders.add(tuple(order.tolist()))
        assert torch.equal(new_x, x.double()[order]) and torch.equal(new_ids, ids[order])
        assert bool(((labels == ids[order]) | (labels == -7)).all())
    assert len(orders) > 3


def test_of_equal_prompts_only_words_change_places() -> None:
    """Image tokens (44) and padding (0) stand where they stood; the samples differ."""
    prompt = torch.tensor([1, 44, 44, 44, 7, 8, 9, 10, 0, 0]).repeat(4, 1)
    ids = varied(torch.rand(4, 3), prompt, prompt, torch.zeros(4, 10, dtype=torch.int64))[1]
    special = (prompt == 44) | (prompt == 0)
    assert torch.equal(ids[special], prompt[special])
    assert len({tuple(row.tolist()) for row in ids}) == 4
    for row in ids:
        assert sorted(row.tolist()) == sorted(prompt[0].tolist())


def test_what_is_out_of_range_is_drawn() -> None:
    ids = varied(torch.rand(4, 3), torch.arange(40, 64).reshape(4, 6), ZEROS, POSITIONS)[1]
    assert int(ids.min()) >= 0 and int(ids.max()) < 50


def test_masks_and_uneven_ignoring_stay() -> None:
    mask = torch.tensor([[0.0, 0.0, -torch.inf]]).repeat(4, 1)
    labels = torch.arange(24).reshape(4, 6)
    labels[1, :2], labels[2, 3:] = -7, -7
    drawn = varied(mask, ZEROS, labels, POSITIONS)
    assert torch.equal(drawn[0], mask.double())
    assert sorted(map(tuple, drawn[2].tolist())) == sorted(map(tuple, labels.tolist()))


def test_without_a_common_number_of_samples_the_order_stays() -> None:
    nodes, edges = torch.rand(5, 3), torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])
    drawn = varied(nodes, edges, ZEROS, POSITIONS)
    assert torch.equal(drawn[0], nodes.double()) and torch.equal(drawn[1], edges)
