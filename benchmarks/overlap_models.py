"""GPT-2 and Llama of Hugging Face transformers from configuration, with their loss, in two sizes: for `overlap.py`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

Built = tuple[nn.Module, tuple[Tensor, Tensor]]
VOCABULARY = 2048
SIZES = {"small": (64, 32, 4), "large": (512, 128, 4)}  # width, tokens of a sequence, layers: one bound by the host


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, labels=labels, use_cache=False).loss
        return loss


def gpt2(size: str = "small", batch: int = 8) -> Built:
    width, length, layers = SIZES[size]
    sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": length, "vocab_size": VOCABULARY}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _with_words(GPT2LMHeadModel(GPT2Config(**sizes, **dropout)), batch, length)


def llama(size: str = "small", batch: int = 8) -> Built:
    width, length, layers = SIZES[size]
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": length}
    return _with_words(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)), batch, length)


def _with_words(model: nn.Module, batch: int, length: int) -> Built:
    words = torch.randint(1, VOCABULARY, (batch, length))
    return WithLoss(model), (words, words.clone())


FILE = str(Path(__file__).resolve())
MODELS = {"gpt2": gpt2, "llama": llama}
