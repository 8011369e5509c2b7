"""One of torchrun's processes, for tests of `autoshard.shard`: `python -m tests.shard_worker CASE …`."""

from __future__ import annotations

import copy
import functools
import math
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import autoshard
from autoshard.emit.runtime import leave
from autoshard.errors import UserError
from tests.api_worker import Frozen

TOLERANCE = 1e-10


def near(one: Tensor, other: Tensor, what: object) -> None:
    assert one.shape == other.shape, (what, one.shape, other.shape)
    assert torch.allclose(one, other, rtol=0, atol=TOLERANCE), (what, float((one - other).abs().max()))


def halves() -> tuple[int, int]:
    """The world as two factors: (2, 1), (2, 2), (2, 4)."""
    return 2, dist.get_world_size() // 2


def dense_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.relu(x @ w + b)


def function() -> None:
    """The documented function form: `shard(dense_relu, in_strategy=((4, 2), None, None))`; gradients before it."""
    a, b = halves()
    sharded = autoshard.shard(dense_relu, in_strategy=((a, b), None, None), device="CPU")
    for requires in (True, False):
        tensors = [torch.randn(shape, requires_grad=requires) for shape in ((8, 16), (16, 12), (12,))]
        before = torch.randn(8, 16)
        results = [fn(tensors[0] * before, *tensors[1:]).sin() for fn in (dense_relu, sharded)]
        near(results[0], results[1], "value")
        if requires:
            gradients = [torch.autograd.grad(y.square().mean(), tensors) for y in results]
            for one, other in zip(*gradients, strict=True):
                near(one, other, "gradient")
    assert len(sharded.variants) == 2
    layout = sharded.variants[0].plan.plan.inputs[0].layout
    mesh = sharded.variants[0].plan.plan.mesh
    from autoshard.constraints.shard_counts import counts

    assert counts(layout, 2, mesh) == (a, b)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense1, self.dense2 = nn.Linear(12, 16), nn.Linear(16, 12, bias=False)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.dense2(torch.relu(self.dense1(x))))


class Net(nn.Module):
    """Eager, one block, eager."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block1, self.last = nn.Linear(6, 12), Block(), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.block1(self.first(x))))


def module() -> None:
    """`block1` alone is sharded, kept as an attribute; the optimizer was made before the first call."""
    a, b = halves()
    torch.manual_seed(1)
    net = Net()
    split_net = copy.deepcopy(net)
    names = list(split_net.state_dict())
    plan = {"self.block1.dense2.weight".removeprefix("self.block1."): (1, a * b), "self.dense1.weight": (b, a)}
    split_net.block1 = autoshard.shard(split_net.block1, in_strategy=((a, b),), parameter_plan=plan)  # type: ignore[assignment]
    pairs = [(each, torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False)) for each in (net, split_net)]
    assert list(split_net.state_dict()) == names
    for rows in (8, 8, 4):  # another shape is planned anew, on the same parameters
        x, t = torch.randn(rows, 6), torch.randn(rows, 3)
        losses = []
        for each, optimizer in pairs:
            optimizer.zero_grad()
            loss = (each(x) - t).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        near(*losses, "loss")
    with torch.no_grad():
        near(net(x), split_net(x), "no_grad")
    net.eval(), split_net.eval()
    near(net(x), split_net(x), "eval")
    for name, one in split_net.first.named_parameters():
        near(one.detach(), net.first.get_parameter(name).detach(), name)
    sharded: Any = split_net.block1
    assert list(split_net.state_dict()) == names and len(sharded.variants) == 4
    whole = sharded.full_state_dict()
    for name, value in whole.items():
        near(value.double(), net.block1.state_dict()[name].double(), name)
    held = dict(split_net.named_parameters())
    assert tuple(held["block1.dense2.weight"].to_local().shape) == (12, 16 // (a * b))  # type: ignore[operator]
    assert tuple(held["block1.dense1.weight"].to_local().shape) == (16 // b, 12 // a)  # type: ignore[operator]


def computed_again() -> None:
    """The first call, which is planned, within torch.utils.checkpoint."""
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), torch.randn(8, 6, requires_grad=True)
    sharded = autoshard.shard(copy.deepcopy(model), in_strategy=((halves()[0], 1),))
    for each in (model, sharded):
        torch.utils.checkpoint.checkpoint(each, x, use_reentrant=False).square().sum().backward()
    for name, one in sharded.named_parameters():
        assert one.grad is not None
        near(one.grad.full_tensor(), model.get_parameter(name).grad, name)  # type: ignore[operator, arg-type]


def outputs() -> None:
    """`out_strategy`, layouts instead of counts, several outputs, and what each rank then holds inside."""
    world = dist.get_world_size()
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 8, requires_grad=True)

    def pair(x: Tensor, w: Tensor) -> dict[str, Any]:
        y = x @ w
        return {"y": y, "parts": (y.sum(1), 3)}

    sharded = autoshard.shard(pair, in_strategy=(None, None), out_strategy=((world, 1), None), level=2)
    result, wanted = sharded(x, w), pair(x, w)
    assert result["parts"][1] == 3
    near(result["y"], wanted["y"], "y")
    near(result["parts"][0], wanted["parts"][0], "sum")
    assert sharded.variants[0].outputs[0].inside.split() == ["S0"] * len(sharded.variants[0].plan.plan.mesh.axes)
    both = [torch.autograd.grad(r["y"].sin().sum() + r["parts"][0].cos().sum(), (x, w)) for r in (result, wanted)]
    for one, other in zip(*both, strict=True):
        near(one, other, "gradient")
    text = autoshard.shard(torch.matmul, in_strategy=("Shard(1)@tp", "Shard(0)@tp"), mesh={"tp": world})
    near(text(x, w), x @ w, "layouts")
    assert [i.inside for i in text.variants[0].inputs] == ["S1", "S0"]


def data() -> None:
    """`dataset_strategy`: parts of the batch, come and go; parts of two dims; DTensors."""
    world, rank = dist.get_world_size(), dist.get_rank()
    a, b = halves()
    whole, w = torch.randn(8, 16), torch.randn(16, 8, requires_grad=True)
    wanted = (whole @ w).detach()
    layer = nn.Linear(16, 8, bias=False)
    layer.weight.data.copy_(w.detach().T)
    sharded = autoshard.shard(layer, dataset_strategy="data_parallel")
    part = whole.chunk(world)[rank].clone().requires_grad_()
    y = sharded(part)
    near(y.detach(), wanted.chunk(world)[rank], "part")
    y.square().sum().backward()
    x = whole.clone().requires_grad_()
    (x @ w).square().sum().backward()
    near(part.grad, x.grad.chunk(world)[rank], "gradient of the part")  # type: ignore[arg-type, union-attr]
    near(sharded.weight.grad.full_tensor(), w.grad.T, "gradient of the weight")  # type: ignore[union-attr]
    cut = autoshard.shard(torch.matmul, dataset_strategy=((a, b), (b, 1)), mesh={"outer": a, "inner": b})
    i, j = divmod(rank, b)
    piece = whole.chunk(a)[i].chunk(b, 1)[j]
    rows = w.detach().chunk(b)[i if b == a else j]  # of the axes of that size, the outermost
    assert math.prod(piece.shape) == 128 // world
    near(cut(piece, rows), wanted, "parts of two dims")
    placed = distribute_tensor(whole, init_device_mesh("cpu", (world,)), [Shard(1)])
    near(autoshard.shard(torch.relu)(placed), whole.relu(), "a DTensor")


def inside() -> None:
    """vmap inside; a shard in a shard; a function with parameters, which stay the eager program's."""
    a, b = halves()
    x = torch.randn(8, 16)

    def each_row(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: (row * row).sum())(x)

    near(autoshard.shard(each_row, in_strategy=((a, b),))(x), each_row(x), "vmap")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner: nn.Module = nn.Linear(16, 8)
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.inner(x)))

    torch.manual_seed(2)
    outer = Outer()
    expected = outer(x)
    outer.inner = autoshard.shard(outer.inner, in_strategy=((a, 1),), parameter_plan={"weight": (1, a * b)})
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        sharded = autoshard.shard(outer, in_strategy=((a * b, 1),))
    assert any("inner, inside another one: its in_strategy is not used" in str(one.message) for one in records)
    near(sharded(x), expected, "nested")
    held = dict(sharded.named_parameters())
    assert tuple(held["inner.weight"].to_local().shape) == (8, 16 // (a * b))  # type: ignore[operator]
    for how, message in (((1, a * b), None), ((a * b, 1), "parameter_plan: inner.weight is")):
        try:
            autoshard.shard(outer, parameter_plan={"inner.weight": how})
        except autoshard.errors.UsageError as error:
            assert message and error.message.startswith(message), error.message
        else:
            assert message is None

    layer = nn.Linear(16, 4)

    def through(x: Tensor, scale: float = 2.0) -> Tensor:
        return layer(x) * scale

    sharded = autoshard.shard(through, in_strategy=((a, 1),), parameter_plan={"layer.weight": (1, b)})
    gradients = []
    for fn in (through, sharded):
        layer.zero_grad()
        fn(x, scale=3.0).square().mean().backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])  # type: ignore[union-attr]
    for one, other in zip(*gradients, strict=True):
        near(one, other, "parameter of a function")
    near(sharded(x), through(x), "another constant")
    assert len(sharded.variants) == 2

    factor, offset = 2.0, torch.randn(16, requires_grad=True)

    def referring(x: Tensor) -> Tensor:
        return x * factor + offset

    sharded = autoshard.shard(referring, in_strategy=((a, b),))
    for _ in range(2):  # what it refers to may change
        result, wanted = sharded(x), referring(x)
        near(result, wanted, "closure")
        near(*[torch.autograd.grad(y.square().sum(), offset)[0] for y in (result, wanted)], "gradient of a closure")
        with torch.no_grad():
            offset += 1
        factor += 1
    assert len(sharded.variants) == 2


def refusals() -> None:
    """Each names what is wrong and what is near, on every rank."""
    a, b = halves()
    world = a * b
    x, w = torch.randn(8, 16), torch.randn(16, 8)
    cases: list[tuple[Callable[[], object], str, str]] = [
        (lambda: autoshard.shard(torch.relu, in_strategy=4), "in_strategy is int, expected a tuple", "(4, 2)"),
        (lambda: autoshard.shard(torch.relu, ((0, 1),)), "cut at least once, got 0", ""),
        (lambda: autoshard.shard(torch.relu, ((world, 1), (1,)))(x), "has 2 entries, but there are 1 tensors", ""),
        (lambda: autoshard.shard(torch.relu, ((world,),))(x), "has 2 dims [8, 16], but", ""),
        (lambda: autoshard.shard(torch.relu, ((3, 1),))(x), f"needs 3 devices, and {world} are no multiple", ""),
        (lambda: autoshard.shard(torch.matmul, None, pins=["op:matmul=((1, 2), (1, 1))"])(x, w), "one loop (", ""),
        (lambda: autoshard.shard(nn.Linear(16, 8), parameter_plan={"wieght": (2, 1)})(x), "no parameter", "weight"),
        (lambda: autoshard.shard(torch.relu, device="TPU"), "unknown device 'TPU'", "CPU"),
        (lambda: autoshard.shard(torch.relu, level=7), "unknown level '7'", ""),
        (lambda: autoshard.shard(torch.relu, dataset_strategy="full"), "unknown dataset_strategy", "full_batch"),
    ]  # fmt: skip
    for number, (call, words, hint) in enumerate(cases):
        try:
            call()
        except UserError as error:
            assert words in error.message and hint in error.hint and error.hint, (number, str(error))
        else:
            raise AssertionError(words)


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(40, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.top(self.table(ids).mean(1))
        return scores


def tables() -> None:
    """Rows in unequal parts: what each device holds, the whole again, and three steps of an optimizer."""
    world, rank = dist.get_world_size(), dist.get_rank()
    lengths = (*range(1, world), 40 - sum(range(1, world)))
    alone = Ranker()
    whole = copy.deepcopy(alone)
    sharded = autoshard.shard(alone, parameter_plan={"table.weight": (lengths, 1)})
    ids = torch.randint(0, 40, (8, 4))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False) for model in (sharded, whole)]
    for _ in range(3):
        for model, optimizer in zip((sharded, whole), optimizers, strict=True):
            model(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (held,) = (one for name, one in sharded.named_parameters() if "table" in name)
    assert held.to_local().shape == (lengths[rank], 8), held.to_local().shape
    near(held.full_tensor(), whole.table.weight, "rows")
    try:
        autoshard.shard(Ranker(), parameter_plan={"table.weight": ((*lengths[:-1], 50), 1)})(ids)
    except UserError as error:
        assert "and the table has 40" in error.message, error.message
    else:
        raise AssertionError("parts that do not make up the table")


def sizes() -> None:
    """Another batch and length in each call: each as the original, an optimizer between them, parameters stay put."""
    whole = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    sharded = autoshard.shard(copy.deepcopy(whole), device="CPU")
    optimizers: list[torch.optim.Optimizer] = []
    for batch, length in ((8, 6), (4, 10), (12, 3), (5, 7), (8, 6), (1, 9)):
        x = torch.randn(batch, length, 16)
        results = [model(x) for model in (whole, sharded)]
        near(results[0], results[1], (batch, length))
        if not optimizers:
            optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False) for model in (whole, sharded)]
            held = dict(sharded.named_parameters())
        for y, optimizer in zip(results, optimizers, strict=True):
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(sharded.variants) == 5, len(sharded.variants)
    assert all(held[name] is parameter for name, parameter in sharded.named_parameters())
    for name, value in sharded.full_state_dict().items():
        near(value, whole.state_dict()[name], name)


def frozen() -> None:
    """Modes of single modules, also of those without parameters; complex buffers; names that the wrapper has itself."""
    torch.manual_seed(1)
    model, x = Frozen(), torch.randn(8, 8, requires_grad=True)
    sharded = autoshard.shard(copy.deepcopy(model))
    for each in (model, sharded):
        each(x).square().sum().backward()
    for name, parameter in sharded.named_parameters():
        near(parameter.grad.full_tensor(), model.get_parameter(name).grad, name)  # type: ignore[union-attr, arg-type]
    for name, value in sharded.full_state_dict().items():
        near(value, model.state_dict()[name], name)


class Base:
    """Its methods are found by those that inherit them."""

    layers: list[nn.Module]
    scale: float

    @property
    def doubled(self) -> float:
        return 2 * self.scale

    def second(self, x: Tensor) -> Tensor:
        return self.layers[1](x) * self.doubled


class Task(Base):
    """A plain object with layers, a scale and a counter that its methods don't read."""

    def __init__(self, layers: list[nn.Module], scale: float = 2.0) -> None:
        self.layers, self.scale, self.calls = layers, scale, 0

    def run(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.layers[0](x)))

    __call__ = run


def referred() -> None:
    """Modules and numbers that a function reaches through lists, dicts, objects, defaults, partials and helpers."""
    x = torch.randn(8, 16)
    layers: list[nn.Module] = [nn.Linear(16, 12), nn.Linear(12, 4)]
    task, table, row = Task(layers), {"layers": layers}, [2.0, [3.0], torch.tensor(2.0)]
    step, forced = task.run, types.ModuleType("forced")
    forced.SCALE = 2.0
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "method": task.run,
        "callable": task,
        "dict": lambda x: table["layers"][1](torch.relu(table["layers"][0](x))),
        "attribute": lambda x: layers[1](task.layers[0](x)) * task.scale,
        "list": lambda x: layers[1](layers[0](x)) * row[0] * row[1][0],  # type: ignore[index]
        "default": lambda x, by=row: layers[1](layers[0](x)) * by[0],
        "partial": functools.partial(lambda x, by: layers[1](layers[0](x)) * by[0], by=row),
        "helper": lambda x: functions["list"](x) + 1,
        "bound": lambda x: step(x),
        "another file": lambda x: layers[1](layers[0](x)) * forced.SCALE,
        "tensor": lambda x: layers[1](layers[0](x)) * row[2],  # type: ignore[operator]
    }
    for name, fn in functions.items():
        sharded = autoshard.shard(fn, in_strategy=(halves(),))
        for _ in range(2):  # what it refers to changes
            gradients = []
            for each in (fn, sharded):
                for layer in layers:
                    layer.zero_grad()
                each(x).square().sum().backward()
                gradients.append([p.grad.clone() for layer in layers for p in layer.parameters()])  # type: ignore[union-attr]
            for one, other in zip(*gradients, strict=True):
                near(one, other, name)
            near(sharded(x), fn(x), name)
            task.scale += 1
            row[:] = [row[0] + 1, [5.0], row[2] + 1]  # type: ignore[operator]
            forced.SCALE += 1
        sharded(x)
        variants, task.calls = len(sharded.variants), task.calls + 1
        sharded(x)
        assert len(sharded.variants) == variants  # nothing reads the counter
    chosen = {*layers}
    try:
        autoshard.shard(lambda x: next(layer(x) for layer in chosen))(x)
    except autoshard.errors.UsageError as error:
        assert "the set chosen" in error.message, error.message
    else:
        raise AssertionError("layers of a set come in another order on each rank")


CASES = {
    case.__name__: case
    for case in (function, module, computed_again, outputs, data, inside, sizes, tables, frozen, referred, refusals)
}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    import os

    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    for name in sys.argv[1:]:
        CASES[name]()
        print("done", name, flush=True)
    dist.barrier()
    leave()
