"""Every rule of the table, every strategy it offers: sharded, run, combined, compared, forward and backward."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from autoshard.cli import commands
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.rules import OPERATORS, find, has_rule, strategies
from autoshard.rules import enumerate as enumerate_room
from autoshard.rules.algebra import derive as derive_room
from autoshard.rules.algebra import nesting
from autoshard.rules.cases import ALL
from autoshard.rules.cases.creation import RANDOM
from autoshard.rules.cases.layers import DROPOUT
from autoshard.rules.granularities import Granularities
from autoshard.rules.proof.case_text import case, case_id, floats, integers
from autoshard.rules.proof.rule_proof import OpCase, Operand, failures, one_op_graph, prove, verdict
from autoshard.verification.rule_table import UNPROVED, prove_case
from tests.slow import slow

# Uneven cuts on two axes prove the most, those on one among them; the others take as long again.
MESHES = ["dp=2,tp=3", slow("tp=3"), slow("tp=2"), slow("a=2,b=1,c=2")]
ATTENTION = [one for one in ALL if one.target == "aten.scaled_dot_product_attention"]
LONGEST = ATTENTION[1::2]  # a third of the time of all rows
ROWS = [slow(one) if one in LONGEST else one for one in ALL]
NOT_CUT = [
    "aten.max[4x5]",  # over all of it
    "aten.reshape[6x4]",  # (6, 4) -> (4, 6) keeps no dim
    "aten.index_put[5x7,4,4,()]",  # every dim is indexed
]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("one", ROWS, ids=case_id)
def test_every_strategy_is_right(one: OpCase, mesh: str) -> None:
    verdicts = prove_case(one, Mesh.parse(mesh))
    assert not [v for v in verdicts if v.skipped]
    assert not list(failures(verdicts))


def test_every_case_but_a_few_can_be_cut() -> None:
    """A rule that offers nothing is sound, but no rule: this list is what no axis of 2 can cut."""
    repeated = []
    for one in ALL:
        if one in (*RANDOM, *DROPOUT):
            continue
        graph = one_op_graph(one)
        assert has_rule(graph, graph.ops[0]), case_id(one)
        offered = strategies(graph, graph.ops[0], Mesh.parse("tp=2"), Granularities({}))
        if not any(choice.kind == "factor" for strategy in offered for choice in strategy.choices):
            repeated.append(case_id(one))
    assert repeated == NOT_CUT


@pytest.mark.parametrize(
    ("one", "refined"),
    [
        (case("aten.split", floats((4, 12)), split_size=(4, 4, 4), dim=-1), (("b", ((2, 1), (1, 2))),)),
        (case("autoshard.linear_in_out", floats((4, 6), (6, 24), (24,))), (("n", ((3, 1), (3, 2), (6, 2))),)),
        (case("autoshard.linear_in_out", floats((4, 24), (24, 6), (6,))), (("m", ((3, 1), (1, 8), (4, 3))),)),
        (case("aten.reshape", floats((4, 5, 24)), shape=(4, 5, 6, 4)), (("c", ((1, 2), (3, 1))),)),
        (case("aten.reshape", floats((20, 6)), shape=(4, 5, 6)), (("c", ((1, 3),)), ("a", ((2, 1),)))),
        (case("aten.add", floats((4, 12), (12,)), alpha=1), (("i1", ((3, 1), (3, 2), (1, 4))),)),
    ],
)
@pytest.mark.parametrize("mesh", [slow("tp=2"), slow("dp=2,tp=2"), slow("a=2,b=2,c=2"), "dp=2,tp=3"])
def test_refined_factors(one: OpCase, refined: Any, mesh: str) -> None:
    """Blocks and units, alone and nested on several axes, also where they leave uneven shards."""
    verdicts = prove_case(one, Mesh.parse(mesh), refined=refined)
    assert any("/" in str(v.strategy) or "*" in str(v.strategy) for v in verdicts)
    assert not list(failures(verdicts))


def test_a_vocabulary_of_which_some_device_holds_nothing() -> None:
    """5 rows over 4 devices are 2, 2, 1, 0; over 2 x 2 they are 2, 1, 1, 1."""
    embedding = case("aten.embedding", (Operand((5, 3)), integers((4, 6), 5)), padding_idx=-1, scale_grad_by_freq=False)
    loss = case("aten.cross_entropy_loss", (Operand((6, 5)), integers((6,), 5), None), reduction=1, ignore_index=2)
    for one in (embedding, loss):
        for text in ("tp=4", "dp=2,tp=2"):
            verdicts = prove_case(one, Mesh.parse(text))
            assert any("vocabulary" in str(v.strategy) for v in verdicts)
            assert not list(failures(verdicts))


@pytest.mark.parametrize(
    ("one", "rule", "caught"),
    [
        (case("aten.softmax", floats((4, 6)), dim=-1, dtype=None), "a b -> a b", "b"),
        (case("aten.linear", floats((4, 6), (7, 6), (7,))), "... m, n m, n? -> ... n | sum: m", "m"),
        (case("aten.add", floats((4, 6)), other=1.0, alpha=1), "... -> ... | linear: 0", "~0"),
        (case("aten.mul", floats((4, 6), (4, 6))), "..., ... -> ... | linear: 0+1", "~0.1"),
        (case("aten.relu", floats((4, 6))), "... -> ... | linear: 0", "~0"),
        (case("aten.amax", floats((4, 6)), dim=(1,), keepdim=False), "a b -> a | sum: b", "b"),
        (case("aten.layer_norm", floats((4, 6), (6,), (6,)), normalized_shape=(6,)), "... d, d, d -> ... d", "d"),
        (case("aten.reshape", floats((4, 6)), shape=(6, 4)), "a (b 3) -> (b 3) a", "a"),
        (case("aten.cat", floats((4, 6), (4, 6)), dim=1), "a b, a b -> a (b 2)", "b"),
    ],
)
def test_a_wrong_rule_is_caught(one: OpCase, rule: str, caught: str) -> None:
    verdicts = prove(one, Mesh.parse("tp=2"), rule=rule)
    wrong = {str(verdict.strategy) for verdict in verdicts if verdict.failure}
    assert caught in wrong


def test_a_wrong_gradient_alone_is_caught() -> None:
    """A weight under a batch axis has a partial gradient: called whole, the forward is right all the same."""
    one = case("aten.linear", floats((4, 6), (7, 6), (7,)))
    graph = one_op_graph(one)
    good = find(graph, graph.ops[0], Mesh.parse("tp=2"), Granularities({}), "i0")
    bad = replace(good, operands=(good.operands[0], Layout.parse("R"), good.operands[2]))
    assert not verdict(one, graph, good, Mesh.parse("tp=2")).failure
    assert "gradient of operand 1" in verdict(one, graph, bad, Mesh.parse("tp=2")).failure


@pytest.mark.slow
@pytest.mark.parametrize("check", ["nesting_problem", "product_problem"])
def test_factors_of_one_dim_that_are_cut_in_any_order_are_caught(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of `rules/nesting`, strategies are offered that no layout states."""
    remembered = (enumerate_room.derive, nesting.factor_problem, nesting.product_problem)
    one = case("aten.repeat_interleave", floats((2, 3, 4)), repeats=4, dim=1, output_size=None)
    try:
        for room in (nesting, derive_room):
            monkeypatch.setattr(room, check, lambda *_: "", raising=False)
        _forget(remembered)
        assert "times b" in {str(v.strategy) for v in prove_case(one, Mesh.parse("dp=2,tp=2")) if v.failure}
        assert commands.main(["prove", "conv2d", "--mesh", "dp=2,tp=2"]) == 6
    finally:
        monkeypatch.undo()
        _forget(remembered)
    assert not list(failures(prove_case(one, Mesh.parse("dp=2,tp=2"))))


def _forget(remembered: tuple[Any, ...]) -> None:
    for function in remembered:
        function.cache_clear()


def test_every_operator_of_the_table_has_a_case() -> None:
    """Or a reason that `autoshard prove` shows."""
    ruled = {target for target, known in OPERATORS.items() if known.rule is not None}
    assert ruled - {one.target for one in ALL} == set(UNPROVED)
    assert {one.target for one in ALL} <= ruled


def test_a_wrong_rule_in_the_table_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["prove", "softmax", "relu", "empty_like", "--mesh", "tp=2", "--seeds", "2"]
    assert commands.main(words) == 0
    assert "2 of 3 operators proved" in capsys.readouterr().out
    monkeypatch.setitem(OPERATORS, "aten.softmax", replace(OPERATORS["aten.softmax"], rule="... -> ..."))
    assert commands.main([*words, "--json"]) == 6
    printed = json.loads(capsys.readouterr().out)
    assert printed["proved"] == 1
    wrong = next(entry for entry in printed["operators"] if entry["target"] == "aten.softmax")
    assert any("i2: " in line for line in wrong["failures"])


def test_an_operator_that_is_only_repeated_is_not_called_proved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(OPERATORS["aten.log_softmax"], rule="... -> ... | whole: ...")
    monkeypatch.setitem(OPERATORS, "aten.log_softmax", wrong)
    assert commands.main(["prove", "log_softmax", "relu", "--mesh", "tp=2"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 operators proved, 1 whole only" in printed
    assert commands.main(["prove", "log_softmax", "--mesh", "tp=2", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert entry["proved"] == 0 and not entry["operators"][0]["cuts"]


def test_a_rule_that_does_not_fit_its_operator_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATORS, "aten.relu", replace(OPERATORS["aten.relu"], rule="a b c -> a b c"))
    assert commands.main(["prove", "relu", "--mesh", "tp=2"]) == 6


def test_an_operator_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["prove", "lineer"]) == 2
    assert "aten.linear" in capsys.readouterr().err


def test_no_seed_is_no_proof() -> None:
    assert commands.main(["prove", "relu", "--seeds", "0"]) == 2
