"""Seconds and bytes: formulas only; the numbers are in `costmodels/` and `hardware_profiles/`."""

from autoshard.costs.bands import Band, provenance, step_band
from autoshard.costs.collective import collective_seconds, joint_seconds
from autoshard.costs.device_bytes import activation_bytes, host_bytes, optimizer_seconds, parameter_bytes
from autoshard.costs.links import AxisLink, axis_link
from autoshard.costs.memory_traffic import local_pass, moving_facts, moving_terms
from autoshard.costs.operator import local_seconds, op_seconds, saved_bytes

__all__ = [
    "AxisLink",
    "Band",
    "activation_bytes",
    "axis_link",
    "collective_seconds",
    "host_bytes",
    "joint_seconds",
    "local_pass",
    "local_seconds",
    "moving_facts",
    "moving_terms",
    "op_seconds",
    "optimizer_seconds",
    "parameter_bytes",
    "provenance",
    "saved_bytes",
    "step_band",
]
