"""Look-ups on the host in models as users write them: the original's numbers, and each tensor where it belongs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.errors import UserError
from tests.hangs import HANGS
from tests.slow import quick_at

ROWS, WIDTH, BATCH = 400, 8, 8


class Tables(nn.Module):
    """DLRM's parts: dense features, bags and embeddings, a top."""

    def __init__(self, **target: Any) -> None:
        super().__init__()
        self.target = target
        self.bottom = nn.Linear(3, WIDTH)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="mean")
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=1)
        self.weighted = nn.EmbeddingBag(ROWS + 1, WIDTH, mode="sum")
        self.top = nn.Linear(4 * WIDTH, 1)

    def forward(self, dense: Tensor, ids: Tensor, clicks: Tensor) -> Tensor:
        bags = autoshard.operator(self.bag, **self.target)(ids) if self.target else self.bag(ids)
        weights = torch.sigmoid(self.bottom(dense))[:, :4]  # with a gradient, which comes back to the device
        rows = [bags, self.table(ids[:, 0]), self.weighted(ids, per_sample_weights=weights)]
        x = torch.cat([self.bottom(dense), *rows], 1)
        return nn.functional.mse_loss(self.top(x)[:, 0], clicks)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(BATCH, 3), torch.randint(ROWS, (BATCH, 4)), torch.rand(BATCH)


def planned(model: nn.Module, mesh: str, **options: Any) -> Any:
    return autoshard.plan(model, inputs(), hardware="a100-80g-sxm", mesh=mesh, **options)


def on_host(plan: Any) -> list[str]:
    return [f"{p.path} {p.layout}" for p in plan.plan.parameters if p.layout.host]


@pytest.mark.parametrize(
    ("mesh", "pins"),
    quick_at(
        [
            ("dp=2", ["bag.weight=Shard(0),host", "table.weight=Shard(1),host", "weighted=host"]),
            (
                "dp=2,tp=2",
                ["bag.weight=Shard(0)@dp,host", "table.weight=Shard(1)@tp,host", "weighted=Shard(1)@tp,host"],
            ),
        ],
        0,
    ),
)
def test_every_rank_computes_what_the_original_does(mesh: str, pins: list[str]) -> None:
    """Rows and columns cut over one axis, the batch over another."""
    plan = planned(Tables(), mesh, pins=pins)
    assert len(on_host(plan)) == 3
    assert autoshard.verify(plan).passed


def test_the_models_own_code_asks_for_it() -> None:
    model = Tables(in_strategy=((2, 1), (1, 1)), primitive_target="CPU")
    alone = model(*inputs())
    plan = planned(model, "dp=2")
    assert on_host(plan) == ["bag.weight S0 host"]
    assert {op.decided_by for op in plan.plan.ops if op.op.startswith("embedding_bag")} >= {"pin"}
    assert autoshard.verify(plan).passed
    assert torch.equal(model(*inputs()), alone)
    assert on_host(planned(Tables(primitive_target="Ascend"), "dp=1", memory_limit=90_000)) != []  # but the bag


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"primitive_target": "cpu"}, "primitive_target 'cpu': expected 'CPU', 'GPU', 'Ascend'"),
        ({"in_strategy": ((1, 1), (2, 1)), "primitive_target": "CPU"}, "never summed over devices"),
        ({"in_strategy": ((4, 1), (1, 1)), "primitive_target": "CPU"}, "no product of axis sizes"),
    ],
)
def test_rejected_with_its_reason(target: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as raised:
        planned(Tables(**target), "dp=2")
    assert words in f"{raised.value}"


class Indexed(nn.Module):
    """Rows taken by index operators, of parameters that are no module's table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.randn(ROWS, WIDTH)), nn.Parameter(torch.randn(WIDTH, ROWS))
        self.picked, self.functional = nn.Parameter(torch.randn(ROWS, WIDTH)), nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, dense: Tensor, ids: Tensor, clicks: Tensor) -> Tensor:
        first = self.rows[ids].sum(1) + self.columns[:, ids[:, 0]].t()
        second = self.picked.index_select(0, ids[:, 1]) * nn.functional.embedding(ids[:, 2], self.functional)
        return nn.functional.mse_loss((first * second).sum(1) + dense.sum(1), clicks)


def test_index_operators() -> None:
    pins = [f"{name}=host" for name in ("rows", "columns", "picked", "functional")]
    plan = planned(Indexed(), "dp=2", pins=pins)
    assert len(on_host(plan)) == 4 and autoshard.verify(plan).passed
    with pytest.raises(UserError, match="never summed over devices"):
        planned(Indexed(), "dp=2", pins=["op:index=Shard(0)@dp,host"])


def test_a_cut_that_its_look_ups_do_not_take() -> None:
    """Rows of a table with padding stay together."""
    with pytest.raises(UserError, match=r"a table lies there as it is looked up in(.|\n)*Shard\(1\)@dp,host"):
        planned(Tables(), "dp=2", pins=["table.weight=Shard(0)@dp,host"])


def test_a_target_for_what_looks_nothing_up() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return autoshard.operator(torch.relu, primitive_target="CPU")(x).sum()

    with pytest.raises(UserError, match=r"relu can't run on the host: only look-ups in a table can"):
        autoshard.plan(Product(), torch.randn(4, 4), hardware="a100-80g-sxm", mesh="dp=2")


DEVICES = """
import json
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
import autoshard
from autoshard.api.parallel.rank_model import rank_model
from autoshard.emit.runtime import ParallelMesh, clip_gradients
from autoshard.program.lower import lower
from tests.single.test_host_lookups import Tables, inputs, planned

plan = planned(Tables(), "dp=1", pins=["bag=host", "weighted=host"])
_setup_privateuseone_for_python_backend("npu")
with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # knows where each tensor is, and refuses to mix devices
    mesh = ParallelMesh({"dp": 1}, 0, lambda *_: None, torch.device("npu", 0))
    model = rank_model(plan.plan, plan.graph, lower(plan.plan, plan.graph), mesh).module
    loss = model(*(mode.from_tensor(x).to("npu:0") for x in inputs()))
    with torch.autograd.set_multithreading_enabled(False):  # the mode is of one thread
        loss.backward()
    norm = clip_gradients(mesh, model.parameters(), 1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    held = {n: (p, p.grad, optimizer.state[p]["exp_avg"]) for n, p in model.named_parameters()}
kinds = {name: sorted({x.device.type for x in own}) for name, own in held.items()}
print(json.dumps([loss.device.type, norm.device.type, kinds]))
"""


def test_on_a_device_of_its_own_each_tensor_is_where_it_belongs() -> None:
    """Parameter, gradient and moments of tables on the host, all else on the device; nothing mixes them."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DEVICES], capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loss, norm, kinds = json.loads(done.stdout)
    assert (loss, norm) == ("npu", "npu")
    hosts = {"bag.weight", "weighted.weight"}
    assert kinds == {name: ["cpu" if name in hosts else "npu"] for name, _ in Tables().named_parameters()}
