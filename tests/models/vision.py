"""Image models of the library at small sizes: `NAME(batch, size, loss)`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from tests.models.common import CLASSES, Built, Task, classifier, images

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


def deit(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """A token for distillation beside the class token."""
    return classifier(hf.DeiTForImageClassification(hf.DeiTConfig(**_sizes(size))), batch, size, loss)


def beit(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """Relative position biases picked by a table of indices."""
    sizes = _sizes(size, use_relative_position_bias=True, use_absolute_position_embeddings=False, drop_path_rate=0.0)
    return classifier(hf.BeitForImageClassification(hf.BeitConfig(**sizes)), batch, size, loss)


def segformer(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Attention to a reduced sequence, four scales joined."""
    sizes = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4]}
    config = hf.SegformerConfig(**sizes, decoder_hidden_size=16, num_labels=CLASSES, drop_path_rate=0.0)
    labels = (torch.randint(0, CLASSES, (batch, size, size)),) if loss else ()
    names = ("pixel_values", "labels") if loss else ("pixel_values",)
    return Task(hf.SegformerForSemanticSegmentation(config), names), (images(batch, size), *labels)


class Boxes(nn.Module):
    """Detection with the matching given: a class and a box for each query."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, labels: Tensor | None = None, boxes: Tensor | None = None) -> Any:
        outputs = self.model(pixel_values=pixels)
        if labels is None or boxes is None:
            return outputs.logits, outputs.pred_boxes
        return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten()) + F.l1_loss(outputs.pred_boxes, boxes)


def detr(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Queries that attend to the features of a convolutional network."""
    backbone = hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    sizes = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "num_queries": 6, "num_labels": CLASSES}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_ffn_dim": INNER, f"{part}_attention_heads": HEADS}
    config = hf.DetrConfig(**sizes, backbone_config=backbone)
    targets = (torch.randint(0, CLASSES + 1, (batch, 6)), torch.rand(batch, 6, 4)) if loss else ()
    return Boxes(hf.DetrForObjectDetection(config)), (images(batch, size), *targets)


def mobilenet_v2(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Depthwise convolutions between narrow ones."""
    config = hf.MobileNetV2Config(num_labels=CLASSES, depth_multiplier=0.25, image_size=size)
    return classifier(hf.MobileNetV2ForImageClassification(config), batch, size, loss)


def regnet(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Grouped convolutions, with gates on channels."""
    config = hf.RegNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], groups_width=8, num_labels=CLASSES)
    return classifier(hf.RegNetForImageClassification(config), batch, size, loss)


def videomae(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """Tubes of a video, positions by a sinusoidal table."""
    sizes = _sizes(size, num_frames=4, tubelet_size=2)
    names = ("pixel_values", "labels") if loss else ("pixel_values",)
    labels = (torch.randint(0, CLASSES, (batch,)),) if loss else ()
    video = torch.randn(batch, 4, 3, size, size)
    return Task(hf.VideoMAEForVideoClassification(hf.VideoMAEConfig(**sizes)), names), (video, *labels)
