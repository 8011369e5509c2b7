"""A step of several micro-batches against the original model running the same ones: labels that are ignored unevenly,
an auxiliary loss beside them, dropout, batch norm, ZeRO; and the faults that this must see."""

from __future__ import annotations

import types
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.emit.runtime import ParallelMesh, label_shares
from autoshard.errors import UsageError
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import StepPlan
from autoshard.ir.program import Program
from autoshard.program.lower import lower
from autoshard.search.fixed_styles import random_plan
from autoshard.verification.case import Case, check_files, make_case
from tests.captured import captured
from tests.forced import forced_plan, sharded_plan
from tests.slow import quick_at, slow

COUNT = 3


class Tagger(nn.Module):
    """Words to tags, a mean over the tags that count; a penalty on activations beside it, which is a plain mean."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.norm = nn.Embedding(13, 8), nn.Linear(8, 12), nn.BatchNorm1d(12)
        self.drop, self.down = nn.Dropout(0.2), nn.Linear(12, 5)

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.up(self.words(ids))).flatten(0, 1))
        logits = self.down(self.drop(x))
        return F.cross_entropy(logits, tags.reshape(-1), label_smoothing=0.1) + 0.1 * x.square().mean()


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Tagger(), (torch.randint(0, 13, (4, 6)), torch.randint(0, 5, (4, 6)))


def build_weighted() -> tuple[nn.Module, tuple[Tensor, ...]]:
    class Weighted(Tagger):
        def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
            logits = self.down(F.relu(self.up(self.words(ids)))).flatten(0, 1)
            return F.cross_entropy(logits, tags.reshape(-1), self.down.bias.detach().square())

    return Weighted(), build()[1]


def build_classes() -> tuple[nn.Module, tuple[Tensor, ...]]:
    class Classes(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.CrossEntropyLoss(
                torch.tensor([1.0, 4.0, 0.0, 0.5, 2.0]), ignore_index=3, label_smoothing=0.1
            )

        def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
            logits = self.down(F.relu(self.up(self.words(ids)))).flatten(0, 1)
            return 0.5 * self.loss(logits, tags.reshape(-1))

    return Classes(), build()[1]


LOSSES = {
    "focal": lambda mean, other: (1 - torch.exp(-mean)) ** 2 * mean,
    "product": lambda mean, other: mean * (1 + other),
    "own scale": lambda mean, other: mean / mean.detach().clamp(min=1) + other.log(),
    "tracked": lambda mean, other: mean,
    "one of two": lambda mean, other: 0.5 * mean + other.exp().log1p(),
}


def build_function(name: str = "focal") -> tuple[nn.Module, tuple[Tensor, ...]]:
    class OfMeans(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(()))

        def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
            logits = self.down(F.relu(self.up(self.words(ids)))).flatten(0, 1)
            labels = tags.reshape(-1)
            mean, other = F.cross_entropy(logits, labels), F.cross_entropy(logits * 2, labels, ignore_index=3)
            if name == "tracked":
                self.average.lerp_(mean.detach(), 0.1)
            return LOSSES[name](mean, other)

    return OfMeans(), build()[1]


def build_guessing() -> tuple[nn.Module, tuple[Tensor, ...]]:
    class Guessing(Tagger):
        def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
            logits = self.down(F.relu(self.up(self.words(ids)))).flatten(0, 1)
            return F.cross_entropy(logits, logits.detach().argmax(-1)) + tags.sum() * 0.0

    return Guessing(), build()[1]


def build_hooked() -> tuple[nn.Module, tuple[Tensor, ...]]:
    class Hooked(Tagger):
        def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
            hidden = self.up(self.words(ids))
            hidden.register_hook(lambda gradient: gradient * 0.5)
            return F.cross_entropy(self.down(hidden).flatten(0, 1), tags.reshape(-1))

    return Hooked(), build()[1]


@cache
def made(zero: bool = False, seed: int = 0) -> tuple[Case, Program, dict[str, str]]:
    graph = captured(f"{__file__}:build", {})
    mesh = Mesh.parse("dp=2")
    plan = sharded_plan(graph, mesh, "dp") if zero else forced_plan(graph, mesh, lambda op, strategy: True, seed)
    plan = replace(plan, step=StepPlan(COUNT))
    program = lower(plan, graph)
    return case(), program, emit(program, plan, graph)


@cache
def case() -> Case:
    return make_case(f"{__file__}:build", {}, captured(f"{__file__}:build", {}), micro_batches=COUNT)


@pytest.mark.parametrize(("zero", "seed"), quick_at([(False, 0), (False, 1), (True, 0)], 1))
def test_the_step_is_that_of_the_original(zero: bool, seed: int) -> None:
    reference, program, files = made(zero, seed)
    assert bool(program.weight_buckets) >= zero and len(program.label_counts) == 1
    proof = check_files(reference, program, files, own_precision=True)
    assert proof.passed, proof.failure


def test_a_model_that_asks_for_gradients_is_run_with_them_to_count_its_labels() -> None:
    """A hook can't be registered on a tensor without a gradient."""
    graph = captured(f"{__file__}:build_hooked", {})
    plan = replace(forced_plan(graph, Mesh.parse("dp=2"), lambda op, strategy: True), step=StepPlan(2))
    program = lower(plan, graph)
    case = make_case(f"{__file__}:build_hooked", {}, graph, micro_batches=2)
    proof = check_files(case, program, emit(program, plan, graph))
    assert proof.passed, proof.failure


@pytest.mark.parametrize(("name", "counted"), [*zip(LOSSES, ([], [], [], [], ["cross_entropy_loss"]), strict=True)])
def test_a_function_of_a_mean_is_averaged(name: str, counted: list[str]) -> None:
    """It is no function of the step's mean: a mean weighted by its labels in it would make a loss of its own."""
    spec = f"{__file__}:build_function"
    graph = captured(spec, {"name": name})
    plan = replace(forced_plan(graph, Mesh.parse("dp=2"), lambda op, strategy: True), step=StepPlan(COUNT))
    program = lower(plan, graph)
    assert [count.op for count in program.label_counts] == counted
    case = make_case(spec, {"name": name}, graph, micro_batches=COUNT)
    step, model = case.reference.steps[0], build_function(name)[0].double()
    model.load_state_dict(case.reference.parameters, strict=False)
    if not counted:
        losses = [float(model(*step.inputs[2 * i : 2 * i + 2]).detach()) for i in range(COUNT)]
        assert [float(output) for output in step.outputs] == pytest.approx(losses)
    proof = check_files(case, program, emit(program, plan, graph))
    assert proof.passed, proof.failure


def test_micro_batches_differ_in_what_they_ignore() -> None:
    inputs = case().reference.steps[0].inputs
    assert len(inputs) == 2 * COUNT
    counts = [int((tags != -100).sum()) for tags in inputs[1::2]]
    assert len(set(counts)) == COUNT and min(counts) > 0, counts


FAULTS = {
    "each micro-batch's own mean": ("mesh.micro_batch(number, labels, at)", "mesh.micro_batch(number, (), at)"),
    "one dropout mask for all": ("mesh.micro_batch(number, labels, at)", "mesh.micro_batch(0, labels, at)"),
    "the sum of the losses": ("outputs[0] / MICRO_BATCHES", "outputs[0]"),
    "the first micro-batch each time": (
        "slices_of(micro_batches,",
        "slices_of([micro_batches[0]] * MICRO_BATCHES,",
    ),
    "summed after the first": ("GRADIENT_BUCKETS, count)", "GRADIENT_BUCKETS)"),
}


@pytest.mark.parametrize("fault", quick_at(FAULTS, 0, 4))
def test_a_fault_is_seen(fault: str) -> None:
    reference, program, files = made()
    old, new = FAULTS[fault]
    assert old in files["train.py"]
    proof = check_files(reference, program, files | {"train.py": files["train.py"].replace(old, new)})
    assert not proof.passed


def test_a_micro_batch_without_labels_adds_nothing() -> None:
    """As for a batch of padding: 0 / 0 there would be NaN everywhere."""
    from autoshard.emit.runtime import LabelShares, counted

    labels, logits = LabelShares(), torch.randn(3, 4, requires_grad=True)
    labels.begin([torch.tensor(0.0, dtype=torch.float64)])
    loss = counted(F.cross_entropy(logits, torch.full((3,), -100)), labels)
    loss.backward()
    assert float(loss.detach()) == 0.0 and logits.grad is not None and not logits.grad.any()


@pytest.mark.parametrize(
    ("name", "says"),
    [("build_weighted", "weighs its classes by what"), ("build_guessing", "not made of the inputs alone")],
)
def test_labels_that_can_not_be_counted_are_refused(name: str, says: str) -> None:
    graph = captured(f"{__file__}:{name}", {})
    plan = forced_plan(graph, Mesh.parse("dp=2"), lambda op, strategy: True)
    lower(plan, graph)
    with pytest.raises(UsageError, match=says):
        several = replace(plan, step=StepPlan(2))
        emit(lower(several, graph), several, graph)


@pytest.mark.parametrize("mesh", [slow("dp=2"), slow("tp=2"), "dp=2,tp=2"])
@pytest.mark.slow
def test_classes_count_by_their_weights(mesh: str) -> None:
    """A micro-batch of rare classes counts for more; its labels may all have the weight 0."""
    graph = captured(f"{__file__}:build_classes", {})
    case = make_case(f"{__file__}:build_classes", {}, graph, micro_batches=3)
    for seed in range(3):
        plan = replace(
            random_plan(PlanningContext(graph, Mesh.parse(mesh), load_hardware("cpu-local")), seed), step=StepPlan(3)
        )
        program = lower(plan, graph)
        files = emit(program, plan, graph)
        assert '"loss.weight")' in files["model_parallel.py"]
        proof = check_files(case, program, files)
        assert proof.passed, proof.failure
    wrong = files["model_parallel.py"].replace('3, "loss.weight")', '3, "")')
    assert not check_files(case, program, files | {"model_parallel.py": wrong}).passed


def test_labels_are_added_up_as_integers() -> None:
    """HCCL adds up no float64."""
    sums: list[torch.dtype] = []

    def connect(*_: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(all_reduce=lambda x: sums.append(x.dtype) or (lambda: x.add_(1)))

    mesh = ParallelMesh({"dp": 2}, 0, connect, torch.device("cpu"))  # type: ignore[arg-type]
    labels = [(torch.tensor([1, -100, 2]),), (torch.tensor([-100, -100, 2]),)]
    shares = label_shares(mesh, labels, [(("dp",), -100, "")], {})
    assert sums == [torch.int64]
    assert [float(share) for (share,) in shares] == pytest.approx([3 / 2.5, 2 / 2.5])
