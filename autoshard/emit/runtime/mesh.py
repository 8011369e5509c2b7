"""The mesh: named axes, outermost (slowest links) first; ranks are numbered row-major."""

from __future__ import annotations

import contextlib
import datetime
import gc
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from .axis import Axis, GroupTransport, Transport
from .host_rows import HOST
from .micro_batches import LabelShares
from .randomness import Random
from .stages import Stages, first_ranks
from .start_variables import take_start

Timeout = datetime.timedelta | None  # of a collective; None: the backend's own


class ParallelMesh:
    """The devices as a grid of named axes: `mesh["tp"]`. `device_mesh` is None if ranks are simulated. `host_mesh`: the
    same grid of their hosts, if a model has tables there.

    In a pipeline, the devices of one stage: `stages` names it, and `rank` counts within it.
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        rank: int,
        connect: Callable[[ParallelMesh, tuple[str, ...]], Transport],
        device: torch.device,
        device_mesh: DeviceMesh | None = None,
        stages: Stages | None = None,
        host_mesh: DeviceMesh | None = None,
    ) -> None:
        self.axes, self.rank, self.device, self.device_mesh = dict(axes), rank, device, device_mesh
        self.host_mesh = host_mesh
        self.stages = stages
        if stages is not None:
            stages.leads = rank == 0
        self.coordinates: dict[str, int] = {}
        for name, size in reversed(self.axes.items()):
            rank, self.coordinates[name] = divmod(rank, size)
        self._connect = connect
        self._joined: dict[tuple[str, ...], Axis] = {}
        self.random = Random(self)
        self.slice_at: tuple[str, int] | None = None  # the axis and coordinate that what runs is cut for: `BatchShares`
        self.bucket: int | None = None  # whose forward a model with several runs, see `size_buckets`
        self.reused: dict[str, Any] | None = None  # tensors that a model is built of, in place of new ones
        for name in self.axes:
            self.joint((name,))

    @classmethod
    def from_environment(
        cls,
        axes: Mapping[str, int],
        backend: str,
        timeout_seconds: float | None = None,
        part_stages: Sequence[int] = (),
        host: bool = False,
        hccl_buffers: Mapping[str, int] | None = None,
        places: Sequence[Mapping[str, int]] = (),
    ) -> ParallelMesh:
        """Joins the processes started by torchrun, or by another launcher that `start_variables` knows. `backend` is
        gloo (CPU), nccl (CUDA) or hccl (Ascend).

        `timeout_seconds`: of a collective, None for the backend's own. `part_stages`: the stage of each part of the
        model, if there are several; each has a mesh of these axes, or that in `places`. `host`: part of the model lies
        in host memory, for which gloo joins the hosts, too. `hccl_buffers`: MB that HCCL allocates twice for a group,
        by its axes (`tp`, `dp+tp`).
        """
        take_start()
        if part_stages:
            places = places or [axes] * (max(part_stages) + 1)
            size = first_ranks(places)[-1]
        else:
            size = math.prod(axes.values())
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if size != started:
            mesh = ",".join(f"{name}={n}" for name, n in axes.items())
            raise SystemExit(f"the mesh {mesh} has {size} devices but {started} processes were started: use torchrun")
        device = _device(backend)
        timeout = None if timeout_seconds is None else datetime.timedelta(seconds=timeout_seconds)
        if not dist.is_initialized():
            _import_first()
            options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
            if "RANK" not in os.environ:
                options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            if backend == "nccl" and not part_stages:
                options["device_id"] = device  # communicators are made at once, and no rank guesses its device
            backends = f"cpu:gloo,{device.type}:{backend}" if host and device != HOST else backend
            dist.init_process_group(backends, **options)
        if host and device != HOST and "cpu" not in str(dist.get_backend_config()):
            raise RuntimeError(
                "tables in host memory: the process group that is there joins devices alone\n"
                f'  try: init_process_group("cpu:gloo,{device.type}:{backend}"), or none before'
            )
        connect = partial(_connect_group, timeout=timeout, hccl_buffers=hccl_buffers or {})
        if not part_stages:
            device_mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
            hosts = _host_mesh(device_mesh) if host and device != HOST else None
            return cls(axes, dist.get_rank(), connect, device, device_mesh, host_mesh=hosts)
        if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            raise RuntimeError(
                "stages: every new group would be split from the process group that is there, which all ranks must "
                "take part in\n  try: init_process_group without device_id, or none before"
            )
        return cls._of_place(places, part_stages, connect, device, timeout, host)

    @classmethod
    def _of_place(
        cls, places: Sequence[Mapping[str, int]], part_stages: Sequence[int],
        connect: Callable[[ParallelMesh, tuple[str, ...]], Transport], device: torch.device, timeout: Timeout,
        host: bool,
    ) -> ParallelMesh:  # fmt: skip
        """Mesh of this stage or place; all ranks create all groups, in one order."""
        firsts, rank = first_ranks(places), dist.get_rank()
        grids = [
            torch.arange(first, first + math.prod(axes.values())).reshape(tuple(axes.values()))
            for first, axes in zip(firsts, places, strict=False)
        ]
        index = next(number for number, grid in enumerate(grids) if rank in grid)
        meshes = [
            DeviceMesh(device.type, grid, mesh_dim_names=tuple(axes)) for grid, axes in zip(grids, places, strict=True)
        ]
        hosts: list[DeviceMesh | None] = [None] * len(meshes)
        if host and device != HOST:
            hosts = [
                DeviceMesh(HOST.type, grid, mesh_dim_names=tuple(axes))
                for grid, axes in zip(grids, places, strict=True)
            ]
        shared = _place_groups(firsts, timeout)
        held = Stages(index, part_stages, shared, GroupTransport(dist.group.WORLD), places)
        return cls(places[index], rank - firsts[index], connect, device, meshes[index], held, hosts[index])

    @cached_property
    def labels(self) -> LabelShares:
        """Label shares of the running micro-batch."""
        return LabelShares()

    @property
    def global_rank(self) -> int:
        """Rank over all stages."""
        if self.stages is None:
            return self.rank
        return self.rank + self.stages.firsts[self.stages.index]

    @property
    def group_names(self) -> list[str]:
        """Axes, joined by +, that something was communicated over, and each single axis."""
        return ["+".join(names) for names in self._joined]

    def __getitem__(self, name: str) -> Axis:
        return self._joined[(name,)]

    def joint(self, names: Sequence[str]) -> Axis:
        """Several axes as one (row-major). All ranks must make the first use of a set together."""
        key = tuple(name for name in self.axes if name in names)
        if key not in self._joined:
            index = 0
            for name in key:
                index = index * self.axes[name] + self.coordinates[name]
            size = math.prod(self.axes[name] for name in key)
            self._joined[key] = Axis("+".join(key), size, index, self._connect(self, key), self, key)
        return self._joined[key]

    @contextlib.contextmanager
    def micro_batch(
        self, number: int, shares: Sequence[Tensor] = (), at: tuple[str, int] | None = None
    ) -> Iterator[None]:
        """Context of a micro-batch's forward, with its own random numbers. `shares`: of the step's labels, see
        `label_shares`. `at`: for a slice of it, the axis and the coordinate of the slice."""
        moment, coordinates, self.slice_at = self.random.moment, self.coordinates, at
        if at is not None and self.random.exact:
            self.coordinates = coordinates | {at[0]: at[1]}
        elif at is not None:
            number = number * self.axes[at[0]] + at[1]
        if number:
            self.random.step = (moment.step, number)
        self.labels.begin(shares)
        try:
            yield
        finally:
            self.random.moment, self.coordinates, self.slice_at = moment, coordinates, None
            self.labels.begin(())

    def groups(self, names: Sequence[str]) -> list[list[int]]:
        """Ranks of every group along the axes `names`."""
        dims = [i for i, name in enumerate(self.axes) if name in names]
        ranks = torch.arange(math.prod(self.axes.values())).reshape(tuple(self.axes.values()))
        moved = ranks.movedim(dims, list(range(ranks.dim() - len(dims), ranks.dim())))
        return cast(list[list[int]], moved.reshape(-1, math.prod(ranks.shape[i] for i in dims)).tolist())


def leave() -> None:
    """Ends the process groups and waits for their threads; call it when nothing refers to a mesh any more.

    A thread of gloo's may free a tensor some time after the collective. If the interpreter is ending by then, the
    process is aborted: "terminate called without an active exception". So groups must be destroyed, not only shut down:
    nothing may hold one, neither garbage nor DTensor's cache of layouts, which keeps the device mesh.
    """
    gc.collect()  # meshes, axes and models refer to each other
    _forget_layouts()
    dist.destroy_process_group()
    gc.collect()


def _forget_layouts() -> None:
    """Empties DTensor's caches, as `torch.distributed.tensor.debug` does, but without importing dynamo and inductor."""
    dispatcher = getattr(DTensor, "_op_dispatcher", None)
    propagate = getattr(getattr(dispatcher, "sharding_propagator", None), "propagate_op_sharding", None)
    in_python = getattr(propagate, "cache_clear", None)
    in_cpp = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    for clear in (in_python, in_cpp):
        if clear is not None:
            clear()


def _import_first() -> None:
    """Imports a module of torch whose functions take the group that exists at import as their default for ever.

    `torch.distributed.optim` is another: it compiles TorchScript for half a second, and nothing here imports it."""
    import torch.distributed.nn  # noqa: F401


def _host_mesh(devices: DeviceMesh) -> DeviceMesh:
    """Mesh of the hosts, with the same grid."""
    names = devices.mesh_dim_names
    return init_device_mesh(HOST.type, tuple(devices.shape), mesh_dim_names=names)


def _device(backend: str) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    if backend == "hccl":
        import torch_npu  # type: ignore[import-not-found]  # noqa: F401  # registers the device type "npu"
    device = torch.device({"nccl": "cuda", "hccl": "npu"}[backend], int(os.environ.get("LOCAL_RANK", "0")))
    torch.get_device_module(device).set_device(device)
    return device


def _connect_group(
    mesh: ParallelMesh, names: tuple[str, ...], timeout: Timeout, hccl_buffers: Mapping[str, int]
) -> Transport:
    assert mesh.device_mesh is not None
    options = _hccl_options(hccl_buffers.get("+".join(names)))
    if len(names) == 1 and options is None:
        return GroupTransport(_timed(mesh.device_mesh.get_group(names[0]), timeout))
    if mesh.stages is not None:  # other stages make other groups, or none
        first = mesh.global_rank - mesh.rank
        members = next(group for group in mesh.groups(names) if mesh.rank in group)
        ranks = [first + rank for rank in members]
        return GroupTransport(dist.new_group(ranks, timeout, pg_options=options, use_local_synchronization=True))
    if len(names) == len(mesh.axes) and options is None:
        return GroupTransport(dist.group.WORLD)
    return GroupTransport(dist.new_subgroups_by_enumeration(mesh.groups(names), timeout, pg_options=options)[0])


def _hccl_options(megabytes: int | None) -> Any:
    """Options of a group whose buffer size differs from HCCL_BUFFSIZE; None for the default."""
    if megabytes is None:
        return None
    import torch_npu

    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": megabytes}
    return options


def _timed(group: dist.ProcessGroup, timeout: Timeout) -> dist.ProcessGroup:
    """Sets the timeout of a device mesh's group, which has torch's own timeout, whatever that of all ranks is."""
    if timeout is not None:
        cast(Any, dist.distributed_c10d)._set_pg_timeout(timeout, group)
    return group


def _place_groups(firsts: Sequence[int], timeout: Timeout) -> Callable[[tuple[int, ...]], Transport]:
    """Groups of the devices of equal rank on several places, which have equal meshes. All ranks create all of them:
    torch names a group that only its members create by their number of groups, which differs between places."""

    def connect(places: tuple[int, ...]) -> Transport:
        size = firsts[places[0] + 1] - firsts[places[0]]
        groups = [[firsts[place] + rank for place in places] for rank in range(size)]
        handles = [dist.new_group(ranks, timeout) for ranks in groups]
        handle = next((group for group, ranks in zip(handles, groups, strict=True) if dist.get_rank() in ranks), None)
        return GroupTransport(handle)

    return connect
