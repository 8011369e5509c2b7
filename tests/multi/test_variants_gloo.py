"""Variants that talk, in real processes over gloo."""

from __future__ import annotations

from tests.forced import check
from tests.models import NAMES
from tests.single.test_halo import spatial


def test_halos_of_a_resnet() -> None:
    found, largest = check(NAMES["resnet"], "tp=2", spatial(("conv", "pool")), backend="gloo")
    assert {"halo_convolution", "halo_max_pool"} <= found
    assert largest < 1e-9
