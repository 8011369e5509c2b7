"""Newer image models of the library at small sizes, dense predictions and video: `NAME(batch, size, loss)`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from tests.models.common import CLASSES, Built, Task, classifier, images
from tests.models.vision import HEADS, INNER, WIDTH, Boxes, _sizes


class Dense(nn.Module):
    """The mean square of what `result` is away from a target; without a target the result."""

    def __init__(self, model: nn.Module, result: str, **fixed: object) -> None:
        super().__init__()
        self.model, self.result, self.fixed = model, result, fixed

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        predicted = getattr(self.model(x, **self.fixed), self.result)
        return predicted if target is None else F.mse_loss(predicted, target)


def _dense(model: nn.Module, result: str, sample: Tensor, loss: bool, **fixed: object) -> Built:
    task = Dense(model, result, **fixed)
    with torch.no_grad():
        target = torch.randn_like(task(sample))
    return task, (sample, target)[: 1 + loss]


def hiera(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Attention in units of patches that are pooled away, stage by stage."""
    sizes = {"embed_dim": 16, "image_size": [size, size], "depths": [1, 1, 1], "num_heads": [1, 2, 4]}
    sizes |= {"patch_stride": [4, 4], "masked_unit_size": [4, 4], "num_query_pool": 2}
    config = hf.HieraConfig(**sizes, masked_unit_attention=[True, True, False], num_labels=CLASSES)
    return classifier(hf.HieraForImageClassification(config), batch, size, loss)


def pvt_v2(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Keys and values of a smaller image; depthwise convolutions in the MLP."""
    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]}
    sizes |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    config = hf.PvtV2Config(**sizes, image_size=size, num_labels=CLASSES)
    return classifier(hf.PvtV2ForImageClassification(config), batch, size, loss)


def focalnet(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Focal modulation: gates over contexts of growing depthwise convolutions."""
    sizes = {"embed_dim": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "focal_levels": [2, 2]}
    config = hf.FocalNetConfig(**sizes, focal_windows=[3, 3], image_size=size, num_labels=CLASSES, drop_path_rate=0.0)
    return classifier(hf.FocalNetForImageClassification(config), batch, size, loss)


def swinv2(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Cosine attention in shifted windows, position biases by a small network."""
    sizes = {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0}
    config = hf.Swinv2Config(**sizes, image_size=size, num_labels=CLASSES)
    return classifier(hf.Swinv2ForImageClassification(config), batch, size, loss)


def cvt(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Projections of queries, keys and values by convolutions with batch norm."""
    sizes = {"embed_dim": [16, 32], "num_heads": [1, 2], "depth": [1, 2], "patch_sizes": [7, 3]}
    sizes |= {"patch_stride": [4, 2], "patch_padding": [2, 1], "mlp_ratio": [2.0, 2.0], "cls_token": [False, True]}
    sizes |= {name: [0.0, 0.0] for name in ("attention_drop_rate", "drop_rate", "drop_path_rate")}
    sizes |= {"qkv_bias": [True, True], "qkv_projection_method": ["dw_bn", "dw_bn"], "kernel_qkv": [3, 3]}
    sizes |= {"padding_kv": [1, 1], "stride_kv": [2, 2], "padding_q": [1, 1], "stride_q": [1, 1]}
    return classifier(hf.CvtForImageClassification(hf.CvtConfig(**sizes, num_labels=CLASSES)), batch, size, loss)


def poolformer(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Pooling in place of attention."""
    sizes = {"depths": [1, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]}
    config = hf.PoolFormerConfig(**sizes, num_encoder_blocks=2, mlp_ratio=2.0, num_labels=CLASSES)
    return classifier(hf.PoolFormerForImageClassification(config), batch, size, loss)


def mobilevit(batch: int = 4, size: int = 64, loss: bool = True) -> Built:
    """Convolutions, and attention over unfolded patches."""
    sizes = {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "num_attention_heads": 2}
    config = hf.MobileViTConfig(**sizes, image_size=size, num_labels=CLASSES)
    return classifier(hf.MobileViTForImageClassification(config), batch, size, loss)


def dinov3(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """Rotary positions of two axes, register tokens, layer scales; the class token's features."""
    sizes = _sizes(size, num_register_tokens=2)
    return _dense(hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**sizes)), "pooler_output", images(batch, size), loss)


def vjepa2(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """Video by rotary positions of three axes; an attentive pooler."""
    sizes = {"patch_size": 4, "crop_size": size, "frames_per_clip": 4, "hidden_size": 48, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 2, "num_pooler_layers": 1, "pred_hidden_size": 48, "pred_num_attention_heads": 2}
    config = hf.VJEPA2Config(**sizes, pred_num_hidden_layers=1, num_labels=CLASSES)
    labels = (torch.randint(0, CLASSES, (batch,)),) if loss else ()
    task = Task(hf.VJEPA2ForVideoClassification(config), ("pixel_values_videos", "labels")[: 1 + loss])
    return task, (torch.randn(batch, 4, 3, size, size), *labels)


def timesformer(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """Attention over time, then over space."""
    model = hf.TimesformerForVideoClassification(hf.TimesformerConfig(**_sizes(size, num_frames=2)))
    labels = (torch.randint(0, CLASSES, (batch,)),) if loss else ()
    return Task(model, ("pixel_values", "labels")[: 1 + loss]), (torch.randn(batch, 2, 3, size, size), *labels)


def vivit(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """Tubes of a video as tokens."""
    sizes = _sizes(size, num_frames=4, tubelet_size=[2, 4, 4])
    sizes.pop("patch_size")
    labels = (torch.randint(0, CLASSES, (batch,)),) if loss else ()
    task = Task(hf.VivitForVideoClassification(hf.VivitConfig(**sizes)), ("pixel_values", "labels")[: 1 + loss])
    return task, (torch.randn(batch, 4, 3, size, size), *labels)


def dpt(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Depth from the patches of four layers, fused by convolutions."""
    sizes = {"image_size": size, "patch_size": 8, "hidden_size": WIDTH, "num_attention_heads": HEADS}
    sizes |= {"num_hidden_layers": 4, "intermediate_size": INNER, "backbone_out_indices": [0, 1, 2, 3]}
    config = hf.DPTConfig(**sizes, neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16)
    return _dense(hf.DPTForDepthEstimation(config), "predicted_depth", images(batch, size), loss)


def mask2former(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Queries whose attention is masked by the masks that they predicted; deformable attention of pixels."""
    backbone = hf.SwinConfig(
        image_size=size, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 2], window_size=2, drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    sizes = {"feature_size": WIDTH, "mask_feature_size": WIDTH, "hidden_dim": WIDTH, "encoder_feedforward_dim": INNER}
    sizes |= {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": HEADS, "dim_feedforward": INNER}
    config = hf.Mask2FormerConfig(**sizes, backbone_config=backbone, num_queries=6, num_labels=CLASSES)
    model = hf.Mask2FormerForUniversalSegmentation(config)
    return _dense(model, "masks_queries_logits", images(batch, size), loss)


def _targets(batch: int, queries: int, loss: bool) -> tuple[Tensor, ...]:
    return (torch.randint(0, CLASSES, (batch, queries)), torch.rand(batch, queries, 4)) if loss else ()


def rt_detr(batch: int = 4, size: int = 64, loss: bool = True) -> Built:
    """The best tokens of an image become queries; deformable attention."""
    stages = ["stage2", "stage3", "stage4"]
    backbone = hf.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], layer_type="basic", out_features=stages
    )
    sizes = {"encoder_hidden_dim": WIDTH, "encoder_in_channels": [16, 16, 16], "encoder_ffn_dim": INNER}
    sizes |= {"encoder_attention_heads": HEADS, "d_model": WIDTH, "num_queries": 6, "decoder_layers": 2}
    sizes |= {"decoder_in_channels": [WIDTH] * 3, "decoder_ffn_dim": INNER, "decoder_attention_heads": HEADS}
    sizes |= {"num_labels": CLASSES, "num_denoising": 0, "hidden_expansion": 0.5}
    model = hf.RTDetrForObjectDetection(hf.RTDetrConfig(**sizes, backbone_config=backbone))
    return Boxes(model), (images(batch, size), *_targets(batch, 6, loss))


def yolos(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    """Detection tokens among the patches."""
    sizes = _sizes(size, num_detection_tokens=6) | {"patch_size": 8, "image_size": [size, size]}
    return Boxes(hf.YolosForObjectDetection(hf.YolosConfig(**sizes))), (images(batch, size), *_targets(batch, 6, loss))


class Grounded(nn.Module):
    """Boxes of phrases; the mean square of scores and boxes where there are targets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, text: Tensor, boxes: Tensor | None = None) -> Any:
        outputs = self.model(pixel_values=pixels, input_ids=text)
        return outputs.pred_boxes if boxes is None else F.l1_loss(outputs.pred_boxes, boxes)


def grounding_dino(batch: int = 4, size: int = 64, loss: bool = True) -> Built:
    """Images and phrases attend to each other; queries from the best image tokens."""
    backbone = hf.SwinConfig(
        image_size=size, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 2], window_size=2, drop_path_rate=0.0,
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    text = hf.BertConfig(
        vocab_size=2000, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=INNER
    )
    sizes = {"d_model": WIDTH, "num_queries": 6, "max_text_len": 8, "disable_custom_kernels": True}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_ffn_dim": INNER, f"{part}_attention_heads": HEADS, f"{part}_layers": 2}
    config = hf.GroundingDinoConfig(**sizes, backbone_config=backbone, text_config=text, fusion_droppath=0.0)
    inputs = (images(batch, size), torch.randint(0, 2000, (batch, 8)), torch.rand(batch, 6, 4))
    return Grounded(hf.GroundingDinoForObjectDetection(config)), inputs[: 2 + loss]


class Prompted(nn.Module):
    """Masks of an image from points."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, points: Tensor, target: Tensor | None = None) -> Any:
        masks = self.model(pixel_values=pixels, input_points=points, multimask_output=False).pred_masks
        return masks if target is None else F.binary_cross_entropy_with_logits(masks, target)


def sam2(batch: int = 4, size: int = 64, loss: bool = True) -> Built:
    """A hierarchical encoder, prompts by points, masks by two-way attention."""
    trunk = {
        "hidden_size": 8, "image_size": [size, size], "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": [8, 16, 32, 64], "num_attention_heads_per_stage": [1, 2, 2, 4],
        "window_size_per_stage": [4, 2, 2, 2], "global_attention_blocks": [3],
        "window_positional_embedding_background_size": [4, 4],
    }  # fmt: skip
    vision = {"backbone_config": {"model_type": "sam2_hiera_det_model", **trunk}, "fpn_hidden_size": WIDTH}
    vision |= {"backbone_channel_list": [64, 32, 16, 8], "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}
    prompts = {"hidden_size": WIDTH, "image_size": size, "mask_input_channels": 8}
    masks = {"hidden_size": WIDTH, "mlp_dim": INNER, "num_attention_heads": HEADS, "iou_head_hidden_dim": WIDTH}
    masks |= {"dynamic_multimask_via_stability": False}
    model = hf.Sam2Model(hf.Sam2Config(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=masks))
    inputs = (images(batch, size), size * torch.rand(batch, 1, 2, 2), torch.rand(batch, 1, 1, 16, 16))
    return Prompted(model), inputs[: 2 + loss]


def hifi_gan(batch: int = 4, frames: int = 8, loss: bool = True) -> Built:
    """A waveform from a spectrogram: transposed convolutions and dilated residual blocks with weight norm."""
    sizes = {"model_in_dim": 8, "upsample_initial_channel": 16, "upsample_rates": [4, 2]}
    sizes |= {"upsample_kernel_sizes": [8, 4], "resblock_kernel_sizes": [3, 5]}
    model = Waves(hf.SpeechT5HifiGan(hf.SpeechT5HifiGanConfig(**sizes, resblock_dilation_sizes=[[1, 3], [1, 3]])))
    return model, (torch.randn(batch, frames, 8), torch.randn(batch, 8 * frames))[: 1 + loss]


class Waves(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, spectrogram: Tensor, wave: Tensor | None = None) -> Any:
        predicted = self.model(spectrogram)
        return predicted if wave is None else F.l1_loss(predicted, wave)


def swin2sr(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """An image of twice the size: windows, then pixels shuffled out of channels."""
    sizes = {"image_size": size, "patch_size": 1, "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2]}
    config = hf.Swin2SRConfig(**sizes, window_size=4, upscale=2, drop_path_rate=0.0)
    return _dense(hf.Swin2SRForImageSuperResolution(config), "reconstruction", images(batch, size), loss)


def glpn(batch: int = 4, size: int = 64, loss: bool = True) -> Built:
    """Depth by a decoder that chooses between local and global features."""
    sizes = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}
    config = hf.GLPNConfig(**sizes, decoder_hidden_size=16, drop_path_rate=0.0)
    return _dense(hf.GLPNForDepthEstimation(config), "predicted_depth", images(batch, size), loss)


def clipseg(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """Masks of an image from a text, by a small decoder over the features of CLIP."""
    text = {"vocab_size": 99, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    text |= {"intermediate_size": INNER, "max_position_embeddings": 8, "eos_token_id": 98}
    config = hf.CLIPSegConfig(
        text_config=text, vision_config=_sizes(size), projection_dim=24, reduce_dim=16, extract_layers=[0, 1],
        decoder_num_attention_heads=2, decoder_intermediate_size=INNER,
    )  # fmt: skip
    words = torch.randint(0, 98, (batch, 8))
    inputs = (images(batch, size), words, torch.rand(batch, size, size).round())
    task = Task(hf.CLIPSegForImageSegmentation(config), ("pixel_values", "input_ids", "labels")[: 2 + loss])
    return task, inputs[: 2 + loss]


class Phrases(nn.Module):
    """Boxes and scores of phrases in an image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, text: Tensor, boxes: Tensor | None = None, fits: Tensor | None = None) -> Any:
        outputs = self.model(pixel_values=pixels, input_ids=text)
        if boxes is None or fits is None:
            return outputs.logits
        return F.l1_loss(outputs.pred_boxes, boxes) + F.binary_cross_entropy_with_logits(outputs.logits, fits)


def owlvit(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    """A box for each patch, scored by what CLIP makes of phrases."""
    text = {"vocab_size": 99, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    text |= {"intermediate_size": INNER, "max_position_embeddings": 8}
    config = hf.OwlViTConfig(text_config=text, vision_config=_sizes(size), projection_dim=WIDTH)
    patches = (size // 4) ** 2
    inputs = (images(batch, size), torch.randint(0, 99, (batch, 8)))
    inputs += (torch.rand(batch, patches, 4), torch.rand(batch, patches, 1).round())
    return Phrases(hf.OwlViTForObjectDetection(config)), inputs[: 2 + 2 * loss]
