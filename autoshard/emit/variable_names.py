"""Short variable names: a value takes the name of the operand that ends with it (`x = F.relu(x)`), else a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import MappingProxyType

from autoshard.code_text import fresh, identifier
from autoshard.ir.program import Collective, Compute, Program
from autoshard.program.early_reductions import ColumnParallel
from autoshard.program.module_scopes import operands_of, reads_of, results_of
from autoshard.program.module_tree import Definition, Item, Loop, ModuleCall
from autoshard.rules.algebra.operator_record import Work
from autoshard.rules.operators import record

POOLS = {"float": ("x", "y", "z", "u", "w"), "int": ("index", "positions"), "bool": ("condition",)}


@dataclass
class Naming:
    """`names`: value -> variable ("_" if nothing reads it). `carried`: (item position, argument) of a loop -> the
    variable that an iteration passes to the next. `copies`: item position -> (new, old) assignments that must come
    before it, because a loop would overwrite a variable that is still needed."""

    names: dict[str, str] = field(default_factory=dict)
    carried: dict[tuple[int, int], str] = field(default_factory=dict)
    copies: dict[int, list[tuple[str, str]]] = field(default_factory=dict)


def name_values(
    program: Program,
    definition: Definition,
    reserved: frozenset[str],
    is_root: bool,
    called: Sequence[str] = (),
    nested: Mapping[int, int] = MappingProxyType({}),
) -> Naming:
    """`called`: a caller's names of the inputs. `nested`: statements inside a later one, which have no variable.

    The root's inputs keep the names of the original model; the inputs of a pipeline part have none there.
    """
    names = ["" if program.value(value).requires_grad else value for value in definition.inputs]
    namer = _Namer(program, definition, reserved, nested)
    return namer.run(names if is_root else called, is_root)


class _Namer:
    def __init__(
        self, program: Program, definition: Definition, reserved: frozenset[str], nested: Mapping[int, int]
    ) -> None:
        self.program, self.definition, self.reserved, self.nested = program, definition, reserved, nested
        self.state = {p.value: p.path for p in (*program.parameters, *program.buffers)}
        self.stored = {program.value(value).tensor: path for value, path in self.state.items()}
        self.last: dict[str, int] = {}
        for i, item in enumerate(definition.body):
            self.last.update(dict.fromkeys(reads(item), nested.get(i, i)))
        ends = [*definition.outputs, *(new for _, new in definition.updates)]
        self.last.update(dict.fromkeys(ends, len(definition.body)))
        self.variables = program.variables
        self.roles = self._find_roles()
        self.loops = self._find_loops()
        self.ahead = self._find_ahead()
        self.naming = Naming()
        self.live: dict[str, str] = {}  # variable -> the value it holds
        self.kinds: dict[str, str] = {}  # variable -> kind of what it holds or held
        self.from_parameter: dict[str, str] = {}  # value -> the parameter's own name
        self.state_names = {identifier(path.rpartition(".")[2], reserved) for path in self.state.values()}
        self.within: dict[str, str] = {}  # value that has no variable -> what the model's code calls it

    def run(self, called: Sequence[str], is_root: bool) -> Naming:
        for value, name in zip_longest(self.definition.inputs, called, fillvalue=""):
            theirs = name in self.variables or not self._variable(value)
            better = value in self.roles and not self._variable(value) and not is_root
            plain = name in ("", *POOLS["float"]) or not theirs or better
            wanted = self._input_name(value) if plain else name
            self._bind(value, self._free(wanted))
            if value in self.state:
                self.from_parameter[value] = self.naming.names[value]
        for i, item in enumerate(self.definition.body):
            if isinstance(item, Loop):
                self._loop(i, item)
            elif isinstance(item, ModuleCall):
                self._results(i, [v for v in item.results if v is not None], reads(item), called=item.path)
            else:
                self._results(i, list(results_of(item)), reads(item), item)
        return self.naming

    # --- choosing ---

    def _results(
        self,
        i: int,
        results: list[str],
        operands: tuple[str, ...],
        item: Compute | Collective | None = None,
        called: str = "",
    ) -> None:
        names = self.naming.names
        dying = [names[v] for v in operands if v in names and self.last[v] == i]
        dying += [n for n, v in self.live.items() if self.last.get(v, i + 1) == i and n not in dying]
        after = {names[v] for v in item.regathered if v in names} if isinstance(item, Compute) else set()
        dying, ended = [n for n in dying if n not in after], [n for n in dying if n in after]
        for variable in dying:
            self.live.pop(variable, None)
        inherited = self._inherited(item, operands)
        if i in self.nested:
            self.within |= {value: self.program.value(value).variable for value in results}
            return
        for value in results:
            if self.last.get(value, -1) <= i:
                names[value] = "_"
                continue
            if inherited:
                self.from_parameter[value] = inherited
            moved = isinstance(item, ColumnParallel) and value != _main_result(item, results)
            source = names.get(operands[0], "") if moved else ""
            wanted = source or self._of_call(value, called, dying) if len(results) == 1 else source
            wanted = wanted or self._wanted(value, item, dying if len(results) == 1 else [])
            self._bind(value, self._free(wanted))
        for variable in ended:  # `regather_before`, after the results, reads them
            self.live.pop(variable, None)

    def _inherited(self, item: Compute | Collective | None, operands: tuple[str, ...]) -> str:
        """The parameter's name, for a parameter that is only redistributed or cast."""
        if item is None or not (isinstance(item, Collective) or record(item.target).keeps_name) or not operands:
            return ""
        source = operands[0]
        if source in self.state and source not in self.naming.names:
            return identifier(self.state[source].rpartition(".")[2], self.reserved)
        return self.from_parameter.get(source, "")

    def _wanted(self, value: str, item: Compute | Collective | None, dying: list[str]) -> str:
        if value == self.program.loss:
            return "loss"
        if value in self.from_parameter:
            return self.from_parameter[value]
        if (tensor := self.program.value(value).tensor) in self.stored:  # an inner module hands out a weight
            return self.stored[tensor].rpartition(".")[2]
        called = self._called(value, item)
        assigned = self.ahead[value] if value in self.ahead else called or self._only_within(item)
        if assigned and assigned not in self.live:
            return assigned
        if value in self.roles:
            return self.roles[value]
        kind = self._kind(value)
        if len(dying) == 1 and self.kinds.get(dying[0]) == kind and dying[0] not in self.state_names:
            return dying[0]
        for name in (called, self._inner_module(item)):
            if name and name not in self.live and value not in self.loops:
                return name
        for variable in dying:
            if variable in POOLS[kind] or (kind != "float" and self.kinds.get(variable) == kind):
                return variable
        hint = record(item.target).result_name if isinstance(item, Compute) else ""
        if hint and hint not in self.live:
            return hint
        return next((name for name in POOLS[kind] if name not in self.live), POOLS[kind][0])

    def _called(self, value: str, item: Compute | Collective | None) -> str:
        """The class's name for an argument that is moved: the model's name is that of the first of many blocks,
        `inputs_embeds` in each layer."""
        moved = item.operand if isinstance(item, Collective) and value not in self.loops else ""
        argument = self.naming.names.get(moved, "") if moved in self.definition.inputs else ""
        return argument if argument not in ("", *POOLS[self._kind(value)]) else self._variable(value)

    def _of_call(self, value: str, called: str, dying: Sequence[str]) -> str:
        """The class's name of the child that makes it, if the model's own name is taken and the argument's would be
        misleading: `mlp = self.mlp(post_attention_layernorm)`."""
        parts = [part for part in called.split(".") if part and not part.isdecimal()]
        label = self._variable(value)
        taken = value not in self.ahead and value not in self.roles and value not in self.loops and label in self.live
        near = {*POOLS["float"], label, *(name for name in dying if parts and parts[-1] in name)}  # mlp_output, of mlp
        name = identifier(parts[-1], self.reserved) if parts and taken and near.isdisjoint(dying) else ""
        return name if name not in self.live else ""

    def _input_name(self, value: str) -> str:
        if value in self.state:
            return identifier(self.state[value].rpartition(".")[2], self.reserved)
        return self._variable(value) or self.roles.get(value) or self._pool_name(value)

    def _variable(self, value: str) -> str:
        """Name in the model's code, or the one that a loop assigns."""
        name = self.loops.get(value) or self.program.value(value).variable
        return identifier(name, self.reserved) if name else ""

    def _only_within(self, item: Compute | Collective | None) -> str:
        """Name of the statement's only operand, if the statement computes it on its way."""
        operands = [value for value in operands_of(item) if value] if item is not None else []
        return self.within.get(operands[0], "") if len(operands) == 1 else ""

    def _inner_module(self, item: Compute | Collective | None) -> str:
        """The class's name for the part that makes it, if the part has no class of its own."""
        inside = isinstance(item, Compute) and item.module != self.definition.path and not self._is_view(item)
        parts = [part for part in item.module.split(".") if not part.isdecimal()] if item and inside else []
        return identifier(parts[-1], self.reserved) if parts else ""

    def _is_view(self, item: Compute) -> bool:
        return record(item.target).work is Work.VIEW

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
        """Names a loop's variables: a carried argument and the result that replaces it share one; every iteration reads
        the other arguments, so that no result may take theirs."""
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

    def _find_loops(self) -> dict[str, str]:
        """Value that a loop carries and nothing reads after it -> the model code's name of an iteration's result."""
        variables = {}
        loops = [(i, item) for i, item in enumerate(self.definition.body) if isinstance(item, Loop)]
        for i, item in loops:
            for a, r in item.carried:
                result = item.results[r]
                if result is not None and self.last.get(item.arguments[a]) == i:
                    variables[item.arguments[a]] = self.program.value(result).variable
        return variables

    def _find_ahead(self) -> dict[str, str]:
        """Value that a statement of the model's code computes on its way -> the name which that statement assigns.

        Under the name of the final result, it is freed as soon as that is there.
        """
        ahead: dict[str, str] = {}
        uses = self._uses()
        for item in reversed(self.definition.body):
            if isinstance(item, ModuleCall | Loop):
                continue
            result = _main_result(item, results_of(item))
            passing = ahead.get(result, "") if self._is_passing(item) else self._variable(result)
            called = record(item.target).operand_names if isinstance(item, Compute) else ()
            for operand in operands_of(item)[len(called) :]:  # logits and labels are no loss
                if operand is not None and passing and uses[operand] == 1 and len(results_of(item)) == 1:
                    ahead[operand] = passing
        makers = {
            _main_result(i, results_of(i)): i for i in self.definition.body if not isinstance(i, ModuleCall | Loop)
        }
        return {value: name for value, name in ahead.items() if value in makers and self._is_passing(makers[value])}

    def _is_passing(self, item: Compute | Collective) -> bool:
        variable = self._variable(_main_result(item, results_of(item)))
        return isinstance(item, Compute) and variable in ("", item.module.rpartition(".")[2])

    # --- roles: what a later operator calls the value ---

    def _uses(self) -> dict[str, int]:
        uses: dict[str, int] = {}
        for item in self.definition.body:
            for value in reads(item):
                uses[value] = uses.get(value, 0) + 1
        return uses

    def _find_roles(self) -> dict[str, str]:
        uses = self._uses()
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
            result_roles = [roles.get(result, "") for result in results_of(item)]
            if moves and result_roles[0] and operands[0] is not None and uses[operands[0]] == 1:
                roles[operands[0]] = result_roles[0]
            elif sorted(result_roles) == ["key", "query", "value"] and operands[0] is not None:
                roles[operands[0]] = "qkv"
        return roles


def _main_result(item: Compute | Collective | None, results: Sequence[str]) -> str:
    """The operator's own result: a column-parallel linear returns its moved input before it."""
    return results[-1 if isinstance(item, ColumnParallel) else 0] if results else ""


def reads(item: Item) -> tuple[str, ...]:
    """The values an item of a body reads."""
    if isinstance(item, ModuleCall | Loop):
        return item.arguments
    return tuple(value for value in reads_of(item) if value is not None)
