"""Emitted packages beside torch's own parallelism, in one process group: time and collectives a step.

    python -m benchmarks.overlap --models gpt2 llama --sizes small large --processes 2 [--write]

Steps take turns: one of each way, again and again, so that what else the machine does meets all alike. Medians over
the rounds, of rank 0; processor time is that of the whole process, all threads. The references are torch's tutorials
at default settings: DistributedDataParallel, `fully_shard` of every block and of the whole, `parallelize_module` with
column- and row-wise linears, and with 4 processes the two together; and Megatron's column- and row-parallel linears by
hand (`plain_tensor_parallel.py`). All clip by the norm and update with AdamW. DTensor's tensor parallelism knows no
`Conv1D`: GPT-2 has none of it.
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

from benchmarks import harness
from benchmarks.overlap_models import FILE, MODELS

BY_HAND = "ColumnParallel and RowParallel"
# name -> strategy, mesh of so many processes, and what it is measured against
WAYS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "emitted dp": ("dp", "dp={n}", ("DDP",)),
    "emitted zero": ("fsdp", "dp={n}", ("FSDP2",)),
    "emitted tp": ("megatron", "tp={n}", ("parallelize_module", BY_HAND)),
    "emitted 2x2": ("fsdp-tp", "dp=2,tp=2", ("FSDP2 and parallelize_module",)),
}
Step = Callable[[], Any]


# --- plans ---


def ways(model: str, processes: int) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Those that can be."""
    fitting = [way for way in WAYS if way != {2: "emitted 2x2", 4: "emitted tp"}.get(processes)]  # two heads of keys
    found: dict[str, tuple[str, str, tuple[str, ...]]] = {}
    for way in fitting:
        strategy, mesh, others = WAYS[way]
        known = tuple(other for other in others if model != "gpt2" or "parallelize_module" not in other)
        found |= {way: (strategy, mesh, known)} if known else {}
    return found


def axes(mesh: str, processes: int) -> dict[str, int]:
    return {name: int(size) for name, _, size in (axis.partition("=") for axis in mesh.format(n=processes).split(","))}


def write_packages(model: str, size: str, processes: int, folder: Path) -> None:
    """The packages of all ways, in folders by their names."""
    from autoshard.cluster.hardware import load_hardware
    from autoshard.graph_capture.capture import capture
    from autoshard.ir.mesh import Mesh
    from autoshard.search.search_request import SearchRequest
    from autoshard.search.select_plan import search

    graph, hardware = capture(f"{FILE}:{model}", {"size": size}, "fp32"), load_hardware("cpu-local")
    for way, (style, mesh, _) in ways(model, processes).items():
        request = SearchRequest(Mesh(tuple(axes(mesh, processes).items())), strategy=style)
        plan = search(graph, hardware, request)
        harness.write_package(folder / way, plan, graph)


# --- the ways, in a process of the group ---


def emitted(folder: Path, mesh_axes: dict[str, int], words: Any) -> Step:
    from autoshard.verification.ranks.loaded_package import load_package

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
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks import plain_tensor_parallel

    model, words = build(size)
    model.train()
    parts, part = processes, rank
    if way == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif way == BY_HAND:
        parts, part, model = 1, 0, plain_tensor_parallel.TensorParallel(model.model)
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
    clip = plain_tensor_parallel.clip if way == BY_HAND else _clip
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=3e-4, fused=True)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        model(*batch).backward()
        clip(groups)
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
    import torch
    from torch.distributed.tensor import DTensor

    if len(groups) == 1:
        torch.nn.utils.clip_grad_norm_(groups[0], 1.0)
        return
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group]) for group in groups]
    plain = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.stack(plain).square().sum().sqrt()
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, 1.0, total)


def _fully_sharded(model: Any, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if type(module).__name__ in ("GPT2Block", "LlamaDecoderLayer"):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _tensor_parallel(model: Any, mesh: Any) -> None:
    """As torch's tutorial of tensor parallelism: blocks, embedding and head; without sequence parallelism."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step()
    names = [event.name for event in seen.events() if event.name.startswith("c10d::")]
    return Counter(name.removeprefix("c10d::").strip("_").removesuffix("_base") for name in names)


def peak_bytes(step: Step) -> int:
    """Most bytes of tensors alive in one step on this process, above its parameters and optimizer state: every result
    of an operator counts, as `tests/meter.py` does; what gloo copies inside a collective too, of both."""
    from tests.meter import Meter

    with Meter([]) as meter:
        meter.phase = "step"
        step()
    return meter.peak("step")[0]


def work(options: argparse.Namespace) -> None:
    """One process of the group."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    (model,), (size,) = options.models, options.sizes
    words = MODELS[model](size)[1]
    steps: dict[str, Step] = {}
    for way, (_, mesh, others) in ways(model, processes).items():
        steps[way] = emitted(Path(options.work) / way, axes(mesh, processes), words)
        steps |= {other: reference(other, MODELS[model], size, rank, processes) for other in others}
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
    for way, other in ((way, other) for way, (_, _, others) in ways(model, processes).items() for other in others):
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
    lines = harness.table(HEADER, (line for case in cases for line in rows(*case, options)), 3)
    if options.write:
        harness.put("overlap", [f"Medians of {options.rounds}; {harness.machine()}", "", *lines])


if __name__ == "__main__":
    main()
