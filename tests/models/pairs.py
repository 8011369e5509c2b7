"""Models of two inputs of the library at small sizes: encoder and decoder, image and text."""

from __future__ import annotations

import torch
import transformers as hf

from tests.models.common import VOCABULARY, Built, Task, images, tokens

WIDTH, HEADS, INNER = 32, 4, 48


def t5(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Relative position biases that all layers share."""
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": INNER, "num_heads": HEADS, "num_layers": layers}
    special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = hf.T5ForConditionalGeneration(hf.T5Config(**sizes, **special, vocab_size=VOCABULARY, use_cache=False))
    return _translation(model, batch, sequence, loss)


def bart(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    sizes = {
        "d_model": WIDTH, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER, "encoder_layers": layers,
        "decoder_layers": layers, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
    }  # fmt: skip
    special = {"decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
    config = hf.BartConfig(**sizes, **special, vocab_size=VOCABULARY, max_position_embeddings=64, use_cache=False)
    return _translation(hf.BartForConditionalGeneration(config), batch, sequence, loss)


def _translation(model: torch.nn.Module, batch: int, sequence: int, loss: bool) -> Built:
    """The decoder sees half as many tokens as the encoder."""
    names = ("input_ids", "labels" if loss else "decoder_input_ids")
    return Task(model, names), (tokens(batch, sequence), tokens(batch, sequence // 2))


def whisper(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Convolutions over a spectrogram, then encoder and decoder."""
    sizes = {
        "d_model": WIDTH, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER, "encoder_layers": layers,
        "decoder_layers": layers, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
        "num_mel_bins": 8, "max_source_positions": sequence, "max_target_positions": 64,
    }  # fmt: skip
    special = {"decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
    config = hf.WhisperConfig(**sizes, **special, vocab_size=VOCABULARY, use_cache=False)
    names = ("input_features", "labels" if loss else "decoder_input_ids")
    inputs = (torch.randn(batch, 8, 2 * sequence), tokens(batch, sequence // 2))
    return Task(hf.WhisperForConditionalGeneration(config), names), inputs


def clip(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Images and captions, each against all of the batch."""
    tower = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers}
    tower |= {"num_attention_heads": HEADS, "projection_dim": 16}
    text = {**tower, "vocab_size": VOCABULARY, "max_position_embeddings": sequence, "eos_token_id": VOCABULARY - 1}
    text |= {"bos_token_id": 0, "pad_token_id": 1}
    image = {**tower, "image_size": 16, "patch_size": 4}
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=image, projection_dim=16))
    fixed = {"return_loss": True} if loss else {}
    task = Task(model, ("input_ids", "pixel_values"), "logits_per_image", **fixed)
    return task, (tokens(batch, sequence), images(batch, 16))
