"""How a package is to be run against the model: what can be refused of it before anything is captured or searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoshard.constraints.step_request import AUTO, StepRequest
from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh

Backend = Literal["gloo", "lockstep"]
MOST_PROCESSES = 16  # beyond, all ranks run in lock-step in one process, and the proof says so


@dataclass(frozen=True)
class VerifyRequest:
    """`arguments` reduce the model (`{"n_layer": 2}`); `full` runs the files at full size whatever it takes."""

    backend: Backend = "gloo"
    full: bool = False
    arguments: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def check(self) -> None:
        """UsageError where two of these contradict each other."""
        if self.full and self.arguments:
            given = ", ".join(self.arguments)
            raise UsageError(f"full size and {given} at once", "leave one of --full and --verify-with out")

    def check_step(self, step: StepRequest, mesh: Mesh | None, devices: int | None) -> None:
        """UsageError where so many stages can't run here. `mesh`: of one stage; without it `devices` in all."""
        stages = step.fixed_stages()
        if stages > 1 and not (step.places or step.place == AUTO):
            check_stages(stages, mesh.size * stages if mesh is not None else devices or stages, self.backend)


def check_stages(stages: int, devices: int, backend: Backend) -> None:
    """Pipelining talks by process groups: no lock-step, and no more devices than processes can run here."""
    if backend == "lockstep":
        raise UsageError(
            "stages can't run in lock-step: torch.distributed.pipelining needs processes", "--backend gloo"
        )
    if devices > MOST_PROCESSES:
        told = f"to verify {stages} stages takes a process for each of {devices} devices, and {MOST_PROCESSES} run here"
        raise UsageError(told, f"the same model planned with --stages 2 and a mesh of {MOST_PROCESSES // 2} devices")
