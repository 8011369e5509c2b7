"""The road from what a person named to the files of a package, one function a stretch; the verbs of the CLI call these.

Heavy rooms are imported where they are used, so that `autoshard --help` is quick and a saved graph needs no torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autoshard import folder
from autoshard.errors import UsageError
from autoshard.mesh import Mesh
from autoshard.package import REPORT, VERIFICATION, build, read_package, report_text, root_of

if TYPE_CHECKING:
    from autoshard.graph.model import Graph
    from autoshard.hardware import Hardware
    from autoshard.plan import Plan
    from autoshard.verify.proof import Proof

Arguments = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class ModelRequest:
    """A model as the user named it. `precision` and `optimizer` are None where the user said nothing."""

    spec: str
    arguments: Arguments
    precision: str | None = None
    optimizer: str | None = None
    training: bool = True


def read_graph(request: ModelRequest) -> Graph:
    """Capture the model, or read a graph saved by `autoshard trace`."""
    if request.spec.endswith(".json"):
        return _saved_graph(request)
    from autoshard.graph.capture import capture
    from autoshard.rules.discover import with_discovered

    captured = capture(
        request.spec, request.arguments, request.precision or "fp32", request.optimizer or "adamw", request.training
    )
    graph, warnings = with_discovered(captured)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return graph


def _saved_graph(request: ModelRequest) -> Graph:
    from autoshard.graph import serialize

    graph = serialize.load(request.spec)
    asked = {
        "--precision": (request.precision or graph.precision, graph.precision),
        "--optimizer": (request.optimizer or graph.optimizer, graph.optimizer),
        "--eval": (request.training and graph.training, graph.training),
        "--with": (sorted(request.arguments), []),
    }
    for option, (wanted, captured) in asked.items():
        if wanted != captured:
            raise UsageError(
                f"{option} can't change the saved graph {request.spec}: it was fixed when the model was captured",
                f"autoshard trace MODEL {option} … -o {request.spec}",
            )
    return graph


def make_plan(
    graph: Graph,
    mesh: Mesh,
    hardware: Hardware,
    request: ModelRequest,
    strategy: str,
    solver: str,
    limit: float | None,
) -> Plan:
    """The best plan, or the one that `strategy` (`megatron`, `random:SEED`) asks for. `limit`: bytes a device."""
    from autoshard import search, styles
    from autoshard.plan_of import Origin

    origin = Origin(request.spec, tuple(sorted(request.arguments.items())))
    name, _, seed = strategy.partition(":")
    if name == "random":
        if not seed.isdecimal():
            raise UsageError(f"--strategy {strategy}: expected a whole number after the colon", "--strategy random:1")
        return styles.random_plan(graph, mesh, hardware, int(seed), origin=origin)
    if strategy == "megatron":
        return search.megatron_plan(graph, mesh, hardware, origin=origin)
    if strategy != "best":
        raise UsageError(f"unknown strategy {strategy!r}", "--strategy best, megatron or random:SEED")
    return search.search(graph, mesh, hardware, solver=solver, memory_limit_bytes=limit, origin=origin)


def verify_package(path: Path, backend: Literal["gloo", "lockstep"], full: bool, arguments: Arguments) -> Proof:
    """Run the package's own files against the original model, and note the outcome in the package and its report."""
    read = read_package(path)  # before torch is imported: a missing folder is told at once
    from autoshard.verify import verify_package as verify

    proof = verify(root_of(path), backend=backend, full=full, arguments=arguments)
    noted = {key: value for key, value in proof.as_dict().items() if key != "seconds"}
    text = json.dumps(noted, indent=1, ensure_ascii=False) + "\n"
    folder.update_package(root_of(path), {VERIFICATION: text, REPORT: report_text(build(*read), noted)})
    return proof
