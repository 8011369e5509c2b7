"""`model_parallel.py`: the header, what train.py and convert.py need to know, and the classes. Of a pipeline, see
`part_files`."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from autoshard.code_text import WIDTH, printable, quoted, typed_lines
from autoshard.emit.classes import ClassContext, class_texts, operator_places
from autoshard.emit.code_lines import docstring, packed, statement
from autoshard.emit.header import Header
from autoshard.emit.markers.marker_check import check_markers
from autoshard.emit.user_operators import registering_lines
from autoshard.errors import UsageError
from autoshard.ir.dynamic import DynamicSize
from autoshard.ir.layout import PARTIAL, Shard
from autoshard.ir.plan import meshes_text
from autoshard.ir.program import Compute, GradientBucket, Program
from autoshard.program.early_reductions import ALONE, SHARED, with_column_parallel
from autoshard.program.label_counts import CLASS, labels_program
from autoshard.program.module_tree import module_tree
from autoshard.program.weight_buckets import paths_by_dtype
from autoshard.program.weights import careful_casts, gathered_weights
from autoshard.redistribute import CALLS
from autoshard.replay.free_sizes import free_size
from autoshard.replay.other_sizes import OtherSizes, same_code
from autoshard.rules.operators import VARIANTS
from autoshard.units import format_bytes, format_seconds

RUNTIME_NAMES = frozenset({
    "BatchShares", "Handed", "ParallelMesh", "Places", "by_size", "float8_linear", "held_indices", "local",
    "cast_weight", "counted", "regather_before", "recomputed", "rotate_half", "shard_buffer", "shard_parameter",
    "shard_size", "parallel_cross_entropy", "parallel_mean", "parallel_mse_loss", "vocabulary_parallel_embedding",
    "register_operators", "to_device", "to_host", ALONE, SHARED,
}.union(CALLS, VARIANTS))  # fmt: skip
_RESERVED = RUNTIME_NAMES | {
    "BUCKETS", "DYNAMIC_SIZES", "EVALUATION", "F", "FIXED_SIZES", "FREE_SIZES", "GATHERS_AGAIN", "GRADIENT_BUCKETS",
    "HAS_LOSS", "HOST_TABLES", "Holder", "IGNORED", "DEVICES_PER_NODE", "INPUTS", "LABEL_COUNTS", "LOSS_AXES", CLASS,
    "BATCH_SHARES", "BUFFERS", "MESH", "MESHES", "MICRO_BATCHES", "OPTIMIZER", "OTHER_NUMBERS", "PACKED_BY", "PADDING",
    "PLAN", "PRECISION", "SHARED", "STAGES",
    "PLACE_INPUTS", "Tensor", "UNEVEN", "UPDATES_BUFFERS",
    "WEIGHT_BUCKETS", "ZERO", "annotations", "block", "build_labels", "build_model",
    "build_pipeline", "first_random", "float", "i", "len", "mesh", "nn", "path", "range", "self", "super", "torch",
}  # fmt: skip
_NO_CLASS = _RESERVED | {"Axis", "Random", "Sharding"} | frozenset(dir(builtins))
_ZERO = {
    1: "weights in shards are gathered once a step, and whole gradients of all micro-batches scattered once",
    2: "weights in shards are gathered once a step, and the gradients of each micro-batch scattered",
    3: "weights in shards are gathered in every micro-batch",
}
DOCUMENT_INPUTS = frozenset({"position_ids", "positions", "document_ids", "documents"})
HOLDER = '''
class Holder(nn.Module):
    """Parameters and modules under the names that the original model gives them."""

    def __init__(self, **members: Tensor | nn.Module) -> None:
        super().__init__()
        for name, member in members.items():
            if isinstance(member, nn.Parameter | nn.Module):
                setattr(self, name, member)
            else:
                self.register_buffer(name, member)
'''


def operator_lines(program: Program, text: str, others: OtherSizes | None = None) -> dict[str, tuple[int, str]]:
    """Op -> (line of `text`, the model_parallel.py of this program, from 1; class) of the statement that calls it.
    `others`: the same at other sizes, see `other_sizes`.

    Of equal modules the first stands for all. An op whose line is another one in `text` is left out.
    """
    lines = text.splitlines()
    package = _sized(program, others or OtherSizes())
    places = operator_places(package)
    located = _line_places(lines, places)
    if len(located) == len(places) or not package.others:
        return located
    return _line_places(lines, operator_places(with_sizes(program, package.others)))


def _line_places(lines: list[str], places: Mapping[str, tuple[str, int, str]]) -> dict[str, tuple[int, str]]:
    heads = {line: number for number, line in enumerate(lines)}
    located = {}
    for op, (name, line, wanted) in places.items():
        at = heads.get(f"class {name}(nn.Module):", len(lines)) + line
        if at < len(lines) and lines[at] == wanted:
            located[op] = at + 1, name
    return located


def context(program: Program, free: frozenset[str] = frozenset(), title: str = "") -> ClassContext:
    """Context of a program's classes, made once, as the code, the same at other sizes, and its report need it. `free`:
    reserved names that a class may take. `title`: what its root is."""
    known = program.once(_contexts)
    if (free, title) not in known:
        known[free, title] = _context(program, free, title)
    return known[free, title]


def _contexts(program: Program) -> dict[tuple[frozenset[str], str], ClassContext]:
    """Cache of the contexts of a program, empty at first."""
    return {}


def _context(program: Program, free: frozenset[str], title: str, others: OtherSizes | None = None) -> ClassContext:
    tree = with_column_parallel(module_tree(program, _NO_CLASS - free, others.programs if others else ()))
    state = {p.value: p for p in (*program.parameters, *program.buffers)}
    reserved = frozenset(_RESERVED | {d.name for d in tree.definitions})
    operators = [ins for ins in program.instructions if isinstance(ins, Compute)]
    targets = {op.op: op.target.rpartition(".")[2] for op in operators}
    weight_sets = gathered_weights(program), careful_casts(program)
    return ClassContext(program, tree, reserved, state, targets, *weight_sets, title)


def with_sizes(
    program: Program, others: OtherSizes, free: frozenset[str] = frozenset(), title: str = ""
) -> ClassContext:
    """The `context` whose numbers follow the batch and the sequence, where the program at `others` gives the same code;
    else one of the two; else none."""
    for sizes in (others, *others.fewer):
        if sizes:
            farthest, theirs = sizes.of_the_farthest(program)
            package = _sized(program, sizes, free, title)
            if same_code(class_texts(package), class_texts(_sized(farthest, theirs, free, title))):
                return package
    return context(program, free, title)


def check_followed(dynamic: Sequence[DynamicSize], others: OtherSizes) -> None:
    """UsageError where code is the same at `others` for fewer sizes than are `dynamic`."""
    lost = [size.name for size in dynamic if size.name not in others.names]
    if lost:
        message = f"the plan's code does not follow {' and '.join(lost)}: it comes out differently at other sizes"
        raise UsageError(message, "another mesh or strategy, or the size left out of the dynamic ones")


def _sized(program: Program, others: OtherSizes, free: frozenset[str] = frozenset(), title: str = "") -> ClassContext:
    """The `context` at these other sizes, with classes that are equal at all of them as one class, so that it is
    written once."""
    known = program.once(_sized_contexts)
    key = (*map(id, others.programs), others.planned, free, title)
    if key not in known:
        known[key] = replace(_context(program, free, title, others), others=others)
    return known[key]


def _sized_contexts(program: Program) -> dict[Hashable, ClassContext]:
    """Cache by address of the programs at other sizes, which the context keeps so that no other object gets it."""
    return {}


def model_file(program: Program, header: Header) -> str:
    """The text of model_parallel.py."""
    package = with_sizes(program, header.others)
    labels = labels_context(program, package.others)
    for one in (package, labels):
        check_followed(header.dynamic, one.others if one is not None else package.others)
    classes = [*class_texts(package), *(class_texts(labels) if labels is not None else ())]
    code = "\n\n\n".join("\n".join(lines) for lines in classes)
    registering = registering_lines(header.registrations)
    names = names_in("\n".join([code, *registering])) | ({"by_size"} if header.buckets else set())
    names |= {"BatchShares"} if program.step.batch_shares else set()
    holder = [HOLDER.strip("\n")] if "Holder" in names else []
    parts = [
        head_lines(program, header),
        imports(names, len(header.buckets)),
        registering,
        facts(program, header, package.others if labels is None else package.others.among(labels.others)),
    ]
    head = "\n".join("\n".join(part) for part in parts if part)
    functions = (_build_model(package.tree.root.name, bool(header.buckets)), build_labels(labels), _build_pipeline())
    end = ["\n".join(lines) for lines in functions]
    end += ["\n".join(gradient_buckets(program)), "\n".join(weight_buckets(program))]
    text = "\n\n\n".join([head, *holder, code, *end]) + "\n"
    check_markers(text, [package, labels])
    return text


def labels_context(program: Program, others: OtherSizes | None = None) -> ClassContext | None:
    """Context of the class that makes the losses' labels, None if no loss counts any. `others`: see `with_sizes`."""
    title = "What a step's labels are counted of: for each of LABEL_COUNTS, its labels in one micro-batch."
    if not program.label_counts:
        return None
    sizes = others.each(labels_program) if others else OtherSizes()
    return with_sizes(labels_program(program), sizes, frozenset({CLASS}), title)


def head_lines(program: Program, header: Header) -> list[str]:
    shape = " x ".join(f"{name}={size}" for name, size in program.mesh.axes)
    each = f" on each of {program.step.stages} {program.step.word}s" if program.step.stages > 1 else ""
    where = f"the mesh {shape}{each}" if not program.others else meshes_text(program.meshes, program.step.word)
    predicted = (
        f"{format_seconds(header.predicted_seconds, 3)} a step, {format_bytes(header.predicted_peak_bytes)} a device"
    )
    text = [
        f"{printable(program.name)} over {program.firsts[-1]} devices: {where}.",
        "",
        *textwrap.wrap(
            printable(f"Written by autoshard ({header.versions or 'unknown version'}) from plan {header.plan_hash}:"),
            WIDTH,
        ),
        *(f"  {line}" for line in typed_lines(printable(header.command), WIDTH - 4)),
        _bucket_words(header) or f"Predicted for {printable(header.hardware)}: {predicted}.",
        "",
        "Every rank runs this code on local tensors; what crosses devices is a call that names the mesh axis.",
        *(line for words in header.strategy for line in textwrap.wrap(words + ".", WIDTH, subsequent_indent="  ")),
        "",
        "Comments give global shapes and layouts, one placement per mesh axis: S<d> sharded along dim d, R replicated,",
        "R+ replicated with a gradient that is the sum over the axis, P a partial sum of the value.",
    ]
    return docstring("\n".join(text), 0)


def names_in(code: str) -> set[str]:
    try:
        return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError) as error:
        raise AssertionError(f"model_parallel.py as written is no Python: {error}") from error


def imports(used: set[str], smaller: int = 0) -> list[str]:
    """Import lines. `smaller`: how many files have the forward of smaller steps."""
    names = sorted({"ParallelMesh"} | (RUNTIME_NAMES & used), key=lambda name: (name[0].islower(), name))
    lines = ["", "from __future__ import annotations", ""]
    lines += ["import torch"]
    lines += ["import torch.nn.functional as F"] if "F" in used else []
    lines += ["from torch import Tensor, nn", ""]
    lines += [f"import smaller_{number}" for number in range(smaller)]
    one = f"from runtime import {', '.join(names)}"
    lines += [one] if len(one) <= WIDTH else ["from runtime import (", *(f"    {name}," for name in names), ")"]
    return lines


def facts(
    program: Program,
    header: Header,
    others: OtherSizes | None = None,
    shared: Mapping[str, tuple[int, ...]] | None = None,
    loss_part: int | None = None,
) -> list[str]:
    """Module-level constants. `others`: the same at other sizes, where its code is the same. `loss_part`: the part that
    makes the loss, where it is not the last."""
    mesh = ", ".join(f"{quoted(name)}: {size}" for name, size in program.mesh.axes)
    lines = [
        "",
        f"PLAN = {quoted(header.plan_hash)}",
        f"MESH = {{{mesh}}}  # outermost first; ranks are row-major over it",
        f"DEVICES_PER_NODE = {header.devices_per_node}  # as planned: neighbouring ranks are on one node",
    ]
    lines += [
        "# name: global shape, dtype, layout, synthetic numbers from [low, high), floats normal where low is high",
        "INPUTS = {",
    ]
    for item in header.inputs:
        fields = f"{item.shape}, {quoted(item.dtype)}, {quoted(item.layout)}, {item.low}, {item.high}"
        lines += statement(f"{quoted(item.name)}: ({fields}),", 1)
    lines += [
        "}",
        *_free_lines(program, header, others or OtherSizes()),
        *_dynamic_lines(header),
        *_bucket_lines(header),
    ]
    lines += [f"OPTIMIZER = {quoted(program.optimizer)}", f"PRECISION = {quoted(program.precision)}"]
    lines += _place_lines(program)
    stages = program.step.part_stages
    ending = program.of_stage(stages[-1 if loss_part is None else loss_part])  # on the mesh where the loss is made
    loss = ending.loss
    lines.append(f"HAS_LOSS = {loss is not None}  # the first output")
    axes = _partial_axes(ending, loss) if loss is not None else []
    regathers = any(isinstance(step, Compute) and step.regathered for step in program.instructions)
    lines.append(f"GATHERS_AGAIN = {regathers}  # backward gathers weights that forward has freed")
    lines.append(f"ZERO = {program.step.zero}  # {_ZERO[program.step.zero]}")
    lines.append(f"LOSS_AXES = {_names(axes)}  # the loss of the whole batch is the sum over these")
    buffers = any(part.buffers for part in (program, *dict(program.others).values()))
    lines.append(f"BUFFERS = {buffers}  # it holds some")
    lines.append(f"UPDATES_BUFFERS = {bool(program.buffer_updates)}  # such as the averages of batch norm")
    lines += _evaluation_lines(header.evaluation)
    tables = [p.path for p in program.parameters if p.layout.host]
    lines += statement(f"HOST_TABLES: list[str] = [{', '.join(map(quoted, tables))}]", 0, "in host memory")
    packed_by = [entry.name for entry in header.inputs if entry.name in DOCUMENT_INPUTS]
    lines += statement(f"PACKED_BY = {_names(packed_by)}", 0, "inputs that tell the documents of a row apart")
    uneven = any(p.layout.in_parts for part in (program, *dict(program.others).values()) for p in part.parameters)
    lines.append(f"UNEVEN = {uneven}  # a table is in parts of given lengths")
    lines.append(
        f"OTHER_NUMBERS = {header.other_numbers}  # plans for other numbers of devices are in folders devices_N"
    )
    lines.append(f"MICRO_BATCHES = {program.step.micro_batches}  # a step; INPUTS is one of them")
    lines += _share_lines(program)
    lines += ["# Parameters that several stages hold: their gradients are summed over these."]
    pairs = [f"{quoted(path)}: {stages}" for path, stages in (shared or {}).items()]
    lines += statement(f"SHARED: dict[str, tuple[int, ...]] = {{{', '.join(pairs)}}}", 0)
    lines.append(f"STAGES = {program.step.stages}")
    lines += statement(f"PART_STAGES = {program.step.part_stages}", 0, "of each part of the model")
    last = len(program.step.part_stages) - 1 if loss_part is None else loss_part
    lines.append(f"LOSS_PART, PLACED = {last}, {program.step.placed}")
    said = "# Losses that are means over labels: the axes that cut these, the label that does not count, class weights."
    counts = (f"({_names([*count.axes])}, {count.ignored}, {quoted(count.weights)})" for count in program.label_counts)
    lines += [said, *statement(f"LABEL_COUNTS: list[tuple[tuple[str, ...], int, str]] = [{', '.join(counts)}]", 0)]
    return lines


def _share_lines(program: Program) -> list[str]:
    """Lines on how the unequal shares of a step are distributed."""
    if not program.step.batch_shares:
        return ["BATCH_SHARES = None  # of a micro-batch all devices compute equal parts"]
    axis, counts = program.mesh.names[0], program.step.batch_shares
    layouts = [program.value(name).layout for name in program.inputs]
    firsts = [(layout.placements[0], layout) for layout in layouts]
    cuts = [f"({cut.dim}, {quoted(str(layout))})" if isinstance(cut, Shard) else "None" for cut, layout in firsts]
    said = (
        f"# Each micro-batch is cut into {len(counts)} slices; devices along {axis} compute so many of those of a step."
    )
    return [said, *statement(f"BATCH_SHARES = BatchShares({quoted(axis)}, {counts}, [{', '.join(cuts)}])", 0)]


def _place_lines(program: Program) -> list[str]:
    """Lines on the meshes of places, and how inputs lie where places have their own."""
    meshes = program.meshes if program.step.placed else ()
    rows = [f"{{{', '.join(f'{quoted(name)}: {size}' for name, size in mesh.axes)}}}" for mesh in meshes]
    said = "of each place; ranks count through them"
    lines = statement(f"MESHES: list[dict[str, int]] = [{', '.join(rows)}]", 0, said)
    items = []
    for place, other in program.others:
        pairs = (f"{quoted(other.value(n).tensor)}: {quoted(str(other.value(n).layout))}" for n in other.inputs)
        items.append(f"{place}: {{{', '.join(pairs)}}}")
    kind = "dict[int, dict[str, str]]"
    return lines + statement(f"PLACE_INPUTS: {kind} = {{{', '.join(items)}}}", 0, "layouts on places with another mesh")


def _evaluation_lines(why: str) -> list[str]:
    """Lines of EVALUATION: why the package does not evaluate, "" where it does."""
    if not why:
        return ['EVALUATION = ""  # without dropout, it is the forward of training']
    parts = [f"    {quoted(line)}" for line in textwrap.wrap(why, WIDTH - 8, drop_whitespace=False)]
    return ["# Why --eval-data is refused.", "EVALUATION = (", *parts, ")"]


def _free_lines(program: Program, header: Header, others: OtherSizes) -> list[str]:
    """Lines on which sizes may differ from the planned ones."""
    free, fixed = [], []
    for size in header.free_sizes:
        allowed = free_size(program, others, size)
        if isinstance(allowed, str):
            why = [f"        {quoted(line)}" for line in textwrap.wrap(allowed, WIDTH - 12, drop_whitespace=False)]
            fixed += [f"    {quoted(size.name)}: (", *why, "    ),"]
        else:
            dims = ", ".join(f"{quoted(name)}: {numbers}" for name, numbers in allowed.dims)
            sizes = f"{allowed.planned}, {allowed.unit}, {allowed.least}, {allowed.most}"
            free += statement(f"{quoted(size.name)}: ({sizes}, {{{dims}}}),", 1)
    kind = "dict[str, tuple[int, int, int, int, dict[str, tuple[int, ...]]]]"
    said = "# Sizes that may be others than planned: as planned, of what a multiple, from, to, and dims of the inputs."
    lines = [said, "FREE_SIZES = {", *free, "}"] if free else [f"FREE_SIZES: {kind} = {{}}"]
    if not fixed:
        return [*lines, "FIXED_SIZES: dict[str, str] = {}  # and those that may not, and why"]
    message = "# And those" if free else "# Sizes of the inputs"
    return [*lines, f"{message} that can't be others than planned, and why.", "FIXED_SIZES = {", *fixed, "}"]


def _dynamic_lines(header: Header) -> list[str]:
    """Lines on which sizes may differ in each step."""
    said = "# Sizes that may be others in each step: from, to (0: any), divisor, remainder, and dims of the inputs."
    rows = []
    for size in header.dynamic:
        dims: dict[str, list[int]] = {}
        for name, dim in size.dims:
            dims.setdefault(name, []).append(dim)
        held = ", ".join(f"{quoted(name)}: ({', '.join(map(str, numbers))},)" for name, numbers in dims.items())
        limits = f"{size.least}, {size.most}, {size.divisor}, {size.remainder}"
        rows += statement(f"{quoted(size.name)}: ({limits}, {{{held}}}),", 1)
    kind = "dict[str, tuple[int, int, int, int, dict[str, tuple[int, ...]]]]"
    lines = [said, f"DYNAMIC_SIZES: {kind} = {{", *rows, "}"] if rows else []
    if header.padding:
        lines += statement(f"PADDING = {_names([*header.padding])}", 0, "of these, what --pad pads batches along")
    if header.ignored:
        ignored = ", ".join(f"{quoted(name)}: {label}" for name, label in header.ignored.items())
        lines += statement(f"IGNORED = {{{ignored}}}", 0, "the label of an input that does not count")
    return lines


def gradient_buckets(program: Program) -> list[str]:
    lines = ["# Gradients that one flat all-reduce over these axes sums once backward has made the last, in order."]
    if not program.gradient_buckets:
        return [*lines, "GRADIENT_BUCKETS: list[tuple[tuple[str, ...], list[str]]] = []"]
    lines += ["# fmt: off", "GRADIENT_BUCKETS: list[tuple[tuple[str, ...], list[str]]] = ["]
    queue = [*program.gradient_buckets]
    while queue:
        count = _shifted(queue)
        texts = [_numbered(queue[0].parameters[0], path) if count > 1 else quoted(path) for path in queue[0].parameters]
        held = [f"        {line}" for line in packed(texts, WIDTH - 8)]
        axes = _names([*queue[0].axes])
        if count > 1:
            first = int(_NUMBER.split(queue[0].parameters[0])[1])
            lines += [f"    *(({axes}, [", *held, f"    ]) for i in range({first}, {first - count}, -1)),"]
        else:
            lines += [f"    ({axes}, [", *held, "    ]),"]
        queue = queue[count:]
    return [*lines, "]", "# fmt: on"]


_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")


def _shifted(buckets: Sequence[GradientBucket]) -> int:
    """Number of first buckets that are alike but for the number of a block, which is one less in each."""
    head = [_NUMBER.split(path, maxsplit=1) for path in buckets[0].parameters]
    if any(len(part) < 3 or "{" in path or "}" in path for part, path in zip(head, buckets[0].parameters, strict=True)):
        return 1
    for less, bucket in enumerate(buckets):
        paths = tuple(f"{before}{int(number) - less}{after}" for before, number, after in head)
        if (paths, bucket.axes) != (bucket.parameters, buckets[0].axes):
            return max(less, 1)
    return len(buckets)


def _numbered(first: str, path: str) -> str:
    """A name as a formatted text: `i` stands for the number in `first`."""
    before, number, after = _NUMBER.split(path, maxsplit=1)
    more = int(number) - int(_NUMBER.split(first, maxsplit=1)[1])
    index = f"i {'-+'[more > 0]} {abs(more)}" if more else "i"
    return f"f{quoted(f'{before}{{{index}}}{after}')}"


def weight_buckets(program: Program) -> list[str]:
    head = "WEIGHT_BUCKETS: list[tuple[tuple[str, ...], dict[torch.dtype, list[str]], int, bool]] = ["
    lines = [
        "# Weights that one flat all-gather brings, one block ahead, and whose gradients one flat reduce-scatter sums:"
    ]
    lines += ["# axes, names by dtype, number of the block, and whether they stay whole from forward to backward."]
    if not program.weight_buckets:
        return [*lines, f"{head}]"]
    lines += ["# fmt: off", head]
    for bucket in program.weight_buckets:
        lines.append(f"    ({_names([*bucket.axes])}, {{")
        for dtype, paths in paths_by_dtype(program, bucket).items():
            names = [f"            {line}" for line in packed([*map(quoted, paths)], WIDTH - 12)]
            lines += [f"        torch.{dtype}: [", *names, "        ],"]
        lines.append(f"    }}, {bucket.block}, {bucket.retained}),")
    return [*lines, "]", "# fmt: on"]


def _names(axes: list[str]) -> str:
    return f"({', '.join(map(quoted, axes))}{',' if len(axes) == 1 else ''})"


def _partial_axes(program: Program, loss: str) -> list[str]:
    placements = program.value(loss).layout.placements
    return [name for name, placement in zip(program.mesh.names, placements, strict=True) if placement == PARTIAL]


def build_labels(labels: ClassContext | None) -> list[str]:
    call = "None" if labels is None else f"{labels.tree.root.name}(mesh)"
    return [
        "def build_labels(mesh: ParallelMesh) -> nn.Module | None:",
        '    """The labels of LABEL_COUNTS from the inputs, None without any."""',
        f"    return {call}",
    ]


def _build_pipeline() -> list[str]:
    return [
        "def build_pipeline(model: nn.Module, mesh: ParallelMesh) -> None:",
        '    """There is one stage."""',
    ]


def _build_model(root: str, sized: bool) -> list[str]:
    call = f"by_size({root}(mesh), mesh, [own.build_model for _, own in BUCKETS])" if sized else f"{root}(mesh)"
    return [
        "def build_model(mesh: ParallelMesh) -> nn.Module:",
        '    """The model of this rank; parameters and buffers are uninitialised."""',
        f"    return {call}",
    ]


def _bucket_words(header: Header) -> str:
    """Sentence for a file of smaller steps; "" for others."""
    largest = ", ".join(f"{name} up to {size}" for name, size in header.bucket)
    return f"Steps of {largest} run this forward, on the parameters of model_parallel.py." if largest else ""


def _bucket_lines(header: Header) -> list[str]:
    """Lines on which files have the forward of smaller steps."""
    if not header.buckets:
        return []
    rows = [
        f"    ({{{', '.join(f'{quoted(name)}: {size}' for name, size in most)}}}, smaller_{number}),"
        for number, most in enumerate(header.buckets)
    ]
    said = "# Steps none of whose sizes is above these run the forward of that file, on the parameters of this one."
    return [said, "BUCKETS = (", *rows, ")"]
