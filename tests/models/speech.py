"""Models of sound at small sizes: `NAME(batch, ..., loss)`."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.models.common import CLASSES, VOCABULARY, Built, Task

WIDTH, HEADS, INNER = 32, 4, 48


def _waves(layers: int) -> dict[str, Any]:
    """Short convolutions over the wave; nothing is masked or left out at random."""
    return {
        "hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": HEADS, "intermediate_size": INNER,
        "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 3), "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2, "vocab_size": VOCABULARY, "num_labels": CLASSES, "layerdrop": 0.0,
        "apply_spec_augment": False, "classifier_proj_size": 16,
    }  # fmt: skip


def _sound(model: torch.nn.Module, batch: int, samples: int, labels: tuple[torch.Tensor, ...]) -> Built:
    names = ("input_values", "labels")[: 1 + len(labels)]
    return Task(model, names), (torch.randn(batch, samples), *labels)


def wav2vec2(batch: int = 4, samples: int = 100, layers: int = 2, loss: bool = True) -> Built:
    """Letters by connectionist temporal classification; positions by a convolution with weight norm."""
    labels = (torch.randint(1, VOCABULARY, (batch, 5)),) if loss else ()
    return _sound(hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**_waves(layers))), batch, samples, labels)


def hubert(batch: int = 4, samples: int = 100, layers: int = 2, loss: bool = True) -> Built:
    """A class for each sound."""
    labels = (torch.randint(0, CLASSES, (batch,)),) if loss else ()
    return _sound(hf.HubertForSequenceClassification(hf.HubertConfig(**_waves(layers))), batch, samples, labels)


def spectrogram_transformer(batch: int = 4, frames: int = 32, layers: int = 2, loss: bool = True) -> Built:
    """Patches of a spectrogram that overlap (AST)."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_labels": CLASSES}
    sizes |= {"intermediate_size": INNER, "max_length": frames, "num_mel_bins": 16, "patch_size": 8}
    model = hf.ASTForAudioClassification(hf.ASTConfig(**sizes, time_stride=4, frequency_stride=4))
    labels = (torch.randint(0, CLASSES, (batch,)),) if loss else ()
    return Task(model, ("input_values", "labels")[: 1 + loss]), (torch.randn(batch, frames, 16), *labels)


def sew(batch: int = 4, samples: int = 128, layers: int = 2, loss: bool = True) -> Built:
    """The sequence squeezed before the encoder, and brought back to length after it."""
    config = hf.SEWConfig(**_waves(layers), squeeze_factor=2)
    labels = (torch.randint(0, CLASSES, (batch,)),) if loss else ()
    return _sound(hf.SEWForSequenceClassification(config), batch, samples, labels)


class Codec(torch.nn.Module):
    """A wave through codes and back; the mean distance to itself where it is trained."""

    def __init__(self, model: torch.nn.Module, loss: bool) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, wave: torch.Tensor) -> Any:
        outputs = self.model(wave)
        if not self.loss:
            return outputs.audio_values
        return torch.nn.functional.l1_loss(outputs.audio_values, wave.squeeze(1)) + outputs.loss.mean()


def dac(batch: int = 4, samples: int = 64, loss: bool = True) -> Built:
    """Residual codebooks of a wave, with sines as activations."""
    sizes = {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_hidden_size": 32, "n_codebooks": 3}
    model = hf.DacModel(hf.DacConfig(**sizes, codebook_size=16, codebook_dim=4, quantizer_dropout=0.0))
    return Codec(model, loss), (torch.randn(batch, 1, samples),)
