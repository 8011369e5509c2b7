"""The thread transport: values, order, and failures that end at once and name the rank."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import pytest
import torch

from autoshard.emit.runtime import ParallelMesh
from autoshard.verification.ranks.lockstep import LockstepError, run_lockstep


def test_results_are_in_rank_order_and_ranks_are_row_major() -> None:
    results = run_lockstep({"a": 2, "b": 3}, lambda mesh: (mesh.rank, mesh["a"].index, mesh["b"].index))
    assert results == [(3 * a + b, a, b) for a in range(2) for b in range(3)]


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

    with pytest.raises(LockstepError, match="rank 2: ValueError: broken weight") as caught:
        run_lockstep({"a": 2, "b": 2}, work, timeout_seconds=1e6)
    assert isinstance(caught.value.__cause__, ValueError)
    assert not [t for t in threading.enumerate() if t.daemon and "work" in t.name]


def test_ranks_that_wait_in_vain_are_told_at_once() -> None:
    """A rank that has ended, and ranks that wait for each other: no clock is needed to see it."""
    with pytest.raises(LockstepError, match="rank 0 waited in vain for rank 1 over a: barrier"):
        run_lockstep({"a": 2}, lambda mesh: mesh.rank or mesh["a"].transport.barrier(), timeout_seconds=1e6)

    def crossed(mesh: ParallelMesh) -> None:
        for name in ("a", "b") if mesh.rank in (0, 3) else ("b", "a"):
            mesh[name].transport.all_reduce(torch.zeros(1))()

    with pytest.raises(LockstepError, match="waited in vain"):
        run_lockstep({"a": 2, "b": 2}, crossed, timeout_seconds=1e6)


def test_one_rank_runs_until_it_waits() -> None:
    """What lies between two collectives is not mixed with other ranks: they may share a generator."""
    seen: list[int] = []

    def work(mesh: ParallelMesh) -> None:
        for _ in range(3):
            for _ in range(50):
                seen.append(mesh.rank)
                time.sleep(0)
            mesh["a"].transport.barrier()

    run_lockstep({"a": 4}, work)
    runs = [seen[i : i + 50] for i in range(0, len(seen), 50)]
    assert all(len(set(run)) == 1 for run in runs)


def test_a_reduction_that_was_not_waited_for_is_not_there() -> None:
    def work(mesh: ParallelMesh) -> tuple[float, float]:
        x = torch.ones(())
        wait = mesh["a"].transport.all_reduce(x)
        early = x.item()
        wait()
        return early, x.item()

    for early, late in run_lockstep({"a": 2}, work):
        assert math.isnan(early) and late == 2.0


def test_what_was_sent_may_be_changed_afterwards() -> None:
    """A rank that goes on at once must not change what others still read."""

    def work(mesh: ParallelMesh) -> list[list[float]]:
        transport, results = mesh["a"].transport, []
        for call in (
            lambda x: transport.all_to_all(x, [1, 1], [1, 1]),
            lambda x: transport.all_gather(x, [2, 2]),
            lambda x: transport.reduce_scatter(x, [1, 1]),
        ):
            x = torch.full((2,), 1.0 + mesh.rank)
            results.append(call(x))
            x.fill_(9.0)
            results[-1].add_(0.5)
        transport.barrier()
        return [x.tolist() for x in results]

    assert run_lockstep({"a": 2}, work) == [[[1.5, 2.5], [1.5, 1.5, 2.5, 2.5], [3.5]]] * 2


@pytest.mark.parametrize("second", ["all_gather", "other shape", "other operator", "other dtype"])
def test_different_collectives_are_an_error(second: str) -> None:
    def work(mesh: ParallelMesh) -> None:
        transport, other = mesh["a"].transport, mesh.rank == 1
        if other and second == "all_gather":
            transport.all_gather(torch.zeros(2), [2, 2])
        x = torch.zeros(2 + (other and second == "other shape"))
        x = x.double() if other and second == "other dtype" else x
        transport.all_reduce(x, "max" if other and second == "other operator" else "sum")()

    with pytest.raises(LockstepError, match=r"rank 1 calls all_.* rank 0 all_reduce of sum, float32, \(2,\) over a"):
        run_lockstep({"a": 2}, work)


def test_the_mesh_is_that_of_the_package() -> None:
    class Mesh(ParallelMesh):
        pass

    assert run_lockstep({"a": 2}, type, mesh_type=Mesh) == [Mesh, Mesh]


@pytest.mark.parametrize(("new", "old"), [("all_gather_single", "all_gather_into_tensor"),
                                          ("reduce_scatter_single", "reduce_scatter_tensor")])  # fmt: skip
def test_collectives_go_by_the_names_that_torch_has(new: str, old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of torch 2.13's names, and those before it."""
    from autoshard.emit.runtime import axis

    called = []
    for name in (new, old):
        monkeypatch.setattr(torch.distributed, name, lambda *_, name=name, **__: called.append(name), raising=False)
    method = f"_{new.removesuffix('_single')}"
    for names, expected in (((new, old), new), ((old,), old)):
        if new not in names:
            monkeypatch.delattr(torch.distributed, new)
        fresh: dict[str, object] = {"__name__": axis.__name__, "__package__": axis.__package__}
        exec(compile(Path(axis.__file__).read_text("utf-8"), axis.__file__, "exec"), fresh)
        getattr(fresh["GroupTransport"], method)(torch.zeros(1))
        assert called[-1] == expected
