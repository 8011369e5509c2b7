"""docs/rules.md, written from the table: `python -m autoshard.verification.rule_page --write`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from autoshard.rules.algebra.argument_rules import RuleFor
from autoshard.rules.algebra.notation import Rule, Together
from autoshard.rules.cases import ALL
from autoshard.rules.operator_table import instance, rule_text
from autoshard.rules.operators import KINDS
from autoshard.rules.proof.rule_proof import OpCase, one_op_graph

PATH = Path("docs/rules.md")
BEGIN = "<!-- the table: written by `python -m autoshard.verification.rule_page --write` -->"
END = "<!-- the table ends -->"
EXAMPLES = 3  # of a rule function, with different texts
_HEAD = (
    "| operators | for | loops | summed | whole | a partial passes in | variant |",
    "|---|---|---|---|---|---|---|",
)
INTRODUCTION = """# The rules

An operator is described by its loops ("factors"), written like einsum; a mesh axis on a factor decides how every
operand, result and gradient lies (the notation: `autoshard/rules/algebra/notation.py`; what follows: `derive.py`):

- a factor in an operand and the result: both are sharded there; one that the result lacks is *summed*, and the result
  partial; one that an operand lacks: that operand is replicated, its gradient partial;
- `+n` is added, not multiplied (a bias); `n?` may be absent; `...` are broadcasting dims, `d*` several dims, `(g c)` a
  product of factors, outermost first, and a number a dim that nothing cuts;
- *whole* factors can't be cut: the operator needs all of them on each device;
- *a partial passes in* `0+1`: partial sums in operands 0 and 1 together give a partial sum; in `0, 1`: in either alone;
- a *variant* of the runtime replaces the operator, where an axis is on its factors (or always); `joined` factors are
  joined by its own collectives; a choice like `ring` (s+t) cuts several factors at once, `heads` (g*r) their product.

Where a rule depends on arguments, examples show it; sizes are of the operands. Every operator here is proved on each of
its strategies, forward and backward, by `autoshard prove`, with the very calls that packages make; one that offers
nothing but repetition would be called *whole only* there. For an operator that is not here a rule is looked for by
experiment when a model is captured (`autoshard/rules/proof/discover.py`): it is proved, kept with the graph, and marked
`discovered` in plans. Where nothing recombines, every device repeats the operator, and a warning names it.
"""


def page() -> str:
    """The whole page."""
    sections = [line for kind in KINDS for line in _section(kind)]
    return "\n".join([INTRODUCTION, BEGIN, *sections, END, ""])


def _section(kind: ModuleType) -> Iterator[str]:
    """One file of the table: operators with the same rule share a row."""
    rules = {target: known.rule for target, known in kind.OPERATORS.items() if known.rule is not None}
    yield from ("", f"## {kind.__name__.rpartition('.')[2].replace('_', ' ').capitalize()}", "")
    yield from ((kind.__doc__ or "").strip(), "", *_HEAD)
    groups: dict[str | RuleFor, list[str]] = {}
    for target, rule in sorted(rules.items()):
        groups.setdefault(rule, []).append(target)
    for rule, targets in groups.items():
        names = ", ".join(f"`{target.removeprefix('aten.')}`" for target in targets)
        examples = [("", Rule.parse(rule))] if isinstance(rule, str) else _examples(targets)
        for shapes, example in examples:
            yield f"| {names} | {shapes} | {' | '.join(_cells(example))} |"
            names = ""


def _examples(targets: Sequence[str]) -> list[tuple[str, Rule]]:
    """The first different texts of a rule function over the proof cases, with operand shapes."""
    found: dict[str, str] = {}
    for case in (case for case in ALL if case.target in targets):
        if len(found) == EXAMPLES:
            break
        graph = one_op_graph(case)
        if instance(graph, graph.ops[0]).known:
            found.setdefault(rule_text(graph, graph.ops[0]), _shapes(case))
    return [(shapes, Rule.parse(text)) for text, shapes in found.items()]


def _shapes(case: OpCase) -> str:
    return ", ".join("–" if o is None else "×".join(map(str, o.shape)) or "()" for o in case.operands)


def _cells(rule: Rule) -> list[str]:
    loops = str(rule).partition("|")[0].strip()
    linear = ", ".join("+".join(map(str, group)) for group in rule.linear)
    factors = " ".join(rule.variant_factors)
    variant = f"`{rule.variant}`" + (f" on `{factors}`" if factors else "") if rule.variant else ""
    several = [f"`{one.variant}` on `{one.name}` ({_joined(one)})" for one in rule.together]
    variant = ", ".join([*([variant] if variant else []), *several])
    variant += f", joined: `{' '.join(rule.joined)}`" if rule.joined else ""
    return [f"`{loops}`", _factors(rule.sum), _factors(rule.whole), linear, variant]


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
        PATH.write_text(with_rest(old, new), encoding="utf-8")
        return 0
    difference = list(difflib.unified_diff(old.splitlines(), with_rest(old, new).splitlines(), lineterm=""))
    print("\n".join(difference) or f"{PATH} is up to date")
    return int(bool(difference))


def with_rest(old: str, new: str) -> str:
    """The new page, and after its table what the old one holds there (written by others)."""
    rest = old.partition(END)[2].strip()
    return f"{new.rstrip()}\n\n{rest}\n" if rest else new


if __name__ == "__main__":
    raise SystemExit(main())
