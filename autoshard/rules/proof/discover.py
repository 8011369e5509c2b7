"""Rules by experiment, for operators that the table lacks: shard dims of small random inputs, see what recombines.

A way to split one or several operands in halves is a factor if every result is the concatenation, or the sum, of the
halves' results. The factors make an ordinary rule, which is proved as the table's are, forward and backward: what fails
its proof is left out. Each operator is tried in a process of its own, which shapes that it does not check may crash.
Discovered rules are cached on disk, and proved again whenever they are read, since the code of an operator may change
under its name. Only operators whose own arguments name no sizes can be split this way.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoshard.graph_capture.tracing import LARGE_ELEMENTS
from autoshard.ir.graph import Attribute, Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.notation import RuleError
from autoshard.rules.operator_table import bound, fits
from autoshard.rules.operators import constants, record
from autoshard.rules.proof.operator_call import call
from autoshard.rules.proof.rule_proof import OpCase, Operand, RunCall, prove, random_operands
from autoshard.system.isolated_process import apart
from autoshard.units import ROUNDING

if TYPE_CHECKING:
    from torch import Tensor

WAYS = 3000  # of cutting operands, at most
MESHES = ("tp=2", "tp=3", "dp=2,tp=2")


@dataclass(frozen=True)
class Factor:
    """A factor: (operand, dim) pairs that are sharded together; the dim of each result they shard, None if it is
    summed; operands that are added, not multiplied."""

    operands: tuple[tuple[int, int], ...]
    results: tuple[int | None, ...]
    added: tuple[int, ...] = ()


def with_discovered(
    graph: Graph, cache: Path | None = None, run_call: RunCall | None = None
) -> tuple[Graph, tuple[str, ...]]:
    """Graph with a rule for each operator that the table lacks and experiment finds, and a warning for each other.

    `cache` is the folder of discovered rules, by default the user's. `run_call` is how packages call an operator, for
    the proofs; by default by its schema.
    """
    rules: list[tuple[str, str]] = []
    lacking: dict[str, tuple[str, str]] = {}
    case_rules: dict[OpCase, str | None] = {}
    folder = cache or user_cache()
    for op in graph.ops:
        known = record(op.target)
        has_rule = known.repeated or (known.rule is not None and fits(graph, op))
        if has_rule or not op.target.count(".") or constants(graph).issuperset(op.results):
            continue
        if op.target.startswith("autoshard."):  # no operator of torch, with which to experiment
            rules += [(op.name, "")] if known.rule is not None else []
            continue
        case = case_of(graph, op)
        if case not in case_rules:
            case_rules[case] = safe_rule(case, folder, run_call, partial(_binds, graph, op))
        rule = case_rules[case]
        if rule or known.rule is not None:
            rules.append((op.name, rule or ""))  # "": the table has one, for another overload
        if not rule:
            why = _NOTHING if rule is not None else _no_end(_path(case, folder))
            lacking.setdefault(op.target, (op.name, why))
    warnings = tuple(
        f"{target} (as in {name}) has no rule and {why}: every device repeats it"
        for target, (name, why) in lacking.items()
    )
    return replace(graph, discovered=tuple(rules)), warnings


_NOTHING = "none was found by experiment"
_STOPPED = "its experiment was stopped from outside (the next plan tries it again)"
_ENDED = (
    "ended its process in an experiment (it does not check the shapes that it is given; once it does, remove {}"
    " to try it again)"
)


def case_of(graph: Graph, op: Op) -> OpCase:
    """Case of the operator with random operands like its own; floating ones in float64."""
    operands: list[Operand | None] = []
    for name in op.operands:
        if name is None:
            operands.append(None)
            continue
        tensor = graph.tensor(name)
        floating = "float" in tensor.dtype
        operands.append(Operand(tensor.shape, "float64" if floating else tensor.dtype, gradient=tensor.requires_grad))
    return OpCase(op.target, tuple(operands), op.attributes)


def user_cache() -> Path:
    """Folder `$XDG_CACHE_HOME/autoshard/rules`, or the same under ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "autoshard" / "rules"


def _binds(graph: Graph, op: Op, text: str) -> bool:
    """True if the rule fits the op's own shapes. One found at small sizes may name one of them, as `a, b -> (a 6)`."""
    try:
        bound(graph, op, text)
    except RuleError:
        return False
    return True


def safe_rule(
    case: OpCase, cache: Path, run_call: RunCall | None = None, binds: Callable[[str], bool] = bool
) -> str | None:
    """`cached_rule` in a process of its own; None if that did not finish. A crash is remembered: it would recur."""
    path = _path(case, cache)
    if _remembered(path).get("ended"):
        return None
    text, crashed = apart(lambda: cached_rule(case, cache, run_call, binds))
    if crashed:
        _remember(path, {"rule": "", "target": case.target, "ended": True})
    return text


def _no_end(path: Path) -> str:
    return _ENDED.format(path) if _remembered(path).get("ended") else _STOPPED


def _remembered(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def cached_rule(case: OpCase, cache: Path, run_call: RunCall | None = None, binds: Callable[[str], bool] = bool) -> str:
    """`discover`, cached on disk; a cached rule that is no longer right is searched for again.

    A rule found at small sizes that does not bind to the operator's shapes is searched for at its own.
    """
    path = _path(case, cache)
    small = reduced(case)
    if small is None:
        return ""
    tried = (small,) if small == case else (small, case)
    text = str(_remembered(path).get("rule", ""))
    if text and binds(text) and any(_can_be_tried(c) and is_right(c, text, run_call=run_call) for c in tried):
        return text
    text = discover(small, run_call)
    if text and not binds(text):
        text = discover(case, run_call) if small != case and _can_be_tried(case) else ""
        text = text if binds(text) else ""
    _remember(path, {"rule": text, "target": case.target})
    return text


def _path(case: OpCase, cache: Path) -> Path:
    return cache / f"{_key(case)}.json"


def _key(case: OpCase) -> str:
    """Cache key of all that a rule depends on but the operator's code: how it is searched for, its name, torch,
    operands and arguments."""
    import torch

    return hashlib.sha256(repr((Path(__file__).read_text("utf-8"), torch.__version__, case)).encode()).hexdigest()[:32]


def _remember(path: Path, content: dict[str, Any]) -> None:
    """Writes the file whole or not at all; a cache that can't be written is no error."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)


def reduced(case: OpCase) -> OpCase | None:
    """The case at small sizes, or at its own if the operator only runs there; None where it can't be tried at all."""
    sizes = sorted({size for operand in case.operands if operand for size in operand.shape if size > 1})
    small = dict(zip(sizes, (2 * n for n in itertools.count(3) if _is_prime(n)), strict=False))  # 3 divides one
    candidates = [case] if _named(case, sizes) else [_resized(case, small), case]
    return next(filter(_can_be_tried, candidates), None)


def _is_prime(number: int) -> bool:
    return all(number % part for part in range(2, number))


def _can_be_tried(case: OpCase) -> bool:
    count = sum(_numel(operand.shape) for operand in case.operands if operand)
    return count <= LARGE_ELEMENTS and _repeats_itself(case)


def _named(case: OpCase, sizes: Sequence[int]) -> bool:
    """True if an argument mentions a size."""
    return any(number in sizes for _, value in case.attributes for number in _integers(value))


def _integers(value: Attribute) -> Iterator[int]:
    if isinstance(value, tuple):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _resized(case: OpCase, small: dict[int, int]) -> OpCase:
    operands = tuple(o and replace(o, shape=tuple(small.get(size, size) for size in o.shape)) for o in case.operands)
    return replace(case, operands=operands)


def _numel(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _repeats_itself(case: OpCase) -> bool:
    """True if the case runs, and gives the same numbers twice: a random operator has no rule."""
    operands = random_operands(case, 0)
    first, second = _run(case, operands), _run(case, operands)
    return bool(first) and all(_close(a, b) for a, b in zip(first, second, strict=True))


def _run(case: OpCase, operands: Sequence[Tensor | None]) -> list[Tensor]:
    """Results without a gradient, [] if the operator refuses these operands."""
    import torch

    try:
        with torch.no_grad():
            results = call(case.target, operands, dict(case.attributes))
    except Exception:
        return []
    listed = list(results) if isinstance(results, tuple | list) else [results]
    return listed if all(isinstance(result, torch.Tensor) for result in listed) else []


def discover(case: OpCase, run_call: RunCall | None = None) -> str:
    """The rule of the operator at these sizes, as text of the notation; "" where nothing recombines."""
    operands = random_operands(case, 0)
    results = _run(case, operands)
    factors: list[Factor] = []
    for factor in _factors(case, operands, results):
        trial = rule_of(operands, results, [*factors, factor])
        if trial and is_right(case, trial, MESHES[:2]):
            factors.append(factor)
    text = rule_of(operands, results, factors)
    positions = [i for i, tensor in enumerate(operands) if tensor is not None and tensor.is_floating_point()]
    floating = [str(i) for i in positions if _passes_nan_on(case, operands, i)]
    groups: list[str] = []
    for group in [*floating, *(["+".join(floating)] if len(floating) > 1 else [])]:
        candidate = f"{text} | linear: {', '.join([*groups, group])}"
        if is_right(case, candidate, MESHES[:1]):
            groups.append(group)
    if not factors and not groups:
        return ""
    text = f"{text} | linear: {', '.join(groups)}" if groups else text
    return text if is_right(case, text, run_call=run_call) else ""


def _passes_nan_on(case: OpCase, operands: Sequence[Tensor | None], position: int) -> bool:
    """True if what depends on a NaN of this operand is NaN, as for a linear operator; `nanmean` only looks linear."""
    import torch

    operand = operands[position]
    assert operand is not None
    half = (torch.arange(operand.numel()) % 2 == 0).reshape(operand.shape)
    values = (operand, operand + half, operand.masked_fill(half, torch.nan))
    trials = ([value if i == position else t for i, t in enumerate(operands)] for value in values)
    before, after, holes = (_run(case, trial) for trial in trials)
    return len(before) == len(after) == len(holes) and all(
        a.shape == b.shape == c.shape and bool(((a == b) | c.isnan()).all())
        for a, b, c in zip(before, after, holes, strict=True)
    )


def is_right(case: OpCase, text: str, meshes: Sequence[str] = MESHES, run_call: RunCall | None = None) -> bool:
    """True if every strategy of the rule passes its proof."""
    try:
        verdicts = (v for mesh in meshes for v in prove(case, Mesh.parse(mesh), rule=text, run_call=run_call))
        return not any(v.failure for v in verdicts)
    except Exception:  # whatever an operator's own code says to shapes that it does not take
        return False


def _factors(case: OpCase, operands: Sequence[Tensor | None], results: Sequence[Tensor]) -> Iterator[Factor]:
    """Ways of splitting operands that recombine, those of few operands first; no dim twice."""
    options = [[None, *(d for d, n in enumerate(t.shape) if n > 1)] if t is not None else [None] for t in operands]
    ways = list(itertools.islice(itertools.product(*options), WAYS))
    used: set[tuple[int, int]] = set()
    for dims in sorted(ways, key=lambda dims: sum(dim is not None for dim in dims)):
        cut = tuple((position, dim) for position, dim in enumerate(dims) if dim is not None)
        if not cut or used.intersection(cut):
            continue
        uncut = [i for i, t in enumerate(operands) if t is not None and t.is_floating_point() and dims[i] is None]
        for added in [(), *((position,) for position in uncut)]:
            joined = _joined(case, operands, results, cut, added)
            if joined is not None:
                used.update(cut)
                yield Factor(cut, joined, added)
                break


def _joined(
    case: OpCase,
    operands: Sequence[Tensor | None],
    results: Sequence[Tensor],
    cut: Sequence[tuple[int, int]],
    added: Sequence[int],
) -> tuple[int | None, ...] | None:
    """Dim along which the halves make the whole, for each result, or None for a sum; None if they don't."""
    halves = []
    for half in range(2):
        pieces = [t if half == 0 or i not in added or t is None else t * 0 for i, t in enumerate(operands)]
        for position, dim in cut:
            tensor = pieces[position]
            assert tensor is not None
            middle = (tensor.shape[dim] + 1) // 2
            start, length = (middle, tensor.shape[dim] - middle) if half else (0, middle)
            pieces[position] = tensor.narrow(dim, start, length).contiguous()
        halves.append(_run(case, pieces))
    if not all(len(parts) == len(results) for parts in halves):
        return None
    ways = [_join(a, b, whole) for a, b, whole in zip(*halves, results, strict=True)]
    if any(join is None for join in ways) or (added and not any(join == "sum" for join in ways)):
        return None
    return tuple(None if join == "sum" else join for join in ways)


def _join(a: Tensor, b: Tensor, whole: Tensor) -> int | Literal["sum"] | None:
    import torch

    for dim in range(whole.dim() if a.dim() == b.dim() == whole.dim() else 0):
        others = [i for i in range(whole.dim()) if i != dim]
        fits = all(a.shape[i] == b.shape[i] == whole.shape[i] for i in others)
        if fits and 0 < a.shape[dim] < whole.shape[dim] == a.shape[dim] + b.shape[dim]:
            return dim if _close(torch.cat([a, b], dim), whole) else None
    return "sum" if a.shape == b.shape == whole.shape and whole.is_floating_point() and _close(a + b, whole) else None


def _close(a: Tensor, b: Tensor) -> bool:
    import torch

    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=ROUNDING, atol=ROUNDING, equal_nan=True))


def rule_of(operands: Sequence[Tensor | None], results: Sequence[Tensor], factors: Sequence[Factor]) -> str:
    """Rule of these factors; all other dims are whole. "" if two of them claim one dim of a result."""
    left: dict[tuple[int, int], str] = {}
    right: dict[tuple[int, int], str] = {}
    summed: list[str] = []
    for number, factor in enumerate(factors):
        name = f"f{number}"
        position, dim = factor.operands[0]
        tensor = operands[position]
        assert tensor is not None
        left.update(dict.fromkeys(factor.operands, name))
        for index, joined in enumerate(factor.results):
            if joined is None:
                summed = list(dict.fromkeys([*summed, name]))
                continue
            times, remainder = divmod(results[index].shape[joined], tensor.shape[dim])
            if (index, joined) in right or remainder:
                return ""
            right[index, joined] = name if times == 1 else f"({name} {times})"
    added = {position for factor in factors for position in factor.added}
    whole: list[str] = []
    terms = [_term(i, t, left, f"x{i}_", whole, i in added) for i, t in enumerate(operands)]
    ends = [_term(i, t, right, f"y{i}_", whole, False) for i, t in enumerate(results)]
    options = [f"{word}: {' '.join(names)}" for word, names in (("sum", summed), ("whole", whole)) if names]
    return " | ".join([f"{', '.join(terms)} -> {', '.join(ends)}", *options])


def _term(
    index: int, tensor: Tensor | None, named: dict[tuple[int, int], str], prefix: str, whole: list[str], added: bool
) -> str:
    """Term of one operand or result."""
    if tensor is None:
        return "-"
    dims = []
    for dim, size in enumerate(tensor.shape):
        name = named.get((index, dim), "1" if size == 1 else f"{prefix}{dim}")
        if size > 1 and (index, dim) not in named:
            whole.append(name)
        dims.append(name)
    return ("+" if added else "") + (" ".join(dims) or "()")
