"""Cache of whole plans in a folder that a program names, next to what searches found (`system/disk_cache`)."""

from __future__ import annotations

from pathlib import Path

from autoshard.cluster.hardware import Hardware
from autoshard.errors import UserError
from autoshard.ir import graph_json, plan_json
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.replay.plan_check import check_plan
from autoshard.search.search_request import SearchRequest
from autoshard.system.disk_cache import DiskCache, disk_cache, key_of, named_folder

_KIND = "plan"


def folder_of_plans(said: str | Path | bool | None) -> DiskCache | None:
    """The cache, where a program or the environment names its folder."""
    return disk_cache(said) if named_folder(said) else None


def cached_plan(cache: DiskCache, graph: Graph, hardware: Hardware, request: SearchRequest) -> Plan | None:
    """Cached plan of exactly this request; None where there is none, or where more than one plan is asked for."""
    content = None if request.pareto else cache.read(_KIND, _key(graph, hardware, request))
    try:
        plan = plan_json.loads(content.decode()) if content is not None else None
        if plan is not None:
            check_plan(plan, graph, hardware, "the cache")
    except (UserError, UnicodeDecodeError):
        return None  # made anew, and written over
    return plan


def store_plan(cache: DiskCache, plan: Plan, graph: Graph, hardware: Hardware, request: SearchRequest) -> None:
    """Writes the plan to the cache, unless a time limit ended its search or several plans were asked for."""
    if not plan.search.cut_short and not request.pareto:
        cache.write(_KIND, _key(graph, hardware, request), plan_json.dumps(plan).encode())


def _key(graph: Graph, hardware: Hardware, request: SearchRequest) -> str:
    pins = request.pins_file.read_text(encoding="utf-8") if request.pins_file else ""
    return key_of("plan", graph_json.graph_hash(graph), repr(hardware), repr(request), pins)
