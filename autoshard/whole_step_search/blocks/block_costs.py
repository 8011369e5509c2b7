"""Costs of one micro-batch in each block of a split: seconds of the simulated program, bytes kept, bytes held."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

INNER = "inner"  # of HeldParameters, no number


@dataclass(frozen=True)
class InnerSums:
    """Parameters on one device whose gradients are sums over the `summed` axes of a replica, and whose shards over the
    replicas (ZeRO) are also split over its `cut` axes, in `times` parts: positions among the axes of a replica.
    `stored_bytes`: of weights, gradients and optimizer state, as they are used."""

    summed: tuple[int, ...]
    cut: tuple[int, ...]
    times: int
    gradient_bytes: float = 0.0
    moved_bytes: float = 0.0
    stored_bytes: float = 0.0
    update_seconds: float = 0.0


@dataclass(frozen=True)
class HeldParameters:
    """Parameters on one device, whole over the replicas: bytes of weights, gradients and optimizer state, and seconds
    of their update; `split_update_seconds` if the devices of a replica that do the same work share it. `moved_bytes`:
    of the weights as they are gathered; `inner`: those that concern other devices of a replica, each once."""

    weights_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    moved_bytes: float = 0.0
    update_seconds: float = 0.0
    buffer_bytes: float = 0.0
    split_update_seconds: float = 0.0
    inner: tuple[InnerSums, ...] = ()

    def update_share(self, replicas: int) -> float:
        """Seconds of the update with weights sharded over this many replicas."""
        spared = sum(part.update_seconds * (1 - 1 / part.times) for part in self.inner)
        return (self.update_seconds - spared) / replicas

    def stored_share(self, replicas: int) -> float:
        """Bytes of weights, gradients and optimizer state, sharded over this many replicas."""
        stored = self.weights_bytes + self.gradient_bytes + self.optimizer_bytes
        return (stored - sum(part.stored_bytes * (1 - 1 / part.times) for part in self.inner)) / replicas

    def gradient_share(self, replicas: int) -> float:
        """Bytes of gradients, sharded over this many replicas."""
        spared = sum(part.gradient_bytes * (1 - 1 / part.times) for part in self.inner)
        return (self.gradient_bytes - spared) / replicas


@dataclass(frozen=True)
class Move:
    """Collective between replicas, and over the axes `inner` of a replica too (positions): full bytes."""

    primitive: str
    bytes: float
    backward: bool
    inner: tuple[int, ...] = ()


@dataclass(frozen=True)
class BlockCosts:
    """Costs of a block for one micro-batch. `recompute_seconds[keep]`: what backward recomputes; `saved_bytes[keep]`
    until backward; `working_bytes[keep]` more while the block runs. `received_bytes`: of what it reads from earlier
    blocks; `following_bytes`: of the last of these. `held`: the parameters that the block reads first; `shared`: those
    that an earlier block reads too. `moves`: weights in shards exchanged by replicas, not included in the seconds here.
    `overhead_seconds`: communication and replicated computation of a replica's devices, in both directions, each by
    itself. `free_seconds`: of (forward, backward) before the first collective inside a replica, which waits for what is
    on its link."""

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: tuple[tuple[str, float], ...]
    saved_bytes: tuple[tuple[str, float], ...]
    working_bytes: tuple[tuple[str, float], ...]
    received_bytes: float
    following_bytes: float
    held: HeldParameters
    shared: HeldParameters
    moves: tuple[Move, ...] = ()
    overhead_seconds: float = 0.0
    free_seconds: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class ShardedCosts:
    """Costs with weights sharded over the replicas: gathered one by one where they are used, or all of a block
    `together`, a block ahead (ZeRO 3). `once`: for ZeRO 1 and 2, of a micro-batch that finds its weights gathered."""

    alone: BlockCosts
    together: BlockCosts
    once: tuple[BlockCosts, BlockCosts]


def carried_over(before: BlockCosts, after: ShardedCosts, whole: BlockCosts) -> ShardedCosts:
    """Costs with shards for another micro-batch, `whole`: the change from `before` to `after` is added to it."""
    alone, together, first, second = (
        _changed(before, costs, whole) for costs in (after.alone, after.together, *after.once)
    )
    return ShardedCosts(alone, together, (first, second))


def _changed(before: BlockCosts, after: BlockCosts, whole: BlockCosts) -> BlockCosts:
    def sizes(name: str) -> tuple[tuple[str, float], ...]:
        ends, starts = dict(getattr(after, name)), dict(getattr(before, name))
        return tuple((keep, max(0.0, size + ends[keep] - starts[keep])) for keep, size in getattr(whole, name))

    return replace(
        whole,
        forward_seconds=max(0.0, whole.forward_seconds + after.forward_seconds - before.forward_seconds),
        backward_seconds=max(0.0, whole.backward_seconds + after.backward_seconds - before.backward_seconds),
        recompute_seconds=sizes("recompute_seconds"),
        saved_bytes=sizes("saved_bytes"),
        working_bytes=sizes("working_bytes"),
        moves=after.moves,
    )


def held_together(a: HeldParameters, b: HeldParameters) -> HeldParameters:
    sums = {field.name: getattr(a, field.name) + getattr(b, field.name) for field in fields(a) if field.name != INNER}
    return HeldParameters(**sums, inner=inner_together((*a.inner, *b.inner)))


def inner_together(parts: Iterable[InnerSums]) -> tuple[InnerSums, ...]:
    """Parts, those with the same axes merged into one."""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...], int], list[InnerSums]] = {}
    for part in parts:
        groups.setdefault((part.summed, part.cut, part.times), []).append(part)
    return tuple(
        InnerSums(
            *key,
            sum(part.gradient_bytes for part in alike),
            sum(part.moved_bytes for part in alike),
            sum(part.stored_bytes for part in alike),
            sum(part.update_seconds for part in alike),
        )
        for key, alike in groups.items()
    )
