"""Names of modules, parameters, buffers and classes that are any text: through capture, plan, package and proof."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.emit.module_members import TAKEN
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture_model
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.search.fixed_styles import random_plan
from autoshard.verification.case import written
from autoshard.verification.ranks.loaded_package import load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from tests.hangs import HANGS
from tests.slow import quick_at

ROLES = 10  # how many names a model takes
KNOWN = (
    "in", "class", "global", "None", "self", "mesh", "path", "torch", "F", "nn", "local", "x", "target", "block", "i",
    "0", "1", "2", "00", "a b", " ", "_", "__w", "__init__", "training", "forward", "_modules", "float", "type", "keys",
    'a" if open("x") else "', "'''", '"""', "\\", "\n", "{path}", "{", "}", "%s", "#", "`", "|", "</script>", "\u202e",
    "\x00", "ﬁ", "é", "e\u0301", "名", "½", "a-b", "a:b", "a,b", "(", "dp", "tp", "random", "device", "first_random",
    "layers", "layers2", "weight", "bias", "Holder", "shard_parameter", "P", "S0 R",
)  # fmt: skip
FREE = [name for name in KNOWN if name not in dir(nn.ModuleDict())]  # what torch takes as names of members
TEXT = st.one_of(
    st.sampled_from(FREE),
    st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="."), min_size=1, max_size=8),
).filter(lambda name: not hasattr(nn.ModuleDict(), name))


class Block(nn.Module):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names
        self.register_parameter(names[0], nn.Parameter(torch.randn(4)))
        self.add_module(names[1], nn.Linear(4, 4))
        self.register_buffer(names[2], torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        scale, layer, shift = (getattr(self, name) for name in self.names[:3])
        return x + torch.tanh(layer(x * scale) + shift).relu().exp().tanh()


class Named(nn.Module):
    """Everything that has a name, at the root and below: parameters, an updated buffer, a tie, lists and dicts."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names
        self.register_parameter(names[0], nn.Parameter(torch.randn(4)))
        self.register_buffer(names[1], torch.ones(4))
        self.register_buffer(names[2], torch.ones(4), persistent=False)
        self.add_module(names[3], nn.ModuleList([Block(names[4:7]) for _ in range(2)]))
        self.add_module(names[4], nn.ModuleDict({name: nn.Linear(4, 4) for name in names[5:8]}))
        self.add_module(names[5], nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)]))
        self.add_module(names[6], nn.ParameterDict({name: nn.Parameter(torch.randn(4)) for name in names[7:9]}))
        self.add_module(names[7], nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
        tied = type(names[9], (nn.Linear,), {})(4, 4)
        tied.weight = getattr(self, names[7])[0].weight
        self.add_module(names[8], tied)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        first, mean, scale, blocks, layers, row, pairs, stack, tied = (getattr(self, name) for name in self.names[:9])
        x = x * first * scale
        mean.mul_(0.9).add_(x.detach().mean(0))
        for block in blocks:
            x = block(x)
        for layer in layers.values():
            x = layer(x)
        for scale in (*row, *(pairs[name] for name in self.names[7:9])):
            x = x * scale
        return nn.functional.mse_loss(tied(stack(x)), target)


def names_of(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*names, *(f"plain{i}" for i in range(ROLES)))))[:ROLES]


@pytest.mark.slow
@given(st.lists(TEXT, min_size=ROLES, max_size=ROLES, unique=True), st.sampled_from(["dp=2", "dp=2,tp=2"]))
@example([*FREE[:10]], "dp=2")
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_any_name(names: list[str], mesh: str) -> None:
    check(names, mesh)


@pytest.mark.parametrize("start", quick_at(range(0, len(FREE), ROLES), 4))
def test_known_names(start: int) -> None:
    check(names_of(*FREE[start : start + ROLES]), "if=2")


def check(names: Sequence[str], mesh: str) -> None:
    """The package computes the model's own loss and new buffers, from the original state dict and into it."""
    torch.manual_seed(0)
    model = Named(names)
    original = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = (torch.randn(4, 4), torch.randn(4, 4))
    graph = capture_model(model, inputs)
    plan = random_plan(PlanningContext(graph, Mesh.parse(mesh), load_hardware("cpu-local")), 1)
    expected = float(model(*inputs).detach())
    with written(emit(lower(plan, graph), plan, graph)) as folder:
        package = load_package(folder)

    def rank(mesh: object) -> tuple[float, dict[str, Tensor]]:
        parallel = package.model.build_model(mesh)
        for buffer in parallel.buffers():
            package.runtime.assign(buffer, dict(model.named_buffers())[package.runtime.sharding(buffer).name])
        package.runtime.load_full_state_dict(parallel, original)
        pairs = zip(package.model.INPUTS, inputs, strict=True)
        parts = [package.batches.local_part(name, x, mesh) for name, x in pairs]
        loss = parallel(*parts)
        return package.evaluation.whole_loss(loss, mesh), package.runtime.full_state_dict(parallel)

    results = run_lockstep(dict(Mesh.parse(mesh).axes), rank)
    assert all(abs(loss - expected) < 1e-4 * max(1.0, abs(expected)) for loss, _ in results)
    state = results[0][1]
    assert set(state) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.allclose(state[name], value, atol=1e-5), name


def test_no_member_hides_what_modules_have_themselves() -> None:
    """What torch gives them: libraries that other tests import add more."""
    code = "from torch import nn; print(*{*dir(nn.Module()), *dir(nn.ModuleDict())})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANGS)
    members = {name for name in done.stdout.split() if not name.startswith("__")}
    assert members <= TAKEN, sorted(members - TAKEN)
