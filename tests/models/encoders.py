"""Encoders of the library at small sizes, trained to fill in masked words: `NAME(batch, sequence, layers, loss)`."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.models.common import VOCABULARY, Built, language

WIDTH, HEADS, INNER = 32, 4, 48


def _sizes(layers: int, **more: Any) -> dict[str, Any]:
    """The names that most configurations share."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "intermediate_size": INNER, "max_position_embeddings": 64, "embedding_size": 16, "pad_token_id": 0, **more,
    }  # fmt: skip


def bert(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    return language(hf.BertForMaskedLM(hf.BertConfig(**_sizes(layers))), batch, sequence, loss)


def roberta(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Positions count the tokens that are no padding."""
    sizes = _sizes(layers, pad_token_id=1)
    return language(hf.RobertaForMaskedLM(hf.RobertaConfig(**sizes)), batch, sequence, loss)


def distilbert(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    sizes = {"dim": WIDTH, "n_layers": layers, "n_heads": HEADS, "hidden_dim": INNER, "vocab_size": VOCABULARY}
    return language(hf.DistilBertForMaskedLM(hf.DistilBertConfig(**sizes)), batch, sequence, loss)


def electra(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    return language(hf.ElectraForMaskedLM(hf.ElectraConfig(**_sizes(layers))), batch, sequence, loss)


def deberta(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Attention to content and to relative positions apart."""
    sizes = _sizes(layers, relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=8)
    return language(hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**sizes)), batch, sequence, loss)


def albert(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """All layers share one set of parameters."""
    return language(hf.AlbertForMaskedLM(hf.AlbertConfig(**_sizes(layers))), batch, sequence, loss)


def mpnet(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Relative position buckets that all layers share."""
    sizes = _sizes(layers, pad_token_id=1)
    return language(hf.MPNetForMaskedLM(hf.MPNetConfig(**sizes)), batch, sequence, loss)


def modernbert(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Rotary positions, gated MLPs, a local window in most layers."""
    sizes = _sizes(layers, local_attention=4, reference_compile=False, attn_implementation="sdpa")
    special = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    return language(hf.ModernBertForMaskedLM(hf.ModernBertConfig(**sizes, **special)), batch, sequence, loss)


def roformer(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """A sinusoidal table that the constructor computes."""
    return language(hf.RoFormerForMaskedLM(hf.RoFormerConfig(**_sizes(layers))), batch, sequence, loss)


def squeezebert(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Grouped convolutions in place of linears."""
    sizes = _sizes(layers, embedding_size=WIDTH)
    return language(hf.SqueezeBertForMaskedLM(hf.SqueezeBertConfig(**sizes)), batch, sequence, loss)


def xlnet(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Attention to relative positions by shifting."""
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layer": layers, "n_head": HEADS, "d_inner": INNER}
    return language(hf.XLNetLMHeadModel(hf.XLNetConfig(**sizes)), batch, sequence, loss)


def longformer(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Attention within a window, by overlapping chunks."""
    sizes = _sizes(layers, pad_token_id=1, attention_window=4)
    return language(hf.LongformerForMaskedLM(hf.LongformerConfig(**sizes)), batch, sequence, loss)


def convbert(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Convolutions whose kernels depend on the input, beside attention."""
    sizes = _sizes(layers, head_ratio=2, conv_kernel_size=3)
    return language(hf.ConvBertForMaskedLM(hf.ConvBertConfig(**sizes)), batch, sequence, loss)


def nystromformer(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Attention through landmarks, with an iterated pseudo-inverse."""
    sizes = _sizes(layers, num_landmarks=4, segment_means_seq_len=sequence, conv_kernel_size=3)
    return language(hf.NystromformerForMaskedLM(hf.NystromformerConfig(**sizes)), batch, sequence, loss)
