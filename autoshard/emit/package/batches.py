# mypy: ignore-errors
# ruff: noqa: I001
"""The batches of train.py: synthetic ones, or those of a user's loader; of each, the part that this rank holds."""

from __future__ import annotations

import importlib.util
import inspect
import io
import math
import pickle
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynamic_sizes import (
    DYNAMIC_SIZES,
    SET,
    check_sizes,
    drawn_sizes,
    layout_of,
    mesh_devices,
    padded,
    shape_at,
    sizes_of,
)
from model_parallel import FIXED_SIZES, FREE_SIZES, INPUTS, MICRO_BATCHES, PLACE_INPUTS
from runtime import ParallelMesh, Read, held_indices
from user_errors import BatchError, ElsewhereError, UserError


def set_size(name: str, size: int) -> None:
    """Sets another `batch` or `sequence` than planned, for all devices: to be called before any batch is read.

    UserError where it can't be. INPUTS has it from then on; the model reads it off what it is given.
    """
    if DYNAMIC_SIZES and name in DYNAMIC_SIZES:
        check_sizes({name: size})
        SET[name] = size
        return
    if name not in FREE_SIZES:
        message = FIXED_SIZES.get(name, "no input has it")
        raise UserError(f"the {name} can't be other than planned: {message}\n  try: a plan of its own")
    planned, unit, least, most, dims = FREE_SIZES[name]
    if not least <= size <= most or size % unit:  # of others nobody has asked the model
        wanted = f"a multiple of {unit} " * (unit > 1) + f"from {least} to {most}"
        raise UserError(f"a {name} of {size}: expected {wanted} (planned: {planned}), over all devices")
    for input_name, held in dims.items():
        shape, *others = INPUTS[input_name]
        INPUTS[input_name] = (tuple(size if dim in held else other for dim, other in enumerate(shape)), *others)


def local_shape(name: str, mesh: ParallelMesh, sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
    """The shape of this rank's part of an input; as planned, or at these dynamic sizes."""
    layout = layout_of(name, mesh)
    return tuple(len(held_indices(size, dim, layout, mesh)) for dim, size in enumerate(shape_at(name, sizes)))


def local_part(name: str, x: Tensor, mesh: ParallelMesh, sizes: Mapping[str, int] | None = None) -> Tensor:
    """This rank's part of an input, of which each dim is global or local already; as planned, or at these dynamic
    sizes."""
    layout = layout_of(name, mesh)
    for dim, size in enumerate(shape_at(name, sizes)):
        held = held_indices(size, dim, layout, mesh)
        if len(held) < size == x.shape[dim]:
            x = x.index_select(dim, held.to(x.device))
    return x


def parts(mesh: ParallelMesh) -> dict[str, tuple[slice, ...]]:
    """Slices of each input that this rank needs: all that a loader reads of an image sharded by rows, say. A dim that
    is sharded in blocks is whole."""
    slices = {}
    for name, (shape, *_) in INPUTS.items():
        every = [held_indices(size, dim, layout_of(name, mesh), mesh).tolist() for dim, size in enumerate(shape)]
        slices[name] = tuple(_slice(held) for held in every)
    return slices


def _slice(held: list[int]) -> slice:
    if not held:
        return slice(0, 0)
    in_line = held[-1] - held[0] + 1 == len(held)
    return slice(held[0], held[-1] + 1) if in_line else slice(None)


def of_samples() -> list[str]:
    """Inputs whose dim 0 has, in a batch of a whole step, MICRO_BATCHES times as many samples. Empty where batches have
    sizes that change."""
    sizes = [shape[0] for shape, *_ in INPUTS.values() if shape]
    samples = max(sizes, key=sizes.count, default=0)
    return [name for name, (shape, *_) in INPUTS.items() if shape[:1] == (samples,)] if not DYNAMIC_SIZES else []


def split(batch: Sequence[Tensor]) -> list[list[Tensor]]:
    """Micro-batches of a batch of a whole step; another batch unchanged. What has no samples is whole in each."""
    owners = set(of_samples()) if len(batch) == len(INPUTS) else set()
    pairs = [(name, x) for name, x in zip(INPUTS, batch, strict=True) if name in owners] if owners else []
    whole = {name for name, x in pairs if x.ndim and len(x) == INPUTS[name][0][0] * MICRO_BATCHES}
    if not whole:
        return [list(batch)]
    cut = [
        x.chunk(MICRO_BATCHES) if name in whole else [x] * MICRO_BATCHES for name, x in zip(INPUTS, batch, strict=True)
    ]
    return [list(tensors) for tensors in zip(*cut, strict=True)]


def synthetic_batches(mesh: ParallelMesh, seed: int, start: int) -> Iterator[list[Tensor]]:
    """Batches made from the seed and the step's number alone: the same on every mesh, in however many micro-batches.
    `start`: the first one's number."""
    step = start
    first = None  # of a step that is begun, the micro-batch to go on with
    if MICRO_BATCHES > 1 and of_samples():
        step, first = divmod(start, MICRO_BATCHES)
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        sizes = drawn_sizes(generator) if DYNAMIC_SIZES else None
        whole = [_drawn(name, sizes, generator) for name in INPUTS]
        batches = [whole]
        if MICRO_BATCHES > 1 and of_samples():
            batches, first = split(whole)[first:], None
        for batch in batches:
            yield [local_part(name, x, mesh, sizes).to(mesh.device) for name, x in zip(INPUTS, batch, strict=True)]
        step += 1


def _drawn(name: str, sizes: Mapping[str, int] | None, generator: torch.Generator) -> Tensor:
    """An input: of all micro-batches of a step, if batches have samples."""
    shape, (_, dtype, _, low, high) = shape_at(name, sizes), INPUTS[name]
    if MICRO_BATCHES > 1 and name in of_samples():
        shape = (shape[0] * MICRO_BATCHES, *shape[1:])
    kind: torch.dtype = getattr(torch, dtype)
    if isinstance(low, tuple):
        return _by_column(shape, low, high, generator).to(kind)
    if kind.is_floating_point and high > low:
        return (torch.rand(shape, generator=generator) * (high - low) + low).to(kind)
    if kind.is_floating_point:
        return torch.randn(shape, generator=generator).to(kind)
    return torch.randint(low, high, shape, generator=generator).to(kind)


def _by_column(
    shape: tuple[int, ...], lows: tuple[int, ...], highs: tuple[int, ...], generator: torch.Generator
) -> Tensor:
    """Integers from the range of each place of the last dim; from all of these where it has another size."""
    low, high = torch.tensor(lows), torch.tensor(highs)
    if len(low) != shape[-1]:
        low, high = low.min(), high.max()
    return low + torch.randint(0, 2**62, shape, generator=generator) % (high - low)


def checked(batch: Any, mesh: ParallelMesh, own_parts: bool = False, pad: bool = False) -> list[Tensor]:
    """The local tensors of a loader's batch, where they are. Raises BatchError that says what was expected.

    `own_parts`: dims of dynamic sizes are this rank's part; else they are global on every rank. `pad`: they are made up
    to the next allowed size."""
    batch = tensors_of(batch)
    if pad:
        batch = padded(batch)
    sizes = sizes_of(batch, mesh, own_parts) if DYNAMIC_SIZES else None
    return [_checked_tensor(name, x, mesh, sizes) for name, x in zip(INPUTS, batch, strict=True)]


def tensors_of(batch: Any) -> list[Tensor]:
    """Tensors of a loader's batch, in the order of INPUTS. Raises BatchError where it has others."""
    names = list(INPUTS)
    if isinstance(batch, Mapping):
        missing = [name for name in names if name not in batch]
        if missing:
            raise BatchError(f"the batch lacks {', '.join(missing)}: it has {', '.join(map(str, batch)) or 'nothing'}")
        batch = [batch[name] for name in names]
    if isinstance(batch, Tensor):
        batch = [batch]
    if not isinstance(batch, list | tuple) or len(batch) != len(names):
        got = f"{len(batch)} tensors" if isinstance(batch, list | tuple) else type(batch).__name__
        raise BatchError(f"a batch must hold {len(names)} tensors ({', '.join(names)}), got {got}")
    for name, x in zip(names, batch, strict=True):
        if not isinstance(x, Tensor):
            raise BatchError(f"input {name!r}: expected a tensor, got {type(x).__name__}")
    return list(batch)


def _checked_tensor(name: str, x: Tensor, mesh: ParallelMesh, sizes: Mapping[str, int] | None) -> Tensor:
    shape, part_dims = shape_at(name, sizes), local_shape(name, mesh, sizes)
    dtype: torch.dtype = getattr(torch, INPUTS[name][1])
    if x.dtype.is_floating_point != dtype.is_floating_point:
        raise BatchError(f"input {name!r}: expected {dtype}, got {x.dtype}")
    fits = len(x.shape) == len(shape) and all(n in either for n, *either in zip(x.shape, shape, part_dims, strict=True))
    if not fits:
        got = tuple(x.shape)
        message = f"input {name!r}: expected the global shape {tuple(shape)} or the local {part_dims}, got {got}"
        options = {"batch": "--batch-size N", "sequence": "--sequence-length N"}
        free = [f"for another {name} {option}" for name, option in options.items() if name in FREE_SIZES]
        other = ", ".join(free) or "for another batch or length a plan"
        raise BatchError(f"{message}\n  try: drop_last=True in the loader; {other}")
    return local_part(name, x, mesh, sizes).to(dtype=dtype)


MARKED_BYTES = 1 << 20  # of each tensor: batches that differ, differ early
MARKS = round(1 / torch.finfo(torch.float32).eps)  # which holds twice as many exactly


def check_agreement(batches: Sequence[Sequence[Tensor]], mesh: ParallelMesh, step: int = 0, ends: int = 0) -> None:
    """UserError where ranks that hold the same part of an input, as those of tensor parallelism, got other values.

    All ranks must call it, and all of them raise. Compared is a checksum of the first MiB, and before it `ends`: how
    often this rank's loader has ended.
    """
    names = list(INPUTS)
    marks = torch.zeros((2, len(names) + 1, math.prod(mesh.axes.values())))
    marks[0, -1, 0], marks[1, -1, 0] = ends, MARKS - ends
    for row, name in enumerate(names):
        mark = 0
        for batch in batches:
            head = batch[row].detach().reshape(-1)
            head = head[: max(1, MARKED_BYTES // head.element_size())].cpu().contiguous()
            mark = zlib.crc32(head.view(torch.uint8).numpy(), mark)
        place = part_number(layout_of(name, mesh), mesh)
        marks[0, row, place], marks[1, row, place] = mark % MARKS, MARKS - mark % MARKS
    marks = marks.to(mesh.device)
    mesh.joint(tuple(mesh.axes)).transport.all_reduce(marks, "max")()
    if mesh.stages is not None:
        alike = marks if not PLACE_INPUTS else marks[:, -1:, :1].contiguous()  # other meshes have other parts
        mesh.stages.transport.all_reduce(alike, "max")()
        marks[:, -alike.shape[1] :, : alike.shape[2]] = alike
    largest, least = marks[0], MARKS - marks[1]
    if largest[-1, 0] > least[-1, 0]:
        raise _ended(step, ends > least[-1, 0])
    differ = ((largest != least) & (marks[1] > 0)).any(1).tolist()[: len(names)]
    if any(differ):
        message = ", ".join(repr(name) for name, one in zip(names, differ, strict=True) if one)
        raise UserError(
            f"--data: ranks that hold the same part of {message} got different values of it\n"
            "  try: the same order and the same random numbers on every rank, from the `seed` that the function is"
            " given; where each rank reads its own samples, choose them by the axes that cut the batch, not by the rank"
        )


def check_ends(mesh: ParallelMesh, step: int, ended: int, of_all: float) -> None:
    """Raises where loaders have ended in different steps. `ended`: how often this rank's has, `of_all`: the sum."""
    ranks = mesh_devices()
    if ended * ranks != of_all:
        raise _ended(step, ended * ranks > of_all)


def _ended(step: int, here: bool) -> UserError:
    """BatchError for the ranks whose loader has ended, as they know; ElsewhereError for the others."""
    if not here:
        return ElsewhereError(f"--data: the loader of another rank ended before step {step}, and this one's did not")
    return BatchError(
        f"--data: this rank's loader ended before step {step}, and those of other ranks did not\n"
        "  try: as many batches on every rank, as of a DistributedSampler with drop_last=True"
    )


def part_number(layout: str, mesh: ParallelMesh) -> int:
    """Number of the part of an input that this rank holds: ranks of one number hold the same."""
    number = 0
    for (name, size), placement in zip(mesh.axes.items(), layout.split(), strict=True):
        number = number * size + (mesh.coordinates[name] if placement.startswith("S") else 0)
    return number


def load_function(spec: str, option: str = "--data") -> Callable[..., Any]:
    """`file.py:function` as that function."""
    path, _, name = spec.rpartition(":")
    if not path or not Path(path).is_file():
        raise UserError(f"{option} {spec}: expected file.py:function, and there is no file {path or spec!r}")
    module_spec = importlib.util.spec_from_file_location("user_data", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{option} {spec}: {path} has no function {name!r}")
    return function


def state_now(loader: Any, what: str) -> Any:
    """A copy of its state, which reading ahead does not change, as a checkpoint gives it back."""
    held = io.BytesIO()
    torch.save(loader.state_dict(), held)
    held.seek(0)
    try:
        return torch.load(held, weights_only=True)
    except pickle.UnpicklingError as error:
        message = next(
            (line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line), str(error)
        )
        raise BatchError(
            f"{what}: what the loader's state_dict() gives could not be read back: {message.strip()}\n"
            "  try: numbers, text, tensors, and lists and dicts of these"
        ) from None


def loader_batches(
    spec: str,
    mesh: ParallelMesh,
    seed: int,
    start: int,
    state: Any = None,
    saved_after: Callable[[int], bool] = lambda number: False,
    option: str = "--data",
    once: bool = False,
    own_parts: bool = False,
    pad: bool = False,
    packs: Callable[[Iterable[Any]], Iterable[Any]] | None = None,
) -> Iterator[Read]:
    """Batches of a user's loader, from batch `start` on; an ended loader begins again, unless it is read `once`.

    The function gets those of the keywords `mesh`, `rank`, `seed`, `inputs` and `parts` that it takes. A loader with
    `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader, goes on from the `state` that a checkpoint
    has of it; of others the batches before `start` are read and thrown away. `saved_after`: the batches, counted from
    1, after which the state is wanted. `packs` makes batches of what the loader yields. With each batch comes how often
    the loader has ended since batch `start`.
    """
    make_loader = load_function(spec, option)
    offered = {"mesh": mesh, "rank": mesh.rank, "seed": seed, "inputs": INPUTS, "parts": parts(mesh)}
    taken = inspect.signature(make_loader).parameters
    keywords = {name: value for name, value in offered.items() if name in taken}
    needed = [p for p in taken.values() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [p.name for p in needed if p.name not in offered]
    if unknown:
        message = (
            f"{option} {spec}: the function asks for {', '.join(unknown)}, and is given any of {', '.join(offered)}"
        )
        raise UserError(f"{message}\n  try: a function without arguments, or with defaults for others")
    loader = make_loader(**keywords)
    keeps_state = packs is None and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    position, ends = 0, 0
    if keeps_state and state is not None:
        loader.load_state_dict(state)
        position = start
    while True:
        before = position
        for read in packs(loader) if packs is not None else loader:
            for batch in split(tensors_of(read)) if MICRO_BATCHES > 1 else [tensors_of(read)]:
                position += 1
                if position > start:
                    wanted = keeps_state and saved_after(position)
                    yield (
                        checked(batch, mesh, own_parts, pad),
                        state_now(loader, f"{option} {spec}") if wanted else None,
                        ends,
                    )
        if position == before and state is None:
            raise UserError(f"{option} {spec}: the loader yields no batch")
        if once:
            return
        state = None  # it was at its end
        ends += position >= start
        loader = loader if keeps_state else make_loader(**keywords)
