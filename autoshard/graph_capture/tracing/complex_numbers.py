"""Complex tensors as pairs of real ones: a value of shape S is a real one of shape S + (2,), as by `view_as_real`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing.fills import op_name
from autoshard.graph_capture.tracing.source_lines import node_quote

aten = torch.ops.aten
_FOURIER = (
    "the transform as products with buffers C = cos and S = -sin of 2 * pi * j * k / n: of a real x along a dim of n "
    "the two parts are x @ C and x @ S; the real part of two dims (FNet) is Cs @ x @ Ch - Ss @ x @ Sh"
)
_PARTS = "arithmetic on the two parts: torch.view_as_real(z), or z.real and z.imag; or keep it out of the model"


def real_pairs(graph: fx.Graph) -> None:
    """Rewrite a functional graph in place. CaptureError names the first operator that has no form here."""
    if any(_is_complex(node.meta.get("val")) for node in graph.nodes if node.op == "call_function"):
        _Pairs(graph).run()


class _Pairs:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.pairs: dict[fx.Node, fx.Node] = {}  # a complex node -> its real form
        self.origin: fx.Node = next(iter(graph.nodes))

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function" and self._concerns(node):
                self.origin = node
                with self.graph.inserting_before(node):
                    real = self._converted(node)
                if _is_complex(node.meta["val"]):
                    self.pairs[node] = real
                else:
                    node.replace_all_uses_with(real)
            elif node.op == "output" and any(n in self.pairs for n in node.all_input_nodes):
                raise CaptureError("the forward returns a complex tensor", "torch.view_as_real of it")
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and (node in self.pairs or self._concerns(node)):
                self.graph.erase_node(node)

    def _concerns(self, node: fx.Node) -> bool:
        return _is_complex(node.meta.get("val")) or any(n in self.pairs for n in node.all_input_nodes)

    def _converted(self, node: fx.Node) -> fx.Node:
        if node.target is operator.getitem:
            return self.call(operator.getitem, self.pairs[node.args[0]], node.args[1])
        name = op_name(node)
        rule = _RULES.get(name)
        if rule is None:
            name = str(node.target) if not name else f"aten.{name}"
            raise _reached(name, node)
        return rule(self, node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node, with its value's likeness."""
        new_node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        if target is operator.getitem:
            value = values[0][0][args[1]]
        else:
            tensors = [v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
            with tensors[0].fake_mode:
                value = target(*values[0], **values[1])
        new_node.meta = dict(self.origin.meta) | {"val": value}
        return new_node

    def parts(self, value: Any) -> tuple[Any, Any]:
        """Real and imaginary part of an operand: a node or a number; 0 for the imaginary part of a real one."""
        if value in self.pairs:
            pair = self.pairs[value]
            return self.call(aten.select.int, pair, -1, 0), self.call(aten.select.int, pair, -1, 1)
        if isinstance(value, complex):
            return value.real, value.imag
        return value, 0

    def joined(self, real: Any, imaginary: Any) -> fx.Node:
        like = real if isinstance(real, fx.Node) else imaginary
        parts = [n if isinstance(n, fx.Node) else self.call(aten.full_like.default, like, n) for n in (real, imaginary)]
        return self.call(aten.stack.default, parts, -1)

    def pair_of(self, value: Any) -> fx.Node:
        if value in self.pairs:
            return self.pairs[value]
        return self.joined(value, self.call(aten.zeros_like.default, value))

    def add(self, a: Any, b: Any, sign: int = 1) -> Any:
        """a + sign b of nodes and numbers."""
        if not isinstance(a, fx.Node) and not isinstance(b, fx.Node):
            return a + sign * b
        if not isinstance(b, fx.Node) and b == 0:
            return a
        if not isinstance(a, fx.Node):
            b = b if sign == 1 else self.call(aten.neg.default, b)
            return b if a == 0 else self.call(aten.add.Tensor, b, a)
        return self.call(aten.add.Tensor if sign == 1 else aten.sub.Tensor, a, b)

    def mul(self, a: Any, b: Any) -> Any:
        if not isinstance(a, fx.Node):
            a, b = b, a
        if not isinstance(a, fx.Node):
            return a * b
        return 0 if not isinstance(b, fx.Node) and b == 0 else self.call(aten.mul.Tensor, a, b)


Rule = Callable[[_Pairs, fx.Node], fx.Node]


def _is_complex(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_complex(item) for item in value)
    return isinstance(value, torch.Tensor) and value.dtype.is_complex


def _polar(p: _Pairs, node: fx.Node) -> fx.Node:
    size, angle = node.args[:2]
    cosine, sine = p.call(aten.cos.default, angle), p.call(aten.sin.default, angle)
    return p.joined(p.call(aten.mul.Tensor, size, cosine), p.call(aten.mul.Tensor, size, sine))


def _product(p: _Pairs, node: fx.Node) -> fx.Node:
    left, right = node.args[:2]
    if not (left in p.pairs and right in p.pairs) and not isinstance(left, complex) and not isinstance(right, complex):
        return _scaled(p, node)
    (a, b), (c, d) = p.parts(left), p.parts(right)
    return p.joined(p.add(p.mul(a, c), p.mul(b, d), -1), p.add(p.mul(a, d), p.mul(b, c)))


def _scaled(p: _Pairs, node: fx.Node) -> fx.Node:
    """A complex value times or over a real one."""
    left, right = node.args[:2]
    if op_name(node) == "mul" and left not in p.pairs:
        left, right = right, left
    if isinstance(right, fx.Node):
        right = p.call(aten.unsqueeze.default, right, -1)
    return p.call(
        node.target if isinstance(right, fx.Node) else getattr(aten, op_name(node)).Tensor, p.pairs[left], right
    )


def _quotient(p: _Pairs, node: fx.Node) -> fx.Node:
    left, right = node.args[:2]
    if left in p.pairs and right not in p.pairs and not isinstance(right, complex):
        return _scaled(p, node)
    if right not in p.pairs:
        return _refused(p, node)
    (a, b), (c, d) = p.parts(left), p.parts(right)
    size = p.add(p.mul(c, c), p.mul(d, d))
    real, imaginary = p.add(p.mul(a, c), p.mul(b, d)), p.add(p.mul(b, c), p.mul(a, d), -1)
    return p.joined(p.call(aten.div.Tensor, real, size), p.call(aten.div.Tensor, imaginary, size))


def _sum(p: _Pairs, node: fx.Node) -> fx.Node:
    left, right = node.args[:2]
    if node.kwargs or not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return _refused(p, node)
    return p.call(node.target, p.pair_of(left), p.pair_of(right))


def _refused(p: _Pairs, node: fx.Node) -> fx.Node:
    raise _reached(f"aten.{op_name(node)}", node)


def _reached(name: str, node: fx.Node) -> CaptureError:
    return CaptureError(
        f"a complex tensor reaches {name}, at {node_quote(node)}", _FOURIER if "fft_" in name else _PARTS
    )


def _conjugate(p: _Pairs, node: fx.Node) -> fx.Node:
    a, b = p.parts(node.args[0])
    return p.joined(a, p.call(aten.neg.default, b))


def _exponential(p: _Pairs, node: fx.Node) -> fx.Node:
    a, b = p.parts(node.args[0])
    size = p.call(aten.exp.default, a)
    cosine, sine = p.call(aten.cos.default, b), p.call(aten.sin.default, b)
    return p.joined(p.call(aten.mul.Tensor, size, cosine), p.call(aten.mul.Tensor, size, sine))


def _angle(p: _Pairs, node: fx.Node) -> fx.Node:
    a, b = p.parts(node.args[0])
    return p.call(aten.atan2.default, b, a)


def _shape(target: Any) -> Rule:
    return lambda p, node: p.call(target, p.pairs[node.args[0]], [*node.meta["val"].shape, 2])


def _cast(p: _Pairs, node: fx.Node) -> fx.Node:
    """Cast to another precision, from real to complex, or (the real part) back."""
    (operand, *_), value = node.args, node.meta["val"]
    if not value.dtype.is_complex:
        return p.call(aten.to.dtype, p.parts(operand)[0], value.dtype)
    pair = p.pair_of(operand)
    wanted = torch.view_as_real(torch.empty(0, dtype=value.dtype)).dtype
    return pair if pair.meta["val"].dtype == wanted else p.call(aten.to.dtype, pair, wanted)


def _along(p: _Pairs, node: fx.Node) -> fx.Node:
    """Call the same operator on the pair, with its dims counted from the front."""
    first = node.args[0]
    like = first[0] if isinstance(first, list | tuple) else first
    rank = like.meta["val"].dim() + (op_name(node) in ("unsqueeze", "stack"))
    operand = [p.pair_of(n) for n in first] if isinstance(first, list | tuple) else p.pairs[first]
    names, arguments = [argument.name for argument in node.target._schema.arguments], _arguments(node)
    defaults = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}
    for name in ("dim", "dim0", "dim1", "dims", "start_dim", "end_dim"):
        value = arguments.get(name, defaults.get(name))
        if isinstance(value, list | tuple):
            arguments[name] = [dim % rank for dim in value]
        elif isinstance(value, int):
            arguments[name] = value % rank
    if op_name(node) == "permute":
        arguments["dims"] = [*arguments["dims"], rank]
    return p.call(node.target, operand, **{name: arguments[name] for name in names[1:] if name in arguments})


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of a node by name."""
    names = (argument.name for argument in node.target._schema.arguments)
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _reduced(p: _Pairs, node: fx.Node) -> fx.Node:
    """A sum or mean over some dims, or all: none named means all, but not the two parts."""
    arguments, pair = _arguments(node), p.pairs[node.args[0]]
    if arguments.get("dtype") is not None:
        return _refused(p, node)
    if arguments.get("dim"):
        return _along(p, node)
    overload = aten.sum.dim_IntList if op_name(node) == "sum" else aten.mean.dim
    dims = list(range(pair.meta["val"].dim() - 1))
    return p.call(overload, pair, dims, arguments.get("keepdim", False)) if dims else pair


def _rolled(p: _Pairs, node: fx.Node) -> fx.Node:
    """Roll the pair; without dims, roll what is flattened."""
    arguments, pair = _arguments(node), p.pairs[node.args[0]]
    if arguments.get("dims"):
        return _along(p, node)
    turned = p.call(aten.roll.default, p.call(aten.reshape.default, pair, [-1, 2]), arguments["shifts"], [0])
    return p.call(aten.reshape.default, turned, list(pair.meta["val"].shape))


def _part(index: int) -> Rule:
    return lambda p, node: p.call(aten.select.int, p.pairs[node.args[0]], -1, index)


def _same(p: _Pairs, node: fx.Node) -> fx.Node:
    return p.call(node.target, p.pairs[node.args[0]], *node.args[1:], **node.kwargs)


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_RULES: dict[str, Rule] = {
    "view_as_complex": lambda p, node: node.args[0],
    "view_as_real": lambda p, node: p.pairs[node.args[0]],
    "complex": lambda p, node: p.joined(*node.args[:2]),
    "polar": _polar, "mul": _product, "div": _quotient, "exp": _exponential, "angle": _angle,
    "real": _part(0), "imag": _part(1),
    "abs": lambda p, node: p.call(aten.linalg_vector_norm.default, p.pairs[node.args[0]], 2, [-1]),
    **_each("add sub", _sum),
    **_each("conj _conj conj_physical", _conjugate),
    **_each("neg clone alias detach index", _same),
    **_each("resolve_conj resolve_neg contiguous lift_fresh_copy", lambda p, node: p.pairs[node.args[0]]),
    **_each("view reshape _unsafe_view flatten unflatten view_as reshape_as squeeze", _shape(aten.reshape.default)),
    **_each("expand expand_as broadcast_to", _shape(aten.expand.default)),
    **_each("transpose permute unsqueeze select slice cat stack split split_with_sizes chunk unbind flip "
            "index_select", _along),
    **_each("sum mean", _reduced),
    "roll": _rolled,
    **_each("to _to_copy type_as", _cast),
}  # fmt: skip
