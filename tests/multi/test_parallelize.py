"""`autoshard.parallelize` under torchrun's environment, in float64, against the model that is not split."""

from __future__ import annotations

import pytest

from autoshard.verification.ranks.rank_processes import run_processes
from tests.api_worker import CASES, WORLD
from tests.slow import slow

QUICK = ("loss_beside", "batches", "gathered", "micro_batches", "rank_0_fails", "penalties")


@pytest.mark.parametrize("cases", [QUICK, slow(tuple(name for name in CASES if name not in QUICK))])
def test_all_cases(cases: tuple[str, ...]) -> None:
    """Together: to start four processes takes longer than a case."""
    run_processes("tests.api_worker", list(cases), WORLD, 360)
