"""Graph and plan files from elsewhere, with code planted in every text of theirs: refused, or text in the package."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.emit.expressions import ExpressionWriter
from autoshard.errors import InvalidFileError
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir import graph_json, plan_json
from autoshard.ir.graph import Graph, Registration
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.package.package_files import report_text
from autoshard.program.lower import lower
from autoshard.replay.simulated_plan import simulate_plan
from autoshard.search.fixed_styles import random_plan
from autoshard.verification.case import written
from autoshard.verification.ranks.loaded_package import load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from autoshard.workflow import ModelRequest, read_graph
from tests.small_models import spec

MARK = "PLANTED"
CODE = f"open('{MARK}', 'w')"
PAYLOADS = (
    f'a" if {CODE} else "',
    f"a' if {CODE} else '",
    f'"""\n{CODE}\n"""',
    f"\\\"); {CODE}  #",
    f"\n{CODE}",
    f"{{{CODE}}}",
    f"x({CODE})",
    f"</script><script>{CODE}</script>",
)  # fmt: skip
MESH = Mesh.parse("dp=2")
HARDWARE = load_hardware("cpu-local")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(spec("weighted"), {})


@pytest.fixture(scope="module")
def plan(graph: Graph) -> Plan:
    return random_plan(PlanningContext(graph, MESH, HARDWARE), 1)


def texts(value: Any) -> Iterator[str]:
    """Every text of a JSON value, keys left out."""
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts(item)


def planted(value: Any, code: dict[str, str]) -> Any:
    """Texts replaced wherever they stand, so that what belongs together still does."""
    if isinstance(value, dict):
        return {key: planted(item, code) for key, item in value.items()}
    if isinstance(value, list):
        return [planted(item, code) for item in value]
    return code.get(value, value) if isinstance(value, str) else value


def without_code(plan: Plan, graph: Graph) -> dict[str, str]:
    """Emits the package, in which planted code is text."""
    files = emit(lower(plan, graph), plan, graph)
    called = [node.id for node in ast.walk(ast.parse(files["model_parallel.py"])) if isinstance(node, ast.Name)]
    if "open" in called:
        pytest.fail(f"live code:\n{files['model_parallel.py']}")
    return files


def runs_nothing(plan: Plan, graph: Graph) -> dict[str, str]:
    """Emits the package, imports it and builds its model."""
    files = without_code(plan, graph)
    with written(files) as folder:
        package = load_package(folder)
    run_lockstep(dict(plan.mesh.axes), package.model.build_model)
    return files


def survivors(data: Any, load: Callable[[str], None]) -> dict[str, str]:
    """What was planted and was no error: text -> code. None of it may run or leave the mark."""
    accepted = {}
    for number, old in enumerate(dict.fromkeys(texts(data))):
        payload = f"{PAYLOADS[number % len(PAYLOADS)]}{number}"
        with suppress(Exception):  # whatever refuses it: here it only must not run
            load(json.dumps(planted(data, {old: payload})))
            accepted[old] = payload
        assert not Path(MARK).exists(), (old, payload)
    return accepted


def test_a_graph_file_is_data(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def load(text: str) -> None:
        Path("graph.json").write_text(text, encoding="utf-8")
        read = read_graph(ModelRequest("graph.json", {}))
        without_code(random_plan(PlanningContext(read, MESH, HARDWARE), 1), read)

    accepted = survivors(json.loads(graph_json.dumps(graph)), load)
    assert {"inner.weight", "weights", "Classifier", "x", "p_inner_weight", "linear", graph.source} <= set(accepted)
    assert not {op.target for op in graph.ops} & set(accepted)

    together = graph_json.loads(json.dumps(planted(json.loads(graph_json.dumps(graph)), accepted)))
    plan = random_plan(PlanningContext(together, MESH, HARDWARE), 1)
    files = runs_nothing(plan, together)
    assert not Path(MARK).exists()
    assert f"\n{CODE}" not in files["README.md"] and f"<script>{CODE}" not in files["README.md"].replace("\\<", "")
    page = report_text(simulate_plan(plan, together, HARDWARE))
    assert f"<script>{CODE}" not in page and CODE.replace("'", "&#39;") in page


def test_a_plan_file_is_data(graph: Graph, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = json.loads(plan_json.dumps(plan))
    accepted = survivors(data, lambda text: without_code(plan_json.loads(text), graph))
    assert {"cpu-local", "numpy", "random:1", "inner.weight", graph.source} <= set(accepted)
    together = {old: code for old, code in accepted.items() if old != "inner.weight"}  # the graph has it, too
    runs_nothing(plan_json.loads(json.dumps(planted(data, together))), graph)
    assert not Path(MARK).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": f"aten.x({CODE})"}, "not namespace.name"),
        ({"attributes": ((f"dim={CODE}, x", 1),)}, "no argument of an operator"),
    ],
)
def test_an_operator_is_a_name(graph: Graph, change: dict[str, Any], message: str) -> None:
    hostile = replace(graph, ops=(replace(graph.ops[0], **change), *graph.ops[1:]))
    with pytest.raises(InvalidFileError, match=message):
        graph_json.loads(graph_json.dumps(hostile))


@pytest.mark.parametrize("path", ["", ".", "a..b", "inner", "inner.weight.x", "\ud800"])
def test_a_path_is_names_with_dots(graph: Graph, path: str) -> None:
    hostile = replace(graph, parameters=(*graph.parameters[:-1], replace(graph.parameters[-1], path=path)))
    with pytest.raises(InvalidFileError):
        graph_json.loads(json.dumps(json.loads(graph_json.dumps(hostile))))


def test_python_of_a_graph_file_is_not_copied(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = replace(graph, registrations=(Registration("kernels", ("my.op",), CODE),))
    Path("graph.json").write_text(graph_json.dumps(hostile), encoding="utf-8")
    read = read_graph(ModelRequest("graph.json", {}))
    assert "my.op" in capsys.readouterr().err
    plan = random_plan(PlanningContext(read, MESH, HARDWARE), 1)
    files = emit(lower(plan, read), plan, read)
    assert not any(CODE in text for text in files.values())
    assert 'register_operators("", "my.op")' in files["model_parallel.py"]
    with pytest.raises(InvalidFileError, match="no name of a module"):
        graph_json.loads(graph_json.dumps(replace(graph, registrations=(Registration(f"os;{CODE}", ("my.op",)),))))


def test_strings_of_attributes_stay_strings() -> None:
    """What stands in a string is no field of a template, and no bracket."""
    speller = ExpressionWriter(str, "self.device")
    text = speller.spell("aten.pad", ("x",), {"pad": ('{0}"', "(, "), "mode": "{0}", "value": None})
    assert text == 'F.pad(x, ("{0}\\"", "(, "), mode="{0}")'


def test_what_is_no_python_is_not_written(graph: Graph, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(graph, registrations=(Registration("kernels", ("my.op",), "def broken(:\n"),))
    with pytest.raises(InvalidFileError, match=r"user_operators/kernels\.py"):
        emit(lower(plan, broken), plan, broken)
    monkeypatch.setattr("autoshard.emit.classes.quoted", lambda text: f'"{text}')
    with pytest.raises(AssertionError, match="model_parallel"):
        emit(lower(plan, graph), plan, graph)
