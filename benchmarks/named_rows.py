"""Published steps that have a name and a machine of their own, and what `autoshard estimate` predicts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cluster.hardware import Hardware
from autoshard.estimate.step import Estimate
from benchmarks.steps import Floats, Row, host_of, predicted

GIB = 2**30


@dataclass(frozen=True, eq=False)
class NamedRow(Row):
    """`name`: of the model; `hardware`: what it is predicted with; `memory_gb`: what was reported, NaN where
    nothing."""

    name: str
    hardware: Hardware
    memory_gb: float = float("nan")


def seconds_of(rows: Sequence[NamedRow]) -> Floats:
    """Predicted, with the host of each profile or software."""
    return np.array([predicted_of(row).step_seconds for row in rows])


def predicted_of(row: NamedRow) -> Estimate:
    return predicted(row.model, row.run, row.hardware, host_of(row.hardware, row.run.software))
