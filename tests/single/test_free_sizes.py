"""A package takes another batch than planned where its model and its plan do, and says why where they don't."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import workflow
from autoshard.api import live_model as live_models
from autoshard.api.live_model import captured as live_captured
from autoshard.api.live_model import live_model, recaptured
from autoshard.cli.commands import main
from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.graph_capture.tracing import own_gradients
from autoshard.ir import graph_json
from autoshard.ir.graph import FreeSize, Graph
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.replay.free_sizes import CUTS, STAGES, UNTRIED
from autoshard.rules.resize.asked_sizes import _second
from autoshard.rules.resize.rebatch import rebatched
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.verification.case import check_files, make_case
from autoshard.verification.ranks.loaded_package import load_package
from tests.single.test_batch_numbers import SPEC
from tests.slow import quick_at

HARDWARE = load_hardware("cpu-local")
LOSSES = str(Path(__file__).with_name("test_captured_batch.py")) + ":build"
MODULES = ("convert", "model_parallel", "runtime", "initial", "batches", "run_options", "start_state")


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        words = nn.functional.dropout(self.table(ids), 0.1, self.training)
        return nn.functional.cross_entropy(self.head(words).flatten(0, 1), labels.flatten())


def tagger(batch: int = 4, sequence: int = 6) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Tagger(), tuple(torch.randint(0, 11, (batch, sequence)) for _ in range(2))


class Swish(torch.autograd.Function):
    """As models write it to keep less for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x.sigmoid() * (1 + x * (1 - x.sigmoid()))


class Swishing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Swish.apply(layer(x))
        return x.square().mean()


def swishing(batch: int = 4) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Swishing(), (torch.randn(batch, 8),)


@pytest.mark.parametrize("largest", quick_at([1 << 25, 64], 1))
def test_a_backward_of_ones_own_is_tried_once_for_all_batches(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    """Of numbers of the batch planned, and of the first other: those of 64 times as many took nine tenths of a capture,
    or were too many."""
    tried: list[Any] = []
    agrees = own_gradients._agrees
    monkeypatch.setattr(own_gradients, "_agrees", lambda *args: tried.append(args[1]) or agrees(*args))
    monkeypatch.setattr(own_gradients, "LARGEST_ELEMENTS", largest)
    graph = captured(f"{__file__}:swishing")
    assert [likeness[0].shape for likeness in tried] == [(4, 8), (2, 8)]
    assert [size.fixed for size in graph.free_sizes] == [""]


KINDS: list[Any] = []
for _factor in (1.0, 3.0):

    class Scaled(torch.autograd.Function):
        """Two of one name: the backward of the first is the gradient of the forward."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor, factor: float = _factor) -> Tensor:  # type: ignore[override]
            return 2 * factor * grad

    KINDS.append(Scaled)


class Summed(torch.autograd.Function):
    """Of one row the backward is the gradient of the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.clone()


class Alike(nn.Module):
    def __init__(self, named: bool) -> None:
        super().__init__()
        self.layer, self.named = nn.Linear(8, 8), named

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        first, second = (KINDS[0], KINDS[1]) if self.named else (Summed, Summed)
        return (first.apply(x[:1]).square().mean() + second.apply(x).square()).mean()


def alike(named: bool = True, batch: int = 4) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Alike(named), (torch.randn(batch, 8),)


@pytest.mark.parametrize("named", quick_at([True, False], 1))
def test_what_is_known_of_a_backward_holds_for_that_call_alone(named: bool) -> None:
    """Not for another Function of the same name, nor for other lengths."""
    spec, arguments = f"{__file__}:alike", {"named": named}
    graph = captured(spec, **arguments)
    plan = search(graph, HARDWARE, SearchRequest(Mesh.parse("dp=1"), strategy="dp"))
    program = lower(plan, graph)
    proof = check_files(make_case(spec, arguments, graph), program, emit(program, plan, graph))
    assert proof.passed, proof.failure


def captured(spec: str, **arguments: Any) -> Graph:
    return workflow.with_probed_sizes(workflow.read_graph(workflow.ModelRequest(spec, arguments)), spec, arguments)


def constants(graph: Graph, mesh: str, strategy: str = "best", **more: Any) -> dict[str, Any]:
    """What model_parallel.py says of its sizes."""
    plan = workflow.make_plan(graph, HARDWARE, SearchRequest(Mesh.parse(mesh), strategy=strategy, **more)).plan
    tree = ast.parse(emit(lower(plan, graph), plan, graph)["model_parallel.py"])
    named = {ast.unparse(node).partition(" = ")[0].partition(":")[0]: node for node in tree.body}
    nodes = {name: named[name].value for name in ("FREE_SIZES", "FIXED_SIZES")}
    return {name: ast.literal_eval(value) for name, value in nodes.items()}


def test_free_where_model_and_plan_follow_it() -> None:
    graph = captured(SPEC)
    assert graph.free_sizes[0] == FreeSize("batch", "", 4, 512)
    for mesh, strategy, unit in (("dp=2,tp=2", "fsdp-tp", 2), ("dp=4", "fsdp", 4), ("tp=2", "megatron", 1)):
        assert constants(graph, mesh, strategy)["FREE_SIZES"] == {
            "batch": (8, unit, 4, 512, {"ids": (0,), "labels": (0,)}),
            "sequence": (8, 1, 3, 64, {"ids": (1,), "labels": (1,)}),
        }
    plan = search(graph, HARDWARE, SearchRequest(Mesh.parse("dp=2,tp=2"), strategy="fsdp-tp"))
    files = emit(lower(plan, graph), plan, graph)
    for batch in (4, 6):
        other = rebatched(graph, batch)
        proof = check_files(make_case(SPEC, {"batch": batch}, other), lower(plan, other), files)
        assert proof.passed, proof.failure


@pytest.mark.slow
def test_labels_of_several_micro_batches_are_counted_of_another_batch_too() -> None:
    graph = captured(f"{__file__}:tagger")
    plan = search(graph, HARDWARE, SearchRequest(Mesh.parse("dp=2"), strategy="dp", step=StepRequest(micro_batches=2)))
    files = emit(lower(plan, graph), plan, graph)
    assert "LABEL_COUNTS: list[tuple[tuple[str, ...], int, str]] = []" not in files["model_parallel.py"]
    assert '"batch": (4, 2, 2, 256,' in files["model_parallel.py"]
    other = rebatched(graph, 6)
    proof = check_files(
        make_case(f"{__file__}:tagger", {"batch": 6}, other, micro_batches=2), lower(plan, other), files
    )
    assert proof.passed, proof.failure


def test_fixed_where_the_model_computes_numbers_of_it() -> None:
    """Run at another batch its package would divide by the batch that was planned."""
    (size,) = captured(LOSSES).free_sizes
    reason = size.fixed
    assert size.name == "batch" and "other of div at" in reason and "is 4, where 8 was captured" in reason
    values = constants(captured(LOSSES), "dp=2", "dp")
    assert values["FREE_SIZES"] == {} and values["FIXED_SIZES"] == {"batch": reason}
    for loss in ("half", "branch", "remainder"):  # of 4 samples it is another branch, of 512 it is not; of 513 % 4
        (size,) = captured(LOSSES, loss=loss).free_sizes
        assert "test_captured_batch.py:" in size.fixed


@pytest.mark.slow
def test_fixed_where_the_plan_or_the_graph_says_nothing_of_others(tmp_path: Path) -> None:
    graph = captured(SPEC)
    stages = constants(graph, "dp=1", step=StepRequest(micro_batches=2, stages=2))
    assert stages["FIXED_SIZES"] == {"batch": STAGES, "sequence": STAGES}
    uneven = captured(SPEC, batch=7)
    assert constants(uneven, "dp=2", "dp")["FIXED_SIZES"]["batch"] == CUTS.format("batch")
    graph_json.save(graph, tmp_path / "graph.json")
    loaded = captured(str(tmp_path / "graph.json"))
    assert loaded == graph  # what capture found goes with it
    untried = replace(graph, free_sizes=())
    assert graph_json.graph_hash(untried) == graph_json.graph_hash(graph)  # a plan of one is a plan of the other
    assert constants(untried, "dp=2", "dp")["FIXED_SIZES"] == {
        name: UNTRIED.format(name) for name in ("batch", "sequence")
    }


def test_inputs_with_values_are_not_copied_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 16)
    live = live_model(nn.Linear(16, 4), x, torch.zeros(8, 4), nn.functional.mse_loss)
    graph = live_captured(live, "fp32", "adamw", True)
    for most, times in ((1 << 26, 64), (2000, 12), (1, 2)):  # 160 elements are given
        monkeypatch.setattr(live_models, "LARGEST_ELEMENTS", most)
        assert recaptured(live, graph).free_sizes == (FreeSize("batch", "", 4, 8 * times),)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    _forget()


def _forget() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in MODULES]:
        del sys.modules[name]


@pytest.mark.slow
def test_it_trains_as_one_planned_for_those_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], alone: pytest.MonkeyPatch
) -> None:
    def started(batch: int, sequence: int, *options: str) -> tuple[int, str, str]:
        folder = tmp_path / f"{batch}-{sequence}"
        if not folder.exists():
            sizes = ["--with", f"batch={batch}", "--with", f"sequence={sequence}"]
            argv = ["plan", f"{__file__}:tagger", *sizes, "--mesh", "dp=1"]
            assert main([*argv, "--hardware", "cpu-local", "--out", str(folder)]) == 0
        _forget()
        train = load_package(folder).train
        alone.syspath_prepend(str(folder))
        alone.setattr(sys, "argv", ["train.py", "--backend", "gloo", "--steps", "3", *options])
        capsys.readouterr()
        code = train.main()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        said = capsys.readouterr()
        return code, "".join(x.partition(", gradient")[0] for x in said.out.splitlines(True)), said.err

    for sizes, options in (((6, 6), ["--batch-size", "6"]), ((2, 9), ["--batch-size", "2", "--sequence-length", "9"])):
        code, said, _ = started(4, 6, *options)
        assert code == 0 and said.count("step") == 3
        assert said == started(*sizes)[1] != started(4, 6)[1]
    for batch in ("1", "257"):
        code, _, stderr = started(4, 6, "--batch-size", batch)
        assert code == 2 and f"a batch of {batch}: expected from 2 to 256 (planned: 4)" in stderr
    code, _, stderr = started(4, 6, "--sequence-length", "49")
    assert code == 2 and "a sequence of 49: expected from 3 to 48 (planned: 6)" in stderr


@pytest.mark.parametrize("own", [8, 12, 31, 64])
def test_no_divisor_hides_what_a_second_length_tells(own: int) -> None:
    """It is the longest of those up to the most, or where there are no more up to the middle of both, that do."""
    shorter = max(3, own // 4 | 1)
    for batch, most in ((1, own), (4, own), (3, own + 1), (4, 2 * own)):
        lengths = range(own + 1, most + 1) if most > own else range(2, (shorter + own) // 2 + 1)
        apart = [length for length in lengths if length != shorter and gcd(own - shorter, length - own) == 1]
        best = [length for length in apart if gcd(length, own * batch) == 1]
        assert _second(own, shorter, most, batch) == max(best or apart)
