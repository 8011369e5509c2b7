"""A comparison of an emitted package with the original model that shares no code with `autoshard verify`.

Devices are threads over a transport of its own, which demands that all ranks of a group call the same collective with
fitting shapes, in the same order. What a device should hold is worked out by brute force over lists of indices.
"""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.ir.program import Program
from autoshard.verification.original.float64 import exact_precision
from autoshard.verification.ranks.loaded_package import load_package
from tests.hangs import HANGS

TOLERANCE = 1e-8


class Mismatch(Exception):
    """A package that computes something else, or whose ranks disagree."""


# --- the devices ----------------------------------------------------------------------------------------------------


@dataclass
class _Meeting:
    """The ranks of one group. A call is (kind, what must be equal on all ranks, tensor)."""

    ranks: tuple[int, ...]
    calls: list[Any]
    barrier: threading.Barrier

    def meet(self, place: int, kind: str, signature: tuple[Any, ...], x: Any) -> list[Any]:
        self.calls[place] = (kind, signature, x)
        self.barrier.wait()
        calls = list(self.calls)
        self.barrier.wait()
        if len({(kind, signature) for kind, signature, _ in calls}) > 1:
            said = "; ".join(f"rank {r}: {c[0]} {c[1]}" for r, c in zip(self.ranks, calls, strict=True))
            raise Mismatch(f"ranks issue different collectives: {said}")
        return [x for _, _, x in calls]


class _Wire:
    """One rank's end of a group: the raw collectives of the runtime's `Transport`."""

    def __init__(self, meeting: _Meeting, place: int) -> None:
        self.meeting, self.place = meeting, place

    def all_reduce(self, x: Tensor, op: str = "sum") -> Any:
        inputs = self.meeting.meet(self.place, f"all_reduce {op}", (tuple(x.shape), x.dtype), x.clone())
        stacked = torch.stack(inputs)
        x.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))
        return lambda: None

    def all_gather(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        inputs = self.meeting.meet(
            self.place, "all_gather", (tuple(lengths), tuple(x.shape[1:]), x.dtype), x.detach().clone()
        )
        _fits(inputs, lengths)
        return torch.cat(inputs)

    def start_all_gather(self, x: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        gathered = self.all_gather(x, lengths)
        return lambda: gathered

    def start_reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        reduced = self.reduce_scatter(x, lengths)
        return lambda: reduced

    def reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        inputs = self.meeting.meet(self.place, "reduce_scatter", (tuple(lengths), tuple(x.shape), x.dtype), x.clone())
        return torch.stack(inputs).sum(0).split(list(lengths))[self.place].clone()

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        pieces = [piece.clone() for piece in x.split(list(send))]
        inputs = self.meeting.meet(self.place, "all_to_all", (tuple(x.shape[1:]), x.dtype), pieces)
        mine = [pieces[self.place] for pieces in inputs]
        _fits(mine, receive)
        return torch.cat(mine)

    def shift(self, x: Tensor, distance: int, length: int) -> Any:
        inputs = self.meeting.meet(self.place, f"shift {distance}", (x.dtype,), x.clone())
        shifted = inputs[(self.place - distance) % len(inputs)]
        _fits([shifted], [length])
        return lambda: shifted

    def barrier(self) -> None:
        self.meeting.meet(self.place, "barrier", (), None)


def _fits(pieces: Sequence[Tensor], lengths: Sequence[int]) -> None:
    if [len(piece) for piece in pieces] != list(lengths):
        raise Mismatch(f"expected pieces of {list(lengths)} rows, got {[len(piece) for piece in pieces]}")


class _Cluster:
    """Groups by their axes and ranks, made once."""

    def __init__(self) -> None:
        self.meetings: dict[tuple[tuple[str, ...], tuple[int, ...]], _Meeting] = {}
        self.lock, self.ended = threading.Lock(), False

    def connect(self, mesh: Any, names: tuple[str, ...]) -> Any:
        ranks = tuple(next(group for group in mesh.groups(names) if mesh.rank in group))
        with self.lock:
            fresh = _Meeting(ranks, [None] * len(ranks), threading.Barrier(len(ranks), timeout=HANGS))
            meeting = self.meetings.setdefault((tuple(names), ranks), fresh)
            if self.ended:
                meeting.barrier.abort()
        return _Wire(meeting, ranks.index(mesh.rank))

    def end(self) -> None:
        with self.lock:
            self.ended = True
            for meeting in self.meetings.values():
                meeting.barrier.abort()


def on_devices(runtime: Any, axes: Mapping[str, int], work: Any) -> list[Any]:
    """`work(mesh)` on every rank, in rank order. A collective that a rank of the group leaves out is a Mismatch too."""
    cluster = _Cluster()
    size = math.prod(axes.values())
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            mesh = runtime.ParallelMesh(axes, rank, cluster.connect, torch.device("cpu"))
            mesh.random.exact = True
            results[rank] = work(mesh)
        except BaseException as error:
            errors.append((rank, error))
            cluster.end()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        causes = [e for e in errors if not isinstance(e[1], threading.BrokenBarrierError)]
        rank, error = (causes or errors)[0]
        said = f"{type(error).__name__}: {error}" if causes else "waited in vain for the other ranks"
        raise Mismatch(f"rank {rank}: {said}") from error
    return results


# --- what a device holds --------------------------------------------------------------------------------------------


def held(size: int, dim: int, layout: str, axes: Mapping[str, int], rank: int) -> list[int]:
    """The indices of `dim` on `rank`: each axis cuts, within each block, what is held so far (torch.chunk's rule)."""
    coordinates: dict[str, int] = {}
    for name in reversed(axes):
        rank, coordinates[name] = divmod(rank, axes[name])
    indices = list(range(size))
    for name, placement in zip(axes, layout.split(), strict=True):
        text = placement.removeprefix("S")
        if text == placement or int(text.split("/")[0].split("*")[0]) != dim:
            continue
        unit = int(text.split("*")[1]) if "*" in text else 1
        blocks = int(text.split("*")[0].split("/")[1]) if "/" in text else 1
        selected: list[int] = []
        for block in range(blocks):
            mine = [i for i in indices if block * (size // blocks) <= i < (block + 1) * (size // blocks)]
            step = unit if len(mine) % unit == 0 else 1
            chunk = math.ceil(len(mine) / step / axes[name]) * step
            selected += mine[coordinates[name] * chunk : (coordinates[name] + 1) * chunk]
        indices = selected
    return indices


def part(whole: Tensor, layout: str, axes: Mapping[str, int], rank: int) -> Tensor:
    for dim in range(whole.dim()):
        whole = whole.index_select(dim, torch.tensor(held(whole.shape[dim], dim, layout, axes, rank), dtype=torch.long))
    return whole


def summed(parts: Sequence[Tensor], layout: str, axes: Mapping[str, int]) -> list[Tensor]:
    """Each rank's part with the partial sums added up over the axes that are `P`."""
    sizes = list(axes.values())
    stack = torch.arange(math.prod(sizes)).reshape(sizes)
    partial = [i for i, placement in enumerate(layout.split()) if placement == "P"]
    result = []
    for rank in range(len(parts)):
        place = (stack == rank).nonzero()[0].tolist()
        index = tuple(slice(None) if i in partial else place[i] for i in range(len(sizes)))
        ranks = stack[index].reshape(-1).tolist()
        result.append(parts[rank] if len(ranks) == 1 else torch.stack([parts[r] for r in ranks]).sum(0))
    return result


# --- the comparison -------------------------------------------------------------------------------------------------


def compare(model: nn.Module, inputs: Sequence[Tensor], program: Program, files: Mapping[str, str]) -> float:
    """The largest error over all ranks of outputs, gradients and updated buffers; Mismatch where one is wrong."""
    outputs, gradients, buffers = _original(model, inputs)
    with tempfile.TemporaryDirectory(prefix="autoshard-differential-") as folder:
        for name, text in files.items():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_text(text, encoding="utf-8")
        package = load_package(Path(folder))
        axes = dict(program.mesh.axes)
        state = _doubled({**dict(model.named_parameters(remove_duplicate=False)), **buffers[0]})
        results = on_devices(package.runtime, axes, lambda mesh: _rank(package, mesh, axes, program, state, inputs))
    worst = 0.0
    order = list(range(len(program.outputs)))
    if program.loss:
        at = program.outputs.index(program.loss)
        order.insert(0, order.pop(at))
    for position, index in enumerate(order):
        value = program.value(program.outputs[index])
        parts = summed([result[0][position] for result in results], str(value.layout), axes)
        wanted = outputs[index]
        for rank, got in enumerate(parts):
            worst = max(worst, _error(f"output {index}", rank, got, part(wanted, str(value.layout), axes, rank)))
    for name in results[0][1]:
        for rank, result in enumerate(results):
            layout, split_shape, got = result[1][name]
            worst = max(worst, _optional(f"gradient of {name}", rank, got, gradients[name], layout, split_shape, axes))
    for name in results[0][2]:
        for rank, result in enumerate(results):
            layout, split_shape, got = result[2][name]
            wanted = buffers[1][name]
            worst = max(worst, _optional(f"buffer {name}", rank, got, wanted, layout, split_shape, axes))
    return worst


def _doubled(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().double() if t.is_floating_point() else t.detach() for name, t in state.items()}


def _original(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Any, Any]:
    """Outputs, gradients by every name, and buffers before and after; all in float64."""
    before = {name: b.detach().clone() for name, b in model.named_buffers(remove_duplicate=False)}
    model = model.double()
    model.zero_grad(set_to_none=True)
    with exact_precision():
        result = model(*[x.double() if x.is_floating_point() else x for x in inputs])
        outputs = list(result) if isinstance(result, tuple) else [result]
        if outputs[0].requires_grad:
            outputs[0].backward()
    gradients = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    after = {name: b.detach() for name, b in model.named_buffers(remove_duplicate=False)}
    return [o.detach() for o in outputs], gradients, (before, after)


def _rank(package: Any, mesh: Any, axes: Any, program: Program, state: Mapping[str, Tensor], inputs: Any) -> Any:
    runtime = package.runtime
    with exact_precision():
        model = package.model.build_model(mesh)
        for tensor in (*model.parameters(), *model.buffers()):
            spec = runtime.sharding(tensor)
            whole = state[next(n for n in (spec.name, *spec.ties) if n in state)]
            tensor.data = part(whole.reshape(spec.split_shape), spec.layout, axes, mesh.rank).contiguous().clone()
        layouts = [str(program.value(name).layout) for name in program.inputs]
        local = [
            part(x.double() if x.is_floating_point() else x, layout, axes, mesh.rank).contiguous()
            for x, layout in zip(inputs, layouts, strict=True)
        ]
        if program.loss:
            outputs = package.train.compute_gradients(model, mesh, local)
        else:
            result = model(*local)
            outputs = result if isinstance(result, tuple) else (result,)
    gradients, buffers = {}, {}
    for p in model.parameters():
        spec = runtime.sharding(p)
        grad = None if p.grad is None else p.grad.detach().clone()
        gradients[spec.name] = (spec.layout, spec.split_shape, grad)
    for b in model.buffers():
        spec = runtime.sharding(b)
        buffers[spec.name] = (spec.layout, spec.split_shape, b.detach().clone())
    return [o.detach().clone() for o in outputs], gradients, buffers


def _optional(
    what: str,
    rank: int,
    got: Tensor | None,
    wanted: Tensor | None,
    layout: str,
    split_shape: Any,
    axes: Mapping[str, int],
) -> float:
    """No gradient on both sides, or the same part."""
    if wanted is None or got is None:
        if wanted is None and got is None:
            return 0.0
        if wanted is not None and not wanted.any():
            return 0.0  # a gradient of zeros may stay away
        raise Mismatch(f"{what} on rank {rank}: {'none' if got is None else 'a tensor'} where the original has "
                       f"{'none' if wanted is None else 'one'}")  # fmt: skip
    return _error(what, rank, got, part(wanted.reshape(split_shape), layout, axes, rank))


def _error(what: str, rank: int, got: Tensor, wanted: Tensor) -> float:
    if tuple(got.shape) != tuple(wanted.shape):
        raise Mismatch(f"{what} on rank {rank}: shape {tuple(got.shape)}, expected {tuple(wanted.shape)}")
    if not got.numel():
        return 0.0
    if not got.is_floating_point() and not got.is_complex():
        if not torch.equal(got, wanted.to(got.dtype)):
            raise Mismatch(f"{what} on rank {rank}: other values")
        return 0.0
    scale = max(1.0, float(wanted.abs().nan_to_num(0.0, 0.0, 0.0).max()))
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    error = float(torch.where(same, torch.zeros_like(got), (got - wanted).abs() / scale).nan_to_num(math.inf).max())
    if error > TOLERANCE:
        raise Mismatch(f"{what} on rank {rank}: error {error:.1e}")
    return error
