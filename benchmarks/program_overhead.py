"""A step of GPT-2 in a program of one's own, by `parallelize` and by `shard`, compared with the emitted package's.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.program_overhead --mesh tp=2
    torchrun --standalone --nproc-per-node 2 -m benchmarks.program_overhead --mesh dp=2 --strategy fsdp

In the same processes, taking turns, forward, backward and AdamW; all three from the same mesh and profile. Medians of
rank 0; processor time is that of the whole process. All of them return the loss alone.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import autoshard
from benchmarks import harness


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, labels=labels, use_cache=False).loss
        return loss


def model_of(options: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_layer": options.layers, "n_embd": options.width, "n_head": 8, "n_positions": options.sequence}
    config = GPT2Config(**sizes, **none, vocab_size=1024, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(0, 1024, (options.batch, options.sequence))
    return Loss(GPT2LMHeadModel(config)), ids


def package_step(plan: Any, ids: Tensor) -> Callable[[], object]:
    """One step of the package, imported as its train.py is, after ranks have agreed on the sizes of its batch."""
    folder = [tempfile.mkdtemp() + "/package" if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        autoshard.write(plan, folder[0])
    dist.barrier()
    for own in Path(folder[0]).rglob("*.py"):  # of the package before
        sys.modules.pop(own.stem, None)
        sys.modules.pop(f"runtime.{own.stem}", None)
    sys.modules.pop("runtime", None)
    sys.path.insert(0, folder[0])
    import batches  # type: ignore[import-not-found]
    import evaluation  # type: ignore[import-not-found]
    import model_parallel  # type: ignore[import-not-found]
    import train  # type: ignore[import-not-found]
    from runtime import ParallelMesh  # type: ignore[import-not-found]

    mesh = ParallelMesh.from_environment(dict(plan.plan.mesh.axes), "gloo")
    model = model_parallel.build_model(mesh)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.to_local() if hasattr(parameter, "to_local") else parameter, std=0.02)
    optimizer = train.make_optimizer(model)
    local = [batches.local_part(name, ids, mesh) for name in ("ids", "labels")]

    def step() -> object:
        train.agree([local], mesh, 0)
        optimizer.zero_grad()
        loss = train.compute_gradients(model, mesh, local)[0]
        optimizer.step()
        return evaluation.whole_loss(loss, mesh)

    return step


def eager_step(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    model(ids, ids)  # a sharded module has its parts from its first call on
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> object:
        optimizer.zero_grad()
        loss = model(ids, ids)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mesh", default="tp=2")
    parser.add_argument("--strategy", default="best")
    for name, value in {"layers": 12, "width": 128, "sequence": 64, "batch": 4, "rounds": 25}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    model, ids = model_of(options)
    where: dict[str, Any] = {"hardware": "cpu-local", "mesh": options.mesh}
    plan = autoshard.plan(model, (ids, ids), **where, strategy=options.strategy)
    sharded = autoshard.shard(copy.deepcopy(model), level=2, **where)
    dynamic = f"batch=2..{options.batch}/2,sequence=2..{options.sequence}/2"
    ways = {
        "package": package_step(plan, ids),
        "dynamic sizes": package_step(
            autoshard.plan(model, (ids, ids), **where, strategy=options.strategy, dynamic=dynamic), ids
        ),
        "parallelize": eager_step(autoshard.parallelize(model, plan), ids),
        "shard (best plan)": eager_step(sharded, ids),
    }
    taken = harness.in_turns(ways, options.rounds)
    if dist.get_rank() == 0:
        print(f"{options.mesh}, {options.strategy}: wall and processor milliseconds a step, relative to the package's")
        medians = {name: (own["wall"], own["cpu"]) for name, own in taken.items()}
        for name, (wall, busy) in medians.items():
            first = medians["package"]
            print(f"{name:18} {wall * 1e3:8.1f} {busy * 1e3:8.1f} {wall / first[0]:6.2f} {busy / first[1]:6.2f}")
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
