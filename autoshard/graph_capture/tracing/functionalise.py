"""Rewrites in-place operators as functional ones, so that every name is one value.

A write to a view writes the tensor that it is a view of; whoever later reads another view of it sees the change.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing.fills import CHECKPOINTED, draws, fill_value, full, op_name
from autoshard.graph_capture.tracing.source_lines import node_quote

aten = torch.ops.aten
_RENAMES_ITSELF = ("detach_", "squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "as_strided_")
_SCATTERS = {
    "slice": aten.slice_scatter.default, "select": aten.select_scatter.default,
    "diagonal": aten.diagonal_scatter.default,
}  # fmt: skip
_OWN_INVERSES = ("transpose", "t", "swapaxes", "swapdims", "numpy_T", "mT")
_WHOLE = ("copy_", "uniform_", "normal_", "bernoulli_", "exponential_")  # and fills: nothing of what they write is left
_AGAIN = "leave the checkpoint out and plan with --recompute full, which writes once; or take the write out of it"
_OUT = "the form of it that returns a new tensor"
_SAME = ("alias", "detach", "contiguous", "to", "type_as", "lift_fresh", "dropout", "alpha_dropout", "feature_dropout")
_RESHAPES = (
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as", "ravel",
)  # fmt: skip


def functionalise(graph: fx.Graph, parameters: Set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """In place. Returns placeholder -> the value to write back into it, for those that the forward changes.

    `parameters` are the placeholders that may have a gradient.
    """
    return _Functionaliser(graph, parameters).run()


class _Functionaliser:
    def __init__(self, graph: fx.Graph, parameters: Set[fx.Node]) -> None:
        self.graph = graph
        self.differentiable = dict.fromkeys(parameters, True)
        named = [node for node in graph.nodes if op_name(node)]
        self.writes = any(node.target._schema.is_mutable or op_name(node) == "batch_norm" for node in named)
        self.parent: dict[fx.Node, fx.Node] = {}  # view -> what it is a view of
        self.current: dict[fx.Node, fx.Node] = {}  # a written tensor (not a view) -> its value now
        self.version: dict[fx.Node, int] = {}
        self.replayed: dict[fx.Node, tuple[int, fx.Node]] = {}
        self.identity: dict[fx.Node, fx.Node] = {}  # result of an in-place op -> the tensor that it wrote

    def run(self) -> dict[fx.Node, fx.Node]:
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                continue
            with self.graph.inserting_before(node):
                self._step(node)
        written = {node: value for node, value in self.current.items() if node.op == "placeholder"}
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not (node.users or node in written.values() or draws(node)):
                self.graph.erase_node(node)
        return written

    def _step(self, node: fx.Node) -> None:
        before = {n: self._identify(n) for n in node.all_input_nodes}
        out = node.kwargs.get("out")
        is_view = bool(before) and self._is_view(node, next(iter(before.values())))
        node.args = fx.map_arg(node.args, lambda n: self._read(before[n]))
        node.kwargs = fx.map_arg(node.kwargs, lambda n: self._read(before[n]))
        name = op_name(node)
        if name == "batch_norm" and node.args[5] and isinstance(node.args[3], fx.Node):
            self._batch_norm(node, list(before))
        elif torch.Tag.inplace_view in getattr(node.target, "tags", ()) or name == "requires_grad_":
            self._rename(node, next(iter(before)))
        elif name and node.target._schema.is_mutable:
            self._write_op(node, name, before[out] if isinstance(out, fx.Node) else next(iter(before.values())))
        elif is_view:
            self.parent[node] = next(iter(before.values()))

    def _is_view(self, node: fx.Node, operand: fx.Node) -> bool:
        if node.target is operator.getitem:
            return operand in self.parent
        return self.writes and _shares_storage(node)

    def _identify(self, node: fx.Node) -> fx.Node:
        while node in self.identity:
            node = self.identity[node]
        return node

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self.parent:
            node = self.parent[node]
        return node

    def _read(self, node: fx.Node) -> fx.Node:
        """The node that holds what `node` reads as now."""
        root = self._root(node)
        version = self.version.get(root, 0)
        if version == 0:
            return node
        if node is root:
            return self.current[root]
        replay = self.replayed.get(node)
        if replay is None or replay[0] != version:
            now = self._read(self.parent[node])  # first, as what it makes anew must stand before
            copy = self.graph.node_copy(node)
            copy.replace_input_with(node.all_input_nodes[0], now)
            replay = self.replayed[node] = (version, copy)
        return replay[1]

    def _write(self, node: fx.Node, value: fx.Node) -> None:
        if node not in self.parent:
            if node.op == "placeholder" and value.meta.get("custom", {}).keys() >= CHECKPOINTED.keys():
                what = "torch.utils.checkpoint runs a write to a buffer again in backward"
                raise CaptureError(f"{what}, at {node_quote(value)}", _AGAIN)
            self.current[node] = value
            self.version[node] = self.version.get(node, 0) + 1
            return
        parent = self.parent[node]
        self._write(parent, self._scatter(node, self._read(parent), value))
        self.replayed[node] = (self.version[self._root(node)], value)

    def _scatter(self, view: fx.Node, whole: fx.Node, value: fx.Node) -> fx.Node:
        """`whole` with `value` where `view` looks."""
        name, shape = op_name(view), whole.meta["val"]
        if name == "detach" and self._has_gradient(whole):
            return self._behind(whole, value, view)
        if name in _SAME:
            return value
        if name == "narrow":
            dim, start, length = view.args[1:]
            start += shape.shape[dim] if start < 0 else 0
            return self._call(aten.slice_scatter.default, (whole, value, dim, start, start + length), {}, shape, view)
        if name in _SCATTERS:
            return self._call(_SCATTERS[name], (whole, value, *view.args[1:]), dict(view.kwargs), shape, view)
        if name in _RESHAPES:
            return self._call(aten.reshape.default, (value, list(shape.shape)), {}, shape, view)
        if name in _OWN_INVERSES:
            return self._call(view.target, (value, *view.args[1:]), dict(view.kwargs), shape, view)
        if name == "permute":
            dims = [d % len(view.args[1]) for d in view.args[1]]
            inverse = sorted(range(len(dims)), key=dims.__getitem__)
            return self._call(aten.permute.default, (value, inverse), {}, shape, view)
        raise CaptureError(
            f"the forward writes into a {name or 'part'} of a tensor that can't be followed, {node_quote(view)}",
            "write x = x + y instead of x += y, or use torch.cat or torch.where",
        )

    def _has_gradient(self, node: fx.Node) -> bool:
        """May autograd compute a gradient for the value of `node`?"""
        stack = [node]
        while stack:
            top = stack[-1]
            waiting = [n for n in top.all_input_nodes if n not in self.differentiable and op_name(top) != "detach"]
            if top in self.differentiable or not waiting:
                reads = () if op_name(top) == "detach" else top.all_input_nodes
                self.differentiable.setdefault(top, any(self.differentiable[n] for n in reads))
                stack.pop()
            stack += waiting
        return self.differentiable[node]

    def _behind(self, whole: fx.Node, value: fx.Node, view: fx.Node) -> fx.Node:
        """Write that autograd does not see: the new value with the gradient of the old one."""
        still = self._call(aten.detach.default, (whole,), {}, whole.meta["val"], view)
        difference = self._call(aten.sub.Tensor, (whole, still), {}, whole.meta["val"], view)
        zero = self._call(aten.nan_to_num.default, (difference,), {}, whole.meta["val"], view)  # inf - inf
        fixed = self._call(aten.detach.default, (value,), {}, whole.meta["val"], view)
        return self._call(aten.add.Tensor, (fixed, zero), {}, whole.meta["val"], view)

    def _write_op(self, node: fx.Node, name: str, target: fx.Node) -> None:
        value = self._functional(node, name)
        if value.meta["val"].dtype != node.meta["val"].dtype:
            value = self._call(aten.to.dtype, (value, node.meta["val"].dtype), {}, node.meta["val"], node)
        whole = name in _WHOLE or fill_value(node) is not None
        if whole and not self._is_part(target) and self._has_gradient(node.args[0]):
            value = self._replacing(node, node.args[0], value)
        self._write(target, value)
        self.identity[node] = target

    def _is_part(self, node: fx.Node) -> bool:
        """Does a write to it leave something of what it is a view of?"""
        while node in self.parent and op_name(node) not in _SCATTERS:
            node = self.parent[node]
        return node in self.parent

    def _replacing(self, node: fx.Node, old: fx.Node, value: fx.Node) -> fx.Node:
        """The value that replaces all of `old`, which autograd gives a gradient of zeros: none were another thing to an
        optimizer with weight decay."""
        with node.meta["val"].fake_mode:
            always = full(self.graph, torch.ones((), dtype=torch.bool, device=node.meta["val"].device), True)
        return self._call(aten.where.self, (always, value, old), {}, node.meta["val"], node)

    def _functional(self, node: fx.Node, name: str) -> fx.Node:
        val, meta = node.meta["val"], dict(node.meta)
        if name == "copy_":
            return self._copied(node)
        if (number := fill_value(node)) is not None:
            filled = full(self.graph, val, number)
            filled.meta = meta
            return filled
        if name == "fill_diagonal_" and val.dim() == 2 and (val.shape[0] <= val.shape[1] or not any(node.args[2:])):
            with val.fake_mode:
                diagonal = full(self.graph, val.diagonal(), node.args[1])
            return self._call(aten.diagonal_scatter.default, (node.args[0], diagonal), {}, val, node)
        kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
        overload = _functional_overload(node, name)
        if overload is None:
            raise CaptureError(
                f"{node.target} has no form that leaves its operand as it is, at {node_quote(node)}", _OUT
            )
        kwargs |= _defaults(node, overload)
        if any(argument.name == "layout" for argument in overload._schema.arguments):  # it makes a tensor from nothing
            kwargs |= {"dtype": val.dtype, "device": val.device}
        operands = fx.map_arg((node.args, kwargs), lambda n: n.meta["val"])
        with val.fake_mode:
            result = overload(*operands[0], **operands[1])
        return self._call(overload, node.args, kwargs, result, node)

    def _copied(self, node: fx.Node) -> fx.Node:
        val, source = node.meta["val"], node.args[1]
        if source.meta["val"].dtype != val.dtype:
            source = self._call(aten.to.dtype, (source, val.dtype), {}, source.meta["val"].to(val.dtype), node)
        return self._call(aten.expand.default, (source, list(val.shape)), {}, val, node)

    def _batch_norm(self, node: fx.Node, operands: list[fx.Node]) -> None:
        """Gives the op three results: output, new running mean, new running variance."""
        stats = [node.args[3], node.args[4]]
        written = [self._identify(n) for n in operands if self._read(self._identify(n)) in stats]
        parts: list[fx.Node] = []
        with self.graph.inserting_after(node):
            for i in (2, 1, 0):
                part = self.graph.call_function(operator.getitem, (node, i))
                part.meta = dict(node.meta) | {"val": node.meta["val"] if i == 0 else stats[i - 1].meta["val"]}
                parts.insert(0, part)
        node.replace_all_uses_with(parts[0], delete_user_cb=lambda user: user not in parts)
        node.meta["val"] = tuple(part.meta["val"] for part in parts)
        for target, part in zip(written, parts[1:], strict=True):
            self._write(target, part)

    def _rename(self, node: fx.Node, operand: fx.Node) -> None:
        """`squeeze_` and its like change how a tensor looks, not what it holds: from here on its name is a view."""
        name = op_name(node)
        overload = _functional_overload(node, name)
        if overload is None or name not in _RENAMES_ITSELF:
            raise CaptureError(
                f"{node.target} can't be captured, at {node_quote(node)}", "leave the call out of forward"
            )
        view = self._call(overload, node.args, dict(node.kwargs), node.meta["val"], node)
        self.parent[view] = self._identify(operand)
        self.identity[node] = view

    def _call(self, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any, origin: fx.Node) -> fx.Node:
        new_node = self.graph.call_function(overload, args, kwargs)
        new_node.meta = dict(origin.meta) | {"val": val}
        return new_node


_OPERATORS = {f"__i{name}__": f"__{name}__" for name in ("and", "or", "xor", "lshift", "rshift")}
_FUNCTIONAL = {"aten.normal_.default": aten.normal_functional.default}  # its namesake is another function


def _functional_overload(node: fx.Node, name: str) -> Any:
    """The overload that returns what `node` writes: into its first operand, or into `out`; None where there is none."""
    if "out" in node.kwargs:
        wanted = [said for said in _said(node.target) if said[0] != "out"]
        overloads = (getattr(node.target.overloadpacket, each) for each in node.target.overloadpacket.overloads())
        return next((o for o in overloads if _said(o) == wanted), None)
    if name in _OPERATORS:
        return getattr(getattr(aten, _OPERATORS[name]), node.target._overloadname, None)
    packet = getattr(aten, name.rstrip("_"), None) if name.endswith("_") else None
    return _FUNCTIONAL.get(str(node.target)) or (None if packet is None else _namesake(packet, node.target))


def _namesake(packet: Any, target: Any) -> Any:
    """The overload of `packet` that takes what `target` does: `pow_.Scalar` is `pow.Tensor_Scalar`."""
    wanted = _said(target)
    namesake = getattr(packet, target._overloadname, None)
    if namesake is not None and [kind for _, kind in _said(namesake)] == [kind for _, kind in wanted]:
        return namesake
    overloads = (getattr(packet, each) for each in packet.overloads())
    return next((each for each in overloads if _said(each) == wanted), None)


def _defaults(node: fx.Node, overload: Any) -> dict[str, Any]:
    """Arguments that the call leaves out and `overload` needs: `bernoulli_()` is `bernoulli(0.5)`."""
    left_out = node.target._schema.arguments[len(node.args) :]
    missing = {a.name for a in overload._schema.arguments if not a.has_default_value()} - node.kwargs.keys()
    return {a.name: a.default_value for a in left_out if a.name in missing and a.has_default_value()}


_OPTIONS = ("dtype", "layout", "device", "pin_memory")  # of what makes a tensor; with `out` they are those of `out`


def _said(overload: Any) -> list[tuple[str, str]]:
    """Name and type of an overload's arguments, but for what the tensor that it makes is like."""
    return [(a.name, str(a.type)) for a in overload._schema.arguments if a.name not in _OPTIONS]


def _shares_storage(node: fx.Node) -> bool:
    """Does a result share the first operand's storage? torch says: what an operator returns may be a view or a copy, by
    dtypes, strides and arguments, and not all that return their operand say so in their schema."""
    target, operand = node.target, node.all_input_nodes[0].meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(operand, FakeTensor):
        return False
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    if target._schema.is_mutable or not (composite or any(r.alias_info for r in target._schema.returns)):
        return False
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    with operand.fake_mode, torch.no_grad():
        results = tree_leaves(target(*args, **kwargs))
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    return any(_storage(result) == _storage(operand) for result in tensors)


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)


@contextlib.contextmanager
def writing_assigned_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Within it, a forward that gives a registered buffer a new tensor (`self.scale = ...`) writes it into the old one
    at its end: torch.export follows assignments to the root module's buffers and silently drops all others.

    Not where shape or dtype change: each call makes that value again (`call_caches`).
    """
    held: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []

    def before(*_: Any) -> None:
        held[:] = [
            (module._buffers, name, value)
            for module in model.modules()
            if module is not model
            for name, value in module._buffers.items()
            if value is not None
        ]

    def after(_: Any, __: Any, result: Any) -> Any:
        moved = [(store, name, old, store.get(name)) for store, name, old in held if store.get(name) is not old]
        written = [
            (store, name, old, new)
            for store, name, old, new in moved
            if new is not None and (new.shape, new.dtype) == (old.shape, old.dtype)
        ]
        replaced = {id(old) for _, _, old, _ in written}
        result = tree_map(lambda x: x.clone() if id(x) in replaced else x, result)
        with torch.no_grad():
            several = len(written) > 1  # one may be made of another's old value
            news = [new.clone() if several else new for _, _, _, new in written]
            for (store, name, old, _), new in zip(written, news, strict=True):
                old.copy_(new)
                store[name] = old
        return result

    handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
