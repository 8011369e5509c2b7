"""The rules on captured models: every operator is known, and every strategy that the models offer is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.rules import granularities, has_rule, instance, offered
from autoshard.rules.proof.rule_proof import OpCase, Operand, failures, prove
from tests.slow import quick_at

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 1, "sequence": 6, "n_embd": 48, "vocabulary": 13},
    "lenet": {"batch": 4},
    "mlp": {"batch": 4, "features": 6, "hidden": 10, "outputs": 5},
}


def graph_of(name: str, precision: str = "fp32") -> Graph:
    return capture(f"{EXAMPLES / name}.py:build", SMALL[name], precision)


def case_of(graph: Graph, op: Op) -> OpCase:
    """The op on float64 tensors; integers are 0 or 1, which are good indices of anything."""
    operands = []
    for name in op.operands:
        tensor = None if name is None else graph.tensor(name)
        dtype = None if tensor is None else "float64" if tensor.dtype.startswith(("float", "bfloat")) else tensor.dtype
        operands.append(
            None if tensor is None or dtype is None else Operand(tensor.shape, dtype, 0, 2, tensor.requires_grad)
        )
    return OpCase(op.target, tuple(operands), op.attributes)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("name", SMALL)
def test_every_operator_has_a_rule_and_strategies(name: str, precision: str) -> None:
    graph = graph_of(name, precision)
    mesh = Mesh.parse("dp=2,tp=2")
    assert [op.target for op in graph.ops if not has_rule(graph, op)] == []
    for op, strategies in offered(graph, mesh, granularities(graph, mesh)):
        texts = [str(strategy) for strategy in strategies]
        assert "= =" in texts
        assert len(texts) == len(set(texts)), op.name


@pytest.mark.parametrize("name", quick_at(SMALL, 2))
def test_every_strategy_of_the_models_is_right(name: str) -> None:
    graph = graph_of(name)
    mesh = Mesh.parse("dp=2,tp=2")
    granular = granularities(graph, mesh)
    seen = set()
    for op in graph.ops:
        key = (str(instance(graph, op)), granular.refinements(op))
        if key in seen or not any(op.operands):
            continue
        seen.add(key)
        one = case_of(graph, op)
        if "random_" not in str(instance(graph, op)):
            assert not list(failures(prove(one, mesh, refined=granular.refinements(op)))), op.name
    assert len(seen) >= 3
