"""The package reads as the pipeline: imports point upstream only, most of it needs no torch, and files stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "autoshard"

# A room may import rooms of a lower rank and itself; rooms of one rank don't know each other. A contract (model.py)
# stands apart from the room that fills it.
RANKS = [
    ["code_text", "errors", "resources"],
    ["files", "units", "terminal", "surroundings"],
    ["values", "progress"],
    ["spec"],
    ["estimate.shape"],
    ["estimate.command"],
    ["mesh", "folder", "options", "partition", "topology"],
    ["layout", "profile_file", "graph.model"],
    ["profile_parts"],
    ["hardware", "graph", "program.model", "problem"],
    ["rules", "solvers"],
    ["redistribute"],
    ["costs"],
    ["formulate", "plan", "pins", "cuts"],
    ["narrow", "parts"],
    ["pinned", "levels"],
    ["program", "plan_io"],
    ["plan_check"],
    ["simulate"],
    ["plan_of"],
    ["again", "styles", "stale"],
    ["contenders", "task"],
    ["least"],
    ["fit"],
    ["propagated"],
    ["estimate", "search", "pareto"],
    ["meshes"],
    ["reapply"],
    ["words"],
    ["emit", "plan_text"],
    ["explain"],
    ["exports", "report", "diff"],
    ["package"],
    ["verify"],
    ["calibrate"],
    ["pipeline", "prove"],
    ["cli"],
    ["__main__"],
]
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
COPIED = r"emit/(runtime|package)/"  # copied into every package: they are no part of the pipeline
USES_TORCH = (
    r"calibrate/worker|graph/(?!model|codec|check|serialize|schemas|dims|__init__)\w+\.py|verify/|emit/calls"
    r"|rules/(discover|apart)|(rules/)?prove"
)
NEEDS_TORCH = re.compile(rf"^autoshard/({USES_TORCH}|{COPIED})")
LIMIT = 500


def modules() -> Iterator[Path]:
    yield from sorted(path for path in PACKAGE.rglob("*.py") if "_data" not in path.parts)


def room_of(name: str) -> str:
    """autoshard.rules.views -> rules."""
    parts = name.split(".")[1:]
    return ".".join(parts[:2]) if ".".join(parts[:2]) in RANK else parts[0] if parts else "__init__"


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every import outside TYPE_CHECKING blocks."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {id(n) for node in ast.walk(tree) if is_type_checking(node) for n in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_every_room_has_a_rank() -> None:
    rooms = {room_of(dotted(path)) for path in modules()} - {"__init__"}
    assert rooms <= set(RANK), f"give these rooms a rank: {sorted(rooms - set(RANK))}"


def test_imports_point_upstream() -> None:
    wrong = []
    for path in modules():
        room = room_of(dotted(path))
        for name, line in imported(path):
            other = room_of(name) if name.startswith("autoshard.") else room
            if other in RANK and other != room and room in RANK and RANK[other] >= RANK[room]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {other}, which stands downstream")
    assert not wrong, "\n".join(wrong)


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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
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
    found = []
    for path in tracked():
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_dependencies_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [name for group in project["optional-dependencies"].values() for name in group]
    declared = {re.split(r"[\[<>=,; ]", text)[0].lower() for text in project["dependencies"] + extras}
    own = [path for path in modules() if not re.search(COPIED, path.as_posix())]
    used = {name.split(".")[0] for path in own for name, _ in imported(path)}
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
