"""`shard(fn, …)`: one function or module of an eager program runs split over the devices, the rest as it is."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from autoshard.api import ranks
from autoshard.api.live_model import same_tensors
from autoshard.api.parallel.boundary import full_value, of_pairs, part_of, undistributed
from autoshard.api.parallel.function_module import FunctionModule
from autoshard.api.parallel.gradient_step import run_on_ranks
from autoshard.api.parallel.held_module import HeldModule, hold, owner_of, register
from autoshard.api.parallel.rank_model import RankModel, fill
from autoshard.api.parallel.shard_plan import (
    Border,
    CallKind,
    ShardRequest,
    TensorSpec,
    Variant,
    request_of,
    variant_of,
)
from autoshard.api.parallel.stale_parameters import stand_in
from autoshard.api.strategies import FULL, strategies
from autoshard.emit.runtime import ParallelMesh, full_state_dict, sharding
from autoshard.errors import UsageError
from autoshard.graph_capture.call_form import Arguments, by_name, model_call, rebuilt, user_forward
from autoshard.graph_capture.plain_attributes import complex_buffers, keep_tensors


def shard(
    fn: Callable[..., Any] | nn.Module,
    in_strategy: Any = None,
    out_strategy: Any = None,
    parameter_plan: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    level: int | str = 0,
    *,
    dataset_strategy: Any = FULL,
    mesh: Any = None,
    hardware: Any = None,
    pins: Any = (),
    cache: Any = None,
) -> Sharded:
    """`fn`, run split over the processes that torchrun started, inside a program that is otherwise eager.

    `in_strategy` has an entry for each tensor that `fn` is called with, `out_strategy` for each that it returns: how
    often each dim is cut, `(4, 2)`; a layout, `"Shard(0)@dp"`; or None, which is searched, as everything is that is not
    said. `parameter_plan`: the same by parameter name. `level`: 0 least communication, 1 least memory, 2 fastest.
    `device`: CPU, GPU or Ascend. `dataset_strategy` says how tensors come and go: `"full_batch"`, whole and the same on
    every rank; `"data_parallel"`, this rank's part of dim 0; or cut counts per input (outputs are whole). DTensors may
    come as they lie.

    The result is a module: call it, keep it as an attribute, give its parameters to an optimizer. It is planned when it
    is first called, and again for other shapes, modes, or without gradients; plans are kept. A module's parameters
    then become DTensors in place. A function's parameters (of modules that it refers to) stay as they are.
    Alone, without torchrun, it is `fn`. UsageError names what can't be, and what is near.
    """
    said = strategies(in_strategy, out_strategy, parameter_plan, dataset_strategy)
    return Sharded(fn, request_of(said, device, level, mesh, hardware, pins, cache))


class Sharded(HeldModule):
    """A function or module that runs split over the devices. `variants`: one for each way that it was called."""

    def __init__(self, fn: Callable[..., Any] | nn.Module, request: ShardRequest) -> None:
        super().__init__()
        self.request = request
        self.variants: list[Variant] = []
        self._holders: list[list[nn.Module]] = []
        self._complex: frozenset[str] = frozenset()
        self._original: list[Any] = [fn, FunctionModule(fn)]  # in a list: they are no children
        forward: Callable[..., Any] = fn
        if isinstance(fn, nn.Module):
            self._original[1] = original = without_shards(same_tensors(fn))
            self.request = with_inner_parameters(request, fn)
            self._complex = complex_buffers(original)
            keep_tensors(original)
            self.training, forward = fn.training, user_forward(fn)
            for path, parameter in original.named_parameters(remove_duplicate=False):
                hold(self, path, parameter)
            for path, buffer in original.named_buffers(remove_duplicate=False):
                hold(self, path, buffer, path in original.state_dict())
            self._holders = [[self._holder(path, module.training) for path, module in original.named_modules()]]

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs)

        with contextlib.suppress(TypeError, ValueError):  # of torch's own functions
            run.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        self.forward = run

    def _holder(self, path: str, training: bool) -> nn.Module:
        """Holder of the parameters of the original's module at `path`, set to its mode."""
        holder = owner_of(self, f"{path}.")[0] if path else self
        holder.training = training
        return holder

    @property
    def original(self) -> Any:
        """The function or module that is sharded."""
        return self._original[0]

    def full_state_dict(self) -> dict[str, Tensor]:
        """The original's state dict, whole and on the CPU of rank 0, empty on the others; every rank must call it."""
        if self.variants:
            return of_pairs(full_state_dict(self.variants[0].rank.module), self._complex)
        whole = {name: value.detach().cpu().clone() for name, value in self.state_dict().items()}
        return of_pairs(whole, self._complex)

    # --- a call ---

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.compiler.is_exporting():  # inside another shard, which plans it
            warn_unused(self.request, "a shard inside another one")
            return self._alone(args, kwargs)
        if ranks.started() == 1:
            return self._alone(args, kwargs)
        kind, tensors = self._kind(args, kwargs)
        variant = next((one for one in self.variants if one.kind.same(kind)), None)
        if variant is None:
            variant = self._planned(kind)
        self.check_held()
        mesh = variant.rank.mesh
        locals_ = [entered(x, border, mesh) for x, border in zip(tensors, variant.inputs, strict=True)]
        outputs = run_on_ranks(variant.rank, locals_, variant.step)
        returned = outputs[len(outputs) - len(variant.outputs) :]
        return rebuilt(variant.returned, [left(x, b, mesh) for x, b in zip(returned, variant.outputs, strict=True)])

    def _alone(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        fn = self.original
        if isinstance(fn, nn.Module):
            modes = {path: holder.training for path, holder in self.named_modules()}
            for path, module in fn.named_modules():
                module.training = modes.get(path, self.training)
        return fn(*args, **kwargs)

    def _kind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[CallKind, list[Tensor]]:
        """Kind of this call, and its tensors."""
        module: nn.Module = self._original[1]
        lifted: dict[str, Tensor] = {}
        constants: tuple[tuple[str, Any], ...] = ()
        if isinstance(module, FunctionModule):
            lifted, constants = module.referred(), module.constants()
            arguments = Arguments((*_named(module.fn, args, kwargs), lifted))
            call, tensors = model_call(arguments, ("input", "", ""))
            modes = [m.training for _, one in module.modules_of for m in one.modules()]
        else:
            call, tensors = model_call(by_name(module, Arguments(args, kwargs)))
            modes = [holder.training for holder in self._holders[0]]
        gradients = torch.is_grad_enabled() and any(
            x.requires_grad for x in (*tensors, *self.parameters(), *lifted.values())
        )
        specs = tuple(
            TensorSpec(tuple(x.shape), x.dtype, x.requires_grad and gradients, isinstance(x, DTensor)) for x in tensors
        )
        return CallKind(call.form, call.names, specs, gradients, tuple(modes), len(lifted), constants), list(tensors)

    # --- a plan ---

    def _planned(self, kind: CallKind) -> Variant:
        first = self.variants[0] if self.variants else None
        module: nn.Module = self._original[1]
        if isinstance(self.original, nn.Module):
            for one, mode in zip(module.modules(), kind.modes, strict=True):
                one.training = mode
        with saved_tensors_hooks(_as_it_is, _as_it_is):  # torch.utils.checkpoint counts what a first call saves
            variant = variant_of(kind, module, self.request, first)
        if isinstance(self.original, nn.Module):
            if first is None:
                fill(variant.rank, dict([*module.named_parameters(remove_duplicate=False),
                                         *module.named_buffers(remove_duplicate=False)]))  # fmt: skip
                self._take_over(variant.rank)
            else:
                share(first.rank, variant.rank)
        self.variants.append(variant)
        return variant

    def _take_over(self, rank: RankModel) -> None:
        """Replaces, in place, whole parameters by this rank's parts, also in optimizers that were made before."""
        before = dict(self.named_parameters(remove_duplicate=False))
        register(self, rank)
        now = dict(self.named_parameters(remove_duplicate=False))
        stand_in({whole: now[path] for path, whole in before.items()})


def _as_it_is(x: Tensor) -> Tensor:
    return x


def without_shards(module: nn.Module) -> nn.Module:
    """Replaces, in place, the sharded modules inside by what they shard, as the outer plan decides."""
    for name, child in list(module.named_children()):
        if isinstance(child, Sharded):
            if child.variants:
                what = f"{name} was already planned and run by itself, and is now inside another shard"
                raise UsageError(what, "shard the outer module before the first call")
            module._modules[name] = without_shards(same_tensors(child.original))
        else:
            without_shards(child)
    return module


def with_inner_parameters(request: ShardRequest, module: nn.Module) -> ShardRequest:
    """`request` with the parameter plans of sharded modules inside; their other strategies are reported as ignored.

    UsageError where two plans say different things of one parameter.
    """
    plan = dict(request.said.parameters)
    for path, inner in module.named_modules():
        if not isinstance(inner, Sharded) or inner is module:
            continue
        warn_unused(inner.request, f"shard of {path}, inside another one")
        for name, how in inner.request.said.parameters:
            outer = plan.setdefault(f"{path}.{name}", how)
            if outer != how:
                what = f"parameter_plan: {path}.{name} is {outer!r} in the outer shard and {how!r} in the inner one"
                raise UsageError(what, "say it in one of them")
    return replace(request, said=replace(request.said, parameters=tuple(plan.items())))


def warn_unused(request: ShardRequest, where: str) -> None:
    """Warns of unused strategies: the outer plan decides what flows into and out of an inner shard."""
    said = {"in_strategy": request.said.inputs, "out_strategy": request.said.outputs}
    unused = " and ".join(name for name, entries in said.items() if entries and any(how is not None for how in entries))
    if unused:
        warnings.warn(f"{where}: its {unused} is not used, the outer shard plans it", UserWarning, stacklevel=2)


def _named(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Arguments by keyword in the order of the function, where it takes them so."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return args, dict(kwargs)
    kinds = {p.kind for p in signature.parameters.values()}
    if kinds != {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        return args, dict(kwargs)
    return (), dict(signature.bind(*args, **kwargs).arguments)


def entered(x: Tensor, border: Border, mesh: ParallelMesh) -> Tensor:
    """Brings an input from the eager program into the sharded part."""
    x = undistributed(x).to(mesh.device)
    if border.outside == border.inside:
        return x
    return part_of(full_value(x, border.shape, border.outside, mesh), border.inside, mesh)


def left(x: Tensor, border: Border, mesh: ParallelMesh) -> Tensor:
    """Brings an output from the sharded part back into the eager program."""
    if border.outside == border.inside:
        return x
    return part_of(full_value(x, border.shape, border.inside, mesh), border.outside, mesh)


# --- parameters -----------------------------------------------------------------------------------------------------


def share(first: RankModel, other: RankModel) -> None:
    """Makes `other` run, in place, on the parameters and buffers of `first`, which have the same layouts."""
    held = {sharding(x).name: x for x in (*first.module.parameters(), *first.module.buffers())}
    for one in other.module.modules():
        for store in (one._parameters, one._buffers):
            for name, value in store.items():
                if value is not None:
                    shared = held[sharding(value).name]
                    assert sharding(shared).split_shape == sharding(value).split_shape, name
                    assert sharding(shared).layout == sharding(value).layout, name
                    store[name] = shared
