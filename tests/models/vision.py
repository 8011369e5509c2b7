"""Image models of the library at small sizes: `NAME(batch, size, loss)`."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.models.common import CLASSES, Built, classifier

WIDTH, HEADS, INNER = 32, 4, 48


def _sizes(size: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": INNER,
        "image_size": size, "patch_size": 4, "num_labels": CLASSES, **more,
    }  # fmt: skip


def vit(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    return classifier(hf.ViTForImageClassification(hf.ViTConfig(**_sizes(size))), batch, size, loss)


def dinov2(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """Layer scales, and the mean of the patches beside the class token."""
    return classifier(hf.Dinov2ForImageClassification(hf.Dinov2Config(**_sizes(size, mlp_ratio=2))), batch, size, loss)


def swin(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Windows that shift from layer to layer."""
    sizes = {"image_size": size, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    config = hf.SwinConfig(**sizes, window_size=4, drop_path_rate=0.0, num_labels=CLASSES)
    return classifier(hf.SwinForImageClassification(config), batch, size, loss)


def convnext(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    config = hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, num_labels=CLASSES)
    return classifier(hf.ConvNextForImageClassification(config), batch, size, loss)


def resnet(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Batch norm with statistics of the whole batch."""
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"}
    config = hf.ResNetConfig(**sizes, num_labels=CLASSES)
    return classifier(hf.ResNetForImageClassification(config), batch, size, loss)
