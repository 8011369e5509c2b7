from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.costs import axis_link, collective_seconds
from autoshard.costs.collective import joint_seconds
from autoshard.costs.links import joint_link
from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh
from autoshard.redistribute import CARRIED

A100, ASCEND, CPU = load_hardware("a100-80g-sxm"), load_hardware("ascend-910a"), load_hardware("cpu-local")
V100, B2, C910 = (load_hardware(name) for name in ("v100-32g-sxm2", "ascend-910b2", "ascend-910c"))
NVLINK, PORT = 300e9 * 0.8, 25e9 * 0.92
HCCS, PCIE, ROCE = 90e9 * 0.7, 32e9 * 0.7, 12.5e9 * 0.7
MESH8, V100_LINK = 196e9 * 0.7, 25e9 * 0.9


def near(value: float, rel: float = 1e-6) -> object:
    """pytest.approx takes 1e-12 for nothing: seconds of a byte are not much more."""
    return pytest.approx(value, rel=rel, abs=0)


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
        (A100, "dp=4,tp=5", "tp", "InfiniBand", PORT),  # 5..9 lie 3 + 2, 15..19 lie 1 + 4
        (ASCEND, "tp=4", "tp", "HCCS", HCCS),
        (ASCEND, "tp=2", "tp", "HCCS", HCCS / 3),  # a full mesh: one link of three
        (ASCEND, "dp=2,tp=4", "dp", "PCIe", PCIE),
        (ASCEND, "dp=8", "dp", "HCCS", HCCS),  # four PCIe slots carry 89.6, the links inside 63
        (ASCEND, "dp=4,tp=2", "dp", "HCCS", HCCS / 3),  # two of each mesh: one link inside 21, two PCIe slots 44.8
        (ASCEND, "dp=2,tp=8", "dp", "RoCE", ROCE),
        (ASCEND, "dp=16", "dp", "HCCS", HCCS),
        (CPU, "dp=2,tp=2", "tp", "loopback", 0.8e9),
        (V100, "tp=4", "tp", "NVLink", 4 * V100_LINK),
        (V100, "tp=8", "tp", "NVLink", 6 * V100_LINK),
        (V100, "dp=2,tp=4", "dp", "NVLink", V100_LINK),  # 0-4 and 1-5 have two links, 2-6 and 3-7 one
        (B2, "tp=2", "tp", "HCCS", MESH8 / 7),
        (B2, "tp=8", "tp", "HCCS", MESH8),
        (C910, "tp=2", "tp", "SIO", 224e9 * 0.7),
        (C910, "tp=16", "tp", "SIO", 224e9 * 0.7),  # two dies of a package drive 2 * 196 between packages
    ],
)
def test_the_real_link(hardware, mesh, axis, name, bandwidth):
    real_link = link(hardware, mesh, axis)
    assert (real_link.name, real_link.ring_bandwidth) == (name, near(bandwidth))


def test_latency_is_that_of_the_slowest_level_crossed():
    assert link(A100, "dp=2,tp=8", "dp").latency_seconds == near(4e-6)
    assert link(A100, "dp=2,tp=8", "tp").latency_seconds == near(1e-6)


def seconds_per_byte(hardware: Hardware, mesh: str, kind: str) -> float:
    """Of large messages, where nothing else counts."""
    parsed = Mesh.parse(mesh)
    return (
        collective_seconds(hardware, parsed, 0, kind, 2e14) - collective_seconds(hardware, parsed, 0, kind, 1e14)
    ) / 1e14


def of_kind(hardware: Hardware, kind: str, members: int) -> float:
    """The share of the link that a kind of collective reaches between devices."""
    return hardware.constant(f"collective.{kind}.efficiency") * (1 - 1 / members) ** hardware.constant(
        f"collective.{kind}.ramp"
    )


def test_an_exchange_sends_over_its_own_port_only():
    inside = NVLINK * of_kind(A100, "exchange", 8)
    assert seconds_per_byte(A100, "ep=8", "all_to_all") == near(7 / 8 / inside)
    assert seconds_per_byte(A100, "ep=16", "all_to_all") == near(8 / 16 / PORT)  # half the peers are far


def test_across_nodes_phases_overlap_in_part():
    inside = 2 * 7 / 8 / (NVLINK * of_kind(A100, "all_reduce", 8))
    across = 2 * 1 / 2 / (8 * PORT)
    assert inside > across
    assert seconds_per_byte(A100, "dp=16", "all_reduce") == near(inside + across / 2)
    assert seconds_per_byte(A100, "dp=2,tp=8", "all_reduce") == near(2 * 1 / 2 / PORT)


def test_devices_that_share_a_port_have_half_of_it():
    shared = load_hardware("a100-80g-sxm-4hdr")
    assert seconds_per_byte(shared, "dp=2,tp=8", "all_gather") == near(1 / 2 / (PORT / 2))


def test_the_switch_reduces_for_large_groups_only():
    h200 = load_hardware("h200-141g-sxm")
    gain = h200.constant("collective.all_reduce.in_network")
    link = 450e9 * 0.8
    assert gain > 1.2
    assert seconds_per_byte(h200, "tp=4", "all_reduce") == near(2 * 3 / 4 / (link * of_kind(h200, "all_reduce", 4)))
    assert seconds_per_byte(h200, "tp=8", "all_reduce") == near(
        2 * 7 / 8 / (link * of_kind(h200, "all_reduce", 8) * gain)
    )
    assert seconds_per_byte(h200, "tp=8", "all_gather") == near(7 / 8 / (link * of_kind(h200, "ring", 8)))
    assert seconds_per_byte(h200, "pp=8", "send_receive") == near(1 / (link * of_kind(h200, "exchange", 8)))


def with_link(hardware: Hardware, level: int, **changes: object) -> Hardware:
    links = tuple(replace(x, **changes) if i == level else x for i, x in enumerate(hardware.links))
    return replace(hardware, links=links)


def test_oversubscription_spares_rails():
    slow = with_link(A100, 1, oversubscription=4.0)
    assert seconds_per_byte(slow, "dp=2,tp=8", "all_gather") == near(1 / 2 / PORT)
    plain = with_link(slow, 1, rails=False)
    assert seconds_per_byte(plain, "dp=2,tp=8", "all_gather") == near(1 / 2 / (PORT / 4))
    assert seconds_per_byte(slow, "ep=16", "all_to_all") == near(8 / 16 / (PORT / 4))


def test_sending_to_the_next_and_broadcasting():
    exchange = of_kind(A100, "exchange", 8)
    assert seconds_per_byte(A100, "pp=8", "send_receive") == near(1 / (NVLINK * exchange))
    assert seconds_per_byte(A100, "pp=2,tp=8", "send_receive") == near(1 / PORT)
    assert seconds_per_byte(A100, "pp=8", "broadcast") == near(1 / (NVLINK * of_kind(A100, "ring", 8)))
    assert seconds_per_byte(V100, "pp=2,tp=4", "send_receive") == near(1 / (V100_LINK * of_kind(V100, "exchange", 2)))


def test_joined_axes_are_one_group():
    mesh, flat = Mesh.parse("a=2,b=8"), Mesh.parse("a=16")
    assert joint_link(A100, mesh, (0, 1)) == axis_link(A100, flat, 0)
    assert joint_seconds(A100, mesh, (0, 1), "all_reduce", 1e8) == collective_seconds(A100, flat, 0, "all_reduce", 1e8)


def test_mesh_larger_than_the_cluster():
    with pytest.raises(UsageError, match="at most 16"):
        link(CPU, "dp=32", "dp")


@pytest.mark.parametrize("kind", CARRIED)
def test_nothing_to_do_costs_nothing(kind):
    assert collective_seconds(A100, Mesh.parse("dp=1,tp=8"), 0, kind, 1e9) == 0
    assert collective_seconds(A100, Mesh.parse("dp=1,tp=8"), 1, kind, 0) == 0


def ring_by_steps(hardware: Hardware, kind: str, size: int, full_bytes: float, passes: int) -> float:
    """A ring, step by step: in each of the n-1 steps of a pass every member sends one n-th to its neighbour. Small
    messages go by a protocol that does not wait between steps as long."""
    first = hardware.links[0]
    step, setup, setup_step, switch = (
        hardware.constant(f"collective.{kind}.{key}") for key in ("step", "setup", "setup_step", "switch")
    )
    large = 1 - math.exp(-full_bytes / size / switch)
    seconds = hardware.constant("collective.launch") + large * setup
    for _ in range(passes):
        for _ in range(size - 1):
            seconds += first.latency_seconds * (step + large * setup_step)
            seconds += full_bytes / size / (NVLINK * of_kind(hardware, kind, size))
    return seconds


@given(size=st.integers(2, 8), full_bytes=st.floats(1, 1e10))
def test_equal_to_a_ring_by_steps(size, full_bytes):
    mesh = Mesh((("tp", size),))
    for kind, passes in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        expected = ring_by_steps(A100, "all_reduce" if passes == 2 else "ring", size, full_bytes, passes)
        assert collective_seconds(A100, mesh, 0, kind, full_bytes) == near(expected, rel=1e-9)


@pytest.mark.parametrize("kind", CARRIED)
def test_arrays_of_sizes_give_arrays(kind):
    sizes = np.array([0.0, 1.0, 3e4, 5e6, 1e9])
    for text in ("tp=8", "tp=24", "tp=1"):
        mesh = Mesh.parse(text)
        many = collective_seconds(A100, mesh, 0, kind, sizes)
        assert many.shape == sizes.shape
        assert many.tolist() == near([collective_seconds(A100, mesh, 0, kind, float(s)) for s in sizes])
        assert collective_seconds(A100, mesh, 0, kind, 7) == collective_seconds(A100, mesh, 0, kind, 7.0)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    full_bytes=st.floats(1, 1e9),
    factor=st.floats(1, 10),
    level=st.integers(0, 2),
)
def test_monotone_in_bytes_bandwidth_and_latency(sizes, full_bytes, factor, level):
    mesh = Mesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
    slack = 1 + 1e-12
    for hardware in (ASCEND, V100, C910):
        chosen = hardware.links[level % len(hardware.links)]
        changed = level % len(hardware.links)
        faster = with_link(hardware, changed, bandwidth=chosen.bandwidth * factor)
        later = with_link(hardware, changed, latency_seconds=chosen.latency_seconds * factor)
        for axis, kind in itertools.product(range(len(sizes)), CARRIED):
            seconds = collective_seconds(hardware, mesh, axis, kind, full_bytes)
            assert collective_seconds(hardware, mesh, axis, kind, full_bytes * factor) * slack >= seconds
            assert collective_seconds(faster, mesh, axis, kind, full_bytes) <= seconds * slack
            assert collective_seconds(later, mesh, axis, kind, full_bytes) * slack >= seconds


def test_memory_of_prices_knows_the_hardware():
    mesh = Mesh.parse("tp=4")
    before = collective_seconds(A100, mesh, 0, "all_gather", 1e9)
    constants = tuple((k, v * 2 if k == "collective.launch" else v) for k, v in A100.constants)
    after = collective_seconds(replace(A100, constants=constants), mesh, 0, "all_gather", 1e9)
    assert after == near(before + A100.constant("collective.launch"))
