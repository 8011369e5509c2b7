"""Small graphs written by hand, for tests that need no torch."""

from __future__ import annotations

from autoshard.ir.graph import Attribute, Graph, Op, Parameter, Saved, Tensor


def mlp_graph(layers: int = 3, batch: int = 8, hidden: int = 16) -> Graph:
    """`layers` equal linears with ReLU, and a squared error: h.0, h.1, … so that blocks repeat."""
    tensors = [Tensor("x", (batch, hidden), "float32"), Tensor("y", (batch, hidden), "float32")]
    parameters, ops, current = [], [], "x"
    for n in range(layers):
        weight, bias, out, active = f"w{n}", f"b{n}", f"linear_{n}", f"relu_{n}"
        tensors += [
            Tensor(weight, (hidden, hidden), "float32", True),
            Tensor(bias, (hidden,), "float32", True),
            Tensor(out, (batch, hidden), "float32", True),
            Tensor(active, (batch, hidden), "float32", True),
        ]
        parameters += [Parameter(weight, f"h.{n}.fc.weight"), Parameter(bias, f"h.{n}.fc.bias")]
        ops += [
            Op(out, "aten.linear", (current, weight, bias), (), (out,), f"h.{n}.fc", f"mlp.py:{n}", Saved((0, 1))),
            Op(active, "aten.relu", (out,), (), (active,), f"h.{n}", f"mlp.py:{n}", Saved((), (0,))),
        ]
        current = active
    tensors.append(Tensor("loss", (), "float32", True))
    attributes: tuple[tuple[str, Attribute], ...] = (("reduction", 1),)
    ops.append(Op("loss", "aten.mse_loss", (current, "y"), attributes, ("loss",), "", "mlp.py:9", Saved((0, 1))))
    modules = (("", "Mlp"), ("h", "ModuleList"), *((f"h.{n}", "Block") for n in range(layers)))
    modules += tuple((f"h.{n}.fc", "Linear") for n in range(layers))
    return Graph(
        "mlp", tuple(tensors), ("x", "y"), tuple(parameters), (), tuple(ops), ("loss",), "loss",
        modules=modules, source="mlp.py:build",
    )  # fmt: skip
