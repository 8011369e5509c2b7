"""Faults drawn by seed over runtime, package, emission, lowering, rules and costs: is each one caught?

    python -m benchmarks.planted_faults --seed 1 --count 100

Each fault is planted in a copy of the clone, and run against the verification of a few small plans (lock-step; costs
change no program, so not for these; rules come to it last), and against the quick tests near its file, until one fails.
What survives must stand in `planted_faults.toml` with the reason why the changed program is the same; else this exits
with 6.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import ROOT
from benchmarks.mutants import Mutant, mutants

CODE = ROOT / "autoshard"
ROOMS = (
    "emit/runtime/servers", "emit/runtime", "emit/package", "emit/markers", "emit", "program/schedules", "program",
    "costs", "rules/algebra", "rules/operators", "rules/resize", "rules",
)  # fmt: skip
LISTED, NEAR = harness.rows_of("planted_faults.toml"), harness.rows_of("near_tests.toml")
LIMIT_SECONDS = 600.0  # of wall time for verification, and for the tests: an endless loop is caught too
EQUIVALENT, SURVIVED = "equivalent", "SURVIVED"

# --- the draw -------------------------------------------------------------------------------------------------------


def drawn(seed: int, count: int) -> list[tuple[Mutant, str]]:
    """`count` of all faults that there are, with the text of their files."""
    return [(mutant, text()) for mutant, text in random.Random(seed).sample(list(_faults()), count)]


def _faults() -> Iterator[tuple[Mutant, Callable[[], str]]]:
    for room in ROOMS:
        for path in sorted((CODE / room).glob("*.py")):
            yield from mutants(str(path.relative_to(CODE)), path.read_text("utf-8"))


def explained() -> dict[str, str]:
    """Name of a fault -> why the program is the same with it."""
    return {entry["fault"]: entry["reason"] for entry in LISTED["equivalent"]}


def stale(names: Iterable[str]) -> list[str]:
    """Faults that the code has no place for any more."""
    there = {mutant.name for mutant, _ in _faults()}
    return [name for name in names if name not in there]


# --- what runs against each -----------------------------------------------------------------------------------------


def prepared(path: Path) -> None:
    """(name, plan, graph, case) of every plan that is verified, pickled; where they have no fault, all must pass."""
    from autoshard.graph_capture.capture import capture
    from autoshard.ir.mesh import Mesh
    from autoshard.verification import make_case

    cases = []
    for model in LISTED["model"]:
        name, arguments = model["path"], model.get("arguments", {})
        spec = str(ROOT / name) if ".py:" in name else name
        graph = capture(spec, arguments, *model.get("options", ()))  # precision, optimizer, training
        case = make_case(spec, arguments, graph, steps=model.get("steps", 2))
        for text, style in model["plans"]:
            plan = harness.planned(graph, "a100-80g-sxm", Mesh.parse(text), style)
            cases.append((f"{name.rpartition('/')[2]} {text} {style}", plan, graph, case))
    path.write_bytes(pickle.dumps(cases))
    if wrong := verdict(path):
        raise SystemExit(f"without a fault: {wrong}")


def verdict(plans: Path) -> str:
    """The first plan that is not verified, "" where all are."""
    from autoshard.emit import emit
    from autoshard.program.lower import lower
    from autoshard.verification import check_files

    for name, plan, graph, case in pickle.loads(plans.read_bytes()):
        try:
            program = lower(plan, graph)
            proof = check_files(case, program, emit(program, plan, graph), timeout_seconds=60.0)
        except Exception as error:
            return f"{name}: {type(error).__name__}"
        if not proof.passed:
            return f"{name}: {proof.failure}"
    return ""


def near(file: str) -> list[str]:
    """The files of tests near a file of the code, the nearest first."""
    folder = next(room for room in ROOMS if file.startswith(f"{room}/"))
    last = NEAR["by_processes"] if folder == "emit/runtime" else ()
    names = (*NEAR["file"].get(file, ()), *NEAR["folder"][folder], *last)
    return [f"tests/{name}" for name in dict.fromkeys(names)]


class Copy:
    """The clone once more, in `folder`, where one file at a time has a fault. `known`: tests that fail without it."""

    def __init__(self, folder: Path, plans: Path) -> None:
        self.folder, self.plans, self.known = folder, plans, set[str]()
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
        for name in listed.splitlines():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)

    def caught(self, mutant: Mutant, text: str, tests: bool = True) -> str:
        """What catches the fault ("" for nothing). Tests are nearer to rules, verification to what it runs; costs
        change no program."""
        ways = [self._by_plans] * (not mutant.file.startswith("costs/")) + [self._by_tests] * tests
        for check in ways[::-1] if mutant.file.startswith("rules/") else ways:
            if catcher := check(mutant.file, text):
                return catcher
        return ""

    def _by_plans(self, file: str, text: str) -> str:
        path = f"own.Path({str(self.plans)!r})"
        call = f"from benchmarks import planted_faults as own; print('said', own.verdict({path}))"
        ended = self._ran(file, text, "-c", call)
        said = [line for line in ended.output.splitlines() if line.startswith("said")]
        if not said:
            return f"process: {ended.end or 'it said nothing'}"
        return said[-1].replace("said ", "verification: ") if said[-1] != "said " else ""

    def _by_tests(self, file: str, text: str) -> str:
        """A test that fails without the fault, too, joins the `known` ones, and the others run again."""
        while True:
            name = self._failure(file, text, *near(file), *(f"--deselect={name}" for name in self.known))
            is_test = name.startswith("tests/")  # else how the process ended, as where a fault stops an import
            if not is_test or not self._failure(file, self._right(file), name):
                return name and f"{'test' if is_test else 'process'}: {name}"
            self.known.add(name)

    def _failure(self, file: str, text: str, *tests: str) -> str:
        """The first test that fails, or how pytest ended."""
        options = ["-q", "-x", "-p", "no:cacheprovider", "-n", "0", "-m", "not slow", "--no-header", "-rfE"]
        ended = self._ran(file, text, "-m", "pytest", *options, *tests)
        failed = [line.split()[1] for line in ended.output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return failed[0] if failed else "" if ended.code in (0, 5) else ended.end

    def _right(self, file: str) -> str:
        """Printed anew, as a file with a fault is."""
        return ast.unparse(ast.parse((CODE / file).read_text("utf-8"))) + "\n"

    def _ran(self, file: str, text: str, *words: str) -> harness.Ended:
        path = self.folder / "autoshard" / file
        path.write_text(text, "utf-8")
        try:
            return harness.ended([sys.executable, *words], LIMIT_SECONDS, self.folder, PYTHONPATH=str(self.folder))
        finally:
            shutil.copyfile(CODE / file, path)


# --- the outcome ----------------------------------------------------------------------------------------------------


def page(outcomes: Sequence[tuple[Mutant, str]]) -> list[Sequence[str]]:
    rows = [("room", "faults", "by verification", "by a test", "by its end", "equivalent", "missed")]
    for room in (*ROOMS, "all"):
        catchers = [by for mutant, by in outcomes if room in ("all", str(Path(mutant.file).parent))]
        kinds = Counter(by.partition(":")[0] for by in catchers)
        columns = ("verification", "test", "process", EQUIVALENT, SURVIVED)
        rows.append((room, str(len(catchers)), *(str(kinds[kind]) for kind in columns)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--part", default="0/1", help="every N-th fault from the K-th: K/N")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no fault after so many")
    parser.add_argument("--without-tests", action="store_true", help="verification alone; what it misses is not logged")
    parser.add_argument("--log", type=Path, help="a line of JSON for each fault; those that it has do not run again")
    options = parser.parse_args()
    os.chdir(ROOT)
    start, reasons = time.perf_counter(), explained()
    faults = harness.part(drawn(options.seed, options.count), options.part)
    outcomes, before = [], {entry["fault"]: entry["by"] for entry in harness.logged(options.log)}
    with tempfile.TemporaryDirectory() as temporary:
        plans = Path(temporary) / "plans"
        prepared(plans)
        copy = Copy(Path(temporary) / "clone", plans)
        for number, (mutant, text) in enumerate(faults):
            if time.perf_counter() - start > 60 * options.minutes:
                print(f"{number} of {len(faults)} faults ran in {options.minutes:g} minutes")
                break
            ran = mutant.name not in before
            by = copy.caught(mutant, text, not options.without_tests) if ran else before[mutant.name]
            by = by or (EQUIVALENT if mutant.name in reasons else SURVIVED)
            outcomes.append((mutant, by))
            if not ran:
                continue
            seconds = time.perf_counter() - start
            line = f"{number:3d} {seconds:6.0f} s  {mutant.kind}  {mutant.name}\n      {by}"
            print(line, file=sys.stderr, flush=True)
            if options.log and (by != SURVIVED or not options.without_tests):
                cause = by if ":" in by else ""
                harness.log(options.log, {"fault": mutant.name, "kind": mutant.kind, "by": cause})
    from autoshard.text.tables import table

    print("\n".join(table(page(outcomes))))
    survived = [mutant.name for mutant, by in outcomes if by == SURVIVED]
    print("\n".join(f"missed: {name}" for name in survived))
    print("\n".join(f"listed, but no longer there: {name}" for name in stale(reasons)))
    return 6 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
