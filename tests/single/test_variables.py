"""Values are called as in the model's own code, in the graph and in what is written of it."""

from __future__ import annotations

import ast
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture_model
from autoshard.graph_capture.tracing import source_lines
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests.slow import quick_at


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, states: Tensor) -> Tensor:
        gate, value = self.up(states).chunk(2, -1)
        gate = gate.sigmoid()
        return self.down(gate * value) + states.mean(-1, keepdim=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gate(), Gate()])

    def forward(self, samples: Tensor, wanted: Tensor) -> Tensor:
        hidden = samples + 1
        for layer in self.layers:
            hidden = layer(hidden)
        first, second = twice(hidden)
        return F.mse_loss(first * second, wanted)


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    one = x.tanh()
    return one, one.cos()


class Calls(nn.Module):
    """Functions that a forward calls: what they make on the way, and what they return, in other orders than made."""

    def forward(self, samples: Tensor) -> Tensor:
        lower, upper = bounds(samples)
        pair = bounds(upper * lower)
        centre = middle(pair)
        turned = centre * upper + middle(pair) * lower
        return (turned - lower).mean()


def bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    high = x.exp()
    widened = high.sin()
    low = widened * x
    return low, high


def middle(pair: tuple[Tensor, Tensor]) -> Tensor:
    total = pair[0] + pair[1]
    half = total.tanh()
    half = half.cos()
    return half


def test_what_functions_make_is_called_as_there_and_what_they_return_as_the_caller_has_it() -> None:
    graph = capture_model(Calls(), (torch.randn(4, 8),))
    names = dict(graph.variables)
    called = [(op.target.partition(".")[2], names.get(op.results[0], "")) for op in graph.ops]
    assert called == [
        ("exp", "upper"), ("sin", "widened"), ("mul", "lower"),
        ("mul", ""), ("exp", "high"), ("sin", "widened"), ("mul", "low"),
        ("add", "total"), ("tanh", "half"), ("cos", "centre"),
        ("mul", ""), ("add", "total"), ("tanh", "half"), ("cos", ""), ("mul", ""), ("add", "turned"),
        ("sub", ""), ("mean", ""),
    ]  # fmt: skip
    assert {op.source.partition(":")[0] for op in graph.ops} == {"single/test_variables.py"}
    assert len({op.source for op in graph.ops}) == 9, "each has its own line, also within a function"


def captured() -> Graph:
    return capture_model(Net(), (torch.randn(4, 8), torch.randn(4, 8)))


def test_a_value_has_the_name_that_the_statement_assigns() -> None:
    graph = captured()
    names = dict(graph.variables)
    called = [(op.target.partition(".")[2], [names.get(result, "") for result in op.results]) for op in graph.ops]
    assert called[:7] == [
        ("add", ["hidden"]), ("linear", ["up"]), ("split", ["gate", "value"]), ("sigmoid", ["gate"]), ("mul", [""]),
        ("linear", ["down"]), ("mean", [""]),
    ]  # fmt: skip
    assert called[7] == ("add", ["hidden"])  # what the layer returns is what the loop assigns
    assert called[-4:] == [("tanh", ["first"]), ("cos", ["second"]), ("mul", [""]), ("mse_loss", [""])]


def test_the_package_says_these_names() -> None:
    graph = captured()
    plan = search(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse("dp=2"), strategy="dp"))
    text = emit(lower(plan, graph), plan, graph)["model_parallel.py"]
    forward = re.findall(r"def forward\(.*?(?=\n\n|\Z)", text, re.DOTALL)
    up = "F.linear(hidden, local(self.up.weight), local(self.up.bias))"
    assert f"gate, value = {up}.split((8, 8), dim=1)" in forward[0]
    assert "gate = gate.sigmoid()" in forward[0]
    assert "F.linear(gate * value, local(self.down.weight), local(self.down.bias))" in forward[0]
    assert "for block in self.layers:\n            hidden = block(hidden)" in forward[1]
    assert re.search(r"first = hidden\.tanh\(\)\n\s+del hidden\n\s+second = first\.cos\(\)", forward[1])


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        states = x @ self.weight
        shifted = states + x
        centred = shifted - shifted.mean()
        kept = centred.tanh()
        product = kept.abs() * kept
        return product.square().mean()


def test_a_variable_lets_go_of_what_nothing_keeps() -> None:
    """`states` and `shifted` are kept by no backward and read no more, while tensors of their size are made. What
    backward keeps and what the next statement makes anew stay."""
    graph = capture_model(Held(), (torch.randn(256, 64),))
    plan = search(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse("dp=1"), strategy="dp"))
    program = lower(plan, graph)
    text = emit(program, plan, graph)["model_parallel.py"]
    lines = [line.strip() for line in text.split("def forward")[1].split("return loss")[0].splitlines()[1:]]
    gone = {line.removeprefix("del "): i for i, line in enumerate(lines) if line.startswith("del ")}
    assigned = [line.partition(" = ")[0] for line in lines]
    assert [*gone] == ["states", "shifted", "centred"], text
    assert gone["states"] == assigned.index("shifted") + 1 and gone["shifted"] == assigned.index("centred") + 1
    short = {program.value(value).variable for storage in program.short_lived for value in storage}
    assert {"states", "shifted", "centred"} <= short and "kept" not in short


class Viewed(nn.Module):
    """A part of a weight outlives the variable of the weight, whose storage it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        part = self.weight[:, 1:33:2]
        states = (x.tanh() * 2).sum(1)
        return (part * states[:64, None]).square().mean()


@pytest.mark.parametrize("seed", quick_at(range(4, 11), 1))
def test_a_variable_is_let_go_of_once(seed: int) -> None:
    graph = capture_model(Viewed(), (torch.randn(256, 64),))
    plan = random_plan(PlanningContext(graph, Mesh.parse("dp=2,tp=2"), load_hardware("cpu-local")), seed)
    text = emit(lower(plan, graph), plan, graph)["model_parallel.py"]
    bound: set[str] = set()
    forward = next(node for node in ast.walk(ast.parse(text)) if getattr(node, "name", "") == "forward")
    assert isinstance(forward, ast.FunctionDef)
    for statement in forward.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
                assert node.id in bound, text
                bound.remove(node.id)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)


class Head(nn.Module):
    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.decoder = nn.LayerNorm(8), nn.Linear(8, 6)
        self.decoder.weight = table

    def forward(self, states: Tensor) -> Tensor:
        return self.decoder(self.norm(states)).relu()


class Tied(nn.Module):
    """A class reads a weight that another holds, as BERT's head does."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 8)
        self.head = Head(self.words.weight)

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.words(ids)), wanted)


def test_a_class_may_read_a_weight_of_another() -> None:
    graph = capture_model(Tied(), (torch.randint(0, 6, (4,)), torch.randn(4, 6)))
    plan = search(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse("dp=2"), strategy="dp"))
    text = emit(lower(plan, graph), plan, graph)["model_parallel.py"]
    assert re.search(r"F\.relu\(F\.linear\(|\.relu\(", text)


def test_a_torch_without_the_hook_for_names_captures_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is private there: names of what called functions make are then their callers'."""
    monkeypatch.setattr(source_lines, "PythonKeyTracer", type("Other", (), {}))
    graph = capture_model(Net(), (torch.randn(4, 8), torch.randn(4, 8)))
    assert len(graph.ops) > 5 and graph.variables
