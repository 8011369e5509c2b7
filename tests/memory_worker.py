"""One gloo process: `python -m tests.memory_worker MESH FOLDER`, in the environment of torchrun.

Of every package in FOLDER it takes two steps of `train_step` and measures the second; `rank<n>.json` has what it found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.ir.mesh import Mesh
from autoshard.verification.ranks.loaded_package import LoadedPackage, load_package
from tests.meter import Meter

COLLECTIVES = ("all_reduce", "all_to_all_single", "batch_isend_irecv")
PHASES = ("forward", "backward", "optimizer")


def measure(package: LoadedPackage, mesh: Any) -> dict[str, Any]:
    """Bytes of the tensors that stay, and the peak of each phase above them with the operator after which it comes."""
    model = package.model.build_model(mesh)
    package.runtime.init_parameters(model)
    inputs = next(package.batches.synthetic_batches(mesh, 0, 0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)  # as on a GPU
    package.train.compute_gradients = package.recorder.compute_gradients
    package.train.train_step(model, optimizer, mesh, inputs)
    optimizer.zero_grad(set_to_none=True)
    states = [state for group in optimizer.state.values() for state in group.values() if state.dim()]
    local = package.runtime.local
    fixed = [local(x) for x in (*model.parameters(), *model.buffers(), *inputs, *states)]
    meter = Meter(fixed)
    model.register_forward_hook(lambda *_: setattr(meter, "phase", "backward"))
    optimizer.register_step_pre_hook(lambda *_: setattr(meter, "phase", "optimizer"))
    with meter, ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(patch.object(dist, name, meter.beside(getattr(dist, name))))
        transport = type(mesh[next(iter(mesh.axes))].transport)
        for name in ("_all_gather", "_reduce_scatter"):
            stack.enter_context(patch.object(transport, name, staticmethod(meter.beside(getattr(transport, name)))))
        meter.phase = "forward"
        package.train.train_step(model, optimizer, mesh, inputs)
    return {"fixed": stored(fixed), **{phase: meter.peak(phase) for phase in PHASES}}


def stored(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def main(mesh_text: str, folder: str) -> None:
    torch.set_num_threads(1)
    results = {}
    for path in sorted(path for path in Path(folder).iterdir() if path.is_dir()):
        package = load_package(path)
        mesh = package.runtime.ParallelMesh.from_environment(dict(Mesh.parse(mesh_text).axes), "gloo")
        results[path.name] = measure(package, mesh)
        leave = package.runtime.leave
        del package, mesh
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
