"""The search for cycles is as it was, however a plan ends."""

from __future__ import annotations

import gc
from contextlib import ExitStack

import pytest

from autoshard.system.garbage import seldom_searched


def test_the_thresholds_are_given_back() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyboardInterrupt), seldom_searched():
        assert gc.get_threshold()[0] > before[0]
        raise KeyboardInterrupt
    assert gc.get_threshold() == before
    first, second = ExitStack(), ExitStack()  # two threads: the one that began first ends first
    first.enter_context(seldom_searched())
    second.enter_context(seldom_searched())
    first.close()
    second.close()
    assert gc.get_threshold() == before
