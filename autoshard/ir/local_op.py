"""An operator on one device: the tensors that it holds there. All that its seconds and its temporaries depend on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from autoshard.ir.graph import DTYPE_BYTES, Op, Saved


@dataclass(frozen=True)
class LocalTensor:
    """A tensor as one device holds it: its local shape."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def bytes(self) -> int:
        return self.numel * self.item_bytes


_NOTHING = Saved()


@dataclass(frozen=True)
class LocalOp:
    """An operator on local tensors: all its seconds depend on. `extra_bytes` is the local part of what it saves."""

    target: str
    operands: tuple[LocalTensor | None, ...]
    results: tuple[LocalTensor, ...]
    saved: Saved = _NOTHING
    extra_bytes: float = 0.0
    causal: bool = False
    variant: str = ""

    def operand(self, position: int) -> LocalTensor:
        """An operand that must be there."""
        tensor = self.operands[position]
        assert tensor is not None, (self.target, position)
        return tensor


def local_op(
    op: Op, operands: tuple[LocalTensor | None, ...], results: tuple[LocalTensor, ...], extra_bytes: float, variant: str
) -> LocalOp:
    """The local operator of a graph operator; `extra_bytes` is what one device saves beside values."""
    causal = any(name == "is_causal" and value is True for name, value in op.attributes)
    return LocalOp(op.target, operands, results, _of_values(op.saved), extra_bytes, causal, variant)


@lru_cache(maxsize=1024)
def _of_values(saved: Saved) -> Saved:
    return replace(saved, extra_bytes=0)
