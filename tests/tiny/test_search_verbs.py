"""What `plan`, `explain` and `diff` say about a search: levels, pins, meshes, fronts, limits, and what was ignored."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard import solvers, units
from autoshard.cli import commands
from autoshard.cluster.hardware import load_hardware
from autoshard.errors import InfeasibleError
from autoshard.ir import graph_json, plan_json
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.package.package_files import read_package
from autoshard.replay import reevaluate
from autoshard.search import memory_fit, search_task
from autoshard.search.search_request import SearchRequest
from autoshard.search.search_task import SearchTask
from autoshard.search.select_plan import search
from autoshard.text import collective_lines, explain, plan_diff
from tests.graphs import mlp_graph
from tests.slow import quick_at


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "mlp.graph.json"
    path.write_text(graph_json.dumps(mlp_graph(3, 1024, 2048)), encoding="utf-8")
    return path


def words(graph: Path, out: Path, *more: str, mesh: str | None = "dp=2,tp=2") -> list[str]:
    where = ["--mesh", mesh] if mesh else []
    return ["plan", str(graph), *where, "--hardware", "a100-80g-sxm", "--out", str(out), *more]


def run(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = commands.main(command)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def planned(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Plan, dict[str, object]]:
    code, out, err = run([*command, "--json"], capsys)
    assert code == 0, err
    folder = command[command.index("--out") + 1]
    return plan_json.load(Path(folder) / "plan.json"), json.loads(out)


@pytest.fixture(scope="module")
def package(graph_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("package") / "out"
    assert commands.main(words(graph_file, out)) == 0
    return out


# --- plan -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "number"), quick_at([("ratio", 0), ("1", 1), ("speed", 2)], 2))
def test_levels(level: str, number: int, graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, printed = planned(words(graph_file, tmp_path / "out", "--level", level), capsys)
    assert plan.search.level == printed["level"] == number
    certificate = plan.certificate
    assert 0 < certificate.level_bound <= certificate.level_objective * (1 + 1e-9)
    assert certificate.lower_bound_seconds <= certificate.objective_seconds * (1 + 1e-9)
    report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert f"Asked for: level {number}" in report and "Plans that were simulated" in report
    run(words(graph_file, tmp_path / "out", "--level", level), capsys)
    code, text, _ = run(["plan", *words(graph_file, tmp_path / "out", "--level", level)[1:]], capsys)
    assert code == 0
    assert ("level 0" in text, "least memory" in text) == (number == 0, number == 1)


def test_levels_keep_their_promise(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = [planned(words(graph_file, tmp_path / level, "--level", level), capsys)[0] for level in ("1", "2")]
    assert plans[0].predicted_peak_bytes <= plans[1].predicted_peak_bytes
    assert plans[1].predicted_seconds <= plans[0].predicted_seconds


def test_pins(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pins.toml").write_text('"h.1.fc.weight" = "Shard(1)@tp"\n', encoding="utf-8")
    more = ["--pin", "h.0.fc=Shard(1)@dp", "--pin", "x=(2, 1)", "--pins", str(tmp_path / "pins.toml")]
    code, out, _ = run(words(graph_file, tmp_path / "out", *more), capsys)
    assert code == 0
    assert "pinned" in out and "h.0.fc=Shard(1)@dp" in out
    plan, graph, _hardware = read_package(tmp_path / "out")
    assert {t.path: str(t.layout).split()[1] for t in plan.parameters}["h.1.fc.weight"] == "S1"
    assert len([x for x in (*plan.ops, *plan.inputs, *plan.parameters) if x.decided_by == "pin"]) == 3
    assert "pinned: h.1.fc.weight=Shard(1)@tp" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert explain.text(explain.explain(plan, graph, _hardware, None, None)).count("  pin") == 3


MESSAGES = [
    (["--mode", "fast"], 2, "unknown mode 'fast': expected stand-alone, data-parallel, semi-auto, auto"),
    (["--level", "fast"], 2, "unknown level 'fast': expected 0 (ratio), 1 (memory) or 2 (speed)"),
    (["--pin", "h.0.fc"], 2, "expected WHAT=HOW"),
    (["--pin", "h.9.fc=Shard(0)@tp"], 2, "no parameter, input, operator or module is called 'h.9.fc'"),
    (["--pin", "h.0.fc=Shard(2)@tp"], 2, "the nearest offered: "),
    (["--pin", "h.0.fc=((2, 2), (2, 2), None)"], 2, "it needs 8 devices (i0 2 x m 2 x n 2), dp=2,tp=2 has 4"),
    (["--pins", "none.toml"], 5, "can't read the pins none.toml"),
    (["--solver", "fastest"], 2, "unknown solver 'fastest': expected one of auto, dp, exhaustive"),
    (["--solver", "exhaustive"], 2, "exhaustive search over"),
    (["--time-limit", "0s"], 2, "--time-limit '0s': expected more than zero"),
    (["--time-limit", "soon"], 2, "'soon' is not a quantity of seconds"),
    (["--memory-limit", "1 KiB", "--pin", "x=(2, 1)"], 3, "pinned: x=(2, 1)"),
    (["--memory-limit", "1 KiB"], 3, "h.0.fc.weight [2048, 2048] 16 MiB"),
    (["--devices", "0"], 2, "--devices '0': expected a whole number, at least 1"),
]


@pytest.mark.parametrize(("more", "code", "message"), MESSAGES, ids=[message for _, _, message in MESSAGES])
def test_messages(
    more: list[str], code: int, message: str, graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, out, err = run(words(graph_file, tmp_path / "out", *more), capsys)
    assert (exit_code, out) == (code, "")
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_limit_that_only_the_program_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The solver counts gradients for the whole step; what fits in truth is found all the same."""
    path = tmp_path / "sgd.graph.json"
    path.write_text(graph_json.dumps(replace(mlp_graph(6, 64, 1024), optimizer="sgd")), encoding="utf-8")
    least, _ = planned(words(path, tmp_path / "least", "--level", "memory", mesh="dp=2"), capsys)
    limit = least.predicted_peak_bytes + 1024
    assert least.certificate.level_bound > limit
    for level in ("0", "1", "2"):
        out, limited = tmp_path / level, f"{limit / 1024:.0f} KiB"
        plan, _ = planned(words(path, out, "--level", level, "--memory-limit", limited, mesh="dp=2"), capsys)
        assert plan.predicted_peak_bytes <= limit
        fits = [tried for tried in plan.search.candidates if tried.predicted_peak_bytes <= limit]
        assert all(plan.certificate.lower_bound_seconds <= tried.objective_seconds for tried in fits)
    code, _, err = run(words(path, tmp_path / "none", "--memory-limit", f"{limit / 2048:.0f} KiB", mesh="dp=2"), capsys)
    assert code == 3 and "proved: no plan of mesh dp=2 fits: each holds at least" in err


@pytest.mark.slow
def test_a_limit_below_the_program_that_the_solver_counts_as_least() -> None:
    """Another program needs less: the limit that it keeps is not refused."""
    graph, mesh = replace(mlp_graph(4, 2048, 256), optimizer="sgd"), Mesh.parse("dp=2,tp=2")
    hardware = load_hardware("a100-80g-sxm")
    smallest = search(graph, hardware, SearchRequest(mesh, level=1))
    counted = smallest.search.candidates[0]
    limit = smallest.predicted_peak_bytes
    assert limit < 0.9 * counted.predicted_peak_bytes
    for level in (0, 1, 2):
        plan = search(graph, hardware, SearchRequest(mesh, level=level, memory_limit_bytes=limit))
        assert plan.predicted_peak_bytes <= limit
        assert plan.certificate.lower_bound_seconds <= plan.certificate.objective_seconds
    with pytest.raises(InfeasibleError, match="proved: no plan of mesh dp=2,tp=2 fits: each holds at least"):
        search(graph, hardware, SearchRequest(mesh, memory_limit_bytes=limit / 2))


def test_a_saved_graph_is_not_verified(graph_file: Path, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (words(graph_file, package / "none", "--verify"), ["verify", str(package)]):
        code, out, err = run(command, capsys)
        assert (code, out) == (2, "")
        assert f"the original model is needed to verify, but the plan was made from the saved graph {graph_file}" in err
    assert not (package / "none").exists()


def test_printed_figures_add_up(tmp_path: Path) -> None:
    """Operators, redistributions (what backward gathers again, too) and the optimizer make the objective."""
    mesh, both = Mesh.parse("dp=2,tp=2"), "Shard(0)@dp,Shard(0)@tp"
    pins = tuple(f"{what}={both}" for what in ("h.0.fc.weight", "h.0.fc"))
    plan = search(mlp_graph(3, 256, 512), load_hardware("a100-80g-sxm"), SearchRequest(mesh, pins=pins))
    assert "w0" in {move.tensor for move in plan.redistributions if move.steps[0].forward == "all_gather"}
    spent = [op.forward_seconds + op.backward_seconds for op in plan.ops]
    spent += [move.forward_seconds + move.backward_seconds for move in plan.redistributions]
    spent += [parameter.parts.compute_seconds for parameter in plan.parameters]
    assert sum(spent) == pytest.approx(plan.certificate.objective_seconds, rel=1e-6)


def test_inference_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for training, expected in ((False, ", inference"), (True, "inference: no scalar output to train on")):
        path = tmp_path / f"{training}.graph.json"
        path.write_text(graph_json.dumps(replace(mlp_graph(2), loss=None, training=training)), encoding="utf-8")
        out = run(words(path, tmp_path / "out", mesh="dp=1"), capsys)[1]
        assert expected in " ".join(out.split())  # the line is broken where the terminal ends
        assert "backward" not in out and "optimizer" not in out


@pytest.mark.slow
def test_inputs_have_no_backward(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = words(graph_file, tmp_path / "out", "--strategy", "random:1")
    graph, count = graph_json.load(graph_file), 0
    for seed in range(8):
        plan = planned([*command[:-1], f"random:{seed}"], capsys)[0]
        for move in plan.redistributions:
            if move.tensor in graph.inputs and any(step.backward for step in move.steps):
                count += 1
                assert not any("backward" in line for line in collective_lines.move_lines([move], plan, graph))
    assert count > 0


def test_mesh_search(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = words(graph_file, tmp_path / "out", "--devices", "8", mesh=None)
    code, out, _ = run(command, capsys)
    assert code == 0
    assert "outer=2,inner=4" in out and "chosen" in out and "torchrun --nproc-per-node 8" in out
    plan, printed = planned(command, capsys)
    assert len(plan.search.meshes) == len(printed["meshes"]) == 4  # type: ignore[arg-type]
    assert "Meshes that were tried" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_mesh_and_devices_that_agree(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(words(graph_file, tmp_path / "out", "--devices", "4"), capsys)[0].search.meshes == ()


def test_pareto(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(words(graph_file, tmp_path / "out", "--pareto"), capsys)
    assert code == 0
    assert "time against memory" in out
    assert (tmp_path / "out" / "pareto.svg").read_text(encoding="utf-8").startswith("<?xml")
    points = json.loads((tmp_path / "out" / "pareto.json").read_text(encoding="utf-8"))["points"]
    assert len(points) >= 2 and points[0]["front"]


def test_a_time_limit_returns_the_best_so_far(
    graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(words(graph_file, tmp_path / "out", "--time-limit", "1us"), capsys)
    assert code == 0
    assert "search stopped early; this is the best plan so far" in out
    plan = plan_json.load(tmp_path / "out" / "plan.json")
    assert plan.search.cut_short
    assert plan.certificate.lower_bound_seconds <= plan.certificate.objective_seconds
    assert "search was cut short" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_faster_plan_that_does_not_fit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, mesh, hardware = mlp_graph(3, 1024, 2048), Mesh.parse("dp=2,tp=2"), load_hardware("a100-80g-sxm")
    _, free = memory_fit.fitted(search_task.prepare(graph, mesh, hardware, SearchRequest(solver="dp")))
    fastest = free.levelled.solution.choice
    monkeypatch.setattr("autoshard.search.select_plan.contenders", lambda *_: [("too large", fastest)])
    limit = free.plan.predicted_peak_bytes * 0.95
    plan = search(graph, hardware, SearchRequest(mesh, solver="dp", memory_limit_bytes=limit))
    assert plan.predicted_peak_bytes <= limit
    assert [c.outcome for c in plan.search.candidates] == ["too large", "chosen", "too large"]


def test_the_bound_is_never_above_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 1 proves a bound on seconds at the least memory only: it does not hold for a plan that needs more."""
    graph, mesh, hardware = mlp_graph(3, 256, 2048), Mesh.parse("dp=2,tp=2"), load_hardware("a100-80g-sxm")
    monkeypatch.setattr(SearchTask, "rank", lambda task, plan: (plan.predicted_seconds, 0.0))
    plan = search(graph, hardware, SearchRequest(mesh, level=1))
    assert plan.search.candidates[0].outcome == "not better"
    assert plan.certificate.lower_bound_seconds <= plan.certificate.objective_seconds


@pytest.mark.slow
def test_the_fastest_plan_that_does_not_fit_is_told(
    graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = planned(words(graph_file, tmp_path / "free"), capsys)[0]
    least = planned(words(graph_file, tmp_path / "least", "--level", "memory"), capsys)[0]
    limit = (free.predicted_peak_bytes + least.predicted_peak_bytes) / 2
    command = words(graph_file, tmp_path / "out", "--memory-limit", f"{limit:.0f} B")
    code, out, _ = run(command, capsys)
    assert code == 0
    out = " ".join(out.split())
    assert "note: the fastest plan needs" in out and "this one fits and is" in out and "slower" in out
    plan = plan_json.load(tmp_path / "out" / "plan.json")
    assert plan.predicted_peak_bytes <= limit
    assert plan.search.candidates[0].outcome == "too large"
    assert plan.search.candidates[0].predicted_seconds <= plan.predicted_seconds


IGNORED = [
    (["--ilp-engine", "pulp:CBC"], "--ilp-engine is ignored: it is for --solver ilp"),
    (["--strategy", "random:1", "--level", "1"], "--level is ignored: a random plan is not searched for"),
    (["--strategy", "random:1", "--pin", "x=(2, 1)"], "--pin is ignored"),
    (["--strategy", "random:1", "--pareto"], "--pareto is ignored"),
]


@pytest.mark.parametrize(("more", "message"), quick_at(IGNORED, 0), ids=[message for _, message in IGNORED])
def test_what_is_ignored_is_said(
    more: list[str], message: str, graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run([*words(graph_file, tmp_path / "out", *more), "--json"], capsys)
    assert code == 0
    assert f"warning: {message}" in err
    assert any(message in sentence for sentence in json.loads(out)["ignored"])


def test_nothing_is_ignored_by_default() -> None:
    assert SearchRequest(devices=8).ignored() == ()


@pytest.mark.parametrize("solver", quick_at(["ilp", "dp"], 0))
def test_solvers_agree(solver: str, graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, printed = planned(words(graph_file, tmp_path / "out", "--solver", solver), capsys)
    assert printed["solver"] == plan.certificate.solver == solver
    best = planned(words(graph_file, tmp_path / "dp", "--solver", "dp"), capsys)[0]
    assert plan.certificate.lower_bound_seconds == pytest.approx(best.certificate.lower_bound_seconds, rel=1e-6)


def test_the_log_is_beside_the_plan(package: Path) -> None:
    log = (package / "search.log").read_text(encoding="utf-8")
    assert "formulating dp=2,tp=2" in log and "solving for the step" in log and "in all" in log


# --- explain and diff -----------------------------------------------------------------------------------------------


def test_what_explain_prints_adds_up(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["explain", str(package / "plan.json")], capsys)
    assert code == 0
    assert "all choices" in out and "predicted step" in out and "outputs" not in out and "replicated " in out
    code, out, _ = run(["explain", str(package), "--json"], capsys)
    facts = json.loads(out)
    assert 0 < facts["outputs_seconds"] < 1e-9, "what breaks ties is no communication"
    plan = plan_json.load(package / "plan.json")
    total = facts["total"]["compute_seconds"] + facts["total"]["communication_seconds"] + facts["outputs_seconds"]
    assert total == pytest.approx(plan.certificate.objective_seconds, rel=1e-9)
    next_best = {row["runner_up"] for row in facts["rows"]}  # in words, with how a plan has it
    assert len(next_best) > 3 and all(re.fullmatch(r".+ over .+ \[.+\]|", text) for text in next_best)
    rows = [row["parts"] for row in facts["rows"]]
    assert sum(r["compute_seconds"] + r["communication_seconds"] for r in rows) + facts[
        "outputs_seconds"
    ] == pytest.approx(total, rel=1e-9)
    assert sum(row["times"] for row in facts["rows"]) == len(reevaluate.decisions(plan))


def test_level_0_adds_up_too(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, _ = planned(words(graph_file, tmp_path / "out", "--level", "ratio"), capsys)
    parts = [decided.parts for _, decided in reevaluate.decisions(plan)]
    total = sum(part.repeated_seconds + part.communication_seconds for part in parts) + plan.search.outputs_seconds
    assert total == pytest.approx(plan.certificate.level_objective, rel=1e-6)


@pytest.mark.parametrize("what", ["h.1.fc", "linear_1", "h.1.fc.weight", "x", "h.*.fc"])
def test_explain_one(what: str, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["explain", str(package), what, "--json"], capsys)
    assert code == 0
    assert len(json.loads(out)["rows"]) == (3 if "*" in what else 1)


@pytest.mark.slow
def test_why_not(package: Path, graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, graph, hardware = read_package(package)
    chosen = next(op for op in plan.ops if op.op == "linear_1").strategy
    for how in ("m@tp", "n@tp", "i0@tp", "=@tp"):
        why = explain.explain(plan, graph, hardware, "linear_1", how).why_not
        assert why is not None
        if how[0] == chosen.split()[1][0]:
            assert why.reason == "this is already the chosen strategy"
            continue
        pinned = planned(words(graph_file, tmp_path / how[0], "--pin", f"linear_1={how}"), capsys)[0]
        optimum = pinned.search.candidates[0]
        assert why.objective_seconds == pytest.approx(optimum.objective_seconds, rel=1e-9)
        assert why.predicted_seconds == pytest.approx(optimum.predicted_seconds, rel=1e-9)
        assert why.objective_seconds >= plan.certificate.lower_bound_seconds
        assert why.level_objective == why.predicted_seconds  # as the level of the plan itself is counted


def test_why_not_as_data_is_of_what_it_compares_with(
    graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, printed = planned(words(graph_file, tmp_path / "out", "--micro-batches", "4"), capsys)
    facts = json.loads(run(["explain", str(tmp_path / "out"), "h.1.fc", "--why-not", "=@tp,=@dp", "--json"], capsys)[1])
    assert {name: facts[name] for name in ("level_objective", "level_bound", "gap")}.items() <= printed.items()
    original = facts["why_not"]["instead_of"]
    assert original["predicted_seconds"] == plan.predicted_seconds < facts["predicted_seconds"] == plan.step_seconds
    assert original.keys() <= facts["why_not"].keys()
    step = json.loads(run(["simulate", str(tmp_path / "out"), "--json"], capsys)[1])
    assert step["peak_bytes"] == plan.step_peak_bytes and step["micro_batch_peak_bytes"] < step["peak_bytes"]


def test_why_not_in_words(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["explain", str(package), "h.1.fc", "--why-not", "Shard(2)@tp"], capsys)
    assert code == 0
    assert "why not Shard(2)@tp at h.1.fc?" in out
    assert "it has 2 dims" in out and "the nearest offered" in out
    code, out, _ = run(["explain", str(package), "h.1.fc", "--why-not", "Replicate@tp,Replicate@dp"], capsys)
    assert code == 0
    assert "predicted step" in out and (
        "other decisions that change" in out or "this is already the chosen strategy" in out
    )


def test_why_not_keeps_the_pins(graph_file: Path, tmp_path: Path) -> None:
    command = words(graph_file, tmp_path / "out", "--pin", "linear_1=m@tp,m@dp", "--pin", "y=(1, 2)")
    assert commands.main(command) == 0
    plan, graph, hardware = read_package(tmp_path / "out")
    why = explain.explain(plan, graph, hardware, "linear_1", "n@tp").why_not
    assert why is not None
    assert why.reason == "a pin decided this: linear_1=m@tp,m@dp; plan again without it"
    why = explain.explain(plan, graph, hardware, "linear_1", "Shard(7)@tp").why_not
    assert why is not None and "it has 2 dims" in why.reason  # which no pin decided
    why = explain.explain(plan, graph, hardware, "linear_0", "i0@tp,i0@dp").why_not
    assert why is not None and not why.reason
    assert not [line for line in why.changed if line.startswith(("linear_1 ", "y:"))]
    free = search(graph, hardware, SearchRequest(plan.mesh, pins=("linear_0=i0@tp,i0@dp",)))
    assert free.predicted_seconds <= why.predicted_seconds


EXPLAIN_ERRORS = [
    (["--why-not", "Shard(0)@tp"], "--why-not needs to know where"),
    (["nothing"], "no parameter, input, operator or module is called 'nothing'"),
    (["x", "--why-not", "Shard(0)@xp"], "unknown mesh axis 'xp'"),
]


@pytest.mark.parametrize(("more", "message"), EXPLAIN_ERRORS, ids=[message for _, message in EXPLAIN_ERRORS])
def test_explain_errors(more: list[str], message: str, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["explain", str(package), *more], capsys)
    assert (code, out) == (2, "")
    assert message in err


def test_diff(package: Path, graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["diff", str(package), str(package)], capsys)
    assert code == 0
    assert "decisions are the same" in out
    other = planned(words(graph_file, tmp_path / "out", "--level", "memory"), capsys)[0]
    plan = plan_json.load(package / "plan.json")
    code, out, _ = run(["diff", str(package), str(tmp_path / "out"), "--json"], capsys)
    facts = json.loads(out)
    assert facts["predicted_seconds"] == other.predicted_seconds - plan.predicted_seconds
    changed = sum(change["times"] for change in facts["changes"])
    assert changed + facts["same"] == len(reevaluate.decisions(plan))
    assert changed > 0
    code, out, _ = run(["diff", str(package), str(tmp_path / "out" / "plan.json")], capsys)
    assert f"{changed} decisions differ, {facts['same']} are the same" in out
    diff = plan_diff.diff(*read_package(package)[:2], *read_package(tmp_path / "out")[:2])
    remainder, total = plan_diff.remaining_seconds(diff)
    assert total == facts["objective_seconds"]
    assert remainder + sum(change["seconds"] for change in facts["changes"]) == pytest.approx(total)
    small = replace(diff, changes=(replace(diff.changes[0], seconds=total * (1 + 1e-12)),))
    assert plan_diff.remaining_seconds(small)[0] == 0.0  # sums in another order, no cost
    assert out.split()[-4:-1] == ["all", "choices", units.signed_seconds(total).split()[0]]


def test_repeated_modules_are_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.graph.json"
    path.write_text(graph_json.dumps(mlp_graph(4)), encoding="utf-8")
    planned(words(path, tmp_path / "a", "--pin", "h.*.fc=Replicate@dp,Replicate@tp"), capsys)
    planned(words(path, tmp_path / "b", "--pin", "h.*.fc=Shard(0)@dp,Shard(1)@tp"), capsys)
    out = run(["explain", str(tmp_path / "a")], capsys)[1]
    assert "h.#.fc linear (4x)" in out
    out = run(["diff", str(tmp_path / "a"), str(tmp_path / "b")], capsys)[1]
    assert "h.#.fc linear (4x)" in out
    assert explain.fold("h.12.mlp.3 linear") == "h.#.mlp.# linear"


def test_propagation_starts_at_the_pins(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--solver", "propagation", "--pin", "h.1.fc=Shard(1)@tp,Replicate@dp"]
    plan, _ = planned(words(graph_file, tmp_path / "out", *more), capsys)
    by = {op.op: op.decided_by for op in plan.ops}
    assert by["linear_1"] == "pin"
    assert {word.partition(" ")[0] for name, word in by.items() if name != "linear_1"} == {"propagated"}
    assert plan.certificate.solver == "propagation"
    assert plan.certificate.lower_bound_seconds <= plan.certificate.objective_seconds
    out = run(["explain", str(tmp_path / "out")], capsys)[1]
    assert "propagated" in out and "pin" in out
    assert "--solver propagation" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_neighbours_that_disagree_are_told(
    graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--solver", "propagation", "--pin", "linear_0=Shard(0)@tp,Shard(0)@dp", "--pin", "linear_1=m@tp,m@dp"]
    plan, _ = planned(words(graph_file, tmp_path / "out", *more), capsys)
    assert any("relu_0" in note and "wants" in note and "it took" in note for note in plan.search.notes)
    assert "propagated (neighbours disagree)" in {op.decided_by for op in plan.ops}


def test_the_help_lists_every_solver(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    listed = text.partition("--solver SOLVER ")[2].partition(" --")[0]
    assert set(listed.replace("(default)", "").replace(",", " ").split()) == set(solvers.SOLVERS)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_an_explanation_fits_the_terminal(width: int, package: Path) -> None:
    why_not = explain.explain(*read_package(package), "h.1.fc", "Shard(0)@tp")
    for explained in (why_not, explain.explain(*read_package(package), None, None)):
        lines = explain.text(explained, width).splitlines()
        assert max(map(len, lines)) <= width
        words = {word for line in lines for word in line.split()}
        figures = {word for word in explain.text(explained).split() if word[0].isdigit()}
        assert figures <= words  # nothing is cut off
