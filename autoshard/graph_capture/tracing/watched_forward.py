"""Watches a forward, while torch.export runs it, for what its trace can't hold: that is followed or refused."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing.data_dependence import ASKED, Answers, is_causal_mask
from autoshard.graph_capture.tracing.fills import CHECKPOINTED, INITIALISERS, initialising
from autoshard.graph_capture.tracing.own_gradients import (
    DerivesError,
    apply_checkpoint,
    apply_function,
    register_hook,
)
from autoshard.graph_capture.tracing.source_lines import here, is_visible, quote

_LIBRARY = ("torch.nn.modules._functions", "torch.utils.checkpoint", "torch.nn.modules.module")
_HOOKS = "a package runs no hooks in backward: change the loss, or change gradients in the training loop"
_DERIVES = "gradients of outputs in the forward, as penalties need them, are not supported: leave the term out"
_AUTOCAST = "leave it out and plan with --precision bf16-mixed"
_CTC = "--eval, and the CTC loss in a training loop of your own; or a loss over frames, such as cross_entropy"
_PACKED = "what packed sequences hold depends on their lengths' values"
_PADDED = "the padded batch through the module, its outputs masked: torch.where(mask, y, 0)"
_MOMENTUM = "momentum=0.1, torch's default: a moving average; or track_running_stats=False, or --eval"
_SEED = "no seed in the forward: packages draw from (seed, step, operator); a fixed noise belongs in a buffer"


@contextlib.contextmanager
def watching(training: bool, answers: Answers) -> Iterator[None]:
    """While torch.export runs a forward: what changes gradients is followed, or a CaptureError. Restores torch."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    patches = [*_patches(training), *_asking(answers)]
    before = [(owner, name, owner.__dict__.get(name, _INHERITED)) for owner, name, _ in patches]
    try:
        for (owner, name, patch), (*_, old) in zip(patches, before, strict=True):
            setattr(owner, name, _in_this_thread(patch, getattr(owner, name) if old is _INHERITED else old))
        torch.Tensor.data = property(_data, _set_data)
        yield
    finally:
        del torch.Tensor.data
        for owner, name, value in before:
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)


_INHERITED = object()


def _asking(answers: Answers) -> list[tuple[Any, str, Any]]:
    transformer = torch.nn.modules.transformer
    return [
        *((torch.Tensor, name, answers.patch(name, getattr(torch.Tensor, name))) for name in ASKED),
        (torch, "_assert", answers.check),
        (transformer, "_detect_is_causal_mask", is_causal_mask(transformer._detect_is_causal_mask)),
    ]


def _in_this_thread(patch: Any, original: Any) -> Any:
    """`patch` in the thread that traces; in others, which try a backward by numbers, what there was."""
    tracing = threading.get_ident()
    plain = original.__func__ if isinstance(original, classmethod) else original

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (patch if threading.get_ident() == tracing else plain)(*args, **kwargs)

    functools.update_wrapper(chosen, plain)
    return classmethod(chosen) if isinstance(original, classmethod) else chosen


def refuse_hooks(model: torch.nn.Module) -> None:
    """CaptureError for hooks in backward of the model's modules and parameters."""
    for path, module in model.named_modules():
        hooks = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
        if hooks:
            what = f"the module {path}" if path else "the model"
            raise CaptureError(f"{what} has a backward hook{_defined(hooks[0])}, which a package can't run", _HOOKS)
    for path, parameter in model.named_parameters():
        hooks = [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]
        if hooks:
            raise CaptureError(
                f"the parameter {path} has a gradient hook{_defined(hooks[0])}, which a package can't run", _HOOKS
            )


def _defined(hook: Any) -> str:
    code = getattr(hook, "__code__", None)
    return f" ({quote(code.co_filename, code.co_firstlineno)})" if code else ""


def _patches(training: bool) -> list[tuple[Any, str, Any]]:
    """(owner, attribute, what stands there meanwhile)."""
    autograd, graph = torch.autograd, torch.autograd.graph.saved_tensors_hooks
    patches: list[tuple[Any, str, Any]] = [
        (torch.amp.autocast_mode.autocast, "__enter__", _autocast(torch.amp.autocast_mode.autocast.__enter__)),
        *((owner, name, _refused(getattr(owner, name), "the forward seeds torch", _SEED)) for owner, name in _SEEDS),
        (torch.nn.Module, "to", _moved(torch.nn.Module.to)),
        (torch.inference_mode, "__enter__", _enter_inference),
        (torch.inference_mode, "__exit__", _exit_inference),
        (torch.enable_grad, "__enter__", _enabled(torch.enable_grad.__enter__)),
        (torch.set_grad_enabled, "__init__", _switched(torch.set_grad_enabled.__init__)),
        (torch, "ctc_loss", _refused(torch.ctc_loss, "the work of a loss depends on its lengths' values", _CTC)),
        (torch._VF, "_pack_padded_sequence", _refused(torch._VF._pack_padded_sequence, _PACKED, _PADDED)),
        *((torch.Tensor, name, initialising(getattr(torch.Tensor, name))) for name in INITIALISERS),
        (torch.nn.functional, "has_torch_function_variadic", _as_written),
        *(
            (owner, name, _refused(getattr(owner, name), "the forward differentiates", _DERIVES, DerivesError))
            for owner, name in _DERIVING
        ),
    ]
    if training:
        patches += [
            *((norm, "forward", _decaying(norm.forward)) for norm in _NORMS),
            (autograd.Function, "apply", _apply(autograd.Function.__dict__["apply"].__func__)),
            (torch.Tensor, "register_hook", _hooked(torch.Tensor.register_hook)),
            (graph, "__enter__", _saved(graph.__enter__)),
            *((_CHECKPOINT, name, _noted(getattr(_CHECKPOINT, name))) for name in ("__enter__", "__exit__")),
        ]
    return patches


_CHECKPOINT = torch.utils.checkpoint._checkpoint_hook
_NORMS = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.SyncBatchNorm)
_SEEDS = ((torch, "manual_seed"), (torch, "seed"), (torch.random, "manual_seed"), (torch.random, "seed"))
_DERIVING = ((torch.autograd, "grad"), (torch.autograd, "backward"), (torch.Tensor, "backward"))


def _decaying(original: Callable[..., Any]) -> Callable[..., Any]:
    """Batch norm whose running statistics are the mean over all batches: their weight is in a tensor, and changes."""

    def forward(self: Any, input: torch.Tensor) -> Any:
        if self.training and self.track_running_stats and self.momentum is None:
            what = f"{type(self).__name__}(momentum=None) averages over all batches so far, by a count that it reads"
            raise CaptureError(f"{what} from a tensor, at {here()}", _MOMENTUM)
        return original(self, input)

    return forward


def _moved(original: Callable[..., Any]) -> Callable[..., Any]:
    """A module that is where and what it should be stays; torch would put new parameters in it."""

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        stored = [*self.parameters(), *self.buffers()]
        there = all(device is None or value.device.type == device.type for value in stored)
        same = all(dtype is None or not value.is_floating_point() or value.dtype == dtype for value in stored)
        return self if there and same and layout is None else original(self, *args, **kwargs)

    return to


_GRAD_MODES = frozenset(("no_grad", "enable_grad", "set_grad_enabled", "inference_mode"))


def _as_written(*operands: Any) -> bool:
    """True if a function of torch.nn.functional goes to torch.export's mode whole: not one that turns gradients off or
    on (gaussian_nll_loss), which the trace would lose."""
    names = sys._getframe(2).f_code.co_names
    return _GRAD_MODES.isdisjoint(names) and torch.overrides.has_torch_function(operands)


_inference: list[bool] = []  # modes that the forward is within, the innermost last


def _enter_inference(self: Any) -> None:
    """A trace holds where gradients are off, and not why: inference mode turns them off, and on where it is left."""
    self._grad_before = torch.is_grad_enabled()
    _inference.append(self.mode)
    torch.set_grad_enabled(not self.mode)


def _exit_inference(self: Any, *_: Any) -> None:
    _inference.pop()
    torch.set_grad_enabled(self._grad_before)


def _enabled(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Any) -> None:
        original(self)
        if _inference and _inference[-1]:  # nothing turns them on again there
            torch.set_grad_enabled(False)

    return enter


def _switched(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, mode: bool) -> None:
        original(self, mode and not (_inference and _inference[-1]))

    return init


def _refused(
    original: Callable[..., Any], what: str, hint: str, kind: type[CaptureError] = CaptureError
) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise kind(f"{what} ({original.__name__}) at {here()}", hint)

    return refuse


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return apply_checkpoint(args)
        if kwargs or cls.__module__ in _LIBRARY or cls.__module__.startswith("torch._higher_order_ops"):
            return original(cls, *args, **kwargs)
        return apply_function(cls, lambda *operands: original(cls, *operands), args)

    return apply


def _hooked(original: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0  # torch's modes call it again, each one inside the other

    def hooked(self: torch.Tensor, hook: Callable[[Any], Any]) -> Any:
        nonlocal calls
        calls += 1
        try:
            handle = original(self, hook)
        finally:
            calls -= 1
        if calls == 0:
            register_hook(self, hook)
        return handle

    return hooked


def _saved(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own users of these hooks (checkpoints, offloading) keep what is saved; others may change it."""

    def enter(self: Any) -> Any:
        other = type(self) is torch.autograd.graph.saved_tensors_hooks or not type(self).__module__.startswith("torch.")
        if other:
            message = f"the forward changes what autograd saves (saved_tensors_hooks) at {here()}"
            raise CaptureError(message, "leave the hooks out of the forward")
        return original(self)

    return enter


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint notes that backward runs again what is inside."""

    def noted(self: Any, *args: Any) -> Any:
        if not args:
            self._note = fx.traceback.annotate(CHECKPOINTED)
        getattr(self._note, original.__name__)(*args)
        return original(self, *args)

    return noted


@contextlib.contextmanager
def noting_autocast() -> Iterator[None]:
    """Inside, every `torch.autocast` remembers whether it was asked for: a CPU disables those of other devices. One to
    float32 turns it off, on every device."""
    autocast = torch.amp.autocast_mode.autocast
    original = autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        original(self, device_type, dtype, enabled, cache_enabled)
        self._narrows = enabled and dtype not in (torch.float32, torch.float64)

    autocast.__init__ = init
    try:
        yield
    finally:
        autocast.__init__ = original


_plain_data = torch._C.TensorBase.data
_DATA = "x.detach() to read a value without its gradient; x = ... to change it"


def _data(self: torch.Tensor) -> Any:
    """torch.export does not see `.data`; a forward that reads it means `detach`."""
    if is_visible(sys._getframe(1).f_code.co_filename):
        return self.detach()
    return _plain_data.__get__(self)


def _set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    if is_visible(sys._getframe(1).f_code.co_filename):
        raise CaptureError(f"the forward assigns to .data at {here()}", _DATA)
    _plain_data.__set__(self, value)


def _autocast(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Any) -> Any:
        if getattr(self, "_narrows", self._enabled):
            raise CaptureError(f"the forward turns autocast on for {self.device} at {here()}", _AUTOCAST)
        return original(self)

    return enter
