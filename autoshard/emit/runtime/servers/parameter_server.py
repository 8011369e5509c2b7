"""A server: its parts of the parameters and of the optimizer's state, and their updates.

Calls carry a `generation`, which counts how often the servers were restored from a snapshot. A call of an earlier one
refers to discarded numbers, and is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd_leaves import local
from ..initialisation import init_computed, init_parameter
from ..mesh import ParallelMesh
from ..optimizers import SGD, AdamW
from ..parameters import Whole, assign, shard_parameter
from .dealing import Share
from .served import Served

Rows = tuple[Tensor, Tensor]  # ids within the server's part, and a row for each
Computed = Mapping[str, Callable[[], Tensor]]
OPTIMIZERS: dict[str, Any] = {"adamw": AdamW, "sgd": SGD}
EPS = inspect.signature(torch.optim.Adagrad).parameters["eps"].default  # of row-wise Adagrad
KEPT_SHARES = 1 << 16  # numbers of shares that were applied: of others none is on its way


class Outdated(Exception):
    """Refuses a call of another generation: the servers were restored since, or this one has restarted."""


class TooOld(AssertionError):
    """A gradient is older than the staleness allows: the shares were dispatched wrongly."""


class ParameterServer:
    """One server. `rowwise`: tables are trained by row-wise Adagrad, on the rows that were read. `shares`: per step, if
    all of them use the same parameters; 0: each is applied when it arrives, no older than `staleness`."""

    def __init__(
        self, served: Mapping[str, Served], servers: int, number: int, *, optimizer: str, rowwise: bool, shares: int,
        staleness: int = 0, weight_decay: float | None = None,
    ) -> None:  # fmt: skip
        self.served, self.number, self.shares, self.staleness = served, number, shares, staleness
        self.generation, self.step, self.version, self.oldest = -1, 0, 0, 0
        self.spans = {name: span for name, spec in served.items() if (span := spec.on(number)) is not None}
        mesh = ParallelMesh({"server": servers}, number, lambda *_: None, torch.device("cpu"))  # type: ignore[arg-type]
        self.values: dict[str, nn.Parameter] = {}
        for name in self.spans:
            spec = served[name]
            layout = "S0" if len(spec.parts) > 1 else "R"
            how: dict[str, Any] = {"dtype": spec.dtype, "ties": spec.ties, "init": spec.init, "trainable": spec.trained}
            self.values[name] = shard_parameter(name, spec.shape, layout, mesh, **how)
        trained = [name for name in self.spans if served[name].trained]
        self.by_rows = [name for name in trained if rowwise and served[name].table]
        self.sums = {name: local(self.values[name]).new_zeros(len(self.values[name])) for name in self.by_rows}
        dense = [name for name in trained if name not in self.by_rows]
        self.by_table = {name for name in dense if served[name].table}
        groups = [([name for name in dense if (len(served[name].shape) > 1) == wide], wide) for wide in (True, False)]
        filled: list[dict[str, Any]] = [
            {"params": [self.values[name] for name in names]}
            | ({} if weight_decay is None else {"weight_decay": weight_decay if wide else 0.0})
            for names, wide in groups
            if names
        ]
        self.optimizer: torch.optim.Optimizer | None = OPTIMIZERS[optimizer](filled) if filled else None
        self._begin()

    def _begin(self) -> None:
        """Begins a step, with nothing of it received yet."""
        self.next, self.held = 0, dict[int, tuple[Mapping[str, Tensor], Mapping[str, list[Rows]]]]()
        self.sum: dict[str, Tensor] = {}
        self.rows_read: dict[str, list[Rows]] = {}
        self.ready: dict[str, Rows] | None = None
        self.applied: dict[Share, None] = {}

    def _forget(self) -> None:
        """Resets the optimizers' state to that of a fresh run."""
        self.generation = -1
        if self.optimizer is not None:
            self.optimizer.state.clear()
        for total in self.sums.values():
            total.zero_()

    # --- what it starts from ---

    def start(self, generation: int, weights: Mapping[str, Whole], computed: Computed, seed: int) -> list[str]:
        """Starts from weights of the original, reading this server's part, or from numbers drawn from the seed. Returns
        the names whose start is a guess."""
        guessed = []
        self._forget()
        for name, value in self.values.items():
            spec = self.served[name]
            source = next((key for key in (name, *spec.ties) if key in weights), None)
            guess = ("normal", 0.0, 0.02) if len(spec.shape) > 1 else ("constant", 0.0)
            if source is not None:
                assign(value, weights[source])
            elif weights:
                raise KeyError(f"the state dict lacks {name}")
            elif name in computed:
                init_computed(value, computed[name], seed)
            else:
                init_parameter(value, spec.init or guess, seed)
                guessed += [] if spec.init else [name]
        self.generation, self.step, self.version = generation, 0, 0
        self._begin()
        return guessed

    def save(self, generation: int, folder: str) -> None:
        """Writes this server's file of a snapshot."""
        self._check(generation)
        state: dict[str, Any] = {}
        for name, (start, _) in self.spans.items():
            value = self.values[name]
            slots = dict(self.optimizer.state.get(value, {})) if self.optimizer else {}
            slots |= {"row_sum": self.sums[name]} if name in self.sums else {}
            state[name] = {"start": start, "value": local(value).detach(), "slots": slots}
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save({"step": self.step, "version": self.version, "parts": state}, f"{folder}/server-{self.number}.pt")

    def restore(self, generation: int, folder: str) -> None:
        """Restores a snapshot, which may be of another number of servers."""
        self._forget()
        filled = dict.fromkeys(self.spans, 0)
        for path in sorted(Path(folder).glob("server-*.pt")):
            saved = torch.load(path, weights_only=True, mmap=True)
            self.step, self.version = saved["step"], saved["version"]
            for name, part in saved["parts"].items():
                if name in self.spans:
                    filled[name] += self._take(name, part)
        short = [name for name, rows in filled.items() if rows < self.spans[name][1] - self.spans[name][0]]
        if short:
            raise KeyError(f"the snapshot {folder} lacks {short[0]}")
        self.generation = generation
        self._begin()

    def _take(self, name: str, part: Mapping[str, Any]) -> int:
        """Takes this server's rows of a saved part; returns their number."""
        start, stop = self.spans[name]
        value, first = local(self.values[name]).detach(), int(part["start"])
        rows = part["value"].shape[0] if part["value"].dim() else 1
        low, high = max(start, first), min(stop, first + rows)
        if low >= high:
            return 0
        here, there = slice(low - start, high - start), slice(low - first, high - first)

        def fill(target: Tensor, source: Tensor) -> None:
            whole = target.dim() == 0
            (target if whole else target[here]).copy_(source if whole else source[there])

        fill(value, part["value"])
        for slot, saved in part["slots"].items():
            if slot == "row_sum":
                if name in self.sums:
                    fill(self.sums[name], saved)
            elif self.optimizer is not None and name not in self.sums:
                state = self.optimizer.state[self.values[name]]
                one = not isinstance(saved, Tensor) or saved.dim() < value.dim()
                if one:
                    state[slot] = saved.clone() if isinstance(saved, Tensor) else saved
                else:
                    fill(state.setdefault(slot, torch.zeros_like(value)), saved)
        return high - low

    def _check(self, generation: int) -> None:
        if generation != self.generation:
            raise Outdated(f"server {self.number} is in generation {self.generation}, the call of {generation}")

    # --- what workers ask for ---

    def pull(self, generation: int) -> tuple[int, dict[str, Tensor]]:
        """The version (updates so far), and all parameters that are no tables."""
        self._check(generation)
        held = {name: local(value).detach() for name, value in self.values.items() if not self.served[name].table}
        return self.version, {name: value.clone() for name, value in held.items()}

    def rows(self, generation: int, wanted: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Table rows by their ids, which count from the first row of this part."""
        self._check(generation)
        return [local(self.values[name]).detach()[ids] for name, ids in wanted]

    def push(
        self, generation: int, share: Share, pulled: int, dense: Mapping[str, Tensor], rows: Mapping[str, list[Rows]],
        rates: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """Adds a share's gradients, only once however often they come. `pulled`: the version they were computed from.
        `rates`: those of an immediate update."""
        self._check(generation)
        if self.shares:
            step, number = share
            if step == self.step + 1 and number >= self.next:
                self.held[number] = dense, rows
            while self.next in self.held:  # in the order of the shares, whoever is first
                self._add(*self.held.pop(self.next))
                self.next += 1
            return
        if share in self.applied:
            return
        age = self.version - pulled
        if age > self.staleness:
            raise TooOld(f"share {share} at server {self.number}: {age} updates old, at most {self.staleness} may be")
        self.oldest = max(self.oldest, age)
        self._add(dense, rows)
        self._collect()
        assert rates is not None
        self._update(rates)
        self.applied[share] = None
        if len(self.applied) > KEPT_SHARES:
            del self.applied[next(iter(self.applied))]

    def _add(self, dense: Mapping[str, Tensor], rows: Mapping[str, list[Rows]]) -> None:
        for name, gradient in dense.items():
            if name in self.sum:
                self.sum[name].add_(gradient)
            else:
                self.sum[name] = gradient.clone()
        for name, read in rows.items():
            self.rows_read.setdefault(name, []).extend(read)

    # --- the update ---

    def squares(self, generation: int, step: int) -> float:
        """Sum of the squares of the step's gradients, once all its shares are there."""
        self._check(generation)
        assert step == self.step + 1 and self.next == self.shares, f"{self.next} of {self.shares} shares have come"
        self._collect()
        ready = [rows for _, rows in (self.ready or {}).values()]
        return float(sum((gradient.square().sum() for gradient in (*self.sum.values(), *ready)), torch.zeros(())))

    def _collect(self) -> None:
        """Sums rows that several look-ups read; makes whole gradients of tables with a dense optimizer."""
        if self.ready is not None:
            return
        self.ready = {}
        for name, read in sorted(self.rows_read.items()):
            ids, places = torch.cat([ids for ids, _ in read]).unique(return_inverse=True)
            values = torch.cat([rows for _, rows in read])
            added = values.new_zeros((len(ids), *values.shape[1:])).index_add_(0, places, values)
            if name in self.by_rows:
                self.ready[name] = ids, added
            else:
                self.sum[name] = torch.zeros_like(local(self.values[name]).detach()).index_copy_(0, ids, added)
        for name in self.by_table - self.sum.keys():  # no row was read here: moments and decay go on all the same
            self.sum[name] = torch.zeros_like(local(self.values[name]).detach())

    def update(self, generation: int, step: int, scale: float, rates: tuple[float, float]) -> None:
        """Updates with the gradients times `scale`; `rates`: those of the optimizer, and of rows."""
        self._check(generation)
        if step != self.step + 1:
            return
        if scale != 1.0:
            for gradient in (*self.sum.values(), *(rows for _, rows in (self.ready or {}).values())):
                gradient.mul_(scale)
        self._update(rates)
        self.step = step

    @torch.no_grad()
    def _update(self, rates: tuple[float, float]) -> None:
        rate, row_rate = rates
        for name, gradient in self.sum.items():
            self.values[name].grad = gradient
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        for name, (ids, rows) in (self.ready or {}).items():
            sums, table = self.sums[name], local(self.values[name]).detach()
            sums[ids] += rows.square().flatten(1).mean(1)
            scale = sums[ids].sqrt().add_(EPS).reshape(-1, *[1] * (rows.dim() - 1))
            table.index_add_(0, ids, rows / scale, alpha=-row_rate)
        applied = self.applied
        self.version += 1
        self._begin()
        self.applied = applied

    def done(self, generation: int, step: int) -> None:
        """Marks a step whose shares were all applied immediately as done."""
        self._check(generation)
        self.step = step

    def report(self) -> dict[str, Any]:
        """Figures for tests and the log: updates, the age of the oldest gradient received, bytes."""
        return {"version": self.version, "oldest": self.oldest, "bytes": sum(v.nbytes for v in self.values.values())}
