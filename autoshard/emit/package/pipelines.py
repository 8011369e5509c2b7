# mypy: ignore-errors
# ruff: noqa: I001
"""Pipelines, which run the micro-batches of a model through its stages or places: one for each model."""

from __future__ import annotations

import weakref

from torch import nn

from model_parallel import build_pipeline
from runtime import ParallelMesh, Places

_PIPELINES: weakref.WeakKeyDictionary[nn.Module, Places] = weakref.WeakKeyDictionary()


def pipeline_of(model: nn.Module, mesh: ParallelMesh) -> Places:
    """Pipeline of the parts of this rank's stage or place."""
    if model not in _PIPELINES:
        _PIPELINES[model] = build_pipeline(model, mesh)
    return _PIPELINES[model]
