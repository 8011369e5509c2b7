"""Models of the diffusers library at small sizes, trained to predict noise: `NAME(batch, size, loss)`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.common import CLASSES, Built, images


class Denoiser(nn.Module):
    """The mean square between the prediction and the noise; `names` are the model's further inputs."""

    def __init__(self, model: nn.Module, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, sample: Tensor, *others: Tensor) -> Any:
        named = dict(zip(self.names, others, strict=False))
        (predicted,) = self.model(sample, **named, return_dict=False)
        return predicted if len(others) == len(self.names) else F.mse_loss(predicted[:, : sample.shape[1]], others[-1])


def _steps(batch: int) -> Tensor:
    return torch.randint(0, 1000, (batch,))


def diffusers_unet(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    import diffusers

    sizes: dict[str, Any] = {"sample_size": size, "block_out_channels": (8, 16), "norm_num_groups": 4}
    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    model = diffusers.UNet2DModel(**sizes, **kinds, layers_per_block=1, attention_head_dim=8)
    noise = (images(batch, size),) if loss else ()
    return Denoiser(model, ("timestep",)), (images(batch, size), _steps(batch), *noise)


def diffusers_unet_condition(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """Attention to the text (Stable Diffusion's)."""
    import diffusers

    sizes: dict[str, Any] = {"sample_size": size, "block_out_channels": (8, 16), "norm_num_groups": 4}
    sizes |= {"cross_attention_dim": 16, "attention_head_dim": 4, "layers_per_block": 1}
    kinds = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    model = diffusers.UNet2DConditionModel(**sizes, **kinds)
    text = torch.randn(batch, 6, 16)
    noise = (images(batch, size, 4),) if loss else ()
    names = ("timestep", "encoder_hidden_states")
    return Denoiser(model, names), (images(batch, size, 4), _steps(batch), text, *noise)


def diffusers_dit(batch: int = 4, size: int = 8, loss: bool = True) -> Built:
    """Norms that the time and the class steer; sinusoidal positions in two dimensions."""
    import diffusers

    sizes = {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": size}
    model = diffusers.DiTTransformer2DModel(**sizes, num_embeds_ada_norm=1000, norm_num_groups=4)
    labels = torch.randint(0, CLASSES, (batch,))
    noise = (images(batch, size, 4),) if loss else ()
    return Denoiser(model, ("timestep", "class_labels")), (images(batch, size, 4), _steps(batch), labels, *noise)


class Autoencoder(nn.Module):
    """The reconstruction's mean square and the latent's divergence from a normal."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, noise: Tensor) -> Any:
        latent = self.model.encode(pixels).latent_dist
        decoded = self.model.decode(latent.mean + latent.std * noise).sample
        divergence = 0.5 * (latent.mean.pow(2) + latent.var - 1.0 - latent.logvar).mean()
        return F.mse_loss(decoded, pixels) + 1e-2 * divergence


def diffusers_vae(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    import diffusers

    sizes: dict[str, Any] = {"block_out_channels": (8, 16), "norm_num_groups": 4, "sample_size": size}
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = diffusers.AutoencoderKL(**sizes, **kinds, latent_channels=4)
    return Autoencoder(model), (images(batch, size), torch.randn(batch, 4, size // 2, size // 2))


def diffusers_sd3(batch: int = 4, size: int = 8, loss: bool = True) -> Built:
    """Text and image attend to each other in one sequence (MMDiT)."""
    import diffusers

    sizes = {"sample_size": size, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8}
    sizes |= {"num_attention_heads": 4, "joint_attention_dim": 16, "caption_projection_dim": 32, "out_channels": 4}
    model = diffusers.SD3Transformer2DModel(**sizes, pooled_projection_dim=16, pos_embed_max_size=8)
    names = ("encoder_hidden_states", "pooled_projections", "timestep")
    conditions = (torch.randn(batch, 6, 16), torch.randn(batch, 16), _steps(batch))
    noise = (images(batch, size, 4),) if loss else ()
    return Denoiser(model, names), (images(batch, size, 4), *conditions, *noise)
