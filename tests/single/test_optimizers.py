"""A package's optimizers step on local tensors, with the numbers, the parameters and the state of torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.emit.runtime.optimizers import SGD, AdamW


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def parameters(mesh: Any) -> list[nn.Parameter]:
    drawn = torch.Generator().manual_seed(0)
    whole, part, plain = (torch.randn(shape, generator=drawn) for shape in ((3, 4), (2, 5), (6,)))
    held = [DTensor.from_local(whole, mesh, [Replicate()]), DTensor.from_local(part, mesh, [Shard(0)]), plain]
    return [nn.Parameter(x) for x in held]


def stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """After three steps: parameters, then what of the state is a tensor."""
    (group,) = optimizer.param_groups
    drawn = torch.Generator().manual_seed(1)
    for _ in range(3):
        for p in group["params"]:
            held = p.to_local() if isinstance(p, DTensor) else p
            gradient = torch.randn(held.shape, generator=drawn)
            p.grad = DTensor.from_local(gradient, p.device_mesh, p.placements) if isinstance(p, DTensor) else gradient
        optimizer.step()
    state = [value for p in group["params"] for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
    return [*group["params"], *state]


@pytest.mark.parametrize(
    ("own", "stock", "options"),
    [
        (AdamW, torch.optim.AdamW, {"fused": True}),
        (AdamW, torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
        (SGD, torch.optim.SGD, {"lr": 0.1}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_the_numbers_are_those_of_torch(mesh: Any, own: Any, stock: Any, options: dict[str, Any]) -> None:
    ours, theirs = own(parameters(mesh), **options), stock(plain(mesh), **options)
    tensors, expected = stepped(ours), stepped(theirs)
    assert len(tensors) == len(expected)
    for one, other in zip(tensors, expected, strict=True):
        assert torch.equal(*(x.to_local() if isinstance(x, DTensor) else x for x in (one, other)))
    cut = [x for x in tensors if x.numel() == 20]
    assert cut and all(isinstance(x, DTensor) for x in cut)  # its state, too


def plain(mesh: Any) -> list[nn.Parameter]:
    """What is held of them: torch's operators over lists take no DTensors beside plain tensors."""
    return [nn.Parameter(x.to_local().detach() if isinstance(x, DTensor) else x.detach()) for x in parameters(mesh)]


def test_no_step_is_dispatched_for_dtensors(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, options in ((AdamW, {"fused": True}), (SGD, {})):
        optimizer, seen = kind(parameters(mesh), **options), []

        def noted(group: Any, *lists: Any, filled: Any = seen, original: Any = optimizer._init_group) -> Any:
            result = original(group, *lists)
            filled.extend(x for entry in lists if isinstance(entry, list) for x in entry)
            return result

        monkeypatch.setattr(optimizer, "_init_group", noted)
        stepped(optimizer)
        assert len(seen) >= 18 and not any(isinstance(x, DTensor) for x in seen)
