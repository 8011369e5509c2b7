"""Ranks of a package: what a checkpoint holds, seen from each mesh."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from tests import launched

State = dict[str, torch.Tensor]


def run_ranks(package: Path, ranks: int, folder: Path, save: Path | None = None, steps: int = 0) -> State:
    """The state after `steps` more steps from the checkpoint in `folder`, or from a fresh start where it has none.

    Parameters, buffers and the optimizer's state by original name, whole and in the original shape; `save`: written
    there as a checkpoint.
    """
    output = folder.parent / f"{package.name}.pt"
    done = launched.torchrun(Path(__file__), ranks, package, folder, save or "", steps, output)
    assert done.returncode == 0, done.stdout + done.stderr
    state: State = torch.load(output, weights_only=True)
    return state


def _work(package: Path, folder: Path, save: Path | None, steps: int, output: Path) -> Any:
    from autoshard.verification.ranks.loaded_package import load_package

    loaded = load_package(package)
    loaded.train.compute_gradients = loaded.recorder.compute_gradients
    mesh = loaded.runtime.ParallelMesh.from_environment(loaded.model.MESH, "gloo")
    model = loaded.model.build_model(mesh)
    optimizer = loaded.train.make_optimizer(model, lr=1e-2)
    resume = str(folder) if folder.exists() else None
    done = loaded.train.prepare(model, optimizer, argparse.Namespace(resume=resume, weights=None, seed=0), mesh.rank)
    batches = loaded.batches.synthetic_batches(mesh, 0, done)
    for step in range(done + 1, done + steps + 1):
        mesh.random.step = step
        loaded.train.train_step(model, optimizer, mesh, next(batches), 1.0)
    state = _whole(loaded.runtime, model, optimizer)
    if save is not None:
        loaded.runtime.save_checkpoint(save, model, optimizer, done + steps)
    if mesh.rank == 0:
        torch.save(state, output)
    return loaded.runtime.leave


def _whole(runtime: Any, model: Any, optimizer: torch.optim.Optimizer) -> State:
    state: State = {}
    for tensor in (*model.parameters(), *model.buffers()):
        sharding = runtime.sharding(tensor)
        state[sharding.name] = runtime.full_tensor(tensor).clone()
        for slot, value in optimizer.state.get(tensor, {}).items():
            if value.dim():
                value.sharding = sharding  # it lies as the parameter does
                value = runtime.full_tensor(value)
            state[f"{sharding.name}: {slot}"] = value.clone()
    return state


if __name__ == "__main__":
    package, folder, save, steps, found = sys.argv[1:]
    torch.set_num_threads(1)
    _work(Path(package), Path(folder), Path(save) if save else None, int(steps), Path(found))()
