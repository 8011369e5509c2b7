"""Processes that torchrun started: joined once; rank 0 broadcasts to the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autoshard.emit.runtime import ParallelMesh
from autoshard.errors import UsageError, UserError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan

_Result = TypeVar("_Result")
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
DEVICES = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "ascend": "npu", "npu": "npu"}
_MESHES: dict[tuple[str, str, bool], ParallelMesh] = {}


def device_type(device: str | torch.device | None) -> str:
    """`Ascend`, `GPU`, `CPU` or torch's names. None: what the process group talks over, else what there is."""
    if device is None:
        if dist.is_initialized():
            backend = dist.get_backend()  # of several, "cpu:gloo,cuda:nccl"
            return next((kind for name, kind in (("nccl", "cuda"), ("hccl", "npu")) if name in backend), "cpu")
        return "cuda" if torch.cuda.is_available() else "npu" if hasattr(torch, "npu") else "cpu"
    name = str(device).partition(":")[0].lower()
    if name not in DEVICES:
        raise UsageError(f"unknown device {str(device)!r}: expected CPU, GPU or Ascend", 'device="CPU"')
    return DEVICES[name]


def started() -> int:
    """Number of processes; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def parallel_mesh(mesh: Mesh, device: str, host: bool = False) -> ParallelMesh:
    """This process's place on the mesh, made once. UsageError where other than the mesh's processes were started.

    `host`: parameters lie in host memory, too.
    """
    if mesh.size != started():
        what = f"the mesh {mesh} has {mesh.size} devices, but {started()} processes were started"
        raise UsageError(what, f"torchrun --nproc-per-node {mesh.size} …, or a plan for --devices {started()}")
    key = (str(mesh), device, host)
    if key not in _MESHES:
        _MESHES[key] = ParallelMesh.from_environment(dict(mesh.axes), BACKENDS[device], host=host)
    return _MESHES[key]


def on_host(plan: Plan) -> bool:
    """True if a parameter of the plan lies in host memory."""
    return any(parameter.layout.host for parameter in plan.parameters)


def join(device: str) -> None:
    """Makes the process group of all processes, unless there is one."""
    if not dist.is_initialized() and started() > 1:
        ParallelMesh.from_environment({"all": started()}, BACKENDS[device], host=True)  # a plan may want the hosts


def from_rank_0(make: Callable[[], _Result], device: str) -> _Result:
    """Result of `make` on rank 0, on every rank; an error that it raises there is raised on every rank."""
    if started() == 1:
        return make()
    join(device)
    reason: list[Any] = [None]
    raised: BaseException | None = None
    if dist.get_rank() == 0:
        try:
            reason = [("made", make())]
        except BaseException as error:
            raised = error
            user_error = (type(error), error.message, error.hint) if isinstance(error, UserError) else None
            reason = [("raised", user_error or (RuntimeError, f"rank 0 failed: {type(error).__name__}: {error}", None))]
    dist.broadcast_object_list(reason, src=0)
    if raised is not None:
        raise raised
    kind, content = reason[0]
    if kind == "raised":
        error_type, message, hint = content
        raise error_type(message) if hint is None else error_type(message, hint)
    result: _Result = content
    return result
