"""Early deletion of variables in the emitted forward: weights gathered for one use, and values that the program marks
short-lived.

A `del` is written only if its variable would keep a tensor alive: not if the name is soon reassigned, nor if nothing
more is computed.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.ir.program import Collective, Program
from autoshard.program.module_scopes import reads_of, results_of
from autoshard.program.module_tree import Definition, Item, Loop, ModuleCall
from autoshard.rules.algebra.operator_record import Work
from autoshard.rules.operators import record


class Liveness:
    """The variable that holds each value while the statements of one function are written.

    `nested`: position of a statement inside a later one, and that one's position. `gathered`: weights.
    """

    def __init__(
        self, program: Program, definition: Definition, nested: Mapping[int, int], gathered: frozenset[str]
    ) -> None:
        self.program, self.definition, self.nested = program, definition, nested
        self.last: dict[str, int] = {}
        for i, item in enumerate(definition.body):
            for value in (*_reads(item), *_results(item)):
                self.last[value] = nested.get(i, i)
        stay = {*definition.outputs, *(new for _, new in definition.updates), *definition.inputs}
        groups = [[value for value in storage if value in self.last] for storage in program.short_lived]
        groups += [[value] for value in self.last if value in gathered]  # a set has another order in each process
        self.ends: dict[int, list[str]] = {}  # position -> the values that end with its statement
        for values in groups:
            if values and stay.isdisjoint(values):
                self.ends.setdefault(max(self.last[value] for value in values), []).extend(values)
        self.held: dict[str, str] = {}  # variable -> value

    def after(self, i: int, names: Mapping[str, str]) -> list[str]:
        """Variables to delete after the statement at `i`, in order of their values. Call it for each statement, in
        order: `names` include those of its results."""
        self.held |= {names[value]: value for value in _results(self.definition.body[i]) if value in names}
        done = [names[value] for value in self.ends.get(i, ()) if self.held.get(names.get(value, "")) == value]
        ended = [name for name in dict.fromkeys(done) if self._needs_deletion(i, name, names)]
        for name in ended:  # a gathered weight's storage may end again, with a view of it
            del self.held[name]
        return ended

    def _needs_deletion(self, i: int, name: str, names: Mapping[str, str]) -> bool:
        """Is anything computed before the name is reassigned?"""
        for j, item in enumerate(self.definition.body[i + 1 :], i + 1):
            if self._makes(item):
                return True
            if j not in self.nested and name in (names.get(value) for value in _results(item)):
                return False
        return False

    def _makes(self, item: Item) -> bool:
        if isinstance(item, ModuleCall | Loop):
            return True
        if isinstance(item, Collective):
            return item.forward != ""
        views = record(item.target).work is Work.VIEW
        return not views and any(self.program.value(value).shape for value in item.results)


def _reads(item: Item) -> tuple[str, ...]:
    if isinstance(item, ModuleCall | Loop):
        return item.arguments
    return tuple(value for value in reads_of(item) if value is not None)


def _results(item: Item) -> tuple[str, ...]:
    if isinstance(item, ModuleCall | Loop):
        return tuple(value for value in item.results if value is not None)
    return results_of(item)
