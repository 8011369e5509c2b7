"""The verbs: capture, plan, simulate, verify, report, write, load_plan. Each does what the command of its name does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from autoshard import workflow
from autoshard.api.plan_cache import cached_plan, folder_of_plans, store_plan
from autoshard.api.planned import CapturedModel, PlannedModel, with_probed_sizes
from autoshard.api.settings import read_hardware, search_request
from autoshard.api.strategies import FULL, dataset_pins
from autoshard.cluster.hardware import Hardware, check_precision
from autoshard.constraints.manual_splits import with_manual_splits
from autoshard.constraints.verify_request import VerifyRequest
from autoshard.errors import UsageError
from autoshard.graph_capture.model_spec import LOSS, check_spec
from autoshard.ir import graph_json
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.package import output_folder, package_files
from autoshard.package.package_files import read_package, report_text, root_of
from autoshard.replay.simulated_plan import ReportExtras
from autoshard.search.build_plan import Origin
from autoshard.search.search_request import SearchRequest
from autoshard.simulation import Timeline
from autoshard.system.disk_cache import disk_cache
from autoshard.system.files import write_text
from autoshard.system.guard import guarded_folder
from autoshard.system.process_memory import infrequent_gc

if TYPE_CHECKING:
    from torch import nn

    from autoshard.graph_capture.call_form import LossFunction
    from autoshard.verification.case import Backend
    from autoshard.verification.comparison.proof import Proof

Model: TypeAlias = "nn.Module | str | CapturedModel"


def capture(
    model: Model,
    inputs: Any = None,
    *,
    targets: Any = None,
    loss: LossFunction | str | None = None,
    arguments: Mapping[str, str | int | float | bool] | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    training: bool = True,
    allow_modules: Sequence[str] = (),
    several: bool = False,
    dynamic: Sequence[str] | str = (),
) -> CapturedModel:
    """The graph of a model.

    `model`: an `nn.Module` with `inputs`, one *global* batch: a tensor, a tuple of positional arguments, or a dict of
    keyword arguments. Or text as the command line takes it (`file.py:callable`, `package.module:callable`, `file.pt2`,
    a saved graph) with `arguments` for the callable. `loss` makes the loss of the model's output and of `targets`, or
    of those keys of a dict of inputs that the forward does not take. `precision` is fp32 and `optimizer` adamw where
    nothing is said; a saved graph has its own, and its package imports no modules but `allow_modules`. CaptureError
    names the model's line. `several`: a model that text names must have a batch of two samples or more, which is
    looked at before it is captured. `dynamic`: sizes of the inputs that change from step to step, as `--dynamic` has
    them (`"batch=8..512/8,sequence=128..4096/64"`); or the model says so by `set_inputs`.
    """
    sizes = (dynamic,) if isinstance(dynamic, str) else tuple(dynamic)
    if isinstance(model, CapturedModel):
        requested = (
            precision or model.graph.precision,
            optimizer or model.graph.optimizer,
            training and model.graph.training,
        )
        passed = {"inputs": inputs, "targets": targets, "loss": loss, "arguments": arguments, "dynamic": sizes or None}
        _check_captured(model.graph, requested, [name for name, value in passed.items() if value is not None])
        return model
    if isinstance(model, str):
        if inputs is not None or targets is not None or callable(loss):
            raise UsageError(f"{model!r} brings its own inputs", "arguments={…}, and loss='module:function'")
        passed = dict(arguments or {}) | ({LOSS: loss} if loss is not None else {})
        options = (precision, optimizer, training, tuple(allow_modules), several, sizes)
        request = workflow.ModelRequest(model, passed, *options)
        return CapturedModel(workflow.read_graph(request), Origin(model, tuple(sorted(passed.items()))))
    if inputs is None or arguments:
        what = "takes no arguments" if arguments else "needs example inputs"
        raise UsageError(f"a model that is an object {what}", "autoshard.capture(model, (x, y)), or a dict of keywords")
    from autoshard.api.live_model import captured, live_model

    live = live_model(model, inputs, targets, loss, "missing" if training else "never")
    graph = captured(live, precision or "fp32", optimizer or "adamw", training, dynamic=sizes)
    return CapturedModel(workflow.checked(graph), Origin(), live)


def _check_captured(graph: Graph, requested: tuple[str, str, bool], names: Sequence[str]) -> None:
    """UsageError where a captured model is to be another one."""
    settings = {"precision": graph.precision, "optimizer": graph.optimizer, "training": graph.training}
    wrong = [*names, *(name for name, value in zip(settings, requested, strict=True) if value != settings[name])]
    if wrong:
        message = f"{' and '.join(wrong)} can't be set for a captured model"
        raise UsageError(message, f"autoshard.capture(model, …) with {wrong[0]}, and plan that")


def plan(
    model: Model,
    inputs: Any = None,
    *,
    hardware: str | Hardware,
    mesh: str | Mesh | Mapping[str, int] | None = None,
    devices: int | None = None,
    level: int | str = "speed",
    mode: str = "auto",
    pins: Sequence[str] | Mapping[str, Any] | None = (),
    memory_limit: str | float | None = None,
    time_limit: str | float | None = None,
    dataset_strategy: Any = FULL,
    cache: str | Path | bool | None = None,
    targets: Any = None,
    loss: LossFunction | str | None = None,
    arguments: Mapping[str, str | int | float | bool] | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    training: bool = True,
    allow_modules: Sequence[str] = (),
    dynamic: Sequence[str] | str = (),
    **search: Any,
) -> PlannedModel:
    """The best plan of a model, given as to `capture`.

    `mesh`: `"dp=2,tp=4"` or `{"dp": 2, "tp": 4}`, or `devices` to search for one. `pins`: `{what: how}`, or texts
    `WHAT=HOW`. `mode`: auto, semi-auto (data parallel but for pins), data-parallel or stand-alone. `memory_limit` per
    device, bytes or `"60 GiB"`; `time_limit` of the search, seconds or `"30s"`. `dataset_strategy`: how often each dim
    of each input is cut, `((4, 1, 2, 1), (4,))`, or `"data_parallel"`; default: what the search finds. `search`: more
    fields of SearchRequest, StepRequest and ServerRequest. `cache`: a folder for earlier plans, the same for the same
    graph and request, and for what searches found; default: $AUTOSHARD_CACHE, or the user's for the latter; False: no.

    Under torchrun rank 0 plans and every rank gets its plan.
    """
    cluster = read_hardware(hardware)
    wanted = search_request(mesh, devices, level, pins, memory_limit, time_limit, search, mode)
    options: dict[str, Any] = {"targets": targets, "loss": loss, "arguments": arguments, "precision": precision}
    options |= {"optimizer": optimizer, "training": training, "allow_modules": allow_modules, "dynamic": dynamic}
    if isinstance(model, str):
        check(model, cluster, wanted, arguments, precision)

    def local_plan() -> PlannedModel:
        captured_model = capture(model, inputs, **options)
        size = wanted.mesh.size if wanted.mesh is not None else wanted.of_one_stage().devices
        assert size is not None
        data_pins = dataset_pins(dataset_strategy, captured_model.graph, size)
        return planned(captured_model, cluster, replace(wanted, pins=(*wanted.pins, *data_pins)), cache)

    if _alone():
        return local_plan()
    from autoshard.api.plan_broadcast import from_rank_0

    return from_rank_0(local_plan, model, (inputs, targets, loss, training))


def check(
    model: str,
    hardware: Hardware,
    wanted: SearchRequest,
    arguments: Mapping[str, str | int | float | bool] | None = None,
    precision: str | None = None,
    loss: str | None = None,
    out: Path | None = None,
    to_verify: VerifyRequest | None = None,
) -> None:
    """Checks what can be known to be wrong before torch is imported and the model captured. Raises a UserError.

    `out`: where the package is to go. `to_verify`: how it is to be run against the model, if it is.
    """
    passed = dict(arguments or {}) | ({LOSS: loss} if loss is not None else {})
    workflow.check(workflow.ModelRequest(model, passed, precision), wanted, hardware)
    if to_verify is not None:
        graph_json.check_has_code(model)
        to_verify.check()
    if out is not None:
        output_folder.check_target(out)


def check_sizes(model: str, names: Iterable[str]) -> None:
    """UsageError where the model, named by text, takes no argument of that name. Imports torch, and its file."""
    from autoshard.graph_capture.load_model import check_names

    check_names(model, names)


def _alone() -> bool:
    """True if this is the only process. Without torch it is, unless torchrun started it."""
    if "torch" not in sys.modules and os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    from autoshard.api import ranks

    return ranks.started() == 1


def planned(
    model: CapturedModel,
    hardware: Hardware,
    wanted: SearchRequest,
    cache: str | Path | bool | None = None,
    *,
    whole_plans: bool = True,
) -> PlannedModel:
    """The plan of a captured model. `cache`: see `plan`."""
    wanted.check_kinds(hardware)
    hardware = workflow.used_hardware(model.graph, hardware, wanted)
    check_precision(hardware, model.graph.precision)
    request = replace(wanted, origin=model.origin, cache=disk_cache(cache))
    model = replace(model, graph=with_manual_splits(model.graph, request.pins, request.pins_file))
    plans = folder_of_plans(cache) if whole_plans else None
    if plans is not None and (cached := cached_plan(plans, model.graph, hardware, request)) is not None:
        return PlannedModel(cached, model.graph, hardware, model.live, None, request.ignored())
    result = workflow.make_plan(model.graph, hardware, request)
    if plans is not None:
        store_plan(plans, result.plan, model.graph, hardware, request)
    plan, details = result.plan, (result.ignored, result.front, result.styles, result.log)
    return PlannedModel(plan, model.graph, hardware, model.live, None, *details)


def load_plan(path: str | Path) -> PlannedModel:
    """The plan of a package that was written before (its folder, or its plan.json), checked.

    Under torchrun rank 0 reads it and every rank gets it.
    """
    source = Path(path)
    if _alone():
        return PlannedModel(*read_package(source), folder=root_of(source))
    from autoshard.api.plan_broadcast import from_rank_0

    return replace(from_rank_0(lambda: PlannedModel(*read_package(source))), folder=root_of(source))


def packages_in(path: str | Path) -> list[Path]:
    """The package at `path`, and those in it, for other numbers of devices."""
    return [Path(path), *output_folder.nested_packages(root_of(Path(path)))]


def simulate(plan: PlannedModel) -> Timeline:
    """One step of the plan's program, simulated: events, memory curve, `step_seconds`, `peak_bytes`. Of several
    micro-batches, stages or places: one micro-batch by itself; the step's time is `plan.plan.step_seconds`."""
    return plan.simulated.timeline


def write(plan: PlannedModel, folder: str | Path, also: Sequence[PlannedModel] = ()) -> Path:
    """Writes the package that runs with torchrun, and its report. UsageError where the folder holds something else.

    `also`: plans of the same model for other numbers of devices; `train.py` runs the one for as many as have started.
    """
    write_files(plan, Path(folder), also)
    return Path(folder)


@infrequent_gc()
def write_files(plan: PlannedModel, folder: Path, also: Sequence[PlannedModel] = ()) -> list[str]:
    """`write`; the names of the files."""
    others = tuple(sorted((variant.plan for variant in also), key=lambda variant: -variant.devices))
    numbers = [plan.plan.devices, *(variant.devices for variant in others)]
    if len(set(numbers)) < len(numbers):
        message = f"plans for {', '.join(map(str, numbers))} devices in one package"
        raise UsageError(message, "one for each number of devices")
    if other := next((variant for variant in also if _stored(variant.graph) != _stored(plan.graph)), None):
        message = f"{other!r} has other parameters than {plan!r}"
        raise UsageError(message, "plans of one model, for other numbers of devices")
    files = _files(plan, replace(plan.extras, others=others), bool(also))
    for variant in also:
        nested = _files(variant, variant.extras, True)
        files |= {f"{output_folder.NESTED_FOLDER}{variant.plan.devices}/{name}": text for name, text in nested.items()}
    output_folder.write_package(folder, files)
    write_text(folder / package_files.SEARCH_LOG, package_files.log_text(plan.log))
    return sorted(files)


def _stored(graph: Graph) -> dict[str, tuple[int, ...]]:
    return {stored.path: graph.tensor(stored.tensor).shape for stored in (*graph.parameters, *graph.buffers)}


def _files(plan: PlannedModel, extras: ReportExtras, other_numbers: bool) -> dict[str, str]:
    if plan.live is not None and plan.live.call.summed:
        what = f"{plan.graph.name} returns no loss, so its package could not train it"
        raise UsageError(what, "loss=torch.nn.functional.cross_entropy with targets=…; or training=False")
    built = replace(plan.simulated, graph=with_probed_sizes(plan))
    return package_files.package_files(built, extras, other_numbers)


def report(plan: PlannedModel, path: str | Path | None = None) -> str:
    """The HTML page that shows the plan; written to `path` where one is given."""
    page = report_text(plan.simulated, plan.extras)
    if path is not None:
        write_text(Path(path), page)
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
    reduce its sizes and `full` forbids to; an object is verified as it is. What is found of a package is noted in it.
    """
    VerifyRequest(backend, full, arguments or {}).check()
    if plan.live is not None:
        from autoshard.api.live_proof import verified

        return verified(plan, plan.live, backend)
    if not plan.plan.model:
        raise UsageError("this plan does not say which model it is of", "plan the model again")
    graph_json.check_has_code(plan.plan.model)  # before torch is imported
    passed = dict(arguments or {})
    if plan.folder is not None:
        for spec in (plan.plan.model, *(str(value) for name, value in plan.plan.model_arguments if name == LOSS)):
            check_spec(spec, planned=True)
        return workflow.verify_package(plan.folder, plan.simulated, backend, full, passed)
    with guarded_folder("autoshard-verify-") as folder:
        package = write(plan, folder / "package")
        return workflow.verify_package(package, plan.simulated, backend, full, passed)
