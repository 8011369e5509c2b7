"""The graph of a standard transformer, written from its numbers: the same operators as capture gives."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.estimate.transformer import HALF, IN_FLOAT8, MEGATRON, MIXED, Transformer
from autoshard.graph_capture.training.float8_layers import with_float8
from autoshard.graph_capture.training.overwritten_buffers import note_saved
from autoshard.graph_capture.training.precision import apply_precision
from autoshard.graph_capture.training.requires_grad import mark_gradients
from autoshard.ir.graph import CAST, Graph, Op, Parameter, Tensor

EMBEDDING, HEAD, EXPERTS = "embedding", "head", "experts"  # modules; the last one of a layer


def layer(index: int) -> str:
    """The module path of a layer."""
    return f"layers.{index}"


def core(index: int) -> str:
    """Module path of the part that selective recomputation runs again: scores, softmax, dropout, weighted sum."""
    return f"{layer(index)}.attention.core"


def is_of_experts(path: str) -> bool:
    """Is it a parameter of experts, which replicas may share among them?"""
    return f".{EXPERTS}." in path


@dataclass(frozen=True)
class TransformerGraph:
    """A graph, and how tensor parallelism shards the result of each op: `S2` and the like, `P`, `R`, `stream` (whole,
    or along the sequence under sequence parallelism) or `vocabulary` (by the operator's vocabulary-parallel form)."""

    graph: Graph
    splits: dict[str, str]


def transformer_graph(model: Transformer, batch: int, precision: str, optimizer: str) -> TransformerGraph:
    """The forward of `batch` sequences to the mean next-token loss; `precision` as in Run."""
    writer = _TransformerWriter(model, batch, HALF.get(precision, "float32"))
    loss = writer.run()
    graph = Graph(
        name="transformer",
        tensors=tuple(writer.tensors),
        inputs=tuple(writer.inputs),
        parameters=tuple(writer.parameters),
        buffers=(),
        ops=tuple(writer.ops),
        outputs=(loss,),
        loss=loss,
        modules=(
            ("", "Transformer"),
            *((m, m.rpartition(".")[2]) for m in dict.fromkeys(o.module for o in writer.ops)),
        ),
        source="autoshard estimate",
        optimizer=optimizer,
    )
    graph = note_saved(mark_gradients(graph))
    graph = apply_precision(graph, precision if precision in MIXED else "fp32")
    if precision in MEGATRON:
        graph = _fused_gates(graph)
    return TransformerGraph(with_float8(graph) if precision in IN_FLOAT8 else graph, writer.splits)


def _fused_gates(graph: Graph) -> Graph:
    """SwiGLU as one kernel, whose backward recomputes the activation: it keeps only its inputs, gate and up.

    Megatron-Core's bias_swiglu_impl (megatron.core.fusions.fused_bias_swiglu: save_for_backward(input)) and MindSpeed's
    npu_swiglu.
    """
    gates = {op.results[0] for op in graph.ops if op.target == "aten.silu"}

    def fused(op: Op) -> Op:
        if op.target == "aten.mul" and op.operands[0] in gates:
            operands = tuple(position for position in op.saved.operands if position != 0)
            return replace(op, saved=replace(op.saved, operands=operands))
        if op.target == "autoshard.experts" and dict(op.attributes)["gated"]:
            return replace(op, attributes=(*op.attributes, ("fused_gate", True)))
        return op

    return replace(graph, ops=tuple(map(fused, graph.ops)))


@dataclass
class _TransformerWriter:
    model: Transformer
    batch: int
    dtype: str
    tensors: list[Tensor] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    splits: dict[str, str] = field(default_factory=dict)
    split: str = "stream"  # of the ops that come next

    def run(self) -> str:
        tokens, labels = (self.input(name) for name in ("tokens", "labels"))
        x = self.embed(tokens)
        cosine, sine = self.rotary() if self.model.positions == "rotary" else ("", "")
        for index in range(self.model.layers):
            x = self.layer(x, index, cosine, sine)
        return self.head(x, labels)

    # --- what there is ---

    @property
    def rows(self) -> tuple[int, int]:
        return self.batch, self.model.sequence

    def input(self, name: str) -> str:
        self.tensors.append(Tensor(name, self.rows, "int64"))
        self.inputs.append(name)
        return name

    def parameter(self, path: str, *shape: int) -> str:
        name = f"p_{path.replace('.', '_')}"
        self.tensors.append(Tensor(name, shape, self.dtype))
        self.parameters.append(Parameter(name, path))
        return name

    def add(
        self, target: str, operands: tuple[str | None, ...], shape: tuple[int, ...], module: str, /, **attributes: Any
    ) -> str:
        return self.add_several(target, operands, (shape,), module, **attributes)[0]

    def add_several(
        self,
        target: str,
        operands: tuple[str | None, ...],
        shapes: tuple[tuple[int, ...], ...],
        module: str,
        /,
        dtype: str = "",
        **attributes: Any,
    ) -> tuple[str, ...]:
        name = f"{target.rpartition('.')[2]}_{len(self.ops)}"
        results = tuple(f"{name}_{i}" if len(shapes) > 1 else name for i in range(len(shapes)))
        self.tensors += [Tensor(r, s, dtype or self.dtype) for r, s in zip(results, shapes, strict=True)]
        self.ops.append(Op(name, target, operands, tuple(attributes.items()), results, module))
        self.splits[name] = self.split
        return results

    def shape(self, name: str) -> tuple[int, ...]:
        return next(t.shape for t in reversed(self.tensors) if t.name == name)

    @contextlib.contextmanager
    def splitting(self, split: str) -> Iterator[None]:
        """Context whose added ops are sharded by `split`."""
        self.split, before = split, self.split
        yield
        self.split = before

    # --- pieces ---

    def linear(self, x: str, path: str, width: int, bias: bool) -> str:
        shape = self.shape(x)
        weight = self.parameter(f"{path}.weight", width, shape[-1])
        added = self.parameter(f"{path}.bias", width) if bias else None
        return self.add("aten.linear", (x, weight, added), (*shape[:-1], width), path)

    def cast(self, x: str, dtype: str, path: str) -> str:
        """Cast of `x`, sharded like it."""
        name = f"to_{len(self.ops)}"
        self.tensors.append(Tensor(name, self.shape(x), dtype))
        self.ops.append(Op(name, CAST, (x,), (("dtype", dtype),), (name,), path))
        return name

    def norm(self, x: str, path: str) -> str:
        width = self.model.hidden
        weight = self.parameter(f"{path}.weight", width)
        if self.model.norm == "rms_norm":
            return self.add(
                "aten.rms_norm", (x, weight), self.shape(x), path, normalized_shape=(width,), eps=1e-6
            )  # fmt: skip
        if self.model.norm == "rms_norm_apart":
            return self.norm_apart(x, weight, path)
        bias = self.parameter(f"{path}.bias", width)
        return self.add(
            "aten.layer_norm", (x, weight, bias), self.shape(x), path, normalized_shape=(width,), eps=1e-5
        )  # fmt: skip

    def norm_apart(self, x: str, weight: str, path: str) -> str:
        """x rsqrt(mean(x^2) + eps) in float32, operator by operator, as transformers' Llama and torchtitan write it."""
        shape, dtype = self.shape(x), self.dtype
        rows = (*shape[:-1], 1)
        wide = x if dtype == "float32" else self.cast(x, "float32", path)
        square = self.add_several("aten.pow", (wide,), (shape,), path, dtype="float32", exponent=2.0)[0]
        mean = self.add_several("aten.mean", (square,), (rows,), path, dtype="float32", dim=(-1,), keepdim=True)[0]
        shifted = self.add_several("aten.add", (mean,), (rows,), path, dtype="float32", other=1e-6, alpha=1)[0]
        scale = self.add_several("aten.rsqrt", (shifted,), (rows,), path, dtype="float32")[0]
        normed = self.add_several("aten.mul", (wide, scale), (shape,), path, dtype="float32")[0]
        narrow = normed if dtype == "float32" else self.cast(normed, dtype, path)
        return self.add("aten.mul", (narrow, weight), shape, path)

    def dropout(self, x: str, path: str) -> str:
        if not self.model.dropout:
            return x
        return self.add("aten.dropout", (x,), self.shape(x), path, p=0.1, train=True)

    def sum(self, x: str, y: str, path: str) -> str:
        return self.add("aten.add", (x, y), self.shape(x), path, alpha=1)

    def embed(self, tokens: str) -> str:
        model, path = self.model, EMBEDDING
        table = self.parameter(f"{path}.weight", model.vocabulary, model.hidden)
        options = {"padding_idx": -1, "scale_grad_by_freq": False, "sparse": False}
        with self.splitting("vocabulary"):
            x = self.add("aten.embedding", (table, tokens), (*self.rows, model.hidden), path, **options)
        if model.positions == "learned":
            position = self.parameter(f"{path}.positions", model.sequence, model.hidden)
            x = self.sum(x, position, path)
        return self.dropout(x, path)

    def rotary(self) -> tuple[str, str]:
        """Cosine and sine tables (sequence, head_dim), constants of the graph."""
        shape = (self.model.sequence, self.model.head_dim)
        with self.splitting("R"):
            angle = self.add("aten.full", (), shape, EMBEDDING, size=shape, fill_value=1.0, dtype=self.dtype)
            return self.add("aten.cos", (angle,), shape, EMBEDDING), self.add("aten.sin", (angle,), shape, EMBEDDING)

    def rotated(self, x: str, cosine: str, sine: str, path: str) -> str:
        """x cos + rotate_half(x) sin, as Hugging Face's Llama writes it."""
        shape = self.shape(x)
        turned = self.add("autoshard.rotate_half", (x,), shape, path)
        straight = self.add("aten.mul", (x, cosine), shape, path)
        return self.sum(straight, self.add("aten.mul", (turned, sine), shape, path), path)

    def heads(self, x: str, count: int, path: str) -> str:
        """(b, s, n d) to (b, n, s, d)."""
        shape = (*self.rows, count, self.model.head_dim)
        apart = self.add("aten.reshape", (x,), shape, path, shape=shape)
        with self.splitting("S1"):
            return self.add("aten.transpose", (apart,), (shape[0], count, shape[1], shape[3]), path, dim0=1, dim1=2)

    def projections(self, x: str, path: str) -> tuple[str, ...]:
        model = self.model
        width, kv_width = model.heads * model.head_dim, model.kv_head_count * model.head_dim
        if model.kv_head_count == model.heads and model.positions == "learned":
            fused = self.linear(x, f"{path}.qkv", 3 * width, model.bias)
            shapes = ((*self.rows, width),) * 3
            return self.add_several("aten.split", (fused,), shapes, path, split_size=(width,) * 3, dim=2)
        named = zip("qkv", (width, kv_width, kv_width), strict=True)
        return tuple(self.linear(x, f"{path}.{name}", size, model.bias) for name, size in named)

    def attention(self, x: str, index: int, cosine: str, sine: str) -> str:
        model, path = self.model, f"{layer(index)}.attention"
        counts = (model.heads, model.kv_head_count, model.kv_head_count)
        flat = (*self.rows, model.hidden)
        with self.splitting("S2"):
            parts = zip(self.projections(x, path), counts, strict=True)
            query, key, value = (self.heads(part, count, path) for part, count in parts)
            with self.splitting("S1"):
                if cosine:
                    query, key = (self.rotated(part, cosine, sine, path) for part in (query, key))
                attend = self.unfused if model.attention == "unfused" else self.fused
                mixed = attend(query, key, value, core(index))
            shape = (*self.rows, model.heads, model.head_dim)
            together = self.add("aten.transpose", (mixed,), shape, path, dim0=1, dim1=2)
            mixed = self.add("aten.reshape", (together,), flat, path, shape=flat)
        with self.splitting("P"):
            return self.linear(mixed, f"{path}.out", model.hidden, model.bias)

    def fused(self, query: str, key: str, value: str, path: str) -> str:
        grouped = self.model.kv_head_count != self.model.heads
        return self.add(
            "aten.scaled_dot_product_attention", (query, key, value, None), self.shape(query), path,
            dropout_p=0.0, is_causal=True, scale=1 / math.sqrt(self.model.head_dim), enable_gqa=grouped,
        )  # fmt: skip

    def unfused(self, query: str, key: str, value: str, path: str) -> str:
        """Scores, softmax (scale and mask inside its kernel), dropout, weighted sum: each is written to memory."""
        model = self.model
        turned = self.add("aten.transpose", (key,), (*self.shape(key)[:2], model.head_dim, model.sequence), path,
                          dim0=2, dim1=3)  # fmt: skip
        scores = self.add("aten.matmul", (query, turned), (*self.shape(query)[:3], model.sequence), path)
        weights = self.add("aten.softmax", (scores,), self.shape(scores), path, dim=-1, dtype=None)
        return self.add("aten.matmul", (self.dropout(weights, path), value), self.shape(query), path)

    def feedforward(self, x: str, index: int) -> str:
        model, path = self.model, f"{layer(index)}.feedforward"
        if not model.experts:
            return self.dense(x, path, model.feedforward_width)
        routed = self.routed(x, path, f"{layer(index)}.{EXPERTS}")
        if not model.shared_experts:
            return routed
        shared = self.dense(x, f"{path}.shared", model.shared_experts * model.expert_width)
        with self.splitting("P"):
            return self.sum(routed, shared, path)

    def routed(self, x: str, path: str, experts: str) -> str:
        """Every token through the experts that a router chose, weighted; as in Hugging Face's Mixtral."""
        model, tokens, width, inner = self.model, math.prod(self.rows), self.model.hidden, self.model.expert_width
        pairs = (tokens, model.active_experts)
        with self.splitting("R"):
            rows = self.add("aten.reshape", (x,), (tokens, width), path, shape=(tokens, width))
            scores = self.linear(rows, f"{path}.router", model.experts, bias=False)
            shares = self.add("aten.softmax", (scores,), self.shape(scores), path, dim=1, dtype=None)
            best, chosen = self.chosen(shares, pairs, path)
            total = self.add("aten.sum", (best,), (tokens, 1), path, dim=(1,), keepdim=True, dtype=None)
            weights = self.add("aten.div", (best, total), pairs, path)
        gated = model.activation == "swiglu"
        up = self.parameter(f"{experts}.up", model.experts, inner * (1 + gated), width)
        down = self.parameter(f"{experts}.down", model.experts, width, inner)
        more = {} if model.imbalance == 1.0 else {"imbalance": model.imbalance}
        with self.splitting("P"):
            output = self.add(
                "autoshard.experts", (rows, up, down, chosen, weights), (tokens, width), experts,
                experts=model.experts, activation=_EXPERT_ACTIVATIONS[model.activation], gated=gated, **more,
            )  # fmt: skip
            flat = (*self.rows, width)
            return self.add("aten.reshape", (output,), flat, path, shape=flat)

    def chosen(self, shares: str, pairs: tuple[int, int], path: str) -> tuple[str, str]:
        """Largest entries of each row, and their indices."""
        best, ids = self.add_several(
            "aten.topk", (shares,), (pairs, pairs), path, k=pairs[1], dim=1, largest=True, sorted=True
        )  # fmt: skip
        self.tensors = [replace(t, dtype="int64") if t.name == ids else t for t in self.tensors]
        return best, ids

    def dense(self, x: str, path: str, width: int) -> str:
        model = self.model
        with self.splitting("S2"):
            up = self.linear(x, f"{path}.up", width, model.bias)
            if model.activation == "swiglu":
                gate = self.linear(x, f"{path}.gate", width, model.bias)
                active = self.add("aten.silu", (gate,), self.shape(up), path)
                inner = self.add("aten.mul", (active, up), self.shape(up), path)
            else:
                inner = _ACTIVATIONS[model.activation](self, up, path)
        with self.splitting("P"):
            return self.linear(inner, f"{path}.down", model.hidden, model.bias)

    def gelu(self, x: str, path: str) -> str:
        return self.add("aten.gelu", (x,), self.shape(x), path, approximate="tanh")

    def gelu_new(self, x: str, path: str) -> str:
        """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) operator by operator, as in Hugging Face's GPT-2."""
        shape = self.shape(x)
        half = self.add("aten.mul", (x,), shape, path, other=0.5)
        cube = self.add("aten.pow", (x,), shape, path, exponent=3.0)
        inner = self.sum(x, self.add("aten.mul", (cube,), shape, path, other=0.044715), path)
        tanh = self.add("aten.tanh", (self.add("aten.mul", (inner,), shape, path, other=0.7978845608),), shape, path)
        return self.add("aten.mul", (half, self.add("aten.add", (tanh,), shape, path, other=1.0, alpha=1)), shape, path)

    def layer(self, x: str, index: int, cosine: str, sine: str) -> str:
        path = layer(index)
        attended = self.attention(self.norm(x, f"{path}.norm1"), index, cosine, sine)
        x = self.sum(self.dropout(attended, path), x, path)
        fed = self.feedforward(self.norm(x, f"{path}.norm2"), index)
        return self.sum(self.dropout(fed, path), x, path)

    def head(self, x: str, labels: str) -> str:
        model, path = self.model, HEAD
        x = self.norm(x, f"{path}.norm")
        count, words = math.prod(self.rows), model.vocabulary
        table = f"p_{EMBEDDING}_weight" if model.tied else self.parameter(f"{path}.weight", words, model.hidden)
        with self.splitting("S2"):
            logits = self.add("aten.linear", (x, table, None), (*self.rows, words), path)
        with self.splitting("S1"):
            flat = self.add("aten.reshape", (logits,), (count, words), path, shape=(count, words))
        if model.fp32_loss and self.dtype != "float32":
            flat = self.cast(flat, "float32", path)
        with self.splitting("R"):
            rows = self.add_several("aten.reshape", (labels,), ((count,),), path, dtype="int64", shape=(count,))[0]
        with self.splitting("vocabulary"):
            return self.add(
                "aten.cross_entropy_loss", (flat, rows, None), (), path,
                reduction=1, ignore_index=-100, label_smoothing=0.0,
            )  # fmt: skip


_ACTIVATIONS = {"gelu": _TransformerWriter.gelu, "gelu_new": _TransformerWriter.gelu_new}
_EXPERT_ACTIVATIONS = {"gelu": "gelu_tanh", "gelu_new": "gelu_tanh", "swiglu": "silu"}
