"""torch.export with what a capture needs around it: no memory, no merged inputs, errors that name the model's line."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.traceback import preserve_node_meta

from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing.call_caches import learned, leaves
from autoshard.graph_capture.tracing.capture_failures import VMAP_HINT, autoshard_error, capture_failure, failure_reason
from autoshard.graph_capture.tracing.data_dependence import Answers, FlagBuffers
from autoshard.graph_capture.tracing.flex_attention import dense_flex_attention
from autoshard.graph_capture.tracing.functionalise import writing_assigned_buffers
from autoshard.graph_capture.tracing.own_gradients import begin_trace
from autoshard.graph_capture.tracing.python_state import steady
from autoshard.graph_capture.tracing.source_lines import noting_calls
from autoshard.graph_capture.tracing.unchanged_model import guarded
from autoshard.graph_capture.tracing.watched_forward import noting_autocast, refuse_hooks, watching

Exporter = Callable[[torch.nn.Module, tuple[Any, ...]], Any]  # a model and its inputs -> an ExportedProgram
_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export", "torch._subclasses.fake_tensor")


def plain_export(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Export with the sizes of the inputs."""
    return torch.export.export(module, inputs, strict=False)


def export(
    model: torch.nn.Module, inputs: tuple[Any, ...], flags: FlagBuffers, by: Exporter = plain_export
) -> tuple[Any, tuple[str, ...]]:
    """The training-IR ExportedProgram of `model(*inputs)`; parameters without values (meta) stay without.

    `by`: the call of torch.export. Returned too: what was assumed of values that guards ask for; `flags` may answer,
    and remember it. What the forward does to gradients by Python code of its own is in the program as operators, or
    raises a CaptureError.
    """
    if model.training:
        refuse_hooks(model)
    with fake_stand_ins(model, inputs) as arguments, quiet():
        try:
            return _watched(model, arguments, flags, by)
        except (Exception, SystemExit) as error:
            retry = _second_trace(model, arguments, error)
            if retry is None:
                raise capture_failure(model, error) from error
        try:
            with retry:
                return _watched(model, arguments, flags, by)
        except (Exception, SystemExit) as error:
            raise capture_failure(model, error) from error


def _second_trace(
    model: torch.nn.Module, arguments: tuple[Any, ...], error: BaseException
) -> contextlib.AbstractContextManager[None] | None:
    """Context in which a second trace may not end in `error`; None if there is none."""
    if autoshard_error(error):
        return None
    if _register_output(model, arguments, error):
        return contextlib.nullcontext()
    return _as_called() if isinstance(error, _PYTHON) and not failure_reason(error) else None


# Of the model's own code, most likely; or of operators, on shapes that do not fit each other.
_PYTHON = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


@contextlib.contextmanager
def _as_called() -> Iterator[None]:
    """Trace as in a plain call: models may make a mask, or skip a step, only if torch says it compiles or exports."""
    originals = torch.compiler.is_compiling, torch.compiler.is_exporting
    torch.compiler.is_compiling = torch.compiler.is_exporting = lambda: False
    try:
        yield
    finally:
        torch.compiler.is_compiling, torch.compiler.is_exporting = originals


def _watched(
    model: torch.nn.Module, arguments: tuple[Any, ...], flags: FlagBuffers, by: Exporter
) -> tuple[Any, tuple[str, ...]]:
    answers = Answers(flags)
    flex: list[str] = []

    def exported(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
        begin_trace()
        with (
            guarded(), noting_autocast(), watching(model.training, answers), preserve_node_meta(), noting_calls(),
            dense_flex_attention() as called, writing_assigned_buffers(module),
        ):  # fmt: skip
            traced = by(module, inputs)
        flex[:] = dict.fromkeys(called)
        return traced

    program = _without_vmap(steady(model, arguments, exported))
    dense = (f"{line}: flex_attention is attention with a dense mask" for line in flex)
    return program, (*answers.assumed, *flags.assumed(), *dense)


def _without_vmap(program: Any) -> Any:
    """The program with `torch.vmap` carried out: a trace holds where it begins and ends, and one sample's operators."""
    if not any(getattr(node.target, "__name__", "") == "_add_batch_dim" for node in program.graph.nodes):
        return program
    decomposed = program.run_decompositions({})
    if decomposed.graph_signature.buffers_to_mutate:
        changed = next(iter(decomposed.graph_signature.buffers_to_mutate.values()))
        raise CaptureError(f"the forward uses torch.vmap and changes the buffer {changed}", VMAP_HINT)
    return decomposed


@contextlib.contextmanager
def fake_stand_ins(model: torch.nn.Module, inputs: tuple[Any, ...], always: bool = False) -> Iterator[tuple[Any, ...]]:
    """The inputs, each its own tensor. Where anything is on meta, or `always`, the model holds fake CPU tensors
    meanwhile.

    Fake and not meta: a forward that makes a tensor without naming a device makes it on the CPU, where they are.
    """
    stored = [(store, name, value) for store, name, value in _stored(model) if value is not None]
    if not always and not any(value.device.type == "meta" for value in [*inputs, *(value for _, _, value in stored)]):
        yield tuple(value.detach().clone().requires_grad_(value.requires_grad) for value in inputs)
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: torch.Tensor) -> torch.Tensor:
        with mode:
            plain = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(plain, requires_grad=value.requires_grad)
        return plain.requires_grad_(value.requires_grad and value.is_leaf)

    fakes = {id(value): fake(value) for value in {id(value): value for _, _, value in stored}.values()}
    for store, name, value in stored:
        store[name] = fakes[id(value)]
    try:
        yield tuple(fake(value) for value in inputs)
    finally:
        for store, name, value in stored:
            store[name] = value


def _stored(model: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, value in store.items():
                yield store, name, value


def is_fake(value: Any) -> bool:
    """A tensor without values."""
    return isinstance(value, FakeTensor) or value.device.type == "meta"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch.export logs and prints pages about a failure; the one sentence that matters is in the error."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _register_output(model: torch.nn.Module, arguments: tuple[Any, ...], error: BaseException) -> bool:
    """Tell torch how to take apart the dataclasses that the forward returns, if that is what `error` is about."""
    if "output" not in str(error).lower():
        return False
    try:
        returned = model(*arguments)
        registered = learned(returned)
        leaves(returned)  # those within others, too
    except Exception:
        return False
    return registered
