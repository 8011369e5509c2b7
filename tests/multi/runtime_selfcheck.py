"""One process of a gloo run: every function of the runtime once, on DTensor parameters. See test_runtime_gloo.

The runtime is the copy on the path, as a package has it.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from unittest import mock

import runtime
import torch
import torch.distributed as dist
import torch.nn.functional as F
from runtime import ParallelMesh
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

FLOAT64 = torch.float64
PATIENCE = 3000.0  # seconds of a collective


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT64)


def same(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape, (a.shape, b.shape)
    assert torch.allclose(a, b, rtol=1e-12, atol=1e-12), (a - b).abs().max()


def check_timeouts(mesh: ParallelMesh) -> None:
    """What is asked for holds on every group, those of stages included."""
    staged = ParallelMesh.from_environment({"dp": 2, "tp": 1}, "gloo", PATIENCE, part_stages=(0, 1))
    assert staged.stages is not None
    transports = [mesh["dp"].transport, mesh["tp"].transport, mesh.joint(("dp", "tp")).transport]
    transports += [staged["dp"].transport, staged["tp"].transport, staged.joint(("dp", "tp")).transport]
    groups = [transport.group for transport in (*transports, staged.stages.transport, staged.stages._connect((0, 1)))]
    for group in groups:
        seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        assert seconds == PATIENCE, (group.group_desc, seconds)


def check_transport(mesh: ParallelMesh) -> None:
    """Uneven, empty and blocked, against slices of the whole tensor."""
    for axis, size in ((mesh["tp"], 7), (mesh["dp"], 1), (mesh.joint(("dp", "tp")), 5), (mesh["tp"], 8)):
        whole = random(size, 4, 6)
        mine = runtime.slice_shard(whole, axis, 0)
        same(runtime.all_gather(mine, axis, 0, size=size), whole)
        same(runtime.reduce_scatter(whole, axis, 0), mine * axis.size)
        same(runtime.all_to_all(mine, axis, 0, 2, joined_size=size), runtime.slice_shard(whole, axis, 2))
        same(runtime.all_reduce(runtime.zero_pad(mine, axis, 0, size=size), axis), whole)
        same(runtime.all_reduce(runtime.mask(whole, axis), axis), whole)
        blocks = runtime.slice_shard(whole, axis, 2, blocks=3, unit=2)
        same(runtime.all_gather(blocks, axis, 2, size=6, blocks=3, unit=2), whole)
        for distance in range(1, axis.size):
            here = torch.full((2, 3), float(axis.index)).flatten()
            passed_on = axis.transport.shift(here, distance, 6)()
            assert passed_on.tolist() == 6 * [float((axis.index - distance) % axis.size)]
        axis.transport.barrier()
    largest = torch.tensor(float(mesh.rank))
    mesh.joint(("tp", "dp")).transport.all_reduce(largest, "max")()
    assert largest == dist.get_world_size() - 1
    ids = runtime.all_gather(torch.full((2,), mesh["tp"].index), mesh["tp"], 0)
    assert ids.tolist() == [i for i in range(mesh["tp"].size) for _ in range(2)]


# (shape, before, after): joined axes, swaps, other blocks, cuts through a block, uneven, copies, partials.
MOVES = [
    ((8, 4), "S0 S0", "S1 S1"), ((8, 8), "S0 S1", "S1 S0"), ((12, 4), "S0 S0/3", "R R"), ((12, 4), "S0 S0/3", "S1 R+"),
    ((7, 5), "S0 S1", "S1 S0"), ((12, 4), "R+ S0/3", "S0 S1"), ((5, 4), "P S0", "S1 R"), ((6, 4), "R S0", "S0 S0"),
]  # fmt: skip


def cut_as(whole: Tensor, layout: str, mesh: ParallelMesh) -> Tensor:
    for dim, size in enumerate(whole.shape):
        whole = whole.index_select(dim, runtime.held_indices(size, dim, layout, mesh))
    return whole.clone()


def summed(layout: str, placement: str, mesh: ParallelMesh) -> int:
    """How many equal partial sums there are."""
    return math.prod(n for n, actual in zip(mesh.axes.values(), layout.split(), strict=True) if actual == placement)


def check_joined(mesh: ParallelMesh) -> None:
    """One collective over both axes, on dims that both cut."""
    axis, whole = mesh.joint(("dp", "tp")), random(8, 24)
    mine = cut_as(whole, "S0 S0", mesh)
    same(runtime.all_gather(mine, axis, 0), whole)
    same(runtime.all_to_all(mine, axis, 0, 1, cut_blocks=3), cut_as(whole, "S1/3 S1/3", mesh))
    same(runtime.reduce_scatter(whole, axis, 1), cut_as(whole, "S1 S1", mesh) * axis.size)
    same(runtime.all_reduce(runtime.mask(whole, axis), axis), whole)


def check_exchange(mesh: ParallelMesh) -> None:
    """Value and gradient against slices of the whole. By all-to-all and, of shards and copies, by all-gather."""
    axis = mesh.joint(("dp", "tp"))
    for shape, before, after in MOVES:
        whole, gradient = random(*shape), random(*shape, seed=1)
        partials = {"P", "R+"} & {*before.split(), *after.split()}
        for by in ("all_to_all",) if partials else ("all_to_all", "all_gather"):
            x = cut_as(whole, before, mesh).requires_grad_()
            y = runtime.exchange(x, axis, shape, before, after, by=by)
            same(y, cut_as(whole, after, mesh) * summed(before, "P", mesh))
            y.backward(cut_as(gradient, after, mesh))
            assert x.grad is not None
            got = x.grad
            for name, placement in zip(mesh.axes, before.split(), strict=True):
                got = runtime.all_reduce(got, mesh[name]) if placement == "R+" else got
            same(got, cut_as(gradient, before, mesh) * summed(after, "R+", mesh))


class Model(nn.Module):
    """Embedding (tied with the head), an MLP column- then row-parallel in 2 blocks, and cross entropy.

    Shapes: B batch over dp, V vocabulary 11 (uneven over tp), H hidden 6, F = 2 x 8 over tp.
    """

    def __init__(self, mesh: ParallelMesh, blocked: bool) -> None:
        super().__init__()
        self.mesh, self.blocked = mesh, blocked
        make = runtime.shard_parameter
        options = {"mesh": mesh, "dtype": FLOAT64}
        self.table = make("table", (11, 6), "R S0", ties=("head",), **options)
        split = {"split_shape": (2, 8, 6)} if blocked else {}
        self.up = make("up", (16, 6), "S0 R" if not blocked else "R S1", **split, **options)  # stored over dp or tp
        self.down = make("down", (6, 8), "R S1", **options)
        self.register_buffer("scale", runtime.shard_buffer("scale", (6,), "R R", **options))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        dp, tp = self.mesh["dp"], self.mesh["tp"]
        vocabulary = {"size": 11, "vocabulary": [tp]}
        table = runtime.local(self.table)
        x = runtime.all_reduce(runtime.vocabulary_parallel_embedding(table, ids, **vocabulary), tp, grad="all_reduce")
        x = x * runtime.local(self.scale)
        if self.blocked:
            up = runtime.local(self.up, (-1, 6))
        else:
            up = runtime.regather(runtime.local(self.up), dp, 0)
            up = runtime.slice_shard(up, tp, 0, blocks=2)
        inner = F.linear(x, up)
        runtime.regather_before(inner, up)
        gate, value = inner.chunk(2, -1)
        y = runtime.all_reduce(F.linear(F.silu(gate) * value, runtime.local(self.down)), tp, grad="all_reduce")
        logits = F.linear(y, table)
        return runtime.parallel_cross_entropy(logits, labels, rows=[dp], **vocabulary)

    def buckets(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        return [(("dp",), ("table", "down", "up") if self.blocked else ("table", "down"))]


STATE = {
    "table": random(11, 6), "head": random(11, 6), "up": random(16, 6, seed=1),
    "down": random(6, 8, seed=2), "scale": random(6, seed=3),
}  # fmt: skip
IDS, LABELS = torch.arange(8) * 5 % 11, torch.tensor([0, 1, -100, 3, 4, -100, 10, 2])


def reference(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Loss and norm of every step of the same model on one device, and the parameters after."""
    p = {name: nn.Parameter(STATE[name].clone()) for name in ("table", "up", "down")}
    optimizer = torch.optim.AdamW(p.values(), lr=0.1)
    log = []
    for _ in range(steps):
        gate, value = F.linear(F.embedding(IDS, p["table"]) * STATE["scale"], p["up"]).chunk(2, -1)
        loss = F.cross_entropy(F.linear(F.linear(F.silu(gate) * value, p["down"]), p["table"]), LABELS)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(p.values(), 0.5)
        optimizer.step()
        log += [loss.item(), norm.item()]
    return log, {name: value.detach() for name, value in p.items()}


def train(mesh: ParallelMesh, model: Model, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    rows = runtime.held_indices(8, 0, "S0 R", mesh)
    log = []
    for _ in range(steps):
        optimizer.zero_grad()
        with runtime.regathering():
            loss = model(IDS[rows], LABELS[rows])
        loss.backward()
        parameters = dict(model.named_parameters())
        runtime.reduce_gradients(mesh, parameters, model.buckets())
        norm = runtime.clip_gradients(mesh, parameters.values(), 0.5)
        optimizer.step()
        log += [runtime.all_reduce(loss.detach(), mesh["dp"]).item(), norm.item()]
    return log


def build(mesh: ParallelMesh, blocked: bool) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(mesh, blocked)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def check_state(model: Model, expected: dict[str, Tensor]) -> None:
    state = runtime.full_state_dict(model)
    if dist.get_rank() == 0:
        assert set(state) == set(STATE)
        for name, value in expected.items():
            same(state[name], value)
        same(state["head"], state["table"])
    else:
        assert state == {}


def build_table(mesh: ParallelMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Rows in unequal parts over tp, others on each mesh."""
    parts = {(2, 2): "S0[3+7]", (1, 2): "S0[6+4]", (1, 1): "R"}[tuple(mesh.axes.values())]
    table = runtime.shard_parameter("table", (10, 3), f"R {parts}", mesh, dtype=FLOAT64, uneven="[" in parts)
    model = nn.ParameterList([table])
    return model, torch.optim.SGD(model.parameters())


def save(mesh: ParallelMesh, folder: Path) -> None:
    """Three steps, a checkpoint after the second; loss, norm and parameters as on one device. A table, as if in the
    background."""
    check_timeouts(mesh)
    check_transport(mesh)
    with mock.patch.object(torch.compiler, "is_compiling", lambda: True):  # the collectives of a compiled block
        check_transport(mesh)
    check_joined(mesh)
    check_exchange(mesh)
    w = runtime.shard_parameter("w", (5, 4), "S0 S1", mesh)
    runtime.init_parameter(w, ("normal", 0.0, 1.0), 3)
    same(runtime.full_tensor(w), w.full_tensor())
    for blocked in (False, True):
        model, optimizer = build(mesh, blocked)
        runtime.load_full_state_dict(model, STATE)
        log, _ = reference(3)
        history = train(mesh, model, optimizer, 2)
        check_state(model, reference(2)[1])
        for _ in range(2):  # the second one replaces the first
            runtime.save_checkpoint(folder / f"blocked-{blocked}", model, optimizer, 2)
        history += train(mesh, model, optimizer, 1)
        same(torch.tensor(history, dtype=FLOAT64), torch.tensor(log, dtype=FLOAT64))
    model, optimizer = build_table(mesh)
    runtime.load_full_state_dict(model, {"table": random(10, 3)})
    runtime.save_checkpoint(folder / "table", model, optimizer, 1, background=True)
    runtime.finish_saving(last=True)


def load(mesh: ParallelMesh, folder: Path) -> None:
    """The third step from a checkpoint of another mesh, also where a weight is held in other blocks."""
    for written in (False, True):
        for blocked in (False, True):
            model, optimizer = build(mesh, blocked)
            assert runtime.load_checkpoint(folder / f"blocked-{written}", model, optimizer) == 2
            check_state(model, reference(2)[1])
            log, state = reference(3)
            history = train(mesh, model, optimizer, 1)
            same(torch.tensor(history, dtype=FLOAT64), torch.tensor(log[4:], dtype=FLOAT64))
            check_state(model, state)
    model, optimizer = build_table(mesh)
    assert runtime.load_checkpoint(folder / "table", model, optimizer) == 1
    same(runtime.full_tensor(model[0]), random(10, 3))


if __name__ == "__main__":
    dp, tp = (int(n) for n in sys.argv[2].split("x"))
    {"save": save, "load": load}[sys.argv[1]](
        ParallelMesh.from_environment({"dp": dp, "tp": tp}, "gloo", PATIENCE), Path(sys.argv[3])
    )
    dist.barrier()
    runtime.leave()
