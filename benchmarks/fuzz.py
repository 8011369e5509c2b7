"""Random models under random plans, against the original: `python benchmarks/fuzz.py [--models 2000] [--write]`.

Each seed is a model (tests/random_models.py) on one of the meshes 2, 3, 2x2, 2x3 and 2x2x2, under a random plan, every
tenth under the searched one. The emitted package runs on all devices and is compared, element by element, by
tests/differential.py, which shares nothing with `autoshard verify`; the collectives of all ranks must agree. One seed:

    python benchmarks/fuzz.py --seed 17 --debug

With `--steps` each seed is a whole step (tests/random_steps.py): buffers that are rewritten, losses over labels in
larger expressions, empty and scalar tensors, frozen parts, micro-batches, recomputation, and for every 25th two stages
in processes. It is verified over two steps, and one micro-batch by tests/differential.py too.

Exit code 6 where a package computes something else or anything crashes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
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
RIGHT, REFUSED, WRONG, CRASH = "right", "refused", "wrong", "crash"


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


def run_seed(seed: int, debug: bool = False) -> Row:
    """Model, plan and comparison of one seed; what goes wrong is a row, with `debug` an exception."""
    from autoshard.cluster.hardware import load_hardware
    from autoshard.emit import emit
    from autoshard.errors import CaptureError
    from autoshard.graph_capture.capture import capture
    from autoshard.ir.mesh import Mesh
    from autoshard.ir.program import Collective
    from autoshard.program.lower import lower
    from autoshard.search.fixed_styles import random_plan
    from autoshard.search.search_request import SearchRequest
    from autoshard.search.select_plan import search
    from tests.differential import Mismatch, compare
    from tests.random_models import build

    start, targets, end, reason, error, count = time.monotonic(), (), RIGHT, "", 0.0, 0
    mesh = Mesh.parse(MESHES[seed % len(MESHES)])
    try:
        hardware = load_hardware("a100-80g-sxm")
        graph = capture(str(ROOT / SPEC), {"seed": seed})
        targets = tuple(sorted({op.target for op in graph.ops}))
        searched = seed // len(MESHES) % SEARCHED == 0
        plan = search(graph, hardware, SearchRequest(mesh)) if searched else random_plan(graph, mesh, hardware, seed)
        program = lower(plan, graph)
        count = sum(isinstance(i, Collective) for i in program.instructions)
        model, inputs = build(seed)
        error = compare(model, inputs, program, emit(program, plan, graph))
    except CaptureError as caught:
        end, reason = REFUSED, _words(caught)
        if debug:
            raise
    except Mismatch as caught:
        end, reason = WRONG, _words(caught)
        if debug:
            raise
    except Exception as caught:
        end, reason = CRASH, _words(caught)
        if debug:
            raise
    return Row(seed, str(mesh), end, reason, error, targets, count, time.monotonic() - start)


def run_step(seed: int, debug: bool = False) -> Row:
    """The same of a whole step."""
    from autoshard.cluster.hardware import load_hardware
    from autoshard.emit import emit
    from autoshard.errors import CaptureError, UsageError
    from autoshard.graph_capture.capture import capture
    from autoshard.ir.mesh import Mesh
    from autoshard.ir.program import Collective
    from autoshard.program.lower import lower
    from autoshard.search.fixed_styles import random_plan
    from autoshard.search.whole_step import with_step
    from autoshard.verification.case import check_files, make_case
    from tests.differential import Mismatch, compare
    from tests.random_steps import build, step

    start, targets, end, reason, error, count = time.monotonic(), (), RIGHT, "", 0.0, 0
    mesh, request = step(seed)
    spec = str(ROOT / STEPS)
    try:
        graph = capture(spec, {"seed": seed})
        targets = tuple(sorted({op.target for op in graph.ops}))
        plan = with_step(random_plan(graph, Mesh.parse(mesh), load_hardware("cpu-local"), seed), graph, request)
        program = lower(plan, graph)
        files = emit(program, plan, graph)
        count = sum(isinstance(i, Collective) for i in program.instructions)
        case = make_case(spec, {"seed": seed}, graph, steps=2, micro_batches=request.micro_batches)
        proof = check_files(case, program, files, "gloo" if (request.stages or 1) > 1 else "lockstep", 120.0)
        if not proof.passed:
            raise Mismatch(str(proof.failure))
        if request.micro_batches == 1:
            error = compare(*build(seed), program, files)
    except (CaptureError, UsageError) as caught:
        end, reason = REFUSED, _words(caught)
        if debug:
            raise
    except Mismatch as caught:
        end, reason = WRONG, _words(caught)
        if debug:
            raise
    except Exception as caught:
        end, reason = CRASH, _words(caught)
        if debug:
            raise
    return Row(seed, mesh, end, reason, error, targets, count, time.monotonic() - start)


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

A model is drawn from the proof cases of the table of operators, wired at random, and from modules that people write
(`tests/random_models.py`); its plan is random, every tenth searched. The package runs on all devices, and every output,
gradient and buffer of every device is compared in float64 by code that shares nothing with `autoshard verify`
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

Buffers that are read and rewritten, losses over labels in larger expressions, tensors without elements and without
dims, frozen parts, micro-batches and recomputation (`tests/random_steps.py`), under random plans on 2 to 4 devices;
every 25th on two stages, in processes. `autoshard verify` runs each over two steps, `tests/differential.py` one of a
single micro-batch. A step of which nothing is trained is refused.
{listed}
""".rstrip()
        + "\n"
    )


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
    given = parser.parse_args(arguments)
    run = run_step if given.steps else run_seed
    if given.worker:
        return _work([int(seed) for seed in given.worker.split(",")], run)
    if given.seed is not None:
        row = run(given.seed, given.debug)
        print(json.dumps(asdict(row)))
        return 0 if row.end in (RIGHT, REFUSED) else 6
    seeds = range(given.first, given.first + given.models)
    batches = [seeds[i : i + BATCH] for i in range(0, len(seeds), BATCH)]
    rows: list[Row] = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for found in pool.map(lambda batch: list(run_batch(batch, ["--steps"] * given.steps)), batches):
            rows += found
            for row in found:
                if row.end != RIGHT:
                    print(f"seed {row.seed} {row.mesh}: {row.end} {row.reason}", flush=True)
            print(f"{len(rows)} of {len(seeds)}: {dict(Counter(row.end for row in rows))}", flush=True)
    if given.write:
        operators, head, steps = PAGE.read_text(encoding="utf-8").partition(STEPS_HEAD)
        if given.steps:
            failed = [row for row in rows if row.end in (WRONG, CRASH)]
            steps = steps_section(given.first, Counter(row.end for row in rows), failed)
            PAGE.write_text(f"{operators.rstrip()}\n\n{steps}", encoding="utf-8")
        else:
            PAGE.write_text(page(rows) + (f"\n{head}{steps}" if head else ""), encoding="utf-8")
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
