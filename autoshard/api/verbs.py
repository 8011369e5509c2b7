"""The verbs: capture, plan, simulate, verify, report, write, load_plan. Each does what the command of its name does."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn

import autoshard
from autoshard import workflow
from autoshard.api import ranks
from autoshard.api.live_model import captured as graph_of
from autoshard.api.live_model import live_model, on_cpu
from autoshard.api.planned import CapturedModel, LiveModel, PlannedModel
from autoshard.api.settings import read_hardware, search_request
from autoshard.api.strategies import FULL, dataset_pins
from autoshard.cluster.hardware import Hardware, check_precision
from autoshard.emit import emit
from autoshard.errors import UsageError
from autoshard.graph_capture.call_form import LossFunction
from autoshard.graph_capture.model_spec import LOSS
from autoshard.ir import graph_json, plan_json
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.package import output_folder
from autoshard.package.package_files import Beside, package_files, read_package, report_text, root_of
from autoshard.replay.plan_check import check_plan
from autoshard.search.build_plan import Origin
from autoshard.search.search_request import SearchRequest
from autoshard.simulation import Timeline
from autoshard.system.data_files import data_folder
from autoshard.verification.case import Backend, case_of, check_files
from autoshard.verification.comparison.proof import Proof
from autoshard.verification.sizing.shorter_axes import counterpart
from autoshard.verification.verify_folder import MOST_PROCESSES, MOST_RANKS, check_stages

Model: TypeAlias = nn.Module | str | CapturedModel
CACHE = "AUTOSHARD_CACHE"  # the folder of plans, where a program names none


def capture(
    model: Model,
    inputs: Any = None,
    *,
    targets: Any = None,
    loss: LossFunction | str | None = None,
    arguments: Mapping[str, str | int | float | bool] | None = None,
    precision: str = "fp32",
    optimizer: str = "adamw",
    training: bool = True,
) -> CapturedModel:
    """The graph of a model.

    `model`: an `nn.Module` with `inputs`, one *global* batch: a tensor, a tuple of positional arguments, or a dict of
    keyword arguments. Or text as the command line takes it (`file.py:callable`, `package.module:callable`, `file.pt2`,
    a saved graph) with `arguments` for the callable. `loss` makes the loss of the model's output and of `targets`, or
    of those keys of a dict of inputs that the forward does not take. CaptureError names the model's line.
    """
    if isinstance(model, CapturedModel):
        return model
    if isinstance(model, str):
        if inputs is not None or targets is not None or callable(loss):
            raise UsageError(f"{model!r} brings its own inputs", "arguments={…}, and loss='module:function'")
        given = dict(arguments or {}) | ({LOSS: loss} if loss is not None else {})
        request = workflow.ModelRequest(model, given, precision, optimizer, training)
        return CapturedModel(workflow.read_graph(request), Origin(model, tuple(sorted(given.items()))))
    if inputs is None or arguments:
        what = "takes no arguments" if arguments else "needs example inputs"
        raise UsageError(f"a model that is an object {what}", "autoshard.capture(model, (x, y)), or a dict of keywords")
    live = live_model(model, inputs, targets, loss, "missing" if training else "never")
    return CapturedModel(workflow.checked(graph_of(live, precision, optimizer, training)), Origin(), live)


def plan(
    model: Model,
    inputs: Any = None,
    *,
    hardware: str | Hardware,
    mesh: str | Mesh | Mapping[str, int] | None = None,
    devices: int | None = None,
    level: int | str = "speed",
    mode: str = "auto",
    pins: Sequence[str] | Mapping[str, Any] = (),
    memory_limit: str | float | None = None,
    time_limit: str | float | None = None,
    dataset_strategy: Any = FULL,
    cache: str | Path | None = None,
    targets: Any = None,
    loss: LossFunction | str | None = None,
    arguments: Mapping[str, str | int | float | bool] | None = None,
    precision: str = "fp32",
    optimizer: str = "adamw",
    training: bool = True,
    **search: Any,
) -> PlannedModel:
    """The best plan of a model, given as to `capture`.

    `mesh`: `"dp=2,tp=4"` or `{"dp": 2, "tp": 4}`, or `devices` to search for one. `pins`: `{what: how}`, or texts
    `WHAT=HOW`. `mode`: auto, semi-auto (data parallel but for pins), data-parallel or stand-alone. `memory_limit` per
    device, bytes or `"60 GiB"`; `time_limit` of the search, seconds or `"30s"`. `dataset_strategy`: how often each dim
    of each input is cut, `((4, 1, 2, 1), (4,))`, or `"data_parallel"`; default: what the search finds. `search` are
    further settings: strategy, solver, ilp_engine, pins_file, pareto, all_to_all; micro_batches or global_batch,
    stages, virtual_stages, schedule, recompute. `cache`: a folder of earlier plans, the same for the same graph and
    request; default: $AUTOSHARD_CACHE, or none.

    Under torchrun rank 0 plans and every rank gets its plan.
    """
    own = read_hardware(hardware)
    wanted = search_request(mesh, devices, level, pins, memory_limit, time_limit, search, mode)
    if isinstance(model, str):
        given = dict(arguments or {})
        workflow.check(workflow.ModelRequest(model, given, precision, optimizer, training), wanted, own)
    options: dict[str, Any] = {"targets": targets, "loss": loss, "arguments": arguments, "precision": precision}
    options |= {"optimizer": optimizer, "training": training}

    def made_here() -> PlannedModel:
        captured_model = capture(model, inputs, **options)
        size = wanted.mesh.size if wanted.mesh is not None else wanted.devices
        assert size is not None
        given = dataset_pins(dataset_strategy, captured_model.graph, size)
        return planned(captured_model, own, replace(wanted, pins=(*wanted.pins, *given)), cache)

    if ranks.started() == 1:
        return made_here()
    device = ranks.device_type(None)
    made = ranks.from_rank_0(lambda: _told(made_here()), device)
    return _heard(made, model, inputs, targets, loss, training)


def planned(
    model: CapturedModel, hardware: Hardware, wanted: SearchRequest, cache: str | Path | None = None
) -> PlannedModel:
    """The plan of a captured model; from the cache, where it was made before."""
    check_precision(hardware, model.graph.precision)
    request = replace(wanted, origin=model.origin)
    kept = _kept_at(model.graph, hardware, request, cache)
    if kept is not None and kept.is_file():
        plan = plan_json.load(kept)
        check_plan(plan, model.graph, hardware, str(kept))
        return PlannedModel(plan, model.graph, hardware, model.live, None, request.ignored())
    made = workflow.make_plan(model.graph, hardware, request)
    if kept is not None and not made.plan.search.cut_short:
        kept.parent.mkdir(parents=True, exist_ok=True)
        plan_json.save(made.plan, kept)
    return PlannedModel(made.plan, model.graph, hardware, model.live, None, made.ignored, made.front, made.styles)


def _kept_at(graph: Graph, hardware: Hardware, request: SearchRequest, cache: str | Path | None) -> Path | None:
    """The file of this very plan; None without a cache, or where more than a plan is asked for."""
    folder = cache or os.environ.get(CACHE)
    if not folder or request.pareto:
        return None
    pins = request.pins_file.read_text(encoding="utf-8") if request.pins_file else ""
    libraries = tuple(version(name) for name in ("numpy", "scipy", "highspy"))
    parts = (graph_json.graph_hash(graph), hardware.text, repr(request), pins, _own_code(), libraries)
    return Path(folder) / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.plan.json"


@cache
def _own_code() -> str:
    """Changes with autoshard's code and constants: another one may find another plan."""
    own = hashlib.sha256()
    roots = {Path(autoshard.__file__).parent: "*.py", data_folder("costmodels"): "*.toml"}
    for root, kind in roots.items():
        for path in sorted(root.rglob(kind)):
            own.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return own.hexdigest()


Told = tuple[str, str, str, tuple[str, ...], Any, bool]


def _told(made: PlannedModel) -> Told:
    call = made.live.call if made.live else None
    texts = plan_json.dumps(made.plan), graph_json.dumps(made.graph), made.plan.hardware_text
    return *texts, made.ignored, call.returned if call else None, bool(call and call.summed)


def _heard(
    told: Told, model: Any = None, inputs: Any = None, targets: Any = None, loss: Any = None, training: bool = True
) -> PlannedModel:
    plan_text, graph_text, hardware_text, ignored, returned, summed = told
    live: LiveModel | None = None
    if isinstance(model, nn.Module):
        live = live_model(model, inputs, targets, loss, "missing" if training else "never")
        live.call.returned, live.call.summed = returned, summed
    elif isinstance(model, CapturedModel):
        live = model.live
    plan, graph = plan_json.loads(plan_text), graph_json.loads(graph_text, "the graph of rank 0")
    return PlannedModel(plan, graph, read_hardware(hardware_text), live, None, ignored)


def load_plan(path: str | Path) -> PlannedModel:
    """The plan of a package that was written before (its folder, or its plan.json), checked.

    Under torchrun rank 0 reads it and every rank gets it.
    """
    own = Path(path)
    if ranks.started() == 1:
        return PlannedModel(*read_package(own), folder=root_of(own))
    told = ranks.from_rank_0(lambda: _told(PlannedModel(*read_package(own))), ranks.device_type(None))
    return replace(_heard(told), folder=root_of(own))


def simulate(plan: PlannedModel) -> Timeline:
    """One step of the plan's program, simulated: events, memory curve, `step_seconds`, `peak_bytes`."""
    return plan.simulated.timeline


def write(plan: PlannedModel, folder: str | Path) -> Path:
    """Writes the package that runs with torchrun, and its report. UsageError where the folder holds something else."""
    if plan.live is not None and plan.live.call.summed:
        what = f"{plan.graph.name} returns no loss, so its package could not train it"
        raise UsageError(what, "loss=torch.nn.functional.cross_entropy with targets=…; or training=False")
    output_folder.write_package(Path(folder), package_files(plan.simulated, Beside(plan.styles, plan.front)))
    return Path(folder)


def report(plan: PlannedModel, path: str | Path | None = None) -> str:
    """The HTML page that shows the plan; written to `path` where one is given."""
    page = report_text(plan.simulated, Beside(plan.styles, plan.front))
    if path is not None:
        Path(path).write_text(page, encoding="utf-8")
    return page


def verify(
    plan: PlannedModel,
    *,
    backend: Backend = "lockstep",
    full: bool = False,
    arguments: Mapping[str, str | int | float | bool] | None = None,
) -> Proof:
    """Runs the plan's program against the original model in float64, three optimizer steps. See `Proof.passed`.

    `backend`: all ranks in this process, or `"gloo"`, a process each. Of a model that was named by text, `arguments`
    reduce its sizes and `full` forbids to; an object is verified as it is.
    """
    if plan.live is None and not plan.plan.model:
        raise UsageError("this plan does not say which model it is of", "plan the model again")
    if plan.live is not None:
        return _verified(plan, plan.live, backend)
    if plan.folder is not None:
        return workflow.verify_package(plan.folder, backend, full, dict(arguments or {}))
    with tempfile.TemporaryDirectory(prefix="autoshard-verify-") as folder:
        package = write(plan, Path(folder) / "package")
        return workflow.verify_package(package, backend, full, dict(arguments or {}))


def _verified(plan: PlannedModel, live: LiveModel, backend: Backend) -> Proof:
    real, program, graph = on_cpu(live), plan.simulated.program, plan.graph
    own: Plan = plan.plan
    if own.mesh.size > MOST_RANKS:
        found = counterpart(own, graph, graph, plan.hardware, MOST_RANKS)
        own, program = found.plan, found.program
    case = case_of(real.module, real.tensors, graph, micro_batches=own.step.micro_batches)
    if own.step.parts:
        check_stages(own, "gloo")
        backend = "gloo"
    kind: Backend = "lockstep" if own.mesh.size > MOST_PROCESSES or dist.is_initialized() else backend
    proof = check_files(case, program, emit(program, own, graph), kind, own_precision=True)
    return proof if own is plan.plan else replace(proof, planned_mesh=str(plan.plan.mesh))
