"""A model at one size with its reference run; many plans and packages are checked against one case."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from autoshard.errors import UsageError, UserError
from autoshard.graph_capture.dynamic_sizes.numbers import resized
from autoshard.graph_capture.load_model import load_model
from autoshard.graph_capture.tracing.call_caches import attributes_put_back
from autoshard.graph_capture.tracing.flex_attention import dense_flex_attention
from autoshard.ir.graph import Graph
from autoshard.ir.graph_json import check_has_code
from autoshard.ir.layout import Replicate
from autoshard.ir.plan import meshes_text
from autoshard.ir.program import Program
from autoshard.system.guard import guarded_folder
from autoshard.verification.comparison.compare import RankResult, compare_stages
from autoshard.verification.comparison.proof import Proof
from autoshard.verification.comparison.rounding_noise import Noise, amplified, measure_noise
from autoshard.verification.comparison.tolerances import Error, first_failure, summarise
from autoshard.verification.original.batches import at_batch, at_shapes, example_inputs, varied_micro_batch
from autoshard.verification.original.float64 import literal_dtype
from autoshard.verification.original.optimizers import make_optimizer
from autoshard.verification.original.plain_run import fault_of_model
from autoshard.verification.original.randomise import randomise_state, tie
from autoshard.verification.original.reference import Batch, MakeOptimizer, Reference, run_reference
from autoshard.verification.ranks import started_train
from autoshard.verification.ranks.job_files import load_result, save_job
from autoshard.verification.ranks.loaded_package import load_package
from autoshard.verification.ranks.lockstep import LockstepError, run_lockstep
from autoshard.verification.ranks.rank_processes import RankFailed, run_processes
from autoshard.verification.ranks.rank_steps import Job, job_of, place_axes, run_rank
from autoshard.verification.ranks.served_steps import SERVER_PLAN, run_served, served_notes
from autoshard.verification.ranks.started_train import STEPS
from autoshard.verification.training_precision import TrainingPrecisionStep, check_precision, run_in_precision

Sizes = Mapping[str, int]  # a dynamic size -> what it is in a step
Backend = Literal["gloo", "lockstep"]
TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True)
class Case:
    """`graph` is the model's, captured with the arguments that the reference was built with.

    `noise`: effect of rounding on the reference; `native_step`: a step of the original in its own precision, or why
    there is none; `notes` name what could not be replaced (inputs, parameters near the constructor's).
    """

    graph: Graph
    reference: Reference
    noise: Noise | None = None
    native_step: TrainingPrecisionStep | str = ""
    notes: tuple[str, ...] = ()


def make_case(
    spec: str,
    arguments: Mapping[str, Any],
    graph: Graph,
    seed: int = 0,
    steps: int = STEPS,
    micro_batches: int = 1,
    sizes: Sequence[Sizes] = (),
    by_rows: Sequence[str] = (),
) -> Case:
    """Builds the original model with values, randomises it and trains it in float64, each step in `micro_batches`.

    `sizes`: the dynamic ones of each step, in place of `steps`. `by_rows`: paths of tables that row-wise Adagrad
    trains. CaptureError if the model can't be called with its example inputs.
    """
    check_has_code(spec)

    def load() -> tuple[torch.nn.Module, Sequence[torch.Tensor]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # example inputs, and tables that the constructor draws
            return load_model(spec, arguments, device="cpu")

    return loaded_case(load, graph, seed, steps, micro_batches, sizes, by_rows)


def loaded_case(
    load: Callable[[], tuple[torch.nn.Module, Sequence[torch.Tensor]]], graph: Graph, *args: Any, **named: Any
) -> Case:
    """Case of the model that `load` returns, on the CPU with values; loads it again on failure, to find the cause."""
    try:
        return case_of(*load(), graph, *args, **named)
    except UserError:
        raise
    except Exception:
        fault = fault_of_model(*load(), graph)
        if fault is None:
            raise
    raise fault


@dense_flex_attention()
def case_of(
    module: torch.nn.Module,
    examples: Sequence[torch.Tensor],
    graph: Graph,
    seed: int = 0,
    steps: int = STEPS,
    micro_batches: int = 1,
    sizes: Sequence[Sizes] = (),
    by_rows: Sequence[str] = (),
) -> Case:
    """Case of an already built model, which is changed: randomised and trained in float64."""
    tie(module, graph)
    literal = literal_dtype(module)
    state = {name: value.clone() for name, value in _state(module)}
    every = [resized(graph, step_sizes) for step_sizes in sizes] or [graph]
    shown = [at_batch(at, at_shapes(at, [x.detach() for x in examples])) for at in every]
    varied: list[list[torch.Tensor]] = []
    unchanged: list[list[torch.Tensor]] = []
    for step in range(len(sizes) or steps):
        places = [(step + number) % len(every) for number in range(micro_batches)]  # each of another size
        pairs = [varied_micro_batch(every[n], shown[n], seed + step, m) for m, n in enumerate(places)]
        varied.append([x for inputs in pairs for x in inputs])
        unchanged.append([x for n in places for x in example_inputs(shown[n])])
    tries: tuple[tuple[list[list[torch.Tensor]], bool, tuple[str, ...]], ...] = (
        (varied, False, ()),
        (unchanged, False, ("the example inputs as they are: the model takes no others",)),
        (unchanged, True, ("parameters near those of the constructor: with others the model gives no numbers",)),
    )
    buffers = {name for b in graph.buffers for name in (b.path, *b.ties)}
    make = _optimizer(graph, module, by_rows)
    for batches, mildly, notes in tries:
        _set_state(module, state)
        randomise_state(module, seed, buffers, mildly)
        tie(module, graph)  # another dtype ends what buffers share
        with attributes_put_back(module):  # what it keeps from call to call is of these values, and in float64
            reference = _reference(module, graph, batches, make, seed, literal, micro_batches, last=mildly)
        if reference is not None and (reference.finite or mildly):
            _check_sizes(reference, sizes)
            with attributes_put_back(module):
                noise = measure_noise(module, graph, batches, make, reference, literal)
            dtypes = {name: value.dtype for name, value in state.items()}
            with attributes_put_back(module):
                return Case(graph, reference, noise, run_in_precision(module, graph, reference, dtypes), notes)
    raise AssertionError("the last way to run the model gives a reference or raises")


def _check_sizes(reference: Reference, sizes: Sequence[Sizes]) -> None:
    """Raises UsageError for dynamic sizes at which the original gives no numbers, such as a loss without labels."""
    for step_sizes, step in zip(sizes, reference.steps, strict=False):
        if not all(bool(torch.isfinite(x).all()) for x in step.outputs):
            message = (
                f"the original gives no numbers at {', '.join(f'{name} {size}' for name, size in step_sizes.items())}"
            )
            raise UsageError(message, "a larger least size, such as --dynamic sequence=2..1024")


def _reference(
    module: torch.nn.Module,
    graph: Graph,
    batches: Sequence[Batch],
    make: MakeOptimizer,
    seed: int,
    literal: torch.dtype,
    micro_batches: int,
    last: bool,
) -> Reference | None:
    """Run of the reference; None if the model can't be run with these batches. With `last`, the exception is raised."""
    try:
        return run_reference(module, graph, batches, make, seed, literal, micro_batches)
    except UserError:
        raise
    except Exception:
        if last:
            raise
        return None


def _optimizer(graph: Graph, module: torch.nn.Module, by_rows: Sequence[str]) -> MakeOptimizer:
    tables = [parameter for name, parameter in module.named_parameters(remove_duplicate=False) if name in by_rows]
    return lambda parameters: make_optimizer(graph.optimizer, parameters, tables)


def _state(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, value.detach()) for name, value in (*module.named_parameters(), *module.named_buffers())]


def _set_state(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in _state(module):
            value.copy_(state[name])


def check_folder(
    case: Case,
    program: Program,
    folder: Path,
    backend: Backend = "gloo",
    timeout_seconds: float = TIMEOUT_SECONDS,
    own_precision: bool = True,
) -> Proof:
    """Runs the package in `folder`, emitted from `program`, on all ranks and compares it with the case.

    `own_precision`: also runs one step in the package's precision, in lock-step; `unverified` explains if it can't.
    """
    start = time.monotonic()
    steps = case.reference.steps
    clipped = case.reference.clipped_steps
    served = (folder / SERVER_PLAN).exists()
    own_precision = own_precision and not served
    notes = (
        *case.notes,
        *served_notes(folder),
        *(amplified(case.reference, case.noise) if case.noise else ()),
        *unsplit_note(program),
    )
    where = meshes_text(program.meshes, program.step.word)
    proof = Proof(where, backend, program.firsts[-1], len(steps), clipped, (), 0.0, notes=notes)
    least = [f"{size.name}={size.least}" for size in case.graph.dynamic]
    options = started_train.arguments(folder, program.loss is not None, least)
    refused = _refused(case) if own_precision else ""
    starts = options if own_precision and not isinstance(case.native_step, str) else ()
    try:
        run = _on_servers if served else _RUNNERS[backend]
        results, failed = run(folder, job_of(program, case.reference), program, timeout_seconds, starts)
        own_errors: list[Error] = []
        if own_precision and isinstance(case.native_step, TrainingPrecisionStep):
            own_errors = check_precision(case.native_step, case.reference, program, folder, timeout_seconds)
    except (RankFailed, LockstepError) as error:
        return replace(proof, crash=str(error), seconds=time.monotonic() - start)
    errors = [*compare_stages(program, case.reference, results, case.noise), *own_errors]
    crash = f"train.py, run as a user starts it: {failed}" if failed and not first_failure(errors) else ""
    message = started_train.words(options, backend, proof.ranks, program.precision) if starts and not failed else ""
    return replace(
        proof, kinds=summarise(errors), first_failure=first_failure(errors), crash=crash, started=message,
        unverified=tuple(filter(None, (refused, case.reference.not_evaluated))), seconds=time.monotonic() - start,
    )  # fmt: skip


def _refused(case: Case) -> str:
    """Explains why the package's own precision can't be checked; "" if it can."""
    if isinstance(case.native_step, str):
        return f"{case.native_step}; nor was train.py started" if case.native_step else ""
    return ""


def unsplit_note(program: Program) -> tuple[str, ...]:
    """Note for a plan that leaves nothing to prove: no value and no parameter is sharded anywhere."""
    layouts = [value.layout for value in program.values] + [p.layout for p in (*program.parameters, *program.buffers)]
    split = any(not isinstance(placement, Replicate) for layout in layouts for placement in layout.placements)
    alone = split or program.step.stages > 1 or program.mesh.size == 1
    return () if alone else ("nothing split: every device computes the whole",)


def check_files(
    case: Case,
    program: Program,
    files: Mapping[str, str],
    backend: Backend = "lockstep",
    timeout_seconds: float = TIMEOUT_SECONDS,
    own_precision: bool = False,
) -> Proof:
    """Checks the text of a package (file name -> text), as `check_folder` does its folder."""
    with written(files) as folder:
        return check_folder(case, program, folder, backend, timeout_seconds, own_precision)


@contextmanager
def written(files: Mapping[str, str]) -> Iterator[Path]:
    """Temporary folder with the files."""
    with guarded_folder("autoshard-verify-") as folder:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        yield folder


_Results = tuple[list[RankResult], str]  # and how train.py failed


def _in_lockstep(folder: Path, job: Job, program: Program, timeout_seconds: float, starts: Sequence[str]) -> _Results:
    step = program.step
    try:
        package = load_package(folder)
    except Exception as error:
        raise LockstepError(f"the package can't be imported: {type(error).__name__}: {error}") from error
    classes, axes = (package.runtime.ParallelMesh, getattr(package.runtime, "Stages", None)), dict(program.mesh.axes)
    places = place_axes(program)
    more = step.part_stages, places
    results = run_lockstep(axes, lambda mesh: run_rank(package, mesh, job), timeout_seconds, *classes, *more)
    try:
        if starts:
            started_train.run_in_lockstep(folder, axes, starts, timeout_seconds, *more)
    except LockstepError as error:
        return results, str(error)
    return results, ""


def _on_gloo(folder: Path, job: Job, program: Program, timeout_seconds: float, starts: Sequence[str]) -> _Results:
    with guarded_folder("autoshard-verify-") as scratch:
        job_file, failed = scratch / "job.pt", ""
        save_job(job, job_file)
        arguments = [str(folder.resolve()), str(job_file), str(scratch), *starts]
        count = program.firsts[-1]
        files = [scratch / f"rank{rank}.pt" for rank in range(count)]
        try:
            run_processes("autoshard.verification.ranks.rank_worker", arguments, count, timeout_seconds, scratch)
        except RankFailed as error:
            if not all(file.exists() for file in files):  # the last thing that a job does
                raise
            failed = str(error)
        return [load_result(file) for file in files], failed


def _on_servers(folder: Path, job: Job, program: Program, timeout_seconds: float, starts: Sequence[str]) -> _Results:
    """Runs workers and servers in this process."""
    try:
        package = load_package(folder)
    except Exception as error:
        raise LockstepError(f"the package can't be imported: {type(error).__name__}: {error}") from error
    return [run_served(package, job)], ""


_RUNNERS = {"lockstep": _in_lockstep, "gloo": _on_gloo}
