"""What the runtime holds while it moves tensors, to the byte, against `costs.buffers`: one rank, whose transport makes
the tensors of a process group and sends nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.costs.buffers import buffers
from autoshard.emit import runtime
from autoshard.emit.runtime import ParallelMesh
from autoshard.emit.runtime.axis import GroupTransport
from autoshard.ir.layout import Layout, local_shape, local_sizes
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, LocalValue
from autoshard.redistribute import runtime_call
from autoshard.redistribute.exchanges import direct_steps
from autoshard.redistribute.steps import Step, dim_cuts, table_step
from autoshard.rules.algebra.variant_record import Temporary
from tests.meter import Meter


class Done:
    def wait(self) -> None: ...


class Silent(GroupTransport):
    """Allocates as a group does."""

    _all_gather = staticmethod(lambda out, x, group, async_op: Done())
    _reduce_scatter = staticmethod(lambda out, x, group, async_op: Done())

    def all_reduce(self, x: Tensor, op: str = "sum") -> Callable[[], object]:
        return lambda: None

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        assert sum(send) == len(x)
        return x.new_empty((sum(receive), *x.shape[1:]))


def mesh_of(mesh: Mesh, rank: int) -> ParallelMesh:
    return ParallelMesh(dict(mesh.axes), rank, lambda *_: Silent(None), torch.device("cpu"))


def measured(x: Tensor, run: Callable[[Tensor], Tensor], index: int) -> Temporary:
    """The peaks of forward and backward above x, the result, and the gradients of both."""
    with patch.object(dist, "get_rank", lambda group: index):
        run(x).sum().backward()  # plans what an exchange sends, once
    meter = Meter([x, x.grad])
    with patch.object(dist, "get_rank", lambda group: index), meter:
        meter.phase = "forward"
        y = run(x)
        there = meter.peak("forward")[0] - (0 if y.untyped_storage()._cdata == x.untyped_storage()._cdata else y.nbytes)
        grad = torch.zeros_like(y)
        before = sum(size for _, size in meter.changes)
        meter.phase = "backward"
        (gradient,) = torch.autograd.grad(y, x, grad)
        most, total = 0, 0
        ends = [seen for phase, _, seen in meter.curve if phase == "backward"]
        for count, (_, size) in enumerate(meter.changes, 1):
            total += size
            if count in ends:
                most = max(most, total)
    shared = gradient.untyped_storage()._cdata == grad.untyped_storage()._cdata
    return Temporary(there, max(0, most - before - (0 if shared else gradient.nbytes)))


@dataclass(frozen=True)
class Move:
    """A step of a redistribution of a tensor."""

    mesh: Mesh
    shape: tuple[int, ...]
    source: Layout
    step: Step

    @property
    def target(self) -> Layout:
        return self.step.applied(self.source)

    def said(self) -> Temporary:
        source, target = (
            LocalValue(name, "x", self.shape, "float32", layout, local_sizes(self.shape, layout, self.mesh), True)
            for name, layout in (("given", self.source), ("made", self.target))
        )
        cuts = dim_cuts(self.step, self.source, self.shape, self.mesh)
        axes = tuple(self.mesh.names[axis] for axis in self.step.axes)
        step = self.step
        moved = Collective(axes, step.before, step.after, step.forward, step.backward, "given", "made", "", "", *cuts)
        return buffers(self.mesh, moved, source, target)

    def found(self, rank: int) -> Temporary:
        ranks = mesh_of(self.mesh, rank)
        axis = ranks.joint([self.mesh.names[a] for a in self.step.axes])
        shape = local_shape(self.shape, self.source, self.mesh, self.mesh.coordinates(rank))
        x = torch.zeros(shape, requires_grad=True)
        if self.step.by_index:
            by = "all_gather" if "gather" in (self.step.forward, self.step.backward) else "all_to_all"
            texts = str(self.source), str(self.target)
            return measured(x, lambda x: runtime.exchange(x, axis, self.shape, *texts, by=by), axis.index)
        name, grad = runtime_call(self.step.before[0], self.step.after[0])
        joined, cut = dim_cuts(self.step, self.source, self.shape, self.mesh)
        if name == "all_to_all":
            assert joined is not None and cut is not None
            options = {
                "joined_size": joined.size.largest(self.mesh), "joined_blocks": joined.blocks,
                "joined_unit": joined.unit, "cut_blocks": cut.blocks, "cut_unit": cut.unit,
            }  # fmt: skip
            return measured(x, lambda x: runtime.all_to_all(x, axis, joined.dim, cut.dim, **options), axis.index)
        arguments: dict[str, object] = {"grad": grad}
        dims = []
        if (one := joined or cut) is not None:
            dims = [one.dim]
            arguments |= {"blocks": one.blocks, "unit": one.unit}
            arguments |= {"size": one.size.largest(self.mesh)} if joined is not None else {}
        return measured(x, lambda x: getattr(runtime, name)(x, axis, *dims, **arguments), axis.index)


BY_TABLE = [
    (mesh, shape, before, after)
    for mesh, shapes in (("tp=2", [(6, 4), (5, 4), (1, 8, 3)]), ("tp=4", [(8, 12), (7, 10), (4, 1, 9)]))
    for shape in shapes
    for before, after in [
        ("S0", "R"), ("S1", "R"), ("S1", "R+"), ("S0", "R+"), ("S1", "P"), ("S0", "S1"), ("S1", "S0"), ("R", "S1"),
        ("R+", "S1"), ("R", "S0"), ("P", "S1"), ("P", "S0"), ("P", "R"), ("P", "R+"), ("R", "R+"), ("R", "P"),
        ("R+", "R"),
    ]
]  # fmt: skip
BLOCKS = [
    ("tp=2", (4, 12), before, after)
    for before, after in [("S1/3", "R"), ("S1/3*2", "R+"), ("R", "S1/3"), ("R+", "S1/3"), ("P", "S1/3"), ("S1/3", "S0")]
]


@pytest.mark.parametrize(("mesh", "shape", "before", "after"), [*BY_TABLE, *BLOCKS])
def test_a_step_of_the_table(mesh: str, shape: tuple[int, ...], before: str, after: str) -> None:
    where = Mesh.parse(mesh)
    source, target = Layout.parse(before), Layout.parse(after)
    check(Move(where, shape, source, table_step([0], source, target)))


def check(move: Move) -> None:
    """Every rank holds at most what is said, beside what the rank that holds most is given and makes."""
    said = move.said()
    sizes = [largest_bytes(move, layout) for layout in (move.source, move.target)]
    there, back = [], []
    for rank in range(move.mesh.size):
        temporary = move.found(rank)
        at = move.mesh.coordinates(rank)
        in_bytes, out_bytes = (
            4 * math.prod(local_shape(move.shape, lay, move.mesh, at)) for lay in (move.source, move.target)
        )
        there.append(temporary.forward + in_bytes + out_bytes - sum(sizes))
        back.append(temporary.backward + in_bytes + out_bytes - sum(sizes))
    assert (said.forward, said.backward) == (max(0, *there), max(0, *back))


def largest_bytes(move: Move, layout: Layout) -> int:
    return 4 * math.prod(size.largest(move.mesh) for size in local_sizes(move.shape, layout, move.mesh))


JOINED = [
    ("dp=2,tp=2", (8, 4), "S0 S0", "S1 S1"), ("dp=2,tp=2", (8, 8), "S0 S1", "S1 S0"),
    ("dp=2,tp=2", (12, 4), "S0 S0/3", "R R"), ("dp=2,tp=2", (12, 4), "S0 S0/3", "S1 R+"),
    ("dp=2,tp=2", (8, 4), "R+ S0", "S0 S1"), ("dp=2,tp=2", (8, 4), "P S0", "S1 S0"),
    ("dp=2,tp=2", (8, 4), "R S0", "S0 S0"), ("dp=2,tp=2", (8, 4), "R S0", "S0 R"), ("tp=4", (8, 12), "S0", "S1/3"),
]  # fmt: skip


@pytest.mark.parametrize("all_to_all", [True, False])
@pytest.mark.parametrize(("mesh", "shape", "before", "after"), JOINED)
def test_a_step_by_index(mesh: str, shape: tuple[int, ...], before: str, after: str, all_to_all: bool) -> None:
    where, source = Mesh.parse(mesh), Layout.parse(before)
    for step in direct_steps(source, Layout.parse(after), True, all_to_all):
        if step.by_index:
            check(Move(where, shape, source, step))
        source = step.applied(source)


@pytest.mark.parametrize("blocks", [1, 3])
def test_equal_parts_of_an_inner_dim_are_copied_once(blocks: int) -> None:
    """What has come by a gather; the part of this device is not packed."""
    axis, part = mesh_of(Mesh.parse("tp=2"), 0)["tp"], torch.zeros(4, 6, 5)
    assert _made(part, lambda x: runtime.all_gather(x, axis, 1, blocks=blocks)) == 2 * 2 * part.nbytes


def _made(x: Tensor, run: Callable[[Tensor], Tensor]) -> int:
    """Bytes of all tensors that it makes, the received one among them."""
    with patch.object(dist, "get_rank", lambda group: 0), Meter([x]) as meter:
        run(x)
    return sum(size for _, size in meter.changes[meter.start :] if size > 0)
