"""Gradients that a model writes itself, by an `autograd.Function` or a tensor's hook, as operators of the forward.

A value y whose gradient is g -> B(g), with B linear and elementwise, is `y.detach() + B(x - x.detach())`: the second
part is zero, and its gradient is B. While torch.export runs the forward, markers stand for the ends of B; afterwards
`resolve` checks that what lies between them is linear and elementwise, and writes the sum.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing import LARGEST_ELEMENTS
from autoshard.graph_capture.tracing.fills import CHECKPOINTED, op_name
from autoshard.graph_capture.tracing.source_lines import here, node_quote

aten = torch.ops.aten
_REGISTERED = "torch._library.autograd"  # makes the Functions of operators, which bring their backward with them
CLOSE = torch.finfo(torch.float32).eps ** 0.5  # of gradients in float64, by code that may cast to float32 inside
_HINT = "a gradient that autograd makes from the forward; an own one must be elementwise and linear in its argument"
_AGAIN_HINT = (
    "what recomputes in backward as torch.utils.checkpoint, or not at all (a model's own switch, as "
    "use_checkpoint=False): a plan computes blocks again by --recompute"
)
_HOOK_HINT = "a hook that scales or masks its gradient, or none: clip and log gradients in the training loop"

_library = torch.library.Library("autoshard", "FRAGMENT")
_library.define("gradient_seed(Tensor x) -> Tensor")
_library.define("own_gradient(Tensor y, Tensor[] terms) -> Tensor")
_library.define("hooked(Tensor x, Tensor term) -> Tensor")
for _name, _function in {
    "gradient_seed": lambda x: x.clone(),
    "own_gradient": lambda y, terms: y.clone(),
    "hooked": lambda x, term: x.clone(),
}.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")
_markers = torch.ops.autoshard
torch.fx.node.has_side_effect(_markers.hooked.default)


class DerivesError(CaptureError):
    """While a forward is traced, autograd is asked for gradients."""


# --- while the forward is traced --------------------------------------------------------------------------------------


def apply_function(cls: Any, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Trace `cls.apply(*args)`: as its forward, if its backward is autograd's gradient of that; else with markers."""
    if not _wants_gradient(args) or cls.__module__ == _REGISTERED or _is_derivative(cls, args):
        return apply(*args)
    place = here()
    context = _Context(args)
    with torch.no_grad():
        outputs = _forward(cls, context, args)
    floating = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad]
    if not isinstance(outputs, torch.Tensor) or any(args[i].shape != outputs.shape for i in floating):
        raise _refusal(cls, context, outputs, place)
    try:
        terms = [_gradient(cls, context, _markers.gradient_seed(args[i]), position=i) for i in floating]
    except DerivesError as error:
        raise _refusal(cls, context, outputs, place) from error
    if not all(isinstance(term, torch.Tensor) and term.shape == outputs.shape for term in terms):
        raise _refusal(cls, context, outputs, place)
    return _markers.own_gradient(outputs, terms)


def apply_checkpoint(args: tuple[Any, ...]) -> Any:
    """A reentrant checkpoint of `args[0]`: without an input that has a gradient, nothing inside gets one."""
    function, _, *operands = args
    with_grad = torch.is_grad_enabled() and _wants_gradient(operands)
    with torch.set_grad_enabled(with_grad), fx.traceback.annotate(CHECKPOINTED if with_grad else {}):
        return function(*operands)


def register_hook(x: torch.Tensor, hook: Callable[[Any], Any]) -> None:
    """Notes in the trace what `hook` makes of the gradient of `x`; a hook that returns nothing changes nothing."""
    place = here()
    try:
        gradient = hook(_markers.gradient_seed(x))
    except Exception as error:
        raise CaptureError(
            f"a gradient hook can't be followed ({type(error).__name__}) at {place}", _HOOK_HINT
        ) from error
    if isinstance(gradient, torch.Tensor):
        _markers.hooked(x, gradient)


def _refusal(cls: Any, context: _Context, outputs: Any, place: str) -> CaptureError:
    what, hint = "is not the gradient of its forward, and no elementwise change of it", _HINT
    try:
        _gradient(cls, context, *tree_leaves(outputs), position=0)
    except DerivesError:
        what, hint = "runs autograd itself", _AGAIN_HINT
    except Exception:
        pass
    return CaptureError(f"the backward of {cls.__name__} {what}, at {place}", hint)


class _Context:
    """Stands for the `ctx` of a Function."""

    def __init__(self, args: Iterable[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        self.saved_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def _forward(cls: Any, context: _Context, args: tuple[Any, ...]) -> Any:
    if cls.setup_context is torch.autograd.Function.setup_context:
        return cls.forward(context, *args)
    outputs = cls.forward(*args)
    cls.setup_context(context, args, outputs)
    return outputs


def _gradient(cls: Any, context: _Context, *gradients: Any, position: int) -> Any:
    grads = inspect.unwrap(cls.backward)(context, *gradients)  # `once_differentiable` would cut what is traced here
    return grads[position] if isinstance(grads, tuple) else grads


def _wants_gradient(args: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)


# --- is a backward the derivative of its forward? ---------------------------------------------------------------------


class _Answers:
    """Results of `_is_derivative_at`, by the order of the model's calls, which is that of a capture at another batch.

    Within a trace, a Function is tried once for the same arguments. Its name alone, or arguments of other lengths, tell
    nothing.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, bool]] = []  # of the first trace: Function and arguments but for samples, answer
        self.begin()

    def begin(self) -> None:
        """Begin a trace."""
        self.number, self.tried = 0, dict[Any, bool]()

    def of(self, cls: Any, args: tuple[Any, ...], key: tuple[Any, ...]) -> bool:
        number, self.number = self.number, self.number + 1
        if number < len(self.calls) and self.calls[number][0] == key:
            return self.calls[number][1]
        lengths = tuple(leaf.shape[:1] for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        if (cls, key, lengths) not in self.tried:
            self.tried[cls, key, lengths] = _is_derivative_at(cls, args)
        answer = self.tried[cls, key, lengths]
        if number == len(self.calls):
            self.calls.append((key, answer))
        return answer


_answers: list[_Answers] = []  # within `cached_answers`


@contextlib.contextmanager
def cached_answers() -> Iterator[None]:
    """Context for captures of one model, built with the same arguments, at several numbers of samples: only the first
    tries whether a Function's backward is the gradient of its forward."""
    _answers.append(_Answers())
    try:
        yield
    finally:
        _answers.pop()


def begin_trace() -> None:
    """Begin a trace: the next calls are those of a forward from its start."""
    if _answers:
        _answers[-1].begin()


def _is_derivative(cls: Any, args: tuple[Any, ...]) -> bool:
    key = _but_for_samples(cls, args) if _answers else None
    return _is_derivative_at(cls, args) if key is None else _answers[-1].of(cls, args, key)


def _but_for_samples(cls: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Key that is equal for arguments that differ only in the lengths of first dims; None if that can't be known, as
    for a Function that a call has made. A model's file is run for each capture, and so makes its classes again."""
    key: list[Any] = [cls.__module__, cls.__qualname__]
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.Tensor):
            key.append((tuple(leaf.shape[1:]), leaf.dim(), leaf.dtype, leaf.requires_grad))
        elif isinstance(leaf, bool | int | float | str | torch.dtype | None):
            key.append((type(leaf), leaf))
        else:
            return None
    return None if "<locals>" in cls.__qualname__ else tuple(key)


def _is_derivative_at(cls: Any, args: tuple[Any, ...]) -> bool:
    """Are both gradients equal, at random arguments of these shapes in float64? False if that can't be tried."""
    if sum(leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)) > LARGEST_ELEMENTS:
        return False
    likenesses = tree_map_only(torch.Tensor, lambda t: _Likeness(tuple(t.shape), t.dtype, t.requires_grad), args)
    with ThreadPoolExecutor(1) as fresh:  # torch's modes belong to a thread: there, nothing is traced
        try:
            return fresh.submit(_agrees, cls, likenesses).result()
        except Exception:
            return False


@dataclass(frozen=True)
class _Likeness:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class _NumbersAlone(TorchFunctionMode):
    """Raises where a tensor of the trace comes in: one that is no argument, as a module's parameter that is read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            raise TypeError(f"{func} reads a tensor that is no argument and has no value")
        return func(*args, **(kwargs or {}))


def _agrees(cls: Any, likenesses: tuple[Any, ...]) -> bool:
    with _NumbersAlone():
        return _tried(cls, likenesses)


def _tried(cls: Any, likenesses: tuple[Any, ...]) -> bool:
    source = torch.Generator().manual_seed(0)
    real = tree_map_only(_Likeness, lambda like: _random(like, source), likenesses)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        actual = _forward(cls, _Context(real), tuple(_fresh(a) for a in real))  # a run of its own: forward may write
        leaves = tuple(_fresh(a) for a in real)
        inputs = tuple(a.view_as(a) if isinstance(a, torch.Tensor) and a.requires_grad else a for a in leaves)
        torch.manual_seed(0)
        natural = _forward(cls, _Context(real), inputs)
    results = [actual] if isinstance(actual, torch.Tensor) else list(actual)
    outputs = [natural] if isinstance(natural, torch.Tensor) else list(natural)
    seeds = [torch.randn(r.shape, generator=source, dtype=r.dtype) if _floats(r) else None for r in results]
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if _floats(o) and o.requires_grad]
    gradients = (
        torch.autograd.grad([o for o, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True) if pairs else ()
    )
    return _same(_function_gradients(cls, real, seeds), list(gradients) or [None] * len(wanted))


def _function_gradients(cls: Any, real: tuple[Any, ...], seeds: list[Any]) -> list[Any]:
    """The gradients that the Function's backward gives for the arguments that want one."""
    context = _Context(real)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _forward(cls, context, tuple(_fresh(a) for a in real))
        gradients = cls.backward(context, *seeds)
    if any(isinstance(leaf, torch.Tensor) and leaf.grad is not None for leaf in tree_leaves(real)):
        raise TypeError(f"the backward of {cls.__name__} sets gradients aside")
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    return [g for g, arg in zip(gradients, real, strict=False) if isinstance(arg, torch.Tensor) and arg.requires_grad]


def _random(like: _Likeness, source: torch.Generator) -> torch.Tensor:
    if not like.dtype.is_floating_point:
        return torch.zeros(like.shape, dtype=like.dtype)
    return torch.randn(like.shape, generator=source, dtype=torch.float64).requires_grad_(like.requires_grad)


def _fresh(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _same(gradients: list[Any], natural: list[Any]) -> bool:
    for left, right in zip(gradients, natural, strict=True):
        if left is None or right is None:
            other = right if left is None else left
            if other is not None and bool(other.any()):
                return False
            continue
        scale = float(right.abs().max()) if right.numel() else 0.0
        if (
            left.shape != right.shape
            or not float((left - right).abs().max() if right.numel() else 0.0) <= CLOSE * scale
        ):
            return False
    return True


# --- in the exported graph --------------------------------------------------------------------------------------------


def resolve(module: fx.GraphModule) -> None:
    """Turn every marker into plain operators, in place. CaptureError where a B is not linear and elementwise."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is _markers.own_gradient.default:
            _resolve(
                graph, node, node.args[0], node.args[1], "this Function's backward is not linear and elementwise", _HINT
            )
        elif node.target is _markers.hooked.default:
            _resolve_hook(graph, node)
    for node in reversed(list(graph.nodes)):
        if node.target is _markers.gradient_seed.default and not node.users:  # a hook that only looks
            graph.erase_node(node)


def _resolve_hook(graph: fx.Graph, node: fx.Node) -> None:
    x, term = node.args
    chain = _chain([term], "this gradient hook is not linear and elementwise", _HOOK_HINT)
    after = {user for user in x.users if user not in chain and user is not node}
    order = {each: i for i, each in enumerate(graph.nodes)}
    if any(order[user] < order[node] for user in after):
        raise CaptureError(f"a hook is set on a tensor after its use, at {node_quote(node)}", "register_hook at once")
    resolved = _resolve(graph, node, x, [term], "this gradient hook is not linear and elementwise", _HOOK_HINT)
    x.replace_all_uses_with(resolved, delete_user_cb=lambda user: user in after)


def _resolve(graph: fx.Graph, node: fx.Node, y: fx.Node, terms: list[fx.Node], what: str, hint: str) -> fx.Node:
    terms = list(terms)
    chain = _chain(terms, what, hint)
    _hold_factors(graph, chain)
    for seed in [each for each in chain if each.target is _markers.gradient_seed.default]:
        zero = _write_seed(graph, seed)
        terms = [zero if term is seed else term for term in terms]
    with graph.inserting_before(node):
        total = _gradient_node(graph, aten.detach.default, (y,), y, node)
        for term in terms:
            total = _gradient_node(graph, aten.add.Tensor, (total, term), y, node)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
    return total


def _hold_factors(graph: fx.Graph, chain: Iterable[fx.Node]) -> None:
    """Detach the factors of a gradient, so that they get none: a backward runs without autograd."""
    members = set(chain)
    for node in members:
        for factor in node.all_input_nodes:
            if node.target is not _markers.gradient_seed.default and factor not in members and _floats(_value(factor)):
                with graph.inserting_before(node):
                    node.replace_input_with(factor, _gradient_node(graph, aten.detach.default, (factor,), factor, node))


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _write_seed(graph: fx.Graph, seed: fx.Node) -> fx.Node:
    """`x - x.detach()` in place of the marker, 0 where x is infinite: scores are masked so, and inf - inf is NaN."""
    (x,) = seed.args
    with graph.inserting_before(seed):
        still = _gradient_node(graph, aten.detach.default, (x,), x, seed)
        difference = _gradient_node(graph, aten.sub.Tensor, (x, still), x, seed)
        zero = _gradient_node(graph, aten.nan_to_num.default, (difference,), x, seed)
    seed.replace_all_uses_with(zero)
    graph.erase_node(seed)
    return zero


def _gradient_node(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, origin: fx.Node) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = dict(origin.meta) | {"val": like.meta["val"]}
    return node


def _chain(terms: list[fx.Node], what: str, hint: str) -> dict[fx.Node, None]:
    """The nodes from a seed to `terms`, each checked; a `detach` among them would stop the gradient and is dropped."""
    reached: dict[fx.Node, list[fx.Node]] = {}  # what depends on a seed -> the operands by which it does
    for node in terms[0].graph.nodes if terms else ():
        operands = [n for n in node.all_input_nodes if n in reached]
        if node.target is _markers.gradient_seed.default or (operands and node.target not in _ENDS):
            reached[node] = operands
    chain: dict[fx.Node, None] = {}
    waiting = [term for term in terms if term in reached]
    while waiting:
        node = waiting.pop()
        if node not in chain:
            if reached[node] and not _is_linear(node, reached[node]):
                raise CaptureError(f"{what}, at {node_quote(node)}", hint)
            chain[node] = None
            waiting += reached[node]
    for node in [node for node in chain if op_name(node) == "detach"]:
        node.replace_all_uses_with(node.args[0])
        terms[:] = [node.args[0] if term is node else term for term in terms]
        del chain[node]
        node.graph.erase_node(node)
    return chain


_ENDS = (_markers.own_gradient.default, _markers.hooked.default)
_UNARY = ("neg", "clone", "alias", "detach", "to", "_to_copy", "contiguous", "positive", "view", "view_as", "reshape",
          "expand", "expand_as", "type_as")  # fmt: skip


def _is_linear(node: fx.Node, depends: list[fx.Node]) -> bool:
    """Is each element of the result linear in the same element of those operands, and of nothing else of them?"""
    name, first, value = op_name(node), node.args[0], node.meta.get("val")
    values = [value, *(n.meta["val"] for n in depends)]
    if not all(map(_floats, values)) or any(each.shape != value.shape for each in values):
        return False
    if name in _UNARY:
        return depends == [first]
    if name == "mul":
        return len(depends) == 1 and node.args.count(depends[0]) == 1
    if name == "div":
        return depends == [first] and len(node.args) == 2 and not node.kwargs
    if name in ("add", "sub"):
        return set(node.args[:2]) == set(depends)
    if name == "masked_fill":
        return depends == [first] and node.args[2] == 0
    if name == "where":
        return first not in depends and all(part in depends or _is_zero(part) for part in node.args[1:])
    return False


def _is_zero(part: Any) -> bool:
    if not isinstance(part, fx.Node):
        return bool(part == 0)
    name = op_name(part)
    filled = name in ("full", "full_like", "scalar_tensor") and 0 in part.args
    return filled or name in ("zeros", "zeros_like", "new_zeros")
