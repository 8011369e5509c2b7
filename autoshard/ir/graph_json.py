"""Graphs as versioned JSON: the same graph is the same text, byte for byte, one tensor or op a line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from autoshard.errors import InvalidFileError, UsageError
from autoshard.ir.codec import decode, encode
from autoshard.ir.graph import SCHEMA_VERSION, Graph, Registration
from autoshard.ir.graph_check import check
from autoshard.system.files import parse_json, read_text, write_text

KIND = "autoshard.graph"
# Fields that older files lack; written only where they say something.
_LATER: dict[str, Any] = {
    "discovered": [], "manual_splits": [], "registrations": [], "recipes": [], "input_ranges": [], "column_ranges": [],
    "strategies": [], "module_requests": [], "call": "", "variables": [], "free_sizes": [], "unread_draws": [],
    "evaluation": "", "widened": [], "dynamic": [], "follows": [],
}  # fmt: skip
# Read by what is written or proved of a plan, not by searches.
_OF_PACKAGES = ("call", "free_sizes", "unread_draws", "evaluation")
_AGAIN = "make it again with `autoshard trace MODEL -o FILE`"


def dumps(graph: Graph) -> str:
    """The graph as JSON text that ends with a newline."""
    lines = [f'"kind": {_text(KIND)}', f'"schema_version": {SCHEMA_VERSION}']
    lines += [f"{_text(name)}: {_block(value)}" for name, value in _fields(graph).items()]
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def loads(text: str, where: str = "graph") -> Graph:
    """The graph written by `dumps`; InvalidFileError names the file (`where`) and what is wrong in it."""
    data = parse_json(text, where, _AGAIN)
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise InvalidFileError(f"{where} is not an autoshard graph", _AGAIN)
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        problem = f"{where} is a graph of schema version {version!r}, this autoshard reads version {SCHEMA_VERSION}"
        raise InvalidFileError(problem, _AGAIN)
    fields = {key: value for key, value in data.items() if key not in ("kind", "schema_version")}
    body = _LATER | fields
    try:
        graph: Graph = decode(Graph, body, "graph")
        check(graph)
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(f"{where} is damaged: {error}", _AGAIN) from None
    return graph


def save(graph: Graph, path: str | Path) -> None:
    """Write `path` whole or not at all. UsageError if it can't be written."""
    write_text(Path(path), dumps(graph))


def load(path: str | Path) -> Graph:
    """Read a graph file; InvalidFileError if it is missing, damaged, or of another kind or version."""
    return loads(read_text(Path(path), "the graph", _AGAIN), str(path))


def without_code(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """The graph without the Python files that it brings along, and the operators that they register.

    A graph is data: what came from elsewhere must not become code that a package runs.
    """
    bare = tuple(Registration("", item.targets) if item.text else item for item in graph.registrations)
    targets = tuple(target for item in graph.registrations if item.text for target in item.targets)
    return dataclasses.replace(graph, registrations=bare), targets


def has_code(model: str) -> bool:
    """False where `model` is a saved graph, or the class of an object: there is nothing to compare a package with."""
    return model.endswith(".pt2") or (":" in model and not model.endswith(".json"))


def check_has_code(model: str) -> None:
    """Raises UsageError where it has none."""
    if not has_code(model) and not model.endswith(".json"):
        raise UsageError(
            f"the original model is needed to verify, but the plan was made from an object, a {model}",
            "autoshard.verify(plan) in the program that planned it; or plan from file.py:callable",
        )
    if not has_code(model):
        raise UsageError(
            f"the original model is needed to verify, but the plan was made from the saved graph {model}",
            "plan from the model itself: autoshard plan file.py:callable …",
        )


def graph_hash(graph: Graph) -> str:
    """SHA-256 (hex) of the graph's canonical JSON: changes with anything that the graph says of what is computed."""
    return graph.once(_hash)


def _hash(graph: Graph) -> str:
    said = {name: value for name, value in _fields(graph).items() if name not in _OF_PACKAGES}
    canonical = json.dumps(said, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(f"{KIND} {SCHEMA_VERSION} {canonical}".encode()).hexdigest()


# What a graph computes; not what its model is called, where its code stands, and what it asks of a search.
_COMPUTED = (
    "tensors", "inputs", "parameters", "buffers", "ops", "outputs", "loss", "buffer_updates", "precision", "optimizer",
    "training",
)  # fmt: skip


def computed(graph: Graph) -> str:
    """SHA-256 (hex) of what the graph computes: the same for the same model at another path."""
    return graph.once(_computed)


def _computed(graph: Graph) -> str:
    bare = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, source="") for op in graph.ops))
    said = {name: encode(getattr(bare, name)) for name in _COMPUTED}
    return hashlib.sha256(json.dumps(said, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def _fields(graph: Graph) -> dict[str, Any]:
    """Every field; those of `_LATER` only where there are any."""
    values = {field.name: encode(getattr(graph, field.name)) for field in dataclasses.fields(graph)}
    return {name: value for name, value in values.items() if value or name not in _LATER}


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _block(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return "[\n  " + ",\n  ".join(_text(item) for item in value) + "\n ]"
    return _text(value)
