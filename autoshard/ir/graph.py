"""The captured forward graph: frozen data, no torch. Shapes are of the *global* batch.

An op names its tensor operands apart from its other arguments:
`operands` are the tensor-typed schema arguments in schema order (lists flattened; `None` = optional one not given);
`attributes` are the other schema arguments by name, all of them, defaults filled in.
A Python scalar in a tensor-typed slot is an attribute of that slot's name, and takes no operand slot.
Where an op has several lists of tensors, the length of each but the last is an attribute of its slot's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Self, TypeVar, cast

from autoshard.ir.dynamic import DynamicSize, Follows

T = TypeVar("T")
SCHEMA_VERSION = 2
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1,
}  # fmt: skip

CAST = "aten.to"
FUSION = "comm_fusion"  # a module request: its gradients are all-reduced with those of equal number, 0 each alone
SAME = "same"  # in evaluation, but for dropout
PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed", "fp8-mixed")
OPTIMIZERS = ("adamw", "sgd")

Attribute = int | float | bool | str | None | tuple["Attribute", ...]
# Namespaces that importing torch registers, and ours.
OWN_NAMESPACES = frozenset({
    "aten", "autoshard", "prim", "prims", "inductor_prims", "rngprims", "debugprims", "quantized", "_quantized",
    "quantization", "static_runtime", "onednn", "mkl", "mkldnn", "mkldnn_prepacked", "sparse", "inductor", "profiler",
    "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "fsdp", "pippy", "_dtensor",
    "export", "onnx", "onnx_symbolic", "streams", "flex_lib", "debug_mode_ops", "higher_order", "_native", "_test",
    "_inductor_test",
})  # fmt: skip


class GraphFault(ValueError):
    """An invariant that a graph breaks. No assertion: a damaged file is found under `python -O` too."""


def require(holds: object, fault: str) -> None:
    """GraphFault where that does not hold."""
    if not holds:
        raise GraphFault(fault)


@dataclass(frozen=True)
class Tensor:
    """One value of the graph. `requires_grad`: autograd computes its gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        result = 1
        for size in self.shape:
            result *= size
        return result

    @property
    def bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Saved:
    """Values that autograd keeps of an op until its backward: operand positions, result positions, and extra bytes
    (global size, as of a dropout mask or a logsumexp). `aliases` gives (result, operand) pairs that share storage."""

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    extra_bytes: int = 0
    aliases: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Op:
    """An operator that a user wrote. `target` is `aten.linear` (overload dropped), `module` a dotted module path."""

    name: str
    target: str
    operands: tuple[str | None, ...]
    attributes: tuple[tuple[str, Attribute], ...]
    results: tuple[str, ...]
    module: str = ""
    source: str = ""
    saved: Saved = Saved()

    def attribute(self, name: str) -> Attribute:
        """The named attribute; KeyError names the op and what it has."""
        for key, value in self.attributes:
            if key == name:
                return value
        raise KeyError(f"{self.name} ({self.target}) has no attribute {name!r}, only {[k for k, _ in self.attributes]}")


@dataclass(frozen=True)
class Parameter:
    """A parameter (or buffer) tensor. `path` is its state-dict name, `ties` the other names of the same tensor.

    `init` is how the model initialises it, e.g. ("normal", 0.0, 0.02), ("uniform", -a, a), ("constant", 1.0),
    or () where that is not known.
    """

    tensor: str
    path: str
    ties: tuple[str, ...] = ()
    trainable: bool = True
    persistent: bool = True
    init: tuple[str | float, ...] = ()


@dataclass(frozen=True)
class RecipeCall:
    """One call of a recipe: `aten.NAME.OVERLOAD` with its arguments, a string each for tensors, dtypes and words.

    `%2` is the result of call 2, `%2.1` its second; `torch.int64` a dtype. `values` and `packed` (dtype, shape,
    numbers, or zlib in base64) are numbers as they are; `result` ends a recipe whose result is not its last call's.
    """

    target: str
    arguments: tuple[Attribute, ...]
    keywords: tuple[tuple[str, Attribute], ...] = ()


@dataclass(frozen=True)
class Recipe:
    """How the constructor makes the tensors of these state-dict names, where `init` can't say it."""

    paths: tuple[str, ...]
    calls: tuple[RecipeCall, ...]


@dataclass(frozen=True)
class Registration:
    """Python code that registers operators which torch lacks. `targets` are theirs (`namespace.name`).

    `module` is imported by name, or, where `text` is given, is the name of a file with that text; "" where unknown.
    """

    module: str
    targets: tuple[str, ...]
    text: str = ""


@dataclass(frozen=True)
class InputRange:
    """Numbers of an example input: integers in [low, high), or fractions in [low, high]."""

    tensor: str
    low: float
    high: float


@dataclass(frozen=True)
class ColumnRanges:
    """[low, high) of the integers of an example input in each place of its last dim, where the places mean different
    things: the categories of a table, the edges of a box."""

    tensor: str
    bounds: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Following:
    """Numbers that grow by `slope`, a fraction as text ("1", "3/2"), with each unit of a size of the inputs.

    `places`: "tensor dim", or "op argument" and where in it, all with a space between.
    """

    slope: str
    places: tuple[str, ...]


@dataclass(frozen=True)
class FreeSize:
    """A size of the inputs ("batch", "sequence"). `fixed`: why it can't change, or "" where the model, captured with
    `least` and with `most`, is the same graph carried there: the sequence by `follows`, the batch by the rules."""

    name: str
    fixed: str
    least: int
    most: int
    follows: tuple[Following, ...] = ()


class Derives:
    """Something frozen, of which much is derived."""

    def once(self, derive: Callable[[Self], T]) -> T:
        """Result of `derive(self)`, computed once."""
        if derive not in self._derived:
            self._derived[derive] = derive(self)
        return cast(T, self._derived[derive])

    @cached_property
    def _derived(self) -> dict[object, object]:
        return {}


@dataclass(frozen=True)
class Graph(Derives):
    """A captured model. `ops` are in execution order. `loss` is the scalar to differentiate, or None (inference).

    `buffer_updates` are (buffer tensor, value tensor) pairs to write back after the forward.
    `modules` maps module path -> original class name. `source` is what the user named (`file.py:callable`).
    `assumed` are sentences on guards of the forward whose usual answer was taken (`model.py:12 `…` is False`), and on
    options that count for nothing.
    `discovered` are (op name, rule text) pairs for operators that the table of rules lacks; "" where it has a rule, of
    another overload, and none was found.
    `registrations` say where operators that are not torch's come from. `recipes` make what a constructor computes.
    `input_ranges` and `column_ranges` are those that synthetic inputs must keep to, where the ops alone don't tell.
    `manual_splits`: (table, lengths), into which its rows may be sharded, one a device.
    `schemas` are those of the overloads that the ops mean, as torch prints them.
    `strategies` are (op name, how) pairs that the model's own code asks for, as pins say it. `module_requests` are
    (module path, what) pairs of its modules: "stage:1", "recompute", "comm_fusion:2", and of the whole
    "micro_batches:8".
    `variables` are (tensor, name) pairs: what the model's code calls the values, where it has a name for them.
    `call`: how the model is called with `inputs` and returns `outputs`, as JSON text; "" where that is not known. It is
    no part of what a plan is made for.
    `unread_draws`: of the forward's random operators, in order, the positions of those that nothing reads and that are
    no ops here.
    `free_sizes`: what capture tried of sizes of the inputs, no part of what a plan is made for, either.
    `evaluation`: SAME where `model.eval()` computes the forward of training without dropout, else in words where not;
    "" where that is not known.
    `widened`: values that the forward itself casts to float32, until `apply_precision` has.
    `dynamic`: sizes of the inputs that change from step to step; the graph is at the largest. `follows`: the numbers
    that follow them.
    """

    name: str
    tensors: tuple[Tensor, ...]
    inputs: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Parameter, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    loss: str | None
    buffer_updates: tuple[tuple[str, str], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    source: str = ""
    precision: str = "fp32"
    optimizer: str = "adamw"
    training: bool = True
    discovered: tuple[tuple[str, str], ...] = ()
    manual_splits: tuple[tuple[str, tuple[int, ...]], ...] = ()
    registrations: tuple[Registration, ...] = ()
    recipes: tuple[Recipe, ...] = ()
    schemas: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    input_ranges: tuple[InputRange, ...] = ()
    column_ranges: tuple[ColumnRanges, ...] = ()
    strategies: tuple[tuple[str, str], ...] = ()
    module_requests: tuple[tuple[str, str], ...] = ()
    call: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    free_sizes: tuple[FreeSize, ...] = ()
    unread_draws: tuple[int, ...] = ()
    evaluation: str = ""
    widened: tuple[str, ...] = ()
    dynamic: tuple[DynamicSize, ...] = ()
    follows: tuple[Follows, ...] = ()

    @cached_property
    def rule_of(self) -> dict[str, str]:
        """Op name -> discovered rule."""
        return dict(self.discovered)

    @cached_property
    def by_name(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    def tensor(self, name: str) -> Tensor:
        return self.by_name[name]

    @cached_property
    def by_op(self) -> dict[str, Op]:
        """Op name -> op."""
        return {op.name: op for op in self.ops}

    @cached_property
    def producers(self) -> dict[str, Op]:
        """Result tensor name -> the op that makes it (inputs, parameters and buffers have none)."""
        return {result: op for op in self.ops for result in op.results}

    @cached_property
    def weights(self) -> dict[str, str]:
        """Parameters, and what casts alone make of one -> the parameter."""
        result = {parameter.tensor: parameter.tensor for parameter in self.parameters}
        for op in self.ops:
            if op.target == CAST and op.operands[0] in result and "float" in self.tensor(op.results[0]).dtype:
                result[op.results[0]] = result[op.operands[0]]
        return result

    @cached_property
    def consumers(self) -> dict[str, tuple[tuple[Op, int], ...]]:
        """Tensor name -> (op, operand position) pairs that read it, in execution order."""
        result: dict[str, list[tuple[Op, int]]] = {tensor.name: [] for tensor in self.tensors}
        for op in self.ops:
            for position, operand in enumerate(op.operands):
                if operand is not None:
                    result[operand].append((op, position))
        return {name: tuple(uses) for name, uses in result.items()}
