"""What is known of an operator stands in its record: few other files know its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.rules.operators import EXCHANGING, KINDS, OPERATORS, VARIANTS, record

PACKAGE = Path(__file__).resolve().parents[2] / "autoshard"
COPIED = ("emit/runtime/", "emit/package/")
# they turn operators into others
REWRITING = ("graph_capture/passes/", "graph_capture/tracing/", "graph_capture/constructor/")
MOST = 5  # its record, its proof cases, and who makes it: a graph from numbers, a measurement


def words(path: Path) -> Iterator[str]:
    """Every word of the strings of a file that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from (word.removeprefix("aten.") for word in node.value.split())


def files_that_name() -> dict[str, set[str]]:
    """Operators whose name is no word of English -> the files that have it in a string."""
    names = {target.partition(".")[2] for target, known in OPERATORS.items() if known.rule is not None}
    found: dict[str, set[str]] = {name: set() for name in names if "_" in name.strip("_")}
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        if "_data" not in path.parts and not place.startswith(COPIED):
            for word in found.keys() & set(words(path)):
                found[word].add(place)
    return found


def test_few_files_know_an_operators_name() -> None:
    found = files_that_name()
    assert len(found["scaled_dot_product_attention"]) <= MOST
    assert len(found["cross_entropy_loss"]) <= MOST
    elsewhere = {name: [p for p in places if not p.startswith(REWRITING)] for name, places in found.items()}
    assert not {name: places for name, places in elsewhere.items() if len(places) > MOST}


def test_an_operator_has_one_record() -> None:
    targets = [target for kind in KINDS for target in kind.OPERATORS]
    assert len(targets) == len(set(targets)) == len(OPERATORS)


def test_an_unknown_operator_has_the_defaults() -> None:
    unknown = record("mine.op")
    assert unknown.rule is None and not unknown.spelling and unknown.draws is None


@pytest.mark.parametrize("name", sorted({known.bandwidth for known in (*OPERATORS.values(), *VARIANTS.values())}))
def test_the_constant_of_a_record_is_one_of_the_cost_models(name: str) -> None:
    assert load_hardware("a100-80g-sxm").constant(f"memory.{name}") >= 0


def test_what_exchanges_says_its_collectives() -> None:
    assert EXCHANGING
    assert all(VARIANTS[name].collectives for name in EXCHANGING)
