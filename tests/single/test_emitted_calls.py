"""What packages call is run: by the proof once for each row of the table, at capture without values, and over torch's
own samples of its operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoshard.cli import commands
from autoshard.emit import expressions
from autoshard.errors import CaptureError
from autoshard.graph_capture.capture import capture_model
from autoshard.graph_capture.passes.canonical import canonical
from autoshard.ir.graph import Attribute
from autoshard.rules.cases import ALL
from autoshard.rules.operators import OPERATORS, is_random
from autoshard.rules.proof.case_text import case, case_id, floats, integers, positive
from autoshard.rules.proof.operator_call import call
from autoshard.rules.proof.rule_proof import OpCase, Operand, one_op_graph, random_operands
from autoshard.verification.operator_calls import check_calls, run_emitted, statement_of

X = floats((4, 6))
OUTSIDE = [  # operators that the table lacks and that are written as torch.NAME
    case("aten.addmv", floats((4,), (4, 6), (6,)), beta=2, alpha=1),
    case("aten.addr", floats((4, 6), (4,), (6,)), beta=1, alpha=0.5),
    case("aten.bilinear", floats((5, 3), (5, 4), (2, 3, 4), (2,))),
    case("aten.column_stack", floats((4,), (4, 2))),
    case("aten.copysign", floats((4, 6), (6,))),
    case("aten.cosine_similarity", floats((4, 6), (6,)), dim=-1, eps=1e-6),
    case("aten.count_nonzero", X, dim=-1),
    case("aten.cross", floats((4, 3), (4, 3)), dim=-1),
    case("aten.cummin", X, dim=-1),
    case("aten.diag", X, diagonal=1),
    case("aten.diag_embed", X, offset=1, dim1=-2, dim2=-1),
    case("aten.diagonal", X, offset=-1, dim1=1, dim2=0),
    case("aten.dist", floats((4, 6), (4, 6)), p=3.0),
    case("aten.dstack", floats((4, 6), (4, 6))),
    case(
        "aten.embedding_bag", (*floats((7, 3)), integers((6,), 7), integers((2,), 1), Operand((6,))),
        scale_grad_by_freq=False, mode=0, sparse=False, include_last_offset=False, padding_idx=2,
    ),
    case("aten.erfinv", (Operand((4, 6), unit=True),)),
    case("aten.gradient", floats((4, 6), (4,)), dim=(0,), edge_order=2),
    case("aten.hardshrink", X, lambd=0.3),
    case("aten.hstack", floats((4, 6), (4, 2))),
    case(
        "aten.index_reduce", (*floats((4, 6)), integers((3,), 6), *floats((4, 3))),
        dim=-1, reduce="amax", include_self=False,
    ),
    case("aten.inner", floats((4, 6), (5, 6))),
    case("aten.isclose", floats((4, 6), (4, 6)), rtol=0.5, atol=1e-8, equal_nan=True),
    case("aten.isin", (integers((4, 6), 9), integers((3,), 9)), assume_unique=False, invert=True),
    case("aten.kron", floats((4, 6), (2, 3))),
    case("aten.kthvalue", X, k=2, dim=-1, keepdim=True),
    case("aten.lgamma", positive((4, 6))),
    case("aten.linspace", (), start=0.5, end=2, steps=5, dtype="float64"),
    case("aten.logaddexp", floats((4, 6), (6,))),
    case("aten.median", X, dim=-1, keepdim=False),
    case("aten.meshgrid", floats((4,), (6,)), indexing="xy"),
    case("aten.mode", (integers((4, 6), 3),), dim=-1, keepdim=True),
    case("aten.nansum", X, dim=(-1,), keepdim=False, dtype=None),
    case("aten.outer", floats((4,), (6,))),
    case("aten.pairwise_distance", floats((4, 6), (4, 6)), p=3, eps=1e-6, keepdim=True),
    case("aten.quantile", X, q=0.3, dim=-1, keepdim=True, interpolation="lower"),
    case("aten.renorm", X, p=2, dim=0, maxnorm=1.5),
    case("aten.rot90", X, k=1, dims=(-1, -2)),
    case("aten.searchsorted", (Operand((6,)), Operand((4, 6)), None), out_int32=True, right=True, side=None),
    case("aten.std_mean", X, dim=(-1,), correction=0, keepdim=True),
    case("aten.take", (*floats((4, 6)), integers((5,), 24))),
    case("aten.take_along_dim", (*floats((4, 6)), integers((4, 2), 6)), dim=1),
    case("aten.take_along_dim", (*floats((4, 6)), integers((3,), 24))),
    case("aten.tile", X, dims=(3,)),
    case("aten.trace", X),
    case("aten.var_mean", X, dim=(0,), correction=2, keepdim=False),
    case("aten.vstack", floats((4, 6), (2, 6))),
]  # fmt: skip
ROWS = [one for one in ALL if one.target.startswith("aten.")]


def results(one: OpCase) -> list[torch.Tensor]:
    torch.manual_seed(0)
    result = call(one.target, random_operands(one, 0), dict(one.attributes))
    return list(result) if isinstance(result, tuple | list) else [result]


def same(one: OpCase, emitted: list[torch.Tensor]) -> bool:
    return all(
        a.dtype == b.dtype and (one.target == "aten.empty_like" or torch.equal(a.nan_to_num(), b.nan_to_num()))
        for a, b in zip(emitted, results(one), strict=True)
    )


@pytest.mark.parametrize("one", [*ROWS, *OUTSIDE], ids=case_id)
def test_the_emitted_call_gives_what_the_schema_says(one: OpCase) -> None:
    count = len(results(one))
    torch.manual_seed(0)
    assert same(one, run_emitted(one.target, random_operands(one, 0), dict(one.attributes), count))


@pytest.mark.filterwarnings("ignore:torch.searchsorted")
@pytest.mark.parametrize("one", [*ROWS, *OUTSIDE], ids=case_id)
def test_the_emitted_call_takes_operands_that_lie_otherwise_in_memory(one: OpCase) -> None:
    """A transpose leaves the last dim outermost; here of every other operand."""
    operands = random_operands(one, 0)
    operands[::2] = [x if x is None or x.dim() < 2 else x.mT.contiguous().mT for x in operands[::2]]
    torch.manual_seed(0)
    outputs = run_emitted(one.target, operands, dict(one.attributes), len(results(one)))
    if not is_random(one_op_graph(one).ops[0]) and one.target not in ("aten.empty_like", "aten.rrelu_with_noise"):
        torch.testing.assert_close(outputs, results(one), equal_nan=True)


def test_every_name_that_is_written_as_torchs_is_called_here() -> None:
    by_torch = {target for target, known in OPERATORS.items() if known.in_torch}
    assert by_torch <= {one.target for one in [*ROWS, *OUTSIDE]}
    assert {one.target for one in OUTSIDE} <= by_torch


@pytest.mark.parametrize(
    ("target", "template", "said"),
    [
        ("softmax", "F.softmaks({0}, dim={dim})", "softmaks"),  # can't run
        ("softmax", "F.softmax({0}, {dtype})", "IndexError|values|error|missing|dim"),  # loses the dim
        ("softmax", "F.log_softmax({0}, dim={dim}<dtype>)", "largest error"),  # computes something else
    ],
)
def test_a_spelling_that_is_wrong_is_no_proof(
    target: str, template: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(OPERATORS, f"aten.{target}", replace(OPERATORS[f"aten.{target}"], spelling=template))
    monkeypatch.setattr(expressions, "_says_all", lambda *_: True)
    assert commands.main(["prove", target, "--mesh", "tp=2"]) == 6
    assert "WRONG" in capsys.readouterr().out


def test_a_call_that_cant_run_or_gives_another_shape_is_refused_at_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Softmax(dim=-1))
    graph = capture_model(model, (torch.randn(2, 6),))
    check_calls(graph)
    last = graph.ops[-1]
    wide = replace(
        graph, tensors=tuple(replace(t, shape=(4, 2)) if t.name in last.results else t for t in graph.tensors)
    )
    with pytest.raises(CaptureError, match=r"F.softmax.* gives .*was captured"):
        check_calls(wide)
    wrong = replace(OPERATORS["aten.softmax"], spelling="F.softmaks({0}<dim><dtype>)")
    monkeypatch.setitem(OPERATORS, "aten.softmax", wrong)
    with pytest.raises(CaptureError, match=r"aten.softmax.*does not run"):
        check_calls(graph)


def negative(one: OpCase, position: int) -> Attribute:
    """The attribute's value counted from the end, found by experiment; None where there is none."""
    name, value = one.attributes[position]
    listed = value if isinstance(value, tuple) else (value,)
    for rank in range(1, 7):
        tried: Attribute = tuple(item - rank if isinstance(item, int) and item >= 0 else item for item in listed)
        attributes = list(one.attributes)
        attributes[position] = (name, tried if isinstance(value, tuple) else tried[0])  # type: ignore[index]
        other = replace(one, attributes=tuple(attributes))
        try:
            outputs = results(other)
        except Exception:
            continue
        if tried != listed and len(outputs) == len(results(one)) and same(one, outputs):
            return attributes[position][1]
    return None


def dims_of(one: OpCase) -> list[int]:
    """Positions of the attributes that hold dims, if anything does."""
    return [
        i for i, (name, value) in enumerate(one.attributes) if name.startswith(("dim", "axis")) and value is not None
    ]


DIMMED = [(one, i) for one in [*ROWS, *OUTSIDE] for i in dims_of(one) if not is_random(one_op_graph(one).ops[0])]


@pytest.mark.parametrize(("one", "position"), DIMMED, ids=[f"{case_id(one)} {i}" for one, i in DIMMED])
def test_dims_counted_from_the_end_mean_what_they_meant(one: OpCase, position: int) -> None:
    """Written in the one spelling of graphs, an operator computes the same, however its dims were counted."""
    spelled = [one]
    least = negative(one, position)
    if least is not None:
        attributes = list(one.attributes)
        attributes[position] = (attributes[position][0], least)
        spelled.append(replace(one, attributes=tuple(attributes)))
    for other in spelled:
        graph = canonical(one_op_graph(other))
        (op,) = graph.ops
        if op.target == "aten.alias":
            continue
        outputs = run_emitted(op.target, random_operands(one, 0), dict(op.attributes), len(op.results))
        assert same(one, outputs), statement_of(op.target, op.operands, dict(op.attributes), len(op.results))


def test_dims_are_made_positive_where_it_is_known_in_which_tensor_they_count() -> None:
    """Every operator whose record says so is one that torch knows, with those arguments."""
    from autoshard.graph_capture.overloads import schemas_of

    for target, record in OPERATORS.items():
        if names := f"{record.dims} {record.dims_of_result}".split():
            known = {argument.name for schema in schemas_of(target) for argument in schema.arguments}
            assert known.issuperset(names), target


@pytest.mark.slow
def test_a_part_of_torchs_own_samples_by_seed() -> None:
    """`python -m benchmarks.operators` runs all of them."""
    pytest.importorskip("expecttest", reason="torch's samples need it")
    from benchmarks import operators

    ends = list(operators.ends(operators.chosen(count=25, seed=7), limit=2))
    assert not [end for end in ends if end.end in operators.BAD]
    assert sum(end.end == "same" for end in ends) >= 15
