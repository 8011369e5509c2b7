"""GPT-2 from Hugging Face transformers, with its next-token loss."""

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

# Small sizes for the proof. 12 heads and the batch stay; 97 words divide over 2, 4 and 8 devices as unevenly as 50257.
VERIFY = {"n_layer": 2, "sequence": 16, "n_embd": 96, "vocabulary": 97}


class GPT2(GPT2LMHeadModel):
    """The library's model, its parameter names unchanged; forward returns the loss alone."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(input_ids=input_ids, labels=labels, use_cache=False).loss


def build(
    batch: int = 4,
    sequence: int = 256,
    n_layer: int = 12,
    n_embd: int = 768,
    n_head: int = 12,
    vocabulary: int = 50257,
    dropout: float = 0.1,
) -> tuple[GPT2, tuple[Tensor, Tensor]]:
    """The model (random weights, no download), and one example batch: input ids and labels, both (batch, sequence)."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=max(sequence, 1024),
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_head,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2(config)
    model.loss_type = "ForCausalLM"
    input_ids = torch.randint(0, vocabulary, (batch, sequence))
    return model, (input_ids, input_ids)
