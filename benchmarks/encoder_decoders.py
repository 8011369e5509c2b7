"""Encoder-decoder models of Hugging Face transformers from configuration, with their losses, for `search_scale.py`."""

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration, WhisperConfig, WhisperForConditionalGeneration


class T5(T5ForConditionalGeneration):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(input_ids=input_ids, labels=labels, use_cache=False).loss


class Whisper(WhisperForConditionalGeneration):
    def forward(self, input_features: Tensor, labels: Tensor) -> Tensor:
        return super().forward(input_features=input_features, labels=labels, use_cache=False).loss


def t5(batch: int = 64, sequence: int = 512, layers: int = 12) -> tuple[T5, tuple[Tensor, Tensor]]:
    """The sizes of T5-base."""
    sizes = {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12}
    special = {"decoder_start_token_id": 0, "pad_token_id": 0}
    model = T5(T5Config(**sizes, **special, num_layers=layers, num_decoder_layers=layers, use_cache=False))
    return model, (torch.randint(1, 1000, (batch, sequence)), torch.randint(1, 1000, (batch, sequence // 4)))


def whisper(batch: int = 64, sequence: int = 128, layers: int = 12) -> tuple[Whisper, tuple[Tensor, Tensor]]:
    """The sizes of Whisper small, 30 seconds of sound each."""
    sides = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", layers), ("attention_heads", 12), ("ffn_dim", 3072))
    }
    model = Whisper(WhisperConfig(d_model=768, **sides, use_cache=False))
    return model, (torch.randn(batch, 80, 3000), torch.randint(1, 1000, (batch, sequence)))
