"""What the runtime's kernels read and write of a rotation is what it is priced by."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoshard.costs.compute import traffic
from autoshard.emit.runtime.rotary import rotate_half
from autoshard.ir.local_op import LocalOp, LocalTensor


class Passed(TorchDispatchMode):
    """Bytes that kernels read and write; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.neg.default, torch.ops.aten.cat.default):
            tensors = [x for x in (*tree_leaves(args), *tree_leaves(result)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        else:
            assert func in (torch.ops.aten.split.Tensor, torch.ops.aten.detach.default, torch.ops.aten.alias.default), (
                func
            )
        return result


def test_bytes_either_way() -> None:
    x = torch.randn(2, 4, 8, 16, requires_grad=True)
    local = LocalTensor(tuple(x.shape), "float32", True)
    expected = traffic(LocalOp("autoshard.rotate_half", (local,), (local,)))
    with Passed() as forward:
        turned = rotate_half(x)
    gradient = torch.randn_like(turned)
    with Passed() as backward:
        torch.autograd.grad(turned, x, gradient)
    assert (forward.bytes, backward.bytes) == expected
