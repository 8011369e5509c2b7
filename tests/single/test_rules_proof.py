"""Every rule of the table, every strategy it offers: sharded, run, combined, compared, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from autoshard.emit import runtime
from autoshard.emit.runtime.mesh import ParallelMesh
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.rules import RULES, LocalOp, find, has_rule, strategies
from autoshard.rules.candidates import Candidates
from autoshard.rules.prove import OpCase, Operand, Run, Verdict, failures, one_op_graph, prove, verdict
from autoshard.verify.lockstep import run_lockstep
from tests.rule_cases import ALL, RANDOM, case, case_id, floats, integers

MESHES = ("tp=2", "tp=3", "dp=2,tp=2", "dp=2,tp=3", "a=2,b=1,c=2")
NOT_CUT = [
    "aten.reshape[6x4]",  # (6, 4) -> (4, 6) keeps no dim
    "aten.cross_entropy_loss[6x7,6x7,-]",  # a mean over probabilities
    "aten.nll_loss_nd[6x7,6,-]",  # a mean whose count is in the labels, without a variant
]


def lockstep(mesh: Mesh) -> Run:
    return lambda work: run_lockstep(dict(mesh.axes), lambda device: work(device.rank, device))


def alone(mesh: Mesh, rank: int = 0) -> ParallelMesh:
    """A device that talks to nobody: enough for variants without collectives."""
    device = ParallelMesh(dict(mesh.axes), rank, lambda *_: None, torch.device("cpu"))  # type: ignore[arg-type, return-value]
    device.random.exact = True
    return device


def run_variant(mesh: Mesh, context: Any, local: LocalOp, operands: Sequence[torch.Tensor | None]) -> Any:
    whole = Mesh(tuple((name, 1) for name in mesh.names))
    device = alone(whole) if context is None else context
    extra = [device.random] if local.variant.startswith("random_") else []
    given = [*operands, None] if local.variant == "random_attention" and len(operands) == 3 else operands
    axes = {role: tuple(device[name] for name in names) for role, names in local.axes}
    return getattr(runtime, local.variant)(*_kept(local, given), *extra, **dict(local.attributes), **axes)


def _kept(local: LocalOp, operands: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """An absent weight is no argument of the parallel loss; an absent mask is one of attention."""
    return operands if local.variant == "random_attention" else [t for t in operands if t is not None]


def proved(one: OpCase, mesh: Mesh, **more: Any) -> list[Verdict]:
    """In lock-step, where a variant of this operator may communicate; else one device after another."""
    if one.target in ("aten.embedding", "aten.cross_entropy_loss"):
        return prove(one, mesh, run=lockstep(mesh), run_variant=partial(run_variant, mesh), **more)

    def each(work: Any) -> list[Any]:
        return [work(rank, alone(mesh, rank)) for rank in range(mesh.size)]

    return prove(one, mesh, run=each, run_variant=partial(run_variant, mesh), **more)


@pytest.mark.parametrize("one", ALL, ids=case_id)
def test_every_strategy_is_right(one: OpCase) -> None:
    for text in MESHES:
        mesh = Mesh.parse(text)
        verdicts = proved(one, mesh)
        assert not [v for v in verdicts if v.skipped]
        assert not list(failures(verdicts)), text


def test_every_case_but_a_few_can_be_cut() -> None:
    """A rule that offers nothing is sound, but no rule: this list is what no axis of 2 can cut."""
    repeated = []
    for one in ALL:
        if one in RANDOM:
            continue
        graph = one_op_graph(one)
        assert has_rule(graph, graph.ops[0]), case_id(one)
        offered = strategies(graph, graph.ops[0], Mesh.parse("tp=2"), Candidates({}))
        if not any(choice.kind == "factor" for strategy in offered for choice in strategy.choices):
            repeated.append(case_id(one))
    assert repeated == NOT_CUT


@pytest.mark.parametrize(
    ("one", "refined"),
    [
        (case("aten.split", floats((4, 12)), split_size=4, dim=-1), (("b", ((2, 1), (1, 2))),)),
        (case("autoshard.linear_in_out", floats((4, 6), (6, 24), (24,))), (("n", ((3, 1), (3, 2), (6, 2))),)),
        (case("autoshard.linear_in_out", floats((4, 24), (24, 6), (6,))), (("m", ((3, 1), (1, 8), (4, 3))),)),
        (case("aten.reshape", floats((4, 5, 24)), shape=(4, 5, 6, 4)), (("c", ((1, 2), (3, 1))),)),
        (case("aten.reshape", floats((20, 6)), shape=(4, 5, 6)), (("c", ((1, 3),)), ("a", ((2, 1),)))),
        (case("aten.add", floats((4, 12), (12,)), alpha=1), (("i1", ((3, 1), (3, 2), (1, 4))),)),
    ],
)
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "a=2,b=2,c=2", "dp=2,tp=3"])
def test_refined_factors(one: OpCase, refined: Any, mesh: str) -> None:
    """Blocks and units, alone and nested on several axes, also where they leave uneven shards."""
    verdicts = proved(one, Mesh.parse(mesh), refined=refined)
    assert any("/" in str(v.strategy) or "*" in str(v.strategy) for v in verdicts)
    assert not list(failures(verdicts))


def test_a_vocabulary_of_which_some_device_holds_nothing() -> None:
    """5 rows over 4 devices are 2, 2, 1, 0; over 2 x 2 they are 2, 1, 1, 1."""
    embedding = case("aten.embedding", (Operand((5, 3)), integers((4, 6), 5)), padding_idx=-1, scale_grad_by_freq=False)
    loss = case("aten.cross_entropy_loss", (Operand((6, 5)), integers((6,), 5), None), reduction=1, ignore_index=2)
    for one in (embedding, loss):
        for text in ("tp=4", "dp=2,tp=2"):
            verdicts = proved(one, Mesh.parse(text))
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
    good = find(graph, graph.ops[0], Mesh.parse("tp=2"), Candidates({}), "i0")
    bad = replace(good, operands=(good.operands[0], Layout.parse("R"), good.operands[2]))
    assert not verdict(one, graph, good, Mesh.parse("tp=2")).failure
    assert "gradient of operand 1" in verdict(one, graph, bad, Mesh.parse("tp=2")).failure


def test_the_table_is_covered() -> None:
    """Every rule function and every rule text of the table appears in some case."""
    written = {target for target, rule in RULES.items() if isinstance(rule, str)}
    tried = {one.target for one in ALL}
    functions = {RULES[target] for target in tried if not isinstance(RULES[target], str)}
    missing = {target for target, rule in RULES.items() if not isinstance(rule, str) and rule not in functions}
    texts = {RULES[target] for target in tried if isinstance(RULES[target], str)}
    assert not {target for target in written if RULES[target] not in texts}
    assert not {RULES[target] for target in missing}
