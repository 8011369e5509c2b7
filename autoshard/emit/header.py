"""Header of a package: the plan it came from, how to make it again, and its strategy in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autoshard.cluster.device_kinds import rank_words
from autoshard.cluster.hardware import parse_hardware
from autoshard.code_text import printable
from autoshard.ir import plan_json
from autoshard.ir.dynamic import DynamicSize
from autoshard.ir.graph import SAME, FreeSize, Graph, Op, Recipe, Registration
from autoshard.ir.layout import Replicate, Shard
from autoshard.ir.plan import Plan
from autoshard.ir.program import Collective, Program
from autoshard.program.stage_programs import stage_programs
from autoshard.program.step_check import input_layout, share_words
from autoshard.replay.command_line import command
from autoshard.replay.free_sizes import recorded_free_sizes
from autoshard.replay.other_sizes import OtherSizes, at_other_sizes
from autoshard.replay.padding import ignored_labels, padding_of
from autoshard.rules.operators import record


@dataclass(frozen=True)
class Input:
    """One model input. Synthetic integers are drawn from [low, high), floats too, or normally where low is high; where
    these are tuples, each place of the last dim has its own."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    low: float | tuple[int, ...] = 0
    high: float | tuple[int, ...] = 2


@dataclass(frozen=True)
class Header:
    """Predictions are of one step, per device. `strategy` has one sentence per mesh axis."""

    plan_hash: str
    command: str
    versions: str
    hardware: str
    strategy: tuple[str, ...]
    inputs: tuple[Input, ...]
    predicted_seconds: float
    predicted_peak_bytes: float
    registrations: tuple[Registration, ...] = ()
    recipes: tuple[Recipe, ...] = ()
    devices_per_node: int = 8
    nodes: tuple[int, ...] = (8,)  # devices on each
    kinds: str = ""  # which ranks are of which kind of devices, where there are several
    others: OtherSizes = field(default_factory=OtherSizes)
    free_sizes: tuple[FreeSize, ...] = ()
    dynamic: tuple[DynamicSize, ...] = ()
    padding: tuple[str, ...] = ()  # dynamic sizes that batches are padded along
    ignored: Mapping[str, int] = field(default_factory=dict)  # the label of an input that does not count
    bucket: tuple[tuple[str, int], ...] = ()  # the largest sizes of this file, where it is that of a bucket
    buckets: tuple[tuple[tuple[str, int], ...], ...] = ()  # the largest sizes of each, in files of their own
    other_numbers: bool = False  # the package has plans for other numbers of devices
    evaluation: str = ""  # why the forward of training, without dropout, is not that of evaluation


def header_of(program: Program, plan: Plan, graph: Graph, other_numbers: bool = False) -> Header:
    hardware = parse_hardware(plan.hardware_text)
    return Header(
        plan_hash=plan_json.plan_hash(plan, graph),
        command=command(plan, graph),
        versions=", ".join(f"{name} {version}" for name, version in plan.versions),
        hardware=plan.hardware,
        kinds="; ".join(filter(None, (rank_words(hardware), share_words(plan.step, plan.mesh)))),
        strategy=tuple(_strategy_by_part(program))
        if program.others
        else strategy_words(program, bool(plan.servers.count)),
        inputs=tuple(_input(program, graph, name) for name in program.inputs),
        predicted_seconds=plan.step_seconds,
        predicted_peak_bytes=plan.step_peak_bytes,
        registrations=graph.registrations,
        other_numbers=other_numbers,
        recipes=graph.recipes,
        devices_per_node=hardware.devices_per_node,
        nodes=hardware.nodes(plan.devices),
        others=at_other_sizes(program, plan, graph),
        free_sizes=recorded_free_sizes(graph),
        dynamic=graph.dynamic,
        padding=graph.once(padding_of),
        ignored=graph.once(ignored_labels),
        buckets=tuple(bucket.most for bucket in plan.buckets),
        evaluation="" if graph.evaluation == SAME else printable(graph.evaluation or _UNKNOWN),
    )


_UNKNOWN = "what the model computes in evaluation is not known: its graph was captured by an older version"


def _input(program: Program, graph: Graph, name: str) -> Input:
    value = program.value(name)
    low, high = _drawn_from(graph, value.tensor, value.dtype)
    return Input(value.tensor, value.shape, value.dtype, str(input_layout(program, name)), low, high)


def _drawn_from(graph: Graph, tensor: str, dtype: str) -> tuple[float, float] | tuple[tuple[int, ...], ...]:
    """(low, high) of synthetic numbers: those of the example where they count, else all that an index may have."""
    known = next((r for r in graph.input_ranges if r.tensor == tensor), None)
    if "float" in dtype:
        return (known.low, known.high) if known is not None else (0, 0)
    if columns := next((r.bounds for r in graph.column_ranges if r.tensor == tensor), ()):
        return tuple(int(low) for low, _ in columns), tuple(int(high) for _, high in columns)
    bound = integer_bound(graph, tensor)
    return (int(known.low), int(known.high)) if known is not None else (0, bound)


def integer_bound(graph: Graph, tensor: str) -> int:
    """Largest integer that an input may hold plus one, from all it is an index of; 2 where nothing shows it."""
    seen, todo, bounds = {tensor}, [tensor], []
    while todo:
        for op, position in graph.consumers[todo.pop()]:
            if (bound := _indexed(graph, op, position)) is not None:
                bounds.append(bound)
                continue
            fresh = [name for name in op.results if name not in seen and "int" in graph.tensor(name).dtype]
            seen.update(fresh)
            todo += fresh
    return max(1, min(bounds, default=2))


def _indexed(graph: Graph, op: Op, position: int) -> int | None:
    """Number of items that the operand at `position` chooses among; None where it is no index."""
    if op.target == "aten.one_hot":
        classes = op.attribute("num_classes")
        return classes if isinstance(classes, int) and classes > 0 else None
    if position == 0 or op.operands[0] is None:
        return None
    shape = graph.tensor(op.operands[0]).shape
    chooses = record(op.target).chooses if position == 1 else ""
    if chooses == "rows":
        return shape[0]
    if chooses == "classes":
        return shape[1] if len(shape) > 1 else shape[0]
    if chooses == "along":
        dim = op.attribute("dim")
        return shape[dim] if isinstance(dim, int) and shape else None
    if op.target == "aten.index" or (op.target == "aten.index_put" and position < len(op.operands) - 1):
        return shape[position - 1]
    return None


def _strategy_by_part(program: Program) -> Iterator[str]:
    """Strategy in words of each part on its place's mesh, where places have meshes of their own."""
    for number, part in enumerate(stage_programs(program)):
        where = f"part {number}, on {program.step.word} {program.step.part_stages[number]}"
        yield from (f"{where}, {words}" for words in strategy_words(part))


def strategy_words(program: Program, served: bool = False) -> tuple[str, ...]:
    """Sentences, one per mesh axis, on what it divides. `served`: tables are on parameter servers."""
    axes = enumerate(program.mesh.axes)
    sentences = [f"{name} ({size}): {_axis_words(program, i, name)}" for i, (name, size) in axes]
    tables = [p.path for p in program.parameters if p.layout.host]
    if tables:
        named = printable(", ".join(tables[:2])) + (f" and {len(tables) - 2} more" if len(tables) > 2 else "")
        where = "on the parameter servers (of train.py alone in host memory)" if served else "in host memory"
        sentences.append(f"{where}: {named}, with their optimizer state; rows and their gradients pass the link")
    return tuple(sentences)


def _gathers(step: Collective, axis: str) -> bool:
    if axis not in step.axes:
        return False
    position = step.axes.index(axis)
    return isinstance(step.before[position], Shard) and isinstance(step.after[position], Replicate)


def _gathered(program: Program, axis: str) -> set[str]:
    """Values of parameters that are gathered along the axis, be it after a cast or a view."""
    origin = {p.value: p.value for p in program.parameters}
    gathered = set()
    for step in program.instructions:
        operands = [step.operand] if isinstance(step, Collective) else [x for x in step.operands if x is not None]
        if len(operands) != 1 or operands[0] not in origin:
            continue
        if isinstance(step, Collective) and _gathers(step, axis):
            gathered.add(origin[operands[0]])
        results = [step.result] if isinstance(step, Collective) else step.results
        origin.update(dict.fromkeys(results, origin[operands[0]]))
    return gathered


def _axis_words(program: Program, axis: int, name: str) -> str:
    if program.mesh.axes[axis][1] == 1:
        return "one device, nothing to divide"
    cut_inputs = [v for v in program.inputs if isinstance(program.value(v).layout.placements[axis], Shard)]
    stored = {p.value: p for p in program.parameters if isinstance(p.layout.placements[axis], Shard)}
    gathered = _gathered(program, name) & set(stored)
    facts = []
    count = len(program.parameters)
    if cut_inputs:
        dims = sorted({p.dim for v in cut_inputs if isinstance(p := program.value(v).layout.placements[axis], Shard)})
        batch = "the batch" if dims == [0] else f"the inputs along dim {', '.join(map(str, dims))}"
        facts.append(f"cuts {batch} (data parallel)")
    if gathered:
        facts.append(f"stores {len(gathered)} of {count} parameters in shards that are gathered for use")
    if len(stored) > len(gathered):
        facts.append(f"cuts {len(stored) - len(gathered)} of {count} parameters where they are used")
    sums = [b for b in program.gradient_buckets if name in b.axes]
    if sums:
        facts.append(f"sums the gradients of {sum(len(b.parameters) for b in sums)} parameters during backward")
    if facts:
        return "; ".join(facts)
    divides = any(isinstance(value.layout.placements[axis], Shard) for value in program.values)
    return "divides activations only" if divides else "divides nothing: its devices repeat the same work"
