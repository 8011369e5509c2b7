"""Halo exchange for images with sharded height or width: windows reach into a neighbour's rows, which are fetched."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.ir.graph import Op
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.variant_record import (
    Inside,
    KeptTensors,
    Layouts,
    LocalTensors,
    Temporary,
    bytes_of,
    first,
    shards,
)


def halos(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts) -> Iterator[tuple[int, int, int, int]]:
    """(axis, dim, rows that windows reach beyond their own, rows of padding at an edge) of each sharded spatial dim."""
    x, attributes = operands[0], dict(op.attributes)
    assert x is not None
    count = int(op.target[-2])  # spatial dims: conv2d
    weight = operands[1] if len(operands) > 1 else None
    kernel = weight.shape[-count:] if weight is not None else _tuple(attributes["kernel_size"], count)
    stride, dilation = (_tuple(attributes.get(name), count) for name in ("stride", "dilation"))
    padding = _tuple(attributes.get("padding", 0), count)
    for axis, dim in shards(layouts[0]):
        spatial = dim - (len(x.shape) - count)
        if spatial >= 0 and mesh.sizes[axis] > 1:
            reach = max(dilation[spatial] * (kernel[spatial] - 1) + 1 - stride[spatial], 0)
            rows = -(-reach // stride[spatial]) if "transpose" in op.target else reach
            yield axis, dim, rows, padding[spatial]


def halo_collectives(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts) -> Inside:
    """Sends rows at the edges of each sharded dim to the neighbours; their gradients come back. Uneven shards may need
    a row more than `span - stride`."""
    x = operands[0]
    assert x is not None
    calls = []
    for axis, dim, rows, _ in halos(mesh, op, operands, layouts):
        sent = x.bytes / max(x.shape[dim], 1) * rows * (0.5 if mesh.sizes[axis] == 2 else 1.0)
        calls.append((axis, "all_to_all", sent * mesh.sizes[axis] / (mesh.sizes[axis] - 1)))
    back = calls if x.requires_grad else []
    return Inside(tuple(call for call in calls if call[2]), tuple(call for call in reversed(back) if call[2]))


def _tuple(value: object, count: int) -> tuple[int, ...]:
    if isinstance(value, tuple) and value:
        return tuple(value) * (count if len(value) == 1 else 1)
    return (value if isinstance(value, int) else 1,) * count


def _rows_with_halo(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts) -> tuple[float, float]:
    """Bytes of a device's rows with those it fetched, and of all that its windows cover."""
    x = first(operands)
    fetched = covered = float(x.bytes)
    for axis, dim, reach, padding in halos(mesh, op, operands, layouts):
        rows = max(x.shape[dim], 1)
        ends = 1 if mesh.sizes[axis] == 2 else 0  # with two devices each has an edge of the image
        covered *= (rows + reach) / rows
        fetched *= (rows + max(reach - padding * ends, 0)) / rows
    return fetched, covered


def halo_holds(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
    """Temporary bytes: the rows before they are padded; backward the gradient of what is covered, and of the rows."""
    x = first(operands)
    fetched, covered = _rows_with_halo(mesh, op, operands, layouts)
    padded = fetched if covered > fetched else 0.0
    back = covered + padded - x.bytes if padded else covered
    return Temporary(max(0.0, padded - bytes_of(*results)), back if x.requires_grad else 0.0)


def halo_keeps(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> KeptTensors:
    """Bytes that the windows cover, kept instead of the input."""
    return KeptTensors((0,), None, _rows_with_halo(mesh, op, operands, layouts)[1])
