"""Packages with all that any plan needs: for tests of parts that a package of the test's plan leaves out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import autoshard.emit
from autoshard.verification.ranks.loaded_package import LoadedPackage, load_package


def _as_they_are(files: Mapping[str, str], models: Mapping[str, str]) -> dict[str, str]:
    return {**files, **models}


@pytest.fixture
def whole_packages() -> Iterator[None]:
    """Nothing is left out of the packages that a test emits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoshard.emit, "pruned", _as_they_are)
        yield


FILES = ("convert", "model_parallel", "runtime", "initial", "batches", "run_options", "start_state")


def loaded_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadedPackage]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    loaded = load_package(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in FILES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield loaded
    for name in [n for n in sys.modules if n.partition(".")[0] in FILES]:
        del sys.modules[name]
