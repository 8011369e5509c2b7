"""What every device receives, counted while the steps run: never more than axis-by-axis gathers, often the least.

The cases are changes of cuts of one tensor, as `(cuts before, cuts after)` over devices in row-major order, devices
that are left over last. Beside each stand the sizes of the groups over which a mature system gathers in that case by
default, one after the other, before it slices (0: it exchanges halves).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.cluster.hardware import load_hardware
from autoshard.costs.collective import joint_seconds
from autoshard.emit.runtime import ParallelMesh
from autoshard.ir.layout import REPLICATE, Layout, Placement, Shard
from autoshard.ir.mesh import Mesh
from autoshard.redistribute import Step, Terms, path
from autoshard.verification.ranks import lockstep
from autoshard.verification.ranks.lockstep import ThreadTransport, run_lockstep
from tests.shards import assert_means, place
from tests.single.test_runtime_redistribution import apply

SQUARE, CUBE = (64, 64), (16, 16, 16)
CASES = [
    (SQUARE, 8, (8, 1), (1, 8), (8,)),
    (SQUARE, 8, (1, 8), (8, 1), (8,)),
    (SQUARE, 8, (8, 1), (1, 1), (8,)),
    (SQUARE, 8, (1, 1), (8, 1), ()),
    (SQUARE, 8, (8, 1), (2, 4), (4,)),
    (SQUARE, 8, (2, 4), (8, 1), (4,)),
    (SQUARE, 8, (2, 4), (4, 2), (2, 2)),
    (SQUARE, 8, (4, 2), (2, 4), (2, 2)),
    (SQUARE, 8, (2, 4), (1, 1), (4, 2)),
    (SQUARE, 8, (4, 1), (8, 1), ()),
    (SQUARE, 8, (8, 1), (4, 1), (2,)),
    (SQUARE, 8, (4, 1), (1, 4), (4,)),
    (SQUARE, 8, (1, 4), (4, 1), (4,)),
    (SQUARE, 8, (4, 1), (4, 2), ()),
    (SQUARE, 8, (4, 2), (4, 1), (2,)),
    (SQUARE, 8, (2, 2), (4, 2), (2,)),
    (SQUARE, 8, (2, 2), (2, 4), ()),
    (SQUARE, 8, (1, 8), (2, 4), (2, 2, 2)),
    (SQUARE, 8, (2, 4), (1, 8), (2, 2, 2)),
    (SQUARE, 8, (2, 1), (1, 2), (2,)),
    (CUBE, 8, (2, 2, 2), (8, 1, 1), (2, 2)),
    (CUBE, 8, (1, 2, 4), (4, 2, 1), (2, 2, 2)),
    (CUBE, 8, (2, 1, 4), (2, 4, 1), (4,)),
    (CUBE, 8, (4, 1, 2), (1, 4, 2), (4,)),
    (CUBE, 8, (2, 2, 2), (1, 1, 1), (2, 2, 2)),
    (SQUARE, 16, (4, 4), (16, 1), (4,)),
    (SQUARE, 4, (4, 1), (1, 4), (4,)),
    (SQUARE, 4, (2, 2), (4, 1), (0,)),
]
# Where the devices that are left over hold the same, more cases than the ones above.
MORE = [
    (SQUARE, 8, (2, 2), (8, 1)),
    (SQUARE, 8, (2, 2), (1, 8)),
    (SQUARE, 8, (1, 2), (8, 1)),
    (SQUARE, 8, (4, 1), (2, 2)),
    (CUBE, 8, (2, 1, 2), (1, 8, 1)),
    (CUBE, 8, (1, 4, 1), (2, 1, 4)),
    (SQUARE, 16, (2, 2), (4, 4)),
]
HARDWARE = load_hardware("a100-80g-sxm")


def mesh_of(devices: int) -> Mesh:
    """Axes of 2, so that all cuts are cuts of whole axes."""
    return Mesh(tuple((name, 2) for name in "abcd"[: devices.bit_length() - 1]))


def layout_of(cuts: Sequence[int], mesh: Mesh) -> Layout:
    placements: list[Placement] = [Shard(dim) for dim, cut in enumerate(cuts) for _ in range(cut.bit_length() - 1)]
    return Layout((*placements, *[REPLICATE] * (len(mesh.axes) - len(placements))))


def on_links(mesh: Mesh) -> Callable[[tuple[int, ...], str, float], float]:
    return lambda axes, kind, size: joint_seconds(HARDWARE, mesh, axes, kind, size)


def by_bytes(mesh: Mesh) -> Callable[[tuple[int, ...], str, float], float]:
    """Links without latency: only bytes count."""
    passes = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}

    def seconds(axes: tuple[int, ...], kind: str, size: float) -> float:
        group = math.prod(mesh.sizes[a] for a in axes)
        return 1e-7 + passes.get(kind, 1) * size * (1 - 1 / group) * 1e-6

    return seconds


class _Counting(ThreadTransport):
    """Counts the elements that come from other devices."""

    received = 0

    def all_gather(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        result = super().all_gather(x, lengths)
        self.received += result.numel() - x.numel()
        return result

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        result = super().all_to_all(x, send, receive)
        self.received += (sum(receive) - receive[self.index]) * math.prod(x.shape[1:])
        return result


def received(
    steps: Sequence[Step], source: Layout, shape: tuple[int, ...], mesh: Mesh, patch: pytest.MonkeyPatch
) -> list[int]:
    """The elements that each rank receives; the result is checked, too."""
    patch.setattr(lockstep, "ThreadTransport", _Counting)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parts = place(value, source, mesh)

    def work(local: ParallelMesh) -> tuple[Tensor, int]:
        x, layout = parts[local.rank], source
        for step in steps:
            x = apply(step, x, layout, shape, mesh, local)
            layout = step.applied(layout)
        return x, sum(getattr(axis.transport, "received", 0) for axis in local._joined.values())

    results = run_lockstep(dict(mesh.axes), work)
    target = source
    for step in steps:
        target = step.applied(target)
    assert_means([x for x, _ in results], value, target, mesh)
    return [count for _, count in results]


def least(source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> list[int]:
    """What each rank needs and does not hold."""
    index = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    have, need = (place(index, layout, mesh) for layout in (source, target))
    return [int((~torch.isin(n, h)).sum()) for h, n in zip(have, need, strict=True)]


def by_gathers(shape: tuple[int, ...], cuts: Sequence[int], groups: Sequence[int]) -> int:
    """What a rank receives when it gathers over groups of these sizes, one after the other."""
    local, total = math.prod(shape) // math.prod(cuts), 0
    for group in groups:
        total += local * (group - 1) if group else local // 2
        local *= max(group, 1)
    return total


def run(case: Sequence[Any], prices: Any, patch: pytest.MonkeyPatch) -> tuple[list[int], list[int], list[str]]:
    """(received, least) of every rank, and what was done."""
    shape, devices, before, after = case[:4]
    mesh = mesh_of(devices)
    source, target = layout_of(before, mesh), layout_of(after, mesh)
    route = path(source, target, Terms(shape, "float32", mesh, True, prices(mesh)))
    got = received(route.steps, source, shape, mesh, patch)
    return got, least(source, target, shape, mesh), [step.forward for step in route.steps]


@pytest.mark.parametrize("prices", [on_links, by_bytes])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}: {case[2]} to {case[3]}")
def test_never_more_than_gathers(case: Sequence[Any], prices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    got, bound, done = run(case, prices, monkeypatch)
    assert max(got) <= by_gathers(case[0], case[2], case[4]), done
    assert max(got) == max(bound), done


@pytest.mark.parametrize("case", MORE, ids=lambda case: f"{case[1]}: {case[2]} to {case[3]}")
def test_one_collective_reaches_the_bound(case: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    got, bound, done = run(case, by_bytes, monkeypatch)
    assert max(got) == max(bound), done
