"""A stage of a pipeline that receives into memory of its own for no longer than a micro-batch needs it.

torch.distributed.pipelining makes a buffer for every micro-batch of a step at once, of activations and of gradients.
Here it makes them on the meta device, which is no memory. One is real from when its receive is posted until the
micro-batch's backward on this stage has ended. None is written to twice: what autograd or a collective still holds of
one, as a gradient that is a view of it, stays as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage


class ReceivingStage(PipelineStage):
    """Where a version of torch makes its buffers otherwise, they are as it makes them, and a warning says so."""

    device: torch.device

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.real: dict[int, list[tuple[Any, Tensor]]] = {}  # by micro-batch: what is received, its meta tensor
        # Of each micro-batch, where sizes are dynamic: what is handed to this stage, and the gradients it is given.
        self.received: list[tuple[list[Tensor], list[Tensor]]] = []

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The first transfers of all, which open the connections: up to torch 2.9 a sender gives 8 bytes to a receiver
        of 4, which ends a process under gloo."""
        transfers: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        for transfer in transfers:
            transfer.tensor = transfer.tensor.new_zeros(1, dtype=torch.float32)
        return transfers

    def _prepare_forward_infra(self, *args: Any, **options: Any) -> Any:
        found = self._without_memory(super()._prepare_forward_infra, *args, **options)
        self._tell(self.args_recv_info)
        return found

    def _prepare_backward_infra(self, *args: Any, **options: Any) -> Any:
        found = self._without_memory(super()._prepare_backward_infra, *args, **options)
        self._tell(self.grad_recv_info)
        return found

    def _without_memory(self, prepare: Any, *args: Any, **options: Any) -> Any:
        device, self.device = self.device, torch.device("meta")
        try:
            return prepare(*args, **options)
        finally:
            self.device = device

    def _tell(self, received: dict[int, Any]) -> None:
        buffers = [getattr(one, "buffer", None) for one in received.get(0, ())]
        if any(isinstance(buffer, Tensor) and not buffer.is_meta for buffer in buffers):
            warnings.warn(
                f"torch {torch.__version__} makes the receive buffers of all micro-batches at once: this stage holds "
                "more than was predicted",
                stacklevel=2,
            )

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        self._make(fwd_chunk_id, self.args_recv_info[fwd_chunk_id], 0)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        self._make(bwd_chunk_id, self.grad_recv_info.get(bwd_chunk_id, ()), 1)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _make(self, micro_batch: int, received: Iterable[Any], kind: int) -> None:
        """`kind`: 0 of what is handed on, 1 of gradients."""
        shapes = list(self.received[micro_batch][kind]) if self.received else []
        metas = [(one, meta) for one in received if isinstance(meta := getattr(one, "buffer", None), Tensor)]
        if kind and len(shapes) > len(metas):
            shapes = [shape for shape in shapes if shape.requires_grad]
        for place, (one, meta) in enumerate(metas):
            if meta.is_meta:
                like = shapes[place] if shapes else meta
                one.buffer = torch.empty_like(
                    like, dtype=meta.dtype, device=self.device, requires_grad=meta.requires_grad
                )
                self.real.setdefault(micro_batch, []).append((one, meta))

    def _validate_fwd_input(self, *args: Any, **options: Any) -> None:
        """torch's check is of the shapes of the first step; with dynamic sizes each step has its own."""
        if not self.received:
            super()._validate_fwd_input(*args, **options)

    def _validate_fwd_outputs(self, *args: Any, **options: Any) -> None:
        if not self.received:
            super()._validate_fwd_outputs(*args, **options)

    def _validate_stage_tensors(self, *args: Any, **options: Any) -> None:
        if not self.received:
            super()._validate_stage_tensors(*args, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, *args: Any, **options: Any) -> Any:
        found = super().backward_one_chunk(bwd_chunk_id, loss, *args, **options)
        if isinstance(loss, Tensor) and not loss._is_view():
            loss.detach_()  # the schedule holds it until the step ends, and with it the leaves of its graph
        self._let_go(bwd_chunk_id)
        return found

    def _let_go(self, micro_batch: int) -> None:
        for one, meta in self.real.pop(micro_batch, ()):
            one.buffer = meta

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        for micro_batch in list(self.real):  # of a step that failed
            self._let_go(micro_batch)
