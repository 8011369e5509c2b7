"""A perceptron of many layers as (Graph, Program), by hand: data and tensor parallel, optionally with ZeRO-3 storage.

Layer i is y = relu(x W1^T + b1) W2^T, W1 (hidden, width) column-parallel and W2 (width, hidden) row-parallel over `tp`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard.ir.graph import Graph, Op, Parameter, Saved, Tensor
from autoshard.ir.layout import Layout, local_sizes, parse_placement
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import (
    Collective,
    Compute,
    Instruction,
    LocalValue,
    Program,
    ProgramParameter,
)
from autoshard.program.gradient_buckets import gradient_buckets
from autoshard.program.weights import with_gathers
from autoshard.redistribute import BACKWARD, FORWARD, kind


@dataclass
class _Builder:
    mesh: Mesh
    dtype: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, LocalValue] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    parameters: list[tuple[Parameter, ProgramParameter]] = field(default_factory=list)

    def value(self, name: str, tensor: str, layout: str) -> str:
        parsed, info = Layout.parse(layout), self.tensors[tensor]
        sizes = local_sizes(info.shape, parsed, self.mesh)
        self.values[name] = LocalValue(name, tensor, info.shape, info.dtype, parsed, sizes, info.requires_grad)
        return name

    def tensor(self, name: str, shape: tuple[int, ...], layout: str, grad: bool = True, dtype: str = "") -> str:
        self.tensors[name] = Tensor(name, shape, dtype or self.dtype, grad)
        return self.value(name, name, layout)

    def parameter(self, name: str, shape: tuple[int, ...], stored: str, entering: str) -> str:
        self.tensor(name, shape, entering)
        layout = Layout.parse(stored)
        held = ProgramParameter(name, name, (), shape, self.dtype, layout, shape, layout, True)
        self.parameters.append((Parameter(name, name), held))
        return name

    def op(self, target: str, operands: tuple[str | None, ...], result: str, saved: Saved) -> str:
        tensors = tuple(None if name is None else self.values[name].tensor for name in operands)
        self.ops.append(Op(result, target, tensors, (), (result,), "mlp", "", saved))
        self.instructions.append(Compute(result, target, operands, (), (result,), "mlp", "", ""))
        return result

    def move(self, operand: str, axis: str, after: str) -> str:
        value = self.values[operand]
        index = self.mesh.index(axis)
        placement = parse_placement(after)
        result = f"{operand}_{axis}"
        self.value(result, value.tensor, str(value.layout.replace(index, placement)))
        before = value.layout.placements[index]
        pair = kind(before), kind(placement)
        does = ((axis,), (before,), (placement,), FORWARD[pair], BACKWARD[pair])
        self.instructions.append(Collective(*does, operand, result, "mlp", "needed"))
        return result


def mlp(
    mesh: Mesh,
    rows: int,
    width: int,
    hidden: int,
    layers: int,
    zero: bool = False,
    dtype: str = "float32",
    loss: bool = True,
) -> tuple[Graph, Program]:
    """`mesh` has the axes dp and tp. `zero`: W1 is stored sharded over dp too, and gathered for its use."""
    b = _Builder(mesh, dtype)
    x = first = b.tensor("x", (rows, width), "S0 R", grad=False)
    for i in range(layers):
        b.parameter(f"w2_{i}", (width, hidden), "R S1", "R+ S1")
    for i in range(layers):
        b.parameter(f"b1_{i}", (hidden,), "R S0", "R+ S0")
    for i in range(layers):
        b.parameter(f"w1_{i}", (hidden, width), "S1 S0" if zero else "R S0", "S1 S0" if zero else "R+ S0")
    for i in range(layers):
        copied = b.move(x, "tp", "R+") if i else x
        weight = b.move(f"w1_{i}", "dp", "R+") if zero else f"w1_{i}"
        b.tensor(f"h{i}", (rows, hidden), "S0 S1")
        h = b.op("aten.linear", (copied, weight, f"b1_{i}"), f"h{i}", Saved(operands=(0, 1)))
        b.tensor(f"a{i}", (rows, hidden), "S0 S1")
        a = b.op("aten.relu", (h,), f"a{i}", Saved(results=(0,)))
        b.tensor(f"y{i}", (rows, width), "S0 P")
        y = b.op("aten.linear", (a, f"w2_{i}", None), f"y{i}", Saved(operands=(0, 1)))
        x = b.move(y, "tp", "R")
    b.tensor("loss", (), "P R")
    b.op("aten.sum", (x,), "loss", Saved())
    parameters = tuple(p for p, _ in b.parameters)
    graph = Graph(
        "mlp", tuple(b.tensors.values()), (first,), parameters, (), tuple(b.ops), ("loss",), "loss" if loss else None
    )
    stored = tuple(p for _, p in b.parameters)
    instructions = with_gathers(b.instructions, b.values, [p.value for p in stored], graph)
    buckets = gradient_buckets(stored, instructions, b.values, mesh, {}) if loss and mesh.axis_size("dp") > 1 else ()
    program = Program(
        "mlp", mesh, tuple(b.values.values()), (first,), stored, (), instructions,
        ("loss",), "loss" if loss else None, (), buckets, (), "fp32", "adamw", True,
    )  # fmt: skip
    return graph, program
