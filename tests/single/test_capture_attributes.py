"""What a forward keeps in attributes from call to call: a cache where each call computes the same, else refused."""

from __future__ import annotations

import random
import tempfile

import pytest
import sympy.core.random
import torch
from torch import nn

from autoshard.errors import CaptureError
from autoshard.graph_capture.capture import capture_model

KEPT_WRONGLY = {
    "a product of a weight": lambda model, x: model.a.weight * 2,
    "one without a gradient": lambda model, x: (model.a.weight * 2).detach(),
    "what was drawn": lambda model, x: torch.rand(4, 4),
    "the first batch": lambda model, x: x.abs()[:, :4].clamp(max=1),
}


class Keeping(nn.Module):
    """In a list, in an attribute that is None before, or in one that there is not."""

    def __init__(self, kept: str, where: str = "list", grows: bool = False) -> None:
        super().__init__()
        self.a, self.what, self.where, self.grows = nn.Linear(4, 4), kept, where, grows
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


@pytest.mark.parametrize("where", ["list", "none", "nothing"])
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


@pytest.mark.parametrize("first", [True, False])
def test_a_mode_is_state_like_any_other(first: bool) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if first:
                self.norm.eval()
            made = self.norm(self.a(x)).square().mean()
            self.norm.eval()
            return made

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
            self.a.register_forward_hook(lambda module, given, made: self.seen.append(made))
            self.hooked = True
        self.seen.clear()
        made = self.a(x)
        return (made * sum(self.seen)).mean()


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
    handle = model.a.register_forward_hook(lambda module, given, made: [handle.remove(), made * 2][1])
    with pytest.raises(CaptureError, match="forward adds or removes forward hooks of a and depends on them"):
        capture_model(model, (torch.randn(4, 4),))


def test_what_tools_draw_while_a_forward_runs_is_not_the_forward_s() -> None:
    """sympy orders its questions at random as torch compares sizes; temporary files have random names."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for own in [own for own in vars(sympy.core.random).values() if isinstance(own, random.Random)]:
                own.random()
            with tempfile.TemporaryFile():
                return self.a(x).mean()

    tempfile.TemporaryFile().close()  # the names have a generator
    capture_model(Asks(), (torch.randn(4, 4),))


@pytest.mark.parametrize("differs", [False, True])
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
                self.kind, made = "full", nn.Linear(4, 4)
                made.weight, made.bias = self.a.weight, self.a.bias
                self.a = made
            return self.a(first).square().mean()

    if differs:
        with pytest.raises(CaptureError, match="changes its attribute kind"):
            capture_model(Switches(), (torch.randn(4, 4),))
    else:
        capture_model(Switches(), (torch.randn(4, 4),))
