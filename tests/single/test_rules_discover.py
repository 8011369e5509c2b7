"""Discovery finds the table's rules again, and rules of operators that it has never seen."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autoshard.cli import commands
from autoshard.graph_capture.capture import capture_model
from autoshard.ir import graph_json
from autoshard.ir.graph import Graph, GraphFault
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.operator_record import Operator
from autoshard.rules.enumerate import derive
from autoshard.rules.operator_check import check_rules
from autoshard.rules.operator_table import instance
from autoshard.rules.operators import OPERATORS
from autoshard.rules.proof import discover as room
from autoshard.rules.proof.case_text import case, case_id, floats
from autoshard.rules.proof.discover import cached_rule, discover, is_right, reduced, safe_rule, with_discovered
from autoshard.rules.proof.rule_proof import OpCase, offered_by, one_op_graph
from autoshard.system.isolated_process import apart
from tests.slow import quick_at

KNOWN = [
    case("aten.linear", floats((4, 5, 6), (7, 6), (7,))),
    case("aten.mm", floats((4, 5), (5, 6))),
    case("aten.bmm", floats((2, 3, 4), (2, 4, 5))),
    case("aten.addmm", floats((6,), (4, 5), (5, 6)), beta=1, alpha=1),
    case("aten.relu", floats((4, 6))),
    case("aten.add", floats((4, 6), (6,)), alpha=1),
    case("aten.mul", floats((4, 6), (4, 6))),
    case("aten.softmax", floats((4, 6)), dim=1, dtype=None),
    case("aten.layer_norm", floats((4, 5, 6), (6,), (6,)), normalized_shape=(6,), eps=1e-5),
    case("aten.sum", floats((4, 5, 6)), dim=(1,), keepdim=False, dtype=None),
    case("aten.amax", floats((4, 6)), dim=(1,), keepdim=False),
    case("aten.cumsum", floats((4, 6)), dim=1, dtype=None),
    case("aten.transpose", floats((4, 5, 6)), dim0=0, dim1=1),
    case("aten.roll", floats((4, 6)), shifts=(2,), dims=(0,)),
]
MODEL = """
import torch
from torch import nn

@torch.library.custom_op("autoshard_test::gated", mutates_args=())
def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x @ w)

@gated.register_fake
def _(x, w):
    return torch.empty_like(x)

def backward(ctx, g):
    x, w = ctx.saved_tensors
    s = torch.sigmoid(x @ w)
    t = g * x * s * (1 - s)
    return g * s + t @ w.t(), x.flatten(0, -2).t() @ t.flatten(0, -2)

gated.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.up, self.down = nn.Linear(n, n), nn.Linear(n, 8)
        self.w = nn.Parameter(torch.randn(n, n) * 0.1)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.down(torch.ops.autoshard_test.gated(self.up(x), self.w)), y)

def build(n=32):
    return Model(n), (torch.randn(16, 6, n), torch.randn(16, 6, 8))
"""


def layouts(strategies: tuple[object, ...]) -> set[tuple[object, ...]]:
    return {(s.operands, s.results) for s in strategies}  # type: ignore[attr-defined]


@pytest.mark.parametrize("one", quick_at(KNOWN, 1, 4, 5, 6, 7, 10, 11, 13), ids=case_id)
def test_the_rules_of_the_table_are_found_again(one: OpCase) -> None:
    """At least what the table offers without a variant; a linear operand that it leaves out may be found besides."""
    text = discover(one)
    graph = one_op_graph(one)
    ruled = replace(graph, discovered=((graph.ops[0].name, text),))
    mesh = Mesh.parse("tp=2")
    offered = layouts(offered_by(graph, mesh, rule=text))
    plain = tuple(s for s in derive(instance(graph, graph.ops[0]), (), mesh) if not s.variant)
    assert plain and layouts(plain) <= offered, text
    assert ruled.rule_of == {"op": text}


@pytest.mark.parametrize("target", ["aten.nanmean", "aten.nansum"])
def test_what_leaves_nan_out_is_not_linear(target: str) -> None:
    """Of random numbers alone it looks so, and zeros in place of another device's shard would count in its mean."""
    assert "linear" not in discover(case(target, floats((4, 6)), dim=None, keepdim=False, dtype=None))


def register(name: str, run: Callable[[torch.Tensor], torch.Tensor]) -> Graph:
    """A model of one new operator, captured."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return run(x)

    custom_op = torch.library.custom_op(f"autoshard_test::{name}", body, mutates_args=())
    custom_op.register_fake(torch.empty_like)
    model = torch.nn.Module()
    model.forward = lambda x: getattr(torch.ops.autoshard_test, name)(x)  # type: ignore[assignment]
    return capture_model(model, (torch.randn(12, 8),))


@pytest.mark.parametrize("name", ["clipped", "shifted", "cut_to_zero"])
def test_what_is_linear_near_one_alone_is_not(name: str, tmp_path: Path) -> None:
    """Partial sums may be of any size, though the whole is not: 100 and -99 through a clamp to 50 are -1."""
    runs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "clipped": lambda x: x.clamp(-50, 50),
        "shifted": lambda x: (x + 100).relu() - 100,
        "cut_to_zero": lambda x: torch.where(x.abs() > 1e-5, x, 0.0),
    }
    ruled, _ = with_discovered(register(name, runs[name]), tmp_path)
    assert [text for _, text in ruled.discovered] == ["f0 f1 -> f0 f1"]


def test_an_operator_that_nothing_recombines_is_named_in_a_warning(tmp_path: Path) -> None:
    graph, warnings = with_discovered(register("normed", lambda x: x * x.norm()), tmp_path)
    assert not graph.discovered
    (warning,) = warnings
    assert "autoshard_test.normed" in warning and "every device repeats it" in warning
    assert not instance(graph, graph.ops[0]).known


def test_a_random_operator_gets_no_rule(tmp_path: Path) -> None:
    graph, warnings = with_discovered(register("noisy", lambda x: x + torch.rand_like(x)), tmp_path)
    assert not graph.discovered and len(warnings) == 1


def test_found_rules_are_remembered_and_proved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = case("aten.softmax", floats((6, 10)), dim=1, dtype=None)
    text = cached_rule(one, tmp_path)
    (path,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(room, "discover", lambda case: pytest.fail("the cache was not read"))
        assert cached_rule(one, tmp_path) == text
    path.write_text('{"rule": "a b -> a b"}', encoding="utf-8")
    assert cached_rule(one, tmp_path) == text
    path.write_text("{", encoding="utf-8")
    assert cached_rule(one, tmp_path) == text


def test_an_operator_that_ends_its_process_is_repeated_and_not_tried_again(tmp_path: Path) -> None:
    """As some do that are given shapes which they don't check."""
    calls = tmp_path / "calls"

    def fragile(x: torch.Tensor) -> torch.Tensor:
        with calls.open("a") as file:
            file.write(f"{x.shape[0]}\n")
        if x.shape[0] not in (6, 10):  # not the sizes of the whole: it is a part
            os.abort()
        return x * 2

    graph = register("fragile", fragile)
    for _ in range(2):
        ruled, (warning,) = with_discovered(graph, tmp_path / "cache")
        assert not ruled.discovered and "autoshard_test.fragile" in warning and "ended its process" in warning
        (remembered,) = (tmp_path / "cache").iterdir()
        assert str(remembered) in warning  # the operator may be mended: that is what to remove
        assert calls.read_text().count("\n") == 4  # the whole three times, its first half


def test_an_operator_that_refuses_some_shapes_by_assertion_is_cut_where_it_does_not(tmp_path: Path) -> None:
    def careful(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] in (5, 10)  # the whole and its half, but no third
        return x * 2

    ruled, warnings = with_discovered(register("careful", careful), tmp_path)
    assert not warnings
    ((_, text),) = ruled.discovered
    assert text == "x0_0 f0 -> y0_0 f0 | whole: x0_0 y0_0 | linear: 0"  # the second dim alone


def test_what_works_apart_comes_back_and_what_ends_does_not() -> None:
    assert apart(lambda: "a b -> a b") == ("a b -> a b", False)
    assert apart(lambda: "long" * 100_000) == ("long" * 100_000, False)  # more than a pipe holds
    assert apart(lambda: os.kill(os.getpid(), signal.SIGSEGV) or "") == (None, True)
    assert apart(lambda: str(1 // 0)) == (None, False)


def test_a_process_that_is_ended_from_outside_is_not_remembered(tmp_path: Path) -> None:
    """Out of memory, a shutdown: nothing is known of the operator, and the next plan tries it again."""
    crash = case("aten.relu", floats((4, 6)))
    for ending, files in ((signal.SIGKILL, 0), (signal.SIGTERM, 0), (signal.SIGSEGV, 1)):
        assert safe_rule(crash, tmp_path, run_call=lambda *_, ending=ending: os.kill(os.getpid(), ending)) is None
        assert len(list(tmp_path.glob("*.json"))) == files


def test_sizes_are_reduced_unless_an_argument_names_one() -> None:
    large = reduced(case("aten.softmax", floats((4096, 512)), dim=1, dtype=None))
    assert large is not None and [o and o.shape for o in large.operands] == [(10, 6)]
    named = case("aten.layer_norm", floats((4, 5, 6), None, None), normalized_shape=(6,), eps=1e-5)
    assert reduced(named) == named
    assert not is_right(large, "a b -> a b")


class Largest(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.max(x, y) + torch.min(x, y)


def test_an_overload_that_the_rule_is_not_for(tmp_path: Path) -> None:
    """`max` of two tensors is `maximum`, not the reduction; under that one's name its rule is found by experiment."""
    graph = capture_model(Largest(), (torch.randn(4, 6), torch.randn(4, 6)), training=False)
    targets = [op.target for op in graph.ops]
    assert targets == ["aten.maximum", "aten.minimum", "aten.add"]
    first = replace(graph.ops[0], target="aten.max")
    other, warnings = with_discovered(replace(graph, ops=(first, *graph.ops[1:])), tmp_path)
    assert dict(other.discovered) == {first.name: "f0 f1, f0 f1 -> f0 f1"} and not warnings
    check_rules(other)
    assert instance(other, first).known


class Pairs(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cartesian_prod(x, y)


@pytest.mark.parametrize(("rows", "known"), quick_at([(12, True), (2**20, False)], 1))
def test_a_rule_that_names_a_small_size_is_looked_for_at_the_own_sizes(tmp_path: Path, rows: int, known: bool) -> None:
    """12 and 4 are tried as 10 and 6: `(f0 6)` says nothing of 48 rows. What is too large to try is repeated."""
    graph = capture_model(Pairs(), (torch.randn(rows), torch.randn(4)), training=False)
    for _ in range(2):  # found, and remembered
        ruled, warnings = with_discovered(graph, tmp_path)
        check_rules(graph_json.loads(graph_json.dumps(ruled)))
        assert instance(ruled, ruled.ops[0]).known is known and len(warnings) == (not known)
        assert [text.partition(" |")[0] for _, text in ruled.discovered] == ["f0, x1_0 -> (f0 4) y0_1"][:known]


@pytest.mark.parametrize("text", ["a b -> b a", "a -> a"])
def test_an_overload_without_any_rule_is_repeated_and_read_back(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table's rule contradicts the shapes, and no experiment finds another: the saved graph is not damaged."""
    graph = register("mixed", lambda x: x * x.norm())
    monkeypatch.setitem(OPERATORS, graph.ops[0].target, Operator(rule=text))
    ruled, warnings = with_discovered(graph, tmp_path)
    assert ruled.discovered == ((graph.ops[0].name, ""),) and len(warnings) == 1
    reread = graph_json.loads(graph_json.dumps(ruled))
    check_rules(reread)
    assert not instance(reread, reread.ops[0]).known
    with pytest.raises(GraphFault, match="contradict"):
        check_rules(graph)


class Biased(torch.nn.Module):
    """`addmm` spreads a bias of one number over the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.weight = torch.nn.Parameter(torch.randn(1)), torch.nn.Parameter(torch.randn(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


def test_a_bias_of_one_number_is_no_linear_layer() -> None:
    graph = capture_model(Biased(), (torch.randn(4, 6),), training=False)
    assert [op.target for op in graph.ops] == ["aten.addmm"]
    assert instance(graph, graph.ops[0]).known
    check_rules(graph_json.loads(graph_json.dumps(graph)))


def test_graphs_without_discovered_rules_are_written_as_before() -> None:
    graph = register("doubled", lambda x: x * 2)
    assert "discovered" not in json.loads(graph_json.dumps(graph))
    ruled = replace(graph, discovered=((graph.ops[0].name, "a b -> a b"),))
    assert graph_json.loads(graph_json.dumps(ruled)) == ruled
    assert graph_json.graph_hash(ruled) != graph_json.graph_hash(graph)


def test_a_custom_operator_plans_and_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a plan that cuts the new operator, at the planned size and reduced."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    out = str(tmp_path / "out")
    words = ["plan", f"{tmp_path}/model.py:build", "--mesh", "dp=2,tp=2", "--hardware", "a100-80g-sxm", "--out", out]
    assert commands.main([*words, "--strategy", "random:1"]) == 0
    printed = capsys.readouterr().out
    assert "split over" in next(line for line in printed.splitlines() if "(discovered)" in line)
    assert commands.main(["verify", out, "--backend", "lockstep"]) == 0
    assert commands.main(["verify", out, "--backend", "lockstep", "--verify-with", "n=16"]) == 0
    assert list((tmp_path / "cache" / "autoshard" / "rules").glob("*.json"))
