"""Predicted memory of a step against what torch measures: emitted packages on one device of this CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.constraints.step_request import StagePin, StepRequest
from autoshard.emit import emit
from autoshard.emit.runtime import ParallelMesh
from autoshard.graph_capture.capture import capture_model
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import BlockPolicy, StepPlan
from autoshard.ir.program import Compute, Program
from autoshard.program.gradient_buckets import local_bytes
from autoshard.program.lower import lower
from autoshard.program.stage_programs import stage_programs
from autoshard.search.fixed_step import repeated_blocks, with_step
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.simulation.memory_curve import MemoryPlan, Span, plan_memory
from autoshard.simulation.steps.program_step import simulate_plan_step
from autoshard.verification.case import written
from autoshard.verification.ranks.loaded_package import LoadedPackage, load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from tests.meter import Meter
from tests.slow import quick_at, slow, thinned

Built = tuple[nn.Module, tuple[Tensor, ...]]


def mlp() -> Built:
    from examples.mlp import build

    return build(batch=16, features=32, hidden=64, outputs=8)


def lenet() -> Built:
    from examples.lenet import build

    return build(batch=16)


def gpt2() -> Built:
    from examples.gpt2 import build

    return build(batch=2, sequence=16, n_layer=2, n_embd=96, vocabulary=97, dropout=0.0)


def llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Llama(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = super().forward(input_ids=input_ids, labels=labels, use_cache=False).loss
            return loss

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = Llama(LlamaConfig(vocab_size=97, num_key_value_heads=2, max_position_embeddings=64, **sizes))
    model.loss_type = "ForCausalLM"
    words = torch.randint(0, 97, (2, 16))
    return model, (words, words)


class Block(nn.Module):
    """Of a residual network, at half the resolution."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(in_size, out_size, 3, 2, 1, bias=False), nn.BatchNorm2d(out_size)
        self.second, self.second_norm = nn.Conv2d(out_size, out_size, 3, 1, 1, bias=False), nn.BatchNorm2d(out_size)
        self.short, self.short_norm = nn.Conv2d(in_size, out_size, 1, 2, bias=False), nn.BatchNorm2d(out_size)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + self.short_norm(self.short(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.block = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Block(8, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.block(torch.relu(self.norm(self.stem(x))))
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def resnet() -> Built:
    return ResNet(), (torch.randn(4, 3, 18, 18), torch.randint(0, 10, (4,)))


MODELS: dict[str, tuple[Callable[[], Built], str]] = {
    "mlp": (mlp, "fp32"),
    "lenet": (lenet, "fp32"),
    "resnet": (resnet, "fp32"),
    "gpt2": (gpt2, "fp32"),
    "gpt2 in bf16": (gpt2, "bf16-mixed"),
    "llama": (llama, "fp32"),
    "gpt2 in fp8": (gpt2, "fp8-mixed"),
}


@dataclass(frozen=True)
class Measured:
    """Bytes. `kept` by storage; a peak is (bytes, operator) above parameters, states, buffers and inputs."""

    kept: list[int]
    parameters: int
    gradients: int
    optimizer: int
    peaks: dict[str, tuple[int, str]]


def run(package: LoadedPackage, inputs: Sequence[Tensor], mesh: ParallelMesh) -> Measured:
    """The second step, when the optimizer has its states."""
    model = package.model.build_model(mesh)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # as train.py on a GPU
    package.train.train_step(model, optimizer, mesh, inputs)
    optimizer.zero_grad(set_to_none=True)
    fixed = [*model.parameters(), *model.buffers(), *inputs]
    states = [state for group in optimizer.state.values() for state in group.values()]
    meter, saved = Meter([*fixed, *states]), []
    with meter:
        meter.phase = "forward"
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
            loss = model(*inputs)
        stored = storages(saved, fixed)
        saved.clear()
        meter.phase = "backward"
        loss.backward()
        meter.phase = "optimizer"
        optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    phases = ("forward", "backward", "optimizer")
    return Measured(
        stored,
        sum(storages(list(model.parameters()))),
        sum(storages(gradients)),
        sum(storages([state for state in states if state.dim()])),
        {phase: meter.peak(phase) for phase in phases},
    )


def storages(tensors: Iterable[Tensor], without: Iterable[Tensor] = ()) -> list[int]:
    """Bytes of the distinct storages."""
    known = {x.untyped_storage()._cdata for x in without}
    sizes = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sorted(size for address, size in sizes.items() if address not in known)


@cache
def both(name: str) -> tuple[Measured, MemoryPlan, Program]:
    build, precision = MODELS[name]
    torch.manual_seed(0)
    model, inputs = build()
    graph = capture_model(model, inputs, precision)
    plan = search(graph, load_hardware("h100-80g-sxm"), SearchRequest(Mesh.parse("dp=1,tp=1"), strategy="megatron"))
    program = lower(plan, graph)
    with written(emit(program, plan, graph)) as folder:
        package = load_package(folder)
    (measured,) = run_lockstep({"dp": 1, "tp": 1}, lambda mesh: run(package, inputs, mesh))
    return measured, plan_memory(program, graph), program


def alive(plan: MemoryPlan, step: int, *kinds: str) -> list[Span]:
    return [span for span in plan.spans if span.start <= step <= span.last and span.held.kind in kinds]


def spelled_out(program: Program) -> int:
    """Bytes that torch's CPU, which has no kernel for an RMS norm, keeps beside what the kernels keep: the normalised
    input of each."""
    norms = [ins for ins in program.instructions if isinstance(ins, Compute) and ins.target == "aten.rms_norm"]
    return sum(local_bytes(program.value(norm.results[0]), program.mesh) for norm in norms)


def total(spans: Iterable[Span]) -> float:
    return sum(span.held.bytes for span in spans)


models = pytest.mark.parametrize("name", MODELS)


@pytest.mark.parametrize("name", quick_at(MODELS, 3))
def test_kept_for_backward(name: str) -> None:
    measured, plan, program = both(name)
    turn = len(program.instructions) - 1
    spans = [span for span in alive(plan, turn, "activation", "extra") if span.last > turn]
    assert sum(measured.kept) == total(spans) + spelled_out(program)


@pytest.mark.parametrize("name", thinned(MODELS, 3))
def test_states(name: str) -> None:
    """AdamW's step counters aside: a number a parameter, which stays on the host."""
    measured, plan, _ = both(name)
    totals = {kind: total(alive(plan, len(plan.bytes) - 1, kind)) for kind in ("parameter", "gradient", "optimizer")}
    assert totals == {
        "parameter": measured.parameters,
        "gradient": measured.gradients,
        "optimizer": measured.optimizer,
    }


@models
def test_peaks(name: str) -> None:
    """Of all that is on the device, within 1 %. What is left: the loss of mean squares keeps
    the storage of its partial sums, what two uses of one parameter give it waits for its sum, and names of the
    emitted code that hold a value to the end of their function."""
    measured, plan, program = both(name)
    fixed = total(alive(plan, 0, "parameter", "optimizer", "buffer", "input"))
    turn = len(program.instructions)
    steps = {"forward": range(turn), "backward": range(turn, 2 * turn), "optimizer": range(2 * turn, 2 * turn + 2)}
    for phase, window in steps.items():
        more = {"forward": [spelled_out(program)], "backward": [0, spelled_out(program)]}.get(phase, [0])
        said, peak = max(plan.bytes[step] for step in window), fixed + measured.peaks[phase][0]
        within = 0.99 * (said + min(more)) <= peak <= 1.01 * (said + max(more))  # backward has let go of some
        assert within, f"{phase}: {said} said, {peak} found, after {measured.peaks[phase][1]}"


def gpt2_of_layers(layers: int) -> Built:
    from examples.gpt2 import build

    return build(batch=2, sequence=128, n_layer=layers, n_embd=96, vocabulary=97, dropout=0.0)


@pytest.mark.parametrize(
    ("keep", "mesh"),
    [slow("all", "dp=1"), slow("expensive", "dp=1"), slow("input", "dp=1"), slow("input", "tp=2"),
     slow("communicated", "tp=2"), ("expensive+communicated", "tp=2")],
)  # fmt: skip
@pytest.mark.parametrize("count", [slow(1), 2])
def test_the_peak_of_a_step_whose_blocks_are_computed_again(keep: str, mesh: str, count: int) -> None:
    """Of one micro-batch, whose backward finds no gradients, and of two. What blocks computed again hold is not there
    with what the loss does."""
    model, inputs = gpt2_of_layers(4)
    graph = capture_model(model, inputs)
    plan = search(graph, load_hardware("a100-80g-sxm"), SearchRequest(Mesh.parse(mesh), strategy="megatron"))
    policies = tuple(BlockPolicy(path, keep) for path in repeated_blocks(graph) if keep != "all")
    plan = replace(plan, step=StepPlan(count, recompute=policies))
    program = lower(plan, graph)
    hardware = one_byte_blocks()
    predicted = simulate_plan_step(plan, program, graph, hardware).peak_bytes[0]
    with written(emit(program, plan, graph)) as folder:
        package = load_package(folder)
    measured = run_lockstep(dict(plan.mesh.axes), lambda mesh: peak_of_step(package, inputs, mesh, count))[0]
    assert predicted == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(("count", "schedule"), [slow(1, "gpipe"), slow(3, "gpipe"), (8, "1f1b")])
@pytest.mark.parametrize(
    "middle", [slow(("transformer.h.1", "transformer.h.2")), ("transformer.h.3", "transformer.ln_f")]
)
def test_the_peak_of_each_place(count: int, schedule: str, middle: tuple[str, str]) -> None:
    """Place 0 has what is before and after the middle, or the start alone; the weights that both hold are tied."""
    model, inputs = gpt2_of_layers(4)
    graph = capture_model(model, inputs)
    hardware = one_byte_blocks()
    plan = search(graph, hardware, SearchRequest(Mesh.parse("dp=1")))
    pins = tuple(StagePin(path, 1) for path in middle)
    plan = with_step(plan, graph, StepRequest(micro_batches=count, schedule=schedule, places=pins))
    program = lower(plan, graph)
    predicted = simulate_plan_step(plan, program, graph, hardware).peak_bytes
    with written(emit(program, plan, graph)) as folder:
        package = load_package(folder)
    args = (package.runtime.ParallelMesh, package.runtime.Stages, plan.step.part_stages, [{"dp": 1}, {"dp": 1}])
    measured = run_lockstep({"dp": 1}, lambda mesh: peak_of_step(package, inputs, mesh, count), 120.0, *args)
    gradients = [0.0, 0.0]
    for place, part in zip(plan.step.part_stages, stage_programs(program), strict=True):
        gradients[place] += sum(local_bytes(part.value(parameter.value), part.mesh) for parameter in part.parameters)
    for said, peak, more in zip(predicted, measured, gradients, strict=True):
        assert peak <= 1.02 * said  # gradients are counted from the start, and are there from the first backward on
        assert said <= 1.02 * (peak + more)


class WithLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 8), nn.Linear(8, 512)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.words(ids))
        return nn.functional.cross_entropy(logits, labels), logits


def test_no_micro_batch_holds_the_logits_of_another() -> None:
    model, inputs = WithLogits(), (torch.randint(0, 64, (128,)), torch.randint(0, 512, (128,)))
    graph, hardware = capture_model(model, inputs), one_byte_blocks()
    plan = replace(search(graph, hardware, SearchRequest(Mesh.parse("dp=1"))), step=StepPlan(3))
    program = lower(plan, graph)
    predicted = simulate_plan_step(plan, program, graph, hardware).peak_bytes[0]
    with written(emit(program, plan, graph)) as folder:
        package = load_package(folder)
    measured = run_lockstep({"dp": 1}, lambda mesh: peak_of_step(package, inputs, mesh, 3))[0]
    assert predicted == pytest.approx(measured, rel=0.02)


def one_byte_blocks() -> Hardware:
    """A device whose allocator rounds nothing."""
    hardware = load_hardware("a100-80g-sxm")
    byte = {**dict(hardware.constants), "allocator.block": 1.0}
    return replace(hardware, constants=tuple(byte.items()))


def peak_of_step(package: LoadedPackage, inputs: Sequence[Tensor], mesh: ParallelMesh, count: int) -> int:
    """Bytes of the second step up to its last gradient, with all that stays; inputs of one micro-batch."""
    model = package.model.build_model(mesh)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = inputs if count == 1 else [inputs] * count
    package.train.train_step(model, optimizer, mesh, batch)
    optimizer.zero_grad(set_to_none=True)
    states = [state for group in optimizer.state.values() for state in group.values()]
    fixed = [*model.parameters(), *model.buffers(), *inputs, *states]
    with Meter(fixed) as meter:
        if count == 1 and mesh.stages is None:
            model(*inputs).backward()
        else:
            package.recorder.accumulate_gradients(model, mesh, [inputs] * count)
    return meter.peak("")[0] + sum(storages(fixed))
