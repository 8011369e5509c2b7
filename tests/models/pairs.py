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


def mbart(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Norms before attention; labels shifted around the language mark."""
    config = hf.MBartConfig(**_bart_sizes(layers))
    return _translation(hf.MBartForConditionalGeneration(config), batch, sequence, loss)


def pegasus(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Sinusoidal positions that are a parameter nobody trains."""
    config = hf.PegasusConfig(**_bart_sizes(layers))
    return _translation(hf.PegasusForConditionalGeneration(config), batch, sequence, loss)


def m2m100(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Sinusoidal positions as a buffer that no state dict holds."""
    config = hf.M2M100Config(**_bart_sizes(layers), encoder_layerdrop=0.0, decoder_layerdrop=0.0)
    return _translation(hf.M2M100ForConditionalGeneration(config), batch, sequence, loss)


def _bart_sizes(layers: int) -> dict[str, object]:
    return {
        "d_model": WIDTH, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER, "encoder_layers": layers,
        "decoder_layers": layers, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
        "decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0,
        "vocab_size": VOCABULARY, "max_position_embeddings": 64, "use_cache": False,
    }  # fmt: skip


def _towers(layers: int, sequence: int) -> tuple[dict[str, object], dict[str, object]]:
    """Text and image configurations of two equal towers."""
    tower: dict[str, object] = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers}
    tower["num_attention_heads"] = HEADS
    text = {**tower, "vocab_size": VOCABULARY, "max_position_embeddings": sequence}
    return text, {**tower, "image_size": 16, "patch_size": 4}


def siglip(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """A sigmoid for each pair of image and caption, pooling by attention."""
    text, image = _towers(layers, sequence)
    special = {"eos_token_id": VOCABULARY - 1, "bos_token_id": 0, "pad_token_id": 1, "projection_size": WIDTH}
    model = hf.SiglipModel(hf.SiglipConfig(text_config={**text, **special}, vision_config=image))
    fixed = {"return_loss": True} if loss else {}
    task = Task(model, ("input_ids", "pixel_values"), "logits_per_image", **fixed)
    return task, (tokens(batch, sequence), images(batch, 16))


def blip(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Captions by a decoder that attends to the image."""
    text, image = _towers(layers, 64)
    special = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "sep_token_id": 2, "encoder_hidden_size": WIDTH}
    text |= {**special, "use_cache": False}
    image |= {"initializer_range": 0.02}
    model = hf.BlipForConditionalGeneration(hf.BlipConfig(text_config=text, vision_config=image))
    names = ("pixel_values", "input_ids", *(["labels"] if loss else []))
    return Task(model, names), (images(batch, 16), *(tokens(batch, sequence) for _ in names[1:]))


def llava(batch: int = 4, sequence: int = 24, layers: int = 2, loss: bool = True) -> Built:
    """Patches of an image take the place of marks in the text."""
    image = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers, "image_size": 16}
    image |= {"num_attention_heads": HEADS, "patch_size": 4, "projection_dim": WIDTH, "model_type": "clip_vision_model"}
    text = {"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER}
    text |= {"num_hidden_layers": layers, "num_attention_heads": HEADS, "max_position_embeddings": 64}
    marks = {"image_token_index": VOCABULARY - 1, "image_seq_length": 16}
    config = hf.LlavaConfig(vision_config=image, text_config={**text, "use_cache": False}, **marks)
    ids = tokens(batch, sequence, VOCABULARY - 1)
    ids[:, 2:18] = VOCABULARY - 1
    names = ("input_ids", "pixel_values", *(["labels"] if loss else []))
    labels = (tokens(batch, sequence),) if loss else ()
    return Task(hf.LlavaForConditionalGeneration(config), names), (ids, images(batch, 16), *labels)


def qwen2_vl(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Rotary positions in three parts; the text alone."""
    text = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers}
    text |= {"num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 64}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "use_cache": False}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
    image = {"depth": layers, "embed_dim": WIDTH, "hidden_size": WIDTH, "num_heads": HEADS, "patch_size": 4}
    marks = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    config = hf.Qwen2VLConfig(text_config=text, vision_config=image, **marks)
    model = hf.Qwen2VLForConditionalGeneration(config)
    names = ("input_ids", "labels") if loss else ("input_ids",)
    return Task(model, names), tuple(tokens(batch, sequence, 60) for _ in names)
