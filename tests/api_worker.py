"""One of torchrun's processes, for tests of the Python interface: `python -m tests.api_worker CASE …`."""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import autoshard
from autoshard.emit.runtime import leave
from autoshard.errors import UserError

WORLD = 4
STEPS = 3
TOLERANCE = 1e-10


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


class Tied(nn.Module):
    """A fused projection (held in blocks), a tied weight, a buffer that the forward updates, a dict output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.fused = nn.Linear(8, 24, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> dict[str, Tensor]:
        q, k, v = self.fused(self.table(ids)).chunk(3, -1)
        x = self.norm((q * k.sigmoid() + v).mean(1)) * scale
        logits = self.head(x)
        return {"logits": logits} if labels is None else {"logits": logits, "loss": cross_entropy(logits, labels)}


class Frozen(nn.Module):
    """A part in evaluation, complex numbers, and names that a wrapper could have."""

    def __init__(self) -> None:
        super().__init__()
        self.original = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.original[1:].eval()
        self.micro_batches = nn.Parameter(torch.ones(8))
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.original(x).unflatten(-1, (4, 2)))
        return torch.view_as_real(pairs * self.turns).flatten(1) * self.micro_batches  # type: ignore[operator]


def near(one: Tensor | float, other: Tensor | float, what: object) -> None:
    assert torch.allclose(torch.as_tensor(one), torch.as_tensor(other), rtol=0, atol=TOLERANCE), what


def follows(model: nn.Module, split: Any, loss: Callable[[Any], Tensor]) -> None:
    """Both trained alike: two backwards a step, clipping, AdamW."""
    pairs = [(each, torch.optim.AdamW(each.parameters(), lr=1e-2)) for each in (model, split)]
    for step in range(STEPS):
        results = []
        for each, optimizer in pairs:
            optimizer.zero_grad()
            for _ in range(2):
                value = loss(each)
                (value / 2).backward()
            norm: Any = nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
            results.append((float(value.detach()), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)))
        near(torch.tensor(results[0]), torch.tensor(results[1]), (step, results))
    whole = split.full_state_dict()
    assert dist.get_rank() or sorted(whole) == sorted(model.state_dict())
    for name, value in whole.items():
        near(value.double(), model.state_dict()[name].double(), name)


def loss_beside() -> None:
    """A loss function and targets; ranks begin from weights of their own: rank 0's count."""
    x, t = torch.randn(8, 16), torch.randint(0, 8, (8,))
    model = mlp()
    expected = copy.deepcopy(model)
    plan = autoshard.plan(
        model, x, targets=t, loss=cross_entropy, hardware="cpu-local", mesh="dp=2,tp=2", strategy="random:1"
    )
    if dist.get_rank():
        for parameter in model.parameters():
            parameter.data.zero_()
    split = autoshard.parallelize(model, plan)
    assert list(split.state_dict()) == list(expected.state_dict())
    follows(expected, split, lambda each: each(x, t) if each is split else cross_entropy(each(x), t))


def outputs() -> None:
    """A model that returns no loss: autograd flows from the eager loss behind it, and to the tensor before it."""
    x, t = torch.randn(8, 16), torch.randint(0, 8, (8,))
    model = mlp()
    for seed in range(3):
        plan = autoshard.plan(model, x, hardware="cpu-local", mesh={"dp": 2, "tp": 2}, strategy=f"random:{seed}")
        split = autoshard.parallelize(model, plan)
        follows(copy.deepcopy(model), split, lambda each: cross_entropy(each(x), t))


def batches() -> None:
    """A dict batch with labels, dict outputs, ties, blocks, buffers; keywords or positions; a part of the batch."""
    ids, labels = torch.randint(0, 12, (8, 4)), torch.randint(0, 12, (8,))
    model = Tied()
    batch = {"ids": ids, "labels": labels}
    for strategy in ("megatron", "random:2", "random:4"):
        plan = autoshard.plan(model, batch, hardware="cpu-local", mesh="dp=2,tp=2", strategy=strategy)
        split = autoshard.parallelize(model, plan)
        expected = copy.deepcopy(model)
        result, wanted = split(ids, labels), copy.deepcopy(model)(**batch)
        assert list(result) == ["logits", "loss"]
        near(result["logits"], wanted["logits"], "logits")
        refused((result["logits"].sum() + result["loss"]).backward, "a backward from another output than the loss")
        expected(**batch)  # the buffers of both have seen one batch
        follows(expected, split, lambda each: each(**batch)["loss"])
        within = nn.Sequential(split.double())
        within.load_state_dict({f"0.{name}": x for name, x in model.state_dict().items()})
        for name, value in split.full_state_dict().items():
            near(value.double(), model.state_dict()[name].double(), name)
        within.load_state_dict(within.state_dict())
    for call, words in (
        (lambda: within.half(), "are torch.float64 on cpu, not torch.float16 on cpu"),
        (lambda: copy.deepcopy(split), "can't be copied or pickled"),
        (lambda: split(ids), "planned for ids, labels, and is called with ids"),
        (lambda: split(ids, labels, scale=2.0), "with scale=its default, and is called with scale=2.0"),
        (lambda: split(ids[:3], labels), "input ids: expected the global shape"),
        (lambda: split(ids.float(), labels), "input ids: expected int64, got float32"),
        (lambda: split.eval(), "planned for training"),
    ):
        refused(call, words)


def refused(call: Callable[[], object], words: str) -> None:
    try:
        call()
    except UserError as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(words)


def rank_0_fails() -> None:
    """Its UserError is raised on every rank."""
    refused(
        lambda: autoshard.plan(
            mlp(), torch.randn(8, 16), hardware="cpu-local", mesh="dp=2,tp=2", pins=["no.such=S0@dp"]
        ),
        "called 'no.such'",
    )
    plan = autoshard.plan(mlp(), torch.randn(8, 16), hardware="cpu-local", mesh="dp=2")
    refused(lambda: autoshard.parallelize(mlp(), plan), "has 2 devices, but 4 processes were started")


def from_disk() -> None:
    """A plan that rank 0 wrote, read back by a program that has the model only: called, trained, refused as before."""
    ids, labels = torch.randint(0, 12, (8, 4)), torch.randint(0, 12, (8,))
    x, t = torch.randn(8, 16), torch.randint(0, 8, (8,))
    model, beside = Tied(), mlp()
    batch = {"ids": ids, "labels": labels}
    where: Any = {"hardware": "cpu-local", "mesh": "dp=2,tp=2", "strategy": "random:2"}
    written = [
        autoshard.plan(model, {**batch, "scale": 0.5}, **where),
        autoshard.plan(beside, x, targets=t, loss=cross_entropy, **where),
    ]
    folder = [tempfile.mkdtemp() if not dist.get_rank() else ""]
    dist.broadcast_object_list(folder)
    for number, plan in enumerate(written):
        if not dist.get_rank():
            autoshard.write(plan, f"{folder[0]}/{number}")
    dist.barrier()
    if dist.get_rank():  # the folder is rank 0's alone
        folder = ["nowhere"]
    split = autoshard.parallelize(model, autoshard.load_plan(f"{folder[0]}/0"))
    expected = copy.deepcopy(model)
    assert list(split(ids, labels=labels, scale=0.5)) == ["logits", "loss"]
    expected(**batch, scale=0.5)
    follows(expected, split, lambda each: each(**batch, scale=0.5)["loss"])
    refused(lambda: split(**batch), "planned with scale=0.5, and is called with scale=its default")
    refused(lambda: split(ids), "planned for ids, labels, and is called with ids")
    read = autoshard.load_plan(f"{folder[0]}/1")
    follows(
        copy.deepcopy(beside),
        split := autoshard.parallelize(beside, read),
        lambda each: each(x, t) if each is split else cross_entropy(each(x), t),
    )
    refused(lambda: autoshard.parallelize(nn.Sequential(beside, nn.Linear(8, 8)), read), "no parameter or buffer 0.0.")
    refused(lambda: autoshard.parallelize(mlp()[:2], read), "the model has no parameter or buffer 2.")
    refused(lambda: autoshard.load_plan("no/such"), "there is no package")


def images() -> None:
    """Cut by height and width: a rank gives its slices, or the whole of some dims; a call with a gradient, whole."""
    layer, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 8, 12)
    plan = autoshard.plan(layer, x, hardware="cpu-local", mesh="h=2,w=2", dataset_strategy=((1, 1, 2, 2),))
    split = autoshard.parallelize(layer, plan)
    slices = split.input_parts()["input"]
    i, j = divmod(dist.get_rank(), 2)
    assert slices == (slice(0, 2), slice(0, 3), slice(4 * i, 4 * i + 4), slice(6 * j, 6 * j + 6))
    for batch in (x, x[slices], x[:, :, slices[2]]):
        near(split(batch).detach(), layer(x).detach(), batch.shape)
    refused(lambda: split(x[:, :, :3]), "input input: expected the global shape (2, 3, 8, 12) or this rank's")
    refused(lambda: split(x[:, :, slices[2]].clone().requires_grad_()), "requires a gradient, and was planned without")


def gathered() -> None:
    """Weights that are stored in parts and gathered by blocks, in whatever order a program goes forward and back."""
    x, t = torch.randn(8, 16), torch.randint(0, 8, (8,))
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)), nn.Linear(16, 8))
    for strategy, mesh in (("fsdp", "dp=4"), ("hsdp", "outer=2,dp=2")):
        plan = autoshard.plan(model, x, hardware="a100-80g-sxm", mesh=mesh, strategy=strategy)
        split, expected = autoshard.parallelize(model, plan), copy.deepcopy(model)
        assert split._wrapped[0].source.WEIGHT_BUCKETS, strategy
        follows(expected, split, lambda each: cross_entropy(each(x), t))
        follows(expected, split, lambda each: cross_entropy(each(x) + each(x.flip(0)), t))  # two forwards, one backward
        assert split._step.spent and not split._step.lines, strategy  # they went together
        split(x), split(2 * x)  # and some without a backward
        with torch.no_grad():
            near(split(x), expected(x), "no_grad")

        def twice(each: Any) -> Tensor:
            y = each(x)
            y.square().mean().backward(retain_graph=True)
            each(-x)
            return cross_entropy(y, t)

        follows(expected, split, twice)


def penalties() -> None:
    """A penalty on the parameters, in the backward of the loss or in one before it; and what could not be seen."""
    x, t = torch.randn(8, 16), torch.randint(0, 8, (8,))
    model = mlp()

    def penalty(each: nn.Module) -> Any:
        squares: Any = sum((p - 0.1).square().sum() for p in each.parameters())
        return squares.full_tensor() if hasattr(squares, "full_tensor") else squares

    def before(each: Any) -> Tensor:
        (penalty(each) / 3).backward()
        return cross_entropy(each(x), t)

    def after(each: Any) -> Tensor:
        total = penalty(each)
        return cross_entropy(each(x), t) + total

    def together(each: Any) -> Tensor:
        return cross_entropy(each(x), t) + penalty(each)

    for strategy, mesh, losses in (
        ("megatron", "dp=2,tp=2", (before, after, together)),
        ("fsdp", "dp=4", (after,)),
        ("random:3", "dp=2,tp=2", (together,)),
        ("dp", "dp=4", (before,)),
    ):
        plan = autoshard.plan(model, x, hardware="a100-80g-sxm", mesh=mesh, strategy=strategy)
        for loss in losses:
            split = autoshard.parallelize(model, plan)
            follows(copy.deepcopy(model), split, loss)
    doubled = {name: 2 * value for name, value in split.named_parameters()}
    refused(lambda: torch.func.functional_call(split, doubled, (x,)), "weight, a parameter or buffer of a sharded")
    bias = list(split.parameters())[1]
    handle = bias.register_hook(torch.zeros_like)
    refused(lambda: split(x), "has a hook")
    handle.remove()
    split.get_submodule("2").eval()
    refused(lambda: split(x), "the mode of 2 was changed")
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        split.alpha = 1.0
    assert "alpha has no effect" in str(noted[0].message)
    model[0].requires_grad_(False)
    refused(lambda: autoshard.parallelize(model, plan), "0.weight was planned as trained, and the model has it as froz")
    frozen = autoshard.parallelize(model, autoshard.plan(model, x, hardware="cpu-local", mesh="dp=4"))
    assert frozen(x).requires_grad
    refused(lambda: frozen.requires_grad_()(x), "weight was frozen when the model was planned")
    still = autoshard.plan(model.eval(), x, hardware="cpu-local", mesh="dp=4", training=False)
    assert not autoshard.parallelize(model, still)(x).requires_grad


def micro_batches() -> None:
    """Three micro-batches with labels that are ignored unevenly: the step of their labels together."""
    ids, labels = torch.randint(0, 12, (24, 4)), torch.randint(0, 12, (24,))
    labels[:5] = -100
    model = Tied()
    model.norm = nn.Identity()  # its averages would be those of a micro-batch
    parts = [{"ids": ids[i : i + 8], "labels": labels[i : i + 8]} for i in (0, 8, 16)]
    for strategy in ("megatron", "fsdp", "random:3"):
        where: Any = {"hardware": "cpu-local", "mesh": "dp=2,tp=2", "strategy": strategy}
        plan = autoshard.plan(model, parts[0], **where, global_batch=24)
        split, expected = autoshard.parallelize(model, plan), copy.deepcopy(model)
        pairs = [(each, torch.optim.AdamW(each.parameters(), lr=1e-2)) for each in (expected, split)]
        for _ in range(STEPS):
            whole = expected(ids, labels)["loss"]
            whole.backward()
            near(whole.detach(), split.backward(parts), "loss")
            for each, optimizer in pairs:
                nn.utils.clip_grad_norm_(each.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        for name, value in split.full_state_dict().items():
            near(value.double(), expected.state_dict()[name].double(), (strategy, name))
        near(split(**parts[1])["loss"].detach(), expected(**parts[1])["loss"].detach(), "one of them")
    refused(lambda: split.backward(parts[:2]), "step has 3 micro-batches, got 2")
    staged = autoshard.plan(model, parts[0], hardware="cpu-local", mesh="tp=2", stages=2, micro_batches=2)
    refused(lambda: autoshard.parallelize(model, staged), "runs on one stage, and this plan's step has 2")


def scaled() -> None:
    """One rank alone overflows: all leave out that step, with one micro-batch and with two."""
    batch = torch.randn(8, 16).float(), torch.randn(8, 8).float()
    for strategy, count in (("megatron", 1), ("dp", 1), ("megatron", 2)):
        model, where = Regression().float(), {"mesh": "dp=2,tp=2", "strategy": strategy, "micro_batches": count}
        settings: Any = {"hardware": "v100-32g-sxm2", "precision": "fp16-mixed", **where}
        plan = autoshard.plan(model, batch, **settings)
        split = autoshard.parallelize(model, plan)
        optimizer, scaler = torch.optim.AdamW(split.parameters(), lr=1e-2), split.grad_scaler(1024.0)
        for step in range(2):
            before = [p.detach().to_local().clone() for p in split.parameters()]  # type: ignore[attr-defined]
            if count == 1:
                scaler.scale(split(*batch)).backward()
            else:
                split.backward([batch] * count, scaler)
            if step == 0 and dist.get_rank() == 1:
                gradient: Any = list(split.parameters())[-1].grad
                gradient.to_local().view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            after = [p.detach().to_local() for p in split.parameters()]  # type: ignore[attr-defined]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == (step == 0), strategy
            assert scaler.get_scale() == 512.0 and int(scaler.skipped) == 1, strategy
            optimizer.zero_grad()


def computed_again() -> None:
    """Within torch.utils.checkpoint: sums that have begun go on, and dropout is that of the first time."""

    def again(each: Any) -> Tensor:
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            y: Tensor = torch.utils.checkpoint.checkpoint(each, x.clone(), use_reentrant=False)
            return y.square().mean()

    x = torch.randn(8, 16, requires_grad=True)
    for strategy in ("dp", "fsdp"):
        model = mlp()
        plan = autoshard.plan(model, x, hardware="a100-80g-sxm", mesh="dp=4", strategy=strategy)
        follows(model, autoshard.parallelize(copy.deepcopy(model), plan), again)
    drops = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
    split = autoshard.parallelize(drops, autoshard.plan(drops, x, hardware="a100-80g-sxm", mesh="dp=4"))
    batch = x.detach().clone().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(split, batch, use_reentrant=False)
    y.sum().backward()
    mask = (y != 0).to(y.dtype)
    assert batch.grad is not None
    near(batch.grad, mask @ drops[0].weight.detach() * 2, "dropout")  # type: ignore[operator]
    without = autoshard.parallelize(mlp(), autoshard.plan(mlp(), x.detach(), hardware="a100-80g-sxm", mesh="dp=4"))
    refused(lambda: without(batch), "input input requires a gradient, and was planned without one")


def sizes() -> None:
    """Another batch and length in each call; one that is not allowed is an error on all ranks, which go on."""
    model = Tied()
    twin = copy.deepcopy(model)
    ids, labels = torch.randint(0, 12, (8, 6)), torch.randint(0, 12, (8,))
    settings = {"hardware": "cpu-local", "mesh": "dp=2,tp=2", "dynamic": "batch=4..64/4,sequence=2..32/2@0.1"}
    plan = autoshard.plan(model, {"ids": ids, "labels": labels}, **settings)
    parallel = autoshard.parallelize(model, plan)
    for rows, length in ((8, 6), (16, 2), (4, 32), (12, 10), (8, 6)):
        ids, labels = torch.randint(0, 12, (rows, length)), torch.randint(0, 12, (rows,))
        for item in (parallel, twin):
            item.zero_grad()
        result, wanted = (network(ids=ids, labels=labels) for network in (parallel, twin))
        for outputs in (result, wanted):
            outputs["loss"].backward()
        near(result["loss"], wanted["loss"], f"loss of {rows}, {length}")
        near(result["logits"], wanted["logits"], f"logits of {rows}, {length}")
        for name, p in parallel.named_parameters():
            near(p.grad.full_tensor(), dict(twin.named_parameters())[name].grad, name)
    item = 6 if dist.get_rank() == 1 else 8
    try:
        parallel(ids=torch.zeros(item, 4, dtype=torch.long), labels=torch.zeros(item, dtype=torch.long))
    except UserError as error:
        message = "batch of 6: expected a multiple of 4" if item == 6 else "another rank was called with sizes"
        assert message in error.message, error.message
    else:
        raise AssertionError("a batch of 6 was taken")
    ids, labels = torch.randint(0, 12, (8, 4)), torch.randint(0, 12, (8,))
    near(parallel(ids=ids, labels=labels)["loss"], twin(ids=ids, labels=labels)["loss"], "after it")


CASES = {
    case.__name__: case
    for case in (
        loss_beside, outputs, batches, from_disk, images, gathered, computed_again, micro_batches, scaled, sizes,
        rank_0_fails, penalties,
    )
}  # fmt: skip

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        CASES[name]()
    dist.barrier()
    leave()
