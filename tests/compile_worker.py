"""One rank of a package whose blocks are compiled whole: gradients beside those of the package as it is.

    torchrun --nproc-per-node 2 tests/compile_worker.py PACKAGE BACKEND

A block is an item of a ModuleList. Rank 0 prints how many there are, and the largest relative error of a gradient.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from torch import Tensor, nn


def gradients(train: Any, model: nn.Module, mesh: Any, batch: list[Tensor]) -> dict[str, Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    train.compute_gradients(model, mesh, batch)
    return {name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None}


def error(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    largest = max(float(x.abs().max()) for x in one.values())
    assert one.keys() == other.keys()
    scales = {name: max(float(x.abs().max()), 1e-3 * largest) for name, x in one.items()}
    return max(float((one[name] - other[name]).abs().max()) / scales[name] for name in one)


def main(folder: str, backend: str) -> None:
    sys.path.insert(0, folder)  # the compiler imports the package's modules by their names
    train, package = importlib.import_module("train"), importlib.import_module("model_parallel")
    mesh = importlib.import_module("runtime").ParallelMesh.from_environment(package.MESH, "gloo")
    mesh.random.training = False  # eager and compiled dropout draw other masks
    model = package.build_model(mesh)
    options = argparse.Namespace(resume=None, weights=None, seed=0)
    train.prepare(model, train.make_optimizer(model), options, mesh.rank)
    batch = next(importlib.import_module("batches").synthetic_batches(mesh, 0, 0))
    before = gradients(train, model, mesh, batch)
    blocks = importlib.import_module("runtime").compile_blocks(model, backend)
    deviation = error(before, gradients(train, model, mesh, batch))
    if mesh.rank == 0:
        print(f"{blocks} blocks, error {deviation:.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
