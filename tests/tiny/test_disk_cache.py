"""The search cache on disk, and programs kept within a process."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard.cli import commands
from autoshard.cluster.hardware import load_hardware, parse_hardware
from autoshard.formulation import formulation_store
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir import graph_json
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.program.lower import lower
from autoshard.replay.simulated_plan import simulate_plan
from autoshard.search import search_task
from autoshard.search.build_plan import priced
from autoshard.search.cached import search_cache
from autoshard.search.cached.search_cache import SearchCache, answers_of
from autoshard.search.cached.step_cache import StepCache
from autoshard.search.fixed_styles import random_plan
from autoshard.search.shortest_step import StepSearch
from autoshard.simulation import simulate
from autoshard.solvers.common.solver_options import Clock
from autoshard.system import disk_cache
from autoshard.system.disk_cache import DiskCache, default_folder, key_of
from tests.graphs import mlp_graph
from tests.slow import quick_at

# --- what searches found, kept on disk: the same plans with it and without, whatever became of its files ---


KEY = "0" * 40
HARDWARE = load_hardware("a100-80g-sxm")
MESH = Mesh.parse("dp=2,tp=2")
LOG = "search.log"  # what took how long


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "mlp.graph.json"
    path.write_text(graph_json.dumps(mlp_graph(2, 1024, 2048)), encoding="utf-8")
    return path


def package(graph: Path, out: Path, *more: str) -> dict[str, bytes]:
    """The files that the command writes, but for its log."""
    command = ["plan", str(graph), "--mesh", "dp=2,tp=2", "--hardware", "a100-80g-sxm", "--out", str(out), *more]
    assert commands.main(command) == 0
    files = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file() and path.name != LOG}
    return {name: path.read_bytes() for name, path in files.items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the cache that commands of a test use."""
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- whole commands -------------------------------------------------------------------------------------------------

ASKED = [
    (), ("--memory-limit", "70GiB"), ("--memory-limit", "52MiB"), ("--level", "0"), ("--level", "1"),
    ("--pin", "h.0.fc.weight=Shard(0)@tp"), ("--strategy", "fsdp"), ("--micro-batches", "2"), ("--no-all-to-all",),
]  # fmt: skip


@pytest.mark.slow
def test_plans_are_the_same_with_it_and_without(graph_file: Path, folder: Path, tmp_path: Path) -> None:
    """One cache for all, in this order and again: no piece is taken for another's."""
    alone = [package(graph_file, tmp_path / "out", "--no-cache", *options) for options in ASKED]
    assert not folder.exists()
    assert len({files["plan.json"] for files in alone}) == len(ASKED)
    for options, files in [*zip(ASKED, alone, strict=True), *zip(ASKED[:5], alone, strict=False)]:
        assert package(graph_file, tmp_path / "out", *options) == files, options


def test_another_limit_takes_up_what_was_found(
    graph_file: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is formulated, solved or simulated anew, but the program that is written."""
    first = package(graph_file, tmp_path / "out")

    def fault(*_: object, **__: object) -> None:
        raise AssertionError("made anew")

    monkeypatch.setattr(search_cache, "formulate", fault)
    monkeypatch.setattr(search_task, "StepSearch", fault)
    monkeypatch.setattr(search_task, "priced", fault)
    monkeypatch.setattr(search_task.solvers, "solve", fault)
    other = package(graph_file, tmp_path / "out", "--memory-limit", "70GiB")
    assert other["timeline.json"] == first["timeline.json"] and other["plan.json"] != first["plan.json"]
    assert "read from the cache: formulation" in (tmp_path / "out" / LOG).read_text()


def test_turned_off(graph_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for said in disk_cache.OFF:
        monkeypatch.setenv("AUTOSHARD_CACHE", said)
        assert disk_cache.disk_cache() is None
    package(graph_file, tmp_path / "out")
    monkeypatch.delenv("AUTOSHARD_CACHE")
    package(graph_file, tmp_path / "out", "--no-cache")
    assert not (tmp_path / "home").exists()
    assert default_folder() == tmp_path / "home" / "autoshard" / "searches"


def sealed(name: str, body: bytes) -> bytes:
    """With the checksum of a file that is whole."""
    return b"autoshard cache 1\n" + hashlib.sha256(name.encode() + b"\n" + body).digest() + body


Damage = Callable[[Path], bytes]
DAMAGES: dict[str, Damage] = {
    "empty": lambda path: b"",
    "truncated": lambda path: path.read_bytes()[:-100],
    "a byte changed": lambda path: path.read_bytes()[:-9] + b"\xff" + path.read_bytes()[-8:],
    "foreign": lambda path: b"\x80\x04cposix\nsystem\n(S'false'\ntR.",  # a pickle that would run a command
    "renamed": lambda path: next(other for other in path.parent.iterdir() if other != path).read_bytes(),
    "another's": lambda path: sealed(path.name, b"[1, 2"),
    "a list": lambda path: sealed(path.name, b"[]\n"),
    "no choices": lambda path: sealed(path.name, wrong_answers(path)),
}


def wrong_answers(path: Path) -> bytes:
    """Of the right form, with choices that there are not, and no numbers."""
    body = path.read_bytes()[50:]
    if path.name.startswith("formulation"):
        head, _, arrays = body.partition(b"\n")
        said = json.loads(head)
        said["sites"][0][2] = 10**6
        return json.dumps(said).encode() + b"\n" + arrays
    said = json.loads(body)
    for name, answer in said.items():
        if "choice" in answer:
            answer["choice"][0] = 10**6
        elif "bound" in answer:
            answer["bound"] = "low"
        elif name.startswith("program"):
            answer[0] = None
        else:
            said[name] = 7
    return json.dumps(said).encode()


@pytest.fixture(scope="module")
def planned(graph_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """A package, and the files of the cache behind it."""
    folder = tmp_path_factory.mktemp("planned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSHARD_CACHE", str(folder / "cache"))
        expected = package(graph_file, folder / "out")
    return expected, {path.name: path.read_bytes() for path in (folder / "cache").iterdir()}


@pytest.mark.parametrize("damage", quick_at(DAMAGES, 5, 7))
def test_what_is_damaged_is_made_anew(
    graph_file: Path, planned: tuple[dict[str, bytes], dict[str, bytes]], folder: Path, tmp_path: Path, damage: str
) -> None:
    expected, files = planned
    assert len(files) == 2
    folder.mkdir()
    whole = {folder / name: content for name, content in files.items()}
    for path, content in whole.items():
        path.write_bytes(content)
    damaged = {path: DAMAGES[damage](path) for path in whole}
    for path, content in damaged.items():
        assert content != whole[path]
        path.write_bytes(content)
    assert package(graph_file, tmp_path / "out") == expected
    assert {path: path.read_bytes() for path in whole} == whole


def test_where_nothing_can_be_written(
    graph_file: Path,
    planned: tuple[dict[str, bytes], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan is made, and the log says why nothing is kept."""
    expected, _ = planned
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "file" / "cache"))
    assert package(graph_file, tmp_path / "out") == expected
    assert "is not written: Not a directory" in (tmp_path / "out" / LOG).read_text()


# --- what a key holds -----------------------------------------------------------------------------------------------


def test_a_key_holds_all_that_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Graph, mesh, profile with its constants, settings, style, pins; autoshard's own code, and the libraries."""
    cache, graph = DiskCache(tmp_path), mlp_graph(2)
    slower = parse_hardware(HARDWARE.text.replace('{ value = "2 us"', '{ value = "3 us"', 1))
    assert slower.launch_seconds != HARDWARE.launch_seconds
    usual = PlanningContext(graph, MESH, HARDWARE)
    others: list[dict[str, Any]] = [
        {"graph": mlp_graph(3)}, {"graph": replace(graph, precision="bf16-mixed")},
        {"mesh": Mesh.parse("tp=2,dp=2")}, {"hardware": slower},
        {"hardware": replace(HARDWARE, memory_bytes=HARDWARE.memory_bytes + 1)}, {"all_to_all": False},
        {"micro_batches": 2}, {"on_host": frozenset({"table"})},
    ]  # fmt: skip
    assert {name for other in others for name in other} == {field.name for field in fields(PlanningContext)}
    keys = [answers_of(cache, usual).key, answers_of(cache, usual, "fsdp").key]
    keys += [answers_of(cache, replace(usual, **other)).key for other in others]
    assert answers_of(cache, usual).key == keys[0]
    monkeypatch.setattr(disk_cache, "code_version", lambda: "of another autoshard")
    keys.append(answers_of(cache, usual).key)
    monkeypatch.setattr(disk_cache, "libraries", lambda: ("0",) * 3)
    keys.append(answers_of(cache, usual).key)
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("beside", [True, False])
def test_the_libraries_are_those_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    """Their folders say what their metadata do; where there are none, these are read."""
    if not beside:
        monkeypatch.setattr(np, "__file__", str(tmp_path / "numpy" / "__init__.py"))
    assert disk_cache.libraries.__wrapped__() == tuple(map(version, ("numpy", "scipy", "highspy")))


@pytest.mark.parametrize("changed", ["rules/operators/linear_algebra.py", "costs/compute.py", "a_new_file.py"])
def test_the_key_changes_with_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    """A rule, a formula, a constant: whatever is planted in a copy."""
    package_folder = Path(disk_cache.__file__).resolve().parents[1]
    for name in ("system/disk_cache.py", "rules/operators/linear_algebra.py", "costs/compute.py"):
        copy = tmp_path / "autoshard" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((package_folder / name).read_bytes())
    (tmp_path / "costmodels").mkdir()
    monkeypatch.setattr(disk_cache, "__file__", str(tmp_path / "autoshard/system/disk_cache.py"))
    monkeypatch.setattr(disk_cache, "data_folder", lambda name: tmp_path / name)
    seen = {disk_cache.code_version.__wrapped__()}
    with (tmp_path / "autoshard" / changed).open("a") as file:
        file.write("\n# planted\n")
    seen.add(disk_cache.code_version.__wrapped__())
    (tmp_path / "costmodels" / "gpu.toml").write_text("planted = 1")
    seen.add(disk_cache.code_version.__wrapped__())
    assert len(seen) == 3


# --- the files ------------------------------------------------------------------------------------------------------


def test_those_used_longest_ago_go_first(tmp_path: Path) -> None:
    """Files of another name stay, whatever their size; what killed processes left goes."""
    cache = DiskCache(tmp_path / "cache", most_bytes=3000)
    keys = [key_of(number) for number in range(4)]
    for age, key in enumerate(keys[:3]):
        cache.write("piece", key, bytes(900))
        os.utime(cache.folder / f"piece-{key}.cache", (1000.0 + age, 1000.0 + age))
    foreign = cache.folder / "thesis.cache"
    foreign.write_bytes(bytes(9000))
    left, new = (cache.folder / f".piece-{KEY}.cache.{name}.partial" for name in ("a", "b"))
    for path in (left, new):
        path.write_bytes(b"half")
    os.utime(left, (1000.0, 1000.0))
    assert cache.read("piece", keys[0]) == bytes(900)  # used last now
    cache.write("piece", keys[3], bytes(900))
    assert [key for key in keys if cache.read("piece", key) is not None] == [keys[0], keys[2], keys[3]]
    assert foreign.exists() and new.exists() and not left.exists()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing half-written is left, and what was there stays."""
    cache = DiskCache(tmp_path)
    cache.write("piece", KEY, b"old")

    def full(path: Path, content: bytes, write: Callable[[Path, bytes], int] = Path.write_bytes) -> int:
        write(path, content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    cache.write("piece", KEY, b"new")
    assert cache.read("piece", KEY) == b"old" and len(list(tmp_path.iterdir())) == 1
    assert cache.faults == [f"the cache {tmp_path} is not written: No space left on device"]


WRITER = """
import sys
from pathlib import Path
from autoshard.system.disk_cache import DiskCache
cache = DiskCache(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    cache.write("piece", "0" * 40, sys.argv[2].encode() * 200_000)
"""


def test_processes_that_write_the_same_and_are_killed(tmp_path: Path) -> None:
    """Whoever reads meets all of what one of them wrote."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), word], stdout=subprocess.PIPE) for word in "ab"
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
    cache, met = DiskCache(tmp_path), []
    while len(met) < 40:
        cached = cache.read("piece", KEY)
        if cached is not None:
            met.append(cached)
        time.sleep(0.005)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    assert set(met) <= {word * 200_000 for word in (b"a", b"b")}
    assert cache.read("piece", KEY) in met or cache.read("piece", KEY) is not None
    cache.write("piece", KEY, b"c")
    assert cache.read("piece", KEY) == b"c"


# --- a formulation --------------------------------------------------------------------------------------------------


def objects(formulation: Formulation) -> list[object]:
    """All that may be one object in several places, in order."""
    problem, items = formulation.problem, list[object]()
    for node in problem.nodes:
        items += [node.seconds, node.bytes]
    for value in problem.values:
        items += [value.seconds, value.bytes, value.source, *value.targets]
    for site in formulation.sites:
        items += [site.layouts, site.strategies]
    for entry in formulation.values:
        items += [entry.sources, entry.targets]
    return items


def pattern(items: list[object]) -> list[int]:
    """Which of them are one."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(id(item), len(numbers)) for item in items]


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "a=2,b=3,c=2"])
def test_a_formulation_is_read_back(mesh: str) -> None:
    """Every number to the last bit, and as it lies in memory; what was one object is one."""
    graph, parsed = mlp_graph(2, 48, 96), Mesh.parse(mesh)
    fresh = formulate(PlanningContext(graph, parsed, HARDWARE), capacity_bytes=1e9)
    read = formulation_store.loads(formulation_store.dumps(fresh), fresh.context).within(1e9)
    before, after = objects(fresh), objects(read)
    assert pattern(before) == pattern(after)
    for one, other in zip(before, after, strict=True):
        if isinstance(one, np.ndarray):
            assert isinstance(other, np.ndarray) and one.dtype == other.dtype and one.shape == other.shape
            assert one.tobytes() == other.tobytes() and other.flags.writeable
            assert (one.flags.c_contiguous, one.flags.f_contiguous) == (
                other.flags.c_contiguous,
                other.flags.f_contiguous,
            )
        else:
            assert one == other
    for name in ("name", "interval"):
        assert [getattr(n, name) for n in fresh.problem.nodes] == [getattr(n, name) for n in read.problem.nodes]
    for name in ("name", "producer", "consumers", "intervals"):
        assert [getattr(v, name) for v in fresh.problem.values] == [getattr(v, name) for v in read.problem.values]
    assert [(s.kind, s.name) for s in fresh.sites] == [(s.kind, s.name) for s in read.sites]
    assert [(v.tensor, v.tied) for v in fresh.values] == [(v.tensor, v.tied) for v in read.values]
    assert (fresh.problem.capacity_bytes, fresh.problem.horizon) == (read.problem.capacity_bytes, read.problem.horizon)


def test_what_a_clock_may_have_ended_is_not_kept(tmp_path: Path) -> None:
    formulation = formulate(PlanningContext(mlp_graph(2), MESH, HARDWARE), capacity_bytes=1e12)

    def asked(clock: Clock) -> SearchCache:
        answers = SearchCache(DiskCache(tmp_path), KEY)
        steps = StepCache(formulation, clock, answers, lambda: StepSearch(formulation, clock))
        assert steps.first() is not None
        list(steps.others())
        assert steps.bound([choice for _, choice in steps.plans]) > 0
        return answers

    assert not asked(Clock(3600.0)).new
    assert set(asked(Clock()).new) == {"first of a step", "others of a step"}


# --- programs kept within a process ---


def is_its_own(plan: Plan, graph: Graph) -> bool:
    simulated = simulate_plan(plan, graph, HARDWARE)
    program = lower(plan, graph)
    return simulated.program == program and simulated.timeline == simulate(program, graph, HARDWARE)


def test_a_kept_program_is_that_of_the_plan() -> None:
    graph = mlp_graph(2)
    plans = [priced(random_plan(PlanningContext(graph, MESH, HARDWARE), seed), graph, HARDWARE) for seed in range(6)]
    assert all(is_its_own(plan, graph) for plan in plans)
    fastest = min(plans, key=lambda plan: plan.predicted_seconds)
    program = simulate_plan(fastest, graph, HARDWARE).program
    assert (
        simulate_plan(replace(fastest, capacity_bytes=1.0), graph, HARDWARE).program is program
    )  # what is said of it alone
    others = [
        replace(fastest, precision="bf16-mixed"),
        replace(fastest, step=replace(fastest.step, micro_batches=2)),
        replace(fastest, step=replace(fastest.step, zero=1)),
    ]
    for other in others:
        assert is_its_own(other, graph) and simulate_plan(other, graph, HARDWARE).program is not program
    slower = replace(HARDWARE, launch_seconds=1.0)
    assert (
        simulate_plan(fastest, graph, slower).timeline.step_seconds
        > simulate_plan(fastest, graph, HARDWARE).timeline.step_seconds
    )
