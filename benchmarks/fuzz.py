"""Random models under random plans, against the original: `python -m benchmarks.fuzz [--models 2000] [--write]`.

Each seed is a model (tests/random_models.py) on one of the meshes 2, 3, 2x2, 2x3 and 2x2x2, under a random plan, every
tenth under the searched one. The emitted package runs on all devices and is compared, element by element, by
tests/differential.py, which shares nothing with `autoshard verify`; the collectives of all ranks must agree. One seed:

    python -m benchmarks.fuzz --seed 17 --debug

With `--steps` each seed is a whole step (tests/random_steps.py): buffers that are rewritten, losses over labels in
larger expressions, empty and scalar tensors, frozen parts, micro-batches, recomputation, and for every 25th two stages
in processes. It is verified over two steps, a step of one micro-batch by tests/differential.py too. With `--places` the
steps run on random places, five placements of each model, in lock-step, and each goes on from what another has saved;
`--seed` then runs all of its model.

Exit code 6 where a package computes something else or anything crashes.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.errors import CaptureError, UsageError
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan, StepPlan
from autoshard.program.lower import lower
from autoshard.program.step_check import check_step
from autoshard.search.fixed_step import predicted, with_place_plans, with_step
from autoshard.verification.case import check_files, make_case
from benchmarks import harness
from benchmarks.harness import ROOT
from tests import random_models, random_steps
from tests.differential import Mismatch, compare
from tests.placements import random_meshes, random_parts
from tests.resumed import Hanging, Resumed

MESHES = ("tp=2", "tp=3", "dp=2,tp=2", "dp=2,tp=3", "pp=2,dp=2,tp=2")
SPEC = "tests/random_models.py:build"
STEPS = "tests/random_steps.py:build"
SEARCHED = 10  # every so many models the plan is searched
BATCH = 25  # models a process
LIMIT_SECONDS = 240  # of the processor, so that other jobs beside it do not count
HANG_SECONDS = 3600
PAGE = ROOT / "docs" / "fuzzing.md"
HEADS = {"steps": "## Whole steps", "places": "## Places"}  # of the page, behind the random models
RIGHT, REFUSED, WRONG, CRASH, HANGING = "right", "refused", "wrong", "crash", "hanging"
EACH = 5  # placements of a model


@dataclass(frozen=True)
class Row:
    """How one seed ended. `targets` are the operators of its graph."""

    seed: int
    mesh: str
    end: str
    reason: str = ""
    error: float = 0.0
    targets: tuple[str, ...] = ()
    collectives: int = 0
    seconds: float = 0.0
    resumed: int = 0


Ran = tuple[tuple[str, ...], float, int]  # operators, the largest error, collectives


def tried(seed: int, mesh: str, work: Callable[[], Ran], debug: bool) -> Row:
    """What goes wrong is a row, with `debug` an exception."""
    start, ran, end, reason = time.monotonic(), ((), 0.0, 0), RIGHT, ""
    try:
        ran = work()
    except Exception as caught:
        refused = isinstance(caught, CaptureError | UsageError)
        if debug and not refused:
            raise
        wrong = WRONG if isinstance(caught, Mismatch) else CRASH
        end = REFUSED if refused else HANGING if isinstance(caught, Hanging) else wrong
        reason = _words(caught)
    targets, error, count = ran
    return Row(seed, mesh, end, reason, error, targets, count, time.monotonic() - start)


def run_seed(seed: int, debug: bool = False) -> Row:
    """Model, plan and comparison of one seed."""
    mesh = Mesh.parse(MESHES[seed % len(MESHES)])

    def work() -> Ran:
        graph = capture(str(ROOT / SPEC), {"seed": seed})
        searched = seed // len(MESHES) % SEARCHED == 0
        plan = harness.planned(graph, "a100-80g-sxm", mesh, "best" if searched else seed)
        program = lower(plan, graph)
        model, inputs = random_models.build(seed)
        return _targets(graph), compare(model, inputs, program, emit(program, plan, graph)), _collectives(program)

    return tried(seed, str(mesh), work, debug)


def run_step(seed: int, debug: bool = False) -> Row:
    """The same of a whole step."""
    mesh, request = random_steps.step(seed)

    def work() -> Ran:
        backend = "gloo" if (request.stages or 1) > 1 else "lockstep"
        count = request.micro_batches or 1
        stepped = partial(with_step, request=request)
        ran, (program, files, _) = _verified({"seed": seed}, mesh, seed, count, backend, stepped)
        return (ran[0], compare(*random_steps.build(seed), program, files), ran[2]) if count == 1 else ran

    return tried(seed, mesh, work, debug)


def run_places(seed: int, debug: bool = False) -> Row:
    """A whole step on random places (tests/placements.py), five placements of each model: in lock-step, then trained
    in processes, each from what the one before has saved (tests/resumed.py)."""
    rng, count = random.Random(seed), random.Random(f"micro-batches {seed // EACH}").choice((1, 2, 3))
    mesh, order = rng.choice(("dp=1", "tp=2", "dp=2")), rng.choice(("gpipe", "1f1b"))
    line = _LINES.setdefault(seed // EACH, Resumed(EACH))

    def placed(plan: Plan, graph: Graph) -> Plan:
        step = StepPlan(count, order, 1, random_parts(graph, seed), zero=rng.choice((1, 2, 3)))
        check_step(step, graph)
        request = StepRequest(place_mesh=random_meshes(step.stages, seed))
        plan = replace(plan, step=step)
        plan = with_place_plans(plan, request, lambda one, _: harness.planned(graph, "cpu-local", one, seed))
        return predicted(plan, graph)

    def work() -> Ran:
        try:
            options = {"seed": seed // EACH, "trained": True}
            ran, (_, files, plan) = _verified(options, mesh, seed, count, "lockstep", placed)
            line.join(files, plan.devices)
        finally:
            if seed % EACH == EACH - 1:
                _LINES.pop(seed // EACH).close()
        return ran

    before = line.resumed
    row = tried(seed, mesh, work, debug)
    return replace(row, resumed=line.resumed - before)


_LINES: dict[int, Resumed] = {}  # the placements of each model so far
RUNS = {"": run_seed, "steps": run_step, "places": run_places}


def _verified(options: Any, mesh: str, seed: int, count: int, backend: str, stepped: Callable[[Any, Any], Any]) -> Any:
    """A random step's model under a random plan, verified; with the program, its files and the plan."""
    spec = str(ROOT / STEPS)
    graph = capture(spec, options)
    plan = stepped(harness.planned(graph, "cpu-local", Mesh.parse(mesh), seed), graph)
    program = lower(plan, graph)
    files = emit(program, plan, graph)
    proof = check_files(make_case(spec, options, graph, steps=2, micro_batches=count), program, files, backend, 120.0)
    if not proof.passed:
        raise Mismatch(str(proof.failure))
    return (_targets(graph), 0.0, _collectives(program)), (program, files, plan)


def _targets(graph: Graph) -> tuple[str, ...]:
    return tuple(sorted({op.target for op in graph.ops}))


def _collectives(program: Any) -> int:
    return sum(type(instruction).__name__ == "Collective" for instruction in program.instructions)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def run_batch(seeds: Sequence[int], kind: str) -> Iterator[Row]:
    """In a process of their own: a crash or a hang of one seed is its row, and the next go on in a new process."""
    left = list(seeds)
    while left:
        command = [sys.executable, "-c", f"from benchmarks import fuzz; fuzz.work({left}, {kind!r})"]
        done = subprocess.run(command, cwd=ROOT, env=harness.one_thread(), capture_output=True, text=True, check=False)
        rows = [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
        yield from rows
        left = left[len(rows) :]
        if left and done.returncode:
            said = (done.stderr.strip().splitlines() or [""])[-1]
            yield Row(left[0], MESHES[left[0] % len(MESHES)], CRASH, f"process ended with {done.returncode}: {said}")
            left = left[1:]


def section(kind: str, rows: Sequence[Row]) -> str:
    """What docs/fuzzing.md says of the runs of a kind: "", "steps" or "places"."""
    refused = (row.reason.partition(": ")[2] for row in rows if row.end == REFUSED)
    if kind == "places":
        refused = (reason.partition(" try")[0].partition(": place")[0] for reason in refused)
    return harness.rendered(
        "fuzzing.md.j2",
        kind=kind,
        rows=rows,
        ends=Counter(row.end for row in rows),
        failures=[row for row in rows if row.end in (WRONG, CRASH)],
        refusals=Counter(refused).most_common(),
        operators=len({target for row in rows if row.end == RIGHT for target in row.targets}),
        models=len({row.seed // EACH for row in rows}),
        by_mesh=[(mesh, mesh_rows) for mesh in MESHES if (mesh_rows := [row for row in rows if row.mesh == mesh])],
    )


def renewed(page: str, kind: str, rows: Sequence[Row]) -> str:
    """The page with another section of one kind, the others as they stand."""
    parts = re.split(rf"(?m)^(?={'|'.join(HEADS.values())})", page)
    known = {next((k for k, head in HEADS.items() if part.startswith(head)), ""): part for part in parts}
    known[kind] = section(kind, rows)
    return "\n".join(f"{known[key].rstrip()}\n" for key in ("", *HEADS) if key in known)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--debug", action="store_true", help="with --seed: the traceback")
    parser.add_argument("--steps", action="store_const", dest="kind", const="steps", default="", help="whole steps")
    parser.add_argument("--places", action="store_const", dest="kind", const="places", help="those on random places")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        each = EACH if options.kind == "places" else 1
        first = options.seed // each * each
        rows = [RUNS[options.kind](seed, options.debug) for seed in range(first, first + each)]
        print(*[json.dumps(asdict(row)) for row in rows], sep="\n")
    else:
        seeds = range(options.first, options.first + options.models)
        rows = list(run_all(seeds, options.jobs, options.kind))
    if options.write:
        PAGE.write_text(renewed(PAGE.read_text("utf-8"), options.kind, rows), "utf-8")
    return 0 if all(row.end in (RIGHT, REFUSED) for row in rows) else 6


def run_all(seeds: Sequence[int], jobs: int, kind: str) -> Iterator[Row]:
    """In batches; what is not right is printed."""
    batches, ends = [seeds[i : i + BATCH] for i in range(0, len(seeds), BATCH)], Counter[str]()
    with ThreadPoolExecutor(jobs) as pool:
        for rows in pool.map(lambda batch: list(run_batch(batch, kind)), batches):
            ends.update(row.end for row in rows)
            for row in rows:
                if row.end != RIGHT:
                    print(f"seed {row.seed} {row.mesh}: {row.end} {row.reason}", flush=True)
            print(f"{ends.total()} of {len(seeds)}: {dict(ends)}", flush=True)
            yield from rows


def work(seeds: Sequence[int], kind: str) -> None:
    """In the process of a batch: prints a row for each seed."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {LIMIT_SECONDS} s of the processor, or {HANG_SECONDS} s")

    signal.signal(signal.SIGPROF, late)
    signal.signal(signal.SIGALRM, late)
    for seed in seeds:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
        signal.alarm(HANG_SECONDS)
        print(json.dumps(asdict(RUNS[kind](seed))), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


if __name__ == "__main__":
    sys.exit(main())
