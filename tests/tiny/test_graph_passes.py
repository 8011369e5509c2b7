"""Each pass on graphs written as text: one op a line, before and after."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from autoshard.graph_capture.passes.canonical import canonical
from autoshard.graph_capture.passes.linear_layers import fold_linears
from autoshard.graph_capture.passes.noops import drop_noops, merge_reshapes
from autoshard.graph_capture.passes.op_names import rename
from autoshard.graph_capture.passes.operator_patterns import fold_formulas
from autoshard.graph_capture.passes.repeated_heads import fold_repeats, fold_shared_heads
from autoshard.graph_capture.passes.rewrite import MARK, deadcode
from autoshard.graph_capture.passes.rotations import fold_rotations
from autoshard.graph_capture.training.requires_grad import mark_gradients
from autoshard.ir.graph import Graph, Op, Parameter, Tensor
from autoshard.ir.graph_check import check
from autoshard.rules.operators import constants

_VALUE = re.compile(r"(\w+):(\w+)(\[[\d, ]*\])")
_DTYPES = {"f": "float32", "h": "bfloat16", "i": "int64", "b": "bool"}


def read(text: str) -> Graph:
    """`y:f[2,3] = aten.add(x, None, alpha=1)` a line; names that nothing makes are inputs `x...` or parameters `w...`,
    declared in a first line `x:f[2,3] w:f[3]`; the last line `-> y z` are the outputs."""
    first, *lines, last = [line.strip() for line in text.strip().splitlines()]
    tensors = [_tensor(match) for match in _VALUE.finditer(first)]
    ops = []
    for line in lines:
        left, right = line.split(" = ", 1)
        results = [_tensor(match) for match in _VALUE.finditer(left)]
        tensors += results
        target, _, arguments = right.removesuffix(")").partition("(")
        call = ast.parse(f"f({arguments})", mode="eval").body
        assert isinstance(call, ast.Call)
        operands = tuple(arg.id if isinstance(arg, ast.Name) else None for arg in call.args)
        attributes = tuple((str(word.arg), ast.literal_eval(word.value)) for word in call.keywords)
        ops.append(Op(results[0].name, target, operands, attributes, tuple(result.name for result in results)))
    declared = [match[1] for match in _VALUE.finditer(first)]
    inputs = tuple(name for name in declared if name.startswith("x"))
    parameters = tuple(Parameter(name, name) for name in declared if name.startswith("w"))
    return Graph("t", tuple(tensors), inputs, parameters, (), tuple(ops), tuple(last.removeprefix("->").split()), None)


def _tensor(match: re.Match[str]) -> Tensor:
    return Tensor(match[1], tuple(ast.literal_eval(match[3])), _DTYPES[match[2]])


def write(graph: Graph) -> list[str]:
    lines = []
    for op in graph.ops:
        results = ", ".join(f"{name}{list(graph.tensor(name).shape)}" for name in op.results)
        arguments = [*(str(name) for name in op.operands), *(f"{name}={value}" for name, value in op.attributes)]
        lines.append(f"{results} = {op.target}({', '.join(arguments)})")
    return [*lines, "-> " + " ".join(graph.outputs)]


def noops(graph: Graph) -> Graph:
    return drop_noops(mark_gradients(graph))


def linears(graph: Graph) -> Graph:
    return deadcode(drop_noops(merge_reshapes(fold_linears(graph))))


def repeats(graph: Graph) -> Graph:
    return deadcode(fold_repeats(graph))


def rotations(graph: Graph) -> Graph:
    return deadcode(fold_rotations(graph))


def shared_heads(graph: Graph) -> Graph:
    return deadcode(fold_shared_heads(graph))


CASES = [
    (canonical, """x:f[2,3,4]
     a:f[6,4] = aten.view(x, size=(-1, 4))
     b:f[24] = aten.flatten(a, start_dim=0, end_dim=-1)
     c:f[4,6] = aten.t(a)
     d:f[4,3,2] = aten.transpose(x, dim0=0, dim1=-1)
     e:f[2,2,4], f:f[2,1,4] = aten.chunk(x, chunks=2, dim=-2)
     g:f[2,3,3] = aten.slice(x, dim=-1, start=1, end=9223372036854775807, step=1)
     h:f[2,1,3,4] = aten.unsqueeze(x, dim=-3)
     i:f[5,2,3,4] = aten.expand(x, size=(5, -1, -1, -1), implicit=False)
     j:i[2,3,4] = aten.to(x, dtype='int64', copy=False)
     k:i[3] = aten.arange(end=3, dtype=None)
     l:f[2,3,4] = aten.dropout(x, p=0.5, train=False)
     m:f[2,3,4] = aten.squeeze(h)
     n:f[2,3,4] = aten.squeeze(x, dim=-1)
     -> a b c d e f g h i j k l m n""",
     """a[6, 4] = aten.reshape(x, shape=(6, 4))
     b[24] = aten.reshape(a, shape=(24,))
     c[4, 6] = aten.transpose(a, dim0=0, dim1=1)
     d[4, 3, 2] = aten.transpose(x, dim0=0, dim1=2)
     e[2, 2, 4], f[2, 1, 4] = aten.split(x, split_size=(2, 1), dim=1)
     g[2, 3, 3] = aten.slice(x, dim=2, start=1, end=4, step=1)
     h[2, 1, 3, 4] = aten.unsqueeze(x, dim=1)
     i[5, 2, 3, 4] = aten.expand(x, size=(5, 2, 3, 4))
     j[2, 3, 4] = aten.to(x, dtype=int64)
     k[3] = aten.arange(start=0, end=3, step=1, dtype=int64)
     l[2, 3, 4] = aten.alias(x)
     m[2, 3, 4] = aten.squeeze(h, dim=1)
     n[2, 3, 4] = aten.alias(x)
     -> a b c d e f g h i j k l m n"""),
    (canonical, """x:f[4,1] x2:f[4,3]
     a:f[4,3], b:f[4,3] = aten.broadcast_tensors(x, x2)
     -> a b""",
     """a[4, 3] = aten.expand(x, size=(4, 3))
     b[4, 3] = aten.expand(x2, size=(4, 3))
     -> a b"""),
    (canonical, """x:f[2,3,8,8]
     a:f[2,3,4,4] = aten.max_pool2d(x, kernel_size=(2, 2), stride=(), padding=(0,), dilation=1)
     -> a""",
     """a[2, 3, 4, 4] = aten.max_pool2d(x, kernel_size=(2, 2), stride=(2, 2), padding=(0, 0), dilation=(1, 1))
     -> a"""),
    (canonical, """x:f[2,3,8,16]
     a:f[2,3,8,16] = aten.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.25)
     b:f[2,3,8,16] = aten.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.125)
     -> a b""",
     """a[2, 3, 8, 16] = aten.scaled_dot_product_attention(x, x, x, is_causal=True, scale=None)
     b[2, 3, 8, 16] = aten.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.125)
     -> a b"""),
    (noops, """x:f[2,3] xi:i[3] w:f[2,3]
     a:f[2,3] = aten.alias(x)
     b:f[2,3] = aten.mul(a, other=1.0)
     c:i[3] = aten.add(xi, other=0, alpha=1)
     d:f[2,3] = aten.add(b, other=0, alpha=1)
     e:f[2,3] = aten.detach(d)
     f:f[2,3] = aten.detach(w)
     g:f[2,3] = aten.reshape(f, shape=(2, 3))
     h:f[6] = aten.reshape(g, shape=(6,))
     i:f[3] = aten.mul(xi, other=1.0)
     j:b[3] = aten.to(xi, dtype='bool')
     -> a c e h i j""",
     """d[2, 3] = aten.add(x, other=0, alpha=1)
     f[2, 3] = aten.detach(w)
     h[6] = aten.reshape(f, shape=(6,))
     i[3] = aten.mul(xi, other=1.0)
     j[3] = aten.to(xi, dtype=bool)
     -> x xi d h i j"""),
    (lambda graph: deadcode(noops(graph)), """x:f[2,6] x2:f[2,0] xh:h[2,6]
     a:f[2,0] = aten.slice(x, dim=1, start=6, end=6, step=1)
     b:f[2,6] = aten.cat(x, a, dim=1)
     c:f[2,12] = aten.cat(x2, x, b, dim=1)
     d:f[2,6] = aten.cat(xh, a, dim=1)
     -> b c d""",
     """a[2, 0] = aten.slice(x, dim=1, start=6, end=6, step=1)
     c[2, 12] = aten.cat(x, x, dim=1)
     d[2, 6] = aten.cat(xh, a, dim=1)
     -> x c d"""),
    (linears, """x:f[2,3,4] w:f[4,5] w2:f[6,5] wb:f[5] wc:f[6]
     a:f[6,4] = aten.reshape(x, shape=(6, 4))
     b:f[6,5] = aten.addmm(wb, a, w, beta=1, alpha=1)
     c:f[2,3,5] = aten.reshape(b, shape=(2, 3, 5))
     d:f[6,5] = aten.reshape(c, shape=(6, 5))
     t:f[5,6] = aten.transpose(w2, dim0=0, dim1=1)
     e:f[6,6] = aten.addmm(wc, d, t, beta=1, alpha=1)
     f:f[2,3,2,3] = aten.reshape(e, shape=(2, 3, 2, 3))
     -> f""",
     """b[2, 3, 5] = autoshard.linear_in_out(x, w, wb)
     e[2, 3, 6] = aten.linear(b, w2, wc)
     f[2, 3, 2, 3] = aten.reshape(e, shape=(2, 3, 2, 3))
     -> f"""),
    (linears, """x:f[2,3,4] x2:f[6,5] w:f[4,5] wb:f[5]
     a:f[6,4] = aten.reshape(x, shape=(6, 4))
     b:f[6,5] = aten.addmm(wb, a, w, beta=1, alpha=1)
     c:f[6,5] = aten.addmm(x2, a, w, beta=1, alpha=1)
     d:f[6,5] = aten.addmm(wb, a, w, beta=1, alpha=2)
     e:f[6,5] = aten.mm(a, w)
     f:f[4,4] = aten.mm(e, x2)
     -> b c d f""",
     """a[6, 4] = aten.reshape(x, shape=(6, 4))
     b[6, 5] = autoshard.linear_in_out(a, w, wb)
     c[6, 5] = aten.addmm(x2, a, w, beta=1, alpha=1)
     d[6, 5] = aten.addmm(wb, a, w, beta=1, alpha=2)
     e[6, 5] = autoshard.linear_in_out(a, w, None)
     f[4, 4] = aten.mm(e, x2)
     -> b c d f"""),
    (merge_reshapes, """x:f[2,3,4]
     a:f[6,4] = aten.reshape(x, shape=(6, 4))
     b:f[24] = aten.reshape(a, shape=(24,))
     c:f[4,6] = aten.reshape(b, shape=(4, 6))
     -> a c""",
     """a[6, 4] = aten.reshape(x, shape=(6, 4))
     b[24] = aten.reshape(x, shape=(24,))
     c[4, 6] = aten.reshape(x, shape=(4, 6))
     -> a c"""),
    (deadcode, """x:f[2]
     a:f[2] = aten.relu(x)
     b:f[2] = aten.tanh(a)
     c:f[1], d:f[1] = aten.split(a, split_size=(1, 1), dim=0)
     e:f[2] = aten.relu(b)
     -> d""",
     """a[2] = aten.relu(x)
     c[1], d[1] = aten.split(a, split_size=(1, 1), dim=0)
     -> d"""),
    (repeats, """x:f[2,3,4]
     a:f[2,3,1,4] = aten.unsqueeze(x, dim=2)
     b:f[2,3,5,4] = aten.expand(a, size=(2, 3, 5, 4))
     c:f[2,15,4] = aten.reshape(b, shape=(2, 15, 4))
     d:f[2,3,20] = aten.reshape(b, shape=(2, 3, 20))
     -> c d""",
     """a[2, 3, 1, 4] = aten.unsqueeze(x, dim=2)
     b[2, 3, 5, 4] = aten.expand(a, size=(2, 3, 5, 4))
     c[2, 15, 4] = aten.repeat_interleave(x, repeats=5, dim=1, output_size=None)
     d[2, 3, 20] = aten.reshape(b, shape=(2, 3, 20))
     -> c d"""),
    (repeats, """x:f[2,3]
     a:f[1,2,3] = aten.unsqueeze(x, dim=0)
     b:f[2,2,3] = aten.expand(a, size=(2, 2, 3))
     c:f[4,3] = aten.reshape(b, shape=(4, 3))
     -> c""",
     """a[1, 2, 3] = aten.unsqueeze(x, dim=0)
     b[2, 2, 3] = aten.expand(a, size=(2, 2, 3))
     c[4, 3] = aten.reshape(b, shape=(4, 3))
     -> c"""),
    (fold_formulas, """x:f[2,3]
     a:f[2,3] = aten.mul(x, other=0.5)
     b:f[2,3] = aten.pow(x, exponent=3.0)
     c:f[2,3] = aten.mul(b, other=0.044715)
     d:f[2,3] = aten.add(x, c, alpha=1)
     e:f[2,3] = aten.mul(d, other=0.7978845608028654)
     f:f[2,3] = aten.tanh(e)
     g:f[2,3] = aten.add(f, other=1.0, alpha=1)
     h:f[2,3] = aten.mul(a, g)
     i:f[2,3] = aten.sigmoid(h)
     j:f[2,3] = aten.mul(i, h)
     -> j""",
     """h[2, 3] = aten.gelu(x, approximate=tanh)
     j[2, 3] = aten.silu(h)
     -> j"""),
    (fold_formulas, """x:f[2,3]
     a:f[2,3] = aten.mul(x, other=0.7978)
     b:f[2,3] = aten.div(x, other=1.4142135623730951)
     c:f[2,3] = aten.erf(b)
     d:f[2,3] = aten.add(c, other=1, alpha=1)
     e:f[2,3] = aten.mul(x, d)
     f:f[2,3] = aten.mul(e, other=0.5)
     -> f a""",
     """a[2, 3] = aten.mul(x, other=0.7978)
     f[2, 3] = aten.gelu(x, approximate=none)
     -> f a"""),
    (fold_formulas, """x:f[2,3] w:f[3] w2:f[2,3]
     a:f[2,3] = aten.pow(x, exponent=2)
     b:f[2,1] = aten.mean(a, dim=(1,), keepdim=True, dtype=None)
     c:f[2,1] = aten.add(b, other=1e-06, alpha=1)
     d:f[2,1] = aten.rsqrt(c)
     e:f[2,3] = aten.mul(x, d)
     f:f[2,3] = aten.mul(w, e)
     g:f[2,3] = aten.mul(f, f)
     h:f[2,1] = aten.mean(g, dim=(1,), keepdim=True, dtype=None)
     i:f[2,1] = aten.add(h, other=1e-05, alpha=1)
     j:f[2,1] = aten.sqrt(i)
     k:f[2,3] = aten.div(f, j)
     l:f[2,3] = aten.mul(k, w2)
     -> l""",
     """f[2, 3] = aten.rms_norm(x, w, normalized_shape=(3,), eps=1e-06)
     k[2, 3] = aten.rms_norm(f, None, normalized_shape=(3,), eps=1e-05)
     l[2, 3] = aten.mul(k, w2)
     -> l"""),
    # other numbers, another dim, a value that something else reads: what the several operators do is not the one's
    (fold_formulas, """x:f[2,3] x2:f[2,3]
     a:f[2,3] = aten.pow(x, exponent=2)
     b:f[1,3] = aten.mean(a, dim=(0,), keepdim=True, dtype=None)
     c:f[1,3] = aten.add(b, other=1e-06, alpha=1)
     d:f[1,3] = aten.rsqrt(c)
     e:f[2,3] = aten.mul(x, d)
     f:f[2,3] = aten.sigmoid(x2)
     g:f[2,3] = aten.mul(x2, f)
     h:f[2,3] = aten.mul(x, other=0.70710678)
     i:f[2,3] = aten.erf(h)
     j:f[2,3] = aten.add(i, other=1, alpha=1)
     k:f[2,3] = aten.mul(x, j)
     l:f[2,3] = aten.mul(k, other=0.5)
     -> e f g l""",
     """a[2, 3] = aten.pow(x, exponent=2)
     b[1, 3] = aten.mean(a, dim=(0,), keepdim=True, dtype=None)
     c[1, 3] = aten.add(b, other=1e-06, alpha=1)
     d[1, 3] = aten.rsqrt(c)
     e[2, 3] = aten.mul(x, d)
     f[2, 3] = aten.sigmoid(x2)
     g[2, 3] = aten.mul(x2, f)
     h[2, 3] = aten.mul(x, other=0.70710678)
     i[2, 3] = aten.erf(h)
     j[2, 3] = aten.add(i, other=1, alpha=1)
     k[2, 3] = aten.mul(x, j)
     l[2, 3] = aten.mul(k, other=0.5)
     -> e f g l"""),
    (rotations, """x:f[2,6] x2:f[2,6]
     a:f[2,3] = aten.slice(x, dim=1, start=0, end=3, step=1)
     b:f[2,3] = aten.slice(x, dim=1, start=3, end=6, step=1)
     c:f[2,3] = aten.neg(b)
     d:f[2,6] = aten.cat(c, a, dim=1)
     e:f[2,3], f:f[2,3] = aten.split(x2, split_size=(3, 3), dim=1)
     g:f[2,3] = aten.neg(f)
     h:f[2,6] = aten.cat(g, e, dim=1)
     i:f[2,3] = aten.neg(e)
     j:f[2,6] = aten.cat(i, f, dim=1)
     -> d h j""",
     """d[2, 6] = autoshard.rotate_half(x)
     e[2, 3], f[2, 3] = aten.split(x2, split_size=(3, 3), dim=1)
     h[2, 6] = autoshard.rotate_half(x2)
     i[2, 3] = aten.neg(e)
     j[2, 6] = aten.cat(i, f, dim=1)
     -> d h j"""),
    (shared_heads, """x:f[2,4,5,3] x2:f[2,2,5,3] x3:f[2,2,5,3] xm:f[5,5]
     a:f[2,4,5,3] = aten.repeat_interleave(x2, repeats=2, dim=1, output_size=None)
     b:f[2,4,5,3] = aten.repeat_interleave(x3, repeats=2, dim=1, output_size=None)
     c:f[2,4,5,3] = aten.scaled_dot_product_attention(x, a, b, None, enable_gqa=False)
     d:f[2,4,5,3] = aten.repeat_interleave(x2, repeats=2, dim=1, output_size=None)
     e:f[2,4,5,3] = aten.repeat_interleave(x3, repeats=2, dim=1, output_size=None)
     f:f[2,4,5,3] = aten.scaled_dot_product_attention(x, d, e, xm, enable_gqa=False)
     -> c f""",
     """c[2, 4, 5, 3] = aten.scaled_dot_product_attention(x, x2, x3, None, enable_gqa=True)
     d[2, 4, 5, 3] = aten.repeat_interleave(x2, repeats=2, dim=1, output_size=None)
     e[2, 4, 5, 3] = aten.repeat_interleave(x3, repeats=2, dim=1, output_size=None)
     f[2, 4, 5, 3] = aten.scaled_dot_product_attention(x, d, e, xm, enable_gqa=False)
     -> c f"""),
    (rename, """x:f[2] w_relu:f[2] xrelu:f[2]
     q:f[2] = aten.relu(x)
     r:f[2] = aten.relu(q)
     s:f[1], t:f[1] = aten.split(r, split_size=(1, 1), dim=0)
     u:f[2] = aten.pow(r, exponent=2)
     v:f[2] = aten.__and__(u, u)
     -> u v""",
     """relu[2] = aten.relu(x)
     relu_1[2] = aten.relu(relu)
     split_out0[1], split_out1[1] = aten.split(relu_1, split_size=(1, 1), dim=0)
     pow_1[2] = aten.pow(relu_1, exponent=2)
     and_1[2] = aten.__and__(pow_1, pow_1)
     -> pow_1 and_1"""),
]  # fmt: skip


@pytest.mark.parametrize("run, before, after", CASES, ids=[f"{i}-{case[0].__name__}" for i, case in enumerate(CASES)])
def test_pass(run: Callable[[Graph], Graph], before: str, after: str) -> None:
    graph = read(before)
    check(graph)
    changed = run(graph)
    check(changed)
    assert write(changed) == [line.strip() for line in after.strip().splitlines()]


def test_gradients_flow_from_trainable_parameters() -> None:
    graph = mark_gradients(read("""x:f[2] w:f[2]
        a:f[2] = aten.relu(x)
        b:f[2] = aten.mul(a, w)
        c:b[2] = aten.gt(b, a)
        d:f[2] = aten.detach(b)
        e:f[2] = aten.where(c, b, d)
        -> e"""))  # fmt: skip
    assert [tensor.name for tensor in graph.tensors if tensor.requires_grad] == ["w", "b", "e"]


def test_a_name_that_is_taken_is_not_given_again() -> None:
    graph = rename(read("""x:f[2] w_relu:f[2] relu:f[2]
        q:f[2] = aten.relu(x)
        -> q""".replace("relu:f[2]\n", "xs:f[2]\n")))  # fmt: skip
    assert [op.name for op in graph.ops] == ["relu"]


def test_a_mask_drawn_for_a_constant_makes_it_no_constant() -> None:
    """XLNet's positions under dropout: were they a constant, every device would draw a mask of its own."""
    graph = read("""x:f[8]
        a:f[8] = aten.arange(end=8)
        b:f[8] = aten.dropout(a, p=0.1, train=True)
        c:f[8] = aten.mul(b, x)
        -> c""")
    assert constants(graph) == {"a"}


def test_what_a_strategy_is_asked_for_stays_an_operator() -> None:
    graph = read("""x:f[2,3]
        a:f[2,3] = aten.sigmoid(x)
        b:f[2,3] = aten.mul(x, a)
        -> b""")
    assert [op.target for op in fold_formulas(graph).ops] == ["aten.silu"]
    for marked in range(2):
        ops = [replace(op, source=f"m.py:1{MARK}1") if i == marked else op for i, op in enumerate(graph.ops)]
        variant = replace(graph, ops=tuple(ops))
        assert fold_formulas(variant) == variant
