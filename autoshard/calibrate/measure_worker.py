"""Measures its devices: `python -m autoshard.calibrate.measure_worker WHAT DEVICE DTYPE FILE`, with torchrun too.

WHAT is kernels, which all processes measure at once as they compute at once in a step, or collectives, in a node and
between nodes; the first process writes FILE (JSON). Each time is the lower quartile of several samples: what else runs
on the machine only makes some longer. On the CPU a device is a core, and a kernel is timed by the processor time of its
one thread, which other programs do not disturb much; other devices and collectives by the clock. A collective waits
for the slowest of its members, so most of its samples may be disturbed: they are taken in rounds over all collectives,
which share what runs beside for a while, and the time is what one in twenty of them stays within.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from autoshard.calibrate import measured_shapes
from autoshard.emit.runtime.axis import GroupTransport
from autoshard.errors import UsageError

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
SAMPLE_SECONDS = 0.15
ROUNDS = 60  # of each collective
EVERY_SIZE = {"members": 1, "nodes": 2}  # between nodes two figures are fitted, in a node a score
UNDISTURBED, UNDISTURBED_COLLECTIVE = 0.25, 0.05  # of the samples
SHORTEST_SECONDS = 1e-3  # of one sample: shorter kernels are run several times
LARGEST_MESSAGE = {"cpu": 2**24}
LARGEST_TENSOR = {"cpu": 2**24}  # above, the C library maps and clears pages anew for each tensor
SEED = 0
WIDTH = 1024  # of the rows of memory-bound operators
COLD_BYTES = 2**29  # read and written between two uses of a tensor


def check_device(device: str) -> None:
    """UsageError where this machine lacks it."""
    has_npu = importlib.util.find_spec("torch_npu") is not None
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "npu": has_npu}
    if not there[device]:
        needs = "a GPU and a torch that was built for it" if device == "cuda" else "an Ascend device and torch_npu"
        raise UsageError(f"--device {device}: there is no {device} device here; it takes {needs}", "--device cpu")


def main(what: str, device_name: str, dtype_name: str, path: str) -> None:
    tables = measured((what,), device_name, dtype_name)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(path).write_text(json.dumps(tables), encoding="utf-8")


def measured(what: Sequence[str], device_name: str, dtype_name: str) -> dict[str, Any]:
    """Tables by name, as this process measured them."""
    device, dtype = _device(device_name), getattr(torch, dtype_name)
    torch.manual_seed(SEED)
    tables: dict[str, Any] = {}
    for one in what:
        tables |= {"kernels": kernels, "collectives": collectives}[one](device, dtype)
    return tables


def _device(name: str) -> torch.device:
    if name == "npu":
        importlib.import_module("torch_npu")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        return torch.device("cpu")
    device = torch.device(name, rank)
    getattr(torch, name).set_device(device)
    return device


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call."""
    once = _sample(run, device, 1)
    once = min(once, _sample(run, device, 1))
    repeats = max(1, int(SHORTEST_SECONDS / max(once, 1e-7)))
    samples: list[float] = []
    while len(samples) < 3 or sum(samples) * repeats < SAMPLE_SECONDS:
        samples.append(_sample(run, device, repeats))
    return undisturbed(samples)


def undisturbed(samples: Sequence[float], share: float = UNDISTURBED) -> float:
    """Seconds that `share` of the samples stay within."""
    return float(np.quantile(samples, share))


def _sample(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    clock = time.process_time if device.type == "cpu" and not dist.is_initialized() else time.perf_counter
    _wait(device)
    start = clock()
    for _ in range(repeats):
        run()
    _wait(device)
    return (clock() - start) / repeats


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


# --- kernels ----------------------------------------------------------------------------------------------------------


def kernels(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Rows of products, attention and memory-bound operators."""
    generator = np.random.default_rng(SEED)
    rate = _first_rate(device, dtype)
    largest = LARGEST_TENSOR.get(device.type, 2**30) / dtype.itemsize
    return {
        "machine": f"{_machine(device)}, torch {torch.__version__}",
        "matmul": [_product(shape, device, dtype) for shape in measured_shapes.products(rate, largest, generator)],
        "attention": [_attention(shape, device, dtype) for shape in measured_shapes.attentions(rate, generator)],
        "memory": list(_memory(device, dtype)),
        "dispatch_seconds": _dispatch_seconds(device),
    }


def _machine(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.machine()} CPU, one thread"
    return str(getattr(torch, device.type).get_device_name(device))


def _first_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one square product."""
    size = 512 if device.type == "cpu" else 4096
    x = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / seconds_of(lambda: x @ x, device)


def _product(shape: dict[str, float], device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Times of a product: forward, and the two products of its backward."""
    m, n, k = (int(shape[key]) for key in "mnk")
    x, w, g = (torch.randn(*size, device=device, dtype=dtype) for size in ((m, k), (n, k), (m, n)))
    runs: dict[str, Callable[[], Tensor]] = {
        "seconds": lambda: functional.linear(x, w), "dgrad_seconds": lambda: g @ w, "wgrad_seconds": lambda: g.T @ x,
    }  # fmt: skip
    times = {name: seconds_of(run, device) for name, run in runs.items()}
    return {**shape, "item_bytes": x.element_size(), **times}


def _attention(shape: dict[str, float], device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    size = [int(shape[key]) for key in ("batch", "heads", "length", "head_dim")]
    q, k, v = (torch.randn(*size, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def forward() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    gradient = torch.randn(*size, device=device, dtype=dtype)
    there = seconds_of(forward, device)
    both = seconds_of(lambda: torch.autograd.grad(forward(), (q, k, v), gradient), device)
    return {**shape, "item_bytes": q.element_size(), "seconds": there, "backward_seconds": both - there}


def _memory(device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Rows of memory-bound operators: kind, bytes read and written, seconds."""
    for size in measured_shapes.MEMORY_BYTES:
        rows = max(1, size // dtype.itemsize // WIDTH)
        count = max(1, COLD_BYTES // (2 * rows * WIDTH * dtype.itemsize))
        tensors = [torch.randn(rows, WIDTH, device=device, dtype=dtype) for _ in range(count)]
        scale, order = torch.randn(WIDTH, device=device, dtype=dtype), torch.randperm(rows, device=device)
        runs: dict[str, Callable[[Tensor], Tensor]] = {
            "elementwise": lambda x: x + x,
            "activation": functional.gelu,
            "normalisation": partial(_normalised, scale),
            "softmax": partial(torch.softmax, dim=-1),
            "default": lambda x: x.T.contiguous(),
            "gather": partial(functional.embedding, order),
        }
        for kind, run in runs.items():
            seconds = seconds_of(_cold(run, tensors), device)
            yield {"kind": kind, "bytes": 2 * tensors[0].numel() * dtype.itemsize, "seconds": seconds}


def _normalised(scale: Tensor, x: Tensor) -> Tensor:
    return functional.layer_norm(x, (WIDTH,), scale, scale)


def _cold(run: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Runs on one tensor after another and keeps as many results, so that, as in a step, no cache holds them.

    The first rounds are not timed: in them the allocator takes new pages from the system.
    """
    order = cycle(tensors)
    results = deque((run(next(order)) for _ in range(3 * len(tensors))), maxlen=len(tensors))
    return lambda: results.append(run(next(order)))


def _dispatch_seconds(device: torch.device) -> float:
    """Host seconds of an operator that the device does later; 0 where the host itself computes."""
    return 0.0 if device.type == "cpu" else issued_seconds(device)


CHAIN = 200  # operators


def issued_seconds(device: torch.device) -> float:
    """Host seconds of an operator on eight numbers, as in the emitted code: recorded by autograd, and issued by its
    engine."""
    x = torch.randn(8, device=device, requires_grad=True)
    layers = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(CHAIN)))

    def chain() -> None:
        torch.autograd.grad(layers(x).sum(), x)

    return seconds_of(chain, device) / (2 * CHAIN)


# --- collectives ------------------------------------------------------------------------------------------------------


def collectives(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Rows of collectives, on all processes: kind, members or nodes, bytes of the whole message, seconds.

    `collective`: within the first node. Of several nodes also `between`: all groups of one device a node at once, as
    the groups of a mesh axis are; and `whole`: all devices of the nodes in one group.
    """
    dist.init_process_group(BACKENDS[device.type])
    world = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    tables: dict[str, Any] = {"collective": []}
    for members in measured_shapes.group_sizes(local):
        tables["collective"] += _measured("members", members, [list(range(members))], device, dtype)
    if world > local:
        tables |= {"between": [], "whole": []}
        for nodes in measured_shapes.group_sizes(world // local):
            across = [list(range(first, nodes * local, local)) for first in range(local)]
            tables["between"] += _measured("nodes", nodes, across, device, dtype)
            tables["whole"] += _measured("nodes", nodes, [list(range(nodes * local))], device, dtype)
    dist.destroy_process_group()
    return tables


def _measured(
    column: str, count: int, groups: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Rows of this process's own group; a process without a group waits, and has none."""
    rank = dist.get_rank()
    handles = [dist.new_group(list(ranks)) for ranks in groups]
    rows = []
    for ranks, group in zip(groups, handles, strict=True):
        if rank in ranks:
            transport = GroupTransport(group)
            sizes = measured_shapes.message_bytes(LARGEST_MESSAGE.get(device.type, 2**28), EVERY_SIZE[column])
            runs = [one for size in sizes for one in _kinds(transport, len(ranks), size, device, dtype)]
            times = in_rounds([run for _, run in runs], transport, device)
            rows += [{column: count, **row, "seconds": seconds} for (row, _), seconds in zip(runs, times, strict=True)]
    dist.barrier()
    return rows


def _kinds(
    transport: GroupTransport, members: int, size: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    """Collectives to measure: kind and bytes of the whole message, and the function that runs it."""
    whole = torch.ones(size // dtype.itemsize // members * members, dtype=dtype).to(device)
    part, lengths = whole[: len(whole) // members].clone(), [len(whole) // members] * members
    runs: dict[str, Callable[[], object]] = {
        "all_gather": lambda: transport.all_gather(part, lengths),
        "reduce_scatter": lambda: transport.reduce_scatter(whole, lengths),
        "all_reduce": lambda: transport.all_reduce(whole)(),
        "all_to_all": lambda: transport.all_to_all(whole, lengths, lengths),
    }
    for kind, run in runs.items():
        yield {"kind": kind, "bytes": whole.numel() * whole.element_size()}, run


def in_rounds(runs: Sequence[Callable[[], object]], transport: GroupTransport, device: torch.device) -> list[float]:
    """Seconds of each collective; all members run it equally often."""
    for run in runs:
        run()
    samples: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for timings, run in zip(samples, runs, strict=True):
            transport.barrier()
            timings.append(_sample(run, device, 1))
    return [undisturbed(timings, UNDISTURBED_COLLECTIVE) for timings in samples]


def _arguments(words: Sequence[str]) -> tuple[str, str, str, str]:
    if len(words) != 4:
        raise SystemExit(__doc__)
    return words[0], words[1], words[2], words[3]


if __name__ == "__main__":
    main(*_arguments(sys.argv[1:]))
