"""Emitted packages beside torch's own parallelism, in one process group: time and collectives a step.

    python -m benchmarks.overlap --models gpt2 llama --sizes small large --processes 2 [--write]

Steps take turns: one of each way, again and again, so that what else the machine does meets all alike. Medians over
the rounds, of rank 0; processor time is that of the whole process, all threads. The references are torch's tutorials
at default settings: DistributedDataParallel, `fully_shard` of every block and of the whole, `parallelize_module` with
column- and row-wise linears, and with 4 processes the two together. All clip by the norm and update with AdamW.
DTensor's tensor parallelism knows no `Conv1D`: GPT-2 has none of it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autoshard.cluster.hardware import load_hardware
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.verification.ranks.loaded_package import load_package
from benchmarks import harness
from tests.meter import Meter

Built = tuple[nn.Module, tuple[Tensor, Tensor]]

# name -> strategy, mesh of so many processes, and what it is measured against
WAYS = {
    "emitted dp": ("dp", "dp={n}", "DDP"),
    "emitted zero": ("fsdp", "dp={n}", "FSDP2"),
    "emitted tp": ("megatron", "tp={n}", "parallelize_module"),
    "emitted 2x2": ("fsdp-tp", "dp=2,tp=2", "FSDP2 and parallelize_module"),
}
VOCABULARY = 2048
SIZES = {"small": (64, 32, 4), "large": (512, 128, 4)}  # width, tokens of a sequence, layers: one bound by the host
Step = Callable[[], Any]


# --- models and plans ---


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, labels=labels, use_cache=False).loss
        return loss


def gpt2(size: str = "small", batch: int = 8) -> Built:
    width, length, layers = SIZES[size]
    sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": length, "vocab_size": VOCABULARY}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _with_words(GPT2LMHeadModel(GPT2Config(**sizes, **dropout)), batch, length)


def llama(size: str = "small", batch: int = 8) -> Built:
    width, length, layers = SIZES[size]
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": length}
    return _with_words(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)), batch, length)


def _with_words(model: nn.Module, batch: int, length: int) -> Built:
    words = torch.randint(1, VOCABULARY, (batch, length))
    return WithLoss(model), (words, words.clone())


MODELS = {"gpt2": gpt2, "llama": llama}


def ways(model: str, processes: int) -> dict[str, tuple[str, str, str]]:
    """Those that can be: a Llama here has two heads of keys, and DTensor's tensor parallelism takes no GPT-2."""
    known = {way: own for way, own in WAYS.items() if way != {2: "emitted 2x2", 4: "emitted tp"}.get(processes)}
    return {way: own for way, own in known.items() if model != "gpt2" or "parallelize_module" not in own[2]}


def write_packages(model: str, size: str, processes: int, folder: Path) -> None:
    """The packages of all ways, in folders by their names."""

    graph, hardware = capture(f"{__file__}:{model}", {"size": size}, "fp32"), load_hardware("cpu-local")
    for way, (style, mesh, _) in ways(model, processes).items():
        request = SearchRequest(Mesh.parse(mesh.format(n=processes)), strategy=style)
        harness.write_package(folder / way, search(graph, hardware, request), graph)


# --- the ways, in a process of the group ---


def emitted(folder: Path, mesh_axes: dict[str, int], words: Any) -> Step:

    package = load_package(folder)
    package.train.compute_gradients = package.recorder.compute_gradients  # nothing is recorded
    mesh = package.runtime.ParallelMesh.from_environment(mesh_axes, "gloo")
    model = package.model.build_model(mesh)
    optimizer = package.train.make_optimizer(model)
    package.train.prepare(model, optimizer, argparse.Namespace(resume=None, weights=None, seed=0), mesh.rank)
    given = dict(zip(("input_ids", "labels"), words, strict=True))
    batch = [package.batches.local_part(name, given[name], mesh) for name in package.model.INPUTS]
    return lambda: package.train.train_step(model, optimizer, mesh, batch, 1.0)


def reference(way: str, build: Callable[..., Any], size: str, rank: int, processes: int) -> Step:

    model, words = build(size)
    model.train()
    parts, part = processes, rank
    if way == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        tensor = {"FSDP2": 1, "parallelize_module": processes}.get(way, 2)
        parts, part = processes // tensor, rank // tensor
        mesh = init_device_mesh("cpu", (parts, tensor), mesh_dim_names=("dp", "tp"))
        if tensor > 1:
            _tensor_parallel(model, mesh["tp"])
        if parts > 1:
            _fully_sharded(model, mesh["dp"])
    batch = [x.chunk(parts)[part] for x in words]
    groups = _by_mesh(model)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=3e-4, fused=True)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        model(*batch).backward()
        _clip(groups)
        optimizer.step()

    return step


def _by_mesh(model: Any) -> list[list[Any]]:
    """Neither clipping nor the fused optimizer takes tensors of several meshes, or of none, together."""
    groups: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def _clip(groups: list[list[Any]]) -> None:
    """To a norm of 1."""

    if len(groups) == 1:
        torch.nn.utils.clip_grad_norm_(groups[0], 1.0)
        return
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group]) for group in groups]
    plain = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.stack(plain).square().sum().sqrt()
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, 1.0, total)


def _fully_sharded(model: Any, mesh: Any) -> None:

    for module in model.modules():
        if type(module).__name__ in ("GPT2Block", "LlamaDecoderLayer"):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _tensor_parallel(model: Any, mesh: Any) -> None:
    """As torch's tutorial of tensor parallelism: blocks, embedding and head; without sequence parallelism."""

    columns, rows = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"), (
        "self_attn.o_proj", "mlp.down_proj")  # fmt: skip
    for block in model.model.model.layers:
        plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(block, mesh, plan)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model.model, mesh, ends)


def collectives(step: Step) -> Counter[str]:
    """What one step calls of the process groups."""

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step()
    names = [event.name for event in seen.events() if event.name.startswith("c10d::")]
    return Counter(name.removeprefix("c10d::").strip("_").removesuffix("_base") for name in names)


def peak_bytes(step: Step) -> int:
    """Most bytes of tensors alive in one step on this process, above its parameters and optimizer state: every result
    of an operator counts, as `tests/meter.py` does; what gloo copies inside a collective too, of both."""
    with Meter([]) as meter:
        meter.phase = "step"
        step()
    return meter.peak("step")[0]


def work(options: argparse.Namespace) -> None:
    """One process of the group."""

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    (model,), (size,) = options.models, options.sizes
    words = MODELS[model](size)[1]
    steps: dict[str, Step] = {}
    for way, (_, mesh, other) in ways(model, processes).items():
        axes = dict(Mesh.parse(mesh.format(n=processes)).axes)
        steps[way] = emitted(Path(options.work) / way, axes, words)
        steps[other] = reference(other, MODELS[model], size, rank, processes)
    found = harness.in_turns(steps, options.rounds)
    counts = {way: collectives(step) for way, step in steps.items()}
    peaks = {way: peak_bytes(step) for way, step in steps.items()}
    if rank == 0:
        print(json.dumps({way: found[way] | {"calls": counts[way], "peak": peaks[way]} for way in steps}), flush=True)
    dist.barrier()
    os._exit(0)  # threads of gloo's groups outlive what this process does


# --- the table ---


def rows(model: str, size: str, processes: int, options: argparse.Namespace) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        write_packages(model, size, processes, Path(folder))
        words = ["--work", folder, "--models", model, "--sizes", size, "--rounds", str(options.rounds)]
        found = harness.ranks("overlap", processes, *words, seconds=options.timeout)
    for way, (_, _, other) in ways(model, processes).items():
        one, two = found[way], found[other]
        yield harness.cells(
            f"{model} {size}", processes,
            way, *milliseconds(one), said(one["calls"]), other, *milliseconds(two), said(two["calls"]),
            f"{one['cpu'] / two['cpu']:.2f}", f"{one['wall'] / two['wall']:.2f}",
            f"{one['peak'] / 2**20:.2f}", f"{two['peak'] / 2**20:.2f}",
        )  # fmt: skip


def milliseconds(own: dict[str, float]) -> tuple[str, str]:
    return f"{own['cpu'] * 1e3:.1f}", f"{own['wall'] * 1e3:.1f}"


def said(calls: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(calls.items()))


HEADER = ("model", "n", "way", "CPU ms", "wall ms", "collectives", "vs.", "CPU ms", "wall ms", "collectives", "CPU",
          "wall", "MiB", "MiB")  # fmt: skip


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama"])
    parser.add_argument("--sizes", nargs="+", default=["small", "large"])
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    cases = product(options.models, options.sizes, options.processes)
    lines = (line for case in cases for line in rows(*case, options))
    harness.publish(options, "overlap", HEADER, lines, 3, head=f"Medians of {options.rounds}; ")


if __name__ == "__main__":
    main()
