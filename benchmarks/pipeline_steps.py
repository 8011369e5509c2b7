"""An emitted two-stage GPT-2 beside a hand-written script on torch.distributed.pipelining, in one process group.

    python -m benchmarks.pipeline_steps --sizes small [--write]

Both have the same stages, micro-batches and schedule, sum the tied embedding's gradient over the stages, clip by the
norm and update with the fused AdamW. Steps take turns, so that what else the machine does meets both alike. Medians
over the rounds of the processor time of both processes together, all threads, and of the wall time of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.overlap_models import FILE, MODELS

STAGES = 2
Step = Callable[[], Any]


# --- the emitted package ---


def write_package(size: str, micro_batches: int, folder: Path) -> int:
    """Returns the number of blocks on the first stage."""
    from autoshard.cluster.hardware import load_hardware
    from autoshard.constraints.step_request import StepRequest, read_stage_pins
    from autoshard.graph_capture.capture import capture
    from autoshard.ir.mesh import Mesh
    from autoshard.search.fixed_styles import random_plan
    from autoshard.search.whole_step import repeated_blocks, with_step

    graph = capture(f"{FILE}:gpt2", {"size": size}, "fp32")
    first = repeated_blocks(graph)[: len(repeated_blocks(graph)) // STAGES]
    pins = tuple(f"stage:{path}=0" for path in first) + (f"stage:{repeated_blocks(graph)[len(first)]}=1",)
    plan = random_plan(graph, Mesh.parse("dp=1"), load_hardware("cpu-local"), 0)
    request = StepRequest(micro_batches=micro_batches, stages=STAGES, pins=read_stage_pins(pins))
    plan = with_step(plan, graph, request)
    harness.write_package(folder, plan, graph)
    return len(first)


def emitted(folder: Path, words: Any, micro_batches: int) -> Step:
    from autoshard.verification.ranks.loaded_package import load_package

    package = load_package(folder)
    package.train.accumulate_gradients = package.recorder.accumulate_gradients  # nothing is recorded
    mesh = package.runtime.ParallelMesh.from_environment({"dp": 1}, "gloo", None, range(STAGES))
    model = package.model.build_model(mesh)
    package.runtime.init_parameters(model, 0)
    optimizer = package.train.make_optimizer(model)
    given = dict(zip(("input_ids", "labels"), words, strict=True))
    batches = [[given[name] for name in package.model.INPUTS] for _ in range(micro_batches)]
    return lambda: package.train.train_step(model, optimizer, mesh, batches, 1.0)


# --- the same by hand ---


def by_hand(size: str, words: Any, micro_batches: int, blocks: int, rank: int) -> Step:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole = MODELS["gpt2"](size)[0].train().model
    body, config, (ids, labels) = whole.transformer, whole.config, words

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe, self.drop, self.h = body.wte, body.wpe, body.drop, body.h[:blocks]

        def forward(self, ids: Any) -> Any:
            x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1])))
            for block in self.h:
                x = _only(block(x))
            return x

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.h, self.ln_f = body.wte, body.h[blocks:], body.ln_f

        def forward(self, x: Any) -> Any:
            for block in self.h:
                x = _only(block(x))
            return nn.functional.linear(self.ln_f(x), self.wte.weight)

    def loss_of(logits: Any, target: Any) -> Any:
        shifted = nn.functional.pad(target, (0, 1), value=-100)[:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, 1), shifted.reshape(-1)) / micro_batches

    model: nn.Module = First() if rank == 0 else Last()
    handed = torch.empty((*ids.shape, config.n_embd), device="meta", requires_grad=True)
    logits = torch.empty((*ids.shape, config.vocab_size), device="meta", requires_grad=True)
    before, after = ((ids.to("meta"),), (handed,)) if rank == 0 else ((handed,), (logits,))
    stage = PipelineStage(model, rank, STAGES, torch.device("cpu"), input_args=before, output_args=after)
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss_of, scale_grads=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    batch = (torch.cat([ids] * micro_batches), torch.cat([labels] * micro_batches))

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            schedule.step(batch[0], return_outputs=False)
        else:
            schedule.step(target=batch[1], losses=[], return_outputs=False)
        dist.all_reduce(body.wte.weight.grad)
        _clip(model, rank, body.wte.weight)
        optimizer.step()

    return step


def _only(made: Any) -> Any:
    return made[0] if isinstance(made, tuple) else made


def _clip(model: Any, rank: int, shared: Any) -> None:
    """By the norm of both stages' gradients, the tied one counted once."""
    import torch
    import torch.distributed as dist

    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    own = [g for g in gradients if rank == 0 or g is not shared.grad]
    total = torch.stack(torch._foreach_norm(own, 2)).square().sum()
    dist.all_reduce(total)
    torch._foreach_mul_(gradients, (1.0 / (total.sqrt() + 1e-6)).clamp(max=1.0))


# --- measuring ---


def work(options: argparse.Namespace) -> None:
    """One process of the group."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, (size,) = dist.get_rank(), options.sizes
    torch.manual_seed(0)
    words = MODELS["gpt2"](size)[1]
    steps = {
        "emitted": emitted(Path(options.work), words, options.micro_batches),
        "by hand": by_hand(size, words, options.micro_batches, options.blocks, rank),
    }
    found = harness.in_turns(steps, options.rounds, of_all=True)
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # threads of gloo's groups outlive what this process does


def row(size: str, options: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder:
        blocks = write_package(size, options.micro_batches, Path(folder))
        words = ["--work", folder, "--sizes", size, "--rounds", str(options.rounds), "--blocks", str(blocks)]
        words += ["--micro-batches", str(options.micro_batches)]
        found = harness.ranks("pipeline_steps", STAGES, *words, seconds=options.timeout)
    one, two = found["emitted"], found["by hand"]
    taken = (f"{own[kind] * 1e3:.1f}" for own in (one, two) for kind in ("cpu", "wall"))
    return harness.cells(f"GPT-2 {size}", options.micro_batches, *taken, f"{one['cpu'] / two['cpu']:.2f}")


HEADER = ("model", "micro-batches", "emitted, CPU ms", "wall ms", "by hand, CPU ms", "wall ms", "CPU ratio")


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["small"])
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
    lines = harness.table(HEADER, (row(size, options) for size in options.sizes), 1)
    if options.write:
        harness.put("pipeline_steps", [f"Medians of {options.rounds}; {harness.machine()}", "", *lines])


if __name__ == "__main__":
    main()
