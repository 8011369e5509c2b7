"""`autoshard.parallelize` under torchrun's environment, in float64, against the model that is not split."""

from __future__ import annotations

from autoshard.verification.ranks.rank_processes import run_processes
from tests.api_worker import CASES, WORLD


def test_all_cases() -> None:
    """Together: to start four processes takes longer than a case."""
    run_processes("tests.api_worker", list(CASES), WORLD, 360)
