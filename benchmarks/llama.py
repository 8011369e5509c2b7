"""Llama of Hugging Face transformers from configuration, with its loss, for `search_scale.py`."""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


class Llama(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(input_ids=input_ids, labels=labels, use_cache=False).loss


def llama(
    batch: int = 64, sequence: int = 1024, layers: int = 8, heads_of_keys: int = 4
) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """2048 wide, 16 heads: the sizes of the models of one to two billion parameters."""
    sizes = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 4096}
    heads = {"num_attention_heads": 16, "num_key_value_heads": heads_of_keys}
    model = Llama(LlamaConfig(**sizes, **heads, num_hidden_layers=layers))
    model.loss_type = "ForCausalLM"
    words = torch.randint(1, 32000, (batch, sequence))
    return model, (words, words.clone())


def sized(
    batch: int = 4, sequence: int = 2048, layers: int = 12, hidden: int = 1024, inner: int = 2816, heads: int = 16,
    heads_of_keys: int = 16, words: int = 32000,
) -> tuple[Llama, tuple[Tensor, Tensor]]:  # fmt: skip
    """Of any size, without values: for plans alone."""
    with torch.device("meta"):
        config = LlamaConfig(
            vocab_size=words, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads_of_keys, max_position_embeddings=8192,
        )  # fmt: skip
        model = Llama(config)
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(1, words, (batch, sequence))
    return model, (tokens, tokens.clone())
