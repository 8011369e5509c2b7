"""Records of operators: everything that is known of one, in one place, next to its rule.

A default that is right, and at worst slow or pessimistic, stands for whatever a record leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, Protocol

from autoshard.rules.algebra.argument_rules import LocalAttribute, Localise, RuleFor
from autoshard.rules.algebra.saved_for_backward import Saves, floating
from autoshard.rules.algebra.variant_record import Formulas, Holds, Keeps, Traffic, temporaries
from autoshard.rules.algebra.view_strides import View


@dataclass(frozen=True)
class Product:
    """A matrix product: the operands that are multiplied, the one added (or None), and (operand, first dim) of the dims
    that the summed loop goes over. `cast_to`: the dtype that the factors are cast to inside, where all dims of the
    product fit its kernels (float8_products.py)."""

    multiplied: tuple[int, int]
    added: int | None
    summed: tuple[int, int]
    cast_to: str = ""


class Work(Enum):
    """Work that is neither a matrix product nor a pass over memory."""

    ATTENTION = "fused attention"
    VIEW = "a new description of the same storage"


@dataclass(frozen=True)
class TensorParallel:
    """Megatron's style: the factors that the tensor axis splits, the weight's further factors, which stay whole on the
    other axes, and whether the tensor axis may also leave the operator whole."""

    split: tuple[str, ...]
    whole: tuple[str, ...] = ()
    optional: bool = False


class CodeWriter(Protocol):
    """A writer of expressions: a literal of a local argument, and the name of the device."""

    @property
    def device(self) -> str: ...

    def literal(self, value: LocalAttribute) -> str: ...


Autocast = Literal["", "low", "high", "high_by_default", "widest"]  # the lists of ATen/autocast_mode.h
Chooses = Literal["", "rows", "classes", "along"]
Names = Sequence[str | None]  # of operands, as code writes them
Given = Mapping[str, LocalAttribute]
Spell = Callable[[CodeWriter, Names, Given], str | None]
ALWAYS: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Operands and results by position, arguments by the names of the schema.

    How it is split: `rule` in the notation of rules, or a function that writes it for the arguments of a call;
    `localise` gives the arguments of a shard; `repeated`: made from nothing, on every device.
    In training: `saves` for backward; `no_gradient`: its result has none; `statistics`: its results after the first are
    new running statistics. Precision: `autocast` names the list that it is on; of `low_operands` alone are cast;
    `first_decides_dtype` of the result; `explicit_dtype`: an argument says the result's.
    In memory: `view` gives the strides of results that share the operand's storage; `order` of the dims of a new
    result, from outermost to innermost: "operand" for that of an operand of its shape.
    Seconds: the `work`, else memory traffic at the constant `memory.<bandwidth>`, of `traffic` bytes (forward and
    backward); `cell_weights`: the position of the first of a recurrent cell's two matrices. `holds`: bytes while it
    runs, besides operands, results, gradients and saved tensors; `keeps`: what its code keeps instead of `saves`.
    In code: `spelling`, a template (emit/expressions.py) or a function; `infix` symbol; `in_torch`: `torch.NAME` takes
    the schema's arguments; `returns_list`; `takes_device`. `operand_names` and `result_name` for its variables;
    `keeps_name`: its result is called as its operand.
    Styles: `tensor_parallel`; `sequence_parallel`: Megatron splits it along the sequence, between two split layers.
    In words: `split_words` of (operand, dim), `factor_words` of a factor; `traced_as`: other names in traces of a run.
    `draws` random numbers while all these arguments are true (None: never); `chooses`: operand 1 holds indices of the
    rows of operand 0, of its classes, or along argument `dim`; `on_host`: it can run there, next to its table, operand
    0; `moves`: it moves numbers and changes none. `dims` are the arguments that count dims of operand 0,
    `dims_of_result` those that count them in the result.
    """

    rule: str | RuleFor | None = None
    localise: Localise | None = None
    repeated: bool = False

    saves: Saves = floating
    no_gradient: bool = False
    statistics: bool = False
    autocast: Autocast = ""
    low_operands: tuple[int, ...] | None = None
    first_decides_dtype: bool = False
    explicit_dtype: bool = False
    view: View | None = None
    order: Literal["", "operand"] | tuple[int, ...] = ""

    work: Product | Work | None = None
    bandwidth: str = "default"
    traffic: Traffic | None = None
    cell_weights: int | None = None
    holds: Holds | None = None
    keeps: Keeps | None = None

    spelling: str | Spell = ""
    infix: str = ""
    in_torch: bool = False
    returns_list: bool = False
    takes_device: bool = False
    operand_names: tuple[str, ...] = ()
    result_name: str = ""
    keeps_name: bool = False

    tensor_parallel: TensorParallel | None = None
    sequence_parallel: bool = False
    split_words: Mapping[tuple[int, int], str] | None = None
    factor_words: Mapping[str, str] | None = None
    traced_as: tuple[str, ...] = ()

    draws: tuple[str, ...] | None = None
    chooses: Chooses = ""
    on_host: bool = False
    moves: bool = False
    dims: str = ""
    dims_of_result: str = ""


def each(names: str, record: Operator) -> dict[str, Operator]:
    """Operators of ATen by these names, all with the same record."""
    return {f"aten.{name}": record for name in names.split()}


def with_formulas(records: dict[str, Operator], formulas: Iterable[tuple[str, Formulas]]) -> dict[str, Operator]:
    """The records; those of the operators named (a word each) with the `temporaries` of their backward."""
    held = {f"aten.{name}": temporaries(each) for names, each in formulas for name in names.split()}
    return {target: replace(known, holds=held.get(target, known.holds)) for target, known in records.items()}
