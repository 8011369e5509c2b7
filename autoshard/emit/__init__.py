"""`emit(program, plan, graph)`: the standalone package as text, file by file. No torch needed to write it."""

from __future__ import annotations

from pathlib import Path

from autoshard.emit.header import Header, header_of
from autoshard.emit.model_file import model_file
from autoshard.emit.readme import readme
from autoshard.emit.user_operators import FOLDER, copied_files
from autoshard.graph.model import Graph
from autoshard.plan import Plan
from autoshard.program.model import Program

__all__ = ["Header", "emit", "header_of", "package"]

_HERE = Path(__file__).parent
_LINT_MARK = (
    "# mypy: ignore-errors\n# ruff: noqa: I001\n"  # these files import what only stands beside the emitted copies
)


def emit(program: Program, plan: Plan, graph: Graph) -> dict[str, str]:
    """File name -> text of everything that runs: the model, training, conversion, the runtime, README.md."""
    return package(program, header_of(program, plan, graph))


def package(program: Program, header: Header) -> dict[str, str]:
    """The same, from a header."""
    copies = copied_files(header.registrations)
    files = {
        "ruff.toml": "line-length = 120\n" + (f'extend-exclude = ["{FOLDER}"]\n' if copies else ""),
        "model_parallel.py": model_file(program, header),
        "README.md": readme(program, header),
        **copies,
    }
    for path in sorted((_HERE / "package").glob("*.py")):
        files[path.name] = path.read_text(encoding="utf-8").replace(_LINT_MARK, "", 1)
    for path in sorted((_HERE / "runtime").glob("*.py")):
        files[f"runtime/{path.name}"] = path.read_text(encoding="utf-8")
    return files
