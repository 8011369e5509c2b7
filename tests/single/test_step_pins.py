"""Pins in a search of whole steps: kept by every split, against all plans simulated; what no mesh can keep is said."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn, randn

import autoshard
from autoshard.cli.commands import main
from autoshard.constraints import shard_counts
from autoshard.constraints.apply_pins import pinned
from autoshard.constraints.step_request import StepRequest
from autoshard.errors import UsageError
from autoshard.formulation.formulate import formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir import graph_json
from autoshard.ir.graph import CAST, Graph, Op
from autoshard.ir.layout import REPLICATE, Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.plan_json import load
from autoshard.program.lower import chosen_strategies
from autoshard.replay.command_line import command
from autoshard.rules.operators import constants
from autoshard.rules.resize.rebatch import batch_dims, rebatched
from autoshard.search.build_plan import Origin
from autoshard.search.search_request import SearchRequest
from autoshard.simulation.step_timeline import simulate_step
from autoshard.verification import verify_package
from autoshard.whole_step_search.blocks.block_line import block_line, shortened
from autoshard.whole_step_search.blocks.block_pins import PinRefused, step_pins
from autoshard.whole_step_search.blocks.block_splits import block_splits
from autoshard.whole_step_search.blocks.stage_axes import in_space, same_inside
from autoshard.whole_step_search.config_space import parallel_configs
from autoshard.whole_step_search.front_store import FrontStore, measured_replicas
from autoshard.whole_step_search.joint_plan import joint_plan, step_seconds
from autoshard.whole_step_search.joint_search import joint_search
from autoshard.whole_step_search.solved_steps import JointResult
from autoshard.whole_step_search.step_costs import StepProblem
from autoshard.whole_step_search.step_request_space import searched_step
from tests.single.test_joint_search import GPT2, gpt2, hardware, space, wide
from tests.slow import quick, quick_at, slow
from tests.stage_brute_force import every_plan

MODELS = Path(__file__).parents[1] / "models"
ONE = "transformer.h.1.mlp.c_fc=Shard(2)@tp"  # of three layers
ALL = "*.mlp.c_fc=Shard(2)@tp"


def asked(*pins: str, devices: int = 4, **step: Any) -> SearchRequest:
    return SearchRequest(devices=devices, pins=pins, step=StepRequest(**({"global_batch": 16} | step)))


def kinds(graph: Graph, *pins: str) -> list[int]:
    return [block.kind for block in block_line(graph, step_pins(graph, pins).marks(graph)).blocks]


@pytest.mark.slow
def test_a_pin_of_one_layer_tells_it_from_the_others() -> None:
    """And the layer behind it, where what it gives comes in otherwise."""
    graph = gpt2(6)
    assert kinds(graph) == kinds(graph, ALL) == kinds(graph, "input_ids=Shard(0)@dp") == [0, *[1] * 6, 2]
    assert kinds(graph, "*.weight=Shard(0)@dp", "lm_head=Shard(2)@tp") == [0, *[1] * 6, 2]
    assert kinds(graph, "transformer.h.2.mlp.c_fc=Shard(2)@tp") == [0, 1, 1, 2, 3, 1, 1, 4]
    assert kinds(graph, "transformer.h.2.ln_1.weight=Shard(0)@dp") == [0, 1, 1, 2, 3, 1, 1, 4]
    assert kinds(graph, "transformer.h.[23].mlp.c_fc=Shard(2)@tp") == [0, 1, 1, 2, 2, 3, 1, 4]
    last = graph.by_op["linear_in_out_11"]  # the second of layer 2: who takes its result is in layer 3, too
    assert last.module == "transformer.h.2.mlp.c_proj"
    assert kinds(graph, "transformer.h.2.mlp.c_proj=(None, None, None) -> ((2, 1, 1),)") == [0, 1, 1, 2, 3, 1, 1, 4]
    assert kinds(graph, *(f"transformer.h.{n}.mlp.c_fc=Shard(2)@tp" for n in range(6))) == [0, *[1] * 6, 2]


def test_a_module_is_what_its_code_does() -> None:
    """Not the casts that mixed precision puts there, of its weight, which has other dims, and of what comes in."""
    module = "transformer.h.0.mlp.c_fc"
    inside = [op.name for op in gpt2(3).ops if op.module == module]
    (pin,) = step_pins(gpt2(3), (f"{module}=Shard(2)@tp",)).names
    assert pin == (("op", own_op(gpt2(3), module).name),) and len(inside) == 4
    cast = next(name for name in inside if "weight" in name)
    assert step_pins(gpt2(3), (f"{cast}=Shard(1)@tp",)).names == ((("op", cast),),)


@pytest.mark.slow
def test_a_product_with_a_bias_is_cut_by_rows() -> None:
    """A bias that one device adds is no weight that others gather."""
    small = rebatched(shortened(block_line(wide())).graph, 2)
    for split in block_splits(small, Mesh.parse("tp=4"), hardware()):
        if split.name == "Megatron-SP":
            module = "transformer.h.1.mlp.c_proj"
            assert cuts(split.plan, small, module) == ((1, 1, 4), (4, 1))
            assert str(chosen_strategies(split.plan, small)[own_op(small, module).name].results[0]) == "P"
            return
    pytest.fail("no split of that style")


PINS = [
    ("*.mlp.c_fc=Shard(2)@tp",),
    ("*.mlp.c_fc=Shard(0)@dp,Shard(1)@tp",),
    ("*.mlp.c_fc=Replicate@dp",),
    ("*.mlp.c_fc=n@tp",),
    ("*.mlp.c_fc=i0@dp,k@tp",),
    ("*.mlp.c_fc=S0@dp",),
    ("*.mlp.c_proj=((2, 1, 2), (2, 1), None)",),
    ("*.mlp.c_proj=((4, 1, 1), None, None)",),
    ("*.mlp.c_proj=(None, (1, 2), None)", "*.mlp.c_proj=Shard(0)@dp"),
    ("transformer.h.1.mlp.c_proj=((2, 1, 2), (2, 1), None)",),
    ("op:cross_entropy_loss=Partial@dp",),
    ("lm_head=Shard(2)@tp",),
    ("transformer.wte=Partial@tp",),
]


@pytest.mark.parametrize("pins", PINS, ids=str)
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", slow("dp=4,tp=1"), slow("dp=1,tp=4"), "dp=1,tp=2"])
def test_a_strategy_of_a_replica_stays_where_one_of_the_whole_mesh_keeps_the_pins(
    pins: tuple[str, ...], mesh: str
) -> None:
    """The oracle formulates the whole mesh, pins that as any plan is, and looks up each strategy of a replica's own
    formulation among what is left."""
    short = shortened(block_line(gpt2(3), step_pins(gpt2(3), pins).marks(gpt2(3)))).graph
    whole = Mesh.parse(mesh)
    replicas, inner = whole.sizes[0], Mesh(whole.axes[1:])
    small, wide = rebatched(short, 2), rebatched(short, 2 * replicas)
    batch = batch_dims(short) if replicas > 1 else {}
    read_pins, around = step_pins(gpt2(3), pins), PlanningContext(wide, whole, hardware())
    try:
        left = dict(read_pins.left(replace(around, graph=small, mesh=inner), around, batch, False).ops)
    except PinRefused:
        left = {}
    try:
        fixed = pinned(formulate(around), read_pins.on(whole)).formulation
    except UsageError:
        assert not left
        return
    inside = formulate(PlanningContext(small, inner, hardware()))
    expected = {}
    for site, there in zip(inside.sites, fixed.sites, strict=True):
        if ("op", site.name) in read_pins.everything:
            op = wide.by_op[site.name]
            allowed = [s for s in there.strategies if replicas == 1 or in_space(op, s, batch)]
            expected[site.name] = {
                s for s in site.strategies if any(inner.size == 1 or same_inside(f, s) for f in allowed)
            }
    assert left == expected or (not left and not all(expected.values()))


def own_op(graph: Graph, module: str) -> Op:
    """The one that is no cast."""
    (op,) = [op for op in graph.ops if op.module == module and op.target != CAST]
    return op


def does(plan: Plan, graph: Graph, module: str, axis: str, dim: int) -> bool:
    """Is the result of what runs in a module cut so?"""
    op = own_op(graph, module)
    placement = chosen_strategies(plan, graph)[op.name].results[0].placements[plan.mesh.index(axis)]
    return isinstance(placement, Shard) and placement.dim == dim


@pytest.mark.parametrize("pin", [slow(ONE), ALL, slow("transformer.h.1.mlp.c_proj=((2, 1, 2), (2, 1), None)")])
def test_the_searched_step_is_the_best_of_all_that_keep_the_pin(pin: str) -> None:
    """Every outer choice on which the pin can be kept, every split, every cut and every point simulated."""
    graph = gpt2(3)
    step_space = space(graph, 4, 8, stages=(1, 2), tensor=(1, 2), micro_batch=(2,), zero=(0, 1))
    pins = step_pins(graph, (pin,))
    line = block_line(graph, pins.marks(graph))
    result = joint_search(graph, hardware(), step_space, 1e15, pins=pins)
    free = joint_search(graph, hardware(), step_space, 1e15)
    choices = list(parallel_configs(step_space, hardware()))
    store, numbers = (
        FrontStore(line, hardware(), pins, replicas=measured_replicas(choices)),
        [b.kind for b in line.blocks],
    )
    possible = [choice for choice in choices if choice.tensor == 2 and ("((" not in pin or choice.replicas == 2)]
    for choice in choices:
        if choice not in possible:
            with pytest.raises(PinRefused):
                store.splits(choice)
    named = {block.kind for block in line.blocks if block.module}
    keeps = tuple(step_space.keeps if kind in named else ("all",) for kind in range(max(numbers) + 1))
    best = math.inf
    for choice in possible:
        for split in store.splits(choice):
            for layer in range(3) if pin == ALL else (1,):
                module = f"transformer.h.{layer}.mlp.{'c_proj' if '((' in pin else 'c_fc'}"
                if "((" not in pin:
                    assert does(split.split.plan, split.split.graph, module, "tp", 2), split.split.name
                else:
                    assert cuts(split.split.plan, split.split.graph, module) == ((1, 1, 2), (2, 1)), split.split.name
            sharded = store.sharded(split) if choice.zero else ()
            problem = StepProblem(choice, tuple(numbers), split.costs, keeps, hardware(), 1e15, None, sharded)
            steps = (simulate_step(problem.step_costs(plan)) for plan in every_plan(problem.stage_problem))
            best = min(best, min(step.step_seconds for step in steps))
    assert best * (1 - 1e-9) <= result.best.seconds <= 1.005 * best
    assert result.bound <= best * (1 + 1e-9)
    assert free.best.seconds < result.best.seconds and result.pins.texts == (pin,)
    left_out = {reason: count for reason, count in result.undivided if pin in reason}
    assert sum(left_out.values()) == len(choices) - len(possible) and len(left_out) == 1


def cuts(plan: Plan, graph: Graph, module: str) -> tuple[Any, ...]:
    """Of the first two operands of what runs in a module."""
    op = own_op(graph, module)
    shapes = shard_counts.operand_shapes(graph, op)
    return shard_counts.of_operands(chosen_strategies(plan, graph)[op.name], shapes, plan.mesh)[:2]


SIZES: dict[str, Any] = {"n_layer": 3, "n_embd": 64, "n_head": 4, "sequence": 32, "vocabulary": 96, "batch": 4}


@cache
def tiny() -> Graph:
    return capture(str(GPT2), SIZES)


def found(*pins: str, devices: int = 4, **step: Any) -> tuple[JointResult, Graph, Plan]:
    result = searched_step(tiny(), hardware(), asked(*pins, devices=devices, **step))
    return result, *joint_plan(result, hardware(), Origin("model"))


@pytest.mark.slow
def test_how_a_weight_is_stored() -> None:
    """Along dp a shard is one of ZeRO, a whole weight none of it; inside a replica as it is used, or in shards."""
    weight = "transformer.h.1.mlp.c_fc.weight"

    def stored(plan: Plan, path: str = weight) -> str:
        return next(str(parameter.layout) for parameter in plan.parameters if parameter.path == path)

    result, _, plan = found(f"{weight}=Shard(1)@dp", zero="0,1,3", micro_batch=1)
    assert result.best.problem.choice.zero and stored(plan).startswith("S1")
    assert any("without ZeRO they are whole over dp" in reason for reason, _ in result.undivided)
    result, _, plan = found(f"{weight}=Replicate@dp", zero="0,1,3", micro_batch=1)
    choice = result.best.problem.choice
    assert not (choice.zero and choice.replicas > 1) and stored(plan)[0] == "R"
    assert any("ZeRO has parameters in shards over dp" in reason for reason, _ in result.undivided)
    result, graph, plan = found(f"{weight}=Shard(1)@tp", zero=1, stages=1)
    assert stored(plan).split()[1] == "S1" and (stored(plan)[0] != "R" or plan.mesh.sizes[0] == 1)
    result, graph, plan = found(f"{weight}=Shard(1)@tp", zero=0, stages=1)
    assert does(plan, graph, "transformer.h.1.mlp.c_fc", "tp", 2)  # stored as it is used
    norm = "transformer.h.1.ln_1.weight"
    for how, there in (("Shard(0)@tp", "S0"), ("Replicate@tp", "R")):
        result, _, plan = found(f"{norm}={how}", f"{weight}=Shard(1)@tp", zero=3, stages=1)
        assert stored(plan, norm).split()[1] == there, how
    _, _, plan = found(f"{weight}=((1, 4),)", zero="0,1", stages=1)
    assert sorted(stored(plan).split()) in (["R", "S1"], ["S1", "S1"])


@pytest.mark.slow
def test_the_rest_and_the_choices_outside_are_searched_under_the_pins() -> None:
    pins = ("lm_head=Shard(2)@tp", "transformer.wte=Partial@tp", "input_ids=Shard(0)@dp")
    result, graph, plan = found(*pins, stages="1,2")
    assert result.best.problem.choice.replicas > 1 < result.best.problem.choice.tensor
    (table,) = [op for op in graph.ops if op.module == "transformer.wte"]
    assert str(chosen_strategies(plan, graph)[table.name].results[0].placements[1]) == "P"
    (head,) = [op for op in graph.ops if op.module == "lm_head" and op.target == "aten.linear"]
    assert str(chosen_strategies(plan, graph)[head.name].results[0].placements[1]) == "S2"
    deciders = {plan_op.op: plan_op.decided_by for plan_op in plan.ops}
    assert [name for name, by in deciders.items() if by == "pin"] == [
        op.name for op in graph.ops if op.module in ("lm_head", "transformer.wte")
    ]
    assert plan.search.pins == pins and "--pin lm_head=Shard(2)@tp" in command(plan).replace("'", "")


@pytest.mark.slow
def test_every_level_keeps_the_pins() -> None:
    for level in (0, 1):
        result = searched_step(tiny(), hardware(), replace(asked(ONE, stages="1,2"), level=level))
        for candidate in (result.best, *result.others):
            assert candidate.split is not None and does(
                candidate.split.plan, candidate.split.graph, "transformer.h.1.mlp.c_fc", "tp", 2
            )


@pytest.mark.slow
def test_blocks_of_other_strategies_cost_what_their_program_takes() -> None:
    """The layer behind the pinned one takes in what that gives."""
    graph = wide()
    pin = "transformer.h.1.mlp.c_proj=Shard(1)@tp"
    step_space = space(graph, 4, 16, micro_batch=(2,), stages=(1,), tensor=(2,), zero=(0, 3), keeps=("all",))
    result = joint_search(graph, hardware(), step_space, 8e10, pins=step_pins(graph, (pin,)))
    for each in (result.best, *result.others):
        _, plan = joint_plan(replace(result, best=each), hardware(), Origin("gpt2"))
        assert step_seconds(plan) == pytest.approx(each.seconds, rel=0.04)


STYLES = {"dp": (0, ""), "fsdp": (3, ""), "megatron": (0, "R"), "megatron-sp": (0, "S1"), "fsdp-tp": (3, "")}


@pytest.mark.parametrize("style", quick(STYLES, ("megatron-sp",)))
def test_styles_hold_in_every_split(style: str) -> None:
    """Of all that no pin decides."""
    (zero, norm), few = STYLES[style], {"stages": "1,2", "micro_batch": "2,4", "virtual_stages": 1}
    pin = "transformer.h.1.mlp.c_fc=Shard(0)@tp"
    for pins in ((), (pin,)) if "t" in style else ((),):
        result = searched_step(tiny(), hardware(), replace(asked(*pins, **few), strategy=style))
        for candidate in (result.best, *result.others):
            choice, split = candidate.problem.choice, candidate.split
            assert split is not None and choice.zero == zero and (choice.tensor == 1 or "t" in style)
            if choice.tensor == 1:
                continue
            chosen = chosen_strategies(split.plan, split.graph)
            cut = {
                name: str(chosen[own_op(split.graph, f"transformer.h.1.{name}").name].results[0])
                for name in ("mlp.c_fc", "mlp.c_proj", "ln_1")
            }
            assert cut["mlp.c_fc"] == ("S0" if pins else "S2") and cut["mlp.c_proj"] == "P"
            assert cut["ln_1"] in ((norm,) if norm else ("R", "S1"))
    assert searched_step(tiny(), hardware(), asked(**few)).best.seconds <= result.best.seconds


def test_a_style_that_stores_weights_otherwise_than_asked_is_refused() -> None:
    with pytest.raises(
        UsageError, match="--strategy fsdp stores weights in shards over replicas, which --zero 1 does not"
    ):
        searched_step(tiny(), hardware(), replace(asked(zero=1), strategy="fsdp"))


@pytest.mark.slow
def test_nothing_is_exchanged_where_that_is_forbidden(tmp_path: Path) -> None:
    out, replanned = tmp_path / "out", tmp_path / "again"
    said = ["plan", str(GPT2), "--with", "n_layer=2", "n_embd=64", "n_head=4", "sequence=32", "vocabulary=96"]
    said += [
        "--devices",
        "4",
        "--global-batch",
        "16",
        "--hardware",
        "a100-80g-sxm",
        "--stages",
        "1",
        "--micro-batch",
        "2",
    ]
    said += ["--stages", "1", "--micro-batch", "2", "--strategy", "fsdp-tp", "--no-all-to-all"]
    assert main([*said, "--out", str(out)]) == 0
    plan = load(out / "plan.json")
    steps = [step for move in plan.redistributions for step in move.steps]
    assert steps and not {"exchange", "all_to_all"} & {kind for step in steps for kind in (step.forward, step.backward)}
    assert "--no-all-to-all" in command(plan) and "--strategy fsdp-tp" in command(plan)
    assert main([*shlex.split(command(plan))[1:], "--out", str(replanned)]) == 0
    other = load(replanned / "plan.json")
    assert (other.ops, other.parameters, other.step) == (plan.ops, plan.parameters, plan.step)


class Told(nn.Module):
    """Its first layer says how it is cut, and its last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = autoshard.operator(self.layers[0], ((2, 1), (2, 1)))(x)
        for layer in self.layers[1:]:
            x = layer(x).tanh()
        return autoshard.operator(self.head, "Shard(0)@dp,Shard(1)@tp")(x).square().mean()


def told() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Told(), (randn(8, 16),)


def test_what_the_models_own_code_says_is_kept() -> None:
    graph = capture(f"{__file__}:told", {})
    result = searched_step(graph, hardware(), asked(stages="1,2"))
    choice = result.best.problem.choice
    assert (choice.replicas, choice.tensor) in ((2, 2), (2, 1), (1, 2)) and choice.tensor > 1 < choice.replicas
    carried, plan = joint_plan(result, hardware(), Origin("model"))
    assert cuts(plan, carried, "layers.0") == ((2, 1), (2, 1)) and does(plan, carried, "head", "tp", 1)


@pytest.mark.parametrize(
    ("pin", "words", "hint"),
    quick_at([
        ("*.mlp.c_fc=Shard(2)@inner", "unknown mesh axis 'inner' .* the mesh has dp, cp, ep, tp", "Shard(2)@tp"),
        ("*.mlp.c_fc=Shard(1)@cp", "unknown mesh axis 'cp' .* the mesh dp=2,tp=2 has dp, tp", "--context-parallel"),
        ("*.mlp.c_fc=Shard(3)@tp", "offers no strategy with .* on dp=2,tp=2 .it has 3 dims", "nearest offered"),
        ("*.mlp.c_fc=Shard(1)@dp", "offers no strategy with .* on dp=2,tp=2", "nearest offered: Shard(0)@dp"),
        ("nothing=Shard(1)@dp", "no parameter, input, operator or module is called 'nothing'", ""),
        ("transformer.wte.weight=host", "in the memory of hosts are not offered", "--mesh"),
        ("*.mlp.c_fc=((3, 1, 1), None, None)", "3 shards are no product of axis sizes", "nearest offered"),
    ], 0, 1, 4, 5),
)  # fmt: skip
def test_what_no_mesh_can_keep_is_refused_with_its_reason(pin: str, words: str, hint: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        searched_step(tiny(), hardware(), asked(pin, zero=0))
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ((ALL, "transformer.h.1.mlp.c_fc=Shard(1)@tp"), "offers no strategy with"),
        (("lm_head=Shard(2)@tp", "transformer.wte=Shard(2)@tp"), r"on tp=\d no plan keeps them in which weights are"),
    ],
)
def test_pins_that_contradict_each_other_are_refused(pins: tuple[str, ...], words: str) -> None:
    """The second pair asks for a tied weight by rows and by columns."""
    with pytest.raises(UsageError, match=words):
        searched_step(tiny(), hardware(), asked(*pins, zero=0, stages="1,2"))


@pytest.mark.parametrize(
    ("model", "more"),
    [
        pytest.param(f"{MODELS / 'decoders.py'}:gpt2", ["--stages", "1"], marks=pytest.mark.slow),
        pytest.param(f"{MODELS / 'decoders.py'}:llama", ["--stages", "1"], marks=pytest.mark.slow),
        pytest.param(f"{MODELS / 'decoders.py'}:gpt2", ["--stages", "2"], marks=pytest.mark.slow),
        pytest.param(f"{MODELS / 'decoders.py'}:llama", ["--stages", "2"], marks=pytest.mark.slow),
    ],
)
def test_the_package_of_a_pinned_step_is_verified(model: str, more: list[str], tmp_path: Path) -> None:
    """One layer pinned by the command, another by a file; the command that makes the plan again makes this one."""
    names = {
        "gpt2": ("model.transformer.h.1.mlp.c_fc", "model.transformer.h.2"),
        "llama": ("model.model.layers.1.mlp.up_proj", "model.model.layers.2"),
    }
    first, second = names[model.rpartition(":")[2]]
    file = tmp_path / "pins.toml"
    file.write_text(f'"{second}.*" = "Replicate@tp"\n', encoding="utf-8")
    said = ["plan", model, "--with", "layers=4", "--devices", "4", "--global-batch", "16", "--micro-batch", "2"]
    said += ["--hardware", "a100-80g-sxm", *more, "--recompute", "none", "--zero", "0,3"]
    out, replanned = tmp_path / "out", tmp_path / "again"
    assert main([*said, "--pin", f"{first}=Shard(2)@tp", "--pins", str(file), "--out", str(out)]) == 0
    plan = load(out / "plan.json")
    graph = graph_json.loads((out / "graph.json").read_text())
    assert does(plan, graph, first, "tp", 2) and plan.mesh.axis_size("tp") > 1
    chosen = chosen_strategies(plan, graph)
    fixed = constants(graph)
    second_ops = [op for op in graph.ops if op.module.startswith(f"{second}.") and not fixed.issuperset(op.results)]
    inside = [chosen[op.name].results[0] for op in second_ops]
    assert inside and all(layout.placements[-1] == REPLICATE for layout in inside)
    assert main([*shlex.split(command(plan))[1:], "--out", str(replanned)]) == 0
    other = load(replanned / "plan.json")
    assert (other.ops, other.parameters, other.step) == (plan.ops, plan.parameters, plan.step)
    proof = verify_package(out, backend="gloo" if "2" in more else "lockstep")
    assert proof.passed and not proof.reduced, proof.failure
