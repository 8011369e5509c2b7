"""Mixed precision against torch itself: its own lists, and each operator's dtype as it runs under autocast."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.graph_capture.capture import capture_model
from autoshard.graph_capture.training.precision import HIGH, HIGH_UNLESS_TOLD, LOW, WIDEST
from autoshard.graph_capture.two_runs.autocast import autocast_as_planned
from tests.slow import quick_at


def listed(name: str) -> set[str]:
    """The operators of one of torch's lists."""
    text = Path(torch.__file__).with_name("include").joinpath("ATen/autocast_mode.h").read_text()
    lines = text[text.index(f"#define {name}(") :].splitlines()
    end = next(number for number, line in enumerate(lines) if not line.rstrip().endswith("\\"))
    return {f"aten.{name}" for name in re.findall(r"_\((\w+)", "\n".join(lines[: end + 1]))} - {"aten.ADD_NS"}


def test_the_lists_are_those_of_torch() -> None:
    assert listed("AT_FORALL_LOWER_PRECISION_FP") <= LOW
    assert listed("AT_FORALL_FP32") <= HIGH
    assert listed("AT_FORALL_FP32_SET_OPT_DTYPE") <= HIGH_UNLESS_TOLD
    assert listed("AT_FORALL_PROMOTE") == WIDEST
    assert not LOW & (HIGH | HIGH_UNLESS_TOLD | WIDEST) and not HIGH & HIGH_UNLESS_TOLD


class Operator(nn.Module):
    """One operator of `low`, which a linear made in low precision, and of `wide`, which is as the input is."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.wide, self.compute = nn.Linear(8, 8), nn.Parameter(torch.rand(4, 8)), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.linear(x).abs() + 0.5, self.wide.abs() + 0.25)


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "add": lambda low, wide: low + wide,
    "mul": lambda low, wide: low * low,
    "relu": lambda low, wide: low.relu(),
    "gelu": lambda low, wide: F.gelu(low),
    "silu": lambda low, wide: F.silu(low),
    "sigmoid": lambda low, wide: low.sigmoid(),
    "tanh": lambda low, wide: low.tanh(),
    "sqrt": lambda low, wide: low.sqrt(),
    "rsqrt": lambda low, wide: low.rsqrt(),
    "exp": lambda low, wide: low.exp(),
    "log": lambda low, wide: low.log(),
    "pow": lambda low, wide: low**3,
    "square": lambda low, wide: low.square(),
    "reciprocal": lambda low, wide: low.reciprocal(),
    "div": lambda low, wide: low / wide,
    "cat": lambda low, wide: torch.cat([low, wide]),
    "stack": lambda low, wide: torch.stack([low, low]),
    "where": lambda low, wide: torch.where(wide > 0.5, low, wide),
    "mean": lambda low, wide: low.mean(-1),
    "sum": lambda low, wide: low.sum(-1),
    "sum in its own dtype": lambda low, wide: low.sum(-1, dtype=torch.bfloat16),
    "var": lambda low, wide: low.var(-1),
    "amax": lambda low, wide: low.amax(-1),
    "norm": lambda low, wide: low.norm(),
    "norm of rows": lambda low, wide: torch.linalg.norm(low, dim=-1),
    "vector_norm": lambda low, wide: torch.linalg.vector_norm(low, dim=-1),
    "normalize": lambda low, wide: F.normalize(low),
    "pairwise_distance": lambda low, wide: F.pairwise_distance(low, wide),
    "cosine_similarity": lambda low, wide: F.cosine_similarity(low, wide),
    "softmax": lambda low, wide: low.softmax(-1),
    "softmax in float32": lambda low, wide: low.softmax(-1, dtype=torch.float32),
    "log_softmax": lambda low, wide: low.log_softmax(-1),
    "logsumexp": lambda low, wide: low.logsumexp(-1),
    "cumsum": lambda low, wide: low.cumsum(-1),
    "prod": lambda low, wide: low.prod(-1),
    "softplus": lambda low, wide: F.softplus(low),
    "matmul": lambda low, wide: low @ wide.t(),
    "einsum": lambda low, wide: torch.einsum("bi,oi->bo", low, wide),
    "addmm": lambda low, wide: torch.addmm(wide[:, :4], low, wide.t()),
    "bmm": lambda low, wide: torch.bmm(low[None], wide.t()[None]),
    "outer": lambda low, wide: torch.outer(low[0], wide[0]),
    "dot": lambda low, wide: torch.dot(low[0], wide[0]),
    "tensordot": lambda low, wide: torch.tensordot(low, wide, dims=([1], [1])),
    "bilinear": lambda low, wide: F.bilinear(low, wide, wide[:, :, None].expand(4, 8, 8)),
    "addcmul": lambda low, wide: torch.addcmul(low, wide, wide),
    "atan2": lambda low, wide: torch.atan2(low, wide),
    "layer_norm": lambda low, wide: F.layer_norm(low, (8,), wide[0], wide[1]),
    "rms_norm": lambda low, wide: F.rms_norm(low, (8,), wide[0]),
    "group_norm": lambda low, wide: F.group_norm(low, 2, wide[0], wide[1]),
    "batch_norm": lambda low, wide: F.batch_norm(low, None, None, wide[0], wide[1], training=True),
    "instance_norm": lambda low, wide: F.instance_norm(low[None], weight=wide[0, :4], bias=wide[1, :4]),
    "prelu": lambda low, wide: F.prelu(low, wide[0]),
    "conv1d": lambda low, wide: F.conv1d(low[None], wide[:, :4, None]),
    "avg_pool": lambda low, wide: F.avg_pool1d(low[None], 2),
    "max_pool": lambda low, wide: F.max_pool1d(low[None], 2),
    "interpolate": lambda low, wide: F.interpolate(low[None], scale_factor=2),
    "attention": lambda low, wide: F.scaled_dot_product_attention(low[None], wide[None], wide[None]),
    "dropout": lambda low, wide: F.dropout(low, 0.0),
    "embedding": lambda low, wide: F.embedding(torch.tensor([1, 2]), wide),
    "cross_entropy": lambda low, wide: F.cross_entropy(low, torch.tensor([0, 1, 2, 3])),
    "nll_loss": lambda low, wide: F.nll_loss(low, torch.tensor([0, 1, 2, 3])),
    "mse_loss": lambda low, wide: F.mse_loss(low, wide),
    "l1_loss": lambda low, wide: F.l1_loss(low, wide),
    "smooth_l1_loss": lambda low, wide: F.smooth_l1_loss(low, wide),
    "huber_loss": lambda low, wide: F.huber_loss(low, wide),
    "kl_div": lambda low, wide: F.kl_div(low, wide, reduction="batchmean"),
    "binary_cross_entropy": lambda low, wide: F.binary_cross_entropy(low.sigmoid(), wide.sigmoid()),
    "binary_cross_entropy_with_logits": lambda low, wide: F.binary_cross_entropy_with_logits(low, wide.sigmoid()),
    "float": lambda low, wide: low.float(),
    "float of a view": lambda low, wide: low.view(2, 2, 8).float() * 2,
    "to float32": lambda low, wide: low.to(torch.float32).mean(-1),
    "to another's dtype": lambda low, wide: low.type_as(wide) * 2,
    "to its own dtype": lambda low, wide: low.to(low.dtype) * 2,
    "to its own dtype, and to float32": lambda low, wide: low.to(low.dtype) * low.to(torch.float32),
    "what asks for a type": lambda low, wide: low.float() * (2 if low.type() else 1),
    "itself and its float": lambda low, wide: low * low.float(),
    "itself by its float, thrice": lambda low, wide: low * low.float() + low.float(),
    "itself after its float": lambda low, wide: (low.float().exp(), low)[1],
    "twice itself after its float": lambda low, wide: (low.float().exp(), low * 2)[1],
    "itself after a write to its float": lambda low, wide: (low.float().add_(1), low)[1],
}


@pytest.mark.parametrize("name", quick_at(OPERATORS, 18, 24, 30, 42, 60, 78))
def test_dtypes_are_those_of_autocast(name: str) -> None:
    module, x = Operator(OPERATORS[name]), torch.rand(4, 8)
    with autocast_as_planned("bf16-mixed"):
        output = module(x)
    output.sum().backward()
    graph = capture_model(module, (x,), "bf16-mixed")
    assert graph.tensor(graph.outputs[0]).dtype == str(output.dtype).removeprefix("torch.")


@pytest.mark.parametrize("name", ["matmul", "einsum", "add", "mul", "bmm", "conv1d", "binary_cross_entropy", "prod"])
def test_the_same_on_the_cpu_itself(name: str) -> None:
    """These are in both CUDA's and the CPU's lists, or in neither: the replaced lists change nothing about them."""
    module, x = Operator(OPERATORS[name]), torch.rand(4, 8)
    with autocast_as_planned("bf16-mixed"):
        planned = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        native = module(x)
    assert planned.dtype == native.dtype
    assert torch.equal(planned, native)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # CPU's lists are back: layer norm follows its input there
        assert F.layer_norm(module.linear(x), (8,)).dtype == torch.bfloat16
