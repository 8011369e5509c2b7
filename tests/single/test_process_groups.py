"""The process groups that a mesh is made of: how they are asked for, which no CPU can run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoshard.emit.runtime import ParallelMesh
from autoshard.emit.runtime import mesh as mesh_module


class _Asked(Exception):
    pass


@pytest.mark.parametrize(("stages", "bound"), [(1, True), (3, False)])
def test_groups_of_some_stages_are_not_split_from_the_group_of_all(
    stages: int, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bound device torch splits NCCL's communicator, which waits for ranks that are in no group (new_group with
    use_local_synchronization returns there at once)."""
    requested: dict[str, Any] = {}

    def initialise(backend: str, **options: Any) -> None:
        requested.update(options)
        raise _Asked

    monkeypatch.setattr(mesh_module, "_device", lambda _: torch.device("cuda", 1))
    monkeypatch.setattr(dist, "init_process_group", initialise)
    monkeypatch.setenv("WORLD_SIZE", str(2 * stages))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(_Asked):
        ParallelMesh.from_environment({"dp": 2}, "nccl", 7.0, range(stages) if stages > 1 else ())
    assert ("device_id" in requested) == bound
    assert requested["timeout"].total_seconds() == 7
