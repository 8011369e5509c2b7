"""Losses that are means over labels, of which some may be ignored: in a step of several micro-batches their number is
that of the whole step, known before the first backward. So it is counted of the inputs alone, by a program of its own.

A mean is weighted by its share of the labels where the step's loss is linear in it. The mean of a function of it, such
as a focal loss of the mean, is no function of the step's mean: it is averaged over the micro-batches as it is, and so
is a mean that a buffer is updated from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.errors import UsageError
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, Compute, Instruction, LabelCount, LocalValue, Program
from autoshard.program.module_scopes import operands_of, random_index, results_of
from autoshard.program.step_check import LABEL_LOSSES
from autoshard.rules.operators import record

_MEAN = (1, "mean")
CLASS = "Labels"
# positions of the operands in which an op is linear, or linear but for a constant: all of them together, None: in all
_LINEAR: Mapping[str, Sequence[int] | None] = {
    "aten.add": None, "aten.sub": None, "aten.rsub": None, "aten.stack": None, "aten.cat": None, "aten.where": (1, 2),
    "aten.mul": (0, 1), "aten.dot": (0, 1), "aten.div": (0,), "aten.neg": (0,), "aten.sum": (0,), "aten.mean": (0,),
    "aten.to": (0,),
}  # fmt: skip
_PRODUCTS = ("aten.mul", "aten.dot")  # linear in each alone


def label_means(graph: Graph) -> dict[str, bool]:
    """Ops of the losses that are means over labels -> is the step's loss linear in it, and in all such together?"""
    dtypes = {tensor.name: tensor.dtype for tensor in graph.tensors}
    means = [op for op in graph.ops if _is_label_mean(op, dtypes)]
    origins = {op.results[0]: {op.name} for op in means}  # tensor that the loss depends on -> the means in it
    buffers = {value for _, value in graph.buffer_updates}  # each is updated from its micro-batch's own mean
    linear, needed = {op.name: True for op in means}, {graph.loss, *buffers}
    for op in reversed(graph.ops):
        needed |= {*op.operands} if not needed.isdisjoint(op.results) else set()
    for op in graph.ops:
        places = [i for i, name in enumerate(op.operands) if name in origins]
        if places and not needed.isdisjoint(op.results):
            inside = set().union(*(origins[name] for name in op.operands if name in origins))
            linear |= {} if _is_linear(op, places) else dict.fromkeys(inside, False)
            origins |= dict.fromkeys(op.results, inside)
    return linear | dict.fromkeys(set().union(*(origins.get(value, ()) for value in buffers)), False)


def _is_linear(op: Op, places: Sequence[int]) -> bool:
    """True if the op is linear in the operands at these positions together."""
    allowed = _LINEAR.get(op.target, (0,) if record(op.target).moves else ())
    if dict(op.attributes).get("rounding_mode") or (op.target in _PRODUCTS and len(places) > 1):
        return False
    return allowed is None or {*places} <= {*allowed}


def label_counts(
    instructions: Sequence[Instruction],
    values: Mapping[str, LocalValue],
    mesh: Mesh,
    stored: Mapping[str, str],
    graph: Graph,
) -> tuple[LabelCount, ...]:
    """`stored`: the path of each stored tensor. UsageError where a loss has class weights that are none of these."""
    counts, means = [], graph.once(label_means)
    for step in instructions:
        if not isinstance(step, Compute) or not means.get(step.op):
            continue
        target = step.operands[1]
        assert target is not None
        weights = step.operands[2] if len(step.operands) > 2 else None
        if weights is not None and values[weights].tensor not in stored:
            raise UsageError(
                f"{step.op} weighs its classes by what the model computes: the weights of a step's labels are not "
                "known before its first micro-batch",
                "class weights as a buffer, or one micro-batch",
            )
        layout = values[target].layout
        axes = tuple(n for n, p in zip(mesh.names, layout.placements, strict=True) if isinstance(p, Shard))
        ignored = dict(step.attributes).get("ignore_index", -100)
        assert isinstance(ignored, int)
        path = "" if weights is None else stored[values[weights].tensor]
        counts.append(LabelCount(step.op, target, ignored, axes, path))
    return tuple(counts)


def _is_label_mean(op: Op, dtypes: Mapping[str, str]) -> bool:
    """Is it a loss that is a mean over labels? Classes given as probabilities all count."""
    if op.target not in LABEL_LOSSES or dict(op.attributes).get("reduction", "mean") not in _MEAN:
        return False
    target = op.operands[1]
    return target is not None and dtypes[target].startswith(("int", "uint"))


def labels_program(program: Program) -> Program:
    """Makes the labels of the program's losses, in order, of its inputs. UsageError where it takes more than these."""
    needed, wanted = set(), {count.target for count in program.label_counts}
    for index in reversed(range(len(program.instructions))):
        step = program.instructions[index]
        if wanted.isdisjoint(results_of(step)):
            continue
        if random_index(step) is not None:
            raise _unknown(program)
        needed.add(index)
        wanted |= set(filter(None, operands_of(step)))
    stored = {p.value for p in (*program.parameters, *program.buffers)}
    if not wanted.isdisjoint(stored):
        raise _unknown(program)
    steps = [program.instructions[index] for index in sorted(needed)]
    names = {*program.inputs, *(name for step in steps for name in results_of(step))}
    return replace(
        program,
        values=tuple(value for value in program.values if value.name in names),
        parameters=(),
        buffers=(),
        instructions=tuple(_bare(step) for step in steps),
        outputs=tuple(count.target for count in program.label_counts),
        loss=None,
        buffer_updates=(),
        gradient_buckets=(),
        weight_buckets=(),
        modules=(("", CLASS),),
        label_counts=(),
    )


def _bare(step: Instruction) -> Instruction:
    """Instruction outside all modules."""
    if isinstance(step, Collective):
        return replace(step, module="")
    return replace(step, module="", regathered=())


def _unknown(program: Program) -> UsageError:
    return UsageError(
        f"the labels of {program.label_counts[0].op} are not made of the inputs alone: how many count is not known "
        "before the first backward of several micro-batches",
        "labels as an input, or one micro-batch",
    )
