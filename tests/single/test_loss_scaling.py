"""Packages in fp16-mixed: the loss is scaled, and a step that one rank overflows in is left out on all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.emit import emit
from autoshard.errors import UsageError
from autoshard.graph_capture.capture import capture
from autoshard.graph_capture.two_runs.autocast import autocast_as_planned
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.program.lower import lower
from autoshard.verification.case import check_files, make_case, written
from autoshard.verification.ranks.loaded_package import LoadedPackage, load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from tests.captured import captured
from tests.forced import forced_plan
from tests.slow import slow

ROWS = 4


class Block(nn.Module):
    """A cut of `down` leaves part of its gradients to each device."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.norm(F.gelu(self.up(x)))), y)


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Block(), (torch.randn(ROWS, 12), torch.randn(ROWS, 5))


SPEC = f"{__file__}:build"


@cache
def made(mesh: str, seed: int = 0) -> tuple[Program, dict[str, str]]:
    graph = captured(SPEC, {}, "fp16-mixed")
    plan = forced_plan(graph, Mesh.parse(mesh), lambda op, strategy: True, seed)
    program = lower(plan, graph)
    return program, emit(program, plan, graph)


@pytest.mark.parametrize("mesh", [slow("dp=2"), "dp=2,tp=2"])
@pytest.mark.slow
def test_a_step_in_float16_is_verified(mesh: str) -> None:
    graph = captured(SPEC, {}, "fp16-mixed")
    case = make_case(SPEC, {}, graph)
    assert not isinstance(case.native_step, str) and case.native_step.scale > 1
    for seed in range(3):
        program, files = made(mesh, seed)
        proof = check_files(case, program, files, own_precision=True)
        assert proof.passed and not proof.unverified, proof.failure
    for old, new in (("scaler.unscale_(optimizer)", "pass"), ("scaled(outputs[0], scaler)", "outputs[0]")):
        assert old in files["train.py"]
        faulty = {**files, "train.py": files["train.py"].replace(old, new)}
        assert not check_files(case, program, faulty, own_precision=True).passed, old


class Original:
    """The model, stock optimizer, schedule and GradScaler on one device."""

    def __init__(self, state: dict[str, Tensor], optimizer: str) -> None:
        self.module = Block()
        self.module.load_state_dict(state)
        kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
        self.optimizer = kind(self.module.parameters(), 1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)

    def step(self, batch: tuple[Tensor, ...], overflows: bool) -> float:
        self.optimizer.zero_grad()
        with autocast_as_planned("fp16-mixed"):
            loss = self.module(*batch)
        self.scaler.scale(loss).backward()
        if overflows:
            next(self.module.parameters()).grad.view(-1)[0] = float("inf")
        self.scaler.unscale_(self.optimizer)
        norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.5))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm


def overflowing(package: LoadedPackage, rank: int, when: list[bool]) -> None:
    """On that rank alone one gradient is infinite after the sums over devices: as where its own unscaling overflows."""
    compute, lock = package.train.compute_gradients, threading.Lock()

    def faulty(model: nn.Module, mesh: Any, inputs: Any, **options: Any) -> Any:
        outputs = compute(model, mesh, inputs, **options)
        if mesh.rank == rank and when[mesh.random.step]:
            with torch.no_grad(), lock:
                gradients = [package.runtime.local(p.grad) for p in model.parameters() if p.grad is not None]
                next(gradient for gradient in gradients if gradient.numel()).view(-1)[-1] = float("inf")
        return outputs

    package.train.compute_gradients = faulty


def trained(
    package: LoadedPackage, mesh: Any, state: dict[str, Tensor], batches: list[tuple[Tensor, ...]], layouts: list[str]
) -> tuple[dict[str, Tensor], dict[str, Any], list[int]]:
    """Whole parameters, the scaler's state, and each optimizer step count, of one rank."""
    train, runtime = package.train, package.runtime
    model = package.model.build_model(mesh)
    for parameter in model.parameters():
        runtime.assign(parameter, state[runtime.sharding(parameter).name])
    optimizer, scaler = train.make_optimizer(model, lr=1e-2), train.make_scaler(mesh, 2.0**12)
    scaler.set_growth_interval(2)
    for number, batch in enumerate(batches):
        mesh.random.step = number
        held = []
        for x, layout in zip(batch, layouts, strict=True):
            for dim in range(x.dim()):
                x = x.index_select(dim, runtime.held_indices(x.shape[dim], dim, layout, mesh))
            held.append(x)
        train.train_step(model, optimizer, mesh, held, 0.5, scaler)
    counts = [int(entry["step"]) for entry in optimizer.state.values() if "step" in entry]
    whole = {runtime.sharding(p).name: runtime.full_tensor(p).detach().clone() for p in model.parameters()}
    return whole, scaler.state_dict(), counts


@pytest.mark.parametrize("mesh", [slow("dp=2"), slow("tp=4"), "dp=2,tp=2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_overflows_alone(mesh: str, rank: int) -> None:
    """Parameters, scale, growth and the counts of steps are those of stock parts on one device, on every rank."""
    when = [True, False, False, True, False, False, False]
    torch.manual_seed(1)
    state = {name: value.clone() for name, value in Block().state_dict().items()}
    batches = [(torch.randn(ROWS, 12), torch.randn(ROWS, 5)) for _ in when]
    program, files = made(mesh, 1)
    stock = Original(state, program.optimizer)
    for batch, overflows in zip(batches, when, strict=True):
        stock.step(batch, overflows)
    wanted = stock.scaler.state_dict()
    assert (wanted["scale"], wanted["_growth_tracker"]) == (2.0**12 / 2 * 2 / 2 * 2, 1)
    layouts = [str(program.value(name).layout) for name in program.inputs]
    with written(files) as folder:
        package = load_package(folder)
        overflowing(package, rank, when)
        work: Callable[[Any], Any] = lambda local_mesh: trained(package, local_mesh, state, batches, layouts)  # noqa: E731
        ranks = run_lockstep(dict(program.mesh.axes), work, 120.0, package.runtime.ParallelMesh)
    for whole, scaler, counts in ranks:
        assert scaler.pop("skipped") == 2
        assert scaler == wanted
        assert set(counts) == {5}
        for name, parameter in stock.module.named_parameters():
            torch.testing.assert_close(whole[name], parameter.detach(), rtol=2e-3, atol=2e-4)


def build_half() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Block().half(), (torch.randn(ROWS, 12).half(), torch.randn(ROWS, 5).half())


def test_parameters_in_half_precision_are_refused() -> None:
    with pytest.raises(UsageError, match=r"trains parameters in float32: up\.weight is float16"):
        capture(f"{__file__}:build_half", {}, "fp16-mixed")
