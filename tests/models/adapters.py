"""Models with low-rank adapters of the peft library: `NAME(batch, sequence, layers, loss)`."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.models import decoders, encoders
from tests.models.common import Built, Task


def _adapted(built: Built, **options: Any) -> Built:
    """The same with adapters; all else is frozen."""
    import peft

    task, inputs = built
    assert isinstance(task, Task)
    inner: nn.Module = peft.get_peft_model(task.model, peft.LoraConfig(r=4, lora_alpha=8, **options))
    return Task(inner, task.names, task.result), inputs


def lora_llama(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    return _adapted(decoders.llama(batch, sequence, layers, loss), target_modules=["q_proj", "v_proj"])


def lora_gpt2(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """On a fused projection, with dropout before the adapter."""
    options = {"target_modules": ["c_attn"], "lora_dropout": 0.1, "fan_in_fan_out": True}
    return _adapted(decoders.gpt2(batch, sequence, layers, loss), **options)


def dora_bert(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    """Adapters whose columns have lengths of their own."""
    return _adapted(encoders.bert(batch, sequence, layers, loss), target_modules=["query", "value"], use_dora=True)
