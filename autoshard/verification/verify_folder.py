"""`autoshard verify DIR`: the files in DIR, at full size if that is quick, else the same plan at reduced sizes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.constraints.verify_request import MOST_PROCESSES, MOST_RANKS, VerifyRequest
from autoshard.emit import emit
from autoshard.errors import NAMED, CheckError, UsageError
from autoshard.graph_capture.capture import capture
from autoshard.graph_capture.dynamic_sizes.numbers import resized
from autoshard.graph_capture.load_model import find_callable, verify_arguments
from autoshard.graph_capture.model_spec import holds_graph
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.package.package_files import read_package
from autoshard.program.lower import lower
from autoshard.replay.command_line import dynamic_text
from autoshard.replay.resize import with_rules_of
from autoshard.rules.resize.captured_batch import captured_with
from autoshard.rules.resize.rebatch import batch_size, rebatched
from autoshard.verification.case import TIMEOUT_SECONDS, Backend, check_files, check_folder, make_case
from autoshard.verification.comparison.proof import Proof
from autoshard.verification.coverage import only_at_full_size
from autoshard.verification.ranks.started_train import STEPS
from autoshard.verification.sizing.dynamic_steps import size_words, sizes_to_verify, step_sizes
from autoshard.verification.sizing.reduced_sizes import changed, heads_per_device, is_quick, reduced_arguments
from autoshard.verification.sizing.shorter_axes import Counterpart, counterpart

OTHERS = "other sizes: --verify-with, with the remainders of the planned ones"
THIS_MACHINE = "cpu-local"  # the profile that predicts how long full size takes here


@dataclass(frozen=True)
class _Package:
    folder: Path
    plan: Plan
    graph: Graph
    hardware: Hardware
    arguments: dict[str, Any]  # of the model's callable, defaults filled in


def verify_package(
    directory: Path | str,
    *,
    backend: Backend = "gloo",
    full: bool = False,
    arguments: Mapping[str, Any] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Proof:
    """Runs the package in `directory` against the original model.

    `arguments` reduce the model (`{"n_layer": 2}`), in addition to its VERIFY; `full` runs the files at full size
    however long it takes. Raises UsageError if the reduced model is not split as the planned one is, CheckError if an
    edited file would have to be emitted again. A failed comparison is a Proof that has not passed.
    """
    plan, graph, hardware = read_package(Path(directory))
    package = _Package(Path(directory), plan, graph, hardware, planned_arguments(plan))
    reduced = dict(arguments or {})
    VerifyRequest(backend, full, reduced).check()
    if backend == "gloo" and plan.devices > MOST_PROCESSES:
        backend = "lockstep"
    ranks, in_turns = min(plan.mesh.size, MOST_RANKS), backend == "lockstep"
    sized = resized(graph, step_sizes(graph)[0]) if graph.dynamic else graph
    quick = not reduced and (full or is_quick(plan, sized, STEPS, load_hardware(THIS_MACHINE), ranks, in_turns))
    if full or (quick and plan.mesh.size <= MOST_RANKS):
        return _at_full_size(package, backend, timeout_seconds, full)
    small = package.arguments if quick else reduced_arguments(package.arguments, verify_arguments(plan.model), reduced)
    if not quick and not changed(package.arguments, small):
        raise UsageError(
            f"{plan.model} is too large to verify here at full size, and names no smaller sizes",
            "--verify-with n_layer=2 (arguments of the callable), a dict VERIFY next to it, or --full",
        )
    _check_unedited(package)
    return _counterpart(package, small, backend, timeout_seconds)


def planned_arguments(plan: Plan) -> dict[str, Any]:
    """Arguments that the plan's model was built with, defaults filled in."""
    if holds_graph(plan.model):
        return dict(plan.model_arguments)
    signature = inspect.signature(find_callable(plan.model)).parameters.values()
    return {p.name: p.default for p in signature if p.default is not p.empty} | dict(plan.model_arguments)


def _at_full_size(package: _Package, backend: Backend, timeout_seconds: float, full: bool) -> Proof:
    count, sizes = package.plan.step.micro_batches, _sizes(package.plan, package.graph, backend, full)
    case = make_case(
        package.plan.model,
        package.arguments,
        package.graph,
        micro_batches=count,
        sizes=sizes,
        by_rows=by_rows(package.plan),
    )
    proof = check_folder(case, lower(package.plan, package.graph), package.folder, backend, timeout_seconds)
    return replace(proof, sizes=size_words(package.graph, sizes))


def _counterpart(package: _Package, small_arguments: dict[str, Any], backend: Backend, timeout_seconds: float) -> Proof:
    """Proof of the same plan at reduced sizes, on a shorter mesh if it has more devices than can run here."""
    plan, graph = package.plan, package.graph
    smaller = changed(package.arguments, small_arguments)
    small_graph = _captured(package, small_arguments) if smaller else graph
    proxy = counterpart(plan, graph, small_graph, package.hardware, MOST_RANKS)
    if proxy.lost and plan.mesh.size <= MOST_RANKS:
        more = f" (and {len(proxy.lost) - 1} more)" if len(proxy.lost) > 1 else ""
        raise UsageError(f"the reduced model would not be split as the planned one is: {proxy.lost[0]}{more}", OTHERS)
    count, sizes = plan.step.micro_batches, _sizes(proxy.plan, small_graph, backend)
    case = make_case(plan.model, small_arguments, small_graph, micro_batches=count, sizes=sizes, by_rows=by_rows(plan))
    files = emit(proxy.program, proxy.plan, small_graph)
    proof = check_files(case, proxy.program, files, backend, timeout_seconds, own_precision=True)
    planned = "" if proxy.plan.mesh == plan.mesh else str(plan.mesh)
    unverified = (*proof.unverified, *_uncovered(package, proxy, small_graph))
    words = size_words(small_graph, sizes)
    return replace(proof, reduced=smaller, planned_mesh=planned, unverified=unverified, sizes=words)


def by_rows(plan: Plan) -> tuple[str, ...]:
    """Paths of the tables that row-wise Adagrad trains."""
    return plan.servers.tables if plan.servers.count and plan.servers.rowwise else ()


def _sizes(plan: Plan, graph: Graph, backend: Backend, full: bool = False) -> list[dict[str, int]]:
    """Dynamic sizes of each step."""
    ranks = min(plan.mesh.size, MOST_RANKS)
    return sizes_to_verify(plan, graph, load_hardware(THIS_MACHINE), ranks, backend == "lockstep", full)


def _captured(package: _Package, arguments: dict[str, Any]) -> Graph:
    graph = package.graph
    settings = (graph.precision, graph.optimizer, graph.training)
    dynamic = (dynamic_text(graph),) if graph.dynamic else ()
    captured = capture(package.plan.model, arguments, *settings, dynamic=dynamic)
    if samples := package.plan.step.samples:
        batch = batch_size(captured)
        captured = captured_with(rebatched(captured, samples), package.plan.model, arguments, batch, dynamic)
    return with_rules_of(graph, captured)


def _uncovered(package: _Package, proxy: Counterpart, small_graph: Graph) -> Iterator[str]:
    """Descriptions of what the plan does and its counterpart does not."""
    plan, graph, program = package.plan, package.graph, lower(package.plan, package.graph)
    for (name, length), (_, actual) in zip(plan.mesh.axes, proxy.plan.mesh.axes, strict=True):
        if length != actual:
            yield f"{length} devices along {name}: {actual} ran"
    yield from proxy.lost[:NAMED]
    if len(proxy.lost) > NAMED:
        yield f"{len(proxy.lost) - NAMED} more that are split otherwise than planned"
    for kind in only_at_full_size((plan, graph, program), (proxy.plan, small_graph, proxy.program)):
        yield f"{kind}, used only in what was left out"
    if heads_per_device(program) != heads_per_device(proxy.program):
        yield "the planned number of attention heads of a device"


def _check_unedited(package: _Package) -> None:
    """Checks that the files are what the plan says, as it is the plan that is verified at reduced sizes."""
    other_numbers = (package.folder / "elastic.py").is_file()
    for name, text in emit(lower(package.plan, package.graph), package.plan, package.graph, other_numbers).items():
        path = package.folder / name
        if name.endswith(".py") and (not path.is_file() or path.read_text(encoding="utf-8") != text):
            what = (
                "is not what its plan.json says: it was edited, or another version wrote it"
                if path.is_file()
                else "is missing"
            )
            raise CheckError(f"{path} {what}", "--full, which runs the files themselves at full size")
