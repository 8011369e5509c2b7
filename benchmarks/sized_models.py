"""The models of sized_models.toml and the UNet of diffusers, each with its loss, without values: for plans alone."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]
MODELS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


class WithLoss(nn.Module):
    """`call(model, *inputs)` is the loss."""

    def __init__(self, make: Callable[[], nn.Module], call: Callable[..., Tensor]) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = make()
        self.call = call

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(self.model, *inputs)


def _of_images(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    return model(pixel_values=images, labels=labels).loss


def _of_words(model: Any, words: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=words, labels=labels, use_cache=False).loss


def _built(name: str, batch: int = 0, sequence: int = 0, **sizes: int) -> Built:
    """`sizes`: of the configuration, in place of those of the file."""
    library, spec = importlib.import_module("transformers"), MODELS[name]
    config = getattr(library, spec["config"])(**spec["sizes"] | sizes)
    make, batch = partial(getattr(library, spec["model"]), config), batch or spec["batch"]
    if "inputs" not in spec:
        return WithLoss(make, _of_images), (torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,)))
    words = tuple(torch.randint(1, config.vocab_size, (batch, sequence or length)) for length in spec["inputs"])
    return WithLoss(make, _of_words), words


llama, vit, resnet, t5, mixtral = (partial(_built, name) for name in MODELS)


def unet(batch: int = 8) -> Built:
    """Stable Diffusion 1's."""
    from diffusers import UNet2DConditionModel

    def noise(model: Any, sample: Tensor, steps: Tensor, text: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(model(sample, steps, text, return_dict=False)[0], wanted)

    sample, wanted = torch.randn(2, batch, 4, 64, 64)
    inputs = sample, torch.randint(0, 1000, (batch,)), torch.randn(batch, 77, 768), wanted
    return WithLoss(lambda: UNet2DConditionModel(sample_size=64, cross_attention_dim=768), noise), inputs
