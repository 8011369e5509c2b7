"""`check(program, graph)`: the invariants of a Program, run after lowering in tests and by `--check`."""

from __future__ import annotations

from autoshard import redistribute
from autoshard.ir.graph import Graph
from autoshard.ir.layout import PARTIAL, REPLICATE, REPLICATE_PARTIAL, Layout, Shard, local_sizes
from autoshard.ir.program import Collective, Compute, Program, ProgramParameter
from autoshard.program.early_reductions import LINEARS, early_linears
from autoshard.program.gradient_buckets import backward_ends
from autoshard.program.module_scopes import operands_of, results_of
from autoshard.program.weight_buckets import gradient_ready_at, parameter_paths
from autoshard.program.weights import weight_ways
from autoshard.rules.algebra.strategy import Strategy


def check(program: Program, graph: Graph, strategies: dict[str, Strategy]) -> None:
    """AssertionError that names the value or op which breaks an invariant. `strategies`: op name -> its choice."""
    _check_values(program, graph)
    known = {*program.inputs, *(p.value for p in (*program.parameters, *program.buffers))}
    for instruction in program.instructions:
        if isinstance(instruction, Collective):
            _check_collective(program, instruction, known)
            known.add(instruction.result)
        else:
            _check_compute(program, instruction, strategies[instruction.op], known)
            known.update(instruction.results)
    assert [i.op for i in program.instructions if isinstance(i, Compute)] == [op.name for op in graph.ops]
    assert known >= {*program.outputs, *(new for _, new in program.buffer_updates)}
    _check_ends(program)
    _check_gradients(program)
    _check_weight_buckets(program)
    _check_early(program)


def _check_values(program: Program, graph: Graph) -> None:
    names = [value.name for value in program.values]
    assert len(set(names)) == len(names), "value names are unique"
    for value in program.values:
        tensor = graph.tensor(value.tensor)
        assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype), value.name
        assert value.local_shape == local_sizes(value.shape, value.layout, program.mesh), value.name
        assert value.requires_grad or REPLICATE_PARTIAL not in value.layout.placements, value.name


def _check_collective(program: Program, step: Collective, known: set[str]) -> None:
    assert step.operand in known and step.result not in known, step
    operand, result = program.value(step.operand), program.value(step.result)
    change = redistribute.step_of(step, program.mesh)
    assert operand.tensor == result.tensor, step
    assert change.applied(operand.layout) == result.layout, step
    assert not step.regathered or redistribute.COLLECTIVES[step.forward].gathers, step
    if change.by_index:
        assert change.backward in redistribute.BY_INDEX and step.joined is None and step.cut is None, step
        return
    pairs = {(redistribute.kind(x), redistribute.kind(y)) for x, y in zip(step.before, step.after, strict=True)}
    assert len(pairs) == 1, step
    pair = pairs.pop()
    assert (step.forward, step.backward) == redistribute.CHANGES[pair][:2], step
    assert (step.joined is not None, step.cut is not None) == (pair[0] == "S", pair[1] == "S"), step


def _check_compute(program: Program, compute: Compute, strategy: Strategy, known: set[str]) -> None:
    assert compute.strategy == str(strategy), compute.op
    assert program.loss is not None or not compute.regathered, compute.op
    assert known.issuperset(compute.regathered), compute.op
    for name, layout in zip(compute.operands, strategy.operands, strict=True):
        assert (name is None) == (layout is None), compute.op
        if name is not None:
            assert name in known, (compute.op, name)
            assert program.value(name).layout == layout, (compute.op, name, program.value(name).layout, layout)
    for name, layout in zip(compute.results, strategy.results, strict=True):
        assert name not in known and program.value(name).layout == layout, (compute.op, name)


def _check_ends(program: Program) -> None:
    if program.loss is not None:
        placements = program.value(program.loss).layout.placements
        assert all(p in (PARTIAL, REPLICATE) for p in placements), (program.loss, placements)
    for name in program.outputs:
        if name != program.loss:
            assert PARTIAL not in program.value(name).layout.placements, name
    for buffer, new in program.buffer_updates:
        assert program.value(buffer).layout == program.value(new).layout, buffer


def _check_gradients(program: Program) -> None:
    """A parameter's gradient is whole in its storage layout once its bucket is reduced; every bucket is needed, and
    starts when all of its gradients are complete, in order."""
    reduced = {path: bucket.axes for bucket in program.gradient_buckets for path in bucket.parameters}
    assert len(reduced) == sum(len(bucket.parameters) for bucket in program.gradient_buckets), "reduced twice"
    values = {p.path: p.value for p in program.parameters}
    ends = backward_ends(
        program.instructions, program.by_name, values.values(), gradient_ready_at(program.weight_buckets)
    )
    starts = [bucket.after for bucket in program.gradient_buckets]
    assert starts == sorted(starts, reverse=True), starts
    for bucket in program.gradient_buckets:
        assert bucket.after == min(ends.get(values[path], 0) for path in bucket.parameters), bucket
    for parameter in program.parameters:
        entered = program.value(parameter.value).layout
        partial = tuple(
            name
            for name, placement in zip(program.mesh.names, entered.placements, strict=True)
            if placement == REPLICATE_PARTIAL
        )
        assert partial == (reduced.get(parameter.path, ()) if parameter.trainable else ()), parameter.path
        _check_storage(parameter, entered)


def _check_early(program: Program) -> None:
    """Each early reduction belongs to the linear that runs next, but for what makes that one's weight and bias."""
    early = [i for i, step in enumerate(program.instructions) if isinstance(step, Collective) and step.early]
    linears = early_linears(program.instructions)
    assert sorted(linears.values()) == early, "an early reduction without its linear"
    ways = program.once(weight_ways)
    for linear, start in linears.items():
        step, between = program.instructions[linear], program.instructions[start + 1 : linear]
        assert isinstance(step, Compute) and step.target in LINEARS and not step.variant, step
        assert all(results_of(other)[0] in ways for other in between), step


def _check_weight_buckets(program: Program) -> None:
    """A collective is in one bucket at most; a bucket gathers along its axes, and sums gradients of its dtype; they
    stand in order. Its weights are read by its gathers alone: a gradient on another way would come apart from the
    bucket's."""
    positions = [position for bucket in program.weight_buckets for position in bucket.gathers]
    assert len(set(positions)) == len(positions), "gathered twice"
    firsts = [bucket.gathers[0] for bucket in program.weight_buckets]
    blocks = [bucket.block for bucket in program.weight_buckets]
    assert (firsts, blocks) == (sorted(firsts), sorted(blocks)), (firsts, blocks)
    assert len({bucket.block for bucket in program.weight_buckets if bucket.retained}) <= 1, "one block stays whole"
    once = {i for i, step in enumerate(program.instructions) if isinstance(step, Collective) and step.once}
    together = {position for bucket in program.weight_buckets if bucket.once for position in bucket.gathers}
    assert once == together and (not once or program.step.zero < 3), "what is gathered once a step is in buckets"
    for bucket in program.weight_buckets:
        assert [*bucket.gathers] == sorted(bucket.gathers), bucket
        for step in (program.instructions[position] for position in bucket.gathers):
            assert isinstance(step, Collective) and step.regathered is not bucket.once, step
            assert (step.axes, step.forward, step.backward) == (bucket.axes, "all_gather", "reduce_scatter"), step
            assert (step.gradient_dtype or program.value(step.result).dtype) == bucket.dtype, step
    gathered = [path for bucket in program.weight_buckets for path in parameter_paths(program, bucket)]
    values = {p.path: p.value for p in program.parameters}
    for path in gathered:
        readers = [step for step in program.instructions if values[path] in operands_of(step)]
        assert len(readers) == 1, f"{path} is gathered with others, and read {len(readers)} times"


def _check_storage(parameter: ProgramParameter, entered: Layout) -> None:
    whole = tuple(REPLICATE if p == REPLICATE_PARTIAL else p for p in entered.placements)
    assert parameter.layout.placements == whole, parameter.path
    shards = [p for p in parameter.split_layout.placements if isinstance(p, Shard)]
    assert all(p.blocks == 1 and (p.unit == 1 or isinstance(p.unit, tuple)) for p in shards), parameter.path
    count = 1
    for size in parameter.split_shape:
        count *= size
    original = 1
    for size in parameter.shape:
        original *= size
    assert count == original, parameter.path
