"""Refusals that say what to write in the place of what can't be captured: it is written, and verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.cli import commands
from tests.slow import quick_at, slow

pytest.importorskip("transformers")

MODELS = """
import math

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import FNetConfig, FNetForMaskedLM, MixtralConfig, MixtralForCausalLM
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration
from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration
from transformers.models.fnet import modeling_fnet
from transformers.models.nllb_moe import modeling_nllb_moe as modeling_nllb
from transformers.models.switch_transformers import modeling_switch_transformers as modeling_switch


class Trained(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids).loss


class Mixtral(MixtralForCausalLM):
    def forward(self, ids):
        return super().forward(input_ids=ids, labels=ids, use_cache=False).loss


def mixtral(experts_implementation="eager"):  # what is the default depends on what was asked before
    config = MixtralConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                           num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
                           experts_implementation=experts_implementation)
    return Mixtral(config), (torch.randint(0, 90, (4, 8)),)


def mixtral_set():
    return mixtral(experts_implementation="batched_mm")


def switch():
    config = SwitchTransformersConfig(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2,
        num_heads=4, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, dropout_rate=0.0,
        decoder_start_token_id=0)
    return Trained(SwitchTransformersForConditionalGeneration(config)), (torch.randint(1, 90, (4, 8)),)


def all_experts(self, x, selected_experts, routing_weights):
    out = torch.zeros_like(x)
    weight = (selected_experts * routing_weights[..., None]).sum(1)  # of each token, by expert
    for e in range(self.num_experts):
        out = out + self[f"expert_{e}"](x) * weight[:, e, None]
    return out


def switch_masked():
    modeling_switch.SwitchTransformersExperts.forward = all_experts
    return switch()


class Translated(Trained):
    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


def nllb(layerdrop=0.0):
    rates = {"encoder_layerdrop": layerdrop, "decoder_layerdrop": layerdrop, "dropout": 0.0, "moe_token_dropout": 0.0}
    config = NllbMoeConfig(vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_experts=4, encoder_sparse_step=2,
        decoder_sparse_step=2, attention_dropout=0.0, activation_dropout=0.0, **rates)
    return Translated(NllbMoeForConditionalGeneration(config)), (torch.randint(3, 90, (4, 8)),)


def nllb_as_it_is():
    return nllb(0.05)


def every_expert(self, x, router_mask, router_probs):
    out = torch.zeros_like(x)
    chosen = nn.functional.one_hot(router_mask, self.num_experts)
    weight = (chosen * router_probs[..., None]).sum(1)  # of each token, by expert
    for e in range(self.num_experts):
        out = out + self[f"expert_{e}"](x) * weight[:, e, None]
    return out


def nllb_masked():
    torch.manual_seed(0)
    model, inputs = nllb()
    loss = model(*inputs).item()  # of the loop, where this is the first call
    modeling_nllb.NllbMoeExperts.forward = every_expert
    assert abs(loss - model(*inputs).item()) < 1e-5
    return model, inputs


def fnet():
    config = FNetConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, intermediate_size=64,
                        max_position_embeddings=64, hidden_dropout_prob=0.0)
    return Trained(FNetForMaskedLM(config)), (torch.randint(4, 90, (4, 8)),)


class Products(nn.Module):
    def __init__(self, config):
        super().__init__()
        for name, n in (("s", 8), ("h", config.hidden_size)):
            angle = 2 * math.pi * torch.arange(n)[:, None] * torch.arange(n) / n
            self.register_buffer(f"c{name}", angle.cos(), persistent=False)
            self.register_buffer(f"s{name}", -angle.sin(), persistent=False)

    def forward(self, x):
        return (self.cs @ x @ self.ch - self.ss @ x @ self.sh,)


def fnet_products():
    modeling_fnet.FNetBasicFourierTransform = Products
    return fnet()


class Packed(nn.Module):
    def __init__(self, varlen):
        super().__init__()
        self.varlen, self.table = varlen, nn.Embedding(32, 64)
        self.qkv, self.head = nn.Linear(64, 192), nn.Linear(64, 32)

    def forward(self, ids, documents, labels):
        x = self.qkv(self.table(ids))
        if self.varlen:
            q, k, v = (y.reshape(-1, 4, 16) for y in x.chunk(3, -1))
            y = varlen_attn(q, k, v, documents, documents, 8, 8, window_size=(-1, 0))
        else:
            q, k, v = (y.unflatten(-1, (4, 16)).transpose(1, 2) for y in x.chunk(3, -1))
            causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
            mask = (documents[:, None, :, None] == documents[:, None, None, :]) & causal
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(y.flatten(-2)).flatten(0, -2), labels.flatten())


def varlen():
    return Packed(True), (torch.randint(0, 32, (32,)), torch.arange(0, 40, 8, dtype=torch.int32),
                          torch.randint(0, 32, (32,)))


def documents():
    ids = torch.randint(0, 32, (4, 8))
    return Packed(False), (ids, torch.arange(8).expand(4, 8) // 3, ids.clone())


def one():
    return nn.Linear(16, 16), (torch.randn(1, 16),)
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("refused_models.py").write_text(MODELS, encoding="utf-8")
    return ["--hardware", "cpu-local", "--out", "o"]


REFUSED = {
    "mixtral": 'experts_implementation="batched_mm" in the configuration',
    "switch": "in place of transformers.models.switch_transformers.modeling_switch_transformers."
    "SwitchTransformersExperts.forward",
    "nllb_as_it_is": "or a rate of 0",
    "nllb": "in place of transformers.models.nllb_moe.modeling_nllb_moe.NllbMoeExperts.forward",
    "fnet": "Cs @ x @ Ch - Ss @ x @ Sh",
    "varlen": "attn_mask=(documents[:, None, :, None] == documents[:, None, None, :]) & causal",
}


@pytest.mark.parametrize("name", quick_at(REFUSED, 2, 3, 4, 5))
def test_the_hint_names_what_works(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["plan", f"refused_models.py:{name}", "--mesh", "dp=2", *words]) == 4
    assert REFUSED[name] in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [slow("mixtral_set"), slow("switch_masked"), slow("nllb_masked"), slow("fnet_products"), "documents"]
)
def test_what_it_names_is_verified(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    how = ["--mesh", "dp=2", "--verify", "--backend", "lockstep", *words]
    assert commands.main(["plan", f"refused_models.py:{name}", *how]) == 0
    assert "verified on dp=2" in capsys.readouterr().out


def test_one_sample_is_refused_before_the_capture(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from autoshard.graph_capture import capture

    monkeypatch.setattr(capture, "export", lambda *_: pytest.fail("captured"))
    assert commands.main(["plan", "refused_models.py:one", "--devices", "4", "--global-batch", "64", *words]) == 2
    assert "captured with one sample" in capsys.readouterr().err
