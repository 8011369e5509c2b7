"""A cluster of several kinds of devices, in the order of ranks: `a100-80g-sxm:8,v100-32g-sxm2:8`, or a profile with
`[[kinds]]`. What spans kinds is priced as if all its devices were the slowest kind, each with the least memory of any,
joined by the slowest network: such devices wait for each other in every step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, permutations
from pathlib import Path

from autoshard.cluster.cluster_data import SCHEMA_VERSION, DeviceKind, Hardware
from autoshard.cluster.links_and_constants import Link
from autoshard.cluster.profile_reader import Table
from autoshard.cluster.topology import make_topology
from autoshard.errors import UsageError

MOST_ORDERED = 3  # kinds: n of them take n! searches, three 6 of about 40 s each (benchmarks/joint_search.py, `both`)


def spec_kinds(spec: str, load: Callable[[str], Hardware]) -> Hardware:
    """`NAME:DEVICES,NAME:DEVICES`, each a profile that `load` knows."""
    pairs = [part.rpartition(":") for part in spec.split(",")]
    return _of_kinds(spec, tuple(DeviceKind(int(count), load(name.strip())) for name, _, count in pairs))


def read_kinds(
    root: Table, folder: Path, load: Callable[[str], Hardware], parse: Callable[[str], Hardware]
) -> Hardware:
    """A profile with `[[kinds]]`: each with `devices`, and its `profile` by name, file (from `folder`) or text.
    InvalidFileError names the faults."""
    root.expect("schema", SCHEMA_VERSION)
    name, kinds = root.text("name"), list[DeviceKind]()
    for table in root.tables("kinds"):
        profile, devices = table.text("profile"), table.integer("devices")
        table.finish()
        root.faults.raise_all()
        path = str(folder / profile) if profile.endswith(".toml") else profile
        kinds.append(DeviceKind(devices, parse(profile) if "\n" in profile else load(path)))
    root.finish()
    if len(kinds) < 2:
        root.fault("kinds", "expected two or more")
    root.faults.raise_all()
    return _of_kinds(name, tuple(kinds))


def used(hardware: Hardware, devices: int) -> Hardware:
    """The devices of the first so many ranks."""
    kinds, left = list[DeviceKind](), devices
    for kind in hardware.kinds:
        kinds.append(DeviceKind(min(left, kind.devices), kind.hardware))
        left -= kinds[-1].devices
        if left == 0:
            break
    if left or len(kinds) == len(hardware.kinds):  # more than there are is for others to refuse
        return hardware
    return kinds[0].hardware if len(kinds) == 1 else _of_kinds(_spec(kinds), tuple(kinds))


def orders(hardware: Hardware) -> Iterator[Hardware]:
    """The cluster with its kinds in each order of ranks, its own first: which stages are first is a choice. With many
    kinds, its own order alone: each order takes a search."""
    every = permutations(hardware.kinds) if len(hardware.kinds) <= MOST_ORDERED else [hardware.kinds]
    for kinds in dict.fromkeys(every):
        yield hardware if kinds == hardware.kinds else _of_kinds(_spec(kinds), kinds)


def _spec(kinds: Iterable[DeviceKind]) -> str:
    return ",".join(f"{kind.hardware.name}:{kind.devices}" for kind in kinds)


def rank_words(hardware: Hardware) -> str:
    """Sentence on which ranks are of which kind."""
    firsts = accumulate((kind.devices for kind in hardware.kinds), initial=0)
    pairs = zip(firsts, hardware.kinds, strict=False)
    return ", ".join(f"ranks {first} to {first + kind.devices - 1} are {kind.hardware.name}" for first, kind in pairs)


def _of_kinds(name: str, kinds: tuple[DeviceKind, ...]) -> Hardware:
    """Cluster of these kinds. UsageError if one before the last does not fill nodes: others would cross nodes."""
    nodes = [max(1, min(kind.devices, kind.hardware.devices_per_node)) for kind in kinds]
    bad = [n for n, kind in enumerate(kinds) if kind.devices < 1 or (kind.devices % nodes[n] and n < len(kinds) - 1)]
    if bad:
        misfit, node = kinds[bad[0]], nodes[bad[0]]
        fill = f"{misfit.devices} devices of {misfit.hardware.name}, whose nodes have {node}, do not fill nodes"
        pairs = zip(kinds, nodes, strict=True)
        raise UsageError(f"{name}: {fill}", _spec(replace(k, devices=max(k.devices // n, 1) * n) for k, n in pairs))
    total, node = sum(kind.devices for kind in kinds), math.gcd(*nodes)
    slowest = min((device.hardware for device in kinds), key=lambda device: max(rate for _, rate in device.peaks))
    least = min((device.hardware for device in kinds), key=lambda device: device.usable_memory_bytes)
    everywhere = set.intersection(*({dtype for dtype, _ in kind.hardware.peaks} for kind in kinds))
    outermost = min((kind.hardware.links[-1] for kind in kinds), key=lambda link: link.bandwidth * link.efficiency)
    largest = max(total, outermost.devices // node * node)  # costs are measured on more replicas, too
    network = replace(_switch(outermost, largest, node), latency_seconds=_latency(kinds))
    inside = (_switch(slowest.links[0], node, 1),) if node > 1 else ()
    known = tuple(replace(kind, joined=_reaching(kind.hardware, network, largest)) for kind in kinds)
    return replace(
        slowest,
        name=name,
        summary=", then ".join(f"{kind.devices} of {kind.hardware.name}" for kind in kinds),
        text=_text(name, kinds),
        devices_per_node=node,
        memory_bytes=least.memory_bytes,
        usable_memory=least.usable_memory,
        peaks=tuple(peak for peak in slowest.peaks if peak[0] in everywhere),
        links=(*inside, network),
        calibrated=all(kind.hardware.calibrated for kind in kinds),
        kinds=known,
    )


def _latency(kinds: tuple[DeviceKind, ...]) -> float:
    return max(kind.hardware.links[-1].latency_seconds for kind in kinds)


def _switch(link: Link, devices: int, inner: int) -> Link:
    """`link` joining `devices`, in blocks of `inner`; its own graph where it has that size."""
    if link.devices == devices and link.graph.size * inner == devices:
        return link
    return replace(link, devices=devices, topology="switch", graph=make_topology("switch", devices // inner))


def _reaching(hardware: Hardware, network: Link, devices: int) -> Hardware:
    """One kind with links that join `devices`, as meshes with several stages count them."""
    reach = hardware.max_devices
    if reach >= devices:
        return hardware
    blocks = -(-devices // reach)
    return replace(hardware, links=(*hardware.links, _switch(network, reach * blocks, reach)))


def _text(name: str, kinds: tuple[DeviceKind, ...]) -> str:
    """Text of a profile with `[[kinds]]`, with every profile in it."""
    parts = [f"schema = {SCHEMA_VERSION}\nname = {json.dumps(name, ensure_ascii=False)}\n"]
    for kind in kinds:
        text = kind.hardware.text
        quoted = json.dumps(text, ensure_ascii=False) if "'''" in text else f"'''\n{text.rstrip()}\n'''"
        parts.append(f"\n[[kinds]]\ndevices = {kind.devices}\nprofile = {quoted}\n")
    return "".join(parts)
