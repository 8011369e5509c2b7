"""Variants that talk, in real processes over gloo."""

from __future__ import annotations

import pytest

from tests.forced import check
from tests.models import NAMES
from tests.single.test_experts import experts_by
from tests.single.test_halo import spatial
from tests.small_models import spec


@pytest.mark.slow
def test_halos_of_a_resnet() -> None:
    functions, largest = check(NAMES["resnet"], "tp=2", spatial(("conv", "pool")), backend="gloo")
    assert {"halo_convolution", "halo_max_pool"} <= functions
    assert largest < 1e-9


def test_tokens_that_travel_to_their_experts() -> None:
    functions, largest = check(spec("mixtral"), "ep=2", experts_by("t+e"), backend="gloo")
    assert "dispatched_experts" in functions
    assert largest < 1e-9
