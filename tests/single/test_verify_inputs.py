"""Batches from examples: what they mean stays, equal samples do not."""

from __future__ import annotations

import torch

from autoshard.ir.graph import Graph, Op, Tensor
from autoshard.verification.original.batches import integer_ranges, varied_inputs


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
    x, ids, labels, kept = varied(torch.zeros(4, 3), ZEROS, ZEROS, POSITIONS)
    assert x.dtype == torch.float64 and x.unique().numel() == 12
    for batch in (x, ids, labels):
        assert len({tuple(row.tolist()) for row in batch}) == 4
    assert int(ids.min()) >= 0 and int(ids.max()) < 50
    ignored = (labels == -7).sum(-1).tolist()
    assert ignored[0] == 0 and len(set(ignored)) > 2 and int(labels.max()) < 50
    assert torch.equal(kept, POSITIONS)
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
    found = varied(mask, ZEROS, labels, POSITIONS)
    assert torch.equal(found[0], mask.double())
    assert sorted(map(tuple, found[2].tolist())) == sorted(map(tuple, labels.tolist()))


def test_without_a_common_number_of_samples_the_order_stays() -> None:
    nodes, edges = torch.rand(5, 3), torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])
    found = varied(nodes, edges, ZEROS, POSITIONS)
    assert torch.equal(found[0], nodes.double()) and torch.equal(found[1], edges)
