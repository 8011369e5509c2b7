"""Corrupts every rule in every applicable way and asks the proof: `python -m benchmarks.mutations [OP ...] [--write]`.

A mutant is caught where the notation refuses it, where it does not fit the operator's shapes (so that the proof fails),
or where a strategy that it offers computes something else. A strategy that the right rule offers too is not run again:
it is proved. Exit code 6 where a mutant survives that is neither a true rule nor the same rule.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations

from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.rules import OPERATORS, instance
from autoshard.rules.algebra.notation import Rule, RuleError, Term
from autoshard.rules.cases import ALL
from autoshard.rules.proof.rule_proof import OpCase, offered_by, one_op_graph
from autoshard.verification.rule_table import prove_strategy
from benchmarks import harness

MESHES = ("tp=2", "tp=3")
# How a mutant ends, the strongest of its cases'; the last two are survivors.
REFUSED, MISFIT, WRONG, TRUE, SAME = "notation", "shapes", "values", "true", "same"
ENDS = (WRONG, MISFIT, REFUSED, TRUE, SAME)
MOVED = (  # a corruption, the part of a rule that a factor leaves, and where it goes
    ("whole dropped", "whole", ""),
    ("whole called summed", "whole", "sum"),
    ("sum dropped", "sum", ""),
    ("partial called whole", "sum", "joined"),
    ("joined called summed", "joined", "sum"),
)
HEADER = ("corruption", "mutants", "caught", "by values", "by shapes", "by the notation", "true", "same")


@dataclass(frozen=True)
class Mutant:
    """One corruption of one operator's rule, by its place in the bound rule, and how it ended over all cases."""

    target: str
    kind: str
    place: str
    end: str
    text: str


def corruptions(rule: Rule) -> Iterator[tuple[str, str, Rule]]:
    """(kind, place, corrupted rule): every single way."""
    yield from _swaps(rule)
    for kind, old, new in MOVED:
        for index, factor in enumerate(getattr(rule, old)):
            changed = {old: tuple(f for f in getattr(rule, old) if f != factor)}
            yield kind, str(index), replace(rule, **changed, **({new: (*getattr(rule, new), factor)} if new else {}))
    for position, term in enumerate(rule.operands):
        if term is not None and term.added:
            yield "+ dropped", str(position), _with(rule, position, replace(term, added=False))
    present = tuple(position for position, term in enumerate(rule.operands) if term is not None)
    for group in dict.fromkeys([*((position,) for position in present), present]):
        if group not in rule.linear:
            yield "linear added", "+".join(map(str, group)), replace(rule, linear=(*rule.linear, group))
    if rule.variant:
        yield "variant dropped", "", replace(rule, variant="", variant_factors=())


def _swaps(rule: Rule) -> Iterator[tuple[str, str, Rule]]:
    """Two dims of one operand or result change places."""
    for position, term in enumerate((*rule.operands, *rule.results)):
        for i, j in combinations(range(len(term.dims) if term else 0), 2):
            dims = list(term.dims)
            dims[i], dims[j] = dims[j], dims[i]
            if dims[i] != dims[j]:
                swapped = replace(term, dims=tuple(dims))
                yield "factors swapped", f"{position}:{i},{j}", _with(rule, position, swapped)


def _with(rule: Rule, position: int, term: Term) -> Rule:
    """The rule with one operand or result changed."""
    terms = [*rule.operands, *rule.results]
    terms[position] = term
    count = len(rule.operands)
    return replace(rule, operands=tuple(terms[:count]), results=tuple(t for t in terms[count:] if t is not None))


@contextmanager
def planted(target: str, text: str) -> Iterator[None]:
    """The table with this rule in it."""
    right = OPERATORS[target]
    OPERATORS[target] = replace(right, rule=text)
    try:
        yield
    finally:
        OPERATORS[target] = right


def outcome(case: OpCase, graph: Graph, text: str, right: dict[str, frozenset[object]]) -> str:
    """How the corrupted rule ends on one case. `right`: what the right rule offers on each mesh."""
    try:
        Rule.parse(text)
    except RuleError:
        return REFUSED
    end, graph = SAME, replace(graph)  # what was asked of the graph before was asked of the right rule
    with planted(case.target, text):
        if not instance(graph, graph.ops[0]).known:
            return MISFIT
        for name, proved in right.items():
            mesh = Mesh.parse(name)
            for strategy in offered_by(graph, mesh):
                if (strategy.operands, strategy.results, strategy.variant) in proved:
                    continue
                end = TRUE
                try:
                    verdict = prove_strategy(case, graph, strategy, mesh)
                except Exception:  # the variant or its arguments have no such factor
                    return WRONG
                if verdict.failure:
                    return WRONG
    return end


def mutants(target: str) -> list[Mutant]:
    """Every corruption of one operator's rule, over all its cases."""
    ends: dict[tuple[str, str], tuple[str, str]] = {}
    for case in (case for case in ALL if case.target == target):
        graph = one_op_graph(case)
        bound = instance(graph, graph.ops[0]).rule
        right = {
            name: frozenset((s.operands, s.results, s.variant) for s in offered_by(graph, Mesh.parse(name)))
            for name in MESHES
        }
        for kind, place, rule in corruptions(bound):
            old = ends.get((kind, place), (SAME, str(rule)))
            if old[0] != WRONG:
                end = outcome(case, graph, str(rule), right)
                if ENDS.index(end) <= ENDS.index(old[0]):
                    ends[kind, place] = end, str(rule)
    return [Mutant(target, kind, place, end, text) for (kind, place), (end, text) in ends.items()]


def summary(outcomes: Sequence[Mutant]) -> list[tuple[object, ...]]:
    """A row a kind of corruption, then the sum."""
    rows = []
    for kind in [*dict.fromkeys(m.kind for m in outcomes), "all"]:
        ends = Counter(m.end for m in outcomes if kind in ("all", m.kind))
        caught = ends[WRONG] + ends[MISFIT] + ends[REFUSED]
        rows.append((kind, ends.total(), caught, *(ends[end] for end in ENDS)))
    return rows


def survivors(outcomes: Sequence[Mutant]) -> list[str]:
    """A line for each kind of survivor, with its operators."""
    groups: dict[tuple[str, str], list[str]] = {}
    for mutant in outcomes:
        if mutant.end in (TRUE, SAME):
            groups.setdefault((mutant.end, mutant.kind), []).append(mutant.target.removeprefix("aten."))
    lines = []
    for (end, kind), targets in groups.items():
        lines.append(f"- {kind}, {end} ({len(targets)}): {', '.join(dict.fromkeys(targets))}")
    return lines


def unexplained(outcomes: Sequence[Mutant]) -> list[Mutant]:
    """Survivors that offer something new which is right in every case, and that nobody has accounted for."""
    true = [mutant for mutant in outcomes if mutant.end == TRUE]
    return [m for m in true if m.kind not in EXPLAINED and f"{m.kind} {m.target} {m.place}" not in EXPLAINED]


# A kind of corruption, or one mutant: why it is true.
EXPLAINED = {
    "linear added": "the operator is linear there, and the table leaves it out",
    "whole called summed autoshard.experts 1": "the experts that a token chose are summed; all weights on every device",
}


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("operators", nargs="*", metavar="OP", help="default: the whole table")
    options = parser.parse_args()
    start = time.perf_counter()
    outcomes: list[Mutant] = []
    for target in options.operators or sorted(target for target, known in OPERATORS.items() if known.rule is not None):
        outcomes += mutants(target)
        print(f"{target}: {len(outcomes)} mutants so far", file=sys.stderr)
    seconds = time.perf_counter() - start
    rows = (harness.cells(*row) for row in summary(outcomes))
    lines = [*harness.table(HEADER, rows, 1), "", *survivors(outcomes)]
    if options.write:
        operators = len({mutant.target for mutant in outcomes})
        harness.put("mutations", [f"{operators} operators in {seconds:.0f} s; {harness.machine()}", "", *lines])
    return 6 if unexplained(outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
