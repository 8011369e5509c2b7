"""docs/rules.md, written from the table: `python -m autoshard.verification.rule_page --write`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from autoshard.errors import NAMED
from autoshard.rules.algebra.argument_rules import RuleFor
from autoshard.rules.algebra.notation import Rule, Together
from autoshard.rules.cases import ALL
from autoshard.rules.operator_table import instance, rule_text
from autoshard.rules.operators import KINDS
from autoshard.rules.proof.rule_proof import one_op_graph

PATH = Path("docs/rules.md")
BEGIN = "<!-- the table: written by `python -m autoshard.verification.rule_page --write` -->"
END = "<!-- the table ends -->"
_HEAD = ("| operators | loops | remarks |", "|---|---|---|")
INTRODUCTION = """# The rules

A rule describes an operator by its loops ("factors"), as in einsum. A mesh axis on a factor decides the layout of
every operand, result and gradient (notation: `autoshard/rules/algebra/notation.py`; layouts: `derive.py`):

- a factor in an operand and the result shards both; an operand that lacks the factor is replicated, with a partial
  gradient;
- `+n` is added, not multiplied (a bias); `n?` may be absent; `...` are broadcasting dims, `d*` several dims, `(g c)`
  a product of factors, outermost first; a number is a dim that cannot be sharded;
- *sum*: the result lacks these factors, and sharding one makes it a partial sum;
- *whole*: these factors cannot be sharded, but by a named choice;
- *partial in* `0+1`: partial sums in operands 0 and 1 together give a partial sum; in `0, 1`: in either alone;
- *variant*: this function of the runtime replaces the operator if an axis is on its factors (or always). *joined*: over
  these factors its own collectives combine the shards, so that the result is whole on every device. Named choices, such
  as `ring` (s+t), shard several factors by one axis; `heads` (g*r) shards the dims that are the product `(g r)`;
- `-` is an absent operand, `()` a scalar.

Where a rule depends on arguments, up to three examples are shown. `autoshard prove` runs every operator with every
strategy, forward and backward. Operators that mean the same are captured as one (`flatten` as `reshape`). One that is
not listed gets a rule by experiment at capture (`autoshard/rules/proof/discover.py`), which plans mark `discovered`. If
no experiment succeeds, every device runs the operator whole, and a warning names it.
"""


def page() -> str:
    """The whole page."""
    sections = [line for kind in KINDS for line in _section(kind)]
    return "\n".join([INTRODUCTION, BEGIN, *sections, END, ""])


def _section(kind: ModuleType) -> Iterator[str]:
    """Text for one file of the table: operators with the same rule share a row."""
    rules = {target: known.rule for target, known in kind.OPERATORS.items() if known.rule is not None}
    yield from ("", f"## {kind.__name__.rpartition('.')[2].replace('_', ' ').capitalize()}", "")
    yield from ((kind.__doc__ or "").strip(), "", *_HEAD)
    groups: dict[str | RuleFor, list[str]] = {}
    for target, rule in sorted(rules.items()):
        groups.setdefault(rule, []).append(target)
    for rule, targets in groups.items():
        names = ", ".join(f"`{target.removeprefix('aten.')}`" for target in targets)
        loops: dict[str, list[str]] = {}
        for example in [Rule.parse(rule)] if isinstance(rule, str) else _examples(targets):
            loops.setdefault(_remarks(example), []).append(f"`{str(example).partition('|')[0].strip()}`")
        for remarks, each in loops.items():
            yield f"| {names} | {'; '.join(dict.fromkeys(each))} | {remarks} |"
            names = ""


def _examples(targets: Sequence[str]) -> list[Rule]:
    """First different texts of a rule function over the proof cases."""
    texts: list[str] = []
    for case in (case for case in ALL if case.target in targets):
        if len(texts) == NAMED:
            break
        graph = one_op_graph(case)
        text = rule_text(graph, graph.ops[0])
        if text not in texts and instance(graph, graph.ops[0]).known:
            texts.append(text)
    return [Rule.parse(text) for text in texts]


def _remarks(rule: Rule) -> str:
    """Remarks beyond the loops: factors summed, whole or joined, operands that pass partial sums, variants."""
    on = f" on {_factors(rule.variant_factors)}" if rule.variant_factors else ""
    variants = [f"`{rule.variant}`{on}"] if rule.variant else []
    remarks = {
        "sum": _factors(rule.sum),
        "whole": _factors(rule.whole),
        "partial in": ", ".join("+".join(map(str, group)) for group in rule.linear),
        "variant": ", ".join([*variants, *(f"`{o.variant}` on `{o.name}` ({_joined(o)})" for o in rule.together)]),
        "joined": _factors(rule.joined),
    }
    return "; ".join(f"{name} {text}" for name, text in remarks.items() if text)


def _joined(several: Together) -> str:
    return ("*" if several.product else "+").join(several.factors)


def _factors(names: Sequence[str]) -> str:
    return f"`{' '.join(names)}`" if names else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PATH}; otherwise show what would change")
    options = parser.parse_args()
    old, new = PATH.read_text(encoding="utf-8") if PATH.exists() else "", page()
    if options.write:
        PATH.write_text(with_tail(old, new), encoding="utf-8")
        return 0
    difference = list(difflib.unified_diff(old.splitlines(), with_tail(old, new).splitlines(), lineterm=""))
    print("\n".join(difference) or f"{PATH} is up to date")
    return int(bool(difference))


def with_tail(old: str, new: str) -> str:
    """The new page, followed by what comes after the table on the old one (written by others)."""
    tail = old.partition(END)[2].strip()
    return f"{new.rstrip()}\n\n{tail}\n" if tail else new


if __name__ == "__main__":
    raise SystemExit(main())
