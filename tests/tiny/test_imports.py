"""The package reads as the pipeline: imports point upstream only, most of it needs no torch, and files stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx
import pytest

import autoshard
from docs.folders import PAGE, order, page
from docs.folders import modules as modules_of
from tests.hangs import HANGS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "autoshard"

COPIED = r"emit/(runtime|package)/"  # copied into every package: they are no part of the pipeline
TORCH = (
    r"graph_capture/(two_runs|tracing|constructor|dynamic_export)/|graph_capture/(?!model_spec|__init__)\w+\.py|rules/proof/(?!__init__)|verification/|"
    r"api/parallel/(?!__init__)|api/(?!__init__|parallel/|verbs|package_verbs|planned|plan_cache|settings|step_answer|strategies|plan_tables)|"
    r"calibrate/measure_worker"
)
NEEDS_TORCH = re.compile(rf"^autoshard/({TORCH}|{COPIED})")
ENTRIES = order()
LIMIT = 500


def modules() -> Iterator[Path]:
    yield from sorted(path for path in PACKAGE.rglob("*.py") if "_data" not in path.parts)


def entry_of(name: str) -> str:
    """autoshard.rules.algebra.derive -> rules/algebra/, the deepest entry of the picture of folders that holds it."""
    parts = name.split(".")[1:]
    folders = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((e for folder in folders for e in (f"{folder}.py", f"{folder}/") if e in ENTRIES), "")


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imported(path: Path) -> list[tuple[str, int]]:
    """(dotted name, line) of every import outside TYPE_CHECKING blocks."""
    imports: list[tuple[str, int]] = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {id(n) for node in ast.walk(tree) if is_type_checking(node) for n in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            imports += ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imports += ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
    return imports


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_the_pictures_are_of_this_tree() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "python docs/folders.py --write"


def test_every_module_is_in_the_picture() -> None:
    assert len(set(ENTRIES)) == len(ENTRIES)
    shown = {path for entry in ENTRIES for path in modules_of(entry)}
    missing = [p for p in modules() if p not in shown and "emit/package" not in p.as_posix()]
    assert {p.name for p in missing if p.parent == PACKAGE} == {"__init__.py", "__main__.py"}
    assert not [p for p in missing if p.parent != PACKAGE], "name the folder in docs/architecture.md, in its place"


def test_imports_point_upstream() -> None:
    wrong = []
    for path in modules():
        entry = entry_of(dotted(path))
        for name, line in imported(path):
            other = entry_of(name) if name.startswith("autoshard.") else ""
            if entry and other and ENTRIES.index(other) > ENTRIES.index(entry):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {other}, which stands below {entry}")
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_imports() -> None:
    """No module needs itself while it is imported, nor later."""
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    known = {dotted(path) for path in modules()}
    for path in modules():
        for name, _ in imported(path):
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name and name not in (dotted(path), "autoshard"):
                graph.add_edge(dotted(path), name)
    assert not [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


def test_a_folder_is_small_enough_to_choose_from() -> None:
    large = {entry: len(modules_of(entry)) for entry in ENTRIES if len(modules_of(entry)) > 15 + 1}  # and __init__
    assert set(large) <= {"emit/runtime/"}, large


def test_the_command_line_calls_the_interface() -> None:
    """What a command does is what a program can call: it imports the interface, words, and rooms that are a command."""
    interface = {"api/", "cli/", "code_text.py", "errors.py", "system/", "text/"}
    commands = {
        "autoshard.trace_comparison.differences": {"compare"},
        "autoshard.estimate": {"estimate", "_search_runs"},
        "autoshard.calibrate": {"calibrate"},
        "autoshard.calibrate.run_files": {"compare"},
        "autoshard.cluster.hardware": {"profiles", "estimate"},
        "autoshard.verification.rule_table": {"prove"},
    }
    path = PACKAGE / "cli" / "commands.py"
    functions = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    imports = [(name, line) for name, line in imported(path) if name.startswith("autoshard.")]
    wrong = []
    for name, line in imports:
        verb = next((f.name for f in functions if f.lineno <= line <= (f.end_lineno or 0)), "")
        rooms = [room for room, verbs in commands.items() if name.startswith(room) and verb in verbs]
        if entry_of(name) not in interface and not rooms:
            wrong.append(f"{verb}, line {line}: {name}")
    assert len(imports) > 20 and not wrong, wrong


def twice(pairs: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that stand in several places."""
    names: dict[str, list[str]] = {}
    for name, place in pairs:
        if not re.match(rf"{COPIED}|rules/cases/", place):
            names.setdefault(name, []).append(place)
    return {name: places for name, places in names.items() if len(places) > 1}


def test_file_names_are_unique() -> None:
    special = ("__init__.py", "__main__.py")
    places = ((path.name, path.relative_to(PACKAGE).as_posix()) for path in modules() if path.name not in special)
    assert not twice(places)


def test_no_folder_has_the_name_of_a_verb() -> None:
    """`autoshard.capture` is a function, whatever was imported before it is asked for."""
    inside = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()}
    assert "api" in inside and "capture" in autoshard.__all__
    assert not inside & set(autoshard.__all__)


def test_class_names_are_unique() -> None:
    def classes() -> Iterator[tuple[str, str]]:
        for path in modules():
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = (node.name for node in tree.body if isinstance(node, ast.ClassDef))
            yield from ((name, path.relative_to(PACKAGE).as_posix()) for name in names)

    assert not twice(classes())


def test_torch_is_imported_only_where_the_design_says() -> None:
    wrong = []
    for path in modules():
        place = path.relative_to(ROOT).as_posix()
        for name, line in imported(path):
            if name.split(".")[0] in ("torch", "transformers", "safetensors") and not NEEDS_TORCH.match(place):
                wrong.append(f"{place}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_rooms_before_the_plan_run_without_torch() -> None:
    free = [dotted(path) for path in modules() if not NEEDS_TORCH.match(path.relative_to(ROOT).as_posix())]
    free.remove("autoshard.__main__")
    program = "\n".join(
        [
            "import sys, importlib",
            "sys.modules['torch'] = sys.modules['transformers'] = None",
            f"for name in {free!r}: importlib.import_module(name)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=HANGS)
    assert done.returncode == 0, done.stderr


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_files_stay_small() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in tracked() if path.suffix == ".py"}
    large = {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size >= LIMIT}
    assert not large


def test_no_machine_paths() -> None:
    pattern = re.compile(r"/(work|home|Users|root|tmp)/[A-Za-z.]")
    hits = []
    for path in tracked():
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                hits.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not hits, "\n".join(hits)


def test_dependencies_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [name for group in project["optional-dependencies"].values() for name in group]
    declared = {re.split(r"[\[<>=,; ]", text)[0].lower() for text in project["dependencies"] + extras}
    paths = [path for path in modules() if not re.search(COPIED, path.as_posix())]
    used = {name.split(".")[0] for path in paths for name, _ in imported(path)}
    third_party = used - set(sys.stdlib_module_names) - {"autoshard"}
    assert {name.lower() for name in third_party} <= declared


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if not line.startswith("#")}
    extras = [name for group in project["optional-dependencies"].values() for name in group]
    needed = {re.split(r"[\[<>=,; ]", text)[0].lower() for text in project["dependencies"] + extras} - {"autoshard"}
    assert needed <= pinned
    assert not [line for line in lines if "+" in line], "a local build can't be installed elsewhere"


def test_solvers_are_read_where_they_are_asked_for() -> None:
    """A plan of level 2 needs none of what is for --solver ilp."""
    program = "import sys, autoshard.api.verbs, autoshard.search.select_plan; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert "autoshard.solvers.portfolio" in loaded
    assert not [name for name in ("solvers.ilp.", "linear_program.highs") if name in loaded]
