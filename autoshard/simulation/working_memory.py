"""Memory that operators, variants of the runtime and redistributions hold as they run, next to values and gradients."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache

from autoshard.costs.buffers import buffers
from autoshard.costs.operator import extra_bytes
from autoshard.costs.temporaries import saved_difference, temporary
from autoshard.ir.graph import DTYPE_BYTES, Graph
from autoshard.ir.layout import LocalSize
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, Compute, LocalValue, Program
from autoshard.program.early_reductions import early_linears
from autoshard.rules.algebra.variant_record import Layouts, LocalTensors, Temporary
from autoshard.simulation.shared_storage import Storage


def local_tensor(value: LocalValue, mesh: Mesh) -> LocalTensor:
    """The value on the device that holds most."""
    return LocalTensor(_largest(value.local_shape, mesh), value.dtype, value.requires_grad)


@lru_cache(maxsize=65536)
def _largest(sizes: tuple[LocalSize, ...], mesh: Mesh) -> tuple[int, ...]:
    return tuple(size.largest(mesh) for size in sizes)


def local_bytes(value: LocalValue, mesh: Mesh) -> float:
    """Bytes of the value on the device that holds most."""
    return float(math.prod(_largest(value.local_shape, mesh)) * DTYPE_BYTES[value.dtype])


def working(program: Program, graph: Graph, stored: Storage) -> list[Temporary]:
    """Bytes of each instruction."""
    temporaries: list[Temporary] = []
    early = early_linears(program.instructions)
    together = {position for bucket in program.weight_buckets for position in bucket.gathers}  # see weight_spans.py
    for index, instruction in enumerate(program.instructions):
        if index in together:
            temporaries.append(Temporary())
        elif isinstance(instruction, Collective):
            temporaries.append(_moving(program, instruction))
        elif instruction.host:
            temporaries.append(Temporary())
        else:
            scratch = _operator(program, graph, instruction)
            gather = _gathering(program, instruction, [s for s in stored.regathers.get(index, ()) if s not in together])
            also = _reducing(program, instruction, early[index]) if index in early else 0.0
            temporaries.append(Temporary(scratch.forward, max(scratch.backward, gather) + also))
    return temporaries


def _operator(program: Program, graph: Graph, instruction: Compute) -> Temporary:
    return temporary(program.mesh, graph.by_op[instruction.op], instruction.variant, *_local(program, instruction))


def _local(program: Program, instruction: Compute) -> tuple[LocalTensors, Layouts, LocalTensors]:
    """The operands with their layouts, and the results, on the device that holds most."""
    values = [None if name is None else program.value(name) for name in instruction.operands]
    operands = tuple(None if name is None else program.largest[name] for name in instruction.operands)
    layouts = tuple(None if value is None else value.layout for value in values)
    return operands, layouts, tuple(program.largest[name] for name in instruction.results)


def saved_extra(program: Program, graph: Graph, instruction: Compute) -> tuple[tuple[int, ...], float]:
    """Operands that are not kept though the model's operator keeps them, and the bytes kept in addition to values:
    masks, statistics, copies. A look-up on the host keeps what it was sent there."""
    if instruction.host:
        return tuple(range(len(instruction.operands))), 0.0
    operands, layouts, results = _local(program, instruction)
    op = graph.by_op[instruction.op]
    saved = saved_difference(program.mesh, op, instruction.variant, operands, layouts, results)
    extra = saved.extra_bytes
    if extra is None:
        extra = extra_bytes(graph, op, operands, tuple(x for x in results if x is not None))
    return saved.without, extra + saved.more_bytes


def _moving(program: Program, step: Collective) -> Temporary:
    """Worked out once for equal steps of equal values: every layer has the same, and backward gathers again."""
    operand, result = program.value(step.operand), program.value(step.result)
    does = (step.axes, step.before, step.forward, step.backward, step.joined, step.cut, step.gradient_dtype)
    key = (does, *_facts(operand), *_facts(result))
    known = program.once(_known_moves)
    if key not in known:
        known[key] = _moved(program, step, operand, result)
    return known[key]


def _facts(value: LocalValue) -> tuple[Hashable, ...]:
    """Key of all that `buffers` reads of a value; the local sizes by address, which the program keeps."""
    return value.shape, value.layout, value.dtype, id(value.local_shape)


def _known_moves(program: Program) -> dict[Hashable, Temporary]:
    return {}


def _moved(program: Program, step: Collective, operand: LocalValue, result: LocalValue) -> Temporary:
    """Temporary bytes of a collective; for a weight that was cast, with its gradient in the high precision."""
    scratch = buffers(program.mesh, step, operand, result)
    if not step.gradient_dtype:
        return scratch
    wide = replace(operand, dtype=step.gradient_dtype), replace(result, dtype=step.gradient_dtype)
    return Temporary(scratch.forward, buffers(program.mesh, step, *wide).backward + local_bytes(wide[1], program.mesh))


def _reducing(program: Program, linear: Compute, collective: int) -> float:
    """Bytes that an early reduction adds to the gradients that its linear makes: what it sends, and what it receives.
    It sends a copy of the input's gradient, freed before the weight's is made: the larger of the two counts."""
    step, weight = program.instructions[collective], linear.operands[1]
    assert isinstance(step, Collective) and weight is not None
    copied = _moving(program, step).backward
    received = float(program.largest[step.operand].bytes) if step.forward else 0.0  # else in place
    one = min(float(program.largest[name].bytes) for name in (step.result, weight))
    return max(received, copied + received - one)


def _gathering(program: Program, instruction: Compute, steps: Sequence[int]) -> float:
    """Bytes of weights that an instruction's backward gathers again before it makes its operands' gradients."""
    moving = [step for step in (program.instructions[index] for index in steps) if isinstance(step, Collective)]
    most = max((_moving(program, step).forward for step in moving), default=0.0)
    values = [program.largest[name] for name in instruction.operands if name is not None]
    return max(0.0, most - sum(value.bytes for value in values if value.requires_grad))
