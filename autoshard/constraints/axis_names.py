"""Names of mesh axes that mean something else to everyone: a mesh with one is refused with the options that do it.

An axis is a place where devices stand; what it splits is searched for. `dp`, `tp`, `cp` and `ep` are the docs' words
for axes. Stages, weights in shards and micro-batches are no axes here.
"""

from __future__ import annotations

import math
import re

from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh

STAGES, VIRTUAL, MICRO, SEQUENCE = "stages", "parts of stages", "micro-batches", "sequences"
SHARDS, GRADIENTS, STATE, COPIES = "weights", "gradients", "optimizer state", "copies"
_NAMES = {
    STAGES: "pp pipeline pipe pipelining stage stages ppstages pipelinestage pipelinestages",
    VIRTUAL: "vp vpp virtual virtualpipeline virtualstage virtualstages",
    MICRO: "mb mbs microbatch microbatches ga accumulate accumulation gradaccum gradientaccumulation",
    SHARDS: "fsdp fsdp1 fsdp2 hsdp zero zero3 dpshard shard sharded fullyshard fullysharded fullyshardeddata",
    GRADIENTS: "zero2",
    STATE: "zero1 distributedoptimizer",
    COPIES: "dpreplicate replicate replica",
    SEQUENCE: "sp ulysses usp ring ringattention sequenceparallel sequenceparallelism",
}
MEANT = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_TOLD = {
    STAGES: "pipeline stages are no axis: each stage has the mesh for itself",
    VIRTUAL: "parts of a pipeline stage are no axis",
    MICRO: "micro-batches run one after another and are no axis",
    SHARDS: "weights in shards are a style or a stage of ZeRO, no axis",
    GRADIENTS: "gradients in shards are a stage of ZeRO, no axis",
    STATE: "optimizer state in shards is a stage of ZeRO, no axis",
    COPIES: "weights in shards here and copied there are a style (HSDP), no axis",
    SEQUENCE: "an axis over which sequences are split is called cp; Megatron's sequence parallelism is over tp, "
    "--strategy megatron-sp",
}
_TAIL = re.compile(r"(size|degree|parallelism|parallel)$")
_DATA = ("dp", "ddp", "data")
_ZERO = {STATE: 1, GRADIENTS: 2, SHARDS: 3, COPIES: 3}  # the kinds of axes on which the batch is split, too


def meant_by(name: str) -> str:
    """Usual meaning of a name (`pp`, `PP_size`, `pipeline_parallel`) that is no axis here, or ""."""
    word = re.sub("[^a-z0-9]", "", name.lower())
    while word not in MEANT and word != (shorter := _TAIL.sub("", word)):
        word = shorter
    return MEANT.get(word, "")


def check_axis_names(mesh: Mesh) -> Mesh:
    """The mesh; UsageError where an axis' name says what another option does."""
    for name in mesh.names:
        if kind := meant_by(name):
            raise UsageError(f"mesh {mesh}, axis {name}: {_TOLD[kind]}", instead(mesh))
    return mesh


def instead(mesh: Mesh) -> str:
    """Options that do what the names of the mesh mean."""
    sizes: dict[str, int] = {}
    others: dict[str, int] = {}
    data = next((name for name in mesh.names if name.lower() in _DATA), "dp")
    for name, size in mesh.axes:
        kind = "" if name == data else meant_by(name)
        sizes[kind] = sizes.get(kind, 1) * size
        if name != data and kind in ("", SEQUENCE):
            axis = "cp" if kind == SEQUENCE else name
            others[axis] = others.get(axis, 1) * size
    options = _of_steps(sizes)
    levels = [_ZERO[kind] for kind in sizes if kind in _ZERO]
    copies = sizes.get(COPIES, 1) * (mesh.axis_size(data) if data in mesh.names else 1)
    shards = math.prod(sizes.get(kind, 1) for kind in (STATE, GRADIENTS, SHARDS))
    axes = {data: copies * shards} if copies * shards > 1 or not others else {}
    if levels and (others or options or min(levels) < 3):
        options.append(f"--zero {min(levels)}")
    elif levels and copies > 1 and shards > 1:
        axes = {data: copies, "inner": shards}
        options.append("--strategy hsdp")
    elif levels:
        options.append("--strategy fsdp")
    return " ".join([f"--mesh {Mesh(tuple((axes | others).items()))}", *options])


def _of_steps(sizes: dict[str, int]) -> list[str]:
    """Options for stages, their parts and micro-batches."""
    parts = sizes.get(VIRTUAL, 1)
    stages = sizes.get(STAGES, 2 if parts > 1 else 1)
    options = [f"--stages {stages}"] if stages > 1 else []
    if parts > 1:
        options.append(f"--virtual-stages {parts} --schedule interleaved")
    count = sizes.get(MICRO, stages)
    return [*options, f"--micro-batches {count}"] if count > 1 else options
