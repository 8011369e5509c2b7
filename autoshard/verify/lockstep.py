"""All ranks of a mesh as threads of one process: the runtime's own functions over a transport of barriers and slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from autoshard.emit.runtime import ParallelMesh, Transport

_Result = TypeVar("_Result")


class _Group:
    """The ranks that talk over one set of axes: a slot each, and a barrier."""

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout_seconds)


class ThreadTransport:
    """One rank's end of a group. Sums run in rank order, so that every rank and every run gets the same bits."""

    def __init__(self, group: _Group, index: int) -> None:
        self.group, self.index = group, index

    def _swap(self, value: Any, read: Callable[[list[Any]], _Result]) -> _Result:
        """`read` of what every rank gave, in rank order. The second barrier keeps the slots until all have read."""
        self.group.slots[self.index] = value
        self.group.barrier.wait()
        result = read(self.group.slots)
        self.group.barrier.wait()
        self.group.slots[self.index] = None  # what was sent need not live until the next call
        return result

    def all_reduce(self, x: Tensor, op: str = "sum") -> Callable[[], object]:
        x.copy_(self._swap(x, lambda given: _combined(given, {"sum": torch.add, "max": torch.maximum}[op])))
        return lambda: None

    def all_gather(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        return self._swap(x, lambda given: _joined(given, lengths))

    def reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        start = sum(lengths[: self.index])
        part = slice(start, start + lengths[self.index])
        return self._swap(x, lambda given: _combined([whole[part] for whole in given], torch.add))

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return self._swap(x.split(list(send)), lambda given: _joined([row[self.index] for row in given], receive))

    def barrier(self) -> None:
        self._swap(None, len)


def _combined(given: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    kinds = {f"{x.dtype} {tuple(x.shape)}" for x in given}
    assert len(kinds) == 1, f"the ranks reduce different tensors: {', '.join(sorted(kinds))}"
    result = given[0].clone()
    for other in given[1:]:
        result = combine(result, other)
    return result


def _joined(given: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    actual = [len(piece) for piece in given]
    assert actual == list(lengths), f"expected lengths {list(lengths)}, got {actual}"
    return torch.cat(list(given))


class _Hub:
    """Makes each group once, whoever asks first."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.groups: dict[tuple[tuple[str, ...], tuple[int, ...]], _Group] = {}
        self.lock = threading.Lock()
        self.failed = False

    def connect(self, mesh: ParallelMesh, names: tuple[str, ...]) -> Transport:
        ranks = next(group for group in mesh.groups(names) if mesh.rank in group)
        with self.lock:
            group = self.groups.setdefault((names, tuple(ranks)), _Group(len(ranks), self.timeout_seconds))
            if self.failed:
                group.barrier.abort()
        return ThreadTransport(group, ranks.index(mesh.rank))

    def abort(self) -> None:
        with self.lock:
            self.failed = True
            for group in self.groups.values():
                group.barrier.abort()


class LockstepError(RuntimeError):
    """A rank failed; the cause is its exception."""


def run_lockstep(
    mesh_axes: Mapping[str, int], fn: Callable[[ParallelMesh], _Result], timeout_seconds: float = 120.0
) -> list[_Result]:
    """Runs `fn(mesh)` on every rank of the mesh at once and returns the results in rank order.

    `mesh.random.exact` is set, because threads share the default generator. Parameters are plain local tensors.
    The first exception of a rank stops all and is raised as LockstepError, which names the rank; a rank that waits
    longer than `timeout_seconds` for the others is such an exception.
    """
    size = 1
    for n in mesh_axes.values():
        size *= n
    hub = _Hub(timeout_seconds)
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        try:
            mesh = ParallelMesh(mesh_axes, rank, hub.connect, torch.device("cpu"))
            mesh.random.exact = True
            results[rank] = fn(mesh)
        except BaseException as error:
            errors.append((rank, error))
            hub.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        real = [pair for pair in errors if not isinstance(pair[1], threading.BrokenBarrierError)]
        rank, error = (real or errors)[0]
        what = f"{type(error).__name__}: {error}" if real else "waited for the others in vain"
        raise LockstepError(f"rank {rank}: {what}") from error
    return results
