"""Schemas are read without torch, and say which operand and attribute of an op is which argument."""

from __future__ import annotations

import pytest

from autoshard.emit.spelling import Speller
from autoshard.ir.layout import AxisShard, LocalSize
from autoshard.ir.schemas import Operands, bind, fitting, parse

FILL = "aten::index_fill.int_Scalar(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"
CELL = (
    "aten::lstm_cell(Tensor input, Tensor[] hx, Tensor w_ih, Tensor w_hh, Tensor? b_ih=None, Tensor? b_hh=None)"
    " -> (Tensor, Tensor)"
)
SEARCH = (
    "aten::searchsorted.{}(Tensor sorted_sequence, {} self, *, bool out_int32=False, bool right=False,"
    " str? side=None, Tensor? sorter=None) -> Tensor"
)
TWO = 'mine::two(Tensor[] a, Tensor[] b, float[2]? c=None, str d="x, (y") -> Tensor(a)[]'
NORM = "aten::batch_norm(Tensor input, Tensor? weight, bool training, float eps, bool cudnn_enabled) -> Tensor"
MADE = "aten::eye(SymInt n, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None) -> Tensor"
SCHEMAS = (FILL, CELL, SEARCH.format("Tensor", "Tensor"), SEARCH.format("Scalar", "Scalar"), TWO, NORM, MADE)


def test_a_schema_is_read_with_its_lists_aliases_and_defaults() -> None:
    schema = parse(TWO)
    assert (schema.target, schema.overload, schema.returns_list) == ("mine.two", "", True)
    assert [(a.name, a.kind, a.is_list, a.optional, a.required) for a in schema.arguments] == [
        ("a", "Tensor", True, False, True),
        ("b", "Tensor", True, False, True),
        ("c", "float", True, True, False),
        ("d", "str", False, False, False),
    ]
    assert schema.defaults == {"c": None, "d": "x, (y"}
    aliased = parse("aten::tensor_split.sections(Tensor(a -> *) self, SymInt sections, int dim=0) -> Tensor(a)[]")
    assert [a.kind for a in aliased.arguments] == ["Tensor", "SymInt", "int"] and aliased.returns_list
    with pytest.raises(ValueError, match="no schema"):
        parse("aten::index_fill")
    for argument in ("(str, tVal)[] inputs", "()", "[]"):
        with pytest.raises(ValueError, match="no argument of a schema"):
            parse(f"aten::neg({argument}) -> Tensor")


def test_operands_go_to_their_arguments() -> None:
    assert bind(parse(FILL), ["x", "i"], {"dim": 1, "value": 2.0}) == {
        "dim": 1, "value": 2.0, "self": Operands((0,), False), "index": Operands((1,), False),
    }  # fmt: skip
    cell = bind(parse(CELL), ["x", "h", "c", "w", "u", None, None], {})
    assert cell and cell["hx"] == Operands((1, 2), True) and cell["w_hh"] == Operands((4,), False)
    assert "b_ih" not in cell
    two = bind(parse(TWO), ["x", "y", "z"], {"a": 1, "c": (0.5, 1.0)})
    assert two and (two["a"], two["b"]) == (Operands((0,), True), Operands((1, 2), True))


@pytest.mark.parametrize(
    ("text", "operands", "attributes"),
    [
        (FILL, ["x", "i", "j"], {"dim": 1, "value": 2.0}),  # an operand too many
        (FILL, ["x", "i"], {"dim": 1}),  # no value
        (FILL, ["x", None], {"dim": 1, "value": 2.0}),  # no index
        (FILL, ["x", "i"], {"dim": (1,), "value": 2.0}),  # a list for a number
        (FILL, ["x", "i"], {"dim": 1, "value": 2.0, "more": 1}),
        (TWO, ["x", "y", "z"], {}),  # which of them are the first list?
        ("aten::to.device(Tensor self, Device device, ScalarType dtype) -> Tensor", ["x"], {"dtype": "float32"}),
    ],
)
def test_what_does_not_fit_is_not_bound(text: str, operands: list[str | None], attributes: dict[str, object]) -> None:
    assert bind(parse(text), operands, attributes) is None


def test_of_overloads_the_one_that_says_it_as_it_is() -> None:
    both = [parse(SEARCH.format("Tensor", "Tensor")), parse(SEARCH.format("Scalar", "Scalar"))]
    for order in (both, both[::-1]):
        tensor = fitting(order, ["s", "x", None], {"right": True})
        number = fitting(order, ["s", None], {"self": 0.5, "right": True})
        assert tensor and number and (tensor.overload, number.overload) == ("Tensor", "Scalar")
    assert fitting(both, [], {}) is None


@pytest.mark.parametrize(
    ("target", "operands", "attributes", "expected"),
    [
        ("aten.index_fill", ("x", "i"), {"dim": 1, "value": 2.0}, "torch.index_fill(x, 1, i, 2.0)"),
        (
            "aten.lstm_cell", ("x", "h", "c", "w", "u", None, "b"), {},
            "torch.ops.aten.lstm_cell.default(x, [h, c], w, u, b_hh=b)",
        ),
        ("aten.searchsorted", ("s", None), {"self": 0.5, "right": True}, "torch.searchsorted(s, 0.5, right=True)"),
        ("mine.two", ("x", "y"), {"a": 2, "d": 'q"'}, "torch.ops.mine.two([x, y], [], d=\"q\\\"\")"),
        ("aten.eye", (), {"n": LocalSize(7, (AxisShard("tp"),))}, 'torch.ops.aten.eye.default(n7, device="cpu")'),
        ("aten.unheard_of", ("x",), {"k": 3}, "torch.ops.aten.unheard_of(x, k=3)"),
    ],
)  # fmt: skip
def test_calls_are_written_by_schema(
    target: str, operands: tuple[str | None, ...], attributes: dict[str, object], expected: str
) -> None:
    speller = Speller(lambda size: f"n{size.size}", '"cpu"', SCHEMAS)
    assert speller.spell(target, operands, attributes) == expected  # type: ignore[arg-type]


def test_a_template_that_would_lose_an_argument_is_not_used() -> None:
    schema = "aten::relu(Tensor self, int sides=1) -> Tensor"
    speller = Speller(str, '"cpu"', (schema,))
    assert speller.spell("aten.relu", ("x",), {"sides": 1}) == "F.relu(x)"
    assert speller.spell("aten.relu", ("x",), {"sides": 2}) == "torch.ops.aten.relu.default(x, 2)"
    assert speller.spell("aten.relu", ("x", "y"), {}) == "torch.ops.aten.relu(x, y)"
