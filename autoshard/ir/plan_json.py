"""Plans as versioned JSON: the same plan is the same text, byte for byte, one decision a line for readable diffs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from autoshard.errors import InvalidFileError
from autoshard.ir.codec import decode, encode
from autoshard.ir.graph import Graph
from autoshard.ir.graph_json import computed
from autoshard.ir.plan import (
    PLACED_FIELDS,
    SCHEMA_VERSION,
    OpPlan,
    PlacePlan,
    Plan,
    RedistributionPlan,
    Search,
    ServerPlan,
    SizeBucket,
    StepPlan,
    TensorPlan,
)
from autoshard.system.files import parse_json, read_text, write_text

KIND = "autoshard.plan"
OLDEST = 3  # that is read; before whole steps: one micro-batch, one stage. What a version lacks is as it was then
_RENAMED = {"steps_told": "step_messages"}
_AGAIN = "make the plan again with `autoshard plan`"


def dumps(plan: Plan) -> str:
    """The plan as JSON text that ends with a newline. Made once: what is written of a plan names it by its hash."""
    return plan.once(_dumped)


def _dumped(plan: Plan) -> str:
    lines = [f'"kind": "{KIND}"', f'"schema_version": {SCHEMA_VERSION}']
    for field in dataclasses.fields(plan):
        lines.append(f"{_text(field.name)}: {_block(encode(getattr(plan, field.name)))}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def loads(text: str, where: str = "plan") -> Plan:
    """The plan written by `dumps`. InvalidFileError names the file (`where`) and the key that is wrong."""
    data = parse_json(text, where, _AGAIN)
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise InvalidFileError(
            f"{where} is not an autoshard plan", "autoshard plan MODEL --mesh dp=2,tp=2 --hardware NAME"
        )
    version = data.get("schema_version")
    parts = {name: _renamed(data.get(name, {})) for name in ("step", "search")}
    # of plans before there were any
    data = {"buckets": [], "servers": encode(ServerPlan()), "place_plans": []} | data
    if isinstance(parts["search"], dict):  # of plans before there were histograms of sizes
        data = data | {"search": {"sizes": []} | parts["search"]}
    if isinstance(parts["step"], dict):  # of plans before there were places, and several kinds of devices
        data = data | {"step": _without_places(parts["step"])}
    if (
        type(version) is int
        and OLDEST <= version < SCHEMA_VERSION
        and all(isinstance(part, dict) for part in parts.values())
    ):
        parts = {"step": encode(StepPlan()) | parts["step"], "search": encode(Search()) | _on_one_axis(parts["search"])}
        data, version = {"fusion": []} | data | parts, SCHEMA_VERSION
    if version != SCHEMA_VERSION:
        raise InvalidFileError(
            f"{where} is a plan of schema version {version!r}, this autoshard reads version {SCHEMA_VERSION}",
            _AGAIN,
        )
    body = {key: value for key, value in data.items() if key not in ("kind", "schema_version")}
    try:
        plan: Plan = decode(Plan, body, "plan")
    except ValueError as error:
        raise InvalidFileError(f"{where} is damaged: {error}", _AGAIN) from None
    return plan


def _renamed(part: Any) -> Any:
    return {_RENAMED.get(name, name): value for name, value in part.items()} if isinstance(part, dict) else part


def _without_places(step: dict[str, Any]) -> dict[str, Any]:
    parts = step.get("parts")
    known = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
    return (
        {"places": [], "capacity_bytes": 0.0, "batch_shares": []}
        | step
        | ({"parts": [{"ops": []} | part for part in parts or ()]} if known else {})
    )


def _on_one_axis(search: dict[str, Any]) -> dict[str, Any]:
    """Add the axes dp and tp to steps tried before version 8, which had these alone."""
    steps = search.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        return search
    return search | {"steps": [{"context": 1, "expert": 1} | step for step in steps]}


def save(plan: Plan, path: str | Path) -> None:
    """Write `path` whole or not at all."""
    write_text(Path(path), dumps(plan))


def load(path: str | Path) -> Plan:
    """Read a plan file; InvalidFileError if it is missing, damaged, or of another kind or version."""
    return loads(read_text(Path(path), "the plan", _AGAIN), str(path))


# What is decided, by record: all else is what was asked, what was searched, and what is predicted.
DECISIONS: dict[type, tuple[str, ...]] = {
    Plan: (
        "mesh",
        "precision",
        "optimizer",
        "inputs",
        "parameters",
        "buffers",
        "ops",
        "redistributions",
        "step",
        "fusion",
        "buckets",
        "servers",
        "place_plans",
    ),
    ServerPlan: ("count", "workers", "most_workers", "staleness", "tables", "rowwise"),
    PlacePlan: ("place", *PLACED_FIELDS),
    TensorPlan: ("name", "layout"),
    SizeBucket: ("most", "ops", "redistributions"),
    OpPlan: ("op", "strategy", "variant"),
    RedistributionPlan: ("tensor", "source", "target", "consumers", "steps"),
    StepPlan: ("micro_batches", "schedule", "virtual_stages", "parts", "recompute", "samples", "zero", "batch_shares"),
}


def plan_hash(plan: Plan, graph: Graph) -> str:
    """Sixteen hex digits that change with any decision of the plan and with what the graph computes, and with nothing
    else: not with the model's path, the search, its status or predictions."""
    return hashlib.sha256(f"{plan.once(_decided)} {computed(graph)}".encode()).hexdigest()[:16]


def _decided(plan: Plan) -> str:
    decided = _decisions(plan)
    tail = [plan.buckets, plan.servers.count, plan.place_plans]  # the last of what is decided
    while tail and not tail.pop():  # plans without any stay as they were
        decided.pop()
    return json.dumps(decided, separators=(",", ":"), allow_nan=False)


def _decisions(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_decisions(item) for item in value]
    if type(value) in DECISIONS:
        names = DECISIONS[type(value)]
        shared = not isinstance(value, StepPlan) or bool(value.batch_shares)  # other plans stay as they were
        return [_decisions(getattr(value, name)) for name in (names if shared else names[:-1])]
    return encode(value)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _block(value: Any) -> str:
    """JSON text; a list of records takes one line a record, a record with lists one line a field."""
    if isinstance(value, dict) and any(isinstance(item, list) for item in value.values()):
        return "{\n  " + ",\n  ".join(f"{_text(name)}: {_text(item)}" for name, item in value.items()) + "\n }"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n  " + ",\n  ".join(_text(item) for item in value) + "\n ]"
    return _text(value)
