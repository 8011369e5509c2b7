"""Random models under random plans, against the original: `python benchmarks/fuzz.py [--models 2000] [--write]`.

Each seed is a model (tests/random_models.py) on one of the meshes 2, 3, 2x2, 2x3 and 2x2x2, under a random plan, every
tenth under the searched one. The emitted package runs on all devices and is compared, element by element, by
tests/differential.py, which shares nothing with `autoshard verify`; the collectives of all ranks must agree. One seed:

    python benchmarks/fuzz.py --seed 17 --debug

With `--steps` each seed is a whole step (tests/random_steps.py): buffers that are rewritten, losses over labels in
larger expressions, empty and scalar tensors, frozen parts, micro-batches, recomputation, and for every 25th two stages
in processes. It is verified over two steps, and one micro-batch by tests/differential.py too. With `--places` the steps
run on random places, five placements of each model, in lock-step, and each goes on from what another has saved;
`--seed` then runs all of its model.

Exit code 6 where a package computes something else or anything crashes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, this finds autoshard and tests of this very clone

MESHES = ("tp=2", "tp=3", "dp=2,tp=2", "dp=2,tp=3", "pp=2,dp=2,tp=2")
SPEC = "tests/random_models.py:build"
STEPS = "tests/random_steps.py:build"
SEARCHED = 10  # every so many models the plan is searched
BATCH = 25  # models a process
LIMIT_SECONDS = 240  # of the processor, so that other jobs beside it do not count
HANG_SECONDS = 3600
PAGE = ROOT / "docs" / "fuzzing.md"
STEPS_HEAD = "## Whole steps"
PLACES_HEAD = "## Places"
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
    from autoshard.errors import CaptureError, UsageError
    from tests.differential import Mismatch
    from tests.resumed import Hanging

    start, found, end, reason = time.monotonic(), ((), 0.0, 0), RIGHT, ""
    try:
        found = work()
    except Exception as caught:
        refused = isinstance(caught, CaptureError | UsageError)
        if debug and not refused:
            raise
        wrong = WRONG if isinstance(caught, Mismatch) else CRASH
        end = REFUSED if refused else HANGING if isinstance(caught, Hanging) else wrong
        reason = _words(caught)
    targets, error, count = found
    return Row(seed, mesh, end, reason, error, targets, count, time.monotonic() - start)


def run_seed(seed: int, debug: bool = False) -> Row:
    """Model, plan and comparison of one seed."""
    from autoshard.cluster.hardware import load_hardware
    from autoshard.emit import emit
    from autoshard.graph_capture.capture import capture
    from autoshard.ir.mesh import Mesh
    from autoshard.program.lower import lower
    from autoshard.search.fixed_styles import random_plan
    from autoshard.search.search_request import SearchRequest
    from autoshard.search.select_plan import search
    from tests.differential import compare
    from tests.random_models import build

    mesh = Mesh.parse(MESHES[seed % len(MESHES)])

    def work() -> Ran:
        hardware = load_hardware("a100-80g-sxm")
        graph = capture(str(ROOT / SPEC), {"seed": seed})
        searched = seed // len(MESHES) % SEARCHED == 0
        plan = search(graph, hardware, SearchRequest(mesh)) if searched else random_plan(graph, mesh, hardware, seed)
        program = lower(plan, graph)
        model, inputs = build(seed)
        return _targets(graph), compare(model, inputs, program, emit(program, plan, graph)), _collectives(program)

    return tried(seed, str(mesh), work, debug)


def run_step(seed: int, debug: bool = False) -> Row:
    """The same of a whole step."""
    from autoshard.search.whole_step import with_step
    from tests.differential import compare
    from tests.random_steps import build, step

    mesh, request = step(seed)

    def work() -> Ran:
        backend = "gloo" if (request.stages or 1) > 1 else "lockstep"
        count = request.micro_batches or 1
        ran, (program, files, _) = _verified(
            {"seed": seed}, mesh, seed, count, backend, lambda plan, g: with_step(plan, g, request)
        )
        return (ran[0], compare(*build(seed), program, files), ran[2]) if count == 1 else ran

    return tried(seed, mesh, work, debug)


def run_places(seed: int, debug: bool = False) -> Row:
    """A whole step on random places (tests/placements.py), five placements of each model: in lock-step, then trained
    in processes, each from what the one before has saved (tests/resumed.py)."""
    from autoshard.cluster.hardware import load_hardware
    from autoshard.constraints.step_request import StepRequest
    from autoshard.ir.plan import StepPlan
    from autoshard.program.step_check import check_step
    from autoshard.search.fixed_styles import random_plan
    from autoshard.search.whole_step import predicted, with_place_plans
    from tests.placements import random_meshes, random_parts
    from tests.resumed import Resumed

    rng, count = random.Random(seed), random.Random(f"micro-batches {seed // EACH}").choice((1, 2, 3))
    mesh, order = rng.choice(("dp=1", "tp=2", "dp=2")), rng.choice(("gpipe", "1f1b"))
    line = _LINES.setdefault(seed // EACH, Resumed(EACH))

    def placed(plan: Any, graph: Any) -> Any:
        step = StepPlan(count, order, 1, random_parts(graph, seed), zero=rng.choice((1, 2, 3)))
        check_step(step, graph)
        own = StepRequest(place_mesh=random_meshes(step.stages, seed))
        hardware = load_hardware("cpu-local")
        made = with_place_plans(replace(plan, step=step), own, lambda one, _: random_plan(graph, one, hardware, seed))
        return predicted(made, graph)

    def work() -> Ran:
        try:
            given = {"seed": seed // EACH, "trained": True}
            ran, (_, files, plan) = _verified(given, mesh, seed, count, "lockstep", placed)
            line.join(files, plan.devices)
        finally:
            if seed % EACH == EACH - 1:
                _LINES.pop(seed // EACH).close()
        return ran

    before = line.resumed
    row = tried(seed, mesh, work, debug)
    return replace(row, resumed=line.resumed - before)


_LINES: dict[int, Any] = {}  # the placements of each model so far


def _verified(given: Any, mesh: str, seed: int, count: int, backend: str, stepped: Callable[[Any, Any], Any]) -> Any:
    """A random step's model under a random plan, verified; with the program, its files and the plan."""
    from autoshard.cluster.hardware import load_hardware
    from autoshard.emit import emit
    from autoshard.graph_capture.capture import capture
    from autoshard.ir.mesh import Mesh
    from autoshard.program.lower import lower
    from autoshard.search.fixed_styles import random_plan
    from autoshard.verification.case import check_files, make_case
    from tests.differential import Mismatch

    spec = str(ROOT / STEPS)
    graph = capture(spec, given)
    plan = stepped(random_plan(graph, Mesh.parse(mesh), load_hardware("cpu-local"), seed), graph)
    program = lower(plan, graph)
    files = emit(program, plan, graph)
    proof = check_files(make_case(spec, given, graph, steps=2, micro_batches=count), program, files, backend, 120.0)
    if not proof.passed:
        raise Mismatch(str(proof.failure))
    return (_targets(graph), 0.0, _collectives(program)), (program, files, plan)


def _targets(graph: Any) -> tuple[str, ...]:
    return tuple(sorted({op.target for op in graph.ops}))


def _collectives(program: Any) -> int:
    return sum(type(own).__name__ == "Collective" for own in program.instructions)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def run_batch(seeds: Sequence[int], options: Sequence[str] = ()) -> Iterator[Row]:
    """In a process of their own: a crash or a hang of one seed is its row, and the next go on in a new process."""
    left = list(seeds)
    while left:
        command = [sys.executable, __file__, "--worker", ",".join(map(str, left)), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        rows = [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
        yield from rows
        left = left[len(rows) :]
        if left and done.returncode:
            said = (done.stderr.strip().splitlines() or [""])[-1]
            yield Row(left[0], MESHES[left[0] % len(MESHES)], CRASH, f"process ended with {done.returncode}: {said}")
            left = left[1:]


def page(rows: Sequence[Row]) -> str:
    """docs/fuzzing.md."""
    ends = Counter(row.end for row in rows)
    targets = {target for row in rows if row.end == RIGHT for target in row.targets}
    largest = max(row.error for row in rows)
    by_mesh = "\n".join(
        f"| `{mesh}` | {len(own)} | {sum(r.end == RIGHT for r in own)} | {sum(r.end == REFUSED for r in own)} "
        f"| {sum(r.end in (WRONG, CRASH) for r in own)} | {sum(r.collectives for r in own)} |"
        for mesh in MESHES
        if (own := [row for row in rows if row.mesh == mesh])
    )
    failures = "\n".join(f"- seed {r.seed} on `{r.mesh}`: {r.end}, {r.reason}" for r in rows if r.end in (WRONG, CRASH))
    refusals = Counter(row.reason.partition(": ")[2] for row in rows if row.end == REFUSED)
    refused = "\n".join(f"- {count} x {reason[:160]}" for reason, count in refusals.most_common(5))
    return (
        f"""# Random models

{len(rows)} random models, {ends[RIGHT]} right, {ends[REFUSED]} refused at capture, {ends[WRONG]} wrong,
{ends[CRASH]} crashed. Written by `python benchmarks/fuzz.py --models {len(rows)} --write`.

A model combines proof cases of the table of operators at random with modules as people write them
(`tests/random_models.py`); its plan is random, every tenth searched. The package runs on all devices, and every output,
gradient and buffer of every device is compared in float64 by code independent of `autoshard verify`
(`tests/differential.py`). All ranks of a group must issue the same collectives in the same order.
Largest error {largest:.1e}; {len(targets)} different operators ran.

| mesh | models | right | refused | wrong or crashed | collectives in their programs |
| --- | --: | --: | --: | --: | --: |
{by_mesh}

{"## Failures" if failures else ""}
{failures}

{"## Refused" if refused else ""}

{refused}
""".replace("\n\n\n", "\n").rstrip()
        + "\n"
    )


def steps_section(first: int, ends: Counter[str], failures: Sequence[Row] = ()) -> str:
    """What docs/fuzzing.md says of whole steps."""
    count = sum(ends.values())
    listed = "\n".join(f"- seed {row.seed} on `{row.mesh}`: {row.end}, {row.reason}" for row in failures)
    return (
        f"""{STEPS_HEAD}

{count} whole steps (seeds {first} to {first + count - 1}), {ends[RIGHT]} right, {ends[REFUSED]} refused at capture,
{ends[WRONG]} wrong, {ends[CRASH]} crashed. Written by
`python benchmarks/fuzz.py --steps --first {first} --models {count} --write`.

Random plans on 2 to 4 devices, every 25th on two stages, of models with rewritten buffers, losses over labels in larger
expressions, empty and scalar tensors, frozen parts, micro-batches and recompute (`tests/random_steps.py`). `autoshard
verify` runs two steps of each, `tests/differential.py` one micro-batch. Steps that train nothing are refused.
{listed}
""".rstrip()
        + "\n"
    )


def places_section(rows: Sequence[Row]) -> str:
    """What docs/fuzzing.md says of random placements."""
    ends = Counter(row.end for row in rows)
    reasons = (row.reason.partition(": ")[2].partition(" try")[0] for row in rows if row.end == REFUSED)
    refused = Counter(reason.partition(": place")[0] for reason in reasons)
    listed = "; ".join(f"{count} x {reason}" for reason, count in refused.most_common(3))
    models, command = len({row.seed // EACH for row in rows}), f"--places --first {rows[0].seed} --models {len(rows)}"
    return f"""{PLACES_HEAD}

{len(rows)} placements of {models} of these models, each operator's or by modules, on 2 to 4 places of 1 to 4 devices
each, with 1 to 3 micro-batches, GPipe or 1F1B, ZeRO 1 to 3:
{ends[RIGHT]} right, {ends[REFUSED]} refused, {ends[WRONG]} wrong, {ends[HANGING]} hanging, {ends[CRASH]} crashed,
{sum(row.resumed for row in rows)} resumed. Written by `python benchmarks/fuzz.py {command} --write`.
Refused: {listed}.

Each is verified in lock-step, then resumes the checkpoint of the placement before it in processes (`train.py`, gloo,
float64, `tests/resumed.py`); losses and state must equal an uninterrupted run's. Half the models have dropout.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--debug", action="store_true", help="with --seed: the traceback")
    parser.add_argument("--write", action="store_true", help=f"renew {PAGE.relative_to(ROOT)}")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--steps", action="store_true", help="whole steps in the place of operators")
    parser.add_argument("--places", action="store_true", help="whole steps on random places, five of each model")
    given = parser.parse_args(arguments)
    kind = ["--steps"] * given.steps + ["--places"] * given.places
    run = run_places if given.places else run_step if given.steps else run_seed
    if given.worker:
        return _work([int(seed) for seed in given.worker.split(",")], run)
    if given.seed is not None:
        first = given.seed // EACH * EACH
        known = [run(s, given.debug) for s in (range(first, first + EACH) if given.places else [given.seed])]
        print(*[json.dumps(asdict(row)) for row in known], sep="\n")
        return 0 if all(row.end in (RIGHT, REFUSED) for row in known) else 6
    seeds = range(given.first, given.first + given.models)
    batches = [seeds[i : i + BATCH] for i in range(0, len(seeds), BATCH)]
    rows: list[Row] = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for found in pool.map(lambda batch: list(run_batch(batch, kind)), batches):
            rows += found
            for row in found:
                if row.end != RIGHT:
                    print(f"seed {row.seed} {row.mesh}: {row.end} {row.reason}", flush=True)
            print(f"{len(rows)} of {len(seeds)}: {dict(Counter(row.end for row in rows))}", flush=True)
    if given.write:
        whole, _, places = PAGE.read_text(encoding="utf-8").partition(PLACES_HEAD)
        operators, head, steps = whole.partition(STEPS_HEAD)
        if given.places:
            PAGE.write_text(f"{whole.rstrip()}\n\n{places_section(rows)}", encoding="utf-8")
        elif given.steps:
            failed = [row for row in rows if row.end in (WRONG, CRASH)]
            steps = steps_section(given.first, Counter(row.end for row in rows), failed)
            steps += f"\n{PLACES_HEAD}{places}" if places else ""
            PAGE.write_text(f"{operators.rstrip()}\n\n{steps}", encoding="utf-8")
        else:
            PAGE.write_text(
                page(rows) + (f"\n{head}{steps}" if head else "") + (f"{PLACES_HEAD}{places}" if places else ""),
                encoding="utf-8",
            )
    return 0 if all(row.end in (RIGHT, REFUSED) for row in rows) else 6


def _work(seeds: Sequence[int], run: Callable[[int], Row]) -> int:
    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {LIMIT_SECONDS} s of the processor, or {HANG_SECONDS} s")

    signal.signal(signal.SIGPROF, late)
    signal.signal(signal.SIGALRM, late)
    for seed in seeds:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
        signal.alarm(HANG_SECONDS)
        print(json.dumps(asdict(run(seed))), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
