"""The road from what a person named to the files of a package, one function a stretch; the verbs of the CLI call these.

Heavy rooms are imported where they are used, so that `autoshard --help` is quick and a saved graph needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard import folder
from autoshard.errors import InvalidFileError, UsageError
from autoshard.mesh import Mesh

if TYPE_CHECKING:
    from autoshard.graph.model import Graph
    from autoshard.hardware import Hardware
    from autoshard.plan import Plan
    from autoshard.program.model import Program
    from autoshard.simulate import Timeline
    from autoshard.verify.proof import Proof

Arguments = dict[str, str | int | float | bool]
PLAN, GRAPH, TIMELINE, REPORT, VERIFICATION = (
    "plan.json", "graph.json", "timeline.json", "report.html", "verification.json",
)  # fmt: skip


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

    return capture(
        request.spec, request.arguments, request.precision or "fp32", request.optimizer or "adamw", request.training
    )


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
    from autoshard import search

    origin = search.Origin(request.spec, tuple(sorted(request.arguments.items())))
    name, _, seed = strategy.partition(":")
    if name == "random":
        if not seed.isdecimal():
            raise UsageError(f"--strategy {strategy}: expected a whole number after the colon", "--strategy random:1")
        return search.random_plan(graph, mesh, hardware, int(seed), origin=origin)
    if strategy == "megatron":
        return search.megatron_plan(graph, mesh, hardware, origin=origin)
    if strategy != "best":
        raise UsageError(f"unknown strategy {strategy!r}", "--strategy best, megatron or random:SEED")
    return search.search(graph, mesh, hardware, solver=solver, memory_limit_bytes=limit, origin=origin)


@dataclass(frozen=True)
class Built:
    """A plan carried to its program and simulated step."""

    plan: Plan
    graph: Graph
    hardware: Hardware
    program: Program
    timeline: Timeline


def build(plan: Plan, graph: Graph, hardware: Hardware) -> Built:
    """Lower the plan and simulate its program."""
    from autoshard.program.lower import lower
    from autoshard.simulate import simulate

    program = lower(plan, graph)
    return Built(plan, graph, hardware, program, simulate(program, graph, hardware))


def package_files(built: Built) -> dict[str, str]:
    """Every file of the package by name: the emitted program, the plan and graph it came from, timeline and report."""
    from autoshard import plan_io
    from autoshard.emit import emit
    from autoshard.graph import serialize

    files = dict(emit(built.program, built.plan, built.graph))
    files |= {PLAN: plan_io.dumps(built.plan), GRAPH: serialize.dumps(built.graph)}
    return files | {TIMELINE: trace_text(built.timeline), REPORT: report_text(built, None)}


def trace_text(timeline: Timeline) -> str:
    """The timeline as a Chrome trace, which Perfetto opens."""
    from autoshard.simulate import chrome_trace

    return json.dumps(chrome_trace(timeline), ensure_ascii=False) + "\n"


def report_text(built: Built, verification: Mapping[str, Any] | None) -> str:
    """The self-contained HTML page."""
    from autoshard.report import render

    return render(built.plan, built.graph, built.program, built.hardware, built.timeline, verification)


def write_output(package: Path, output: Path | None, name: str, text: str) -> Path:
    """Write to `output`, or as file `name` of the package; gives the path written."""
    if output is not None:
        folder.write_text(output, text)
        return output
    folder.update_package(root_of(package), {name: text})
    return root_of(package) / name


def root_of(package: Path) -> Path:
    """The folder of a package named by itself or by its plan.json."""
    return package.parent if package.name == PLAN else package


def read_package(path: Path) -> tuple[Plan, Graph, Hardware]:
    """The plan, graph and hardware of a package folder (or of its plan.json), checked to belong together."""
    from autoshard import plan_io
    from autoshard.graph import serialize
    from autoshard.hardware import parse_hardware

    root = root_of(path)
    if not root.is_dir():
        raise InvalidFileError(
            f"there is no package at {root}", "autoshard plan MODEL --mesh dp=2,tp=2 --hardware NAME"
        )
    plan = plan_io.loads(folder.read_file(root, PLAN), str(root / PLAN))
    graph = serialize.loads(folder.read_file(root, GRAPH))
    if serialize.graph_hash(graph) != plan.graph_hash:
        raise InvalidFileError(f"{root / GRAPH} is not the graph that {root / PLAN} was made for", "autoshard plan")
    return plan, graph, parse_hardware(plan.hardware_text, plan.hardware)


def verify_package(package: Path, backend: str, full: bool, arguments: Arguments) -> Proof:
    """Run the package's own files against the original model, and note the outcome in the package and its report."""
    read = read_package(package)
    from autoshard.verify import verify_package as verify

    proof = verify(root_of(package), backend=backend, full=full, arguments=arguments)
    noted = {key: value for key, value in proof.as_dict().items() if key != "seconds"}
    text = json.dumps(noted, indent=1, ensure_ascii=False) + "\n"
    folder.update_package(root_of(package), {VERIFICATION: text, REPORT: report_text(build(*read), noted)})
    return proof


def read_verification(package: Path) -> dict[str, Any] | None:
    """What `verify` found about this package, or None where it was not verified."""
    root = root_of(package)
    if not (root / VERIFICATION).exists():
        return None
    try:
        result: dict[str, Any] = json.loads(folder.read_file(root, VERIFICATION))
    except ValueError as error:
        raise InvalidFileError(f"{root / VERIFICATION} is damaged: {error}", "autoshard verify") from None
    return result
