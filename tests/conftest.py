"""Settings of the whole suite: reproducible hypothesis runs, and one thread a process (the tests run in parallel)."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.whole_packages import whole_packages  # noqa: F401 (a fixture)

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["AUTOSHARD_CACHE"] = "off"  # no test reads what another one found

settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _ranks_are_forks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification in processes of its own takes forks, but for tests that are marked `processes`."""
    if "tiny" not in request.path.parts and not request.node.get_closest_marker("processes"):
        from autoshard.verification.ranks import rank_processes
        from tests import launched

        monkeypatch.setattr(rank_processes, "start", launched.rank_process)


@pytest.fixture(autouse=True)
def _copies_are_for_captures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of a forward are compared in a copy of the process, which takes a worker of some gigabytes a third of a
    second: in tests of captures, of architectures and in processes of their own, not in those of what comes after."""
    capture = sys.modules.get("autoshard.graph_capture.capture")
    if capture is not None and "models" not in request.path.parts and "test_capture" not in request.path.name:
        monkeypatch.setattr(capture, "changing_line", lambda *_: "")


@pytest.fixture(autouse=True, scope="module")
def _kept_is_not_searched() -> Iterator[None]:
    """A worker keeps what thousands of tests made: a package that searches for garbage took ten times as long there."""
    yield
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How large everything is; tests/tiny/test_budget.py holds it below its bounds."""
    from tests import budget

    for line in budget.summary():
        terminalreporter.write_line(line)
