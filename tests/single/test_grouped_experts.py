"""Experts' products in one kernel: the same numbers as one expert after another, and the host waits for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.emit.runtime import experts, parallel_experts

TOKENS, SIZE, INNER, EXPERTS = 24, 16, 8, 5
FORMS: list[dict[str, Any]] = [
    {"activation": "silu", "gated": True}, {"activation": "gelu_tanh", "gated": False},
    {"activation": "clipped", "gated": True, "limit": 1.0, "alpha": 1.7},
]  # fmt: skip


def operands(form: dict[str, Any], dtype: torch.dtype, size: int = SIZE) -> list[Tensor]:
    torch.manual_seed(3)
    inner = INNER * (1 + form["gated"])
    shapes: list[tuple[int, ...]] = [(TOKENS, size), (EXPERTS, inner, size), (EXPERTS, size, INNER)]
    if form["activation"] == "clipped":
        shapes = [shapes[0], (EXPERTS, size, inner), (EXPERTS, INNER, size)]
    x, up, down = (torch.randn(shape, dtype=dtype) for shape in shapes)
    chosen = torch.randint(0, EXPERTS - 1, (TOKENS, 2))
    chosen[chosen == 1] = 0  # two experts have no tokens, one of them the last
    biases = [torch.randn(EXPERTS, n, dtype=dtype) for n in (inner, size)] if form["activation"] == "clipped" else []
    return [x, up, down, chosen, torch.rand(TOKENS, 2, dtype=dtype), *biases]


def results(form: dict[str, Any], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    y = parallel_experts(*leaves, experts=EXPERTS, **form)
    wanted = [t for t in leaves if t.requires_grad]
    return [y, *torch.autograd.grad(y.square().sum(), wanted)]


def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever brings a number to the host fails."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the host waits for the device")

    for name in ("tolist", "item", "nonzero", "cpu"):
        monkeypatch.setattr(Tensor, name, fail)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["activation"])
def test_one_kernel_has_the_numbers_of_one_expert_after_another(
    form: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = operands(form, dtype)
    with monkeypatch.context() as patch:
        patch.setattr(experts, "_knows_groups", lambda device: False)
        one_by_one = results(form, inputs)
    with monkeypatch.context() as patch:
        unasked(patch)
        grouped = results(form, inputs)
    for expected, got in zip(one_by_one, grouped, strict=True):
        torch.testing.assert_close(got, expected)
    assert not grouped[2][-1].any()  # of an expert without tokens


def test_no_tokens_at_all() -> None:
    inputs = operands(FORMS[0], torch.float32)
    inputs = [t[:0] if i in (0, 3, 4) else t for i, t in enumerate(inputs)]
    y, *gradients = results(FORMS[0], inputs)
    assert y.shape == (0, SIZE) and not any(g.any() for g in gradients)


WHYS = ("float64", "rows of 18 bytes", "a view of odd bytes", "autocast", "dtypes", "the device")


@pytest.mark.parametrize("why", WHYS)
def test_what_the_kernel_does_not_take_goes_one_by_one(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS[0]
    inputs = operands(form, torch.float64 if why == "float64" else torch.float32, 9 if why.startswith("rows") else SIZE)
    x, up, down = inputs[:3]
    if why == "a view of odd bytes":
        up = torch.cat([up.new_zeros(1), up.flatten()])[1:].view_as(up)
    if why == "dtypes":
        x = x.bfloat16()
    monkeypatch.setattr(experts, "_knows_groups", lambda device: device == "cpu" and why != "the device")
    with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
        assert not experts._can_group(x, [up, down])
        if why != "dtypes":
            results(form, [x, up, down, *inputs[3:]])
