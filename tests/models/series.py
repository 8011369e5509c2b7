"""Proteins, characters, documents, bytes and time series of the library, small: `NAME(batch, ..., loss)`."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.models.common import CLASSES, VOCABULARY, Built, Task, language, tokens

WIDTH, HEADS, INNER = 32, 4, 48


def _sizes(layers: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "intermediate_size": INNER, "max_position_embeddings": 64, "pad_token_id": 1, **more,
    }  # fmt: skip


def _classes(batch: int, loss: bool) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, CLASSES, (batch,)),) if loss else ()


def esm(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Protein sequences: rotary positions, token dropout off."""
    config = hf.EsmConfig(**_sizes(layers), position_embedding_type="rotary", mask_token_id=2)
    return language(hf.EsmForMaskedLM(config), batch, sequence, loss)


def canine(batch: int = 4, sequence: int = 16, layers: int = 2, loss: bool = True) -> Built:
    """Characters by hashes, attention in local blocks, down and up by convolutions."""
    sizes = _sizes(layers, num_hash_functions=4, num_hash_buckets=32, local_transformer_stride=8)
    model = hf.CanineForSequenceClassification(hf.CanineConfig(**sizes, num_labels=CLASSES))
    return Task(model, ("input_ids", "labels")[: 1 + loss]), (tokens(batch, sequence), *_classes(batch, loss))


def layoutlm(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Tokens with the boxes they have on a page."""
    model = hf.LayoutLMForMaskedLM(hf.LayoutLMConfig(**_sizes(layers), max_2d_position_embeddings=32))
    boxes = torch.cat([torch.randint(0, 16, (batch, sequence, 2)), torch.randint(16, 32, (batch, sequence, 2))], -1)
    labels = (tokens(batch, sequence),) if loss else ()
    return Task(model, ("input_ids", "bbox", "labels")[: 2 + loss]), (tokens(batch, sequence), boxes, *labels)


def lilt(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Text and layout in two streams that share their scores."""
    sizes = _sizes(layers, max_2d_position_embeddings=32, channel_shrink_ratio=2, num_labels=CLASSES, hidden_size=48)
    boxes = torch.cat([torch.randint(0, 16, (batch, sequence, 2)), torch.randint(16, 32, (batch, sequence, 2))], -1)
    model = hf.LiltForTokenClassification(hf.LiltConfig(**sizes))
    labels = (torch.randint(0, CLASSES, (batch, sequence)),) if loss else ()
    return Task(model, ("input_ids", "bbox", "labels")[: 2 + loss]), (tokens(batch, sequence), boxes, *labels)


def perceiver(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Latents that look at the inputs, and outputs that look at the latents."""
    sizes = {"num_latents": 6, "d_latents": WIDTH, "d_model": 16, "num_self_attends_per_block": layers}
    sizes |= {"num_self_attention_heads": HEADS, "num_cross_attention_heads": HEADS, "qk_channels": 16}
    sizes |= {"v_channels": WIDTH, "vocab_size": VOCABULARY, "max_position_embeddings": sequence}
    return language(hf.PerceiverForMaskedLM(hf.PerceiverConfig(**sizes)), batch, sequence, loss)


def fnet(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Fourier transforms in place of attention."""
    sizes = _sizes(layers)
    sizes.pop("num_attention_heads")
    return language(hf.FNetForMaskedLM(hf.FNetConfig(**sizes)), batch, sequence, loss)


def mobilebert(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Bottlenecks, several feed-forward networks a layer, embeddings of three neighbours."""
    sizes = _sizes(layers, embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16, num_feedforward_networks=2)
    return language(hf.MobileBertForMaskedLM(hf.MobileBertConfig(**sizes)), batch, sequence, loss)


def big_bird(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """With full attention: sparse needs longer sequences than the models here have."""
    config = hf.BigBirdConfig(**_sizes(layers), attention_type="original_full")
    return language(hf.BigBirdForMaskedLM(config), batch, sequence, loss)


def rembert(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Embeddings of one width, output embeddings of another."""
    sizes = _sizes(layers, input_embedding_size=16, output_embedding_size=24)
    return language(hf.RemBertForMaskedLM(hf.RemBertConfig(**sizes)), batch, sequence, loss)


def _forecast(model: torch.nn.Module, batch: int, past: int, future: int, channels: int, loss: bool) -> Built:
    names = ("past_values", "future_values")[: 1 + loss]
    inputs = (torch.randn(batch, past, channels), torch.randn(batch, future, channels))[: 1 + loss]
    return Task(model, names, "prediction_outputs"), inputs


def patchtst(batch: int = 4, past: int = 16, layers: int = 2, loss: bool = True) -> Built:
    """Patches of each channel by itself, batch norm, values scaled by their own deviation."""
    sizes = {"num_input_channels": 3, "context_length": past, "patch_length": 4, "patch_stride": 4, "ffn_dim": INNER}
    sizes |= {"num_hidden_layers": layers, "d_model": WIDTH, "num_attention_heads": HEADS, "prediction_length": 8}
    return _forecast(hf.PatchTSTForPrediction(hf.PatchTSTConfig(**sizes)), batch, past, 8, 3, loss)


def patchtsmixer(batch: int = 4, past: int = 16, layers: int = 2, loss: bool = True) -> Built:
    """Patches, features and gates mixed by linear layers."""
    sizes = {"num_input_channels": 3, "context_length": past, "patch_length": 4, "patch_stride": 4, "d_model": WIDTH}
    config = hf.PatchTSMixerConfig(**sizes, num_layers=layers, prediction_length=8)
    return _forecast(hf.PatchTSMixerForPrediction(config), batch, past, 8, 3, loss)


def timesfm(batch: int = 4, past: int = 16, layers: int = 2, loss: bool = True) -> Built:
    """Patches of a series in a decoder; quantiles."""
    sizes = {"patch_length": 4, "context_length": past, "horizon_length": 8, "num_hidden_layers": layers}
    sizes |= {"hidden_size": WIDTH, "intermediate_size": INNER, "head_dim": 8, "num_attention_heads": HEADS}
    model = hf.TimesFmModelForPrediction(hf.TimesFmConfig(**sizes))
    inputs = (torch.randn(batch, past), torch.zeros(batch, dtype=torch.long), torch.randn(batch, 8))
    names = ("past_values", "freq", "future_values")
    return Task(model, names[: 2 + loss], "mean_predictions"), inputs[: 2 + loss]


def time_series_transformer(batch: int = 4, past: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Lagged values, and the parameters of a distribution."""
    sizes = {"prediction_length": 4, "context_length": past, "lags_sequence": [1, 2], "num_time_features": 1}
    sizes |= {"d_model": WIDTH, "encoder_layers": layers, "decoder_layers": layers, "encoder_layerdrop": 0.0}
    config = hf.TimeSeriesTransformerConfig(**sizes, decoder_layerdrop=0.0)
    history = (batch, past + 2)
    inputs = (torch.randn(history), torch.randn(*history, 1), torch.ones(history), torch.randn(batch, 4))
    names = ("past_values", "past_time_features", "past_observed_mask", "future_values", "future_time_features")
    return Task(hf.TimeSeriesTransformerForPrediction(config), names, "params"), (*inputs, torch.randn(batch, 4, 1))


def funnel(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Hidden states pooled from block to block, and brought back to full length; relative positions."""
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_head": HEADS, "d_head": 8, "d_inner": INNER}
    config = hf.FunnelConfig(**sizes, block_sizes=[1] * layers, num_decoder_layers=1)
    return language(hf.FunnelForMaskedLM(config), batch, sequence, loss)


class Decisions(torch.nn.Module):
    """Actions from the returns to go, states and actions before; the mean square where there are targets."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> Any:
        names = ("states", "actions", "returns_to_go", "timesteps")
        predicted = self.model(**dict(zip(names, inputs[:4], strict=True))).action_preds
        return torch.nn.functional.mse_loss(predicted, inputs[4]) if len(inputs) > 4 else predicted


def decision_transformer(batch: int = 4, steps: int = 5, layers: int = 2, loss: bool = True) -> Built:
    """Reinforcement learning as a sequence: three tokens a step."""
    sizes = {"state_dim": 7, "act_dim": 3, "hidden_size": WIDTH, "max_ep_len": 20, "n_layer": layers, "n_head": HEADS}
    model = hf.DecisionTransformerModel(hf.DecisionTransformerConfig(**sizes))
    states, actions, returns = (torch.randn(batch, steps, size) for size in (7, 3, 1))
    inputs = (states, actions, returns, torch.randint(0, 20, (batch, steps)), torch.randn(batch, steps, 3))
    return Decisions(model), inputs[: 4 + loss]


def autoformer(batch: int = 4, past: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Series taken apart into trend and season, correlated with themselves by Fourier transforms."""
    return _seasons("Autoformer", batch, past, layers, label_length=2, moving_average=3)


def informer(batch: int = 4, past: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Attention of the queries that say most, layers that halve the length."""
    return _seasons("Informer", batch, past, layers, attention_type="prob", distil=True)


def _seasons(name: str, batch: int, past: int, layers: int, **more: Any) -> Built:
    sizes = {"prediction_length": 4, "context_length": past, "lags_sequence": [1, 2], "num_time_features": 1}
    sizes |= {"d_model": WIDTH, "encoder_layers": layers, "decoder_layers": layers, "encoder_layerdrop": 0.0}
    config = getattr(hf, f"{name}Config")(**sizes, decoder_layerdrop=0.0, **more)
    history = (batch, past + 2)
    inputs = (torch.randn(history), torch.randn(*history, 1), torch.ones(history), torch.randn(batch, 4))
    names = ("past_values", "past_time_features", "past_observed_mask", "future_values", "future_time_features")
    return Task(getattr(hf, f"{name}ForPrediction")(config), names, "params"), (*inputs, torch.randn(batch, 4, 1))
