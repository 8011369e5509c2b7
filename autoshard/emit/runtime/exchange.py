"""Any layout to any other in one collective: every device receives only what it needs and lacks.

What one device has for another is a product of index sets, one per dim, whatever the shards are (uneven, in blocks,
through blocks, nested). A device that already holds an element uses its own; where several hold the same, each receives
from the one with its own coordinate on the axes that replicate it; for a sum it receives every partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from .axis import Axis, Cut, cut_indices, dim_cuts
from .redistribution import redistributed

Where = tuple[Tensor, ...] | tuple[slice, ...]  # an index into a tensor: a product of index sets


@dataclass(frozen=True)
class _Piece:
    """A message: `get` indexes the tensor of the device that has it, `put` the result of the one that needs it."""

    get: Where
    put: Where
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class _Route:
    """Messages that this device, number `axis.index` of a group, exchanges with each member, itself included."""

    sends: tuple[_Piece | None, ...]
    receives: tuple[_Piece | None, ...]
    before: tuple[tuple[int, ...], ...]  # the local shape of every member
    after: tuple[int, ...]  # the local shape of the result here
    is_local: bool  # nobody in the group needs anything of another


def exchange(
    x: Tensor, axis: Axis, shape: Sequence[int], before: str, after: str, *,
    by: str = "all_to_all", again: bool = False, kept: bool = False,
) -> Tensor:  # fmt: skip
    """Redistributes a tensor of global `shape` from layout `before` to `after`, over all axes that `axis` joins.

    Layouts are text: a placement for each axis of the mesh. `by="all_gather"`: each device receives everything and
    selects. `again`: a weight gathered for its use, not kept for backward: see `regather_before`. `kept`: see
    `all_gather`.
    """
    route = _route(axis, tuple(shape), before, after, x.device)
    if x.shape != route.before[axis.index]:
        raise ValueError(f"{tuple(x.shape)} is not the local shape {route.before[axis.index]} of {before} {shape}")
    forward = partial(_forward, route=route, by=by)
    if "R+" in _changed(axis, before, after):
        backward = partial(_transposed, route=route)  # the gradient goes back the way the value came
    else:
        back = _route(axis, tuple(shape), _of_gradient(after), _of_gradient(before), x.device)
        backward = partial(_forward, route=back, by=by)
    return redistributed(x, forward, backward, again=again, kept=kept, axis=axis)


def _changed(axis: Axis, before: str, after: str) -> list[str]:
    """Former placements of the axes whose placement changes."""
    names, texts = list(axis.mesh.axes), zip(before.split(), after.split(), strict=True)
    return [x for name, (x, y) in zip(names, texts, strict=True) if x != y and name in axis.names]


def _of_gradient(layout: str) -> str:
    """Layout of a tensor's gradient, as a layout of values."""
    return " ".join({"R+": "P", "P": "R"}.get(placement, placement) for placement in layout.split())


@lru_cache(maxsize=1024)
def _route(axis: Axis, shape: tuple[int, ...], before: str, after: str, device: torch.device) -> _Route:
    members = [_coordinates(axis, index) for index in range(axis.size)]
    have = [_held(shape, before, axis, coordinates) for coordinates in members]
    need = [_held(shape, after, axis, coordinates) for coordinates in members]

    def piece(giver: int, taker: int) -> _Piece | None:
        if not _gives(axis, before, after, members[giver], members[taker]):
            return None
        common = [_common(a, b) for a, b in zip(have[giver], need[taker], strict=True)]
        lengths = tuple(get.length for get, _ in common)
        if 0 in lengths:
            return None
        get, put = (_where([pair[side] for pair in common], device) for side in (0, 1))
        return _Piece(get, put, lengths)

    here = axis.index
    return _Route(
        tuple(piece(here, other) for other in range(axis.size)),
        tuple(piece(other, here) for other in range(axis.size)),
        tuple(tuple(map(_length, held)) for held in have),
        tuple(map(_length, need[here])),
        not any(_lacks(axis, before, after, have[i], need[i]) for i in range(axis.size)),
    )


def _coordinates(axis: Axis, index: int) -> dict[str, int]:
    """Mesh coordinates of a member of the group."""
    coordinates = dict(axis.mesh.coordinates)
    for name in reversed(axis.names):
        index, coordinates[name] = divmod(index, axis.mesh.axes[name])
    return coordinates


_Held = tuple[int, tuple[Cut, ...]]  # the positions of a dim that a device holds: its length, and what cuts it


def _held(shape: tuple[int, ...], layout: str, axis: Axis, coordinates: dict[str, int]) -> list[_Held]:
    return [(size, dim_cuts(dim, layout, axis.mesh, coordinates)) for dim, size in enumerate(shape)]


@lru_cache(maxsize=4096)
def _length(held: _Held) -> int:
    return len(cut_indices(*held))


def _summed(axis: Axis, before: str, after: str) -> list[str]:
    """Axes over which every member holds a partial sum that all who need the element receive."""
    texts = zip(axis.mesh.axes, before.split(), after.split(), strict=True)
    return [name for name, x, y in texts if name in axis.names and x == "P" != y]


def _gives(axis: Axis, before: str, after: str, giver: dict[str, int], taker: dict[str, int]) -> bool:
    """Does `giver` send to `taker`? Their coordinates match on every axis that neither shards nor is summed over."""
    summed = _summed(axis, before, after)
    texts = zip(axis.mesh.axes, before.split(), strict=True)
    return all(giver[name] == taker[name] or x.startswith("S") or name in summed for name, x in texts)


def _lacks(axis: Axis, before: str, after: str, have: list[_Held], need: list[_Held]) -> bool:
    if _summed(axis, before, after):
        return True
    if any(_length(needed) == 0 for needed in need):
        return False
    return any(_common(held, needed)[1].length < _length(needed) for held, needed in zip(have, need, strict=True))


class _Set(NamedTuple):
    """Positions: a slice if they are contiguous, else a tensor."""

    length: int
    where: slice | Tensor


@lru_cache(maxsize=4096)
def _common(have: _Held, need: _Held) -> tuple[_Set, _Set]:
    """Positions in `have` and in `need` of the indices that both hold, in the order of `need`."""
    held, needed = cut_indices(*have), cut_indices(*need)
    place = torch.full((need[0],), -1)
    place[held] = torch.arange(len(held))
    put = (place[needed] >= 0).nonzero().squeeze(1)
    return _set(place[needed][put]), _set(put)


def _set(indices: Tensor) -> _Set:
    is_run = len(indices) > 0 and bool((indices[1:] - indices[:-1] == 1).all())
    return _Set(len(indices), slice(int(indices[0]), int(indices[-1]) + 1) if is_run else indices)


def _where(sets: list[_Set], device: torch.device) -> Where:
    """Slices if all are contiguous, else index tensors that broadcast to their product."""
    runs = tuple(subset.where for subset in sets if isinstance(subset.where, slice))
    if len(runs) == len(sets):
        return runs
    last = len(sets) - 1
    return tuple(_tensor(subset).view(-1, *[1] * (last - dim)).to(device) for dim, subset in enumerate(sets))


def _tensor(subset: _Set) -> Tensor:
    return torch.arange(subset.where.start, subset.where.stop) if isinstance(subset.where, slice) else subset.where


# --- moving ---


def _forward(x: Tensor, axis: Axis, route: _Route, by: str) -> Tensor:
    result = x.new_zeros(route.after)
    if by == "all_gather" and not route.is_local:
        counts = [math.prod(shape) for shape in route.before]
        gathered = axis.transport.all_gather(x.reshape(-1).contiguous(), counts).split(counts)
        for piece, flat, shape in zip(route.receives, gathered, route.before, strict=True):
            if piece is not None:
                result[piece.put] += flat.view(shape)[piece.get]
        return result
    local_piece = route.receives[axis.index]
    if local_piece is not None:
        result[local_piece.put] = x[local_piece.get]
    if not route.is_local:
        _send(x, result, axis, route.sends, route.receives)
    return result


def _transposed(x: Tensor, axis: Axis, route: _Route) -> Tensor:
    """Sends each piece back to where it came from, and adds the pieces up there."""
    sends, receives = (tuple(map(_turned, pieces)) for pieces in (route.receives, route.sends))
    result = x.new_zeros(route.before[axis.index])
    local_piece = receives[axis.index]
    if local_piece is not None:
        result[local_piece.put] = x[local_piece.get]
    if not route.is_local:
        _send(x, result, axis, sends, receives)
    return result


def _turned(piece: _Piece | None) -> _Piece | None:
    return None if piece is None else _Piece(piece.put, piece.get, piece.lengths)


def _send(
    x: Tensor, result: Tensor, axis: Axis, sends: Sequence[_Piece | None], receives: Sequence[_Piece | None]
) -> None:
    """Adds to the result what the other devices have for this one."""
    sent = [None if index == axis.index else piece for index, piece in enumerate(sends)]
    received = [None if index == axis.index else piece for index, piece in enumerate(receives)]
    leaving, counts = ([math.prod(piece.lengths) if piece else 0 for piece in pieces] for pieces in (sent, received))
    arrived = axis.transport.all_to_all(_packed(x, sent, leaving), leaving, counts)
    for piece, part in zip(received, arrived.split(counts), strict=True):
        if piece is not None:
            result[piece.put] += part.view(piece.lengths)


def _packed(x: Tensor, pieces: Sequence[_Piece | None], counts: Sequence[int]) -> Tensor:
    """The pieces one after another in a flat tensor, each copied once."""
    flat = x.new_empty(sum(counts))
    for piece, place in zip(pieces, flat.split(list(counts)), strict=True):
        if piece is not None:
            place.view(piece.lengths).copy_(x[piece.get])
    return flat
