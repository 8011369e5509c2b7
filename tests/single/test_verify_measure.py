"""The error measure, and that nothing slips past it."""

import math

import pytest
import torch

from autoshard.verification.comparison.error_measure import THRESHOLD, compare, first_failure, largest, summarise


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
    found = first_failure(errors)
    assert found is not None and (found.kind, found.name, found.rank) == ("gradient", "b", 1)
    assert first_failure([compare("output", "loss", 0, 1, d(1.0), d(1.0), 1.0)]) is None
