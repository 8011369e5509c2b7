"""Variables of packages: what the model's code calls a value, where that says what it is."""

from __future__ import annotations

from functools import cache

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests.models import NAMES
from tests.slow import quick_at


@cache
def captured(name: str) -> Graph:
    return capture(NAMES[name], {})


@cache
def code(name: str) -> str:
    graph = captured(name)
    request = SearchRequest(Mesh.parse("dp=2"), strategy="dp")
    plan = search(graph, load_hardware("h100-80g-sxm"), request)
    return emit(lower(plan, graph), plan, graph)["model_parallel.py"]


@pytest.mark.parametrize("name", quick_at(["llama", "mixtral", "gpt2"], 0))
def test_labels_are_not_called_a_loss(name: str) -> None:
    """`loss = self.loss_function(logits, labels)` shifts and flattens both on its way."""
    lines = code(name).splitlines()
    assert any(line.strip().startswith("labels = F.pad(") for line in lines)
    loss_lines = [line.strip() for line in lines if line.strip().startswith("loss = ")]
    assert all("cross_entropy(" in line or "self.model(" in line for line in loss_lines), loss_lines


@pytest.mark.slow
def test_what_a_child_makes_is_not_called_by_its_argument() -> None:
    """`hidden_states`, as the model calls it, holds the residual."""
    assert "mlp = self.mlp(post_attention_layernorm)" in code("mixtral")
    assert "hidden_states = hidden_states + mlp" in code("mixtral")
    assert "down_proj = self.mlp(post_attention_layernorm)" in code("llama")  # which says what it is already
    assert "mlp_output = self.mlp(mlp_output)" in code("gpt_neox")  # the statement's name for all that it makes


@pytest.mark.slow
def test_an_argument_that_is_moved_keeps_its_name() -> None:
    """The first layer's is `inputs_embeds` in the model's code; the class is that of all layers."""
    graph = captured("llama")
    plan = search(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse("dp=2,tp=2"), strategy="fsdp-tp"))
    text = emit(lower(plan, graph), plan, graph)["model_parallel.py"]
    layer = text.partition("class LlamaDecoderLayer")[2].partition("\nclass ")[0]
    assert "all_reduce(hidden_states, self.tp)" in layer  # the layers hand on partial sums
    assert "inputs_embeds" not in layer
