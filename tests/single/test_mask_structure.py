"""Masks that are too large to be evaluated: what is said of them holds for the same masks evaluated."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoshard.graph_capture.capture import capture, capture_model
from autoshard.graph_capture.tracing import size_constants
from tests.models import NAMES

ATTENTION = "aten.scaled_dot_product_attention"
COMPARED = {"le": torch.le, "lt": torch.lt, "ge": torch.ge, "gt": torch.gt, "eq": torch.eq}
SIZE = 6
LINES: dict[str, Callable[[], Tensor]] = {
    "in order": lambda: torch.arange(SIZE),
    "one later": lambda: torch.arange(SIZE) + 1,
    "turned": lambda: torch.arange(SIZE).flip(0),
    "all the same": lambda: torch.zeros(SIZE, dtype=torch.int64),
    "two documents": lambda: torch.arange(SIZE) // 3,
    "twice": lambda: torch.arange(SIZE) // 2 * 2,
}


class Masked(nn.Module):
    def __init__(self, name: str, left: str, right: str, column_first: bool, also: str) -> None:
        super().__init__()
        self.given = name, left, right, column_first, also

    def forward(self, x: Tensor) -> Tensor:
        name, left, right, column_first, also = self.given
        dims = (1, 0) if column_first else (0, 1)
        one, two = (LINES[line]().unsqueeze(dim) for line, dim in zip((left, right), dims, strict=True))
        mask = COMPARED[name](one, two)
        if also:
            line = LINES[also]()
            mask = mask & (line.unsqueeze(1) == line.unsqueeze(0))
        return nn.functional.scaled_dot_product_attention(x, x, x, mask[None, None].expand(2, 1, SIZE, SIZE))


def kind(model: nn.Module) -> tuple[bool, bool]:
    """(has a mask, is causal) of its attention."""
    graph = capture_model(model, (torch.randn(2, 3, SIZE, 4),))
    (op,) = (op for op in graph.ops if op.target == ATTENTION)
    return len(op.operands) > 3 and op.operands[3] is not None, bool(op.attribute("is_causal"))


QUICK = (("le", False), ("ge", True), ("eq", False))  # the others take a minute and a half


@pytest.mark.parametrize(
    ("name", "column_first"),
    [
        pytest.param(name, first, marks=[] if (name, first) in QUICK else pytest.mark.slow)
        for name, first in itertools.product(COMPARED, (False, True))
    ],
)
def test_a_structure_says_what_the_values_do(name: str, column_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never "causal" or "everything" of a mask that is not; and of comparisons of the lines that masks are made of, all
    that are."""
    for left, also in itertools.product(LINES, ("", "two documents")):
        if also and left not in ("in order", "all the same"):
            continue
        right = "all the same" if left == "all the same" else "in order"
        model = Masked(name, left, right, column_first, also)
        wanted = kind(model)
        with monkeypatch.context() as patch:
            patch.setattr(size_constants, "LARGEST_ELEMENTS", SIZE * SIZE - 1)
            assert kind(model) == wanted, (left, right, also)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "what is hidden, of numbers": lambda seen: torch.where(seen, 0.0, -torch.inf).to(torch.bool),
    "what either hides": lambda seen: torch.logical_and(torch.where(seen, 0.0, -1e38), seen.to(torch.float32) - 1.0),
    "chosen booleans": lambda seen: torch.where(seen, True, False),
    "added numbers": lambda seen: torch.where(seen, 0.0, torch.finfo(torch.float32).min),
}


class Formed(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.arange(SIZE).unsqueeze(0) <= torch.arange(SIZE).unsqueeze(1)
        mask = FORMS[self.form](seen[None, None].expand(2, 1, SIZE, SIZE))
        return nn.functional.scaled_dot_product_attention(x, x, x, mask)


@pytest.mark.parametrize(("form", "surely"), list(zip(FORMS, [False, False, False, True], strict=True)))
def test_numbers_in_a_mask_are_no_booleans(form: str, surely: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 lets a query see, and false hides from it: where numbers become booleans nothing is said of the mask."""
    wanted = kind(Formed(form))
    monkeypatch.setattr(size_constants, "LARGEST_ELEMENTS", SIZE * SIZE - 1)
    assert kind(Formed(form)) == (wanted if surely else (True, False))


def test_a_long_sequence_has_no_mask() -> None:
    """Llama's mask of 16,384 positions is a comparison of positions, and one of documents, of which there is one."""
    graph = capture(NAMES["llama"], {"batch": 1, "sequence": 16384})
    assert [op.attribute("is_causal") for op in graph.ops if op.target == ATTENTION] == [True, True]


def test_what_a_mask_repeats_is_looked_at_once() -> None:
    """ "All documents are one" is a single value, repeated 7e10 times here: a minute, where it is read each time."""
    began = time.process_time()
    graph = capture(NAMES["llama"], {"batch": 1, "sequence": 1 << 18})
    assert [op.attribute("is_causal") for op in graph.ops if op.target == ATTENTION] == [True, True]
    assert time.process_time() - began < 30
