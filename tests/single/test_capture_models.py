"""Shapes and counts of captured graphs, and models that nobody here wrote."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from autoshard.graph_capture.capture import capture, capture_model
from autoshard.graph_capture.load_model import load_model
from autoshard.ir import graph_json
from autoshard.ir.graph import Graph
from autoshard.ir.graph_check import check
from tests.single.test_capture_values import compare
from tests.slow import quick_at

GOLDEN = Path(__file__).parent / "golden"
GPT2 = "examples/gpt2.py:build"
LAYER = Counter({
    "autoshard.linear_in_out": 4, "aten.layer_norm": 2, "aten.scaled_dot_product_attention": 1, "aten.split": 1,
    "aten.reshape": 4, "aten.transpose": 4, "aten.dropout": 2, "aten.add": 2, "aten.gelu": 1,
})  # fmt: skip


def as_text(graph: Graph) -> str:
    """A graph as a user would write it down: one op a line."""
    lines = [f"input {show(graph, name)}" for name in graph.inputs]
    lines += [f"parameter {show(graph, p.tensor)} = {p.path} starts as {p.init}" for p in graph.parameters]
    for op in graph.ops:
        inputs = [*(name or "None" for name in op.operands), *(f"{name}={value}" for name, value in op.attributes)]
        results = ", ".join(show(graph, name) for name in op.results)
        lines.append(
            f"{results} = {op.target}({', '.join(inputs)})"
            f"  # {op.module or 'the model'}, {op.source}, keeps {keeps(op.saved)}"
        )
    return "\n".join([*lines, f"loss {graph.loss}", ""])


def show(graph: Graph, name: str) -> str:
    tensor = graph.tensor(name)
    return f"{name}: {tensor.dtype}{list(tensor.shape)}{' grad' if tensor.requires_grad else ''}"


def keeps(saved: object) -> str:
    operands, results, extra = (getattr(saved, name) for name in ("operands", "results", "extra_bytes"))
    parts = (
        [f"operands {operands}"] * bool(operands)
        + [f"results {results}"] * bool(results)
        + [f"{extra} bytes"] * bool(extra)
    )
    return " and ".join(parts) or "nothing"


@pytest.mark.parametrize("name, precision", quick_at([("mlp", "fp32"), ("lenet", "fp32"), ("mlp", "bf16-mixed")], 0))
def test_golden_graph(name: str, precision: str) -> None:
    text = as_text(capture(f"examples/{name}.py:build", {}, precision))
    assert text == (GOLDEN / f"{name}-{precision}.txt").read_text()


@pytest.mark.parametrize("layers", quick_at([1, 3], 0))
def test_gpt2_is_a_few_ops_a_layer(layers: int) -> None:
    graph = capture(GPT2, {"n_layer": layers, "n_embd": 96, "vocabulary": 97})
    counts = Counter(op.target for op in graph.ops if op.module.startswith("transformer.h."))
    assert counts == Counter({target: count * layers for target, count in LAYER.items()})
    assert len(graph.ops) == 21 * layers + 13, [op.name for op in graph.ops if "h." not in op.module]


def test_gpt2_attention_is_causal_and_four_dimensional() -> None:
    graph = capture(GPT2, {"n_layer": 1})
    (attention,) = [op for op in graph.ops if op.target == "aten.scaled_dot_product_attention"]
    assert attention.attribute("is_causal") is True and attention.operands[3] is None
    assert graph.tensor(attention.results[0]).shape == (4, 12, 256, 64)
    linears = {op.module: graph.tensor(op.results[0]).shape for op in graph.ops if "linear" in op.target}
    assert linears == {
        "transformer.h.0.attn.c_attn": (4, 256, 2304), "transformer.h.0.attn.c_proj": (4, 256, 768),
        "transformer.h.0.mlp.c_fc": (4, 256, 3072), "transformer.h.0.mlp.c_proj": (4, 256, 768),
        "lm_head": (4, 256, 50257),
    }  # fmt: skip


def test_gpt2_parameters_start_as_the_library_starts_them() -> None:
    graph = capture(GPT2, {"n_layer": 1})
    starts = {p.path: p.init for p in graph.parameters}
    assert starts["transformer.wte.weight"] == ("normal", 0.0, 0.02)
    assert starts["transformer.h.0.ln_1.weight"] == ("constant", 1.0)
    assert starts["transformer.h.0.attn.c_attn.bias"] == ("constant", 0.0)
    real, _ = load_model(GPT2, {"n_layer": 1, "vocabulary": 997}, device="cpu")
    for path, value in real.named_parameters():
        kind, first, *others = starts[path]
        assert value.mean().item() == pytest.approx(first, abs=3e-3), path
        assert value.std().item() == pytest.approx(others[0] if kind == "normal" else 0.0, rel=0.05), path


class Half(nn.Module):
    """A mask that is causal only in its lower half."""

    def __init__(self, diagonal: int, additive: bool) -> None:
        super().__init__()
        self.diagonal, self.additive = diagonal, additive
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[2])
        mask = (places[:, None] + self.diagonal >= places)[None, None].expand(x.shape[0], -1, -1, -1)
        if self.additive:
            mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        return nn.functional.scaled_dot_product_attention(x * self.weight, x, x, mask).sum()


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(
    "diagonal, causal, masked", [(0, True, False), (1, False, True), (-1, False, True), (9, False, False)]
)
def test_only_an_exactly_causal_mask_is_called_causal(
    diagonal: int, causal: bool, masked: bool, additive: bool
) -> None:
    x = torch.randn(3, 2, 6, 8)
    model = Half(diagonal, additive)
    graph = capture_model(model, (x,))
    (attention,) = [op for op in graph.ops if op.target == "aten.scaled_dot_product_attention"]
    assert (attention.attribute("is_causal"), attention.operands[3] is not None) == (causal, masked)
    if diagonal >= 0 and not additive:
        compare(graph, model, (x,))


def test_a_mask_too_large_to_write_out_is_still_recognised() -> None:
    sizes = {"n_layer": 1, "n_embd": 24, "vocabulary": 97, "batch": 4096, "sequence": 1024}  # 4 GiB of booleans
    graph = capture(GPT2, sizes)
    (attention,) = [op for op in graph.ops if op.target == "aten.scaled_dot_product_attention"]
    assert attention.attribute("is_causal") is True and attention.operands[3] is None


class Wrapped(nn.Module):
    """A library model with its loss."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> object:
        return self.model(input_ids=input_ids, labels=labels)


def llama() -> PreTrainedModel:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "hidden_size": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, intermediate_size=48, use_cache=False, **sizes))
    model.loss_type = "ForCausalLM"
    return model


def bert() -> PreTrainedModel:
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32}
    return BertForMaskedLM(
        BertConfig(
            vocab_size=61, intermediate_size=48, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes
        )
    )  # fmt: skip


@pytest.mark.parametrize("make", quick_at([llama, bert], 1))
def test_library_models(make: object) -> None:
    assert callable(make)
    torch.manual_seed(0)
    inputs = (torch.randint(0, 61, (2, 9)), torch.randint(0, 61, (2, 9)))
    graph = capture_model(Wrapped(make()), inputs)
    check(graph)
    assert graph.loss == graph.outputs[0] and len(graph.outputs) == 2
    attention = [op for op in graph.ops if op.target == "aten.scaled_dot_product_attention"]
    assert len(attention) == 2 and all(op.operands[3] is None for op in attention)
    assert all(op.attribute("is_causal") is (make is llama) for op in attention)
    compare(graph, Wrapped(make()), inputs)
    assert graph_json.loads(graph_json.dumps(graph)) == graph


def test_a_real_model_and_a_meta_model_give_one_graph() -> None:
    with torch.device("meta"):
        meta = Wrapped(bert())
        inputs = (torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long))
    real_inputs = tuple(torch.zeros(2, 9, dtype=torch.long) for _ in inputs)
    real = capture_model(Wrapped(bert()), real_inputs)
    assert real.recipes  # its buffers have values
    assert capture_model(meta, inputs) == replace(real, recipes=())


def test_same_model_same_graph() -> None:
    first, second = (graph_json.dumps(capture(GPT2, {"n_layer": 1, "n_embd": 48})) for _ in range(2))
    assert first == second


def test_without_a_loss_it_is_inference() -> None:
    graph = capture_model(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), (torch.randn(4, 3),), training=False)
    assert graph.loss is None and graph.outputs == ("relu",) and not graph.training
    assert all(op.saved.operands == () for op in graph.ops)
