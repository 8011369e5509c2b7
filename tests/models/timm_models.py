"""Models of the timm library at small sizes: `NAME(batch, size, loss)`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.common import CLASSES, Built, images


class Classified(nn.Module):
    """Cross entropy of the model's logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.model(pixels)
        return logits if labels is None else F.cross_entropy(logits, labels)


def _built(name: str, batch: int, size: int, loss: bool, **options: Any) -> Built:
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return _classified(model, batch, size, loss)


def _classified(model: nn.Module, batch: int, size: int, loss: bool) -> Built:
    labels = (torch.randint(0, CLASSES, (batch,)),) if loss else ()
    return Classified(model), (images(batch, size), *labels)


def timm_vit(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    sizes = {"img_size": size, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return _built("vit_tiny_patch16_224", batch, size, loss, **sizes)


def timm_eva02(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """Rotary positions in two dimensions, SwiGLU."""
    sizes = {"img_size": size, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return _built("eva02_tiny_patch14_224", batch, size, loss, **sizes)


def timm_swin(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Window masks that the constructor computes."""
    sizes = {"img_size": size, "patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": (2, 2)}
    return _built("swin_tiny_patch4_window7_224", batch, size, loss, **sizes, num_heads=(2, 4), drop_path_rate=0.0)


def timm_mixer(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """MLPs over patches and over channels."""
    from timm.models.mlp_mixer import MlpMixer

    model = MlpMixer(num_classes=CLASSES, img_size=size, patch_size=4, embed_dim=32, num_blocks=2)
    return _classified(model, batch, size, loss)


def timm_convnextv2(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Norms of responses over the whole image."""
    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
    return _built("convnextv2_atto", batch, size, loss, **sizes)


def timm_efficientnet(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Squeeze and excitation between depthwise convolutions."""
    return _built("tinynet_e", batch, size, loss)


def timm_mobilenetv3(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    return _built("mobilenetv3_small_050", batch, size, loss)


def timm_densenet(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Each layer sees all before it."""
    return _built("densenet121", batch, size, loss, growth_rate=8, block_config=(2, 2))


def timm_vgg(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    from timm.models.vgg import VGG

    cfg: list[Any] = [8, "M", 16, "M"]
    model = VGG(cfg, num_classes=CLASSES, mlp_ratio=0.02, norm_layer=nn.BatchNorm2d)
    return _classified(model, batch, size, loss)


def timm_resnext(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Grouped bottlenecks."""
    return _built("resnext50_32x4d", batch, size, loss, layers=(1, 1, 1, 1), cardinality=4, base_width=4)


def timm_cait(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """Heads that talk to each other before and after the softmax."""
    sizes = {"img_size": size, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return _built("cait_xxs24_224", batch, size, loss, **sizes)


def timm_levit(batch: int = 4, size: int = 64, loss: bool = True) -> Built:
    """Attention biases picked by a table of indices, batch norm in attention."""
    sizes = {"img_size": size, "embed_dim": (16, 32), "key_dim": 8, "depth": (1, 1), "num_heads": (2, 4)}
    return _built("levit_128s", batch, size, loss, **sizes)
