"""flex_attention is attention with a dense mask, as torch's own forward of it says; such models are planned."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from autoshard.cli import commands
from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing.flex_attention import dense_flex_attention

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 3, 3]])
MASKS: dict[str, Callable[..., torch.Tensor] | None] = {
    "none": None,
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 3),
    "documents": lambda b, h, q, k: (q >= k) & (DOCUMENTS[b, q] == DOCUMENTS[b, k]),
    "of heads": lambda b, h, q, k: (h % 2 == 0) | (q >= k),
    "rows without any": lambda b, h, q, k: (q > 1) & (q >= k),
    "nothing of indices but batches": lambda b, h, q, k: b >= 0,
}
SCORES: dict[str, Callable[..., torch.Tensor] | None] = {
    "plain": None,
    "alibi": lambda s, b, h, q, k: s + (k - q) * 0.5 ** (h + 1.0),
    "soft cap": lambda s, b, h, q, k: 3 * torch.tanh(s / 3),
}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", MASKS)
def test_it_is_what_torch_computes(mask: str, score: str) -> None:
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 8, 16, generator=draw) for heads in (4, 2, 2))
    mask_mod = MASKS[mask]
    block = None if mask_mod is None else create_block_mask(mask_mod, 2, 4, 8, 8, device="cpu")
    how = {"score_mod": SCORES[score], "block_mask": block, "enable_gqa": True, "scale": 0.3}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        wanted = flex_attention(q, k, v, **how)
        with dense_flex_attention() as called:
            output = flex_attention(q, k, v, **how)
        assert len(called) == 1
    assert torch.allclose(output, wanted, atol=1e-5) and not output.isnan().any()


def test_what_is_not_a_dense_mask_is_refused() -> None:
    q = torch.randn(1, 1, 256, 16)
    blocks = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    )
    with dense_flex_attention():
        with pytest.raises(CaptureError, match="blocks alone"):
            flex_attention(q, q, q, block_mask=blocks)
        with pytest.raises(CaptureError, match="log-sum-exp"):
            flex_attention(q, q, q, return_aux=AuxRequest(lse=True))
    with pytest.raises(NotImplementedError, match="backward on CPU"):  # torch's own again
        flex_attention(q.requires_grad_(), q, q)


MODEL = """
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

compiled = torch.compile(flex_attention)

class Attention(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.call = call

    def forward(self, x, ends):
        documents = ends.cumsum(1)
        def mask(b, h, q, k):
            return (q >= k) & (documents[b, q] == documents[b, k])
        b, s, _ = x.shape
        q = self.q(x).view(b, s, 4, 8).transpose(1, 2)
        k, v = self.kv(x).view(b, s, 2, 2, 8).permute(3, 0, 2, 1, 4).unbind(0)
        block = create_block_mask(mask, b, None, s, s, device=x.device)
        y = self.call(q, k, v, block_mask=block, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, s, 32)).square().mean()

def plain():
    return Attention(flex_attention), (torch.randn(4, 16, 32), (torch.rand(4, 16) < 0.2).long())

def fast():
    return Attention(compiled), (torch.randn(4, 16, 32), (torch.rand(4, 16) < 0.2).long())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "fast"])
def test_documents_as_torchtitan_masks_them(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.py").write_text(textwrap.dedent(MODEL), encoding="utf-8")
    words = ["plan", f"{tmp_path / 'm.py'}:{name}", "--mesh", "dp=2,tp=2", "--hardware", "cpu-local"]
    assert commands.main([*words, "--out", str(tmp_path / "o"), "--verify", "--backend", "lockstep"]) == 0
    printed = capsys.readouterr()
    assert "verified on dp=2,tp=2" in printed.out
    assert "flex_attention is attention with a dense mask" in printed.err
