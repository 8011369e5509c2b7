"""Models of transformers, small and from configuration, each with its dynamic sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]
VOCABULARY = 48
TOKENS = "batch=4..44/4,sequence=4..44/4"
SIZES = {
    "gpt2": TOKENS,
    "llama": TOKENS,
    "bert": TOKENS,
    "t5": "batch=4..44/4,source=4..44/4@ids.1,target=4..44/4@labels.1",
    "vit": "batch=4..44/4,height=16..96/8@ids.2,width=16..96/8@ids.3",
}


def spec(name: str) -> str:
    return f"{Path(__file__)}:{name}"


class Loss(nn.Module):
    """`model(ids, labels)` as its loss."""

    def __init__(self, model: Any, key: str = "input_ids", **options: Any) -> None:
        super().__init__()
        self.model, self.key, self.options = model, key, options

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(**{self.key: ids}, labels=labels, **self.options).loss
        return loss


def _tokens(length: int = 8) -> Tensor:
    return torch.randint(1, VOCABULARY, (4, length))


def gpt2() -> Built:
    config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=64, use_cache=False)
    return Loss(hf.GPT2LMHeadModel(config)), (_tokens(), _tokens())


def llama() -> Built:
    config = hf.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return Loss(hf.LlamaForCausalLM(config)), (_tokens(), _tokens())


def bert() -> Built:
    config = hf.BertConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=VOCABULARY
    )
    return Loss(hf.BertForMaskedLM(config)), (_tokens(), _tokens())


def t5() -> Built:
    config = hf.T5Config(
        num_layers=2, d_model=32, d_ff=64, num_heads=4, d_kv=8, vocab_size=VOCABULARY, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return Loss(hf.T5ForConditionalGeneration(config)), (_tokens(), _tokens(12))


def vit() -> Built:
    config = hf.ViTConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, image_size=32, patch_size=8,
        num_labels=5,
    )  # fmt: skip
    model = hf.ViTForImageClassification(config)
    inputs = torch.randn(4, 3, 32, 32), torch.randint(0, 5, (4,))
    return Loss(model, "pixel_values", interpolate_pos_encoding=True), inputs
