"""Every option that a message, a hint or a page names is one of the verb that it is for, or of a package's programs."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

import pytest

from autoshard.cli.commands import VERBS
from autoshard.cli.parser import parser

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "autoshard"
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w-])")
_COMMAND = re.compile(r"autoshard ([a-z]+)\b([^`\n;|&]*)")
# Options of other programs that texts name.
OTHERS = {
    "torchrun": {"--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--master-addr"},
    "sbatch": {"--chdir"},
    "Megatron-LM": {"--overlap-grad-reduce"},
    "mypy": {"--config-file", "--follow-imports", "--check-untyped-defs"},
}


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings if option.startswith("--")}


def by_verb() -> dict[str, set[str]]:
    top_parser = parser(VERBS)
    verbs = next(action for action in top_parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: options_of(verb) for name, verb in verbs.choices.items()} | {"": options_of(top_parser)}


def programs() -> set[str]:
    """Options of the programs of packages, of tools and of benchmarks, as their sources add them."""
    places = [*(PACKAGE / "emit" / "package").glob("*.py"), *(PACKAGE / "emit").glob("*.py"), *ROOT.glob("docs/*.py")]
    texts = [path.read_text(encoding="utf-8") for path in [*places, *ROOT.glob("benchmarks/*.py")]]
    texts += [path.read_text(encoding="utf-8") for path in (PACKAGE / "verification").rglob("*.py")]
    return {option for text in texts for option in re.findall(r"""["'](--[a-z][a-z-]*)["']""", text)}


VERB = by_verb()
KNOWN = set().union(*VERB.values(), *OTHERS.values(), programs())


def strings(path: Path) -> list[str]:
    """String constants of a source, those of f-strings as they stand, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = {id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, documented) and n.body and
            isinstance(n.body[0], ast.Expr)}  # fmt: skip
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    ]


def faults(text: str) -> list[str]:
    """Options in it that there are not; of a command those that its verb has not."""
    wrong = [option for option in _OPTION.findall(text) if option not in KNOWN]
    for verb, arguments in _COMMAND.findall(text):
        arguments = re.sub(r"--options '[^']*'", "--options", arguments)  # of `launch`: for train.py
        if verb in VERB:
            wrong += [f"{verb} {option}" for option in _OPTION.findall(arguments) if option not in VERB[verb]]
    return wrong


SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if "_data" not in path.parts]
PAGES = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name != "validation.md")]


def test_sources() -> None:
    files = {path.relative_to(ROOT).as_posix(): [f for text in strings(path) for f in faults(text)] for path in SOURCES}
    assert {name: wrong for name, wrong in files.items() if wrong} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    spans = [*re.findall(r"```.*?```", text, re.DOTALL), *re.findall(r"`[^`\n]+`", text)]
    assert [fault for span in spans for fault in faults(span)] == []


@pytest.mark.parametrize("text", ["--mash dp=2", "try autoshard report DIR --export x", "autoshard plan --fused"])
def test_others_are_found(text: str) -> None:
    assert faults(text)
