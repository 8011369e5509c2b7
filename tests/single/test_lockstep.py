"""The thread transport: values, order, and failures that end at once and name the rank."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from autoshard.emit.runtime import ParallelMesh
from autoshard.verify.lockstep import LockstepError, run_lockstep


def test_results_are_in_rank_order_and_ranks_are_row_major() -> None:
    found = run_lockstep({"a": 2, "b": 3}, lambda mesh: (mesh.rank, mesh["a"].index, mesh["b"].index))
    assert found == [(3 * a + b, a, b) for a in range(2) for b in range(3)]


def test_raw_collectives() -> None:
    def work(mesh: ParallelMesh) -> list[list[float]]:
        transport, index = mesh["a"].transport, mesh["a"].index
        total, largest = torch.tensor([1.0, index]), torch.tensor([float(-index)])
        transport.all_reduce(total)()
        transport.all_reduce(largest, "max")()
        gathered = transport.all_gather(torch.full((2 - index,), float(index)), [2, 1])
        scattered = transport.reduce_scatter(torch.arange(3.0) * (index + 1), [2, 1])
        exchanged = transport.all_to_all(torch.arange(3.0) + 10 * index, [1, 2], [1, 1] if index == 0 else [2, 2])
        return [x.tolist() for x in (total, largest, gathered, scattered, exchanged)]

    with pytest.raises(LockstepError, match="expected lengths"):  # rank 1 sends 1 and 2, as rank 0 does
        run_lockstep({"a": 2}, lambda mesh: mesh["a"].transport.all_to_all(torch.arange(3.0), [1, 2], [1, 3]))
    first, second = run_lockstep({"a": 2}, work)
    assert first == [[2.0, 1.0], [0.0], [0.0, 0.0, 1.0], [0.0, 3.0], [0.0, 10.0]]
    assert second == [[2.0, 1.0], [0.0], [0.0, 0.0, 1.0], [6.0], [1.0, 2.0, 11.0, 12.0]]


def test_joined_axes_reduce_over_all_of_them_only() -> None:
    def work(mesh: ParallelMesh) -> float:
        x = torch.tensor(float(mesh.rank))
        mesh.joint(("c", "a")).transport.all_reduce(x)()
        return x.item()

    assert run_lockstep({"a": 2, "b": 2, "c": 2}, work) == [10.0, 10.0, 18.0, 18.0, 10.0, 10.0, 18.0, 18.0]


def test_an_exception_stops_all_and_names_the_rank() -> None:
    def work(mesh: ParallelMesh) -> None:
        if mesh.rank == 2:
            raise ValueError("broken weight")
        mesh["b"].transport.barrier()
        mesh.joint(("a", "b")).transport.barrier()

    before = time.monotonic()
    with pytest.raises(LockstepError, match="rank 2: ValueError: broken weight") as caught:
        run_lockstep({"a": 2, "b": 2}, work)
    assert isinstance(caught.value.__cause__, ValueError)
    assert time.monotonic() - before < 30
    assert not [t for t in threading.enumerate() if t.daemon and "work" in t.name]


def test_a_rank_that_stays_away_is_a_timeout() -> None:
    with pytest.raises(LockstepError, match="in vain"):
        run_lockstep({"a": 2}, lambda mesh: mesh.rank or mesh["a"].transport.barrier(), timeout_seconds=0.2)


def test_different_tensors_in_one_reduction_are_an_error() -> None:
    with pytest.raises(LockstepError, match="reduce different tensors"):
        run_lockstep({"a": 2}, lambda mesh: mesh["a"].transport.all_reduce(torch.zeros(mesh.rank + 1)))
