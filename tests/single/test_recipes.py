"""What constructors compute: watched on meta, written as a package's initial.py, run, against a real build."""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from autoshard.emit.initial_file import _value, initial_file
from autoshard.errors import InvalidFileError
from autoshard.graph_capture.capture import capture, capture_model
from autoshard.graph_capture.constructor.initial_distributions import InitWatcher
from autoshard.graph_capture.constructor.recipes import recipes_of
from autoshard.graph_capture.load_model import load_model
from autoshard.ir import graph_json
from autoshard.ir.graph import Graph, Parameter, Recipe, RecipeCall
from tests.models import NAMES

RUNTIME = "autoshard.emit.runtime"


def rotary() -> Tensor:
    return 1.0 / (10000.0 ** (torch.arange(0, 16, 2, dtype=torch.int64).float() / 16))


def sinusoids() -> Tensor:
    """Two halves of one tensor, each set in place through a view."""
    rate = torch.exp(torch.arange(0, 8, 2) * (-math.log(10000.0) / 8))
    table, position = torch.zeros(1, 20, 8), torch.arange(20).unsqueeze(1)
    table[0, :, 0::2], table[0, :, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
    return table


def causal() -> Tensor:
    return torch.tril(torch.ones(12, 12, dtype=torch.bool)).view(1, 1, 12, 12)


def from_numpy() -> Tensor:
    return torch.from_numpy(np.outer(np.arange(40.0), np.arange(5.0))).float() * 2


def from_numbers() -> Tensor:
    return torch.tensor([[1.5, -2.0], [math.inf, 0.1]]) + 1


def window_index() -> Tensor:
    """Swin's: a grid, stacked, shifted in place."""
    grid = torch.stack(torch.meshgrid([torch.arange(4), torch.arange(4)], indexing="ij")).flatten(1)
    relative = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0).contiguous()
    relative[:, :, 0] += 3
    relative[:, :, 0] *= 7
    return relative.sum(-1)


def by_element() -> Tensor:
    """More calls than a recipe may have: its numbers are kept."""
    table = torch.zeros(30, 30)
    for row in range(30):
        for column in range(30):
            table[row, column] = math.sin(row * 0.1) * column
    return table


def aliased() -> Tensor:
    """The last change goes through another name, after the buffer was taken."""
    base = torch.arange(6.0)
    taken = base[2:]
    base.mul_(3).add_(1)
    return taken


def overwritten() -> Tensor:
    table = torch.empty(5)
    table.uniform_()
    table.copy_(torch.linspace(0, 1, 5))
    return table


def in_half() -> Tensor:
    """Made where another default dtype holds."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return torch.linspace(0, 1, 7)
    finally:
        torch.set_default_dtype(before)


def complex_table() -> Tensor:
    return torch.view_as_real(torch.polar(torch.ones(6), torch.arange(6.0)))


COMPUTED = [
    rotary, sinusoids, causal, from_numpy, from_numbers, window_index, by_element, aliased, overwritten, in_half,
    complex_table,
]  # fmt: skip


def recipe_of(make: Callable[[], Tensor], device: str = "meta", is_buffer: bool = True) -> tuple[Recipe, ...]:
    watcher = InitWatcher()
    with torch.device(device), watcher:
        value = make()
    stored = [Parameter("table", "model.table", init=watcher.init_of(value))]
    none: list[Parameter] = []
    return recipes_of({"model.table": value}, *((none, stored) if is_buffer else (stored, none)), watcher.calls)


def run(recipes: tuple[Recipe, ...], folder: Path, name: str = "initial") -> ModuleType:
    """initial.py as a package has it: written, and imported beside its runtime."""
    (folder / f"{name}.py").write_text(initial_file(recipes), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    hidden = sys.modules.get("runtime")
    sys.modules["runtime"] = importlib.import_module(RUNTIME)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.modules.pop("runtime")
        if hidden is not None:
            sys.modules["runtime"] = hidden
    return module


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("make", COMPUTED)
def test_the_package_makes_the_very_numbers(make: Callable[[], Tensor], device: str, tmp_path: Path) -> None:
    table = run(recipe_of(make, device), tmp_path).INITIAL["model.table"]()
    expected = make()
    assert table.dtype == expected.dtype and torch.equal(table, expected)


def test_a_copy_of_a_computed_tensor_is_the_tensor(tmp_path: Path) -> None:
    (recipe,) = recipe_of(overwritten)
    assert [call.target for call in recipe.calls] == ["aten.linspace.default"]


def test_what_is_drawn_is_drawn_from_the_seed_and_the_name(tmp_path: Path) -> None:
    def make() -> Tensor:
        value = torch.empty(9, 4)
        nn.init.normal_(value, std=0.5)
        value[0] = 0.0
        return nn.functional.normalize(value, dim=1) * 2

    from autoshard.emit import runtime

    drawn = run(recipe_of(make), tmp_path).INITIAL["model.table"]
    mesh = runtime.ParallelMesh({"tp": 1}, 0, lambda *_: None, torch.device("cpu"))  # type: ignore[arg-type, return-value]
    tables = [runtime.shard_buffer(name, (9, 4), "R", mesh) for name in ("a", "a", "b")]
    state = torch.random.get_rng_state()
    for table in tables:
        runtime.init_computed(table, drawn, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    first, same, other = tables
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert torch.equal(first[0], torch.zeros(4))
    assert torch.allclose(first[1:].norm(dim=1), torch.full((8,), 2.0))


def uninitialised() -> Tensor:
    table = torch.empty(4)
    table[:2] = 1.0
    return table


def too_large() -> Tensor:
    return torch.from_numpy(np.arange(2_000_000.0)).to("meta")


@pytest.mark.parametrize("make", [uninitialised, too_large])
def test_what_no_call_makes_has_no_recipe(make: Callable[[], Tensor]) -> None:
    assert recipe_of(make) == ()


def test_a_padding_row_stays_zero() -> None:
    def make() -> Tensor:
        embedding = nn.Embedding(9, 4, padding_idx=2)
        nn.init.normal_(embedding.weight, std=0.02)
        with torch.no_grad():
            embedding.weight[2].zero_()
        return embedding.weight

    (recipe,) = recipe_of(make, is_buffer=False)
    targets = [call.target.rpartition(".")[0] for call in recipe.calls]
    assert targets.count("aten.normal_") == 1 and targets.index("aten.zero_") > targets.index("aten.normal_")


class Tables(nn.Module):
    """Buffers that differ from layer to layer, one of them twice; one that a state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        for number in range(3):
            self.register_buffer(f"slope_{number}", torch.arange(6.0) / (1 + number % 2), persistent=number == 0)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight * self.slope_0 * self.slope_1 * self.slope_2).sum()


def captured(model: nn.Module) -> Graph:
    return capture_model(model, (torch.randn(2, 6),))


def test_a_model_that_was_built_gives_its_numbers(tmp_path: Path) -> None:
    model = Tables()
    model.slope_1 += 0.5
    initial = run(captured(model).recipes, tmp_path).INITIAL
    assert {name: make().tolist() for name, make in initial.items()} == {
        name: buffer.tolist() for name, buffer in model.named_buffers()
    }


def test_equal_recipes_are_one_and_the_file_of_the_graph_keeps_them() -> None:
    graph = captured(Tables())
    assert sorted(sorted(recipe.paths) for recipe in graph.recipes) == [["slope_0", "slope_2"], ["slope_1"]]
    assert graph_json.loads(graph_json.dumps(graph)) == graph


class Momentum(nn.Module):
    """A student, and teachers that begin as it; a weight whose norm is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.loaded, self.taken = nn.Linear(6, 6), nn.Linear(6, 6), nn.Embedding(6, 6)
        self.loaded.load_state_dict(self.student.state_dict())
        self.taken.weight.data = self.student.weight.data.clone()
        self.table = nn.Embedding(9, 6, padding_idx=2)
        self.early, self.later = copy.deepcopy(self.table), copy.deepcopy(self.student)
        with torch.no_grad():
            self.table.weight[3].zero_()
            self.later.weight.normal_(std=0.5)
        self.copied = copy.deepcopy(self.table)
        self.other, self.scaled = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scaled.weight.data = 2 * self.student.weight.data
        both = torch.randn(12, 6)
        self.upper, self.lower = nn.Parameter(both[:6].clone()), nn.Parameter(both[6:].clone())
        self.turned = nn.Parameter(self.student.weight.detach().t().contiguous())
        self.halved = nn.Embedding(9, 6, padding_idx=1)
        self.halved.weight.data.mul_(0.5)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.student(x) + self.loaded(x) + x @ self.taken.weight + self.other(x) + self.normed(x) + self.scaled(x)
        y = y + self.table.weight[:2] + self.copied.weight[:2] + self.early.weight[:2] + self.later(x)
        return (y + x @ (self.upper + self.lower + self.turned) + self.halved.weight[:2]).square().sum()


def momentum() -> tuple[nn.Module, tuple[Tensor]]:
    return Momentum(), (torch.randn(2, 6),)


def test_copies_of_random_numbers_start_as_copies(tmp_path: Path) -> None:
    from autoshard.emit import runtime

    graph = capture(f"{__file__}:momentum", {})
    mesh = runtime.ParallelMesh({"tp": 1}, 0, lambda *_: None, torch.device("cpu"))  # type: ignore[arg-type, return-value]
    holder = nn.Module()
    for number, one in enumerate(graph.parameters):
        shape = graph.tensor(one.tensor).shape
        holder.register_parameter(
            str(number), runtime.shard_parameter(one.path, shape, "R", mesh, ties=one.ties, init=one.init)
        )
    assert not runtime.init_parameters(holder, 3, run(graph.recipes, tmp_path).INITIAL)
    values = {one.path: x for one, x in zip(graph.parameters, holder.parameters(), strict=True)}
    first = values["student.weight"]
    assert torch.equal(values["loaded.weight"], first) and torch.equal(values["taken.weight"], first)
    assert torch.equal(values["copied.weight"], values["table.weight"]) and not values["table.weight"][2].any()
    assert not torch.equal(values["upper"], values["lower"]) and not torch.equal(values["turned"], first)
    assert not values["halved.weight"][1].any() and values["halved.weight"][2].all()
    for name in ("other", "later", "table", "early"):
        twins = [other for other, x in values.items() if torch.equal(x, values[f"{name}.weight"])]
        assert twins == [f"{name}.weight", *(["copied.weight"] if name == "table" else [])], twins
    assert not torch.equal(values["scaled.weight"], 2 * first)
    assert len(graph.assumed) == 1 and graph.assumed[0].startswith("early.weight and 1 more, which the constructor")


class Distilled(nn.Module):
    """A teacher that is copied from a model of the library, which initialises on meta later than the copy was made."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=9
        )
        self.student = BertModel(config, add_pooling_layer=False)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.student(ids)[0] - self.teacher(ids)[0] + self.student(ids)[0].square()).mean()


def distilled() -> tuple[nn.Module, tuple[Tensor]]:
    return Distilled(), (torch.randint(0, 9, (2, 4)),)


def test_a_copy_of_a_model_of_the_library_stays_one() -> None:
    inits = {one.path: one.init for one in capture(f"{__file__}:distilled", {}).parameters}
    random = [path for path, init in inits.items() if path.startswith("student.") and init[0] != "constant"]
    assert len(random) == 9 and "student.embeddings.word_embeddings.weight" in random
    for path in random:
        assert inits[path][-1] == inits[path.replace("student", "teacher")][-1] == path


@pytest.mark.parametrize(
    "call",
    [
        RecipeCall("os.system", ("ls",)),
        RecipeCall("aten.add.Tensor(0, 0) or print", ()),
        RecipeCall("aten.zeros.default", ((3,),), (("dtype=print(1), a", None),)),
        RecipeCall("aten.zeros.default", ("a b",)),
        RecipeCall("aten.zeros.default", ("torch.load('x')",)),
        RecipeCall("aten.relu.default", ("%0",)),
        RecipeCall("packed", ("torch.float32", (1,), '"""\nprint(1)\n"""')),
        RecipeCall("values", ("torch.float32", (1,), ("print(1)",))),
    ],
)
def test_a_damaged_recipe_brings_no_code(call: RecipeCall) -> None:
    graph = captured(Tables())
    bad = replace(graph, recipes=(replace(graph.recipes[0], calls=(call,)),))
    with pytest.raises(InvalidFileError, match="recipe of slope_0"):
        graph_json.loads(graph_json.dumps(bad))


def test_names_that_are_no_names_make_a_file_that_parses(tmp_path: Path) -> None:
    call = RecipeCall("aten.zeros.default", ((2,),))
    paths = ['a".b', "class", "x\ny", "torch", "é\\", "class.class"]
    module = run(tuple(Recipe((path,), (call,)) for path in paths), tmp_path)
    assert list(module.INITIAL) == paths and all(make().tolist() == [0, 0] for make in module.INITIAL.values())


@pytest.mark.parametrize("name", ["llama", "bert", "swin", "gemma3", "dlrm_bags"])
def test_buffers_of_the_library_on_meta_are_those_of_a_real_build(name: str, tmp_path: Path) -> None:
    watcher = InitWatcher()
    with watcher:
        model, _ = load_model(NAMES[name], {})
    buffers = dict(model.named_buffers())
    stored = [Parameter(path, path, init=watcher.init_of(buffer)) for path, buffer in buffers.items()]
    initial = run(recipes_of(buffers, [], stored, watcher.calls), tmp_path, f"initial_{name}").INITIAL
    real, _ = load_model(NAMES[name], {}, device="cpu")
    assert initial.keys() <= {path for path, _ in real.named_buffers()} and initial
    for path, buffer in real.named_buffers():
        if path in initial:
            assert torch.equal(initial[path](), buffer), path
        else:
            assert watcher.init_of(buffers[path]), path


@pytest.mark.parametrize("value", [(), (3,), (3, 4), ((1,), ()), (1.5, True, None), "text", float("inf")])
def test_arguments_are_written_as_python(value: object) -> None:
    assert eval(_value(value)) == value  # type: ignore[arg-type]


class Seeded(nn.Module):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(16, 8, generator=generator))
        self.start = nn.Parameter(torch.normal(0.0, 1.0, (8,), generator=generator))
        self.register_buffer("places", torch.randperm(8, generator=generator))
        self.register_buffer("low", torch.randint(2, 5, (8,), generator=generator))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x @ self.weight + self.start)[:, self.places] + self.low - y).square().mean()


def test_draws_from_a_generator_of_their_own_are_made_without_it(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    graph = capture_model(Seeded(), (torch.randn(12, 16, generator=generator), torch.rand(12, 8, generator=generator)))
    assert [(r.tensor, r.low, r.high) for r in graph.input_ranges] == [("y", 0.0, 1.0)]
    targets = {call.target for recipe in graph.recipes for call in recipe.calls}
    assert targets and not [target for target in targets if "generator" in target], targets
