"""What a forward keeps in attributes from call to call: a cache where each call computes the same, else refused."""

from __future__ import annotations

import collections
import itertools
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sympy.core.random
import torch
from torch import nn

from autoshard.emit import emit
from autoshard.errors import CaptureError
from autoshard.graph_capture.capture import capture, capture_model
from autoshard.graph_capture.tracing.python_state import random_sources
from autoshard.ir.graph import SAME
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.verification.case import check_files, make_case
from tests.forced import forced_plan
from tests.slow import quick_at, slow

KEPT_WRONGLY = {
    "a product of a weight": lambda model, x: model.a.weight * 2,
    "one without a gradient": lambda model, x: (model.a.weight * 2).detach(),
    "what was drawn": lambda model, x: torch.rand(4, 4),
    "the first batch": lambda model, x: x.abs()[:, :4].clamp(max=1),
}


class Keeping(nn.Module):
    """In a list, in an attribute that is None before, or in one that there is not."""

    def __init__(self, what: str, where: str = "list", grows: bool = False) -> None:
        super().__init__()
        self.a, self.what, self.where, self.grows = nn.Linear(4, 4), what, where, grows
        self.kept = list[torch.Tensor]()
        if where == "none":
            self.first: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "list":
            if not self.kept or self.grows:
                self.kept.append(KEPT_WRONGLY[self.what](self, x))
            return (self.a(x) @ self.kept[0]).square().mean()
        if getattr(self, "first", None) is None:
            self.first = KEPT_WRONGLY[self.what](self, x)
        return (self.a(x) @ self.first).square().mean()


@pytest.mark.parametrize("where", ["list", slow("none"), slow("nothing")])
@pytest.mark.parametrize("kept", KEPT_WRONGLY)
def test_what_changes_from_step_to_step_is_no_cache(kept: str, where: str) -> None:
    model = Keeping(kept, where)
    with pytest.raises(
        CaptureError, match=r"changes its attribute (kept|first) from (\(\)|None|nothing) to \(?a tensor"
    ):
        capture_model(model, (torch.randn(4, 4),))
    assert model.kept == [] and getattr(model, "first", None) is None


def test_what_is_kept_to_be_looked_at_is_no_state() -> None:
    """The last attention of a layer, an auxiliary loss: written in each call, read in none."""

    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.map = nn.Linear(4, 4), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.map = self.a(x).softmax(-1)
            self.total = self.map.sum()
            return self.map.square().mean()

    model = Shown()
    capture_model(model, (torch.randn(4, 4),))
    assert model.map is None and not hasattr(model, "total")


def test_a_cache_of_weights_is_one_for_inference() -> None:
    for where in ("list", "none", "nothing"):
        model = Keeping("a product of a weight", where)
        capture_model(model, (torch.randn(4, 4),), training=False)
        assert model.kept == [] and getattr(model, "first", None) is None
    with pytest.raises(CaptureError, match="changes its attribute kept"):
        capture_model(Keeping("a product of a weight", grows=True), (torch.randn(4, 4),), training=False)


@pytest.mark.parametrize("first", quick_at([True, False], 0))
def test_a_mode_is_state_like_any_other(first: bool) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if first:
                self.norm.eval()
            loss = self.norm(self.a(x)).square().mean()
            self.norm.eval()
            return loss

    if first:
        assert capture_model(Frozen(), (torch.randn(4, 4),)).loss
    else:
        with pytest.raises(CaptureError, match=r"changes its attribute norm.training from True to False"):
            capture_model(Frozen(), (torch.randn(4, 4),))


def test_a_list_of_tensors_beside_the_parameters_is_no_state() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.examples = nn.Linear(4, 4), [torch.randn(3, 4), torch.arange(3)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sum()

    assert capture_model(Remembers(), (torch.randn(3, 4),)).loss


class Hooking(nn.Module):
    """Registers its hooks in the first call, as transformers' models do that are asked for hidden states."""

    def __init__(self, in_each_call: bool = False) -> None:
        super().__init__()
        self.a, self.in_each_call, self.seen = nn.Linear(4, 4), in_each_call, list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_each_call or not getattr(self, "hooked", False):
            self.a.register_forward_hook(lambda module, inputs, output: self.seen.append(output))
            self.hooked = True
        self.seen.clear()
        output = self.a(x)
        return (output * sum(self.seen)).mean()


def test_hooks_of_the_first_call_belong_to_the_attribute_that_remembers_them() -> None:
    model, x = Hooking(), torch.randn(4, 4)
    graph = capture_model(model, (x,))
    assert [op.target for op in graph.ops].count("aten.linear") == 1
    assert not model.a._forward_hooks and not hasattr(model, "hooked") and model.seen == []
    model(x), model(x)
    assert len(model.seen) == 1, "what a trace registers is gone after it"


def test_hooks_that_grow_in_number_are_refused() -> None:
    with pytest.raises(CaptureError, match="forward changes its attribute seen from"):
        capture_model(Hooking(in_each_call=True), (torch.randn(4, 4),))


def test_a_hook_that_the_first_call_alone_runs_is_refused() -> None:
    model = Hooking()
    model.hooked = True
    handle = model.a.register_forward_hook(lambda module, inputs, output: [handle.remove(), output * 2][1])
    with pytest.raises(CaptureError, match="forward adds or removes forward hooks of a and depends on them"):
        capture_model(model, (torch.randn(4, 4),))


def test_what_tools_draw_while_a_forward_runs_is_not_the_forward_s() -> None:
    """sympy orders its questions at random as torch compares sizes; temporary files have random names."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for source in [source for source in vars(sympy.core.random).values() if isinstance(source, random.Random)]:
                source.random()
            with tempfile.TemporaryFile():
                return self.a(x).mean()

    tempfile.TemporaryFile().close()  # the names have a generator
    capture_model(Asks(), (torch.randn(4, 4),))


@pytest.mark.parametrize("differs", quick_at([False, True], 1))
def test_a_number_written_in_the_forward_is_the_same_in_each_call(differs: bool) -> None:
    """Each call of a trace has a constant of its own for it (transformers fills the first label so)."""

    class Switches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.kind = nn.Linear(4, 4), "sparse"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = x.clone()
            first[:, 0] = torch.tensor(3.0 if self.kind == "full" or not differs else 2.0)
            if self.kind == "sparse":
                self.kind, layer = "full", nn.Linear(4, 4)
                layer.weight, layer.bias = self.a.weight, self.a.bias
                self.a = layer
            return self.a(first).square().mean()

    if differs:
        with pytest.raises(CaptureError, match="changes its attribute kind"):
            capture_model(Switches(), (torch.randn(4, 4),))
    else:
        capture_model(Switches(), (torch.randn(4, 4),))


COUNTED = {"calls": 0}
HELD: dict[str, torch.Tensor] = {}
MEAN = torch.zeros(4)


def closure() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def of_a_global(model: Reads) -> float:
    COUNTED["calls"] += 1
    return COUNTED["calls"]


def of_the_class(model: Reads) -> float:
    Reads.calls += 1
    return Reads.calls


def of_an_object(model: Reads) -> float:
    model.object.calls += 1
    return float(model.object.calls)


def of_a_queue(model: Reads) -> float:
    model.queue.append(model.queue[-1] + 1)
    return model.queue[-1]


def in_place(model: Reads) -> torch.Tensor:
    return MEAN.add_(1)


READ: dict[str, Callable[[Reads], float | torch.Tensor]] = {
    "a global": of_a_global,
    "the class": of_the_class,
    "an object": of_an_object,
    "a queue": of_a_queue,
    "a closure": lambda model: model.count(),
    "an iterator": lambda model: next(model.iterator),
    "a clock": lambda model: time.perf_counter(),
    "a tensor that is no buffer": in_place,
}


class Reads(nn.Module):
    """State that no attribute of a module holds. `used`: whether the forward computes with it."""

    calls = 0

    def __init__(self, what: str, used: bool = True) -> None:
        super().__init__()
        self.a, self.what, self.used = nn.Linear(4, 4), what, used
        self.object, self.count, self.queue = SimpleNamespace(calls=0), closure(), collections.deque([0])
        self.iterator = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = READ[self.what](self)
        return (self.a(x) * (read if self.used else 1)).square().mean()


@pytest.mark.parametrize("what", quick_at(READ, 6))
def test_state_outside_of_attributes_is_refused(what: str) -> None:
    expected = r"computes something else when it is called again, at .*`return \(self.a\(x\)"
    if what == "a tensor that is no buffer":
        expected = "changes a tensor in place that is no buffer, at .*MEAN.add_"
    with pytest.raises(CaptureError, match=expected):
        capture_model(Reads(what), (torch.randn(4, 4),))


@pytest.mark.parametrize("what", [what for what in READ if what != "a tensor that is no buffer"])
def test_state_that_nothing_is_computed_with_is_none(what: str) -> None:
    assert capture_model(Reads(what, used=False), (torch.randn(4, 4),)).loss


class Caches(nn.Module):
    """In a global: the second call finds what the first computed."""

    def __init__(self, what: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.what = nn.Linear(4, 4), what
        HELD.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not HELD:
            HELD["it"] = self.what(self, x)
        return (self.a(x) @ HELD["it"]).square().mean()


@pytest.mark.parametrize("kept", quick_at(KEPT_WRONGLY, 0))
def test_a_cache_outside_of_attributes_of_what_changes_is_refused(kept: str) -> None:
    with pytest.raises(CaptureError, match="computes something else when it is called again"):
        capture_model(Caches(KEPT_WRONGLY[kept]), (torch.randn(4, 4),))


def test_a_cache_outside_of_attributes_of_what_stays_is_no_state() -> None:
    graph = capture_model(Caches(lambda model, x: torch.arange(4.0).outer(torch.ones(4))), (torch.randn(4, 4),))
    assert "aten.arange" in [op.target for op in graph.ops]


class Closes(nn.Module):
    """Its function keeps the tensor of the constructor, not the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, scale = nn.Linear(4, 4), torch.arange(4.0)
        self.register_buffer("scale", scale)
        self.scaled = lambda x: x * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.a(x)).mean()


def closes() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Closes(), (torch.randn(4, 4),)


def test_a_buffer_that_a_closure_holds_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"that no module holds at .*lambda x: x \* scale"):
        capture(f"{__file__}:closes", {})


def test_a_vmap_that_a_trace_loses_is_named() -> None:
    class Maps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.vmap(self.a, out_dims=1)(x).mean()

    with pytest.raises(CaptureError, match="with out_dims"):
        capture_model(Maps(), (torch.randn(4, 4),))


def test_results_that_take_turns_are_state() -> None:
    """Both calls compute the same, and return another of it."""
    turns = itertools.cycle([0, 1])

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a(x).mean(), self.b(x).mean())[next(turns)]

    with pytest.raises(CaptureError, match="called again, at what Turns returns"):
        capture_model(Turns(), (torch.randn(4, 4),))


@pytest.mark.parametrize("within", ["", "another", "a dict"])
@pytest.mark.parametrize("caches", [False, True])
def test_a_dataclass_that_torch_does_not_know_is_no_state(within: str, caches: bool) -> None:
    """The first capture of a process is the first that sees it."""

    @dataclass
    class Inner:
        loss: torch.Tensor
        size: int = 0

        def __post_init__(self) -> None:
            self.size = self.loss.numel() + 6

    @dataclass
    class Outer:
        inner: Inner

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            if caches and not hasattr(self, "mask"):
                self.mask = torch.ones(4, 4).tril()
            output = self.a(x) @ self.mask if caches else self.a(x)
            loss = Inner(output.square().mean())
            return {"": loss, "another": Outer(loss), "a dict": {"x": loss}}[within]

    graph = capture_model(Returns(), (torch.randn(4, 4),))
    assert graph.loss and graph.evaluation == SAME


@pytest.mark.parametrize("value", [float("nan"), np.float32("nan")])
def test_nan_is_the_same_in_each_call_and_mode(value: float) -> None:
    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x).masked_fill(x > 3, value * 1).nanmean()

    assert capture_model(Fills(), (torch.randn(4, 4),)).evaluation == SAME


GENERATORS = [random.Random(0)]


class Holder:
    """An object of a user's class that holds a generator."""

    def __init__(self, held: object) -> None:
        self.held = held


def test_generators_are_found_where_the_model_s_code_reaches_them() -> None:
    held, closed, numpy = random.Random(1), random.Random(2), np.random.default_rng(3)

    class Draws(nn.Module):
        shared = ({"numpy": numpy},)

        def __init__(self) -> None:
            super().__init__()
            self.config, self.call = Holder({"own": held}), lambda: closed.random()

    ids = {id(source) for source in random_sources(nn.Sequential(Draws()))}
    assert {id(each) for each in (*GENERATORS, held, closed, numpy)} <= ids
    assert id(random.random.__self__) in ids and id(np.random.random.__self__) in ids
    assert not any(id(x) in ids for x in vars(sympy.core.random).values())


def test_a_file_whose_model_returns_a_dataclass_is_verified(tmp_path: Path) -> None:
    """Each time that it is loaded, its class is another."""
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\nimport torch\n\n\n@dataclass\nclass Out:\n    loss: torch.Tensor\n\n\n"
        "class Model(torch.nn.Linear):\n    def forward(self, x):\n"
        "        return Out(super().forward(x).square().mean())\n\n\n"
        "def build():\n    return Model(4, 4), (torch.randn(8, 4),)\n"
    )
    spec = f"{tmp_path / 'own.py'}:build"
    graph = capture(spec, {})
    case = make_case(spec, {}, graph)
    plan = forced_plan(graph, Mesh.parse("dp=2"), lambda op, strategy: True, 1)
    program = lower(plan, graph)
    assert check_files(case, program, emit(program, plan, graph)).passed
