"""autoshard: splits a PyTorch model over a cluster. Light on purpose: importing it imports no torch and no numpy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard.api.parallel.parallel_module import parallelize
    from autoshard.api.parallel.sharded import shard
    from autoshard.api.plan_tables import operator_strategies, parameter_layouts, strategies_text
    from autoshard.api.verbs import capture, load_plan, plan, report, simulate, verify, write
    from autoshard.graph_capture.dynamic_sizes.declared import set_inputs
    from autoshard.graph_capture.dynamic_sizes.symbol import Symbol
    from autoshard.graph_capture.module_requests import place, recompute
    from autoshard.graph_capture.operator_strategies import operator, strategy

__version__ = "0.1.0"
__all__ = [
    "Symbol",
    "__version__",
    "capture",
    "load_plan",
    "operator",
    "operator_strategies",
    "parallelize",
    "parameter_layouts",
    "place",
    "plan",
    "recompute",
    "report",
    "set_inputs",
    "shard",
    "simulate",
    "strategies_text",
    "strategy",
    "verify",
    "write",
]
_VERBS = "autoshard.api.verbs"
_PLACES = {
    **dict.fromkeys(("capture", "load_plan", "plan", "report", "simulate", "verify", "write"), _VERBS),
    "parallelize": "autoshard.api.parallel.parallel_module",
    "shard": "autoshard.api.parallel.sharded",
    **dict.fromkeys(("place", "recompute"), "autoshard.graph_capture.module_requests"),
    "Symbol": "autoshard.graph_capture.dynamic_sizes.symbol",
    "set_inputs": "autoshard.graph_capture.dynamic_sizes.declared",
    **dict.fromkeys(("operator_strategies", "parameter_layouts", "strategies_text"), "autoshard.api.plan_tables"),
    **dict.fromkeys(("operator", "strategy"), "autoshard.graph_capture.operator_strategies"),
}


def __getattr__(name: str) -> Any:
    """The Python interface, imported when it is first used."""
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'autoshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
