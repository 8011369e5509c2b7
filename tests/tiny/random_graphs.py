"""Random small graphs that keep every invariant: for round trips and for properties of passes."""

from __future__ import annotations

from hypothesis import strategies as st

from autoshard.ir.graph import DTYPE_BYTES, Attribute, Graph, Op, Parameter, Saved, Tensor

ARGUMENTS = st.from_regex("[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
NAMES = st.text('abcxyz_é"\\\n0', min_size=1, max_size=6)
ATTRIBUTES: st.SearchStrategy[Attribute] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)  # fmt: skip
INITS = st.sampled_from([(), ("normal", 0.0, 0.02), ("uniform", -1.5, 1.5), ("constant", 1.0)])


@st.composite
def tensors(draw: st.DrawFn, name: str) -> Tensor:
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    return Tensor(name, shape, dtype, "float" in dtype and draw(st.booleans()))


@st.composite
def ops(draw: st.DrawFn, position: int, known: list[str]) -> Op:
    operands = draw(st.lists(st.none() | st.sampled_from(known), max_size=3)) if known else []
    results = tuple(f"v{position}_{i}" for i in range(draw(st.integers(1, 2))))
    present = [i for i, operand in enumerate(operands) if operand is not None]
    saved = Saved(tuple(present[:1]), (0,), draw(st.integers(0, 99)), ((0, 0),) if operands else ())
    attributes = draw(st.dictionaries(ARGUMENTS, ATTRIBUTES, max_size=3))
    target = draw(st.sampled_from(["aten.add", "aten.reshape", "autoshard.linear_in_out"]))
    return Op(
        f"op{position}", target, tuple(operands), tuple(attributes.items()), results, draw(NAMES), draw(NAMES), saved
    )


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    inputs = tuple(f"i{i}" for i in range(draw(st.integers(0, 2))))
    parameters = tuple(
        Parameter(f"p{i}", f"block.{i}", ("tied",) if i == 0 and draw(st.booleans()) else (), init=draw(INITS))
        for i in range(draw(st.integers(0, 2)))
    )
    buffers = tuple(Parameter(f"b{i}", f"state.{i}", persistent=False) for i in range(draw(st.integers(0, 1))))
    known = [*inputs, *(stored.tensor for stored in parameters + buffers)]
    body: list[Op] = []
    for position in range(draw(st.integers(0, 4))):
        body.append(draw(ops(position, known)))
        known += body[-1].results
    outputs = tuple(known[-2:])
    return Graph(
        draw(NAMES), tuple(draw(tensors(name)) for name in known), inputs, parameters, buffers, tuple(body), outputs,
        None, tuple((buffer.tensor, buffer.tensor) for buffer in buffers), (("", "Model"), ("block", "Block")),
        "model.py:build",
    )  # fmt: skip
