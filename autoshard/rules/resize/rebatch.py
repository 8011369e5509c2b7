"""Graphs of the same model at another batch, without capturing it again.

From dim 0 of the inputs the batch is followed by the rules' factors, both ways, through every operator: a dim that
holds a factor with the batch in it holds the batch. Sizes among the arguments follow the shapes, as on shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard.errors import UsageError
from autoshard.graph_capture.dynamic_sizes.graph_numbers import at_sizes, sizes_of
from autoshard.graph_capture.dynamic_sizes.numbers import follows_of, points_of
from autoshard.graph_capture.training.overwritten_buffers import note_saved
from autoshard.ir.graph import Attribute, Graph, Op, Tensor
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.argument_rules import Local, NoRule
from autoshard.rules.algebra.instance import Instance
from autoshard.rules.algebra.notation import RuleError
from autoshard.rules.algebra.strategy import Choice, Strategy
from autoshard.rules.granularities import Signature, signature_of, touching
from autoshard.rules.operator_table import bound, instance, rule_text
from autoshard.rules.operators import record
from autoshard.rules.resize.captured_length import at_another_batch

_ONE = Mesh((("all", 1),))
_IN_ORDER = ("aten.unsqueeze", "aten.view", "aten.reshape", "aten.to")  # of what has one dim that is not 1
_SIZES = ("size", "shape")  # arguments of what is made from nothing


@dataclass(frozen=True)
class _Place:
    """The batch in a dim of a tensor: the dim is (before, batch, after), outermost first."""

    tensor: str
    dim: int
    before: int
    after: int


def batch_size(graph: Graph) -> int:
    """Samples of the captured batch: dim 0 of most inputs."""
    return samples_of([graph.tensor(name).shape for name in graph.inputs])


def samples_of(shapes: Sequence[Sequence[int]]) -> int:
    """Number of samples in inputs with these shapes. UsageError if none has a batch."""
    counts = [shape[0] for shape in shapes if shape]
    if not counts:
        raise UsageError(
            "the model has no input with a batch: nothing tells how many samples it takes", "--micro-batches"
        )
    return max(counts, key=counts.count)


def check_several(shapes: Sequence[Sequence[int]]) -> None:
    """Raises UsageError if the batch of inputs with these shapes has one sample."""
    if samples_of(shapes) == 1:
        message = "the model was captured with one sample, which hides where its batch is"
        raise UsageError(message, "capture it with a batch of 2 or more")


def rebatched(graph: Graph, batch: int) -> Graph:
    """`graph` for inputs of `batch` samples. UsageError if the batch can't be followed.

    Another UsageError if samples are compared with each other, as in a contrastive loss: with fewer it is another loss.
    """
    old_batch = batch_size(graph)
    if batch == old_batch:
        return graph
    return _rebatched_at_all_sizes(graph, batch) if graph.dynamic else _rebatched(graph, old_batch, batch)


def _rebatched_at_all_sizes(graph: Graph, batch: int) -> Graph:
    """`graph` with dynamic sizes at another batch; its numbers follow the sizes as at several points."""
    at = sizes_of(graph)
    points = points_of(graph.dynamic, tuple(at[size.name] for size in graph.dynamic))
    names = [size.name for size in graph.dynamic]
    plain = [replace(at_sizes(graph, dict(zip(names, point, strict=True))), dynamic=(), follows=()) for point in points]
    graphs = [_rebatched(one, batch_size(one), batch) for one in plain]
    return replace(graphs[0], dynamic=graph.dynamic, follows=follows_of(graphs, points, names))


def _rebatched(graph: Graph, old_batch: int, batch: int) -> Graph:
    check_several([(old_batch,)])
    places = _followed(graph, old_batch)
    _check_apart(graph, places)
    shapes = {tensor.name: list(tensor.shape) for tensor in graph.tensors}
    for place in places:
        shapes[place.tensor][place.dim] = place.before * batch * place.after
    tensors = {t.name: replace(t, shape=tuple(shapes[t.name])) for t in graph.tensors}
    changed = {place.tensor for place in places}
    ops = tuple(_resized(graph, op, tensors) if changed.intersection(op.results) else op for op in graph.ops)
    carried = note_saved(replace(graph, tensors=tuple(tensors[t.name] for t in graph.tensors), ops=ops))
    carried = replace(carried, free_sizes=tuple(at_another_batch(size, graph, carried) for size in graph.free_sizes))
    _check(graph, carried, changed)
    return carried


def batch_dims(graph: Graph) -> dict[str, int]:
    """Tensor -> its dim that holds the batch; the outermost if there are two."""
    dims: dict[str, int] = {}
    for place in _followed(graph, batch_size(graph)):
        dims[place.tensor] = min(place.dim, dims.get(place.tensor, place.dim))
    return dims


def _check_apart(graph: Graph, places: Iterable[_Place]) -> None:
    dims: dict[str, set[int]] = {}
    for place in places:
        dims.setdefault(place.tensor, set()).add(place.dim)
    for op in graph.ops:
        if any(len(dims.get(name, ())) > 1 for name in op.results):
            message = f"{op.name} ({op.target} in {op.module or 'the model'}, {op.source or 'no source'}) compares the "
            message += (
                "samples of a batch with each other: planned at another batch the model would compute something else"
            )
            raise UsageError(message, "capture it at that batch")


def _check(graph: Graph, carried: Graph, changed: set[str]) -> None:
    """Checks that the rule of every operator fits the new shapes as it did the old ones."""
    known: set[tuple[object, ...]] = set()
    for before, op in zip(graph.ops, carried.ops, strict=True):
        key = (op.target, op.attributes, _facts(carried, op))
        if key not in known and changed.intersection((*op.operands, *op.results)):
            known.add(key)
            if (_rule(carried, op) is None) != (_rule(graph, before) is None):
                raise _lost(op)


def _followed(graph: Graph, batch: int) -> set[_Place]:
    """Places of the batch in every dim that holds it."""
    signatures, touched = _signatures(graph), touching(graph)
    stored = {p.tensor: p.path for p in (*graph.parameters, *graph.buffers)}
    picked = _picked(graph, batch)
    starts = [_Place(name, 0, 1, 1) for name in graph.inputs if graph.tensor(name).shape[:1] == (batch,)]
    places, queue = set(starts), deque(starts)
    dims = {(place.tensor, place.dim): place for place in starts}
    while queue:
        place = queue.popleft()
        if place.tensor in stored:
            message = f"{stored[place.tensor]} has the size of the batch, which can't change alone"
            raise UsageError(message, "capture it at that batch")
        for op, slot in touched[place.tensor]:
            picks = picked.get(op.name, {})
            if slot == 0 and place.dim in picks:
                continue
            sources = [_Place(str(op.operands[0]), dim, 1, 1) for dim, index in picks.items() if index == slot]
            for other in (*_spread(op, signatures[op.name], slot, place, batch), *sources):
                if dims.setdefault((other.tensor, other.dim), other) != other:
                    raise _lost(op)
                if other not in places:
                    places.add(other)
                    queue.append(other)
    _check_picked(graph, picked, places)
    return places


def _picked(graph: Graph, batch: int) -> dict[str, dict[int, int]]:
    """Op that picks samples by their numbers, `x[torch.arange(batch), ...]` -> dim of x -> the operand that picks."""
    by_op: dict[str, dict[int, int]] = {}
    for op in graph.ops:
        if op.target == "aten.index" and op.operands[0] is not None:
            shape = graph.tensor(op.operands[0]).shape
            indices = [(dim, name) for dim, name in enumerate(op.operands[1:]) if name is not None]
            picks = {dim: dim + 1 for dim, name in indices if shape[dim] == batch and _counts(graph, name, batch)}
            by_op |= {op.name: picks} if picks else {}
    return by_op


def _counts(graph: Graph, name: str, batch: int) -> bool:
    """True if these are the numbers from 0 to `batch`, in order."""
    op = graph.producers.get(name)
    while op is not None and op.target in _IN_ORDER and op.operands[0] is not None:
        if graph.tensor(op.results[0]).numel != batch:
            return False
        op = graph.producers.get(op.operands[0])
    if op is None or op.target != "aten.arange" or graph.tensor(op.results[0]).shape != (batch,):
        return False
    return (op.attribute("start") or 0, op.attribute("step") or 1) == (0, 1)


def _check_picked(graph: Graph, picked: dict[str, dict[int, int]], places: Iterable[_Place]) -> None:
    """Checks that a picked dim holds the batch exactly if the numbers that pick it do."""
    dims = {(place.tensor, place.dim) for place in places}
    held = {tensor for tensor, _ in dims}
    for name, picks in picked.items():
        op = graph.by_op[name]
        if any(((op.operands[0], dim) in dims) != (op.operands[index] in held) for dim, index in picks.items()):
            raise _lost(op)


def _spread(op: Op, signature: Signature, slot: int, place: _Place, batch: int) -> Iterator[_Place]:
    """Places of the same batch in the other dims of an operator. UsageError if no factor holds it."""
    sizes = signature.instance.size
    for factor, holding in signature.holding.items():
        for own_slot, dim, before, after in holding:
            if (own_slot, dim) != (slot, place.dim) or place.before % before or place.after % after:
                continue
            outside, inside = place.before // before, place.after // after
            if outside * batch * inside == sizes[factor]:
                yield from _held(op, holding, outside, inside)
                return
    if slot < len(op.operands) or not (_from_nothing(op) or record(op.target).localise):
        raise _lost(op)


def _held(op: Op, holding: list[tuple[int, int, int, int]], outside: int, inside: int) -> Iterator[_Place]:
    for slot, dim, before, after in holding:
        name = op.operands[slot] if slot < len(op.operands) else op.results[slot - len(op.operands)]
        if name is not None:
            yield _Place(name, dim, before * outside, inside * after)


def _lost(op: Op) -> UsageError:
    message = f"{op.name} ({op.target} in {op.module or 'the model'}, {op.source or 'no source'}) joins the batch with "
    return UsageError(
        message + "something else: the model can't be planned at another batch", "capture it at that batch"
    )


def _signatures(graph: Graph) -> dict[str, Signature]:
    """Signatures by op; constants, which searches ignore, follow the batch like all else."""
    known: dict[tuple[object, ...], Signature] = {}
    signatures = {}
    for op in graph.ops:
        key = (op.target, op.attributes, _facts(graph, op), graph.rule_of.get(op.name))
        if key not in known:
            known[key] = signature_of(_rule(graph, op) or instance(graph, op))
        signatures[op.name] = known[key]
    return signatures


def _facts(graph: Graph, op: Op) -> tuple[object, ...]:
    tensors = [None if name is None else graph.tensor(name) for name in (*op.operands, *op.results)]
    return (len(op.operands), *(t and (t.shape, t.dtype, t.requires_grad) for t in tensors))


def _rule(graph: Graph, op: Op) -> Instance | None:
    """Rule of the op bound to its shapes; None if there is none that fits."""
    try:
        return bound(graph, op, rule_text(graph, op))
    except (NoRule, RuleError):
        return None


def _resized(graph: Graph, op: Op, tensors: dict[str, Tensor]) -> Op:
    """Operator for the new shapes of its operands and results."""
    sizes = _creation_arguments(op, tensors) if _from_nothing(op) else _local(graph, op, tensors)
    return replace(op, attributes=tuple((name, sizes.get(name, value)) for name, value in op.attributes))


def _from_nothing(op: Op) -> bool:
    return record(op.target).repeated or not op.operands


def _creation_arguments(op: Op, tensors: dict[str, Tensor]) -> dict[str, Attribute]:
    """Arguments of a tensor made from nothing, for its new shape."""
    shape = tensors[op.results[0]].shape
    if op.target == "aten.arange":
        if (dict(op.attributes).get("start") or 0, dict(op.attributes).get("step") or 1) != (0, 1):
            raise _lost(op)
        return {"end": shape[0]}
    sizes: dict[str, Attribute] = {name: shape for name, _ in op.attributes if name in _SIZES}
    if not sizes:
        raise _lost(op)
    return sizes


def _local(graph: Graph, op: Op, tensors: dict[str, Tensor]) -> dict[str, Attribute]:
    """Arguments as on a shard of these shapes."""
    function = record(op.target).localise
    if function is None:
        return {}
    bound = instance(graph, op)
    operands = tuple(
        facts and replace(facts, shape=tensors[name].shape) if name is not None else None
        for facts, name in zip(bound.operands, op.operands, strict=True)
    )
    results = tuple(replace(f, shape=tensors[n].shape) for f, n in zip(bound.results, op.results, strict=True))
    whole = Layout.replicated(_ONE)
    strategy = Strategy(
        (Choice("repeat"),), tuple(None if f is None else whole for f in operands), (whole,) * len(results)
    )
    values = function(Local(graph, op, replace(bound, operands=operands, results=results), strategy, _ONE))
    attributes = dict(op.attributes)
    return {name: value for name, value in values.items() if attributes.get(name) is not None}  # type: ignore[misc]
