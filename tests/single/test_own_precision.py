"""Faults that float64 can't see: dtypes, gradients that there should not be, sums in the low precision."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, Program
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.verification import training_precision
from autoshard.verification.case import Case, check_files, make_case
from autoshard.verification.comparison.proof import Proof
from autoshard.verification.ranks.lockstep import ThreadTransport
from autoshard.verification.training_precision import TrainingPrecisionStep
from autoshard.workflow import make_plan
from tests.forced import forced_plan
from tests.slow import quick, quick_at


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 5)
        self.pair = nn.Bilinear(5, 5, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.down(self.norm(F.gelu(self.up(x))))
        return F.binary_cross_entropy(torch.sigmoid(self.pair(z, z)), y), z


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Block(), (torch.randn(6, 12), torch.rand(6, 3))


@cache
def made(seed: int = 0) -> tuple[Case, Program, dict[str, str]]:
    graph = capture(f"{__file__}:build", {}, "bf16-mixed")
    plan = forced_plan(graph, Mesh.parse("dp=2"), lambda op, strategy: True, seed)
    program = lower(plan, graph)
    return make_case(f"{__file__}:build", {}, graph), program, emit(program, plan, graph)


@pytest.mark.slow
def test_a_package_in_its_own_precision() -> None:
    for seed in range(3):
        case, program, files = made(seed)
        assert isinstance(case.native_step, TrainingPrecisionStep) and [x.dtype for x in case.native_step.outputs] == [
            torch.float32,
            torch.bfloat16,
        ]
        proof = check_files(case, program, files, own_precision=True)
        assert proof.passed, proof.failure
        assert {kind.kind: kind.count for kind in proof.kinds}["precision"] > 2 * len(program.parameters)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("model_parallel.py", "return loss, z", "return loss, z.float()", "float32, the original's is bfloat16"),
        ("model_parallel.py", ".to(torch.bfloat16)", ".to(torch.float32)", "must have the same dtype"),
        ("train.py", "outputs[0].backward()", "(outputs[0] * 1e39).backward()", "NaN or inf"),
    ],
)  # fmt: skip
def test_faults_are_found(file: str, old: str, new: str, said: str) -> None:
    case, program, files = made()
    assert old in files[file]
    faulty = {**files, file: files[file].replace(old, new)}
    proof = check_files(replace(case, noise=None), program, faulty, own_precision=True)
    assert not proof.passed
    assert said in proof.failure or any(said in str(kind.worst) for kind in proof.kinds), proof.failure


def test_weights_move_low_and_their_gradients_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model stored over all devices: what is gathered is bfloat16, what is reduced is float32."""
    case, program, files = next(
        (case, program, files)
        for case, program, files in map(made, range(20))
        if any(isinstance(i, Collective) and i.regathered and i.gradient_dtype for i in program.instructions)
    )
    seen: list[tuple[str, torch.dtype]] = []
    gather, scatter = ThreadTransport.all_gather, ThreadTransport.reduce_scatter

    def gathered(self: ThreadTransport, x: Tensor, lengths: list[int]) -> Tensor:
        seen.append(("all_gather", x.dtype))
        return gather(self, x, lengths)

    def scattered(self: ThreadTransport, x: Tensor, lengths: list[int]) -> Tensor:
        seen.append(("reduce_scatter", x.dtype))
        return scatter(self, x, lengths)

    monkeypatch.setattr(ThreadTransport, "all_gather", gathered)
    monkeypatch.setattr(ThreadTransport, "reduce_scatter", scattered)
    assert check_files(case, program, files, own_precision=True).passed
    entries = [entry for entry in seen if entry[1] != torch.float64]
    assert ("all_gather", torch.bfloat16) in entries
    assert ("reduce_scatter", torch.bfloat16) not in entries


class Images(nn.Module):
    """A batch norm's weights stay in float32 between convolutions in the low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.norm(self.first(x)).relu()).mean((2, 3)), y)


def build_images() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Images(), (torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,)))


@pytest.mark.parametrize("precision", quick_at(["bf16-mixed", "fp16-mixed"], 1))
def test_a_batch_norm_over_devices_gives_the_precision_that_it_was_given(precision: str) -> None:
    spec = f"{__file__}:build_images"
    graph = capture(spec, {}, precision)
    plan = forced_plan(graph, Mesh.parse("dp=2"), lambda op, strategy: "S0" in str(strategy.results[0]), 0)
    program = lower(plan, graph)
    files = emit(program, plan, graph)
    assert "synchronised_batch_norm" in files["model_parallel.py"]
    proof = check_files(make_case(spec, {}, graph), program, files, own_precision=True)
    assert proof.passed and not proof.unverified, proof.failure


class Choosy(nn.Module):
    """Its own code refuses the low precision; its look-up has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(8, 6)), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.head(F.embedding(x, self.table, sparse=True))
        assert z.dtype != torch.bfloat16 or torch.compiler.is_compiling(), "not in bfloat16"
        return F.mse_loss(z.float(), y)


def build_choosy() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Choosy(), (torch.arange(6), torch.randn(6, 4))


def choosy(precision: str) -> Proof:
    graph = capture(f"{__file__}:build_choosy", {}, precision)
    plan = forced_plan(graph, Mesh.parse("dp=2"), lambda op, strategy: True)
    program = lower(plan, graph)
    case = make_case(f"{__file__}:build_choosy", {}, graph)
    return check_files(case, program, emit(program, plan, graph), own_precision=True)


def test_a_step_that_the_original_can_not_do_is_said_to_be_unverified() -> None:
    proof = choosy("bf16-mixed")
    assert proof.passed, proof.failure
    said = "one step in bf16-mixed: the original fails in it (AssertionError: not in bfloat16)"
    said += "; nor was train.py started"
    assert proof.as_dict()["unverified"] == [said]
    assert f"  not verified: {said}" in proof.summary().splitlines()


def build_language_model() -> tuple[nn.Module, dict[str, Tensor]]:
    config = hf.LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, use_cache=False
    )
    ids = torch.randint(0, 48, (4, 8))
    return hf.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def test_logits_beside_a_loss_in_float32_are_as_the_library_returns_them() -> None:
    """It casts them for its loss: in a trace in float32 what it casts and what it returns were the same tensor."""
    spec = f"{__file__}:build_language_model"
    graph = capture(spec, {}, "bf16-mixed")
    assert [graph.tensor(name).dtype for name in graph.outputs] == ["float32", "bfloat16"]
    program = lower(plan := forced_plan(graph, Mesh.parse("dp=2"), lambda op, strategy: True), graph)
    proof = check_files(make_case(spec, {}, graph), program, emit(program, plan, graph), own_precision=True)
    assert proof.passed and not proof.unverified, proof.failure


@pytest.mark.parametrize(("name", "times"), [("layers.0.linear1.weight", 2.0), ("layers.0.linear2.bias", 0.5)])
def test_a_wrong_gradient_beside_a_kink_is_found(name: str, times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ReLU's layer, whose gradients may differ by what a sign moves, and by no more."""
    case = layers_case(1)
    plan = forced_plan(case.graph, Mesh.parse("dp=2"), lambda op, strategy: True)
    program, run = lower(plan, case.graph), training_precision._run

    def wrong(*args: Any) -> Any:
        rank = run(*args)
        return replace(rank, gradients={n: g * (times if n.endswith(name) else 1) for n, g in rank.gradients.items()})

    monkeypatch.setattr(training_precision, "_run", wrong)
    proof = check_files(case, program, emit(program, plan, case.graph), own_precision=True)
    assert name in proof.failure and "away from the exact values" in proof.failure


def test_sparse_gradients_of_the_original_are_compared() -> None:
    proof = choosy("fp32")
    assert proof.passed and not proof.unverified, proof.failure
    assert {kind.kind: kind.count for kind in proof.kinds}["precision"]


STYLES = ("dp", "fsdp", "hsdp", "megatron", "megatron-sp", "fsdp-tp")


def layers() -> tuple[nn.Module, tuple[Tensor, ...]]:
    encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)

    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layers, self.head = nn.Embedding(12, 16), nn.ModuleList([encoder]), nn.Linear(16, 12)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.table(ids)
            for layer in self.layers:
                x = layer(x)
            return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    return Labelled(), (torch.randint(0, 12, (4, 8)), torch.randint(0, 12, (4, 8)))


@cache
def layers_case(micro_batches: int) -> Case:
    graph = capture(f"{__file__}:layers", {}, "bf16-mixed")
    return make_case(f"{__file__}:layers", {}, graph, micro_batches=micro_batches)


STEPS = (StepRequest(), *(StepRequest(micro_batches=2, zero=level) for level in (1, 2, 3)))
QUICK = {("fsdp", STEPS[3])}


@pytest.mark.parametrize(("strategy", "step"), quick(product(STYLES, STEPS), QUICK))
def test_known_styles_in_low_precision(strategy: str, step: StepRequest) -> None:
    """Weights that are gathered along one axis, and whose gradients are summed along another, among them."""
    case = layers_case(step.micro_batches or 1)
    wanted = SearchRequest(Mesh.parse("dp=2,tp=2"), strategy=strategy, step=step)
    plan = make_plan(case.graph, load_hardware("a100-80g-sxm"), wanted).plan
    program = lower(plan, case.graph)
    proof = check_files(case, program, emit(program, plan, case.graph), own_precision=True)
    assert proof.passed, proof.failure
