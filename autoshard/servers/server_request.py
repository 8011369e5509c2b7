"""User options of parameter servers: how many servers, how many workers, and how old a gradient may be."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoshard.constraints.step_request import NO_PLACES, StepRequest
from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh

ROWWISE, SAME = "rowwise-adagrad", "same"
TABLE_OPTIMIZERS = (ROWWISE, SAME)
MOST = 4096  # servers, or workers: to simulate so many takes 3 s (asynchronous), and four times that with twice as many
EXAMPLE = "--parameter-servers 2 --workers 4"


@dataclass(frozen=True)
class ServerRequest:
    """Request for parameter servers; None where an option is absent. `workers`: a number, or `MIN:MAX`. `staleness` in
    updates, of asynchronous training. `table_optimizer`: of parameters whose rows alone are read."""

    servers: int | None = None
    workers: str | None = None
    asynchronous: bool = False
    staleness: int | None = None
    table_optimizer: str | None = None

    @property
    def said(self) -> bool:
        return self != ServerRequest()

    @property
    def worker_range(self) -> tuple[int, int]:
        """UsageError where it is none."""
        match = re.fullmatch(r"([0-9]{1,4})(?::([0-9]{1,4}))?", self.workers or "1")
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= least <= most <= MOST:
            message = f"--workers {self.workers}: expected a number from 1 to {MOST}, or the least and the most"
            raise UsageError(message, "--workers 4, or --workers 2:8")
        return least, most

    @property
    def bound(self) -> int | None:
        """Bound on the staleness, None if synchronous. Default: a share more for each worker than it computes."""
        if not self.asynchronous:
            return None
        return 2 * self.worker_range[1] if self.staleness is None else self.staleness

    @property
    def text(self) -> str:
        """Options that state this request, as typed."""
        said = [f"--parameter-servers {self.servers}"] if self.servers is not None else []
        said += [f"--workers {self.workers}"] if self.workers is not None else []
        said += ["--asynchronous"] * self.asynchronous
        said += [f"--staleness {self.staleness}"] if self.staleness is not None else []
        return " ".join(said + ([f"--table-optimizer {self.table_optimizer}"] if self.table_optimizer else []))

    def check(self, mesh: Mesh | None, devices: int | None, step: StepRequest) -> None:
        """UsageError where the options contradict each other, whatever the model is."""
        if self.servers is None:
            raise UsageError(f"{self.text} is about parameter servers, and there are none", EXAMPLE)
        if type(self.servers) is not int or not 1 <= self.servers <= MOST:
            raise UsageError(f"--parameter-servers {self.servers}: expected a number from 1 to {MOST}", EXAMPLE)
        assert self.worker_range
        if self.staleness is not None and not self.asynchronous:
            message = f"--staleness {self.staleness}: in synchronous training no gradient is old"
            raise UsageError(message, f"--asynchronous --staleness {self.staleness}")
        if self.staleness is not None and (type(self.staleness) is not int or self.staleness < 0):
            raise UsageError(f"--staleness {self.staleness}: expected 0 or more updates", "--staleness 4")
        if self.table_optimizer not in (None, *TABLE_OPTIMIZERS):
            message = f"--table-optimizer {self.table_optimizer}: expected {' or '.join(TABLE_OPTIMIZERS)}"
            raise UsageError(message, f"--table-optimizer {ROWWISE}")
        if (mesh is not None and mesh.size > 1) or devices not in (None, 1):
            message = f"{f'the mesh {mesh}' if mesh is not None else f'--devices {devices}'} and parameter servers"
            raise UsageError(f"{message}: a worker is one device", f"{EXAMPLE} without --mesh and --devices")
        allowed = ("micro_batches", "recompute", "place")
        others = [name for name, value in vars(step).items() if name not in allowed and value not in (None, (), False)]
        if others or step.place not in (None, NO_PLACES):
            option = f"--{(others or ['place'])[0].replace('_', '-')}"
            option = {"--pins": "--pin stage:", "--places": "--pin place:"}.get(option, option)
            raise UsageError(f"{option} and parameter servers: a worker runs the whole model on one device", EXAMPLE)
