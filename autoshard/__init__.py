"""autoshard: splits a PyTorch model over a cluster. Light on purpose: importing it imports no torch and no numpy."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard.api.parallel_module import parallelize
    from autoshard.api.plan_tables import operator_strategies, parameter_layouts, strategies_text
    from autoshard.api.sharded import shard
    from autoshard.api.verbs import capture, load_plan, plan, report, simulate, verify, write
    from autoshard.capture.operator_strategies import operator, strategy

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "capture",
    "load_plan",
    "operator",
    "operator_strategies",
    "parallelize",
    "parameter_layouts",
    "plan",
    "report",
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
    "parallelize": "autoshard.api.parallel_module",
    "shard": "autoshard.api.sharded",
    **dict.fromkeys(("operator_strategies", "parameter_layouts", "strategies_text"), "autoshard.api.plan_tables"),
    **dict.fromkeys(("operator", "strategy"), "autoshard.capture.operator_strategies"),
}
_FOLDERS = ("capture", "report", "simulate", "verify")  # verbs that are the names of folders, too


def __getattr__(name: str) -> Any:
    """The Python interface, imported when it is first used."""
    if name in _FOLDERS:
        return importlib.import_module(f"autoshard.{name}")
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'autoshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


class _Folder(ModuleType):
    """A folder that can be called as the verb of its name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._verb(*args, **kwargs)

    @property
    def _verb(self) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(_PLACES[name]), name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._verb)


class _Interface(ModuleType):
    """Makes those folders callable as they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FOLDERS and isinstance(value, ModuleType):
            value.__class__ = _Folder
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Interface
