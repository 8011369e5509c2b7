"""One gloo process, a stage of a pipeline: `python -m tests.receiving_worker FOLDER`, in the environment of torchrun.

`rank<n>.json` has, by schedule, how many receive buffers were real at once, how many tensors with those that were sent,
and the gradients.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from autoshard.emit.runtime.pipeline import SCHEDULES
from autoshard.emit.runtime.receive_buffers import ReceivingStage

STAGES, WIDTH, MICRO_BATCHES = 3, 8, 6


def part(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def whole(chunks: int) -> list[nn.Module]:
    return [part(number) for number in range(STAGES * chunks)]


def batch() -> Tensor:
    return torch.randn(MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


class Counted(ReceivingStage):
    """`most[kind]`: of inputs (F) and gradients (B) while something is computed; `together`: at once, of all stages of
    this process, with what was sent."""

    everything: ClassVar[list[Any]] = []
    together: ClassVar[list[int]] = []

    def begin(self) -> None:
        self.storages: list[tuple[str, Any]] = []
        self.most: Counter[str] = Counter()
        self.everything.clear()
        self.together[:] = [0]

    def _sent(self, ops: list[Any]) -> list[Any]:
        self.everything.extend(weakref.ref(op.tensor.untyped_storage()) for op in ops)
        return ops

    def get_fwd_send_ops(self, *args: Any) -> Any:
        return self._sent(super().get_fwd_send_ops(*args))

    def get_bwd_send_ops(self, *args: Any) -> Any:
        return self._sent(super().get_bwd_send_ops(*args))

    def _make(self, micro_batch: int, received: Any, kind: int) -> None:
        received = list(received)
        super()._make(micro_batch, received, kind)
        kind = "F" if received and received[0] is self.args_recv_info[micro_batch][0] else "B"
        tensors = [one.buffer for one in received if getattr(one, "buffer", None) is not None]
        self.storages += [(kind, weakref.ref(tensor.untyped_storage())) for tensor in tensors]
        self.everything.extend(weakref.ref(tensor.untyped_storage()) for tensor in tensors)

    def _take_turns(self, buffers: int) -> None:
        """A fault: there are only so many, which micro-batches have in turn."""
        held: dict[tuple[str, int], Tensor] = {}
        for kind, infos in (("F", self.args_recv_info), ("B", self.grad_recv_info)):
            for micro_batch, received in infos.items():
                for one in received:
                    if getattr(one, "buffer", None) is not None:
                        new = torch.empty_like(one.buffer, device=self.device)
                        one.buffer = held.setdefault((kind, micro_batch % buffers), new)

    def _count(self) -> None:
        alive = Counter(kind for kind, storage in self.storages if storage() is not None)
        self.most |= alive
        self.together[0] = max(self.together[0], len({id(own) for own in (s() for s in self.everything) if own}))

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        self._count()
        return super().forward_one_chunk(*args, **options)

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        self._count()
        return super().backward_one_chunk(*args, **options)


def ran(schedule: str, rank: int, turns: int = 0) -> dict[str, Any]:
    """`turns`: only so many buffers, in turn."""
    chunks = 2 if schedule == "interleaved" else 1
    count, numbers = STAGES * chunks, range(rank, STAGES * chunks, STAGES)
    meta = torch.empty(1, WIDTH, dtype=torch.float64, device="meta", requires_grad=True)
    models = [whole(chunks)[number] for number in numbers]
    made = [
        Counted(model, number, count, torch.device("cpu"), input_args=(meta,), output_args=(meta,))
        for number, model in zip(numbers, models, strict=True)
    ]
    stages = made if chunks > 1 else made[0]
    run = getattr(pipelining, SCHEDULES[schedule])(stages, MICRO_BATCHES, loss_fn=loss, scale_grads=False)
    for step in range(2):
        for stage in made:
            stage.begin()
            if turns and step:
                stage._take_turns(turns)
        given = {"target": batch()} if rank == STAGES - 1 else {}
        run.step(*((batch(),) if rank == 0 else ()), **given, return_outputs=False)
    return {
        "most": {stage.stage_index: [stage.most["F"], stage.most["B"]] for stage in made},
        "together": Counted.together[0],
        "left": sum(storage() is not None for stage in made for _, storage in stage.storages),
        "gradients": {
            number: [p.grad.tolist() for p in model.parameters() if p.grad is not None]
            for number, model in zip(numbers, models, strict=True)
        },
    }


def loss(y: Tensor, _: Tensor) -> Tensor:
    return y.square().sum()


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {schedule: ran(schedule, rank) for schedule in SCHEDULES}
    found["one too few"] = ran("gpipe", rank, MICRO_BATCHES - 1)
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
