"""Programs built by hand, for tests of what reads a Program."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard.ir.layout import Layout, local_sizes, parse_placement
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import (
    Collective,
    Compute,
    DimCut,
    GradientBucket,
    Instruction,
    LocalAttribute,
    LocalValue,
    Program,
    ProgramParameter,
)
from autoshard.redistribute import BACKWARD, FORWARD, dim_cuts, kind
from autoshard.redistribute.exchanges import direct_steps
from autoshard.redistribute.steps import table_step


@dataclass
class Maker:
    """Collects values and instructions; layouts are text (`S0 R`). Every method returns the new value's name."""

    mesh: Mesh
    values: list[LocalValue] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    parameters: list[ProgramParameter] = field(default_factory=list)
    buffers: list[ProgramParameter] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    modules: list[tuple[str, str]] = field(default_factory=list)

    def value(self, name: str, shape: tuple[int, ...], layout: str, dtype: str = "float32", grad: bool = True) -> str:
        parsed = Layout.parse(layout)
        sizes = local_sizes(shape, parsed, self.mesh)
        self.values.append(LocalValue(name, name, shape, dtype, parsed, sizes, grad))
        return name

    def input(self, name: str, shape: tuple[int, ...], layout: str, dtype: str = "float32") -> str:
        self.inputs.append(self.value(name, shape, layout, dtype, False))
        return name

    def parameter(
        self,
        path: str,
        shape: tuple[int, ...],
        stored: str,
        used: str = "",
        ties: tuple[str, ...] = (),
        buffer: bool = False,
    ) -> str:
        """`stored` is its optimizer layout; `used` that of the value which enters (R+ where a bucket sums later)."""
        name = "p_" + path.replace(".", "_")
        self.value(name, shape, used or stored, grad=not buffer)
        split_shape, split_layout = split(shape, Layout.parse(stored))
        (self.buffers if buffer else self.parameters).append(
            ProgramParameter(
                name, path, ties, shape, "float32", Layout.parse(stored), split_shape, split_layout, not buffer,
                ("normal", 0.0, 0.02) if len(shape) > 1 else ("constant", 0.0),
            )
        )  # fmt: skip
        return name

    def compute(
        self,
        target: str,
        operands: tuple[str | None, ...],
        results: list[tuple[str, tuple[int, ...], str]],
        module: str = "",
        variant: str = "",
        axes: tuple[tuple[str, tuple[str, ...]], ...] = (),
        dtype: str = "float32",
        **attributes: LocalAttribute,
    ) -> str:
        """`results` are (name, shape, layout); the first name is returned."""
        names = tuple(self.value(name, shape, layout, dtype) for name, shape, layout in results)
        self.instructions.append(
            Compute(names[0], target, operands, tuple(attributes.items()), names, module, "", "", variant, axes)
        )
        return names[0]

    def collective(self, name: str, operand: str, axis: str, after: str, module: str = "", reason: str = "why") -> str:
        """Changes the placement of `axis`; even and unblocked dims only."""
        value = next(v for v in self.values if v.name == operand)
        index = self.mesh.index(axis)
        before, then = value.layout.placements[index], parse_placement(after)
        layout = value.layout.replace(index, then)
        self.value(name, value.shape, str(layout), value.dtype)
        sizes = local_sizes(value.shape, value.layout.replace(index, parse_placement("R")), self.mesh)
        joined = DimCut(before.dim, sizes[before.dim]) if hasattr(before, "dim") else None
        cut = DimCut(then.dim, sizes[then.dim]) if hasattr(then, "dim") else None
        pair = kind(before), kind(then)
        does = ((axis,), (before,), (then,), FORWARD.get(pair, ""), BACKWARD.get(pair, ""))
        self.instructions.append(Collective(*does, operand, name, module, reason, joined, cut))
        return name

    def move(self, name: str, operand: str, after: str, by_table: bool = False, regathered: bool = False) -> str:
        """One step over all axes that change: of the pair table, or an exchange."""
        value = next(v for v in self.values if v.name == operand)
        target = Layout.parse(after)
        pairs = enumerate(zip(value.layout.placements, target.placements, strict=True))
        axes = [a for a, (x, y) in pairs if x != y]
        (step,) = [table_step(axes, value.layout, target)] if by_table else direct_steps(value.layout, target, True)
        self.value(name, value.shape, after, value.dtype)
        joined, cut = dim_cuts(step, value.layout, value.shape, self.mesh)
        does = (tuple(self.mesh.names[a] for a in step.axes), step.before, step.after, step.forward, step.backward)
        self.instructions.append(Collective(*does, operand, name, "", "why", joined, cut, regathered))
        return name

    def program(
        self,
        outputs: tuple[str, ...],
        loss: str | None = None,
        updates: tuple[tuple[str, str], ...] = (),
        buckets: tuple[GradientBucket, ...] = (),
        name: str = "Model",
        optimizer: str = "adamw",
    ) -> Program:
        return Program(
            name, self.mesh, tuple(self.values), tuple(self.inputs), tuple(self.parameters), tuple(self.buffers),
            tuple(self.instructions), outputs, loss, updates, buckets, tuple(self.modules), "fp32", optimizer, True,
        )  # fmt: skip


def split(shape: tuple[int, ...], layout: Layout) -> tuple[tuple[int, ...], Layout]:
    """The split shape of plain shards is the shape itself."""
    assert all(getattr(p, "blocks", 1) == 1 and getattr(p, "unit", 1) == 1 for p in layout.placements)
    return shape, layout


def residual_model(
    blocks: int = 3, *, shared: bool = False, odd: int = -1, mesh: str = "tp=2", first: int = 0
) -> Program:
    """`blocks` residual blocks of two linears over a list, numbered from `first`; `odd` has a wider hidden layer; all
    add the same mask."""
    make = Maker(Mesh.parse(mesh))
    make.modules += [("", "Net"), ("h", "ModuleList"), ("norm", "LayerNorm")]
    x, mask = make.input("x", (4, 8), "R"), make.input("mask", (4, 8), "R")
    for number in range(blocks):
        path = "h.0" if shared else f"h.{first + number}"
        hidden = 32 if number == odd else 16
        make.modules += [(path, "Block"), (f"{path}.up", "Linear"), (f"{path}.down", "Linear")]
        known = {p.path: p.value for p in make.parameters}
        up = known.get(f"{path}.up.weight") or make.parameter(f"{path}.up.weight", (hidden, 8), "R")
        down = known.get(f"{path}.down.weight") or make.parameter(f"{path}.down.weight", (8, hidden), "R")
        a = make.compute("aten.linear", (x, up, None), [(f"linear_{2 * number}", (4, hidden), "R")], f"{path}.up")
        b = make.compute("aten.relu", (a,), [(f"relu_{number}", (4, hidden), "R")], path)
        c = make.compute("aten.linear", (b, down, None), [(f"linear_{2 * number + 1}", (4, 8), "R")], f"{path}.down")
        d = make.compute("aten.add", (x, c), [(f"add_{2 * number}", (4, 8), "R")], path, alpha=1)
        x = make.compute("aten.add", (d, mask), [(f"add_{2 * number + 1}", (4, 8), "R")], path, alpha=1)
    weight = make.parameter("norm.weight", (8,), "R")
    attributes = {"normalized_shape": (8,), "eps": 1e-5, "cudnn_enable": True}
    out = make.compute("aten.layer_norm", (x, weight, None), [("norm", (4, 8), "R")], "norm", **attributes)
    return make.program((out,))
