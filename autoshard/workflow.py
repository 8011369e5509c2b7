"""The road from what a person named to the files of a package, one function a stretch; the verbs of the CLI call these.

Heavy rooms are imported where they are used, so that `autoshard --help` is quick and a saved graph needs no torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autoshard.capture.model_spec import check_spec
from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh
from autoshard.package import output_folder
from autoshard.package.package_files import REPORT, VERIFICATION, build, read_package, report_text, root_of

if TYPE_CHECKING:
    from autoshard.cluster.hardware import Hardware
    from autoshard.constraints.pins import Pin
    from autoshard.ir.graph import Graph
    from autoshard.ir.plan import Plan
    from autoshard.search.pareto_front import Point
    from autoshard.search.search_task import Wishes
    from autoshard.verify.comparison.proof import Proof

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
    check_spec(request.spec)  # before torch is imported
    if request.spec.endswith(".json"):
        return _saved_graph(request)
    from autoshard.capture.capture import capture
    from autoshard.rules.proof.discover import with_discovered
    from autoshard.verify.operator_calls import check_calls, run_emitted

    captured = capture(
        request.spec, request.arguments, request.precision or "fp32", request.optimizer or "adamw", request.training
    )
    check_calls(captured)
    for guard in captured.assumed:
        print(f"note: assumed that {guard}", file=sys.stderr)
    graph, warnings = with_discovered(captured, run_call=run_emitted)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return graph


def _saved_graph(request: ModelRequest) -> Graph:
    from autoshard.ir import graph_json
    from autoshard.rules.operator_check import check_saved

    graph, unregistered = graph_json.without_code(check_saved(graph_json.load(request.spec), request.spec))
    if unregistered:
        print(
            f"warning: {request.spec} brings Python code that registers {', '.join(unregistered)}; the package "
            "does not get a copy: import it at the top of model_parallel.py, or plan from the model itself",
            file=sys.stderr,
        )
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


@dataclass(frozen=True)
class PlanRequest:
    """What is wanted of a plan, as the user said it: None or empty where nothing was said."""

    mesh: Mesh | None
    devices: int | None = None
    strategy: str = "best"
    level: int = 2
    solver: str | None = None
    engine: str | None = None
    pins: tuple[str, ...] = ()
    pins_file: Path | None = None
    limit_bytes: float | None = None
    time_limit_seconds: float | None = None
    pareto: bool = False
    all_to_all: bool = True


@dataclass(frozen=True)
class Made:
    """A plan, sentences about settings that did not count, what took how long, and the front, if it was asked for."""

    plan: Plan
    ignored: tuple[str, ...] = ()
    log: tuple[tuple[str, float], ...] = ()
    front: tuple[Point, ...] = ()


MESH_SECONDS = 120.0  # a mesh search without --time-limit


def ignored(wanted: PlanRequest) -> tuple[str, ...]:
    """What was said and does not count."""
    found = []
    if wanted.strategy.startswith("random"):
        said = {
            "--level": wanted.level != 2,
            "--solver": wanted.solver is not None,
            "--pin": bool(wanted.pins),
            "--pins": wanted.pins_file is not None,
            "--memory-limit": wanted.limit_bytes is not None,
            "--time-limit": wanted.time_limit_seconds is not None,
            "--pareto": wanted.pareto,
        }
        found += [f"{option} is ignored: a random plan is not searched for" for option, given in said.items() if given]
    if wanted.engine is not None and wanted.solver != "ilp":
        found.append("--ilp-engine is ignored: it is for --solver ilp")
    return tuple(found)


def check(request: ModelRequest, wanted: PlanRequest, hardware: Hardware) -> None:
    """What can be known to be wrong before torch is imported and the model captured. Raises a UserError."""
    from autoshard.cluster.hardware import check_devices, check_mesh, check_precision
    from autoshard.constraints.pins import read_pins
    from autoshard.solvers import check_names

    check_spec(request.spec)
    if not request.spec.endswith(".json"):
        check_precision(hardware, request.precision or "fp32")
    seed = _seed(wanted)
    if seed is None:
        check_names(wanted.solver or "dp", wanted.engine)
    if wanted.mesh is None:
        assert wanted.devices is not None
        check_devices(hardware, wanted.devices)
    if wanted.mesh is not None:
        check_mesh(hardware, wanted.mesh)
        read_pins(wanted.pins, wanted.pins_file, wanted.mesh)


def _seed(wanted: PlanRequest) -> int | None:
    """Of a random plan, None for a searched one. UsageError where there is no such strategy."""
    kind, _, seed = wanted.strategy.partition(":")
    if kind != "random":
        if wanted.strategy not in ("best", "megatron"):
            raise UsageError(f"unknown strategy {wanted.strategy!r}", "--strategy best, megatron or random:SEED")
        return None
    if not seed.isdecimal():
        raise UsageError(
            f"--strategy {wanted.strategy}: expected a whole number after the colon", "--strategy random:1"
        )
    if wanted.mesh is None:
        raise UsageError("--strategy random needs a mesh", "--mesh dp=2,tp=2")
    return int(seed)


def make_plan(graph: Graph, hardware: Hardware, request: ModelRequest, wanted: PlanRequest) -> Made:
    """The best plan, or the one that `strategy` (`megatron`, `random:SEED`) asks for.

    Ctrl-C ends the search with the best plan so far. Raises UsageError for settings that can't be.
    """
    wishes, seed = _wishes(request, wanted), _seed(wanted)
    if seed is not None:
        return Made(_random(graph, hardware, wanted, wishes, seed), ignored(wanted))
    plan, points = _searched(graph, hardware, wanted, wishes)
    notes = (*plan.search.notes, *ignored(wanted))
    return Made(replace(plan, search=replace(plan.search, notes=notes)), ignored(wanted), tuple(wishes.log), points)


def _wishes(request: ModelRequest, wanted: PlanRequest) -> Wishes:
    from autoshard.search.build_plan import Origin
    from autoshard.search.fixed_styles import megatron
    from autoshard.search.search_task import Wishes
    from autoshard.solvers.common.solver_options import Clock, Options

    style = wanted.strategy == "megatron"
    limit = wanted.time_limit_seconds
    if limit is None:
        limit = MESH_SECONDS if wanted.mesh is None else float("inf")
    return Wishes(
        wanted.solver or "dp",
        wanted.level,
        wanted.limit_bytes,
        origin=Origin(request.spec, tuple(sorted(request.arguments.items()))),
        allowed=megatron if style else None,
        decided_by="megatron" if style else "search",
        all_to_all=wanted.all_to_all,
        options=Options(Clock(limit), wanted.engine or "highs"),
    )


def _random(graph: Graph, hardware: Hardware, wanted: PlanRequest, wishes: Wishes, seed: int) -> Plan:
    from autoshard.search.fixed_styles import random_plan

    assert wanted.mesh is not None  # `_seed` says so to a person
    return random_plan(graph, wanted.mesh, hardware, seed, origin=wishes.origin, all_to_all=wanted.all_to_all)


def _searched(graph: Graph, hardware: Hardware, wanted: PlanRequest, wishes: Wishes) -> tuple[Plan, tuple[Point, ...]]:
    """The plan, and the front where it is asked for."""
    from autoshard.constraints.pins import read_pins
    from autoshard.search import memory_fit, pareto_front, search_task, select_plan
    from autoshard.search.mesh_search import search_meshes
    from autoshard.solvers.common.solver_options import interruptible

    clock = wishes.options.clock

    def pins(mesh: Mesh) -> tuple[Pin, ...]:
        return read_pins(wanted.pins, wanted.pins_file, mesh)

    if wanted.mesh is None:
        assert wanted.devices is not None
        with interruptible(clock):
            plan = search_meshes(graph, hardware, wanted.devices, wishes, pins)
        if not wanted.pareto:
            return plan, ()
        made = search_task.prepare(graph, plan.mesh, hardware, replace(wishes, pins=pins(plan.mesh)))
    else:
        made = search_task.prepare(graph, wanted.mesh, hardware, replace(wishes, pins=pins(wanted.mesh)))
        with interruptible(clock):  # before, there is nothing to keep
            plan = select_plan.best(made, memory_fit.fitted(made))
    with interruptible(clock):
        return plan, pareto_front.front(made, plan) if wanted.pareto else ()


def verify_package(path: Path, backend: Literal["gloo", "lockstep"], full: bool, arguments: Arguments) -> Proof:
    """Run the package's own files against the original model, and note the outcome in the package and its report."""
    from autoshard.ir import graph_json

    read = read_package(path)  # before torch is imported: a missing folder is told at once
    graph_json.check_has_code(read[0].model)
    from autoshard.verify import verify_package as verify

    proof = verify(root_of(path), backend=backend, full=full, arguments=arguments)
    noted = {key: value for key, value in proof.as_dict().items() if key != "seconds"}
    text = json.dumps(noted, indent=1, ensure_ascii=False) + "\n"
    output_folder.update_package(root_of(path), {VERIFICATION: text, REPORT: report_text(build(*read), noted)})
    return proof
