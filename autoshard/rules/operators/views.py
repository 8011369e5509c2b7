"""Views and copies that only move elements. Dims that cannot be sharded are literal sizes."""

from __future__ import annotations

import sys

from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    Localise,
    NoRule,
    OperatorCall,
    integers,
    letters,
    parts,
    replaced,
    term,
)
from autoshard.rules.algebra.operator_record import CodeWriter, Given, Names, Operator, Work, each
from autoshard.rules.algebra.saved_for_backward import NOTHING
from autoshard.rules.algebra.variant_record import OperatorVariant
from autoshard.rules.algebra.view_strides import expanded, permuted, reshaped, same, sliced, transposed, without_dim


def reshape(call: OperatorCall) -> str:
    """Common refinement of both shapes: (4, 12) -> (4, 3, 4) is `a (b c) -> a b c`; what has none is literal."""
    if 0 in call.shape:
        return f"{term([str(n) for n in call.shape])} -> {term([str(n) for n in call.results[0]])} | linear: 0"
    left: list[str] = []
    right: list[str] = []
    names = iter(letters(26))
    for inputs, outputs in _groups(call.shape, call.results[0]):
        refined = _refine(inputs, outputs)
        if refined is None:
            left += map(str, inputs)
            right += map(str, outputs)
            continue
        named = [next(names) for _ in range(refined[2])]
        left += [_product([named[i] for i in dim]) for dim in refined[0]]
        right += [_product([named[i] for i in dim]) for dim in refined[1]]
    return f"{term(left)} -> {term(right)} | linear: 0"


def _product(names: list[str]) -> str:
    return "1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"


def _groups(left: tuple[int, ...], right: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Shortest runs of dims on both sides with equal products; a run without any left dims is all ones."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(left) or j < len(right):
        inputs: list[int] = []
        outputs: list[int] = []
        a = b = 1
        if i < len(left) and (left[i] == 1 or j == len(right)):
            groups.append(([left[i]], []))
            i += 1
            continue
        if j < len(right) and (right[j] == 1 or i == len(left)):
            groups.append(([], [right[j]]))
            j += 1
            continue
        while not inputs or a != b:
            if a <= b and i < len(left):
                inputs.append(left[i])
                a, i = a * left[i], i + 1
            elif j < len(right):
                outputs.append(right[j])
                b, j = b * right[j], j + 1
            else:
                raise NoRule
        groups.append((inputs, outputs))
    return groups


def _refine(inputs: list[int], outputs: list[int]) -> tuple[list[list[int]], list[list[int]], int] | None:
    """Factor numbers of every dim on both sides, and how many; None if the sizes don't refine each other."""
    left: list[list[int]] = [[] for _ in inputs]
    right: list[list[int]] = [[] for _ in outputs]
    rest_left, rest_right = list(inputs), list(outputs)
    i = j = count = 0
    while True:
        while i < len(rest_left) and rest_left[i] == 1:
            i += 1
        while j < len(rest_right) and rest_right[j] == 1:
            j += 1
        if i == len(rest_left) or j == len(rest_right):
            return left, right, count
        size = min(rest_left[i], rest_right[j])
        if size == 0 or rest_left[i] % size or rest_right[j] % size:
            return None
        left[i].append(count)
        right[j].append(count)
        rest_left[i], rest_right[j], count = rest_left[i] // size, rest_right[j] // size, count + 1


def expand(call: OperatorCall) -> str:
    """Rule of expand: a dim of size 1 becomes a factor that the operand lacks; new dims come first."""
    result = call.results[0]
    names = letters(len(result))
    aligned = names[len(result) - call.rank :]
    left = ["1" if size == 1 else name for size, name in zip(call.shape, aligned, strict=True)]
    return f"{term(left)} -> {term(names)} | linear: 0"


def permute(call: OperatorCall) -> str:
    names = letters(call.rank)
    return f"{term(names)} -> {term([names[dim] for dim in call.dims('dims')])} | linear: 0"


def transpose(call: OperatorCall) -> str:
    names, first, second = letters(call.rank), call.dim("dim0"), call.dim("dim1")
    swapped = replaced(names, {first: names[second], second: names[first]})
    return f"{term(names)} -> {swapped} | linear: 0"


def reverse(call: OperatorCall) -> str:
    """Rule of t, T, mT: the last two dims change places (all of at most two)."""
    names = letters(call.rank)
    last = names[-2:][::-1]
    return f"{term(names)} -> {term(names[:-2] + last)} | linear: 0"


def split(call: OperatorCall) -> str:
    """Rule of pieces in multiples of a unit: thirds are `(3 h) -> h, h, h`, and 8, 4, 4 are `(4 h) -> (2 h), h, h`."""
    dim = call.dim()
    names = letters(call.rank)
    lengths = [shape[dim] for shape in call.results]
    whole, *pieces = parts([sum(lengths), *lengths], "h_")
    results = ", ".join(replaced(names, {dim: piece}) for piece in pieces)
    return f"{replaced(names, {dim: whole})} -> {results} | linear: 0".replace("h_", names[dim])


def cat(call: OperatorCall) -> str:
    """Rule of the mirror of split; empty legacy operands and joining one operand have none."""
    dim = call.dim()
    names = letters(call.rank)
    lengths = [shape[dim] for shape in call.shapes if shape is not None and len(shape) == call.rank]
    if len(lengths) != len(call.shapes):
        raise NoRule
    whole, *pieces = parts([sum(lengths), *lengths], "h_")
    operands = ", ".join(replaced(names, {dim: piece}) for piece in pieces)
    return f"{operands} -> {replaced(names, {dim: whole})} | linear: {_together(call)}".replace("h_", names[dim])


def _together(call: OperatorCall) -> str:
    return "+".join(str(position) for position in range(len(call.shapes)))


def stack(call: OperatorCall) -> str:
    names = letters(call.rank)
    dim = call.dim(rank=call.rank + 1)
    result = [*names[:dim], str(len(call.shapes)), *names[dim:]]
    return f"{', '.join(term(names) for _ in call.shapes)} -> {term(result)} | linear: {_together(call)}"


def unbind(call: OperatorCall) -> str:
    """Rule of unbind: the dim that goes is literal, so every device has all its entries."""
    names = letters(call.rank)
    dim = call.dim()
    results = ", ".join(replaced(names, {dim: ""}) for _ in call.results)
    return f"{replaced(names, {dim: str(call.shape[dim])})} -> {results} | linear: 0"


def slice_dims(call: OperatorCall) -> str:
    """Rule of slice, narrow, pad, unfold: a dim that changes its length is literal on both sides."""
    names = letters(call.rank)
    changed = [dim for dim, (a, b) in enumerate(zip(call.shape, call.results[0], strict=True)) if a != b]
    left = replaced(names, {dim: str(call.shape[dim]) for dim in changed})
    right = replaced(names, {dim: str(call.results[0][dim]) for dim in changed})
    return f"{left} -> {right} | linear: 0"


def unfold(call: OperatorCall) -> str:
    """Rule of windows along a dim, a new last dim each: sharded if they lie side by side, else the dim is literal."""
    if not call.rank:
        raise NoRule
    names = letters(call.rank)
    dim, size, count = call.dim("dimension"), call.integer("size", 1), call.results[0][call.dim("dimension")]
    apart = call.integer("step", 1) == size and count * size == call.shape[dim]
    left = replaced(names, {dim: f"({names[dim]} {size})" if apart else str(call.shape[dim])})
    right = replaced([*names, ""], {dim: names[dim] if apart else str(count), call.rank: str(size)})
    return f"{left} -> {right} | linear: 0"


def pad(call: OperatorCall) -> str:
    """Rule of padding: with anything but zeros it is affine; two paddings that keep the length still move elements."""
    names = letters(call.rank)
    pairs = integers(call.get("pad"))
    dims = [call.rank - 1 - i for i in range(len(pairs) // 2) if pairs[2 * i] or pairs[2 * i + 1]]
    left = replaced(names, {dim: str(call.shape[dim]) for dim in dims})
    right = replaced(names, {dim: str(call.results[0][dim]) for dim in dims})
    zeros = call.get("mode", "constant") != "constant" or not call.get("value")
    return f"{left} -> {right}" + (" | linear: 0" if zeros else "")


def moved(call: OperatorCall) -> str:
    """Rule of flip and roll: the dims along which elements move are whole."""
    names = letters(call.rank)
    dims = call.dims("dims")
    text = f"{term(names)} -> {term(names)}"
    return text + (f" | whole: {' '.join(names[dim] for dim in dims)} | linear: 0" if dims else " | linear: 0")


def tile(call: OperatorCall) -> str:
    """Rule of repeat: whole copies lie after one another, a literal number of them in front of the dim."""
    times = integers(call.get("repeats", call.get("dims")))
    names = ["1"] * (len(times) - call.rank) + letters(call.rank)
    right = [
        str(n) if name == "1" else name if n == 1 else f"({n} {name})" for n, name in zip(times, names, strict=True)
    ]
    return f"{term(letters(call.rank))} -> {term(right)} | linear: 0"


def repeat_interleave(call: OperatorCall) -> str:
    """Rule that repeats each entry of a dim in place, the same number of times: key heads for the query heads that
    share them. `heads` shards the result anywhere; each device repeats the entries that it needs."""
    times = call.get("repeats")
    if call.present != 1 or not isinstance(times, int) or call.get("dim") is None:
        raise NoRule
    names = letters(call.rank)
    factor = names[call.dim()]
    loops = f"{term(names)} -> {replaced(names, {call.dim(): f'({factor} times)'})}"
    if times == 1 or call.shape[call.dim()] == 1:
        return f"{loops} | linear: 0"
    return f"{loops} | linear: 0 | together: heads {factor}*times repeated_part"


def glu(call: OperatorCall) -> str:
    names = letters(call.rank)
    dim = call.dim(default=-1)
    return f"{replaced(names, {dim: f'(2 {names[dim]})'})} -> {term(names)}"


def result_shape(name: str) -> Localise:
    """Localises the argument that states the result's shape."""
    return lambda local: {name: local.result()}


def squeeze(call: OperatorCall) -> str:
    """Rule for explicit dims of one element: else a shard of one element would lose its dim, too."""
    said = call.get("dim")
    dims = (said,) if isinstance(said, int) else said
    if not isinstance(dims, tuple) or any(call.shape[dim] != 1 for dim in dims if isinstance(dim, int)):
        raise NoRule
    return reshape(call)


def localise_split(local: Local) -> dict[str, LocalAttribute]:
    """Local sizes along the split dim (`graph_capture.passes.canonical`)."""
    facts, dim = local.instance.operands[0], dict(local.op.attributes)["dim"]
    assert facts is not None and isinstance(dim, int)
    return {"split_size": tuple(local.result(i)[dim % len(facts.shape)] for i in range(len(local.op.results)))}


def localise_interleave(local: Local) -> dict[str, LocalAttribute]:
    times = {"repeats": local.factor("times")} if local.axes("times") else {}
    return {**times, "output_size": None}


def localise_repeated(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    arguments, x = dict(local.op.attributes), local.instance.operands[0]
    assert x is not None and isinstance(arguments["dim"], int)
    return {"repeats": arguments["repeats"], "dim": arguments["dim"] % len(x.shape)}, (("heads", local.axes("heads")),)


def spell_slice(writer: CodeWriter, operands: Names, arguments: Given) -> str | None:
    """Code of a slice; an open end is captured as sys.maxsize."""
    dim, start, end, step = (arguments.get(key) for key in ("dim", "start", "end", "step"))
    if not isinstance(dim, int) or dim < -1:
        return None
    first = "" if start in (None, 0) else writer.literal(start)
    last = "" if end is None or (isinstance(end, int) and end >= sys.maxsize) else writer.literal(end)
    stride = "" if step in (None, 1) else f":{writer.literal(step)}"
    before = "..., " if dim == -1 else ":, " * dim
    return f"{operands[0]}[{before}{first}:{last}{stride}]"


OPERATORS: dict[str, Operator] = {
    "aten.as_strided": Operator(spelling="{0}.contiguous().as_strided({size}, {stride}<storage_offset=None>)"),
    "aten.cat": Operator(rule=cat, saves=NOTHING, spelling="torch.cat([{*}]<dim=0>)", moves=True, dims_of_result="dim"),
    **each("column_stack diag diag_embed diagonal dstack hstack tile vstack", Operator(in_torch=True)),
    "aten.constant_pad_nd": Operator(rule=pad, saves=NOTHING, spelling="F.pad({0}, {pad}<value=0>)", moves=True),
    "aten.expand": Operator(
        rule=expand,
        localise=result_shape("size"),
        saves=NOTHING,
        view=expanded,
        work=Work.VIEW,
        spelling="{0}.expand({*size})",
        keeps_name=True,
        moves=True,
    ),
    **each("expand_as movedim numpy_T view_as", Operator(work=Work.VIEW)),
    "aten.flip": Operator(rule=moved, saves=NOTHING, spelling="{0}.flip({dims})", dims="dims"),
    "aten.glu": Operator(rule=glu, spelling="F.glu({0}<dim=-1>)", dims="dim"),
    "aten.mT": Operator(rule=reverse),
    "aten.meshgrid": Operator(in_torch=True, returns_list=True),
    "aten.narrow": Operator(
        rule=slice_dims, saves=NOTHING, work=Work.VIEW, spelling="{0}.narrow({dim}, {start|1}, {length})", dims="dim"
    ),
    "aten.pad": Operator(rule=pad, saves=NOTHING, spelling="F.pad({0}, {pad}<mode='constant'><value>)", moves=True),
    "aten.permute": Operator(
        rule=permute,
        saves=NOTHING,
        view=permuted,
        work=Work.VIEW,
        spelling="{0}.permute({*dims})",
        keeps_name=True,
        moves=True,
        dims="dims",
    ),
    "aten.repeat": Operator(rule=tile, saves=NOTHING, spelling="{0}.repeat({*repeats})"),
    "aten.repeat_interleave": Operator(
        rule=repeat_interleave,
        localise=localise_interleave,
        saves=NOTHING,
        spelling="{0}.repeat_interleave({repeats|1}<dim>)",
        dims="dim",
    ),
    "aten.reshape": Operator(
        rule=reshape,
        localise=result_shape("shape"),
        saves=NOTHING,
        view=reshaped,
        spelling="{0}.reshape({*shape})",
        keeps_name=True,
        moves=True,
    ),
    "aten.roll": Operator(rule=moved, saves=NOTHING, spelling="{0}.roll({shifts}, {dims})", moves=True, dims="dims"),
    "aten.rot90": Operator(in_torch=True, dims="dims"),
    "aten.select": Operator(
        rule=unbind,
        saves=NOTHING,
        view=without_dim,
        work=Work.VIEW,
        spelling="{0}.select({dim}, {index})",
        moves=True,
        dims="dim",
    ),
    "aten.slice": Operator(
        rule=slice_dims, saves=NOTHING, view=sliced, work=Work.VIEW, spelling=spell_slice, moves=True, dims="dim"
    ),
    "aten.split": Operator(
        rule=split,
        localise=localise_split,
        saves=NOTHING,
        view=same,
        work=Work.VIEW,
        spelling="{0}.split({split_size|split_sizes}<dim=0>)",
        returns_list=True,
        moves=True,
        dims="dim",
    ),
    "aten.squeeze": Operator(
        rule=squeeze,
        saves=NOTHING,
        view=reshaped,
        work=Work.VIEW,
        spelling="{0}.squeeze(<@dim>)",
        keeps_name=True,
        moves=True,
        dims="dim",
    ),
    "aten.stack": Operator(rule=stack, saves=NOTHING, spelling="torch.stack([{*}]<dim=0>)", dims_of_result="dim"),
    "aten.t": Operator(rule=reverse, work=Work.VIEW, spelling="{0}.t()", moves=True),
    "aten.transpose": Operator(
        rule=transpose,
        saves=NOTHING,
        view=transposed,
        work=Work.VIEW,
        spelling="{0}.transpose({dim0}, {dim1})",
        keeps_name=True,
        moves=True,
        dims="dim0 dim1",
    ),
    "aten.unbind": Operator(
        rule=unbind,
        saves=NOTHING,
        view=without_dim,
        work=Work.VIEW,
        spelling="{0}.unbind(<@dim=0>)",
        returns_list=True,
        dims="dim",
    ),
    "aten.unfold": Operator(
        rule=unfold,
        saves=NOTHING,
        work=Work.VIEW,
        spelling="{0}.unfold({dimension}, {size}, {step})",
        moves=True,
        dims="dimension",
    ),
    "aten.unsqueeze": Operator(
        rule=reshape,
        saves=NOTHING,
        view=reshaped,
        work=Work.VIEW,
        spelling="{0}.unsqueeze({dim})",
        keeps_name=True,
        moves=True,
        dims_of_result="dim",
    ),
    "aten.view": Operator(
        rule=reshape,
        localise=result_shape("size"),
        work=Work.VIEW,
        spelling="{0}.reshape({*size})",
        keeps_name=True,
        moves=True,
    ),
}
VARIANTS: dict[str, OperatorVariant] = {
    "repeated_part": OperatorVariant(localise=localise_repeated),
}
