"""ViT, T5, Mixtral and ResNet of Hugging Face transformers and the UNet of diffusers, each with its loss, at sizes that
they are used at, without values: for plans alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]


class WithLoss(nn.Module):
    """`call(model, *inputs)` is the loss."""

    def __init__(self, model: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(self.model, *inputs)


def _without_values(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def _images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))


def _of_images(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    return model(pixel_values=images, labels=labels).loss


def _of_words(model: Any, words: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=words, labels=labels, use_cache=False).loss


def vit(batch: int = 32) -> Built:
    """Base, patches of 16."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_labels=1000, attn_implementation="sdpa")
    return WithLoss(_without_values(lambda: ViTForImageClassification(config)), _of_images), _images(batch)


def resnet(batch: int = 64) -> Built:
    """50 layers."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(num_labels=1000)
    return WithLoss(_without_values(lambda: ResNetForImageClassification(config)), _of_images), _images(batch)


def t5(batch: int = 16, sequence: int = 512) -> Built:
    """Base."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    config = T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, use_cache=False)
    words = tuple(torch.randint(1, 32000, (batch, sequence)) for _ in range(2))
    return WithLoss(_without_values(lambda: T5ForConditionalGeneration(config)), _of_words), words


def mixtral(batch: int = 8, sequence: int = 512) -> Built:
    """Eight layers of 1024 with eight experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_local_experts": 8}
    config = MixtralConfig(**sizes, num_attention_heads=16, num_key_value_heads=8, use_cache=False)
    words = tuple(torch.randint(1, 32000, (batch, sequence)) for _ in range(2))
    return WithLoss(_without_values(lambda: MixtralForCausalLM(config)), _of_words), words


def unet(batch: int = 8) -> Built:
    """Stable Diffusion 1's."""
    from diffusers import UNet2DConditionModel

    def noise(model: Any, sample: Tensor, steps: Tensor, text: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(model(sample, steps, text, return_dict=False)[0], wanted)

    model = _without_values(lambda: UNet2DConditionModel(sample_size=64, cross_attention_dim=768))
    sample, wanted = torch.randn(2, batch, 4, 64, 64)
    return WithLoss(model, noise), (sample, torch.randint(0, 1000, (batch,)), torch.randn(batch, 77, 768), wanted)
