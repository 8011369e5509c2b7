"""Graphs for tests of the rules, written by hand: one operator, or a GPT-2 with its fused projection."""

from __future__ import annotations

from autoshard.ir.graph import Attribute, Graph, Op, Parameter, Tensor

Shape = tuple[int, ...]


def one_op(
    target: str,
    operands: list[Shape | None],
    results: list[Shape],
    integers: tuple[int, ...] = (),
    **attributes: Attribute,
) -> tuple[Graph, Op]:
    """An operator on float32 tensors that need gradients, except operands at `integers`: int64."""
    tensors = [
        Tensor(f"x{i}", shape, "int64" if i in integers else "float32", i not in integers)
        for i, shape in enumerate(operands)
        if shape is not None
    ]
    needed = any(tensor.requires_grad for tensor in tensors)
    outs = [Tensor(f"y{i}", shape, "float32" if needed else "int64", needed) for i, shape in enumerate(results)]
    names = tuple(None if shape is None else f"x{i}" for i, shape in enumerate(operands))
    op = Op("op", target, names, tuple(attributes.items()), tuple(tensor.name for tensor in outs))
    inputs = tuple(tensor.name for tensor in tensors)
    return Graph("one", (*tensors, *outs), inputs, (), (), (op,), op.results, None), op


class Writer:
    """Writes a graph op by op; `linear` and the like return the name of their result."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.inputs: list[str] = []
        self.parameters: list[Parameter] = []
        self.ops: list[Op] = []

    def input(self, name: str, shape: Shape, dtype: str = "int64") -> str:
        self.tensors.append(Tensor(name, shape, dtype))
        self.inputs.append(name)
        return name

    def parameter(self, name: str, shape: Shape) -> str:
        self.tensors.append(Tensor(name, shape, "float32", True))
        self.parameters.append(Parameter(name, name))
        return name

    def op(
        self, name: str, target: str, operands: list[str | None], *shapes: Shape, **attributes: Attribute
    ) -> list[str]:
        """Floating where an operand is; the gradient of a result is needed where an operand's is."""
        inputs = [tensor for tensor in self.tensors if tensor.name in operands]
        needed = any(tensor.requires_grad for tensor in inputs)
        results = [name if len(shapes) == 1 else f"{name}_{i}" for i in range(len(shapes))]
        self.tensors += [
            Tensor(r, s, "float32" if needed else "int64", needed) for r, s in zip(results, shapes, strict=True)
        ]
        self.ops.append(Op(name, target, tuple(operands), tuple(attributes.items()), tuple(results)))
        return results

    def graph(self, loss: str) -> Graph:
        return Graph(
            "hand", tuple(self.tensors), tuple(self.inputs), tuple(self.parameters), (), tuple(self.ops), (loss,), loss
        )


def gpt(layers: int = 1, batch: int = 4, seq: int = 16, width: int = 768, heads: int = 12, words: int = 50257) -> Graph:
    """GPT-2 as capture writes it, MLP shortened to one activation; ops are named by layer and part: `0.qkv`."""
    w = Writer()
    shape = (batch, seq, width)
    ids, labels = w.input("ids", (batch, seq)), w.input("labels", (batch, seq))
    table = w.parameter("wte", (words, width))
    options: dict[str, Attribute] = {"padding_idx": -1, "scale_grad_by_freq": False, "sparse": False}
    (x,) = w.op("wte_rows", "aten.embedding", [table, ids], shape, **options)
    for layer in range(layers):
        x = _block(w, f"{layer}.", x, shape, heads)
    (x,) = w.op("head", "aten.linear", [x, table, None], (batch, seq, words))
    (x,) = w.op("logits", "aten.reshape", [x], (batch * seq, words), shape=(batch * seq, words))
    (rows,) = w.op("rows", "aten.reshape", [labels], (batch * seq,), shape=(batch * seq,))
    w.op("loss", "aten.cross_entropy_loss", [x, rows, None], (), reduction=1, ignore_index=-100, label_smoothing=0.0)
    return w.graph("loss")


def _block(w: Writer, at: str, x: str, shape: Shape, heads: int) -> str:
    batch, seq, width = shape
    size = width // heads

    def linear(name: str, x: str, inner: int, outer: int) -> str:
        weight, bias = w.parameter(f"{at}{name}.weight", (inner, outer)), w.parameter(f"{at}{name}.bias", (outer,))
        return w.op(f"{at}{name}", "autoshard.linear_in_out", [x, weight, bias], (batch, seq, outer))[0]

    def norm(name: str, x: str) -> str:
        weight, bias = w.parameter(f"{at}{name}.weight", (width,)), w.parameter(f"{at}{name}.bias", (width,))
        return w.op(f"{at}{name}", "aten.layer_norm", [x, weight, bias], shape, normalized_shape=(width,), eps=1e-5)[0]

    def add(name: str, x: str, y: str) -> str:
        return w.op(f"{at}{name}", "aten.add", [x, y], shape, alpha=1)[0]

    qkv = linear("qkv", norm("norm1", x), width, 3 * width)
    parts = w.op(f"{at}split", "aten.split", [qkv], shape, shape, shape, split_size=(width,) * 3, dim=2)
    split = (batch, seq, heads, size)
    parts = [w.op(f"{at}view{i}", "aten.reshape", [part], split, shape=split)[0] for i, part in enumerate(parts)]
    each = (batch, heads, seq, size)
    parts = [w.op(f"{at}swap{i}", "aten.transpose", [p], each, dim0=1, dim1=2)[0] for i, p in enumerate(parts)]
    options: dict[str, Attribute] = {"dropout_p": 0.1, "is_causal": True, "scale": None, "enable_gqa": False}
    (y,) = w.op(f"{at}attention", "aten.scaled_dot_product_attention", [*parts, None], each, **options)
    (y,) = w.op(f"{at}swap", "aten.transpose", [y], split, dim0=1, dim1=2)
    (y,) = w.op(f"{at}join", "aten.reshape", [y], shape, shape=shape)
    (y,) = w.op(f"{at}dropout", "aten.dropout", [linear("out", y, width, width)], shape, p=0.1, train=True)
    x = add("add1", x, y)
    y = linear("up", norm("norm2", x), width, 4 * width)
    (y,) = w.op(f"{at}act", "aten.gelu", [y], (batch, seq, 4 * width), approximate="tanh")
    return add("add2", x, linear("down", y, 4 * width, width))
