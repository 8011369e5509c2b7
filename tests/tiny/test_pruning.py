"""What a plan does not need is left out of its package, and nothing else: what stays computes what all would."""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import autoshard.emit
from autoshard.emit.pruning.constant_folding import Known, folded
from autoshard.emit.pruning.kept_names import MADE_BY, OUTSIDE, PASSED_ON, ROOTS, SET, USED
from autoshard.emit.pruning.module_table import ModuleDefinition, module_name, module_table
from autoshard.emit.pruning.pruned_package import pruned
from autoshard.emit.pruning.reachable import resolved
from autoshard.emit.pruning.source_edits import parsed

EMIT = Path(autoshard.emit.__file__).parent
FLAGS = ("MANY", "WIDE", "TABLES")
TRAIN = '''"""A program over all flags."""

from __future__ import annotations

import contextlib

from model_parallel import MANY, TABLES, WIDE, build
from runtime import Box, gathered, outer, scaled

SEEN: list[str] = []


def make_scale(number: int) -> int | None:
    return number if WIDE else None


def main(number: int) -> list[str]:
    scale = make_scale(number)
    box = Box(number, TABLES if TABLES else ())
    context = contextlib.nullcontext()
    if MANY > 1:
        context = gathered(SEEN)
    with context, contextlib.nullcontext():
        for name in TABLES:
            SEEN.append(f"table {name}")
        if MANY == 1 and not WIDE:
            SEEN.append("one")
        elif MANY == 1:
            SEEN.append("one, wide")
        else:
            SEEN.append("many" if not WIDE else "many, wide")
    SEEN.append(str(scaled(number + 1, scale) * 2))
    SEEN.append(str(outer(number, scale=scale, names=TABLES)))
    SEEN.append(f"{box.total()} {build(number)}")
    if box.held is None and WIDE:
        SEEN.append("wide")
    return SEEN


if __name__ == "__main__":
    print(main(9))
'''
RUNTIME = '''"""What it calls."""

from .box import Box
from .numbers import gathered, outer, scaled, unused
'''
NUMBERS = '''"""Numbers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def gathered(seen: list[str]) -> Iterator[None]:
    seen.append("begin")
    yield
    seen.append("end")


def scaled(x: int, scale: int | None) -> int:
    return x if scale is None else x * scale


def outer(x: int, *, scale: int | None = None, names: Sequence[str] = ()) -> tuple[int, ...]:
    return inner(x, names, scale), len(names)


def inner(x: int, names: Sequence[str], scale: int | None) -> int:
    """A number. `scale`: what is added
    where there are names. `names`: of tables."""
    if scale is not None and names:
        return x + scale
    return _rooted(x) if names or scale is not None else -x


def _rooted(x: int) -> int:
    return math.isqrt(x)


def unused(x: int) -> int:
    return inner(x, ("a",), 5)
'''
BOX = '''"""A class."""

from __future__ import annotations

from collections.abc import Sequence


class Box:
    def __init__(self, number: int, names: Sequence[str], held: dict[str, int] | None = None) -> None:
        self.number, self.names = number, names
        self.held = held

    def total(self) -> int:
        if self.held is not None:
            return len(self.held)
        return self.number + len(self.names)

    def never(self) -> int:
        return 3
'''
FILES = {"train.py": TRAIN, "runtime/__init__.py": RUNTIME, "runtime/numbers.py": NUMBERS, "runtime/box.py": BOX}


def model(many: int, wide: bool, tables: str) -> dict[str, str]:
    text = (
        f"MANY = {many}\nWIDE = {wide}\nTABLES: list[str] = {tables}\n\n\ndef build(x: int) -> int:\n    return 7 * x\n"
    )
    return {"model_parallel.py": text}


def run(files: Mapping[str, str]) -> list[str]:
    """Of its `main(9)`, imported from these texts."""
    names = {name: name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files}
    hidden = {name: sys.modules.pop(name) for name in names.values() if name in sys.modules}
    try:
        # Each before those that import it.
        for file in sorted(files, key=lambda path: (path == "train.py", path == "runtime/__init__.py", path)):
            module = ModuleType(names[file])
            if file == "runtime/__init__.py":
                module.__path__ = []
                module.__package__ = "runtime"
            elif file.startswith("runtime/"):
                module.__package__ = "runtime"
                sys.modules.setdefault("runtime", ModuleType("runtime")).__dict__.setdefault("__path__", [])
            sys.modules[names[file]] = module
            exec(compile(files[file], file, "exec"), module.__dict__)
        result: list[str] = sys.modules["train"].__dict__["main"](9)
        return result
    finally:
        for name in [*names.values(), "runtime"]:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


CASES = [*itertools.product((1, 4), (True, False), ("[]", "['a', 'b']"))]


@pytest.mark.parametrize(("many", "wide", "tables"), CASES)
def test_what_stays_computes_what_all_would(many: int, wide: bool, tables: str) -> None:
    models = model(many, wide, tables)
    small = pruned(FILES, models)
    assert run(small) == run({**FILES, **models})
    assert sum(map(len, small.values())) < sum(map(len, {**FILES, **models}.values()))


def test_what_goes() -> None:
    small = pruned(FILES, model(1, False, "[]"))
    everything = "\n".join(small.values())
    for gone in (
        "never",
        "unused",
        "_rooted",
        "isqrt",
        "import math",
        "gathered",
        "make_scale",
        "scale",
        "WIDE",
        "held",
    ):
        assert gone not in everything, gone
    body = small["train.py"].partition("if __name__")[0]
    assert "nullcontext" not in body and "if " not in body
    assert "return -x" in small["runtime/numbers.py"]


def test_a_fault_in_what_is_said_to_be_known_is_seen() -> None:
    """The oracle above is one: with a wrong constant the program differs."""
    models = model(4, True, "['a', 'b']")
    small = pruned(FILES, models)
    wrong = pruned(FILES, model(4, False, "['a', 'b']")) | model(4, True, "['a', 'b']")
    assert run(small) != run(wrong)


@pytest.mark.parametrize(
    ("before", "names", "after"),
    [
        ("if A:\n    x()\nelse:\n    y()\n", {"A": True}, "x()\n"),
        ("if A:\n    x()\nelif b:\n    y()\nelse:\n    z()\n", {"A": None}, "if b:\n    y()\nelse:\n    z()\n"),
        ("if b:\n    x()\nelif A:\n    y()\nelse:\n    z()\n", {"A": 3}, "if b:\n    x()\nelse:\n    y()\n"),
        ("if b:\n    x()\nelif A:\n    y()\nelse:\n    z()\n", {"A": 0}, "if b:\n    x()\nelse:\n    z()\n"),
        ("def f():\n    if A > 1:\n        return 1\n    return 2\n", {"A": 2}, "def f():\n    return 1\n"),
        ("def f():\n    if A:\n        x()\n", {"A": False}, "def f():\n    pass\n"),
        ("x = (a or b if A else c) + 1\n", {"A": True}, "x = (a or b) + 1\n"),
        ("if A and b and c:\n    x()\n", {"A": True}, "if b and c:\n    x()\n"),
        ("x = b and A\n", {"A": True}, "x = b and A\n"),
        ("if b and A:\n    x()\n", {"A": True}, "if b:\n    x()\n"),
        ("if b and (c or not A):\n    x()\n", {"A": False}, "if b:\n    x()\n"),
        ("if b and (f() or not A):\n    x()\n", {"A": False}, "if b and (f() or True):\n    x()\n"),
        ("if b.c == 1 and not A:\n    x()\nelse:\n    y()\n", {"A": True}, "y()\n"),
        ("if f() and A:\n    x()\n", {"A": False}, "if f() and A:\n    x()\n"),
        ("x = not True\n", {}, "x = False\n"),
        ("x = not A and b\n", {"A": False}, "x = b\n"),
        ("x = -A\n", {"A": 2}, None),
        ("with contextlib.nullcontext(), f() as g:\n    x()\n", {}, "with f() as g:\n    x()\n"),
        ("if A:\n    x = '''a\n      b'''\n", {"A": True}, "x = '''a\n      b'''\n"),
        ('if A:\n    x = """a\n      b"""\n', {"A": True}, 'x = """a\n      b"""\n'),
        ("def f():\n    x = None\n    return g(x)\n", {}, "def f():\n    return g(None)\n"),
        ("def f():\n    x = None\n    x = h()\n    return g(x)\n", {}, None),
        ("def f():\n    x = None\n    def g():\n        nonlocal x\n        x = 1\n    return g(x)\n", {}, None),
        ("def f(x):\n    x = None\n    return f'{x}'\n", {}, None),
        ("def f(a):\n    if a:\n        x = None\n    return g(x)\n", {}, None),
    ],
)
def test_conditions_that_are_known(before: str, names: dict[str, Any], after: str | None) -> None:
    assert folded(before, Known(names)) == (before if after is None else after)


def test_texts_of_the_model_stay() -> None:
    """Blank lines and brackets go from code, not from what a user has written in a string."""
    text = 'UNREAD = 1\nTEXT = """a\n\n\n\n\nb(\n    c\n)"""\n\n\ndef build(x: int) -> int:\n    return x + len(TEXT)\n'
    files = {**FILES, "train.py": "from model_parallel import build\n\nprint(build(9))\n"}
    after = pruned(files, {"model_parallel.py": text})["model_parallel.py"]
    assert after == text.removeprefix("UNREAD = 1\n")


def test_each_name_of_the_tables_is_there() -> None:
    """What is kept for others is looked up by name: one that was renamed would be kept no longer."""
    texts = {f"runtime/{path.relative_to(EMIT / 'runtime')}": path.read_text() for path in EMIT.glob("runtime/**/*.py")}
    texts |= {path.name: path.read_text() for path in (EMIT / "package").glob("*.py")}
    tables = {module_name(name): module_table(name, text) for name, text in texts.items()}
    made_names = [name for key, (_, makers) in MADE_BY.items() for name in (key, *makers)]
    methods = {
        (module, f"{definition.names[0]}.{method}")
        for module, table in tables.items()
        for definition in table.definitions
        for method in _methods(definition)
    }
    for name in [*ROOTS, *made_names, *PASSED_ON, *OUTSIDE]:
        assert name in methods or resolved(tables, *name) is not None, name
    written = {node.attr for text in texts.values() for node in parsed(text).nodes if isinstance(node, ast.Attribute)}
    assert written | {name.partition(".")[2] for _, name in methods} >= USED
    assert written >= SET


def _methods(definition: ModuleDefinition) -> list[str]:
    body = definition.node.body if isinstance(definition.node, ast.ClassDef) else []
    return [node.name for node in body if isinstance(node, ast.FunctionDef)]
