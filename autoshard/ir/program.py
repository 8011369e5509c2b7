"""The plan applied to the graph: what every device runs, as data. Emission, simulation and proof read only this.

A Program is SPMD: sizes are `LocalSize` expressions, never one rank's number. `instructions` is the forward in
execution order; the backward follows by autograd, each `Collective` bringing its own
backward (see `redistribute.collective_table`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from autoshard.ir.graph import Attribute, Derives
from autoshard.ir.layout import Layout, LocalSize, Placement
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Fusion, StepPlan

LocalAttribute = Attribute | LocalSize | tuple["LocalAttribute", ...]


@dataclass(frozen=True)
class LocalValue:
    """One local tensor. `shape` is global. `tensor` is the graph tensor it holds (several values may hold one).
    `variable`: what the model's code calls it, "" where it has no name."""

    name: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    local_shape: tuple[LocalSize, ...]
    requires_grad: bool
    variable: str = field(default="", compare=False)


@dataclass(frozen=True)
class Compute:
    """A local operator. `operands` and `results` are value names; `attributes` are already those of the shard.

    `variant` is "" or the name of a function of the runtime; `axes` then gives its axis names by role,
    e.g. (("vocabulary", ("tp",)), ("rows", ("dp",))). `regathered`: gathered weights that autograd does not keep for
    this operator; its backward first makes each again from what is stored. `host`: a look-up in a table (operand 0)
    that lies in host memory, and runs there; all else that it reads is sent there, and what it makes comes back.
    """

    op: str
    target: str
    operands: tuple[str | None, ...]
    attributes: tuple[tuple[str, LocalAttribute], ...]
    results: tuple[str, ...]
    module: str
    source: str
    strategy: str
    variant: str = ""
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    regathered: tuple[str, ...] = ()  # values, see `program.weights`
    host: bool = False


@dataclass(frozen=True)
class Collective:
    """One step of a redistribution, over one mesh axis or several at once: `before` -> `after`, a placement an axis.

    `forward` and `backward` are what it does to the value and to the gradient: an entry of the pair table, the same for
    all its axes, or what goes by index sets (`exchange`, `gather`, `pick`, `pad`: see `redistribute.collective_table`).

    By the table, for a sharded or a joined dim, `size` is the dim *without* these axes (sharded by the outer axes
    only), `blocks` the number of equal blocks that this local dim holds, each split by chunk_bounds over the joined
    axes in multiples of `unit`.
    An all-to-all has them twice: for the joined dim (`before.dim`) and the sharded one (`after.dim`).

    `regathered`: it gathers a weight for use; what autograd keeps is what is stored. `once`: it gathers a weight for
    all micro-batches of a step, in a bucket. `gradient_dtype`: the one in which the gradient is moved and summed, ""
    for the value's own. `early`: of what a linear reads; its backward starts as soon as that linear has made its part
    of the gradient, and is waited for after the gradients of the linear's weight and bias: see
    `program.early_reductions`. `reused`: a block that backward recomputes finds the result.
    """

    axes: tuple[str, ...]  # in mesh order
    before: tuple[Placement, ...]
    after: tuple[Placement, ...]
    forward: str
    backward: str
    operand: str
    result: str
    module: str
    reason: str
    joined: DimCut | None = None  # by the table: the dim of `before`, where that is a Shard
    cut: DimCut | None = None  # by the table: the dim of `after`, where that is a Shard
    regathered: bool = False
    gradient_dtype: str = ""
    once: bool = False
    early: bool = False
    reused: bool = False


@dataclass(frozen=True)
class DimCut:
    """How one axis, or several joined, shard dim `dim` of a local tensor: length `size` in `blocks` equal blocks, each
    in multiples of `unit`."""

    dim: int
    size: LocalSize
    blocks: int = 1
    unit: int = 1


@dataclass(frozen=True)
class ProgramParameter:
    """A parameter or buffer as each device stores it.

    `path` is its state-dict name, `ties` other names of the same tensor. `shape` is the original (global) shape; where
    `layout` says so, it lies in host memory with its gradient and optimizer state.
    `split_shape` is the shape it is held in: dims with blocked or unit shards are unflattened, so that `split_layout`
    has plain shards only, e.g. (2304, 768) with `S0/3*64` is held as (3, 12, 64, 768) with `S1`.
    """

    value: str
    path: str
    ties: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    split_shape: tuple[int, ...]
    split_layout: Layout
    trainable: bool
    init: tuple[str | float, ...] = ()
    persistent: bool = True  # a buffer of the state dict
    together: int | None = None  # gradients of one number are all-reduced together, of 0 alone; None: nothing is said


@dataclass(frozen=True)
class GradientBucket:
    """Parameters whose local gradients are partial over `axes` after backward and are all-reduced together, flat.

    The all-reduce starts once the backward of instruction `after` has run, which completes the last of the gradients,
    and is waited for before the optimizer. Buckets start in the order of the program, on all devices.
    """

    axes: tuple[str, ...]
    dtype: str
    parameters: tuple[str, ...]  # paths, in the order in which backward completes their gradients
    after: int = 0


@dataclass(frozen=True)
class WeightBucket:
    """Stored shards that are gathered together for use, by one flat all-gather of each in the dtype of its use, and
    whose gradients one flat reduce-scatter sums, in `dtype`.

    `gathers` are the positions of their collectives. The buckets of a block are gathered where the block before it
    comes into use, and waited for at the first of their collectives; in backward, for the weights that are gathered
    again, where the block after it does. The reduce-scatter starts with the last gradient of the bucket, and is waited
    for as the next block's starts, or at the end. `retained`: what is gathered in forward stays whole until backward
    has used it. `once`: it stays whole for all micro-batches of a step; under ZeRO 1 the whole gradients of all are
    added up, and scattered with the last.
    """

    axes: tuple[str, ...]
    dtype: str
    gathers: tuple[int, ...]
    block: int = 0  # numbered in the order of use
    retained: bool = False
    once: bool = False


@dataclass(frozen=True)
class LabelCount:
    """A loss, operator `op`, that is a mean over those labels `target` (a value) that are not `ignored`.

    `axes` shard the labels; `weights`: the path of a stored tensor of class weights, by which they count. In a step of
    several micro-batches its mean is over the labels of all of them.
    """

    op: str
    target: str
    ignored: int
    axes: tuple[str, ...]
    weights: str = ""


Instruction = Compute | Collective


@dataclass(frozen=True)
class Program(Derives):
    name: str
    mesh: Mesh
    values: tuple[LocalValue, ...]
    inputs: tuple[str, ...]  # value names, in the order of the model's inputs
    parameters: tuple[ProgramParameter, ...]
    buffers: tuple[ProgramParameter, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[str, ...]
    loss: str | None  # value name; its layout has `P` (seed gradient 1 on each) and `R` (seed 1) only
    buffer_updates: tuple[tuple[str, str], ...]  # (buffer value, new value), same layout
    gradient_buckets: tuple[GradientBucket, ...]
    modules: tuple[tuple[str, str], ...]  # module path -> original class name
    precision: str
    optimizer: str
    training: bool
    schemas: tuple[str, ...] = ()  # the graph's
    weight_buckets: tuple[WeightBucket, ...] = ()  # in the order of use
    step: StepPlan = field(default_factory=StepPlan)  # the program is one micro-batch of it
    label_counts: tuple[LabelCount, ...] = ()  # in order; of a step with one micro-batch none
    short_lived: tuple[tuple[str, ...], ...] = ()  # values of one storage each, see `program.short_lived`
    fusion: tuple[Fusion, ...] = ()  # the plan's: what its buckets were made by
    others: tuple[tuple[int, Program], ...] = ()  # place -> the whole program on the mesh that it has for itself

    def of_stage(self, stage: int) -> Program:
        """The whole program on the mesh of that stage, of which it runs its parts; one object for one mesh."""
        return next((program for place, program in self.others if place == stage), self)

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """Mesh of each stage."""
        return tuple(self.of_stage(stage).mesh for stage in range(self.step.stages))

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """First rank of each stage, then the number of all devices."""
        return tuple(sum(mesh.size for mesh in self.meshes[:stage]) for stage in range(len(self.meshes) + 1))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of values in the model's code."""
        return frozenset(value.variable for value in self.values if value.variable)

    @cached_property
    def by_name(self) -> dict[str, LocalValue]:
        return {value.name: value for value in self.values}

    @cached_property
    def largest(self) -> dict[str, LocalTensor]:
        """Each value on the device that holds most; one object for values of equal sizes, as `local_sizes` gives."""
        known: dict[tuple[int, str, bool], LocalTensor] = {}
        tensors = {}
        for value in self.values:
            key = id(value.local_shape), value.dtype, value.requires_grad
            if key not in known:
                shape = tuple(size.largest(self.mesh) for size in value.local_shape)
                known[key] = LocalTensor(shape, value.dtype, value.requires_grad)
            tensors[value.name] = known[key]
        return tensors

    @property
    def has_backward(self) -> bool:
        """True if this part computes the loss, or feeds a part that does."""
        return self.loss is not None or bool(self.step.parts)

    def value(self, name: str) -> LocalValue:
        return self.by_name[name]
