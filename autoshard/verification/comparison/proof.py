"""Outcome of a verification, for people and for programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from autoshard.units import counted
from autoshard.verification.comparison.tolerances import OWN, THRESHOLD, Error, Worst


@dataclass(frozen=True)
class Proof:
    """Largest relative errors per kind, over all ranks and steps. `seconds` is wall time.

    `reduced` lists (argument, size verified at, size planned for); `planned_mesh` is the mesh that a shorter one stands
    for; `unverified` explains what was left out, `notes` describe the run, `started` how the package's train.py ran by
    itself.
    """

    mesh: str
    backend: str
    ranks: int
    steps: int
    clipped_steps: int
    kinds: tuple[Worst, ...]
    seconds: float
    first_failure: Error | None = None
    reduced: tuple[tuple[str, str, str], ...] = ()
    unverified: tuple[str, ...] = ()
    planned_mesh: str = ""
    notes: tuple[str, ...] = ()
    started: str = ""
    sizes: str = ""  # dynamic ones, of each step
    crash: str = ""  # a rank failed to run: its error

    @property
    def passed(self) -> bool:
        return not self.crash and any(kind.count for kind in self.kinds) and not any(kind.failed for kind in self.kinds)

    @property
    def failure(self) -> str:
        """Sentence that names the tensor where the failure begins, its rank and its error; "" if nothing failed."""
        if self.crash:
            return f"verification failed: {self.crash}"
        if self.first_failure is not None:
            return f"verification failed: {self.first_failure}, allowed {THRESHOLD:.0e}"
        return "" if self.passed else "verification failed: nothing was compared"

    def summary(self) -> str:
        return proof_text(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data; an error that can't be a number is a string."""
        return {
            "passed": self.passed,
            "failure": self.failure,
            "mesh": self.mesh,
            "planned_mesh": self.planned_mesh or self.mesh,
            "backend": self.backend,
            "ranks": self.ranks,
            "steps": self.steps,
            "clipped_steps": self.clipped_steps,
            "threshold": THRESHOLD,
            "seconds": self.seconds,
            "errors": {kind.kind: _worst_dict(kind) for kind in self.kinds},
            "reduced": [{"argument": name, "verified": small, "planned": full} for name, small, full in self.reduced],
            "started": self.started,
            "sizes": self.sizes,
            "unverified": list(self.unverified),
            "notes": list(self.notes),
        }


def _worst_dict(kind: Worst) -> dict[str, Any]:
    if kind.worst is None:
        return {"tensors": 0}
    error = kind.worst.error if math.isfinite(kind.worst.error) else str(kind.worst.error)
    return {
        "tensors": kind.count,
        "largest": error,
        "tensor": kind.worst.name,
        "rank": kind.worst.rank,
        "step": kind.worst.step,
    }


def proof_text(proof: Proof) -> str:
    """Short table: a line for each kind, then what was not verified."""
    verdict = "verified" if proof.passed else "NOT verified"
    how = counted(proof.ranks, "gloo process" if proof.backend == "gloo" else "device")
    how += " in lock-step" * (proof.backend == "lockstep")
    stands = f" (which stands for {proof.planned_mesh})" if proof.planned_mesh else ""
    lines = [
        f"{verdict} on {proof.mesh}{stands}: {how}, float64, {proof.steps} steps "
        f"({proof.clipped_steps} with clipped gradients), "
        f"{proof.seconds:.1f} s"
    ]
    width = max(len(kind.worst.name) for kind in proof.kinds if kind.worst) if any(k.worst for k in proof.kinds) else 0
    for kind in proof.kinds:
        if kind.worst is not None:
            mark = "FAILED" if kind.failed else "ok"
            text = kind.worst.problem or f"{kind.worst.error:.1e}"
            if kind.kind == OWN and not kind.failed:
                lines.append(
                    f"  {kind.kind:<10} {kind.count:>6} tensors of a step in the plan's precision: dtypes, values  ok"
                )
                continue
            where = f"{kind.worst.name:<{width}}  rank {kind.worst.rank}  step {kind.worst.step}"
            lines.append(f"  {kind.kind:<10} {kind.count:>6} tensors, largest error {text:<8} {where}  {mark}")
    if proof.started:
        lines.append(f"  {'train.py':<10} {proof.started}  ok")
    if proof.sizes:
        lines.append(f"  another size in each step: {proof.sizes}")
    if proof.reduced:
        sizes = ", ".join(f"{name} {small} (planned {full})" for name, small, full in proof.reduced)
        lines.append(f"  at reduced sizes: {sizes}")
    if proof.reduced or proof.planned_mesh:
        what = " and ".join(["size"] * bool(proof.reduced) + ["number of devices"] * bool(proof.planned_mesh))
        lines.append(f"  the package itself, the same plan at the full {what}, was not run")
    lines += [f"  with {note}" for note in proof.notes]
    lines += [f"  not verified: {what}" for what in proof.unverified]
    return "\n".join(lines)
