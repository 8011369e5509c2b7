"""The two pictures of docs/architecture.md: its folders, and the way of the data through them.

    python docs/folders.py --write

Only the order of the folders is typed on the page; what each is for is read from its docstring, and
tests/tiny/test_imports.py holds that each imports only what stands above it. The functions of the second picture are
named here; what goes in and comes out is read from their signatures.
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autoshard"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- {0}: written by `python docs/folders.py --write` -->\n```text\n"
END = "```\n<!-- {0} end -->"
WIDTH = 116
COLUMN = 30  # where the sentences begin
COPIED = ("emit/runtime", "emit/package")  # copied into every package: no part of the pipeline
ENTRY = re.compile(r"^([\w/]+(?:/|\.py))(?: |$)", re.MULTILINE)

ROAD = (
    "cluster/hardware.py:load_hardware",
    "graph_capture/capture.py:capture",
    "formulation/formulate.py:formulate",
    "solvers/__init__.py:solve",
    "search/build_plan.py:plan_of",
    "search/select_plan.py:search",
    "program/lower.py:lower",
    "simulation/engine.py:simulate",
    "emit/__init__.py:emit",
    "verification/case.py:make_case",
    "verification/case.py:check_folder",
    "html_report/render.py:render",
)


def block(name: str, text: str) -> tuple[str, str, str]:
    """What stands before, in and after the picture `name` of a page. ValueError where it has none."""
    before, begin, rest = text.partition(BEGIN.format(name))
    inside, end, after = rest.partition(END.format(name))
    if not begin or not end:
        raise ValueError(f"no picture {name!r} in {PAGE.name}")
    return before + begin, inside, end + after


def order(text: str | None = None) -> list[str]:
    """The entries of the first picture, upstream first: `ir/`, `graph_capture/tracing/`, `errors.py`."""
    return ENTRY.findall(block("folders", text if text is not None else PAGE.read_text(encoding="utf-8"))[1])


def modules(entry: str) -> list[Path]:
    """The files of one entry, without those of the folders in it."""
    return [PACKAGE / entry] if entry.endswith(".py") else sorted((PACKAGE / entry).glob("*.py"))


def sentence(entry: str) -> str:
    """The first sentence of what the code says of an entry."""
    path = PACKAGE / entry if entry.endswith(".py") else PACKAGE / entry / "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def folders(entries: list[str]) -> str:
    lines = []
    for entry in entries:
        lines += textwrap.wrap(f"{entry:<{COLUMN}}{sentence(entry)}", WIDTH, subsequent_indent=" " * COLUMN)
    return "\n".join(lines) + "\n"


def nouns() -> set[str]:
    """The classes that a picture of the data names."""
    return {
        node.name
        for path in PACKAGE.rglob("*.py")
        if not path.relative_to(PACKAGE).as_posix().startswith(COPIED)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def step(name: str, known: set[str]) -> tuple[str, str, str]:
    """(what goes in, the function, what comes out) of one function, from its signature."""
    place, _, function = name.partition(":")
    tree = ast.parse((PACKAGE / place).read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    types = [ast.unparse(a.annotation) for a in found.args.args if a.annotation is not None]
    required = types[: len(found.args.args) - len(found.args.defaults)]
    taken = [text for text in required if text.split("[")[0] in known] or [f"{found.args.args[0].arg}"]
    given = ast.unparse(found.returns) if found.returns is not None else ""
    folder = place.removesuffix("/__init__.py").removesuffix(".py")
    return " + ".join(dict.fromkeys(taken)), f"{folder}.{function}", given


def road() -> str:
    known = nouns()
    steps = [step(name, known) for name in ROAD]
    left, middle = (max(len(row[i]) for row in steps) for i in (0, 1))
    return "".join(f"{a:>{left}} ── {b:─<{middle}} ─▶ {c}\n" for a, b, c in ((a, b + " ", c) for a, b, c in steps))


def page(text: str) -> str:
    before, _, after = block("folders", text)
    text = before + folders(order(text)) + after
    before, _, after = block("road", text)
    return before + road() + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="renew docs/architecture.md instead of printing")
    text = page(PAGE.read_text(encoding="utf-8"))
    if parser.parse_args().write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(block("folders", text)[1] + "\n" + block("road", text)[1])


if __name__ == "__main__":
    main()
