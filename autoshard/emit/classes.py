"""Text of a definition of the module tree as one nn.Module class."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from autoshard.code_text import braced, fresh, identifier, printable, quoted
from autoshard.emit.code_lines import docstring, statement
from autoshard.emit.expressions import ExpressionWriter
from autoshard.emit.module_members import TAKEN, Members, access, container, members, unsaved
from autoshard.emit.nested_calls import OPERAND, nested_calls
from autoshard.emit.statements import Body
from autoshard.emit.variable_names import Naming, name_values
from autoshard.ir.layout import AxisShard, LocalSize
from autoshard.ir.program import Compute, LocalAttribute, LocalValue, Program, ProgramParameter
from autoshard.program.module_scopes import RANDOM, inside, relative
from autoshard.program.module_tree import Child, Definition, Loop, ModuleCall, ModuleTree
from autoshard.replay.other_sizes import OtherSizes, followed
from autoshard.replay.size_texts import size_texts
from autoshard.rules.operators import record


@dataclass(frozen=True)
class ClassContext:
    """Context shared by the classes of one package."""

    program: Program
    tree: ModuleTree
    reserved: frozenset[str]  # names that no variable may take
    state: dict[str, ProgramParameter]  # value -> parameter or buffer
    targets: dict[str, str]  # op -> the short name of its operator
    gathered: frozenset[str]  # weights of which autograd keeps what is stored
    casts: frozenset[str]  # weights in low precision that are moved
    title: str = ""  # what the root is
    others: OtherSizes = field(default_factory=OtherSizes)  # the same at other sizes: what differs there follows them

    @cached_property
    def buffers(self) -> frozenset[str]:
        return frozenset(buffer.value for buffer in self.program.buffers)

    @cached_property
    def counted(self) -> frozenset[str]:
        """The losses that count by their labels."""
        return frozenset(count.op for count in self.program.label_counts)

    @cached_property
    def other_attributes(self) -> list[dict[str, dict[str, LocalAttribute]]]:
        """Attributes by op, at each of the other sizes."""
        return [
            {step.op: dict(step.attributes) for step in other.instructions if isinstance(step, Compute)}
            for other in self.others.programs
        ]

    @cached_property
    def members(self) -> dict[str, Members]:
        """Definition -> what its class holds."""
        return {d.name: members(d, self.state, self.buffers) for d in self.tree.definitions}

    @cached_property
    def written(self) -> list[tuple[ClassWriter, list[str]]]:
        """Writer and lines of each definition's class, in order."""
        return _written(self)

    def needs_mesh(self, name: str) -> bool:
        """True where the class prepares anything: it holds members, talks to other devices, or draws numbers."""
        definition = self.tree.definition(name)
        if definition.parameters or definition.children or definition is self.tree.root:
            return True
        return any(self._talks(item) for item in definition.body)

    def _talks(self, item: object) -> bool:
        if not isinstance(item, Compute):
            return True
        created = record(item.target).takes_device
        uneven = any(not size.is_even(self.program.mesh) for _, value in item.attributes for size in _sizes(value))
        return bool(item.axes) or item.op in self.counted or item.variant in RANDOM or created or uneven

    def needs_path(self, name: str) -> bool:
        """True where the class or one inside holds parameters, whose names begin with the module's path."""
        definition = self.tree.definition(name)
        return bool(definition.parameters) or any(self.needs_path(child.definition) for child in definition.children)


def class_texts(package: ClassContext) -> list[list[str]]:
    """The lines of each class, in the order of the definitions."""
    return [lines for _, lines in package.written]


def operator_places(package: ClassContext) -> dict[str, tuple[str, int, str]]:
    """Op -> (class, line within it, from 0, and its text) of the statement that calls it, after its comments."""
    places = {}
    for writer, lines in package.written:
        for op, line in writer.places.items():
            while line + 1 < len(lines) and lines[line].lstrip().startswith("#"):
                line += 1
            places[op] = (writer.definition.name, line, lines[line])
    return places


def _written(package: ClassContext) -> list[tuple[ClassWriter, list[str]]]:
    called: dict[str, list[str]] = {}  # definition -> what its first caller calls the arguments
    texts: list[tuple[ClassWriter, list[str]]] = []
    for definition in reversed(package.tree.definitions):  # callers first
        writer = ClassWriter(package, definition, called.get(definition.name, []))
        texts.append((writer, writer.lines()))
        for item in definition.body:
            if isinstance(item, ModuleCall | Loop):
                names = [writer.naming.names.get(value, "") for value in item.arguments]
                called.setdefault(item.definition, names)
    return texts[::-1]


@dataclass
class ClassWriter:
    package: ClassContext
    definition: Definition
    called: list[str]  # names that a caller gives the inputs
    axes: set[tuple[str, ...]] = field(default_factory=set)  # used by forward; several names are joined
    sizes: dict[str, str] = field(default_factory=dict)  # expression -> attribute, computed once
    attribute_of: dict[tuple[str, str], str] = field(default_factory=dict)  # (kind, wanted name) -> attribute
    uses_random: bool = False
    uses_labels: bool = False
    uses_device: bool = False
    places: dict[str, int] = field(default_factory=dict)  # op -> the line that calls it, from the class on

    def __post_init__(self) -> None:
        program = self.package.program
        self.is_root = self.definition is self.package.tree.root
        self.members = self.package.members[self.definition.name]
        package = self.package
        self.by_input = size_texts(program, package.others, self.definition.inputs)
        self.speller = ExpressionWriter(self.size, self.ours("device"), program.schemas, self.by_input.text)
        self.buffers = self.package.buffers
        weights = self.package.gathered | self.package.casts
        self.nested = nested_calls(program, self.definition, weights, self._spelled)
        self.naming: Naming = name_values(
            program,
            self.definition,
            self.package.reserved | {*self.by_input.names.values()},
            self.is_root,
            self.called,
            self.nested,
        )

    def lines(self) -> list[str]:
        forward = self._forward()  # first: it finds out which axes and sizes __init__ prepares
        head = [f"class {self.definition.name}(nn.Module):", *docstring(self._describe(), 1), ""]
        init = self._init()
        head += [*init, ""] if init else []
        self.places = {op: len(head) + line for op, line in self.places.items()}
        return [*head, *forward]

    # --- attributes: the model's members, and ours, which take other names ---

    def access(self, path: str) -> str:
        return access(self.members, path, self._inside)

    def container(self, path: str) -> tuple[str, Members]:
        return container(self.members, path, self._inside)

    def _inside(self, child: Child) -> Members:
        return self.package.members[child.definition]

    def ours(self, name: str, kind: str = "") -> str:
        """`self.name`; one attribute for each name and kind."""
        if (kind, name) not in self.attribute_of:
            theirs = {*self.members.attributes().values(), self.members.numbers_name, *TAKEN}
            self.attribute_of[kind, name] = fresh(identifier(name, theirs), {*theirs, *self.attribute_of.values()})
        return f"self.{self.attribute_of[kind, name]}"

    def axis(self, *names: str) -> str:
        """The attribute that holds an axis, or several joined."""
        self.axes.add(names)
        return self.ours("_".join(names), kind=f"axes {' '.join(names)}")

    def size(self, size: LocalSize) -> str:
        """A local size: one integer where all devices agree, else an attribute that __init__ computes."""
        mesh = self.package.program.mesh
        if size.is_even(mesh):
            return str(size.largest(mesh))
        expression = size_expression(size, self.package.program)
        if expression not in self.sizes:
            count = sum(name.startswith(f"self.local_{size.size}") for name in self.sizes.values())
            name = f"local_{size.size}" + (f"_{count + 1}" if count else "")
            self.sizes[expression] = self.ours(name, kind="size")
        return self.sizes[expression]

    # --- sizes that follow the batch or the sequence ---

    def attributes(self, op: Compute) -> dict[str, LocalAttribute]:
        """Attributes of an operator, those that follow a size as SizeNumber."""
        package = self.package
        others = [attributes.get(op.op, {}) for attributes in package.other_attributes]
        return {
            name: followed([value, *(other.get(name, value) for other in others)], package.program.mesh, package.others)
            for name, value in op.attributes
        }

    def shape(self, value: LocalValue) -> LocalAttribute:
        """Global shape, written as `size` writes sizes."""
        others = self.package.others
        values = [value.shape, *(program.value(value.name).shape for program in others.programs)]
        return followed(values, self.package.program.mesh, others)

    def _spelled(self, op: Compute) -> str | None:
        """An operator's expression, its operands about as long as they will be. None for a list of one tensor."""
        attributes = self.attributes(op)
        if self.speller.assigned(op.target, op.operands, attributes, ["one"] * len(op.results)).startswith("("):
            return None
        names = [None if v is None else self._stored_name(v) or OPERAND for v in op.operands]
        return self.speller.spell(op.target, names, attributes)

    def _stored_name(self, value: str) -> str:
        state = self.package.state.get(value)
        scope = self.definition.path
        return f"local(self.{relative(state.path, scope)})" if state and inside(state.path, scope) else ""

    # --- class docstring ---

    def _describe(self) -> str:
        d = self.definition
        whole = f"The whole model{f', {printable(d.original_class)}' if d.original_class else ''}."
        where = self.package.title or whole
        if not self.is_root:
            times = f" and {d.instances - 1} more like it" if d.instances > 1 else ""
            where = f"{printable(d.original_class or 'Module')}: {printable(d.path)}{times}."
        values = [(self.naming.names[v], v) for v in d.inputs]
        rows = [f"{name}: {self._shape(v)}" for name, v in values]
        rows += [f"returns {self._shape(v)}" for v in self.outputs()]
        return "\n".join([where, "", *rows]) if rows else where

    def _shape(self, value: str) -> str:
        """Global shape, dtype and layout: `(8, 256, 768) float32, S0@dp R@tp`."""
        v = self.package.program.value(value)
        return f"{v.shape} {v.dtype}, {v.layout.on(self.package.program.mesh)}"

    def outputs(self) -> list[str]:
        """Outputs of the class; the root's have the loss first."""
        outputs, loss = list(self.definition.outputs), self.package.program.loss
        if self.is_root and loss in outputs:
            outputs.remove(loss)
            outputs.insert(0, loss)
        return outputs

    # --- __init__ ---

    def _init(self) -> list[str]:
        if not self.package.needs_mesh(self.definition.name):
            return []
        arguments = ["self", "mesh: ParallelMesh"]
        if not self.is_root:
            arguments += ["path: str"] if self.package.needs_path(self.definition.name) else []
            arguments += ["first_random: int"] if self.definition.random_base >= 0 else []
        body = ["super().__init__()"]
        axes = [(name,) for name in self.package.program.mesh.names if (name,) in self.axes]
        if axes:
            targets = ", ".join(self.axis(name) for (name,) in axes)
            body.append(f"{targets} = {', '.join(f'mesh[{quoted(name)}]' for (name,) in axes)}")
        for names in sorted(self.axes - set(axes)):
            body.append(f"{self.axis(*names)} = mesh.joint(({', '.join(map(quoted, names))}))")
        body += [f"{self.ours('random')} = mesh.random"] if self.uses_random else []
        body += [f"{self.ours('labels')} = mesh.labels"] if self.uses_labels else []
        if self.uses_random and not self.is_root and self.definition.random_base >= 0:
            body.append(f"{self.ours('first_random')} = first_random")
        body += [f"{self.speller.device} = mesh.device"] if self.uses_device else []
        body += [f"{name} = {expression}" for expression, name in self.sizes.items()]
        result = [*statement(f"def __init__({', '.join(arguments)}) -> None:", 1)]
        for line in body:
            result += statement(line, 2)
        for name, member in self.members.items.items():
            result += self._member(self.members.attributes()[name], member)
        if self.members.numbered is not None:
            result += self._member(self.members.numbers_name, self.members.numbered)
        return result

    def _member(self, attribute: str, member: Members | ProgramParameter | Child) -> list[str]:
        if isinstance(member, ProgramParameter) and member.value in self.buffers:
            persistent = "" if member.persistent else ", persistent=False"
            return statement(f"self.register_buffer({quoted(attribute)}, {self._stored(member)}{persistent})", 2)
        lines = statement(f"self.{attribute} = {self._built(member)}", 2)
        for holder, name, buffer in unsaved(member, f"self.{attribute}") if isinstance(member, Members) else ():
            call = f"{holder}.register_buffer({quoted(name)}, {self._stored(buffer)}, persistent=False)"
            lines += statement(call, 2)
        return lines

    def _built(self, member: Members | ProgramParameter | Child) -> str:
        """The expression that makes one member."""
        if isinstance(member, ProgramParameter):
            return self._stored(member)
        if isinstance(member, Child):
            return self._child(member)
        saved = {n: m for n, m in member.items.items() if not (isinstance(m, ProgramParameter) and not m.persistent)}
        if member.is_list:
            return f"nn.ModuleList([{', '.join(self._elements(list(member.items.values())))}])"
        if member.is_parameter_list:
            return f"nn.ParameterList([{', '.join(map(self._built, member.items.values()))}])"
        if member.is_dict:
            return f"nn.ModuleDict({{{', '.join(f'{quoted(n)}: {self._built(m)}' for n, m in saved.items())}}})"
        attributes = member.attributes()
        return f"Holder({', '.join(f'{attributes[n]}={self._built(m)}' for n, m in saved.items())})"

    def _elements(self, items: list[Members | ProgramParameter | Child]) -> list[str]:
        """The elements of a list: one by one, or a comprehension for equal ones in a row."""
        result: list[str] = []
        i = 0
        while i < len(items):
            count = self._equal_from(items[i:])
            first = items[i]
            if count > 1 and isinstance(first, Child):
                each = self._in_series(first, items[i + 1], i)
                series = f"{each} for i in range({f'{i}, ' if i else ''}{i + count})"
                result.append(series if count == len(items) else f"*({series})")
            else:
                result.append(self._built(first))
            i += max(count, 1)
        return result

    def _equal_from(self, items: list[Members | ProgramParameter | Child]) -> int:
        """Number of items from the first on with one class, and random numbers that grow steadily."""
        count = 0
        for i, item in enumerate(items):
            first, second = items[0], items[min(1, i)]
            if not (isinstance(item, Child) and isinstance(first, Child) and isinstance(second, Child)):
                break
            steady = item.random_index == first.random_index + i * (second.random_index - first.random_index)
            if item.definition != first.definition or not steady:
                break
            count += 1
        return count

    def _in_series(self, first: Child, second: Members | ProgramParameter | Child, number: int) -> str:
        assert isinstance(second, Child)
        step = second.random_index - first.random_index
        shift = first.random_index - number * step  # the number is shift + step * i
        growth = f"{step} * i" if step != 1 else "i"
        stem = first.path.rpartition(".")[0]
        return self._construct(replace(first, random_index=shift), self._name(stem, "{i}"), growth)

    def _child(self, child: Child) -> str:
        return self._construct(child, self._name(child.path))

    def _construct(self, child: Child, path: str, growth: str = "") -> str:
        """The constructor call; `growth` is added to the number of the first random operator."""
        inner = self.package.tree.definition(child.definition)
        arguments = ["mesh"] if self.package.needs_mesh(child.definition) else []
        if self.package.needs_path(child.definition):
            arguments.append(path)
        if inner.random_base >= 0:
            first = child.random_index + (self.definition.random_base if self.is_root else 0)
            terms = ["" if self.is_root else "first_random", str(first) if first else "", growth]
            arguments.append((" + ".join(filter(None, terms)) or "0").replace("+ -", "- "))
        return f"{child.definition}({', '.join(arguments)})"

    def _name(self, path: str, field: str = "") -> str:
        """The original name of what is held at `path`, or below it at what `field` stands for."""
        if self.is_root and not field:
            return quoted(path)
        return f'f"{".".join(filter(None, ("" if self.is_root else "{path}", braced(path), field)))}"'

    def _stored(self, p: ProgramParameter) -> str:
        """The call that makes a parameter or buffer in its storage layout, uninitialised."""
        path = relative(p.path, self.definition.path)
        arguments = [self._name(path), str(p.shape), quoted(str(p.split_layout)), "mesh"]
        arguments += [f"split_shape={p.split_shape}"] if p.split_shape != p.shape else []
        arguments += [f"dtype=torch.{p.dtype}"] if p.dtype != "float32" else []
        if p.ties:
            scope = self.definition.path
            ties = [self._name(relative(t, scope)) if inside(t, scope) else quoted(t) for t in p.ties]
            arguments.append(f"ties=({', '.join(ties)}{',' if len(ties) == 1 else ''})")
        is_buffer = p.value in self.buffers
        arguments += ["host=True"] if p.layout.host else []
        arguments += ["uneven=True"] if p.layout.in_parts else []
        arguments += ["trainable=False"] if not p.trainable and not is_buffer else []
        arguments += [f"init={ExpressionWriter(str, '').literal(p.init)}"] if p.init else []
        return f"{'shard_buffer' if is_buffer else 'shard_parameter'}({', '.join(arguments)})"

    # --- forward ---

    def _forward(self) -> list[str]:
        inputs = [f"{self.naming.names[v]}: Tensor" for v in self.definition.inputs]
        outputs = self.outputs()
        count = len(outputs)
        returned = "None" if not count else "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"
        lines = statement(f"def forward({', '.join(['self', *inputs])}) -> {returned}:", 1)
        body: list[str] = []
        self.by_input.used.clear()  # by what is written from here on
        for op, written in Body(self).items():
            if op:
                self.places[op] = len(lines) + len(body)
            body += written
        first = self._sizes_read()
        self.places = {op: line + len(first) for op, line in self.places.items()}
        body = [*first, *body]
        if self.definition.updates:
            body += statement("with torch.no_grad():", 2)
            for buffer, new in self.definition.updates:
                target = f"local({self.reference_to_state(buffer)})"
                view = f".view_as({target})" if self._is_split(buffer) else ""
                body += statement(f"{target}.copy_({self.operand(new)}{view})", 3)
        if outputs:
            body += statement(f"return {', '.join(map(self.operand, outputs))}", 2)
        return [*lines, *(body or ["        pass"])]

    def _sizes_read(self) -> list[str]:
        """Lines that read, off the inputs, the sizes that the code is written by."""
        lines = []
        for kind, size in self.by_input.inputs.items():
            if kind in self.by_input.used:
                read = f"{self.naming.names[size.value]}.shape[{size.dim}]"
                lines += statement(f"{self.by_input.names[kind]} = {read}", 2)
        return lines

    def _is_split(self, value: str) -> bool:
        stored = self.package.state[value]
        return stored.split_shape != stored.shape

    def reference_to_state(self, value: str) -> str:
        return self.access(relative(self.package.state[value].path, self.definition.path))

    def operand(self, value: str) -> str:
        """A variable, or the local part of a parameter or buffer that this module holds."""
        if value in self.naming.names:
            return self.naming.names[value]
        reference = self.reference_to_state(value)
        if not self._is_split(value):
            return f"local({reference})"
        sizes = self.package.program.value(value).local_shape
        return f"local({reference}, {self.speller.literal(sizes)})"


def _sizes(value: LocalAttribute) -> list[LocalSize]:
    if isinstance(value, tuple):
        return [size for item in value for size in _sizes(item)]
    return [value] if isinstance(value, LocalSize) else []


def size_expression(size: LocalSize, program: Program) -> str:
    """Expression for an uneven local size in __init__: nested shard_size, or by counting where that is not the same."""
    mesh = program.mesh
    text = str(size.size)
    for shard in size.shards:
        options = f", blocks={shard.blocks}" if shard.blocks != 1 else ""
        options += f", unit={shard.unit}" if shard.unit != 1 else ""
        text = f"shard_size({text}, mesh[{quoted(shard.axis)}]{options})"
    if len(size.shards) == 1 or all(shard.blocks == 1 for shard in size.shards):
        return text
    placements = {shard.axis: _cut_text(shard) for shard in size.shards}
    layout = " ".join(placements.get(axis, "R") for axis in mesh.names)
    return f"len(held_indices({size.size}, 0, {quoted(layout)}, mesh))"


def _cut_text(shard: AxisShard) -> str:
    blocks = f"/{shard.blocks}" if shard.blocks != 1 else ""
    return f"S0{blocks}" + (f"*{shard.unit}" if shard.unit != 1 else "")
