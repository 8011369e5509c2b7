# mypy: ignore-errors
# ruff: noqa: I001
"""Sizes of the inputs that differ from step to step (DYNAMIC_SIZES in model_parallel.py): read off batches, checked,
and agreed on by all ranks before the first collective of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

import model_parallel
from model_parallel import INPUTS, MESH, MESHES, PLACE_INPUTS, STAGES
from runtime import ParallelMesh
from user_errors import BatchError, UserError

DYNAMIC_SIZES = getattr(model_parallel, "DYNAMIC_SIZES", {})  # of a plan that has none, none are written
PADDING = getattr(model_parallel, "PADDING", ())
IGNORED = getattr(model_parallel, "IGNORED", {})
BUCKETS = getattr(model_parallel, "BUCKETS", ())

SET: dict[str, int] = {}  # those that the command line fixes, of synthetic batches


def shape_at(name: str, sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
    """The global shape of an input at these dynamic sizes; those that are not given are as planned."""
    if not DYNAMIC_SIZES or sizes is None:
        return INPUTS[name][0]
    shape = list(INPUTS[name][0])
    for size, (*_, dims) in DYNAMIC_SIZES.items():
        for dim in dims.get(name, ()):
            shape[dim] = sizes.get(size, shape[dim])
    return tuple(shape)


def check_sizes(sizes: Mapping[str, int], where: str = "") -> None:
    """BatchError for a size that the package was not planned for."""
    for name, size in sizes.items():
        least, most, divisor, remainder, dims = DYNAMIC_SIZES[name]
        if size < least or (most and size > most) or size % divisor != remainder:
            kind = f"a multiple of {divisor} " * (divisor > 1) + f"plus {remainder} " * bool(remainder)
            allowed = f"{kind}from {least} " + (f"to {most}" if most else "on")
            of = ", ".join(f"dim {dim} of {input_name}" for input_name, held in dims.items() for dim in held)
            pad = "--pad; or " if name in PADDING else ""
            raise BatchError(
                f"{where}{name} of {size} ({of}): expected {allowed}, over all devices\n"
                f"  try: {pad}batches padded or cut to it; or a plan for other sizes (--dynamic)"
            )


def padded(batch: Sequence[Tensor]) -> list[Tensor]:
    """A global batch, padded to the next allowed sizes with its first row or column and labels that do not count: the
    loss does not change, and the model meets nothing that it does not take."""
    tensors = dict(zip(INPUTS, batch, strict=True))
    for size in PADDING:
        least, _, divisor, remainder, dims = DYNAMIC_SIZES[size]
        for name, held in dims.items():
            for dim in held if tensors[name].dim() > max(held) and tensors[name].numel() else ():
                extent = tensors[name].shape[dim]
                more = max(least, -(-(extent - remainder) // divisor) * divisor + remainder) - extent
                if more > 0:
                    shape = (*tensors[name].shape[:dim], more, *tensors[name].shape[dim + 1 :])
                    rows = tensors[name].narrow(dim, 0, 1).expand(shape)
                    rows = torch.full_like(rows, IGNORED[name]) if name in IGNORED else rows
                    tensors[name] = torch.cat([tensors[name], rows], dim)
    return list(tensors.values())


def mesh_devices() -> int:
    """Number of devices of all places or stages."""
    if STAGES == 1:
        return math.prod(MESH.values())
    return sum(math.prod(axes.values()) for axes in MESHES or [MESH] * STAGES)


def layout_of(name: str, mesh: ParallelMesh) -> str:
    """Layout of an input on this place."""
    if not PLACE_INPUTS:
        return INPUTS[name][2]
    layouts = PLACE_INPUTS.get(mesh.stages.index, {}) if mesh.stages is not None else {}
    return layouts.get(name, INPUTS[name][2])


def parts_of(name: str, dim: int, mesh: ParallelMesh) -> int:
    """Number of parts in which devices hold a dim of an input."""
    pairs = zip(mesh.axes.values(), layout_of(name, mesh).split(), strict=False)
    cut = f"S{dim}"
    return math.prod(n for n, placed in pairs if placed == cut or placed.startswith((f"{cut}/", f"{cut}*", f"{cut}[")))


def sizes_of(batch: Sequence[Tensor], mesh: ParallelMesh, local: bool) -> dict[str, int]:
    """The dynamic sizes of a batch, whose tensors are global, or this rank's part. BatchError where its inputs differ
    in one, or where it is not allowed."""
    by_name: dict[str, int] = {}
    inputs = dict(zip(INPUTS, batch, strict=True))
    for size, (*_, dims) in DYNAMIC_SIZES.items():
        seen: dict[str, int] = {}
        for name, dim in ((name, dim) for name, held in dims.items() for dim in held):
            x = inputs[name]
            if x.dim() != len(INPUTS[name][0]):
                raise BatchError(
                    f"input {name!r}: expected {len(INPUTS[name][0])} dims, got the shape {tuple(x.shape)}\n"
                    "  try: batches as in INPUTS of model_parallel.py"
                )
            seen[f"dim {dim} of {name}"] = x.shape[dim] * (parts_of(name, dim, mesh) if local else 1)
        if len({*seen.values()}) > 1:
            message = ", ".join(f"{place} is {extent}" for place, extent in seen.items())
            raise BatchError(f"{size}: the inputs of a batch disagree: {message}\n  try: one {size} for all of them")
        by_name[size] = next(iter(seen.values()))
    check_sizes(by_name)
    return by_name


def drawn_sizes(generator: torch.Generator) -> dict[str, int]:
    """Sizes of a synthetic batch: those that are set, others drawn from the allowed ones (up to the planned one where
    there is no limit)."""
    return {name: SET[name] if name in SET else _drawn(name, generator) for name in DYNAMIC_SIZES}


def _drawn(name: str, generator: torch.Generator) -> int:
    least, most, divisor, remainder, dims = DYNAMIC_SIZES[name]
    input_name, held = next(iter(dims.items()))
    last = ((most or INPUTS[input_name][0][held[0]]) - remainder) // divisor
    first = (least - remainder) // divisor
    return int(torch.randint(first, max(first, last) + 1, (), generator=generator)) * divisor + remainder


def agree(batches: Sequence[Sequence[Tensor]], mesh: ParallelMesh, step: int) -> None:
    """Raises UserError, on all ranks, where they got micro-batches of other sizes. Local tensors; before any other
    collective of the step, which would hang or mix them up."""
    if not DYNAMIC_SIZES:
        return
    sizes = [sizes_of(batch, mesh, local=True) for batch in batches]
    table = torch.tensor([[*one.values()] for one in sizes], dtype=torch.float64)
    extremes = torch.stack([table, -table]).to(mesh.device)
    mesh.joint(tuple(mesh.axes)).transport.all_reduce(extremes, "max")()
    if mesh.stages is not None:
        mesh.stages.transport.all_reduce(extremes, "max")()
    for row, (largest, least) in enumerate(zip(extremes[0].tolist(), (-extremes[1]).tolist(), strict=True)):
        for name, most, few in zip(DYNAMIC_SIZES, largest, least, strict=True):
            if most != few:
                which = f" in micro-batch {row}" if len(sizes) > 1 else ""
                raise UserError(
                    f"--data: step {step}: ranks got batches of different sizes{which}: {name} from {few:.0f} to "
                    f"{most:.0f}\n"
                    "  try: the same order of batches on every rank, from the `seed` that the function is given"
                )


def step_sizes(batches: Sequence[Sequence[Tensor]], mesh: ParallelMesh) -> list[dict[str, int]]:
    """Dynamic sizes of each of these local micro-batches; empty for a package without any."""
    return [sizes_of(batch, mesh, local=True) for batch in batches] if DYNAMIC_SIZES else []


def module_of(batches: Sequence[Sequence[Tensor]], mesh: ParallelMesh) -> ModuleType:
    """Module whose forward the model now runs, and whose tables hold: for a step of these local micro-batches."""
    sizes = step_sizes(batches, mesh)
    for number, (most, module) in enumerate(BUCKETS):
        if all(batch_sizes[name] <= size for batch_sizes in sizes for name, size in most.items()):
            mesh.bucket = number
            return module
    mesh.bucket = None
    return model_parallel


def rate(seconds: float, batches: Sequence[Sequence[Tensor]], mesh: ParallelMesh) -> str:
    """Samples (or tokens, where the first input is rows of integers) a second, of a step's local micro-batches."""
    planned, dtype, *_ = next(iter(INPUTS.values()))
    shapes = [planned] * len(batches)
    if DYNAMIC_SIZES:
        shapes = [shape_at(next(iter(INPUTS)), sizes) for sizes in step_sizes(batches, mesh)]
    tokens = "int" in dtype and len(planned) == 2
    count = sum(math.prod(shape) if tokens else shape[0] if shape else 1 for shape in shapes)
    return f"{count / seconds:.0f} {'tokens' if tokens else 'samples'}/s"


def parsed(text: str) -> Iterator[tuple[str, int]]:
    """Sizes by name in `batch=16,sequence=256`."""
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in DYNAMIC_SIZES or not number.isdecimal():
            raise UserError(f"--sizes {part}: expected {', '.join(f'{size}=N' for size in DYNAMIC_SIZES)}")
        yield name, int(number)
