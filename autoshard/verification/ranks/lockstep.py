"""All ranks of a mesh as threads of one process: the runtime's own functions over a transport of slots.

One rank runs at a time, until it waits for others in a collective: threads that compete for the interpreter are slower
than threads that take turns, and what ranks share (torch's default generator) stays unchanged between two collectives.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autoshard.emit.runtime import ParallelMesh, Sent, Stages, Transport

_Result = TypeVar("_Result")


class _Group:
    """Ranks that communicate over one set of axes: a slot for each, and the result of the last collective."""

    def __init__(self, ranks: Sequence[int], names: tuple[str, ...], hub: _Hub) -> None:
        self.ranks, self.names, self.hub, self.round = ranks, names, hub, 0
        self.calls: dict[int, tuple[_Call, Any]] = {}
        self.complete = threading.Condition(hub.turn)

    def swap(self, index: int, call: _Call, value: Any, combine: Callable[[list[Any]], _Result]) -> _Result:
        """Result of `combine` on every rank's value, in rank order; the last rank to arrive computes it for all.

        `call` describes the collective: all ranks must pass the same.
        """
        self.calls[index] = call, value
        mine = self.round
        if len(self.calls) == len(self.ranks):
            self._check()
            with _disable_current_modes():  # what this rank's modes count are its own operators
                self.result: Any = combine([self.calls[i][1] for i in range(len(self.ranks))])
            self.calls, self.round, self.unread = {}, mine + 1, len(self.ranks)
            self.hub.running += len(self.ranks) - 1
            self.complete.notify_all()
        else:
            self.hub.pause(self)
            while self.round == mine and not self.hub.failed:
                if not self.complete.wait(self.hub.timeout_seconds):
                    raise Alone(self.said())
            if self.round == mine:
                raise Alone(self.said())
        result: _Result = self.result  # the next round can't end before this rank has come to it
        self.unread -= 1
        if self.unread == 0:
            self.result = None  # it need not live until the next round
        return result

    def _check(self) -> None:
        first = self.calls[0][0]
        for index, (call, _) in self.calls.items():
            if call != first:
                said = f"{_words(call)}, rank {self.ranks[0]} {_words(first)}"
                raise ValueError(f"rank {self.ranks[index]} calls {said} over {'+'.join(self.names)}")

    def said(self) -> str:
        """Error text: which rank waits for which."""
        here = [rank for index, rank in enumerate(self.ranks) if index in self.calls]
        away = [rank for rank in self.ranks if rank not in here]
        what = _words(self.calls[self.ranks.index(here[0])][0]) if here else "nothing"
        return f"rank {_numbers(here)} waited in vain for rank {_numbers(away)} over {'+'.join(self.names)}: {what}"


_Call = tuple[Any, ...]


def _words(call: _Call) -> str:
    return f"{call[0]} of {', '.join(map(str, call[1:]))}".replace("torch.", "") if call[1:] else str(call[0])


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")


class _Mail:
    """Messages from one rank that another has not taken yet, in order."""

    def __init__(self, source: int, to: int, hub: _Hub) -> None:
        self.source, self.to, self.hub, self.sent = source, to, hub, deque[Tensor]()
        self.posted = deque[Tensor]()
        self.calls = False  # a rank waits
        self.complete = threading.Condition(hub.turn)

    def put(self, x: Tensor) -> None:
        self.sent.append(x)
        if self.calls:
            self.calls, self.hub.running = False, self.hub.running + 1
            self.complete.notify_all()

    def reading(self, x: Tensor) -> Callable[[], object]:
        """Receives into buffers in the order in which they are posted, whichever is waited for first."""
        self.posted.append(x)

        def wait() -> None:
            while any(posted is x for posted in self.posted):
                buffer, letter = self.posted.popleft(), self.take()
                same = (letter.shape, letter.dtype) == (buffer.shape, buffer.dtype)
                assert same, f"expected {tuple(buffer.shape)} {buffer.dtype}, got {tuple(letter.shape)} {letter.dtype}"
                buffer.copy_(letter)

        return wait

    def take(self) -> Tensor:
        if not self.sent:
            self.calls = True
            self.hub.pause(self)
            while not self.sent and not self.hub.failed:
                if not self.complete.wait(self.hub.timeout_seconds):
                    raise Alone(self.said())
            if not self.sent:
                raise Alone(self.said())
        return self.sent.popleft()

    def said(self) -> str:
        return f"rank {self.to} waited in vain for a message of rank {self.source}"


class Alone(Exception):
    """Error of a rank whose partners did not come."""


class _Posted:
    """Handle of a message that is already in its mailbox."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return


class ThreadTransport:
    """One rank's end of a group. Sums run in rank order, so that every rank and every run gets the same bits."""

    def __init__(self, group: _Group, index: int) -> None:
        self.group, self.index = group, index

    def all_reduce(self, x: Tensor, op: str = "sum") -> Callable[[], object]:
        """Reduces `x` in place; until the result is waited for, `x` holds nothing of use, as on any transport."""
        combine = {"sum": torch.add, "max": torch.maximum}[op]
        call = ("all_reduce", op, x.dtype, tuple(x.shape))
        reduced = self.group.swap(self.index, call, x.clone(), lambda tensors: _combined(tensors, combine))
        x.fill_(math.nan if x.is_floating_point() else -1)
        return lambda: x.copy_(reduced)

    def all_gather(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        call = ("all_gather", x.dtype, tuple(x.shape[1:]), tuple(lengths))
        return self.group.swap(self.index, call, x, lambda pieces: _joined(pieces, lengths)).clone()

    def start_all_gather(self, x: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        gathered = self.all_gather(x, lengths)
        return lambda: gathered

    def start_reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        shard = self.reduce_scatter(x, lengths)
        return lambda: shard

    def reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        call = ("reduce_scatter", x.dtype, tuple(x.shape), tuple(lengths))
        whole = self.group.swap(self.index, call, x, lambda tensors: _combined(tensors, torch.add))
        return whole[sum(lengths[: self.index]) :][: lengths[self.index]].clone()

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        call = ("all_to_all", x.dtype, tuple(x.shape[1:]))
        exchange = x.split(list(send)), list(receive)
        return self.group.swap(self.index, call, exchange, _exchanged)[self.index]

    def shift(self, x: Tensor, distance: int, length: int) -> Callable[[], Tensor]:
        call = ("shift", distance, x.dtype)
        source = (self.index - distance) % len(self.group.ranks)
        received = self.group.swap(self.index, call, x, list)[source].clone()
        assert len(received) == length, f"expected {length} numbers, got {len(received)}"
        return lambda: received

    def send(self, x: Tensor, to: int) -> Sent:
        with _disable_current_modes():  # a copy for the mailbox, which no device makes
            self.group.hub.mail(self.group.ranks[self.index], self.group.ranks[to]).put(x.clone())
        return _Posted()

    def receive(self, x: Tensor, source: int) -> Callable[[], object]:
        mail = self.group.hub.mail(self.group.ranks[source], self.group.ranks[self.index])
        return mail.reading(x)

    def barrier(self) -> None:
        self.group.swap(self.index, ("barrier",), None, len)


def _exchanged(exchanges: Sequence[tuple[Sequence[Tensor], Sequence[int]]]) -> list[Tensor]:
    """Tensor that each rank receives."""
    return [_joined([sent[index] for sent, _ in exchanges], receive) for index, (_, receive) in enumerate(exchanges)]


def _combined(tensors: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    result = tensors[0].clone()
    for other in tensors[1:]:
        result = combine(result, other)
    return result


def _joined(pieces: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    actual = [len(piece) for piece in pieces]
    assert actual == list(lengths), f"expected lengths {list(lengths)}, got {actual}"
    return torch.cat(list(pieces))


class _Hub:
    """Makes each group once, whichever rank asks first. The running rank holds `turn`; `running` ranks do not wait."""

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self.timeout_seconds, self.running, self.failed = timeout_seconds, size, False
        self.groups: dict[tuple[tuple[str, ...], tuple[int, ...]], _Group] = {}
        self.mails: dict[tuple[int, int], _Mail] = {}
        self.turn = threading.Lock()

    def connect(self, mesh: Any, names: tuple[str, ...]) -> Transport:
        first = mesh.global_rank - mesh.rank
        ranks = tuple(first + rank for rank in next(group for group in mesh.groups(names) if mesh.rank in group))
        return self.among(ranks, names, mesh.global_rank)

    def among(self, ranks: tuple[int, ...], names: tuple[str, ...], rank: int) -> Transport:
        group = self.groups.setdefault((names, ranks), _Group(ranks, names, self))
        return ThreadTransport(group, ranks.index(rank) if rank in ranks else -1)

    def between(self, places: Sequence[int], rank: int, firsts: Sequence[int]) -> Transport:
        """Transport between the devices at `rank`'s position on each of `places`; `firsts`: the places' first ranks."""
        offset = rank - firsts[bisect_right(firsts, rank) - 1]
        return self.among(tuple(firsts[place] + offset for place in places), ("place",), rank)

    def mail(self, source: int, to: int) -> _Mail:
        return self.mails.setdefault((source, to), _Mail(source, to, self))

    def pause(self, group: _Group | _Mail | None) -> None:
        """Stops this rank, to wait for `group` or for good. If all ranks have stopped, those that wait fail."""
        self.running -= 1
        known: list[_Group | _Mail] = [*self.groups.values(), *self.mails.values()]
        waiting = group or next((link for link in known if link.calls), None)
        if self.running == 0 and waiting is not None:
            raise Alone(waiting.said())

    def abort(self) -> None:
        self.failed = True
        conditions = [link.complete for link in self.groups.values()] + [link.complete for link in self.mails.values()]
        for condition in conditions:
            condition.notify_all()


class LockstepError(RuntimeError):
    """A rank failed; the cause is its exception."""


def run_lockstep(
    mesh_axes: Mapping[str, int],
    fn: Callable[[Any], _Result],
    timeout_seconds: float = 120.0,
    mesh_type: Callable[..., Any] = ParallelMesh,
    stages_type: Callable[..., Any] | None = Stages,
    part_stages: Sequence[int] = (0,),
    places: Sequence[Mapping[str, int]] = (),
) -> list[_Result]:
    """Runs `fn(mesh)` on every rank of the mesh at once and returns the results in rank order.

    `mesh_type` is the ParallelMesh of the package that runs, `stages_type` its Stages: if `part_stages` has several,
    each has the mesh, or that of `places`. `mesh.random.exact` is set. Parameters are plain local tensors. The first
    exception of a rank stops all and is raised as LockstepError, which names the rank; a rank that waits longer than
    `timeout_seconds` for the others raises one.
    """
    meshes = [*places] or [mesh_axes] * (max(part_stages) + 1)
    firsts = [0, *accumulate(math.prod(axes.values()) for axes in meshes)]
    count = firsts[-1]
    hub = _Hub(count, timeout_seconds)
    results: list[Any] = [None] * count
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        with hub.turn:
            if hub.failed:
                return
            try:
                held, stage = None, bisect_right(firsts, rank) - 1
                if len(meshes) > 1:
                    assert stages_type is not None
                    world = hub.among(tuple(range(count)), ("world",), rank)
                    across = partial(hub.between, rank=rank, firsts=firsts)
                    held = stages_type(stage, part_stages, across, transport=world, meshes=meshes)
                more = {} if held is None else {"stages": held}
                mesh = mesh_type(meshes[stage], rank - firsts[stage], hub.connect, torch.device("cpu"), **more)
                mesh.random.exact = True
                results[rank] = fn(mesh)
                hub.pause(None)
            except BaseException as error:
                errors.append((rank, error))
                hub.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        real = [pair for pair in errors if not isinstance(pair[1], Alone)]
        rank, error = (real or errors)[0]
        raise LockstepError(f"rank {rank}: {type(error).__name__}: {error}" if real else str(error)) from error
    return results
