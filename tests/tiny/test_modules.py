"""Modules of the emitted code, and calls nested in statements."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.emit.nested_calls import nested_calls, with_brackets
from autoshard.emit.variable_names import Naming, name_values, reads
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.program.flatten import canonical, flatten
from autoshard.program.module_scopes import results_of
from autoshard.program.module_tree import Definition, Loop, ModuleCall, module_tree
from tests.programs import Maker, residual_model

# --- the module tree calls exactly the flat program, and has the structure a user would write ---


SHAPE = (4, 8)


def _op(make: Maker, target: str, operands: tuple[str, ...], module: str, **attributes: object) -> str:
    name = f"v{len(make.values)}"
    return make.compute(target, operands, [(name, SHAPE, "R")], module, **attributes)


class RandomProgram:
    """A random nesting of module templates, instantiated in lists, shared and re-entered, with tied parameters."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.make = Maker(Mesh.parse("tp=2"))
        self.alive = [self.make.input("x", SHAPE, "R"), self.make.input("y", SHAPE, "R")]
        self.dice = 0
        self.held: dict[str, str] = {}

    def build(self) -> Program:
        self.make.modules.append(("", "Model"))
        for number in range(self.random.randint(1, 3)):
            self.block(self.template(2), f"part{number}")
        outputs = tuple(self.random.sample(self.alive, k=min(len(self.alive), 2)))
        program = self.noise(self.make.program(outputs))
        new = [v for i in program.instructions for v in getattr(i, "results", ())]
        updates = tuple((b.value, self.random.choice(new)) for b in program.buffers if new)
        return replace(program, buffer_updates=updates)

    def template(self, depth: int) -> list[tuple[str, object]]:
        """Steps: a plain op, one with a parameter, a random op, an inner module, a list of inner modules."""
        kinds = ["op", "op", "weight", "buffer", "dropout", "recent", "collective", "tied"]
        kinds += ["inner", "list", "twice"] if depth else []
        steps: list[tuple[str, object]] = []
        for _ in range(self.random.randint(1, 5)):
            kind = self.random.choice(kinds)
            steps.append(
                (kind, self.template(depth - 1) if kind in ("inner", "list", "twice") else self.random.randint(0, 3))
            )
        return steps

    def block(self, steps: list[tuple[str, object]], path: str) -> None:
        if (path, "Sequential") not in self.make.modules and (path, f"C{len(steps)}") not in self.make.modules:
            self.make.modules.append((path, self.random.choice(["Sequential", f"C{len(steps)}", f"C{len(steps)}"])))
        for position, (kind, detail) in enumerate(steps):
            if isinstance(detail, int):
                self.step(kind, detail, f"{path}.s{position}", path)
            elif kind == "list":
                for number in range(self.random.randint(1, 4)):
                    self.block(detail, f"{path}.items{position}.{number}")
            else:
                for _ in range(2 if kind == "twice" else 1):
                    self.block(detail, f"{path}.inner{position}")

    def step(self, kind: str, detail: int, inner: str, path: str) -> None:
        x = self.alive[-1]
        make = self.make
        if kind in ("weight", "buffer"):
            if f"{inner}.weight" not in self.held:
                self.held[f"{inner}.weight"] = make.parameter(f"{inner}.weight", SHAPE, "R", buffer=kind == "buffer")
            self.alive.append(_op(make, "aten.mul", (x, self.held[f"{inner}.weight"]), inner))
        elif kind == "tied" and self.held:
            self.alive.append(_op(make, "aten.mul", (x, self.random.choice(list(self.held.values()))), path))
        elif kind == "dropout":
            self.dice += 1
            attributes = {"p": 0.1, "index": self.dice, "shape": SHAPE, "layout": "R"}
            self.alive.append(_op(make, "aten.dropout", (x,), path, variant="random_dropout", **attributes))
        elif kind == "collective":
            self.alive.append(make.collective(f"v{len(make.values)}", x, "tp", "R", path))
        else:
            other = self.alive[-1 - detail] if kind == "recent" and detail < len(self.alive) else x
            self.alive.append(_op(make, "aten.add", (x, other), path, alpha=detail))

    def noise(self, program: Program) -> Program:
        """Sometimes, instructions bear the module of something else, as a moved collective does."""
        instructions = list(program.instructions)
        for _ in range(self.random.choice([0, 0, 1, 3])):
            i, j = self.random.randrange(len(instructions)), self.random.randrange(len(instructions))
            instructions[i] = replace(instructions[i], module=instructions[j].module)
        return replace(program, instructions=tuple(instructions))


@given(st.integers(0, 10**9))
@settings(max_examples=300, deadline=None)
def test_calling_the_tree_runs_the_program(seed: int) -> None:
    program = RandomProgram(seed).build()
    tree = module_tree(program)
    assert flatten(program, tree) == canonical(program)
    assert module_tree(program) == tree
    owned = sorted(_paths(tree.root.name, "", tree))
    assert owned == sorted(p.path for p in (*program.parameters, *program.buffers))


@given(st.integers(0, 10**9), st.sampled_from([("",), ("", "x", "h"), ("h", "y", "weight", "self")]))
@settings(max_examples=300, deadline=None)
def test_every_read_finds_its_own_value_in_its_variable(seed: int, called: tuple[str, ...]) -> None:
    """`called`: what the model's own code calls its values."""
    program, source = RandomProgram(seed).build(), random.Random(seed)
    values = tuple(replace(value, variable=source.choice(called)) for value in program.values)
    program = replace(program, values=values)
    tree = module_tree(program)
    for definition in tree.definitions:
        nested = nested_calls(program, definition, frozenset(), lambda op: f"function_of({len(op.operands)})")
        naming = name_values(program, definition, frozenset({"self"}), definition is tree.root, (), nested)
        _check_names(definition, naming, nested)


def _check_names(definition: Definition, naming: Naming, nested: dict[int, int]) -> None:
    """By what each variable holds after each statement."""
    names = naming.names
    holds = {names[value]: value for value in definition.inputs}
    late: dict[int, list[str]] = {}  # statement -> what is read by those written within it
    for i, item in enumerate(definition.body):
        inputs = list(item.arguments if isinstance(item, Loop | ModuleCall) else reads(item))
        if i in nested:
            late.setdefault(nested[i], []).extend(inputs)
            continue
        for new, value in naming.copies.get(i, []):
            assert holds[names[value]] == value
            holds[new] = value
        read = {a: naming.carried.get((i, a)) or names.get(value) for a, value in enumerate(inputs)}
        assert all(variable is None or holds[variable] == inputs[a] for a, variable in read.items())
        assert all(value not in names or holds[names[value]] == value for value in late.get(i, []))
        results = item.results if isinstance(item, Loop | ModuleCall) else results_of(item)
        holds |= {names[value]: value for value in results if value is not None and names[value] != "_"}
        if isinstance(item, Loop):  # the next turn reads again what is not carried
            reread = {a: variable for a, variable in read.items() if (i, a) not in naming.carried}
            assert all(variable is None or holds[variable] == inputs[a] for a, variable in reread.items())
    ends = [*definition.outputs, *(new for _, new in definition.updates)]
    assert all(holds[names[value]] == value for value in ends if value in names)


def _paths(name: str, path: str, tree) -> list[str]:  # type: ignore[no-untyped-def]
    definition = tree.definition(name)
    paths = [f"{path}{p}" for p, _ in definition.parameters]
    for child in definition.children:
        paths += _paths(child.definition, f"{path}{child.path}.", tree)
    return paths


def test_equal_blocks_share_one_class_and_become_a_loop() -> None:
    tree = module_tree(residual_model(4))
    assert [d.name for d in tree.definitions] == ["Block", "Net"]
    loop, norm = tree.root.body
    assert isinstance(loop, Loop)
    assert loop.paths == ("h.0", "h.1", "h.2", "h.3")
    assert loop.arguments == ("x", "mask") and loop.carried == ((0, 0),)
    assert norm.target == "aten.layer_norm"  # type: ignore[union-attr]
    assert tree.definition("Block").instances == 4


def test_a_different_block_gets_its_own_class_and_splits_the_loop() -> None:
    tree = module_tree(residual_model(5, odd=2))
    assert [d.name for d in tree.definitions] == ["Block", "Block2", "Net"]
    assert [item.paths if isinstance(item, Loop) else item.path for item in tree.root.body[:-1]] == [  # type: ignore[union-attr]
        ("h.0", "h.1"),
        "h.2",
        ("h.3", "h.4"),
    ]


def test_a_module_called_twice_is_one_child() -> None:
    tree = module_tree(residual_model(2, shared=True))
    calls = [item for item in tree.root.body if isinstance(item, ModuleCall)]
    assert [call.path for call in calls] in (["h.0", "h.0"], ["h.0"])  # in a row: one visit, or two
    assert len(tree.root.children) == 1


def test_an_intermediate_result_that_is_returned_prevents_the_loop() -> None:
    program = residual_model(3)
    tree = module_tree(replace(program, outputs=("norm", "add_1")))
    calls = tree.root.body[:-1]
    assert isinstance(calls[0], ModuleCall) and isinstance(calls[1], Loop)
    assert flatten(replace(program, outputs=("norm", "add_1")), tree).outputs == ("%15", "%4")


def test_a_stray_instruction_moves_to_the_parent_and_leaves_the_block_whole() -> None:
    program = residual_model(3)
    first = replace(program.instructions[0], module="h.2")
    tree = module_tree(replace(program, instructions=(first, *program.instructions[1:])))
    assert "h.2" in [child.path for child in tree.root.children]


@pytest.mark.parametrize("reserved", [frozenset({"Block"}), frozenset({"Net", "Block"})])
def test_reserved_names_are_avoided(reserved: frozenset[str]) -> None:
    assert not {d.name for d in module_tree(residual_model(2), reserved).definitions} & reserved


# --- statements that take in what the model's code does not name, and the brackets that keep them what they were ---


@pytest.mark.parametrize(
    ("outer", "inner", "wanted"),
    [
        ("a + b", {"a": "x + y", "b": "z"}, "x + y + z"),
        ("a + b", {"a": "x", "b": "y + z"}, "x + (y + z)"),  # sums of floats are not associative
        ("a + b", {"a": "x * y", "b": "z / w"}, "x * y + z / w"),
        ("a * b", {"a": "x + y", "b": "z - w"}, "(x + y) * (z - w)"),
        ("a * b", {"a": "x * y", "b": "z * w"}, "x * y * (z * w)"),
        ("a @ b", {"a": "x @ y", "b": "-z"}, "x @ y @ (-z)"),
        ("a**2", {"a": "x * y"}, "(x * y)**2"),
        ("a**2", {"a": "-x"}, "(-x)**2"),
        ("a**b", {"a": "x**y", "b": "z"}, "(x**y)**z"),
        ("a | b", {"a": "x & y", "b": "z"}, "(x & y) | z"),
        ("-a", {"a": "x + y"}, "-(x + y)"),
        ("a.reshape(4, b)", {"a": "x + y", "b": "z + w"}, "(x + y).reshape(4, z + w)"),
        ("a[:, 1:]", {"a": "x + y"}, "(x + y)[:, 1:]"),
        ("F.linear(a, b)", {"a": "x * y", "b": "-z"}, "F.linear(x * y, -z)"),
        ("a > b", {"a": "x > y", "b": "z"}, "(x > y) > z"),
        ("ä + a", {"a": "x * y"}, "ä + x * y"),
    ],
)
def test_brackets(outer: str, inner: dict[str, str], wanted: str) -> None:
    bracketed = with_brackets(outer, inner)
    assert bracketed == wanted
    names = {"x": 3.5, "y": 5.25, "z": 7.0, "w": 11.0}
    if not any(part in outer for part in "@F[|ä") and "reshape" not in outer:
        values = {name: eval(text, {}, names) for name, text in inner.items()}
        assert eval(bracketed, {}, names) == eval(outer, {}, {**names, **values})
