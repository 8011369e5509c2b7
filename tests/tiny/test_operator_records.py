"""Operators' records and their schemas."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.emit.expressions import ExpressionWriter
from autoshard.ir.layout import AxisShard, LocalSize
from autoshard.ir.schemas import Operands, bind, fitting, parse
from autoshard.rules.operators import EXCHANGING, KINDS, OPERATORS, VARIANTS, record

# --- what is known of an operator stands in its record: few other files know its name ---


PACKAGE = Path(__file__).resolve().parents[2] / "autoshard"
COPIED = ("emit/runtime/", "emit/package/")
# they turn operators into others
REWRITING = ("graph_capture/passes/", "graph_capture/tracing/", "graph_capture/constructor/")
MOST = 5  # its record, its proof cases, and who makes it: a graph from numbers, a measurement


def words(path: Path) -> Iterator[str]:
    """Every word of the strings of a file that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from (word.removeprefix("aten.") for word in node.value.split())


def files_that_name() -> dict[str, set[str]]:
    """Operators whose name is no word of English -> the files that have it in a string."""
    names = {target.partition(".")[2] for target, known in OPERATORS.items() if known.rule is not None}
    files: dict[str, set[str]] = {name: set() for name in names if "_" in name.strip("_")}
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        if "_data" not in path.parts and not place.startswith(COPIED):
            for word in files.keys() & set(words(path)):
                files[word].add(place)
    return files


def test_few_files_know_an_operators_name() -> None:
    files = files_that_name()
    assert len(files["scaled_dot_product_attention"]) <= MOST
    assert len(files["cross_entropy_loss"]) <= MOST
    elsewhere = {name: [p for p in places if not p.startswith(REWRITING)] for name, places in files.items()}
    assert not {name: places for name, places in elsewhere.items() if len(places) > MOST}


def test_an_operator_has_one_record() -> None:
    targets = [target for kind in KINDS for target in kind.OPERATORS]
    assert len(targets) == len(set(targets)) == len(OPERATORS)


def test_an_unknown_operator_has_the_defaults() -> None:
    unknown = record("mine.op")
    assert unknown.rule is None and not unknown.spelling and unknown.draws is None


@pytest.mark.parametrize("name", sorted({known.bandwidth for known in (*OPERATORS.values(), *VARIANTS.values())}))
def test_the_constant_of_a_record_is_one_of_the_cost_models(name: str) -> None:
    assert load_hardware("a100-80g-sxm").constant(f"memory.{name}") >= 0


def test_what_exchanges_says_its_collectives() -> None:
    assert EXCHANGING
    assert all(VARIANTS[name].collectives for name in EXCHANGING)


# --- schemas are read without torch, and say which operand and attribute of an op is which argument ---


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
    speller = ExpressionWriter(lambda size: f"n{size.size}", '"cpu"', SCHEMAS)
    assert speller.spell(target, operands, attributes) == expected  # type: ignore[arg-type]


def test_a_template_that_would_lose_an_argument_is_not_used() -> None:
    schema = "aten::relu(Tensor self, int sides=1) -> Tensor"
    speller = ExpressionWriter(str, '"cpu"', (schema,))
    assert speller.spell("aten.relu", ("x",), {"sides": 1}) == "F.relu(x)"
    assert speller.spell("aten.relu", ("x",), {"sides": 2}) == "torch.ops.aten.relu.default(x, 2)"
    assert speller.spell("aten.relu", ("x", "y"), {}) == "torch.ops.aten.relu(x, y)"
