"""Checks of a step against its plan. The errors are those that MindSpore documents for pipelines, and a few more.

Unequal shares of the batch: of each micro-batch's slices, one for each coordinate of the mesh's first axis, devices
compute as many as they are fast. What runs within a micro-batch may then not communicate over that axis: its devices
are not at the same slice, nor have as many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import groupby

from autoshard.errors import UsageError
from autoshard.ir.graph import Graph
from autoshard.ir.layout import PARTIAL, REPLICATE, Layout, Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import KEEP_SOME, KEEPS, SCHEDULES, StepPlan, policy_results
from autoshard.ir.program import Collective, Compute, Program
from autoshard.rules.resize.rebatch import batch_size
from autoshard.units import counted

MOST_PASSES = 100_000  # of micro-batches through parts of the model in a step: seconds to simulate, 300 MB to show
LABEL_LOSSES = frozenset(f"aten.{name}" for name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"))
_ALONE = frozenset({"", "identity", "slice", "mask", "zero_pad"})  # what a device does by itself, with what it has
_STATIC = "parallel_loss"  # divides by a count that is known


def check_step(step: StepPlan, graph: Graph) -> None:
    """Raises UsageError, which says what is wrong with `step` and what to try."""
    _check_counts(step, graph)
    if step.parts:
        _check_parts(step, graph)
    modules = {path for path, _ in graph.modules}
    for path in step.keeps:
        message = recompute_obstacle(graph, path, step.micro_batches)
        if message:
            raise UsageError(f"{path} can't be recomputed: {message}", "another block, or what holds it left as it is")
    for policy in step.recompute:
        if policy.keep not in KEEPS and not _is_some(policy.keep):
            message = f"one of {', '.join(KEEPS)}, or as in {KEEP_SOME}0 attn.c_attn, attention attn"
            raise UsageError(f"{policy.module} keeps {policy.keep!r}", message)
        if policy.module not in modules:
            raise UsageError(f"the model has no module {policy.module} to recompute", "a path of the model's")


def _is_some(keep: str) -> bool:
    try:
        return bool(policy_results(keep))
    except ValueError:
        return False


def _check_counts(step: StepPlan, graph: Graph) -> None:
    if step.micro_batches < 1 or step.virtual_stages < 1:
        raise UsageError(
            f"a step of {step.micro_batches} micro-batches and {step.virtual_stages} virtual stages", "1 or more"
        )
    if step.schedule not in SCHEDULES:
        raise UsageError(f"unknown schedule {step.schedule!r}", " or ".join(SCHEDULES))
    if graph.loss is None and step != StepPlan():
        what = "places" if step.placed else "micro-batches, stages or recomputation"
        hint = "--place none: the model by itself" if step.placed and not graph.training else "--loss FUNCTION"
        raise UsageError(f"a step of {what} needs a loss to train", hint)
    if step.placed:
        check_passes(step.micro_batches, len(step.parts))
    else:
        check_counts(step.micro_batches, step.stages, step.virtual_stages, step.schedule)


def check_passes(count: int, parts: int) -> None:
    """Raises UsageError if `count` micro-batches through `parts` parts are more than can be simulated and shown."""
    if count * parts > MOST_PASSES:
        message = f"{counted(count, 'micro-batch')} through {counted(parts, 'part')} of the model"
        near = max(1, MOST_PASSES // parts)
        raise UsageError(f"{message}: expected at most {MOST_PASSES} passes in a step", f"--micro-batches {near}")


def check_counts(count: int, stages: int, virtual: int, schedule: str) -> None:
    """Raises UsageError if a schedule has no order for `count` micro-batches on stages of `virtual` parts."""
    check_passes(count, stages * virtual)
    if count < stages:
        raise UsageError(
            f"{counted(count, 'micro-batch')} for {stages} stages: some stage would always wait",
            f"--micro-batches {stages}",
        )
    if virtual > 1 and schedule != "interleaved":
        raise UsageError(f"{virtual} virtual stages need the interleaved schedule", "--schedule interleaved")
    if schedule == "interleaved" and count % stages:
        near = stages * max(1, round(count / stages))
        raise UsageError(
            f"the interleaved schedule takes micro-batches in groups of {stages}, a stage each, and {count} are not",
            f"--micro-batches {near}",
        )


def check_one_batch(step: StepPlan, what: str) -> None:
    """Raises UsageError if `what` needs a step of one micro-batch on one stage, and `step` is not one."""
    if step.micro_batches > 1 or step.parts:
        stages = f" on {step.stages} stages" if step.parts else ""
        message = f"{what} knows a step of one micro-batch, and this plan's has {step.micro_batches}{stages}"
        places = ", with --place none" if step.placed else ""
        raise UsageError(message, f"a plan without --micro-batches and --stages{places}")


def recompute_obstacle(graph: Graph, path: str, micro_batches: int = 1) -> str:
    """Reason why backward can't recompute module `path`; "" if it can."""
    updated = {buffer for buffer, _ in graph.buffer_updates}
    changing = [b.path for b in graph.buffers if b.tensor in updated and b.path.startswith(f"{path}.")]
    if changing:
        return f"it would change {changing[0]} a second time"
    losses = [op.name for op in graph.ops if op.target in LABEL_LOSSES and f"{op.module}.".startswith(f"{path}.")]
    return f"{losses[0]} counts the labels of its micro-batch" if losses and micro_batches > 1 else ""


def _check_parts(step: StepPlan, graph: Graph) -> None:
    stages = step.stages
    used = sorted({part.stage for part in step.parts})
    for stage, used_stage in enumerate(used):
        if stage != used_stage:
            raise UsageError(f"stage {stage} is not used: no operator is on it", f"stages 0 to {stages - 1}")
    if step.placed:
        _check_placed(step, graph)
        return
    if len(step.parts) != stages * step.virtual_stages:
        message = f"{len(step.parts)} parts for {stages} stages of {step.virtual_stages}"
        raise UsageError(message, f"{stages * step.virtual_stages} parts, each beginning at an operator of its own")
    positions = {op.name: number for number, op in enumerate(graph.ops)}
    before = -1
    for number, part in enumerate(step.parts):
        chunk, stage = divmod(number, stages)
        if (part.chunk, part.stage) != (chunk, stage):
            raise UsageError(
                f"part {number}, from {part.first_op} on, is on stage {part.stage}, and stages may not decrease along "
                f"the data flow (part k is on stage k mod {stages})",
                f"stage {stage} for it",
            )
        if part.first_op not in positions:
            raise UsageError(
                f"part {number} begins with {part.first_op}, which the model has not", "an operator's name"
            )
        if positions[part.first_op] <= before:
            raise UsageError(f"part {number} begins with {part.first_op}, before part {number - 1}", "the data's order")
        before = positions[part.first_op]
    if positions[step.parts[0].first_op] != 0:
        raise UsageError(f"the first part begins with {step.parts[0].first_op}", graph.ops[0].name)


def _check_placed(step: StepPlan, graph: Graph) -> None:
    part_of = {op: number for number, part in enumerate(step.parts) for op in part.ops}
    missing = {op.name for op in graph.ops} ^ part_of.keys()
    if missing or sum(len(part.ops) for part in step.parts) != len(part_of):
        message = f"the parts of the places have not each operator of the model once ({min(missing, default='')})"
        raise UsageError(message, "the plan made again")
    makers = {name: part_of[op.name] for op in graph.ops for name in op.results}
    for op in graph.ops:
        late = next((name for name in op.operands if name in makers and makers[name] > part_of[op.name]), None)
        if late is not None:
            message = f"{op.name} of part {part_of[op.name]} reads {late}, which part {makers[late]} makes"
            raise UsageError(f"{message}: parts that wait for each other", "the plan made again")


def micro_batches_of(graph: Graph, global_batch: int) -> int:
    """Number of micro-batches of the captured size in `global_batch` samples. UsageError suggests ones that fit."""
    size = batch_size(graph)
    if global_batch % size or global_batch < size:
        below, above = global_batch // size * size, -(-global_batch // size) * size
        near = f"--global-batch {below} or {above}" if below else f"--global-batch {above}"
        divisors = [n for n in range(1, size) if global_batch % n == 0]
        smaller = f", or a model captured with {counted(divisors[-1], 'sample')}" if divisors else ""
        raise UsageError(
            f"--global-batch {global_batch}: the model was captured with {counted(size, 'sample')}, one micro-batch, "
            f"and {global_batch} is no multiple of that",
            near + smaller,
        )
    return global_batch // size


# --- unequal shares of the batch ---


def dealt(seconds: Sequence[float], slices: int) -> tuple[int, ...]:
    """Number of `slices` that each coordinate computes, at least one, so that the last finishes soonest. `seconds`:
    time of one slice on each. The next slice always goes to the first to finish it: no exchange of two is better."""
    counts, waiting = [1] * len(seconds), [(2 * duration, duration, number) for number, duration in enumerate(seconds)]
    heapify(waiting)
    for _ in range(slices - len(seconds)):
        ends, duration, number = waiting[0]
        counts[number] += 1
        heapreplace(waiting, (ends + duration, duration, number))
    return tuple(counts)


def share_words(step: StepPlan, mesh: Mesh) -> str:
    """Text on which ranks compute how many slices; "" for equal shares."""
    if not step.batch_shares:
        return ""
    size, first, texts = mesh.size // mesh.sizes[0], 0, list[str]()
    for share, run in groupby(step.batch_shares):
        stop = first + len([*run]) * size
        one = stop == first + 1
        ranks = f"rank {first} computes" if one else f"ranks {first} to {stop - 1} compute"
        texts.append(f"{ranks} {share}{'' if one else ' each'}")
        first = stop
    return f"of {sum(step.batch_shares)} slices a step ({mesh.sizes[0]} of each micro-batch) {', '.join(texts)}"


def check_batch_shares(program: Program, dynamic: bool = False) -> None:
    """Raises UsageError if the program can't run in unequal shares. `dynamic`: sizes differ from step to step."""
    step, (axis, size) = program.step, program.mesh.axes[0]
    if not step.batch_shares:
        return
    wanted = step.micro_batches * size
    shares = f"batch shares {', '.join(map(str, step.batch_shares))}"
    if len(step.batch_shares) != size or sum(step.batch_shares) != wanted or min(step.batch_shares) < 1:
        message = f"{shares}: expected one for each of the {size} coordinates of {axis}, 1 or more, {wanted} in all"
        raise UsageError(message, f"--micro-batches {max(1, sum(step.batch_shares) // size)}, or other shares")
    why = "sizes of inputs are dynamic" if dynamic else next(_obstacles(program), "")
    if why:
        raise UsageError(f"{shares}: {why}", "--batch-shares equal")


def _obstacles(program: Program) -> Iterator[str]:
    """Reasons why devices along the first axis can't compute unequal shares."""
    axis = program.mesh.names[0]
    if program.step.parts or program.others:
        yield "the step has stages or places, whose devices give each other every micro-batch"
    if program.step.micro_batches < 2:
        yield "the step has one micro-batch"
    if program.loss is None:
        yield "nothing is trained"
    elif program.value(program.loss).layout.placements[0] != PARTIAL:
        yield f"the loss is no sum over {axis}: the batch is not split over it"
    if program.buffer_updates:
        yield "the model's forward updates buffers, as batch norm does, once a micro-batch"
    for step in program.instructions:
        if isinstance(step, Collective):
            does = {step.forward, step.backward} if program.value(step.operand).requires_grad else {step.forward}
            if axis in step.axes and not does <= _ALONE and not (step.once and program.step.zero == 1):
                yield f"{step.reason}: within a micro-batch, over {axis} (of sharded optimizers --zero 1 alone waits)"
        elif any(axis in names for _, names in step.axes) and not _may_be_sliced(step):
            yield f"{step.op} communicates within a micro-batch, over {axis}"


def _may_be_sliced(step: Compute) -> bool:
    return step.target in LABEL_LOSSES or step.variant == _STATIC


def _read_layout(layout: Layout) -> Layout:
    """Layout in which an input that is split into slices is read: whole over the first axis, and over those that shard
    what the first axis leaves of the same dim."""
    first = layout.placements[0]
    if not isinstance(first, Shard):
        return layout
    return Layout(
        tuple(REPLICATE if isinstance(item, Shard) and item.dim == first.dim else item for item in layout.placements),
        layout.host,
    )


def input_layout(program: Program, name: str) -> Layout:
    """Layout in which an input is read."""
    layout = program.value(name).layout
    return _read_layout(layout) if program.step.batch_shares else layout
