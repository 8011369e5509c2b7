"""Models of Hugging Face transformers, and the UNet of diffusers, each with its loss, at sizes that they are used at,
without values: for plans alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]


class WithLoss(nn.Module):
    """`call(model, *inputs)` is the loss."""

    def __init__(self, make: Callable[[], nn.Module], call: Callable[..., Tensor]) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = make()
        self.call = call

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(self.model, *inputs)


def _images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))


def _words(batch: int, *lengths: int, most: int = 32000) -> tuple[Tensor, ...]:
    return tuple(torch.randint(1, most, (batch, length)) for length in lengths)


def _of_images(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    return model(pixel_values=images, labels=labels).loss


def _of_words(model: Any, words: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=words, labels=labels, use_cache=False).loss


def llama(
    batch: int = 4, sequence: int = 2048, layers: int = 12, hidden: int = 1024, inner: int = 2816, heads: int = 16,
    heads_of_keys: int = 16, words: int = 32000,
) -> Built:  # fmt: skip
    """Of any size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads_of_keys, max_position_embeddings=8192,
    )  # fmt: skip
    return WithLoss(lambda: LlamaForCausalLM(config), _of_words), _words(batch, sequence, sequence, most=words)


def vit(batch: int = 32) -> Built:
    """Base, patches of 16."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_labels=1000, attn_implementation="sdpa")
    return WithLoss(lambda: ViTForImageClassification(config), _of_images), _images(batch)


def resnet(batch: int = 64) -> Built:
    """50 layers."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(num_labels=1000)
    return WithLoss(lambda: ResNetForImageClassification(config), _of_images), _images(batch)


def t5(batch: int = 16, sequence: int = 512, labels: int = 512) -> Built:
    """Base."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    config = T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, use_cache=False)
    return WithLoss(lambda: T5ForConditionalGeneration(config), _of_words), _words(batch, sequence, labels)


def mixtral(batch: int = 8, sequence: int = 512) -> Built:
    """Eight layers of 1024 with eight experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_local_experts": 8}
    config = MixtralConfig(**sizes, num_attention_heads=16, num_key_value_heads=8, use_cache=False)
    return WithLoss(lambda: MixtralForCausalLM(config), _of_words), _words(batch, sequence, sequence)


def unet(batch: int = 8) -> Built:
    """Stable Diffusion 1's."""
    from diffusers import UNet2DConditionModel

    def noise(model: Any, sample: Tensor, steps: Tensor, text: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(model(sample, steps, text, return_dict=False)[0], wanted)

    sample, wanted = torch.randn(2, batch, 4, 64, 64)
    inputs = sample, torch.randint(0, 1000, (batch,)), torch.randn(batch, 77, 768), wanted
    return WithLoss(lambda: UNet2DConditionModel(sample_size=64, cross_attention_dim=768), noise), inputs
