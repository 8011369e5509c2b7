"""Chakra execution traces (mlcommons/chakra, schema/protobuf/et_def.proto): one file a rank, for ASTRA-sim and others.

A file is a sequence of protobuf messages, each after its length as a varint: GlobalMetadata, then one Node per event.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np

from autoshard.ir.mesh import Mesh
from autoshard.redistribute import CARRIED
from autoshard.simulation.timeline import Event, Timeline
from autoshard.units import MICROSECONDS

VERSION = "0.0.4"
COMM_TYPES = {name: kind.chakra for name, kind in CARRIED.items() if kind.chakra is not None}


class NodeType(IntEnum):
    """Node types as numbered in et_def.proto."""

    COMPUTE, SEND, COLLECTIVE = 4, 5, 7


class WireType(IntEnum):
    """Wire types as numbered by protobuf."""

    VARINT, DOUBLE, LENGTH = 0, 1, 2


def execution_trace(timeline: Timeline, mesh: Mesh) -> bytes:
    """The nodes of a step; the same on every rank: a group is a number, and `groups.RANK.json` lists its ranks."""
    nodes = [_node(number, event, mesh) for number, event in enumerate(timeline.events)]
    return b"".join(map(_delimited, [_string(1, VERSION), *nodes]))


def _node(number: int, event: Event, mesh: Mesh) -> bytes:
    between = NodeType.COLLECTIVE if event.collective in COMM_TYPES else NodeType.SEND
    kind = between if event.collective else NodeType.COMPUTE
    return b"".join(
        [
            _integer(1, number),
            _string(2, event.name),
            _integer(3, kind),
            *(_integer(5, wait, always=True) for wait in event.waits),
            _integer(6, round(event.start_seconds * MICROSECONDS)),
            _integer(7, max(1, round(event.duration_seconds * MICROSECONDS))),
            *_attributes(event, mesh),
        ]
    )


def _attributes(event: Event, mesh: Mesh) -> list[bytes]:
    """Attributes for ASTRA-sim's feeder: communication by type, bytes and group; computation by its time."""
    attributes = [_attribute("is_cpu_op", _integer(27, 0, always=True))]
    size = int(event.bytes)
    if event.collective in COMM_TYPES:
        attributes.append(_attribute("comm_type", _integer(9, COMM_TYPES[event.collective], always=True)))
    if event.collective:
        attributes.append(_attribute("comm_size", _integer(9, size, always=True)))
        attributes.append(_attribute("pg_name", _string(29, str(group_number(mesh, event.axes)))))
    else:
        attributes.append(_attribute("tensor_size", _integer(13, size, always=True)))
        attributes.append(_attribute("runtime", _double(3, event.duration_seconds * MICROSECONDS)))
    return attributes


def _attribute(name: str, value: bytes) -> bytes:
    return _bytes(10, _string(1, name) + value)


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message


def _varint(value: int) -> bytes:
    """`value` in base 128, lowest group first; the high bit marks that more follow."""
    assert value >= 0, value
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _integer(field: int, value: int, always: bool = False) -> bytes:
    """Integer field; proto3 leaves out the default zero, but not inside a oneof (`always`)."""
    return _key(field, WireType.VARINT) + _varint(value) if value or always else b""


def _double(field: int, value: float) -> bytes:
    return _key(field, WireType.DOUBLE) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, WireType.LENGTH) + _varint(len(value)) + value


def _string(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def group_of(mesh: Mesh, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """Ranks, ascending, of the group of `rank` over the joined axes; ranks are row-major over the mesh."""
    ranks = np.arange(mesh.size).reshape(mesh.sizes)
    place = mesh.coordinates(rank)
    index = tuple(slice(None) if name in axes else place[i] for i, name in enumerate(mesh.names))
    return tuple(int(r) for r in np.sort(ranks[index].reshape(-1)))


def group_number(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """A number common to all groups over the same axes: the axes as bits."""
    return sum(1 << mesh.index(axis) for axis in axes)
