"""A folder of earlier plans, each under a name that holds all that it depends on."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from importlib.metadata import version
from pathlib import Path

import autoshard
from autoshard.cluster.hardware import Hardware
from autoshard.ir import graph_json
from autoshard.ir.graph import Graph
from autoshard.search.search_request import SearchRequest
from autoshard.system.data_files import data_folder

CACHE = "AUTOSHARD_CACHE"  # the folder of plans, where a program names none


def kept_at(graph: Graph, hardware: Hardware, request: SearchRequest, folder: str | Path | bool | None) -> Path | None:
    """The file of this very plan; None without a cache (False), or where more than a plan is asked for."""
    own = os.environ.get(CACHE) if folder is None else folder
    if not own or own is True or request.pareto:
        return None
    pins = request.pins_file.read_text(encoding="utf-8") if request.pins_file else ""
    libraries = tuple(version(name) for name in ("numpy", "scipy", "highspy"))
    parts = (graph_json.graph_hash(graph), hardware.text, repr(request), pins, _own_code(), libraries)
    return Path(own) / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.plan.json"


@cache
def _own_code() -> str:
    """Changes with autoshard's code and constants: another one may find another plan."""
    own = hashlib.sha256()
    roots = {Path(autoshard.__file__).parent: "*.py", data_folder("costmodels"): "*.toml"}
    for root, kind in roots.items():
        for path in sorted(root.rglob(kind)):
            own.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return own.hexdigest()
