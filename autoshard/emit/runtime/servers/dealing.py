"""Which worker gets which share, and when, so that no gradient is older than it may be.

An update of server S is one share's gradient. How many updates S makes between the pull of a share o and its push is at
most C(o), the shares that were outstanding when o was dealt, and D(o), those dealt since while o is outstanding: each
is applied at S once at most. So C(o) + D(o) <= K for all that are outstanding bounds every staleness by K.

A share whose worker was lost stays outstanding until another has done it: its gradient may be on its way to a server.
Servers take a share's gradient once, so dealing it again adds nothing to the others' D.
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
    """`staleness`: K, or None where all shares of a step are of the same parameters."""

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
        """The next share of a worker; None where there is none, or it has enough, or it would be too old."""
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
        """The worker is no more: others get its shares, before all that wait."""
        shares = [share for share, lease in self.dealt.items() if lease.worker == worker]
        for share in shares:
            del self.dealt[share]
        self.lost.extend(shares)
        return shares

    def clear(self) -> None:
        self.waiting.clear()
        self.lost.clear()
        self.dealt.clear()
