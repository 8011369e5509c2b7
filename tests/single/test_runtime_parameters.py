"""Parameters, gradients after backward, and weights gathered for one use, in lock-step against one device."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoshard.emit import runtime
from autoshard.emit.runtime import ParallelMesh
from autoshard.verification.ranks.lockstep import LockstepError, run_lockstep

FLOAT64 = torch.float64


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT64)


class Toy(nn.Module):
    """A blocked weight (3 x 4 x 2, 5), a replicated bias, a nested uneven one with a tie, and a buffer."""

    def __init__(self, mesh: ParallelMesh, split: str = "R S1") -> None:
        super().__init__()
        make = runtime.shard_parameter
        self.qkv = make("attn.qkv", (24, 5), split, mesh, split_shape=(3, 4, 2, 5), dtype=FLOAT64)
        self.bias = make("attn.bias", (5,), "R R", mesh, dtype=FLOAT64)
        self.table = make("wte", (11, 3), "S0 S0", mesh, dtype=FLOAT64, ties=("head",))
        self.register_buffer("mean", runtime.shard_buffer("norm.mean", (7,), "R S0", mesh, dtype=FLOAT64))


STATE = {
    "attn.qkv": random(24, 5),
    "attn.bias": random(5, seed=1),
    "wte": random(11, 3, seed=2),
    "head": random(11, 3, seed=2),
    "norm.mean": random(7, seed=3),
}


def test_state_dict_round_trip_keeps_names_shapes_and_ties() -> None:
    def work(mesh: ParallelMesh) -> tuple[dict[str, Tensor], tuple[int, ...]]:
        toy = Toy(mesh)
        runtime.load_full_state_dict(toy, {name: value for name, value in STATE.items() if name != "wte"})
        return runtime.full_state_dict(toy), tuple(toy.qkv.shape)

    results = run_lockstep({"a": 2, "b": 2}, work)
    state = results[0][0]
    assert set(state) == set(STATE) and all(torch.equal(state[name], STATE[name]) for name in STATE)
    assert [r[0] for r in results[1:]] == [{}, {}, {}]
    assert {r[1] for r in results} == {(3, 2, 2, 5)}


def test_state_dict_errors_name_the_tensor() -> None:
    lacking = {name: value for name, value in STATE.items() if name != "attn.bias"}
    with pytest.raises(LockstepError, match=r"lacks attn\.bias"):
        run_lockstep({"a": 1, "b": 1}, lambda mesh: runtime.load_full_state_dict(Toy(mesh), lacking))
    wrong = {**STATE, "attn.bias": torch.zeros(6)}
    with pytest.raises(LockstepError, match=r"attn\.bias: expected shape \(5,\), got \(6,\)"):
        run_lockstep({"a": 1, "b": 1}, lambda mesh: runtime.load_full_state_dict(Toy(mesh), wrong))


def test_a_cast_model_is_told_what_it_is() -> None:
    with pytest.raises(TypeError, match=r"weight is not sharded: build the model in its dtype and device"):
        runtime.full_state_dict(nn.Linear(2, 2))


def test_buffers_that_are_computed_may_be_missing_and_parameters_not() -> None:
    computed = ("attn.bias", "norm.mean")

    def work(mesh: ParallelMesh) -> dict[str, Tensor]:
        toy = Toy(mesh)
        runtime.load_full_state_dict(toy, STATE)
        other = {name: value + 1 for name, value in STATE.items() if name != "norm.mean"}
        with pytest.raises(KeyError, match=r"lacks norm\.mean"):
            runtime.load_full_state_dict(toy, other)
        without = {name: value for name, value in other.items() if name != "attn.bias"}
        with pytest.raises(KeyError, match=r"lacks attn\.bias"):
            runtime.load_full_state_dict(toy, without, computed)
        runtime.load_full_state_dict(toy, other, computed)
        return runtime.full_state_dict(toy)

    (state,) = run_lockstep({"a": 1, "b": 1}, work)
    assert torch.equal(state["norm.mean"], STATE["norm.mean"])
    assert all(torch.equal(state[name], STATE[name] + 1) for name in STATE if name not in ("norm.mean", "head", "wte"))


RECIPES = [("normal", 0.5, 0.1), ("uniform", -2.0, 2.0), ("constant", 1.5), ("trunc_normal", 0.0, 0.02)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_initial_values_depend_on_seed_and_name_only(recipe: tuple[str | float, ...]) -> None:
    def work(mesh: ParallelMesh, name: str, seed: int) -> Tensor:
        w = runtime.shard_parameter(name, (24, 50), "R S1", mesh, split_shape=(3, 8, 50))
        runtime.init_parameter(w, recipe, seed)
        return runtime.full_tensor(w)

    one = run_lockstep({"a": 1, "b": 1}, lambda mesh: work(mesh, "w", 0))[0]
    for values in run_lockstep({"a": 2, "b": 3}, lambda mesh: work(mesh, "w", 0)):
        assert torch.equal(one, values)
    others = [run_lockstep({"a": 1, "b": 1}, lambda mesh, o=o: work(mesh, *o))[0] for o in (("v", 0), ("w", 1))]
    assert all(torch.equal(one, other) == (recipe[0] == "constant") for other in others)
    mean, spread = {"normal": (0.5, 0.1), "uniform": (0, 4 / 12**0.5), "constant": (1.5, 0)}.get(recipe[0], (0, 0.02))
    assert one.mean().item() == pytest.approx(mean, abs=0.1)
    assert one.std().item() == pytest.approx(spread, rel=0.1, abs=1e-9)


def test_local_passes_gradients_in_the_asked_shape() -> None:
    def work(mesh: ParallelMesh) -> bool:
        toy = Toy(mesh)
        runtime.load_full_state_dict(toy, STATE)
        weight = runtime.local(toy.qkv, (12, 5))
        rows = torch.arange(24).view(3, 4, 2)[:, 2 * mesh["b"].index : 2 * mesh["b"].index + 2].reshape(-1)
        weight.square().sum().backward()
        assert toy.qkv.grad is not None
        return torch.equal(weight, STATE["attn.qkv"][rows]) and torch.equal(toy.qkv.grad, 2 * toy.qkv)

    assert all(run_lockstep({"a": 2, "b": 2}, work))


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_gradients_are_reduced_and_clipped_once_per_element(max_norm: float) -> None:
    """Each device's gradient is its partial sum over the axes of its bucket; afterwards all is as on one device."""
    reference = {name: nn.Parameter(STATE[name].clone()) for name in ("attn.qkv", "attn.bias", "wte")}
    for name, parameter in reference.items():
        parameter.grad = STATE[name] * 0.7
    norm = torch.nn.utils.clip_grad_norm_(reference.values(), max_norm)

    def work(mesh: ParallelMesh) -> tuple[Tensor, list[Tensor]]:
        toy = Toy(mesh)
        runtime.load_full_state_dict(toy, STATE)
        named = {"qkv": toy.qkv, "bias": toy.bias, "table": toy.table}
        for scale, parameter in zip((0.5, 0.25, 1.0), named.values(), strict=True):  # 2, 4 and 1 partial sums
            parameter.grad = parameter.detach() * (0.7 * scale)
        buckets = [(("a",), ["qkv"]), (("a", "b"), ["bias"])]
        runtime.reduce_gradients(mesh, named, buckets)
        total = runtime.clip_gradients(mesh, named.values(), max_norm)
        whole = []
        for parameter in named.values():
            assert parameter.grad is not None
            parameter.detach().copy_(parameter.grad)
            whole.append(runtime.full_tensor(parameter))
        return total, whole

    for total, gradients in run_lockstep({"a": 2, "b": 2}, work):
        assert total.item() == pytest.approx(norm.item(), rel=1e-12)
        for gradient, parameter in zip(gradients, reference.values(), strict=True):
            assert parameter.grad is not None
            assert torch.allclose(gradient, parameter.grad, rtol=1e-12, atol=0)


def test_a_gradient_that_backward_did_not_reach_counts_as_zeros() -> None:
    def work(mesh: ParallelMesh) -> Tensor | None:
        w = runtime.shard_parameter("w", (3,), "R", mesh)
        if mesh.rank == 0:
            w.grad = torch.ones(3)
        runtime.reduce_gradients(mesh, {"w": w}, [(("a",), ["w"])] * 1)
        return w.grad

    assert all(torch.equal(g, torch.ones(3)) for g in run_lockstep({"a": 2}, work) if g is not None)


def test_many_buckets_are_all_written_back() -> None:
    def work(mesh: ParallelMesh) -> list[float]:
        named = {f"w{i}": runtime.shard_parameter(f"w{i}", (2,), "R", mesh) for i in range(7)}
        for i, parameter in enumerate(named.values()):
            parameter.grad = torch.full((2,), float(i))
        runtime.reduce_gradients(mesh, named, [(("a",), [name]) for name in named])
        return [float(p.grad.sum()) for p in named.values() if p.grad is not None]

    assert run_lockstep({"a": 3}, work) == [[6.0 * i for i in range(7)]] * 3


# --- weights gathered for one use ---


def forward(mesh: ParallelMesh, parameter: nn.Parameter, x: Tensor, gather: Callable[..., Tensor]) -> Tensor:
    """A device's share of the loss |tanh(x W^T) W|^2, with W (rows, columns) stored as S0 over all axes."""
    sizes = [runtime.sharding(parameter).shape[0]]
    for name in list(mesh.axes)[:-1]:
        sizes.append(runtime.shard_size(sizes[-1], mesh[name]))
    weight = runtime.local(parameter)
    for name, size in reversed(list(zip(mesh.axes, sizes, strict=True))):
        weight = gather(weight, mesh[name], 0, size=size)
    hidden = nn.functional.linear(x, weight)
    runtime.regather_before(hidden, weight)
    result = torch.tanh(hidden) @ weight
    runtime.regather_before(result, weight)
    return result.square().sum() / mesh.joint(tuple(mesh.axes)).size


def gather_and_keep(x: Tensor, axis: runtime.Axis, dim: int, *, size: int) -> Tensor:
    return runtime.all_gather(x, axis, dim, size=size, grad="reduce_scatter")


def exchange_again(x: Tensor, axis: runtime.Axis, dim: int, *, size: int) -> Tensor:
    """The same by index sets, over one of the axes that cut the rows, innermost first."""
    names = list(axis.mesh.axes)
    inside = ["R+" if names.index(name) > names.index(axis.name) else "S0" for name in names]
    after = ["R+" if name == axis.name else placement for name, placement in zip(names, inside, strict=True)]
    rows = 4 * math.prod(axis.mesh.axes.values()) + 1 if x.shape[1] == 6 else size
    return runtime.exchange(x, axis, (rows, x.shape[1]), " ".join(inside), " ".join(after), again=True)


@pytest.mark.parametrize("axes", [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}])
def test_a_regathered_weight_has_the_same_gradient(axes: dict[str, int]) -> None:
    rows, columns = 4 * math.prod(axes.values()) + 1, 6
    value, x = random(rows, columns), random(5, columns, seed=1)
    whole = value.clone().requires_grad_()
    (torch.tanh(nn.functional.linear(x, whole)) @ whole).square().sum().backward()

    def work(mesh: ParallelMesh, gather: Callable[..., Tensor]) -> Tensor:
        layout = " ".join(["S0"] * len(mesh.axes))
        parameter = runtime.shard_parameter("w", (rows, columns), layout, mesh, dtype=FLOAT64)
        runtime.assign(parameter, value)
        with runtime.regathering():
            loss = forward(mesh, parameter, x, gather)
        loss.backward()
        assert parameter.grad is not None
        parameter.detach().copy_(parameter.grad)
        return runtime.full_tensor(parameter)

    for gather in (runtime.regather, gather_and_keep, exchange_again):
        for gradient in run_lockstep(axes, lambda mesh, gather=gather: work(mesh, gather)):
            assert torch.allclose(gradient, whole.grad, rtol=1e-11, atol=1e-11)


def test_what_autograd_saves_decides_no_collective() -> None:
    """An operator may keep a view of a weight on one device and a copy on another, as the local sizes happen to be."""

    def work(mesh: ParallelMesh) -> tuple[list[str], Tensor]:
        parameter = runtime.shard_parameter("w", (7, 6), "S0", mesh, dtype=FLOAT64)
        runtime.assign(parameter, random(7, 6))
        axis, issued = mesh["a"], []
        gather = axis.transport.all_gather
        axis.transport.all_gather = lambda *args: issued.append("all_gather") or gather(*args)  # type: ignore[func-returns-value,method-assign]
        with runtime.regathering():
            weight = runtime.regather(runtime.local(parameter), axis, 0, size=7)
            used = weight if mesh.rank == 0 else weight.clone() if mesh.rank == 1 else weight.t().contiguous().t()
            y = nn.functional.linear(random(5, 6, seed=1).requires_grad_(), used)
            runtime.regather_before(y, weight)
        y.square().sum().backward()
        assert parameter.grad is not None
        return issued, parameter.grad.clone()

    results = run_lockstep({"a": 3}, work)
    assert [issued for issued, _ in results] == [["all_gather"] * 2] * 3
    whole = random(7, 6).requires_grad_()
    nn.functional.linear(random(5, 6, seed=1), whole).square().sum().backward()
    assert torch.allclose(torch.cat([gradient for _, gradient in results]), 3 * whole.grad)


class Allocated(TorchDispatchMode):
    """Every storage that an operator makes; `bytes()` are those still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[id(storage)] = weakref.ref(storage)
        return result

    def bytes(self) -> int:
        alive = {id(s): s for s in (reference() for reference in self.storages.values()) if s is not None}
        return sum(storage.nbytes() for storage in alive.values())


def test_bytes_alive_after_forward() -> None:
    """What autograd keeps is the activations and, with `regather`, nothing of the size of the weight."""
    rows, columns = 64, 128

    def work(mesh: ParallelMesh, gather: Callable[..., Tensor]) -> int:
        parameter = runtime.shard_parameter("w", (rows, columns), "S0", mesh, dtype=FLOAT64)
        runtime.assign(parameter, random(rows, columns))
        x = random(2, columns)
        with Allocated() as allocated, runtime.regathering():
            loss = forward(mesh, parameter, x, gather)
            mesh["a"].transport.barrier()  # what one rank makes in a collective lives until all have read it
            alive = allocated.bytes()
        loss.backward()
        return alive

    gathered = run_lockstep({"a": 4}, lambda mesh: work(mesh, gather_and_keep))
    regathered = run_lockstep({"a": 4}, lambda mesh: work(mesh, runtime.regather))
    weight_bytes, shard_bytes, activations_bytes = rows * columns * 8, rows * columns * 2, (rows + columns) * 2 * 8
    exchanged = run_lockstep({"a": 4}, lambda mesh: work(mesh, exchange_again))
    assert exchanged == regathered == [shard_bytes + activations_bytes + 8] * 4
    assert gathered == [weight_bytes + shard_bytes + activations_bytes + 8] * 4


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_nothing_of_a_step_outlives_it(kept: bool, trains: bool) -> None:
    """No whole weight where no backward lets go of it, no gradient that was dropped; no garbage collector comes."""

    def work(mesh: ParallelMesh) -> tuple[int, int]:
        parameter = runtime.shard_parameter("w", (64, 128), "S0", mesh, dtype=FLOAT64)
        runtime.assign(parameter, random(64, 128))
        with Allocated() as allocated, torch.set_grad_enabled(trains):
            bucket = (("a",), {FLOAT64: ["w"]}, 0, kept)
            with runtime.gathered_together(mesh, {"w": parameter}, [bucket]), runtime.regathering():
                loss = forward(mesh, parameter, random(2, 128), runtime.regather)
                held = allocated.bytes()
                if trains:
                    loss.backward()
                del loss
            parameter.grad = None
            mesh["a"].transport.barrier()
            return held, allocated.bytes()

    gc.disable()
    try:
        results = run_lockstep({"a": 4}, work)
    finally:
        gc.enable()
    shard_bytes = 64 * 128 * 8 // 4
    assert all((held >= 4 * shard_bytes) == kept for held, _ in results), results
    assert [left for _, left in results] == [shard_bytes] * 4  # the parameter


def test_an_error_between_leaves_the_gradients_of_earlier_batches() -> None:
    def work(mesh: ParallelMesh) -> Tensor | None:
        w = runtime.shard_parameter("w", (3,), "R", mesh)
        w.grad = torch.ones(3)
        runtime.reduce_gradients(mesh, {"w": w}, [(("a",), ["w"])])
        with pytest.raises(MemoryError), runtime.reducing(mesh, {"w": w}, [(("a",), ["w"])]):
            runtime.local(w).sum().backward()
            raise MemoryError
        runtime.local(w).sum().backward()  # is the parameter's again
        return w.grad

    assert all(torch.equal(g, torch.full((3,), 3.0)) for g in run_lockstep({"a": 2}, work) if g is not None)


def test_blocks_are_compiled_by_the_backend_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **options: backends.append(options.get("backend")) or forward)
    blocks = nn.Module()
    blocks.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert runtime.compile_blocks(blocks, "eager") == 2 and backends == ["eager"] * 2
