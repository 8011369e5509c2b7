"""Small models for one feature each; `capture(spec("name"), arguments)` builds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]


def spec(name: str) -> str:
    return f"{Path(__file__)}:{name}"


class Classifier(nn.Module):
    """Weighted, smoothed cross entropy, and the log-likelihood of other classes of the same rows."""

    def __init__(self, features: int, classes: int, smoothing: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(features, 12), nn.Linear(12, classes)
        self.smoothing = smoothing
        self.register_buffer("weights", torch.linspace(0.5, 2.0, classes))

    def forward(self, x: Tensor, labels: Tensor, others: Tensor) -> Tensor:
        y = self.outer(F.gelu(self.inner(x)))
        loss = F.cross_entropy(y, labels, self.weights, label_smoothing=self.smoothing)
        return loss + F.nll_loss(F.log_softmax(y, -1), others, self.weights)


def weighted(rows: int = 6, classes: int = 7, smoothing: float = 0.1) -> Built:
    labels = (torch.randint(0, classes, (rows,)) for _ in range(2))
    return Classifier(5, classes, smoothing), (torch.randn(rows, 5), *labels)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bce": lambda y, t: F.binary_cross_entropy(y.sigmoid(), t),
    "bce_logits": lambda y, t: F.binary_cross_entropy_with_logits(y, t, pos_weight=torch.full((4,), 3.0)),
    "huber": lambda y, t: F.huber_loss(y, t, delta=0.5),
    "kl": lambda y, t: F.kl_div(F.log_softmax(y, -1), t, reduction="batchmean"),
    "l1": lambda y, t: F.l1_loss(y, t),
    "smooth_l1": lambda y, t: F.smooth_l1_loss(y, t, beta=0.3),
    "soft": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.2),
    "soft_margin": lambda y, t: F.soft_margin_loss(y, t * 2 - 1),
}


class Regression(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(5, 4), kind

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return LOSSES[self.kind](self.layer(x), target)


def regression(kind: str, rows: int = 6) -> Built:
    return Regression(kind), (torch.randn(rows, 5), torch.rand(rows, 4))


def mixtral(form: str = "batched_mm", experts: int = 4, batch: int = 4, sequence: int = 4) -> Built:
    """The library's Mixtral with one layer; `form` is how its experts are written."""
    import transformers as hf

    from tests.models.common import language

    config = hf.MixtralConfig(
        vocab_size=37, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=12, num_local_experts=experts, num_experts_per_tok=2, use_cache=False,
        bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    config._experts_implementation = form
    return language(hf.MixtralForCausalLM(config), batch, sequence, True)
