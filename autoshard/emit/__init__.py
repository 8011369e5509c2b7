"""`emit(program, plan, graph)`: the standalone package as text, file by file. No torch needed to write it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from autoshard.emit.header import Header, header_of
from autoshard.emit.initial_file import initial_file
from autoshard.emit.model_file import model_file
from autoshard.emit.part_files import part_files
from autoshard.emit.pruning.pruned_package import pruned
from autoshard.emit.readme import readme
from autoshard.emit.user_operators import FOLDER, copied_files
from autoshard.errors import InvalidFileError
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.program.lower import lower
from autoshard.replay.free_sizes import check_dynamic
from autoshard.servers.server_files import FILES, server_files, server_readme

__all__ = ["Header", "emit", "header_of", "package"]

MODEL = "model_parallel.py"
_HERE = Path(__file__).parent
_LINTER = 'line-length = 120\n{more}[lint.per-file-ignores]\n"runtime/__init__.py" = ["F401"]\n'
_TYPE_MARK = "# mypy: ignore-errors\n"
_LINT_MARK = _TYPE_MARK + "# ruff: noqa: I001\n"  # these files import what stands next to the emitted copies alone


def emit(program: Program, plan: Plan, graph: Graph, other_numbers: bool = False) -> dict[str, str]:
    """File name -> text of everything that runs: the model, training, conversion, the runtime, README.md.

    `other_numbers`: its package has plans for other numbers of devices, too."""
    header = header_of(program, plan, graph, other_numbers)
    check_dynamic(program, header.others, graph)
    files = part_files(program, plan, header) if plan.step.parts else {MODEL: model_file(program, header)}
    for number, bucket in enumerate(plan.buckets):
        bucket_plan = plan.of_bucket(bucket)
        small = lower(bucket_plan, graph)
        of_bucket = replace(
            header_of(small, bucket_plan, graph, other_numbers), bucket=bucket.most, plan_hash=header.plan_hash,
            command=header.command, registrations=(),
        )  # fmt: skip
        check_dynamic(small, of_bucket.others, graph)
        files[f"smaller_{number}.py"] = model_file(small, of_bucket)
    served = server_files(plan)
    served |= {name: _support_text(_HERE / "package" / name) for name in FILES if plan.servers.count}
    files = package(program, header, files, served)
    files["README.md"] += server_readme(plan)
    return files


def package(
    program: Program, header: Header, models: Mapping[str, str] | None = None, served: Mapping[str, str] | None = None
) -> dict[str, str]:
    """File name -> text, from a header. `models`: the model's files, if there are several; `served`: the servers'."""
    copies = copied_files(header.registrations)
    plan_files = {**(models or {MODEL: model_file(program, header)}), "initial.py": initial_file(header.recipes)}
    files = {
        "ruff.toml": _LINTER.format(more=f'extend-exclude = ["{FOLDER}"]\n' if copies else ""),
        "README.md": readme(program, header),
        **copies,
    }
    for name, text in {**plan_files, **copies}.items():
        if name.endswith(".py"):
            _check_python(name, text)
    return files | pruned({**_support_files(), **(served or {})}, plan_files)


@lru_cache(maxsize=1)
def _support_files() -> dict[str, str]:
    """Files around the model that packages have, whole."""
    files = {
        path.name: _support_text(path) for path in sorted((_HERE / "package").glob("*.py")) if path.name not in FILES
    }
    for path in sorted((_HERE / "runtime").glob("*.py")):
        files[f"runtime/{path.name}"] = path.read_text(encoding="utf-8")
    return files


def _support_text(path: Path) -> str:
    return path.read_text(encoding="utf-8").removeprefix(_LINT_MARK).removeprefix(_TYPE_MARK)


@lru_cache(maxsize=64)
def _check_python(name: str, text: str) -> None:
    """No package is written that Python can't read. InvalidFileError for a copy of a user's file, else a bug."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        if name.startswith(FOLDER):
            message = f"{name}, which registers operators of the model, is no Python: {error}"
            raise InvalidFileError(message, "mend the file, then `autoshard plan` with the model itself") from None
        raise AssertionError(f"{name} as written is no Python: {error}") from error
