"""Emitted packages beside torch's own data parallelism and FSDP2, in one process group: time and collectives a step.

    python benchmarks/overlap.py --models gpt2 llama --sizes small large --processes 2 [--write]

Steps take turns: one of each way, again and again, so that what else the machine does meets all alike. Medians over
the rounds, of rank 0; processor time is that of the whole process, all threads. The references are torch's tutorials at
default settings: DistributedDataParallel, and `fully_shard` of every block and of the whole. All clip by the norm and
update with the fused AdamW.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
WAYS = {"emitted dp": "DDP", "emitted zero": "FSDP2"}  # and what each is measured against
WARM_UP = 3
Step = Callable[[], Any]
README = ROOT / "benchmarks" / "README.md"
BEGIN, END = "<!-- overlap: written by the command below -->", "<!-- overlap end -->"


# --- plans ---


def write_packages(model: str, size: str, processes: int, folder: Path) -> None:
    """The packages of both ways, in folders by their names."""
    from autoshard.emit import emit
    from autoshard.graph_capture.capture import capture
    from autoshard.ir.mesh import Mesh
    from autoshard.program.lower import lower
    from tests.forced import data_parallel, pinned_plan, sharded_plan

    graph = capture(f"{ROOT / 'benchmarks' / 'overlap_models.py'}:{model}", {"size": size}, "fp32")
    mesh = Mesh.parse(f"dp={processes}")
    whole = [f"parameter:{p.path}=Replicate@dp" for p in graph.parameters]
    cut = [f"input:{name}=Shard(0)@dp" for name in graph.inputs]
    plans = {
        "emitted dp": pinned_plan(graph, mesh, [*whole, *cut], data_parallel(graph)),
        "emitted zero": sharded_plan(graph, mesh, "dp"),
    }
    for way, plan in plans.items():
        for name, text in emit(lower(plan, graph), plan, graph).items():
            path = folder / way / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


# --- the ways, in a process of the group ---


def emitted(folder: Path, mesh_axes: dict[str, int], words: Any) -> Step:
    from autoshard.verification.ranks.loaded_package import load_package

    package = load_package(folder)
    package.train.compute_gradients = package.recorder.compute_gradients  # nothing is recorded
    mesh = package.runtime.ParallelMesh.from_environment(mesh_axes, "gloo")
    model = package.model.build_model(mesh)
    package.runtime.init_parameters(model, 0, package.train.INITIAL)
    package.train.fill_unsaved(model, {}, 0)
    optimizer = package.train.make_optimizer(model)
    given = dict(zip(("input_ids", "labels"), words, strict=True))
    batch = [package.batches.local_part(name, given[name], mesh) for name in package.model.INPUTS]
    return lambda: package.train.train_step(model, optimizer, mesh, batch, 1.0)


def reference(way: str, build: Callable[..., Any], size: str, rank: int, processes: int) -> Step:
    import torch

    model, words = build(size)
    model.train()
    if way == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        _fully_sharded(model, processes)
    batch = [x.chunk(processes)[rank] for x in words]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        model(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _fully_sharded(model: Any, processes: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (processes,))
    for module in model.modules():
        if type(module).__name__ in ("GPT2Block", "LlamaDecoderLayer"):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def collectives(step: Step) -> Counter[str]:
    """What one step calls of the process groups."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step()
    names = [event.name for event in seen.events() if event.name.startswith("c10d::")]
    return Counter(name.removeprefix("c10d::").strip("_").removesuffix("_base") for name in names)


def measure(steps: dict[str, Step], rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of a step, wall and processor, by way."""
    import torch.distributed as dist

    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in steps}
    for _ in range(rounds):
        for way, step in steps.items():
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            step()
            seconds[way].append((time.perf_counter() - wall, time.process_time() - processor))
    return {
        way: {"wall": statistics.median(w for w, _ in own), "cpu": statistics.median(c for _, c in own)}
        for way, own in seconds.items()
    }


def work(options: argparse.Namespace) -> None:
    """One process of the group."""
    import torch
    import torch.distributed as dist

    from benchmarks.overlap_models import MODELS

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    (model,), (size,) = options.models, options.sizes
    words = MODELS[model](size)[1]
    steps: dict[str, Step] = {}
    for way, other in WAYS.items():
        steps[way] = emitted(Path(options.work) / way, {"dp": processes}, words)
        steps[other] = reference(other, MODELS[model], size, rank, processes)
    for _ in range(WARM_UP):
        for step in steps.values():
            step()
    found = measure(steps, options.rounds)
    counts = {way: collectives(step) for way, step in steps.items()}
    if rank == 0:
        print(json.dumps({way: found[way] | {"calls": counts[way]} for way in steps}), flush=True)
    dist.barrier()
    os._exit(0)  # threads of gloo's groups outlive what this process does


# --- the table ---


def row(model: str, size: str, options: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        write_packages(model, size, options.processes, Path(folder))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.processes),
            str(Path(__file__)), "--work", folder, "--models", model, "--sizes", size, "--rounds", str(options.rounds),
        ]  # fmt: skip
        with contextlib.chdir(ROOT):
            made = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
    if made.returncode != 0:
        raise SystemExit(made.stderr)
    found = json.loads(made.stdout.splitlines()[-1])
    lines = []
    for way, other in WAYS.items():
        one, two = found[way], found[other]
        lines.append(
            f"| {model} {size} | {options.processes} | {way} | {one['cpu'] * 1e3:.1f} | {one['wall'] * 1e3:.1f} | "
            f"{said(one['calls'])} | {other} | {two['cpu'] * 1e3:.1f} | {two['wall'] * 1e3:.1f} | "
            f"{said(two['calls'])} | {one['cpu'] / two['cpu']:.2f} | {one['wall'] / two['wall']:.2f} |"
        )
    return lines


def said(calls: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(calls.items()))


HEADER = """
| model | processes | way | CPU ms | wall ms | collectives | beside | CPU ms | wall ms | collectives | CPU | wall |
|---|--:|---|--:|--:|---|---|--:|--:|---|--:|--:|
""".strip()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama"])
    parser.add_argument("--sizes", nargs="+", default=["small", "large"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        work(options)
        return
    lines = [HEADER]
    for model in options.models:
        for size in options.sizes:
            lines += row(model, size, options)
    print("\n".join(lines), flush=True)
    if options.write:
        write(lines, " ".join(["python benchmarks/overlap.py", *arguments]), options.rounds)


def write(lines: Sequence[str], command: str, rounds: int) -> None:
    """The section of README.md."""
    head = f"""{BEGIN}
## Beside DistributedDataParallel and FSDP2

`{command}`

Steps over gloo on {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f} at the end, medians of {rounds}; what stands
beside ran in turns with it.
"""
    text = "\n".join([head, *lines, END])
    path, old = README, README.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    made = pattern.sub(lambda _: text, old) if BEGIN in old else f"{old.rstrip()}\n\n{text}\n"
    path.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
