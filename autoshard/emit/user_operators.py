"""The model's own operators in a package: the modules that register them, and copies of files that no name reaches."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.code_text import code_span, fresh, identifier, quoted
from autoshard.emit.code_lines import statement
from autoshard.ir.graph import Registration

FOLDER = "user_operators"
_INIT = '"""Copies of the files that register operators of the original model, made when this package was written."""\n'


def copied_files(registrations: Sequence[Registration]) -> dict[str, str]:
    """File name -> text; {} if every module is imported by its name."""
    names = module_names(registrations)
    files = {
        f"{name.replace('.', '/')}.py": item.text for name, item in zip(names, registrations, strict=True) if item.text
    }
    return {f"{FOLDER}/__init__.py": _INIT, **files} if files else {}


def module_names(registrations: Sequence[Registration]) -> list[str]:
    """Name by which the package imports each module: its own, or that of the copy."""
    names: list[str] = []
    for item in registrations:
        copy = f"{FOLDER}.{identifier(item.module)}"
        names.append(fresh(copy, names) if item.text else item.module)
    return names


def registering_lines(registrations: Sequence[Registration]) -> list[str]:
    """Registering statements of model_parallel.py."""
    lines: list[str] = []
    for name, item in zip(module_names(registrations), registrations, strict=True):
        lines += statement(f"register_operators({', '.join(map(quoted, (name, *item.targets)))})", 0)
    return ["", *lines] if lines else []


def readme_section(registrations: Sequence[Registration]) -> str:
    """README section on modules that were copied or must be importable; "" if the model has no operators of its own."""
    if not registrations:
        return ""
    pairs = zip(module_names(registrations), registrations, strict=True)
    return "\n".join(["", "## The model's own operators", "", *(_sentence(name, item) for name, item in pairs), ""])


def _sentence(name: str, item: Registration) -> str:
    operators = ", ".join(map(code_span, item.targets))
    if item.text:
        return f"- {operators}: `{name.replace('.', '/')}.py`, a copy of the file that registers them."
    if item.module:
        return f"- {operators}: {code_span(f'import {item.module}')}, which must be installed or on `PYTHONPATH`."
    return f"- {operators}: add an import of the module that registers them to `model_parallel.py`."
