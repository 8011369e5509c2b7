"""A cluster of several kinds of devices, in the order of ranks: `a100-80g-sxm:8,v100-32g-sxm2:8`, or a profile with
`[[kinds]]`. What spans kinds is priced as if all its devices were the slowest kind, each with the least memory of any,
joined by the slowest network: such devices wait for each other in every step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, permutations

from autoshard.cluster.cluster_data import SCHEMA_VERSION, DeviceKind, Hardware
from autoshard.cluster.profile_reader import Faults, Table
from autoshard.cluster.profile_schema import Link
from autoshard.cluster.topology import make_topology
from autoshard.errors import UsageError
from autoshard.system.files import parse_toml


def spec_kinds(spec: str, load: Callable[[str], Hardware]) -> Hardware:
    """`NAME:DEVICES,NAME:DEVICES`, each a profile that `load` knows."""
    pairs = [own.rpartition(":") for own in spec.split(",")]
    return _of_kinds(spec, tuple(DeviceKind(int(count), load(name.strip())) for name, _, count in pairs))


def parse_kinds(text: str, where: str, load: Callable[[str], Hardware], parse: Callable[[str], Hardware]) -> Hardware:
    """A profile with `[[kinds]]`: each with `devices`, and its `profile` by name, file or text. InvalidFileError names
    the faults."""
    root = Table(parse_toml(text, where, "docs/hardware.md"), Faults(lambda key: f"{where}:1"))
    root.expect("schema", SCHEMA_VERSION)
    name, kinds = root.text("name"), []
    for own in root.tables("kinds"):
        profile, devices = own.text("profile"), own.integer("devices")
        own.finish()
        root.faults.raise_all()
        kinds.append(DeviceKind(devices, parse(profile) if "\n" in profile else load(profile)))
    root.finish()
    root.faults.raise_all()
    return _of_kinds(name, tuple(kinds))


def orders(hardware: Hardware) -> Iterator[Hardware]:
    """The cluster with its kinds in each order of ranks, its own first: which stages are first is a choice."""
    for kinds in dict.fromkeys(permutations(hardware.kinds)):
        name = ",".join(f"{own.hardware.name}:{own.devices}" for own in kinds)
        yield hardware if kinds == hardware.kinds else _of_kinds(name, kinds)


def rank_words(hardware: Hardware) -> str:
    """Which ranks are of which kind."""
    firsts = accumulate((own.devices for own in hardware.kinds), initial=0)
    pairs = zip(firsts, hardware.kinds, strict=False)
    return ", ".join(f"ranks {first} to {first + own.devices - 1} are {own.hardware.name}" for first, own in pairs)


def _of_kinds(name: str, kinds: tuple[DeviceKind, ...]) -> Hardware:
    if any(own.hardware.kinds for own in kinds) or len(kinds) < 2:
        raise UsageError(f"{name}: expected two kinds of devices or more, each a profile of one kind", "a100:8,v100:8")
    nodes = [max(1, min(own.devices, own.hardware.devices_per_node)) for own in kinds]
    for own, node in zip(kinds, nodes, strict=True):
        if own.devices < 1 or own.devices % node:
            fill = f"{own.devices} devices of {own.hardware.name}, whose nodes have {node}, do not fill nodes"
            raise UsageError(f"{name}: {fill}", f"{own.hardware.name}:{max(1, own.devices // node) * node}")
    total, node = sum(own.devices for own in kinds), math.gcd(*nodes)
    slowest = min((own.hardware for own in kinds), key=lambda own: max(rate for _, rate in own.peaks))
    least = min((own.hardware for own in kinds), key=lambda own: own.usable_memory_bytes)
    everywhere = set.intersection(*({dtype for dtype, _ in own.hardware.peaks} for own in kinds))
    outermost = min((own.hardware.links[-1] for own in kinds), key=lambda link: link.bandwidth * link.efficiency)
    largest = max(total, outermost.devices // node * node)  # costs are measured on more replicas, too
    network = replace(_switch(outermost, largest, node), latency_seconds=_latency(kinds))
    inside = (_switch(slowest.links[0], node, 1),) if node > 1 else ()
    known = tuple(DeviceKind(own.devices, _reaching(own.hardware, network, largest)) for own in kinds)
    return replace(
        slowest,
        name=name,
        summary=", then ".join(f"{own.devices} of {own.hardware.name}" for own in kinds),
        text=_text(name, kinds),
        devices_per_node=node,
        memory_bytes=least.memory_bytes,
        usable_memory=least.usable_memory,
        peaks=tuple(own for own in slowest.peaks if own[0] in everywhere),
        links=(*inside, network),
        calibrated=all(own.hardware.calibrated for own in kinds),
        kinds=known,
    )


def _latency(kinds: tuple[DeviceKind, ...]) -> float:
    return max(own.hardware.links[-1].latency_seconds for own in kinds)


def _switch(link: Link, devices: int, inner: int) -> Link:
    """`link` as it joins so many, in blocks of `inner`; its own graph where it has that size."""
    if link.devices == devices and link.graph.size * inner == devices:
        return link
    return replace(link, devices=devices, topology="switch", graph=make_topology("switch", devices // inner))


def _reaching(hardware: Hardware, network: Link, devices: int) -> Hardware:
    """One kind whose links join so many, as meshes with several stages count them."""
    own = hardware.max_devices
    if own >= devices:
        return hardware
    blocks = -(-devices // own)
    return replace(hardware, links=(*hardware.links, _switch(network, own * blocks, own)))


def _text(name: str, kinds: tuple[DeviceKind, ...]) -> str:
    """What `parse_kinds` reads, with every profile in it."""
    parts = [f"schema = {SCHEMA_VERSION}\nname = {json.dumps(name, ensure_ascii=False)}\n"]
    for own in kinds:
        text = own.hardware.text
        quoted = json.dumps(text, ensure_ascii=False) if "'''" in text else f"'''\n{text.rstrip()}\n'''"
        parts.append(f"\n[[kinds]]\ndevices = {own.devices}\nprofile = {quoted}\n")
    return "".join(parts)
