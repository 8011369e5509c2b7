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
