"""Finds the data folders (`hardware_profiles`, `costmodels`, `reports`, …) in a clone and in a wheel alike."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def data_folder(name: str) -> Path:
    """The folder `name`: `autoshard/_data/` in a wheel, next to the package in a clone."""
    wheel = _PACKAGE / "_data" / name
    return wheel if wheel.is_dir() else _PACKAGE.parent / name
