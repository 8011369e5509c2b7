"""Dispatch of shares to workers, such that no gradient exceeds the allowed staleness.

An update of server S is one share's gradient. The number of updates of S between the pull of a share o and its push is
at most C(o), the shares outstanding when o was dispatched, plus D(o), those dispatched since while o is outstanding:
each is applied at S at most once. So C(o) + D(o) <= K for all outstanding shares bounds all staleness by K.

A share whose worker was lost stays outstanding until another has done it: its gradient may be on its way to a server.
Servers accept a share's gradient once, so dispatching it again adds nothing to the others' D.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

Share = tuple[int, int]  # the step, and its number in it
DEPTH = 2  # shares of one worker: it computes one, and pulls for the next or pushes the last


@dataclass
class _Dealt:
    worker: Hashable
    before: int  # C
    since: int = 0  # D


@dataclass
class Dealer:
    """Dispatches shares to workers. `staleness`: K, or None if all shares of a step use the same parameters."""

    staleness: int | None = None
    waiting: deque[Share] = field(default_factory=deque)
    lost: deque[Share] = field(default_factory=deque)
    dealt: dict[Share, _Dealt] = field(default_factory=dict)

    @property
    def outstanding(self) -> int:
        return len(self.dealt) + len(self.lost)

    def add(self, shares: Iterable[Share]) -> None:
        self.waiting.extend(shares)

    def deal(self, worker: Hashable) -> Share | None:
        """Next share of a worker; None if there is none, if it has enough, or if the share would be too old."""
        if sum(lease.worker == worker for lease in self.dealt.values()) >= DEPTH:
            return None
        if self.lost:
            share = self.lost.popleft()
            self.dealt[share] = _Dealt(worker, self.outstanding)
            return share
        if not self.waiting or not self._young_enough():
            return None
        for lease in self.dealt.values():
            lease.since += 1
        share = self.waiting.popleft()
        self.dealt[share] = _Dealt(worker, self.outstanding)
        return share

    def _young_enough(self) -> bool:
        if self.staleness is None:
            return True
        ages = [lease.before + lease.since + 1 for lease in self.dealt.values()]
        return max([self.outstanding, *ages]) <= self.staleness

    def done(self, share: Share) -> None:
        self.dealt.pop(share)

    def lose(self, worker: Hashable) -> list[Share]:
        """Removes a lost worker; its shares are dispatched to others first. Returns them."""
        shares = [share for share, lease in self.dealt.items() if lease.worker == worker]
        for share in shares:
            del self.dealt[share]
        self.lost.extend(shares)
        return shares

    def clear(self) -> None:
        self.waiting.clear()
        self.lost.clear()
        self.dealt.clear()
