"""Short variable names: a value takes the name of the operand that ends with it (`x = F.relu(x)`), else a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from autoshard.code_text import fresh, identifier
from autoshard.ir.program import Collective, Compute, Program
from autoshard.program.module_scopes import operands_of, reads_of, results_of
from autoshard.program.module_tree import Definition, Item, Loop, ModuleCall
from autoshard.rules.operators import record

POOLS = {"float": ("x", "y", "z", "u", "w"), "int": ("index", "positions"), "bool": ("condition",)}


@dataclass
class Naming:
    """`names`: value -> variable ("_" where nothing reads it). `carried`: (item position, argument) of a loop -> the
    variable that a turn hands to the next. `copies`: item position -> (new, old) assignments that must come before it,
    because a loop would overwrite a variable that is still needed."""

    names: dict[str, str] = field(default_factory=dict)
    carried: dict[tuple[int, int], str] = field(default_factory=dict)
    copies: dict[int, list[tuple[str, str]]] = field(default_factory=dict)


def name_values(
    program: Program, definition: Definition, reserved: frozenset[str], is_root: bool, called: Sequence[str] = ()
) -> Naming:
    """`called`: what a caller names the inputs. The root's inputs keep the names of the original model; what a part of
    a pipeline is handed has none there."""
    namer = _Namer(program, definition, reserved)
    own = ["" if program.value(value).requires_grad else value for value in definition.inputs]
    return namer.run(own if is_root else called)


class _Namer:
    def __init__(self, program: Program, definition: Definition, reserved: frozenset[str]) -> None:
        self.program, self.definition, self.reserved = program, definition, reserved
        self.state = {p.value: p.path for p in (*program.parameters, *program.buffers)}
        self.stored = {program.value(value).tensor: path for value, path in self.state.items()}
        self.last: dict[str, int] = {}
        for i, item in enumerate(definition.body):
            self.last.update(dict.fromkeys(reads(item), i))
        ends = [*definition.outputs, *(new for _, new in definition.updates)]
        self.last.update(dict.fromkeys(ends, len(definition.body)))
        self.roles = self._find_roles()
        self.naming = Naming()
        self.live: dict[str, str] = {}  # variable -> the value it holds
        self.kinds: dict[str, str] = {}  # variable -> kind of what it holds or held
        self.from_parameter: dict[str, str] = {}  # value -> the parameter's own name

    def run(self, called: Sequence[str]) -> Naming:
        for value, name in zip_longest(self.definition.inputs, called, fillvalue=""):
            wanted = self._input_name(value) if value in self.roles or name in ("", *POOLS["float"]) else name
            self._bind(value, self._free(wanted))
            if value in self.state:
                self.from_parameter[value] = self.naming.names[value]
        for i, item in enumerate(self.definition.body):
            if isinstance(item, Loop):
                self._loop(i, item)
            elif isinstance(item, ModuleCall):
                self._results(i, [v for v in item.results if v is not None], reads(item))
            else:
                self._results(i, list(results_of(item)), reads(item), item)
        return self.naming

    # --- choosing ---

    def _results(
        self, i: int, results: list[str], operands: tuple[str, ...], item: Compute | Collective | None = None
    ) -> None:
        names = self.naming.names
        dying = [names[v] for v in operands if v in names and self.last[v] == i]
        for variable in dying:
            self.live.pop(variable, None)
        inherited = self._inherited(item, operands)
        for value in results:
            if self.last.get(value, -1) <= i:
                names[value] = "_"
                continue
            if inherited:
                self.from_parameter[value] = inherited
            wanted = self._wanted(value, item, dying if len(results) == 1 else [])
            self._bind(value, self._free(wanted))

    def _inherited(self, item: Compute | Collective | None, operands: tuple[str, ...]) -> str:
        """The parameter's name for a parameter that is only redistributed or cast."""
        if item is None or not (isinstance(item, Collective) or record(item.target).keeps_name) or not operands:
            return ""
        source = operands[0]
        if source in self.state and source not in self.naming.names:
            return identifier(self.state[source].rpartition(".")[2], self.reserved)
        return self.from_parameter.get(source, "")

    def _wanted(self, value: str, item: Compute | Collective | None, dying: list[str]) -> str:
        if value == self.program.loss:
            return "loss"
        if value in self.roles:
            return self.roles[value]
        if value in self.from_parameter:
            return self.from_parameter[value]
        if (tensor := self.program.value(value).tensor) in self.stored:  # an inner module hands out a weight
            return self.stored[tensor].rpartition(".")[2]
        kind = self._kind(value)
        for variable in dying:
            if variable in POOLS[kind] or (kind != "float" and self.kinds.get(variable) == kind):
                return variable
        hint = record(item.target).result_name if isinstance(item, Compute) else ""
        if hint and hint not in self.live:
            return hint
        return next((name for name in POOLS[kind] if name not in self.live), POOLS[kind][0])

    def _input_name(self, value: str) -> str:
        if value in self.state:
            return identifier(self.state[value].rpartition(".")[2], self.reserved)
        if value in self.roles:
            return self.roles[value]
        kind = self._kind(value)
        return next((name for name in POOLS[kind] if name not in self.live), POOLS[kind][0])

    def _kind(self, value: str) -> str:
        dtype = self.program.value(value).dtype
        return "bool" if dtype == "bool" else "int" if "int" in dtype else "float"

    def _free(self, wanted: str) -> str:
        return fresh(identifier(wanted, self.reserved), {*self.live, *self.reserved})

    def _bind(self, value: str, name: str) -> None:
        self.naming.names[value] = name
        self.kinds[name] = self._kind(value)
        if self.last.get(value, -1) >= 0 or value in self.definition.inputs:
            self.live[name] = value

    # --- loops ---

    def _loop(self, i: int, loop: Loop) -> None:
        """A carried argument and the result that replaces it share one variable; every turn reads the other arguments,
        so that no result may take theirs."""
        names, slots = self.naming.names, self.naming.carried
        carried = {r: a for a, r in loop.carried}
        for a, _ in loop.carried:
            value = loop.arguments[a]
            old = names.get(value)
            if old is None or self.last[value] > i:
                slots[i, a] = self._free(self._pool_name(value))
                self.naming.copies.setdefault(i, []).append((slots[i, a], value))
                self.live[slots[i, a]] = value
            else:
                slots[i, a] = old
        for r, result in enumerate(loop.results):
            if result is not None:
                self._bind(result, slots[i, carried[r]] if r in carried else self._free(self._pool_name(result)))
        for value in loop.arguments:
            if value in names and self.last[value] == i and self.live.get(names[value]) == value:
                self.live.pop(names[value])

    def _pool_name(self, value: str) -> str:
        kind = self._kind(value)
        return next((name for name in POOLS[kind] if name not in self.live), POOLS[kind][0])

    # --- roles: what a later operator calls the value ---

    def _find_roles(self) -> dict[str, str]:
        uses: dict[str, int] = {}
        for item in self.definition.body:
            for value in reads(item):
                uses[value] = uses.get(value, 0) + 1
        roles: dict[str, str] = {}
        for item in reversed(self.definition.body):
            if isinstance(item, ModuleCall | Loop):
                continue
            operands = operands_of(item)
            if isinstance(item, Compute):
                for operand, role in zip(operands, record(item.target).operand_names, strict=False):
                    if operand is not None and uses[operand] == 1:
                        roles[operand] = role
            moves = isinstance(item, Collective) or record(item.target).keeps_name
            found = [roles.get(result, "") for result in results_of(item)]
            if moves and found[0] and operands[0] is not None and uses[operands[0]] == 1:
                roles[operands[0]] = found[0]
            elif sorted(found) == ["k", "q", "v"] and operands[0] is not None:
                roles[operands[0]] = "qkv"
        return roles


def reads(item: Item) -> tuple[str, ...]:
    """The values an item of a body reads."""
    if isinstance(item, ModuleCall | Loop):
        return item.arguments
    return tuple(value for value in reads_of(item) if value is not None)
