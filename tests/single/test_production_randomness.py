"""The random numbers of training, as packages draw them: their rate, what they depend on, and what they must not.

A package of three layers runs by its own `train.run` on dp=2, tp=2, with the generators of production instead of the
exact numbers of verification. Rows are cut over dp, and whole on tp. Its input is ones, so that each layer's output is
what it has drawn.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.emit import emit
from autoshard.emit.runtime import ParallelMesh, random_dropout
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.rules import Strategy
from autoshard.verification.case import written
from autoshard.verification.ranks.loaded_package import load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from tests.forced import forced_plan
from tests.slow import quick_at

P = 0.25
ROWS, WIDTH, LAYERS, STEPS = 64, 96, 3, 3
MESH = Mesh.parse("dp=2,tp=2")
SIGMAS = 5.0
# kind -> mean and deviation of what a layer draws
KINDS = {
    "dropout": (1.0, math.sqrt(P / (1 - P))),
    "features": (1.0, math.sqrt(P / (1 - P))),
    "bernoulli": (1 - P, math.sqrt(P * (1 - P))),
    "uniform": (0.5, math.sqrt(1 / 12)),
}
Drawn = dict[int, list[list[Tensor]]]  # rank -> of each step -> of each layer, its own rows


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "dropout":
            return F.dropout(x, P)
        if self.kind == "features":
            return F.dropout1d(x[:, :, None], P)[:, :, 0]
        if self.kind == "bernoulli":
            return x * torch.bernoulli(torch.full_like(x, 1 - P))
        return x * torch.rand_like(x)


class Layers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs = [layer(x) for layer in self.layers]
        return (torch.stack(outputs).mean() * self.scale, *outputs)


def build(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Layers(kind), (torch.ones(ROWS, WIDTH),)


def over_rows(graph: Graph, op: Op, strategy: Strategy) -> bool:
    """Whatever has rows is cut by dp, whole on tp."""
    for name, layout in zip(op.results, strategy.results, strict=True):
        shape = graph.tensor(name).shape
        rows = shape.index(ROWS) if ROWS in shape else None
        if rows is not None and str(layout) != f"S{rows} R":
            return False
    return True


@cache
def files_of(kind: str) -> dict[str, str]:
    graph = capture(f"{__file__}:build", {"kind": kind})
    for seed in range(200):  # until the outputs are left as they are made
        plan = forced_plan(graph, MESH, lambda op, strategy: over_rows(graph, op, strategy), seed)
        program = lower(plan, graph)
        if all(str(program.value(name).layout) == "S0 R" for name in program.outputs[1:]):
            return dict(emit(program, plan, graph))
    raise AssertionError("no plan cuts the rows")


def train(files: dict[str, str], done: int = 0, seed: int = 0) -> Drawn:
    """All steps after the first `done`, by the package's own loop."""
    drawn: Drawn = {}
    with written(files) as folder:
        package = load_package(Path(folder))
        step = package.train.train_step

        def noted(model: nn.Module, optimizer: Any, mesh: Any, batch: list[Tensor], *others: Any) -> Any:
            torch.manual_seed(1000 * done + mesh.rank)  # whatever else has drawn on a rank makes no difference
            result = step(model, optimizer, mesh, [torch.ones_like(x) for x in batch], *others)
            outputs = package.recorder.take(mesh.rank).outputs[0]
            drawn.setdefault(mesh.rank, []).append([x.detach().clone() for x in outputs[1:]])
            return result

        def work(mesh: Any) -> None:
            mesh.random.exact = False
            arguments = ["--backend", "gloo", "--steps", str(STEPS), "--seed", str(seed), "--log-every", "99"]
            package.train.run(package.train.parse_arguments(arguments), mesh)

        def prepared(model: nn.Module, *_: Any) -> int:
            for parameter in model.parameters():  # one that is not initialised may hold NaN, which ends the run
                nn.init.ones_(package.runtime.local(parameter))
            return done

        package.train.train_step, package.train.prepare = noted, prepared
        run_lockstep(dict(MESH.axes), work, mesh_type=package.runtime.ParallelMesh)
    return drawn


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten().double(), other.flatten().double()]))[0, 1])


def faults(kind: str, files: dict[str, str]) -> str:
    """What is wrong with the numbers, "" where nothing is."""
    drawn = train(files)
    if any(not torch.equal(a, b) for one, other in ((0, 1), (2, 3)) for a, b in _pairs(drawn[one], drawn[other])):
        return "replicas differ"
    if any(not torch.equal(a, b) for a, b in _pairs(drawn[0][2:], train(files, done=2)[0])):
        return "a resumed run draws others"
    numbers = {
        (shard, step, layer): drawn[rank][step][layer]
        for shard, rank in enumerate((0, 2))
        for step, layer in itertools.product(range(STEPS), range(LAYERS))
    }
    if said := wrong_numbers(numbers, *KINDS[kind]):
        return said
    if torch.equal(train(files, done=2, seed=1)[0][0][0], drawn[0][2][0]):
        return "the seed changes nothing"
    return ""


def wrong_numbers(numbers: dict[tuple[int, int, int], Tensor], mean: float, deviation: float) -> str:
    """What is wrong with what each (shard, step, layer) has drawn."""
    for x in numbers.values():
        if abs(float(x.mean()) - mean) > SIGMAS * deviation / math.sqrt(x.numel()):
            return f"a mean of {float(x.mean()):.3f}, expected {mean:.3f}"
        if abs(float(x.std()) - deviation) > 0.1 * deviation:
            return f"a deviation of {float(x.std()):.3f}, expected {deviation:.3f}"
    for one, other in itertools.combinations(numbers, 2):
        if abs(correlation(numbers[one], numbers[other])) > SIGMAS / math.sqrt(numbers[one].numel()):
            return f"(shard, step, layer) {one} and {other} are correlated"
    return ""


def _pairs(one: list[list[Tensor]], other: list[list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]


@pytest.mark.parametrize("kind", quick_at(KINDS, 0))
def test_production_numbers(kind: str) -> None:
    assert faults(kind, files_of(kind)) == ""


RANDOMNESS, DRAWING = "runtime/randomness.py", "runtime/random_tensors.py"
PLACE, TIME, SEEDED = (
    "hash_of(index, shards)",
    "key = hash_of(seed, step)",
    "self.generator_seed(index, layout))",
)
PLANTED = {
    "one mask in every layer": ("dropout", RANDOMNESS, PLACE, "hash_of(shards)", "correlated"),
    "one mask in every step": ("dropout", RANDOMNESS, TIME, "key = hash_of(seed)", "correlated"),
    "one mask on every shard": ("dropout", RANDOMNESS, PLACE, "hash_of(index)", "correlated"),
    "the seed is not read": ("dropout", RANDOMNESS, TIME, "key = hash_of(step)", "the seed"),
    "a mask for each rank": (
        "dropout", RANDOMNESS, PLACE, "hash_of(index, self.mesh.rank)", "replicas differ"
    ),
    "no manual seed": ("dropout", RANDOMNESS, f"self._generator.manual_seed({SEEDED}", "self._generator", "resumed"),
    "1 - p": ("dropout", RANDOMNESS, "bernoulli_(1 - p, generator=random", "bernoulli_(p, generator=random", "mean"),
    "nothing is dropped": ("dropout", RANDOMNESS, "noise.div_(max(1 - p, 1e-30))", "1.0", "deviation"),
    "the step is not set": ("dropout", "train.py", "mesh.random.step = step", "pass", "correlated"),
    "steps are counted from the resumed one": (
        "dropout", "train.py", "log, step, judge)", "log, step - done, judge)", "resumed"
    ),
    "an inverted Bernoulli": ("bernoulli", DRAWING, "0.0, 1.0).to(p.dtype) < p)", "0.0, 1.0).to(p.dtype) > p)", "mean"),
    "inverted noise": ("features", DRAWING, "tensor.bernoulli_(first,", "tensor.bernoulli_(1 - first,", "mean"),
    "a narrow uniform": ("uniform", DRAWING, ".uniform_(first, second,", ".uniform_(0.3, 0.7,", "deviation"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str) -> None:
    kind, name, old, new, said = PLANTED[fault]
    files = files_of(kind)
    assert old in files[name], f"{name} has no {old!r} any more"
    assert said in faults(kind, {**files, name: files[name].replace(old, new)})


def test_masks_and_the_default_generator_leave_each_other_alone() -> None:
    """A loader may draw from it meanwhile, in a thread of its own."""
    mesh = ParallelMesh({"dp": 1}, 0, lambda *_: cast(Any, None), torch.device("cpu"))
    x, arguments = torch.ones(64), {"p": 0.5, "index": 1, "shape": (64,), "layout": "R"}
    masks = []
    for seed in range(3):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        masks.append(random_dropout(x, mesh.random, **arguments))  # type: ignore[arg-type]
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])
    with mesh.random.fork(1, "R", default=True):
        drawn = torch.rand(3)
    torch.manual_seed(3)
    with mesh.random.fork(1, "R", default=True):
        assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(3).get_state())
