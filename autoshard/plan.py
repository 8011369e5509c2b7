"""The Plan: every decision of a search. With the graph it reproduces everything after it, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.layout import Layout
from autoshard.mesh import Mesh

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class OpPlan:
    """The strategy of one op (choices as text, mesh order), its variant, predicted seconds, and who decided."""

    op: str
    strategy: str
    variant: str
    forward_seconds: float
    backward_seconds: float
    decided_by: str = "search"


@dataclass(frozen=True)
class TensorPlan:
    """Where an input, parameter or buffer is stored. `name` is the graph tensor, `path` what a person calls it."""

    name: str
    path: str
    layout: Layout
    decided_by: str = "search"


@dataclass(frozen=True)
class RedistributionPlan:
    """One materialisation: graph tensor `tensor` from `source` to `target` for `consumers` (op names), step by step.

    `steps` are (axis, before, after) as text, in order. Seconds are predicted, forward and backward.
    """

    tensor: str
    source: Layout
    target: Layout
    consumers: tuple[str, ...]
    steps: tuple[tuple[str, str, str], ...]
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class Certificate:
    """The solver's word: objective and lower bound of the additive problem, in seconds, and how it was solved."""

    solver: str
    status: str
    objective_seconds: float
    lower_bound_seconds: float


@dataclass(frozen=True)
class Plan:
    graph_hash: str
    model: str  # what the user named: file.py:callable, package.module:callable, file.pt2, file.graph.json
    model_arguments: tuple[tuple[str, str | int | float | bool], ...]  # keyword arguments given to the callable
    mesh: Mesh
    hardware: str  # profile name
    hardware_text: str  # the resolved profile, verbatim TOML
    precision: str
    optimizer: str
    inputs: tuple[TensorPlan, ...]
    parameters: tuple[TensorPlan, ...]
    buffers: tuple[TensorPlan, ...]
    ops: tuple[OpPlan, ...]
    redistributions: tuple[RedistributionPlan, ...]
    predicted_seconds: float  # of one step
    predicted_peak_bytes: float  # per device
    capacity_bytes: float
    certificate: Certificate
    versions: tuple[tuple[str, str], ...] = ()
