"""Gradients of packages on uneven meshes: which collectives run is the Program's, and every partial sum counts once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Compute, Program
from autoshard.program.lower import lower
from autoshard.verification.case import check_files, make_case, written
from autoshard.verification.ranks.loaded_package import LoadedPackage, load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from tests.forced import forced_plan
from tests.slow import quick_at, slow

MESHES = ("dp=3", "dp=3,tp=2", "dp=2,tp=3")


class Products(nn.Module):
    """Products of odd sizes that torch computes by way of copies or views, as the local sizes happen to be."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(3, 7, 5))
        self.third, self.norm = nn.Parameter(torch.randn(5, 7)), nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.einsum("bi,oi->bo", x, self.first))
        z = torch.einsum("bo,hoi->bhi", y, self.second)
        return torch.einsum("bhi,io->bho", z, self.third).square().mean()


class Partly(nn.Module):
    """Only `used` has a gradient: that of `unused` is cut off, `metric` stands beside the loss, `frozen` is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.metric = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.used(x) * self.frozen
        return y.square().mean() + self.unused(x).detach().mean(), self.metric(y)


def products() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Products(), (torch.randn(7, 5),)


def partly() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Partly(), (torch.randn(6, 6),)


@cache
def program_of(build: str, mesh: str, seed: int, precision: str = "fp32") -> tuple[Program, dict[str, str]]:
    graph = capture(f"{__file__}:{build}", {}, precision)
    plan = forced_plan(graph, Mesh.parse(mesh), lambda op, strategy: True, seed)
    program = lower(plan, graph)
    return program, emit(program, plan, graph)


@contextmanager
def package_of(build: str, mesh: str, seed: int) -> Iterator[tuple[Program, LoadedPackage]]:
    program, files = program_of(build, mesh, seed)
    with written(files) as folder:
        yield program, load_package(Path(folder))


@pytest.mark.parametrize(
    ("mesh", "precision"),
    quick_at(product(MESHES, ("fp32", "bf16-mixed")), 0),
)
def test_all_ranks_issue_the_same_collectives(mesh: str, precision: str) -> None:
    graph = capture(f"{__file__}:products", {}, precision)
    case = make_case(f"{__file__}:products", {}, graph)
    gathered = 0
    for seed in range(2):
        program, files = program_of("products", mesh, seed, precision)
        proof = check_files(case, program, files)
        assert proof.passed, f"seed {seed}: {proof.failure}"
        gathered += sum(len(i.regathered) for i in program.instructions if isinstance(i, Compute))
    assert gathered


def train(
    package: LoadedPackage, mesh: Any, program: Program, batches: list[Tensor], set_to_none: bool | None
) -> dict[str, Tensor]:
    """Gradients after a backward for each batch, zeroed between them in one way or not at all (None)."""
    model = package.model.build_model(mesh)
    package.runtime.init_parameters(model, 0)
    compute = package.train.compute_gradients
    for batch in batches:
        if set_to_none is not None:
            model.zero_grad(set_to_none=set_to_none)
        name = next(iter(package.model.INPUTS))
        compute(model, mesh, [package.batches.local_part(name, batch, mesh)])
    named = {package.runtime.sharding(p).name: p for p in model.parameters()}
    return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}


@pytest.mark.parametrize("mesh", quick_at(MESHES, 2))
def test_gradients_accumulate_as_backward_does(mesh: str) -> None:
    """Two calls add up; after zeroing, in either way, only the last counts."""
    one, two = (torch.randn(7, 5, generator=torch.Generator().manual_seed(i)) for i in range(2))
    with package_of("products", mesh, 0) as (program, package):

        def work(ranks: Any) -> list[dict[str, Tensor]]:
            ways: list[tuple[list[Tensor], bool | None]] = [
                ([one], None), ([two], None), ([one, two], None), ([one, two], True), ([one, two], False),
            ]  # fmt: skip
            return [train(package, ranks, program, *case) for case in ways]

        results = run_lockstep(dict(Mesh.parse(mesh).axes), work, mesh_type=package.runtime.ParallelMesh)
    for first, second, both, fresh, zeroed in results:
        for name in first:
            torch.testing.assert_close(both[name], first[name] + second[name], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(fresh[name], second[name], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(zeroed[name], second[name], rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("whole_packages")
def test_gradients_are_summed_over_devices_once() -> None:
    """A second reduction changes nothing; one after another backward is refused."""
    batch = torch.randn(7, 5)
    program_of.cache_clear()  # of packages that are not whole
    program, _ = program_of("products", "dp=3", 0)
    assert program.gradient_buckets
    with package_of("products", "dp=3", 0) as (_, package):

        def work(ranks: Any) -> str:
            model = package.model.build_model(ranks)
            package.runtime.init_parameters(model, 0)
            named = {package.runtime.sharding(p).name: p for p in model.parameters()}
            local = package.batches.local_part(next(iter(package.model.INPUTS)), batch, ranks)

            def reduce() -> dict[str, Tensor]:
                package.runtime.reduce_gradients(ranks, named, package.model.GRADIENT_BUCKETS)
                return {name: p.grad.clone() for name, p in named.items()}

            model(local).backward()
            model(local).backward()  # micro-batches: one reduction after the last
            once = reduce()
            assert all(torch.equal(value, once[name]) for name, value in reduce().items())
            model.zero_grad(set_to_none=True)
            model(local).backward()
            for name, value in reduce().items():
                torch.testing.assert_close(2 * value, once[name])
            model(local).backward()
            with pytest.raises(RuntimeError) as error:
                reduce()
            return str(error.value)

        for said in run_lockstep({"dp": 3}, work, mesh_type=package.runtime.ParallelMesh):
            assert "was summed over devices" in said and "zero_grad" in said


@pytest.mark.parametrize("mesh", ["dp=2", slow("dp=2,tp=3")])
def test_a_parameter_without_a_gradient_stays_without(mesh: str) -> None:
    """So no optimizer decays it."""
    for seed in range(3):
        with package_of("partly", mesh, seed) as (program, package):

            def work(ranks: Any, package: LoadedPackage = package) -> set[str]:
                model = package.model.build_model(ranks)
                package.runtime.init_parameters(model, 0)
                before = {package.runtime.sharding(p).name: p.detach().clone() for p in model.parameters()}
                optimizer = package.train.make_optimizer(model, lr=0.1)
                batch = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
                local = package.batches.local_part(next(iter(package.model.INPUTS)), batch, ranks)
                package.train.train_step(model, optimizer, ranks, [local], 1.0)
                changed = {
                    package.runtime.sharding(p).name
                    for p in model.parameters()
                    if not torch.equal(p, before[package.runtime.sharding(p).name])
                }
                with_grad = {package.runtime.sharding(p).name for p in model.parameters() if p.grad is not None}
                assert with_grad == {"used.weight", "used.bias"}
                return changed

            changes = run_lockstep(dict(Mesh.parse(mesh).axes), work, mesh_type=package.runtime.ParallelMesh)
            assert set.union(*changes) <= {"used.weight", "used.bias"}
            named = {path for bucket in program.gradient_buckets for path in bucket.parameters}
            assert named <= {"used.weight", "used.bias"}
