from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.costs import axis_link, collective_seconds
from autoshard.costs.collective import KINDS, joint_seconds
from autoshard.costs.links import joint_link
from autoshard.errors import UsageError
from autoshard.hardware import Hardware, load_hardware
from autoshard.mesh import Mesh

A100, ASCEND, CPU = load_hardware("a100-80g-sxm"), load_hardware("ascend-910a"), load_hardware("cpu-local")
NVLINK, PORT = 300e9 * 0.62, 25e9 * 0.75
HCCS, PCIE, ROCE = 90e9 * 0.7, 32e9 * 0.7, 12.5e9 * 0.7


def link(hardware: Hardware, mesh: str, axis: str):
    parsed = Mesh.parse(mesh)
    return axis_link(hardware, parsed, parsed.index(axis))


@pytest.mark.parametrize(
    ("hardware", "mesh", "axis", "name", "bandwidth"),
    [
        (A100, "tp=8", "tp", "NVLink", NVLINK),
        (A100, "dp=2,tp=4", "dp", "NVLink", NVLINK),
        (A100, "dp=4,tp=8", "tp", "NVLink", NVLINK),
        (A100, "dp=4,tp=8", "dp", "InfiniBand", PORT),  # one member a node: its own port
        (A100, "dp=4,tp=4", "dp", "InfiniBand", 2 * PORT),  # two members a node: two ports
        (A100, "dp=16", "dp", "InfiniBand", 8 * PORT),  # the whole node: eight ports
        (A100, "pp=2,dp=2,tp=4", "dp", "NVLink", NVLINK),
        (A100, "pp=2,dp=2,tp=4", "pp", "InfiniBand", PORT),
        (A100, "dp=2,tp=1", "tp", "NVLink", NVLINK),
        (A100, "dp=3,tp=6", "tp", "InfiniBand", 2 * PORT),  # ranks 6..11 lie 2 + 4 over two nodes
        (ASCEND, "tp=4", "tp", "HCCS", HCCS),
        (ASCEND, "tp=2", "tp", "HCCS", HCCS / 3),  # a full mesh: one link of three
        (ASCEND, "dp=2,tp=4", "dp", "PCIe", PCIE),
        (ASCEND, "dp=8", "dp", "HCCS", HCCS),  # four PCIe slots carry 89.6, the links inside 63
        (ASCEND, "dp=4,tp=2", "dp", "HCCS", HCCS / 3),  # two of each mesh: one link inside 21, two PCIe slots 44.8
        (ASCEND, "dp=2,tp=8", "dp", "RoCE", ROCE),
        (ASCEND, "dp=16", "dp", "HCCS", HCCS),
        (CPU, "dp=2,tp=2", "tp", "loopback", 0.8e9),
    ],
)
def test_the_real_link(hardware, mesh, axis, name, bandwidth):
    found = link(hardware, mesh, axis)
    assert (found.name, found.ring_bandwidth) == (name, pytest.approx(bandwidth))


def test_latency_is_that_of_the_slowest_level_crossed():
    assert link(A100, "dp=2,tp=8", "dp").latency_seconds == pytest.approx(4e-6)
    assert link(A100, "dp=2,tp=8", "tp").latency_seconds == pytest.approx(1.1e-6)


def test_an_exchange_sends_over_its_own_port_only():
    inside, across = link(A100, "ep=8", "ep"), link(A100, "ep=16", "ep")
    assert inside.exchange_seconds_per_byte == pytest.approx(7 / 8 / NVLINK)
    assert across.exchange_seconds_per_byte == pytest.approx(8 / 16 / PORT)  # half of the peers are on the other node


def test_joined_axes_are_one_group():
    mesh, flat = Mesh.parse("a=2,b=8"), Mesh.parse("a=16")
    assert joint_link(A100, mesh, (0, 1)) == axis_link(A100, flat, 0)
    assert joint_seconds(A100, mesh, (0, 1), "all_reduce", 1e8) == collective_seconds(A100, flat, 0, "all_reduce", 1e8)


def test_mesh_larger_than_the_cluster():
    with pytest.raises(UsageError, match="at most 16"):
        link(CPU, "dp=32", "dp")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_do_costs_nothing(kind):
    assert collective_seconds(A100, Mesh.parse("dp=1,tp=8"), 0, kind, 1e9) == 0
    assert collective_seconds(A100, Mesh.parse("dp=1,tp=8"), 1, kind, 0) == 0


def ring_by_steps(hardware: Hardware, size: int, full_bytes: float, passes: int) -> float:
    """A ring, step by step: in each of the n-1 steps of a pass every member sends one n-th to its neighbour."""
    first = hardware.links[0]
    bandwidth = first.bandwidth * first.efficiency * (1 - 1 / size) ** hardware.constant("collective.group_exponent")
    seconds = hardware.constant("collective.launch")
    for _ in range(passes):
        for _ in range(size - 1):
            seconds += first.latency_seconds + full_bytes / size / bandwidth
    return seconds


@given(size=st.integers(2, 8), full_bytes=st.floats(1, 1e10))
def test_equal_to_a_ring_by_steps(size, full_bytes):
    mesh = Mesh((("tp", size),))
    for kind, passes in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        expected = ring_by_steps(A100, size, full_bytes, passes)
        assert collective_seconds(A100, mesh, 0, kind, full_bytes) == pytest.approx(expected, rel=1e-9)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    full_bytes=st.floats(1, 1e9),
    factor=st.floats(1, 10),
    level=st.integers(0, 2),
)
def test_monotone_in_bytes_bandwidth_and_latency(sizes, full_bytes, factor, level):
    mesh = Mesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
    chosen = ASCEND.links[level]
    faster = _with_link(level, bandwidth=chosen.bandwidth * factor)
    later = _with_link(level, latency_seconds=chosen.latency_seconds * factor)
    for axis, kind in itertools.product(range(len(sizes)), KINDS):
        seconds = collective_seconds(ASCEND, mesh, axis, kind, full_bytes)
        slack = 1 + 1e-12
        assert collective_seconds(ASCEND, mesh, axis, kind, full_bytes * factor) * slack >= seconds
        assert collective_seconds(faster, mesh, axis, kind, full_bytes) <= seconds * slack
        assert collective_seconds(later, mesh, axis, kind, full_bytes) * slack >= seconds


def _with_link(level: int, **changes: float) -> Hardware:
    links = tuple(replace(x, **changes) if i == level else x for i, x in enumerate(ASCEND.links))
    return replace(ASCEND, links=links)


def test_memory_of_prices_knows_the_hardware():
    mesh = Mesh.parse("tp=4")
    before = collective_seconds(A100, mesh, 0, "all_gather", 1e9)
    constants = tuple((k, v * 2 if k == "collective.launch" else v) for k, v in A100.constants)
    after = collective_seconds(replace(A100, constants=constants), mesh, 0, "all_gather", 1e9)
    assert after == pytest.approx(before + A100.constant("collective.launch"))
