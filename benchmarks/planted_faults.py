"""Faults drawn by seed over runtime, package, emission, lowering, rules and costs: is each one caught?

    python -m benchmarks.planted_faults --seed 1 --count 100

Each fault is run, in processes of its own, against the verification of a few small plans (lock-step; costs change no
program, so not for these; rules come to it last), and against each file of quick tests near its own, until one fails.
What survives must stand in `planted_faults.toml` with the reason why the changed program is the same; else this exits
with 6.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import math
import os
import pickle
import random
import select
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from pathlib import Path
from typing import Any

from autoshard.formulation.planning_context import PlanningContext
from autoshard.text.tables import table
from benchmarks import harness
from benchmarks.harness import ROOT
from benchmarks.mutants import Mutant, mutants
from docs.folders import order

CODE = ROOT / "autoshard"
ROOMS = (
    "emit/runtime/servers", "emit/runtime", "emit/package", "emit/markers", "emit", "program/schedules", "program",
    "costs", "rules/algebra", "rules/operators", "rules/resize", "rules",
)  # fmt: skip
LISTED = Path(__file__).with_suffix(".toml")
NEAR = tomllib.loads(Path(__file__).with_name("near_tests.toml").read_text("utf-8"))
LIMIT_SECONDS = 600.0  # of wall time for verification, and for one file of tests: an endless loop is caught too
EQUIVALENT, SURVIVED = "equivalent", "SURVIVED"
ENTRIES = order()
FIRST = {"emit": "program/", "program": "program/", "costs": "costs/", "rules": "rules/algebra/"}  # that can import it

GPT2 = f"{ROOT / 'examples/gpt2.py'}:build"
LENET = f"{ROOT / 'examples/lenet.py'}:build"
MLP = f"{ROOT / 'examples/mlp.py'}:build"
SMALL_GPT2 = {"n_layer": 2, "sequence": 8, "n_embd": 48, "n_head": 6, "vocabulary": 97}
SMALL_MLP = {"batch": 16, "features": 12, "hidden": 22, "outputs": 7}


@dataclass(frozen=True)
class Model:
    """One model at one size, planned on meshes with styles: `megatron`, or the seed of a random plan."""

    spec: str
    arguments: dict[str, Any]
    plans: tuple[tuple[str, str | int], ...]
    options: tuple[Any, ...] = ()  # precision, optimizer, training
    steps: int = 2


MODELS = (
    Model(GPT2, SMALL_GPT2, (("dp=2,tp=2", "megatron"), ("dp=2,tp=2", 1), ("tp=3", 2), ("dp=2,pp=2,tp=2", 3)), steps=3),
    Model(MLP, SMALL_MLP, (("dp=2,tp=2", 1), ("dp=3", 2)), ("bf16-mixed", "sgd")),
    Model(LENET, {"batch": 6}, (("dp=2,tp=2", 1), ("tp=4", 2))),
    Model(LENET, {"batch": 6}, (("dp=2,tp=2", 3),), ("fp32", "adamw", False)),
    Model(f"{ROOT / 'tests/small_models.py'}:weighted", {}, (("dp=2,tp=2", 1), ("tp=3", 2))),
    Model(f"{ROOT / 'tests/small_models.py'}:mixtral", {}, (("dp=2,tp=2", 1), ("tp=2", "megatron"))),
    Model("tests.models.vision:resnet", {}, (("dp=2,tp=2", 3),)),
    Model("tests.models.encoders:bert", {}, (("dp=2,tp=2", 2),)),
)


# --- the draw -------------------------------------------------------------------------------------------------------


def drawn(seed: int, count: int) -> list[tuple[Mutant, str]]:
    """`count` of all faults that there are, with the text of their files."""
    everything = [found for path in _files() for found in mutants(str(path.relative_to(CODE)), path.read_text("utf-8"))]
    return [(mutant, text()) for mutant, text in random.Random(seed).sample(everything, count)]


def _files() -> Iterator[Path]:
    for room in ROOMS:
        yield from sorted((CODE / room).glob("*.py"))


def explained() -> dict[str, str]:
    """Name of a fault -> why the program is the same with it."""
    return {entry["fault"]: entry["reason"] for entry in tomllib.loads(LISTED.read_text("utf-8"))["equivalent"]}


def stale(names: Iterable[str]) -> list[str]:
    """Faults that the code has no place for any more."""
    there = {mutant.name for path in _files() for mutant, _ in mutants(str(path.relative_to(CODE)), path.read_text())}
    return [name for name in names if name not in there]


# --- what runs against each -----------------------------------------------------------------------------------------


def prepared() -> bytes:
    """(name, plan, graph, case) of every plan that is verified, pickled. A child makes them: this process has no
    threads, and imports nothing that is mutated (what registers operators with torch can be imported once only)."""

    def make() -> bytes:
        from autoshard.cluster.hardware import load_hardware
        from autoshard.graph_capture.capture import capture
        from autoshard.ir.mesh import Mesh
        from autoshard.search.fixed_styles import random_plan
        from autoshard.search.search_request import SearchRequest
        from autoshard.search.select_plan import search
        from autoshard.verification import make_case

        hardware, found = load_hardware("a100-80g-sxm"), []
        for model in MODELS:
            graph = capture(model.spec, model.arguments, *model.options)
            case = make_case(model.spec, model.arguments, graph, steps=model.steps)
            for mesh, style in model.plans:
                name = f"{model.spec.rpartition('/')[2]} {mesh} {style}"
                if style == "megatron":
                    plan = search(graph, hardware, SearchRequest(Mesh.parse(mesh), strategy="megatron"))
                else:
                    plan = random_plan(PlanningContext(graph, Mesh.parse(mesh), hardware), int(style))
                found.append((name, plan, graph, case))
        return pickle.dumps(found)

    outcome = in_child(make, 900.0)
    if not isinstance(outcome, bytes):
        raise SystemExit(f"the plans can't be made: {outcome}")
    return outcome


def verdict(plans: bytes) -> str:
    """The first plan that is not verified, "" where all are."""
    for name, plan, graph, case in pickle.loads(plans):
        try:
            from autoshard.emit import emit
            from autoshard.program.lower import lower
            from autoshard.verification import check_files

            program = lower(plan, graph)
            proof = check_files(case, program, emit(program, plan, graph), timeout_seconds=60.0)
        except Exception as error:
            return f"{name}: {type(error).__name__}"
        if not proof.passed:
            return f"{name}: {proof.failure}"
    return ""


class FirstFailure:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.names.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.names.append(report.nodeid)


def near(file: str) -> list[str]:
    """The files of tests near a file of the code, the nearest first."""
    folder = next(room for room in ROOMS if file.startswith(f"{room}/"))
    last = NEAR["by_processes"] if folder == "emit/runtime" else ()
    names = (*NEAR["file"].get(file, ()), *NEAR["folder"][folder], *last)
    return [f"tests/{name}" for name in names]


def failures(tests: str, known: Sequence[str] = ()) -> list[str]:
    """The first of these tests (a file, or one alone) that fails, `known` ones left out."""
    import pytest

    plugin = FirstFailure()
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=--import-mode=importlib"]
    options += ["-m", "not slow", *(f"--deselect={name}" for name in known)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = pytest.main([*options, tests], plugins=[plugin])
    return plugin.names or ([] if code in (0, 5) else [f"pytest ended with {int(code)}"])


@dataclass(frozen=True)
class Planted:
    """One file of the code with another text, for this process."""

    file: str
    text: str

    def install(self) -> None:
        path = CODE / self.file
        name = "autoshard." + self.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        sys.meta_path.insert(0, _Finder(name, str(path), self.text))
        read_text = Path.read_text

        def read(own: Path, *args: Any, **kwargs: Any) -> str:
            return self.text if own == path else read_text(own, *args, **kwargs)

        Path.read_text = read  # type: ignore[method-assign]
        upstream = ENTRIES[: ENTRIES.index(FIRST[self.file.partition("/")[0]])]
        for module in [name for name in sys.modules if _is_touched(name, upstream)]:
            parent, _, last = module.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(last, None)
            del sys.modules[module]


def _is_touched(name: str, upstream: Sequence[str]) -> bool:
    """`upstream` imports nothing that is mutated."""
    top, _, inside = name.partition(".")
    path = inside.replace(".", "/")
    return (
        top == "autoshard"
        and bool(path)
        and not any(entry in (f"{path}.py", f"{path}/") for entry in upstream)
        and (f"{path.rpartition('/')[0]}/" not in upstream)
    )


class _Finder:
    def __init__(self, name: str, path: str, text: str) -> None:
        self.name, self.path, self.text = name, path, text

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != self.name:
            return None
        loader = _Loader(name, self.path)
        loader.text = self.text
        is_package = self.path.endswith("__init__.py")
        spec = spec_from_loader(name, loader, is_package=is_package)
        if spec is not None and is_package:
            spec.submodule_search_locations = [str(Path(self.path).parent)]
        return spec


class _Loader(SourceFileLoader):
    text = ""

    def get_data(self, path: str) -> bytes:
        return self.text.encode()

    def path_stats(self, path: str) -> Any:
        raise OSError  # nothing compiled is read or written


def in_child(work: Callable[[], Any], limit_seconds: float) -> Any:
    """What `work` gives (text or bytes) in a forked process; how it ended where it gives nothing."""
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(reader)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        try:
            result = pickle.dumps(work())
        except BaseException as error:
            result = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        with os.fdopen(writer, "wb") as stream:
            stream.write(result)
        os._exit(0)
    os.close(writer)
    return _collected(child, reader, limit_seconds)


def _collected(child: int, reader: int, limit_seconds: float) -> Any:
    end, parts = time.monotonic() + limit_seconds, []
    with os.fdopen(reader, "rb", buffering=0) as stream:
        while True:
            left = end - time.monotonic()
            ready = left > 0 and select.select([stream], [], [], left)[0]
            part = stream.read(1 << 20) if ready else b""
            if not part:
                break
            parts.append(part)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not parts:
        return "did not end in time" if time.monotonic() >= end else "the process died"
    return pickle.loads(b"".join(parts))


def caught(mutant: Mutant, text: str, plans: bytes, known: set[str], tests: bool = True) -> str:
    """What catches the fault ("" for nothing). Tests are nearer to rules, verification to what it runs."""

    def by_plans() -> str:
        if mutant.file.startswith("costs/"):  # no program changes with them
            return ""
        found = in_child(lambda: _verified(mutant.file, text, plans), LIMIT_SECONDS)
        wrong = not isinstance(found, str) or (found and ":" not in found)
        return f"process: {found}" if wrong else str(found)

    def by_tests() -> str:
        return next(filter(None, (_by_tests(mutant.file, text, path, known) for path in near(mutant.file))), "")

    ways = [by_plans, by_tests] if tests else [by_plans]
    if mutant.file.startswith("rules/"):
        ways.reverse()
    return next(filter(None, (way() for way in ways)), "")


def _verified(file: str, text: str, plans: bytes) -> str:
    Planted(file, text).install()
    found = verdict(plans)
    return f"verification: {found}" if found else ""


def _by_tests(file: str, text: str, path: str, known: set[str]) -> str:
    """What of one file of tests catches the fault. What fails or doesn't end without it too joins the `known` ones."""

    def work() -> list[str]:
        Planted(file, text).install()
        return failures(path, sorted(known))

    while path not in known:
        found = in_child(work, LIMIT_SECONDS)
        if found == []:
            return ""
        name, said = (found[0], f"test: {found[0]}") if isinstance(found, list) else (path, f"process: {found}")
        if name in known or not _fails_anyway(file, name):
            return said
        known.add(name)
    return ""


def _fails_anyway(file: str, name: str) -> bool:
    """Do these tests fail where the file is only printed anew?"""

    def work() -> str:
        Planted(file, ast.unparse(ast.parse((CODE / file).read_text("utf-8"))) + "\n").install()
        return "fails" if failures(name) else "passes"

    return in_child(work, LIMIT_SECONDS) != "passes"


# --- the outcome ----------------------------------------------------------------------------------------------------


def page(outcomes: Sequence[tuple[Mutant, str]]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [
        ("room", "faults", "by verification", "by a test", "by its end", "equivalent", "missed"),
    ]
    for room in (*ROOMS, "all"):
        own = [by for mutant, by in outcomes if room in ("all", str(Path(mutant.file).parent))]
        kinds = Counter(by.partition(":")[0] for by in own)
        columns = ("verification", "test", "process", EQUIVALENT, SURVIVED)
        rows.append((room, str(len(own)), *(str(kinds[kind]) for kind in columns)))
    return rows


def _plans(path: Path | None) -> bytes:
    if path and path.exists():
        return path.read_bytes()
    plans = prepared()
    wrong = in_child(lambda: verdict(plans), LIMIT_SECONDS)
    if wrong:
        raise SystemExit(f"without a fault: {wrong}")
    if path:
        path.write_bytes(plans)
    return plans


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--part", default="0/1", help="every N-th fault from the K-th: K/N")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no fault after so many")
    parser.add_argument("--without-tests", action="store_true", help="verification alone; what it misses is not logged")
    parser.add_argument("--only", default="", help="faults whose name has this")
    parser.add_argument("--plans", type=Path, help="keep the plans that are verified in this file")
    parser.add_argument("--log", type=Path, help="a line of JSON for each fault; those that it has do not run again")
    options = parser.parse_args()
    os.chdir(ROOT)
    import pytest  # noqa: F401  # what workers would import each
    import torch

    torch.set_num_threads(1)
    start, reasons = time.perf_counter(), explained()
    faults = harness.part(drawn(options.seed, options.count), options.part)
    faults = [fault for fault in faults if options.only in fault[0].name]
    plans, known = _plans(options.plans), set[str]()
    print(f"plans made in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    outcomes, before = [], {entry["fault"]: entry["by"] for entry in harness.logged(options.log)}
    for number, (mutant, text) in enumerate(faults):
        if time.perf_counter() - start > 60 * options.minutes:
            print(f"{number} of {len(faults)} faults ran in {options.minutes:g} minutes")
            break
        ran = mutant.name not in before
        by = caught(mutant, text, plans, known, not options.without_tests) if ran else before[mutant.name]
        by = by or (EQUIVALENT if mutant.name in reasons else SURVIVED)
        outcomes.append((mutant, by))
        if not ran:
            continue
        seconds = time.perf_counter() - start
        print(f"{number:3d} {seconds:6.0f} s  {mutant.kind}  {mutant.name}\n      {by}", file=sys.stderr, flush=True)
        if options.log and (by != SURVIVED or not options.without_tests):
            told = by if ":" in by else ""
            harness.log(options.log, {"fault": mutant.name, "kind": mutant.kind, "by": told})
    print("\n".join(table(page(outcomes))))
    survived = [mutant.name for mutant, by in outcomes if by == SURVIVED]
    print("\n".join(f"missed: {name}" for name in survived))
    print("\n".join(f"listed, but no longer there: {name}" for name in stale(reasons)))
    return 6 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
