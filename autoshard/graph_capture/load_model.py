"""Loads the model and inputs that a user named (`file.py:callable`, `package.module:callable`, `file.pt2`)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.export.passes import move_to_device_pass

from autoshard.errors import CaptureError, InvalidFileError, UsageError
from autoshard.graph_capture.call_form import (
    LossFunction,
    all_plain,
    arguments_of,
    call_by,
    model_call,
    positions_of,
    user_forward,
)
from autoshard.graph_capture.constructor.placement import WITH_MORE_VALUES, needs_values, placed
from autoshard.graph_capture.model_spec import LOSS, check_file, check_spec, split_spec
from autoshard.graph_capture.plain_attributes import hidden_tensors, keep_tensors, materialise
from autoshard.graph_capture.tracing.source_lines import blame
from autoshard.graph_capture.tracing.unchanged_model import guarded, is_not_guarded
from autoshard.graph_capture.tracing.watched_forward import noting_autocast

_IMPORTED: dict[Path, tuple[bytes, ModuleType]] = {}  # text and module of a file, as it was last imported
FILE_PREFIX = "autoshard_model_"  # of the module names of files, which hide no other module
_NO_WITH = "without --with, or export it again with other inputs"
_ALONE = "{}, which must run by itself; --debug shows the traceback"
_RETURNS = "return the model and example inputs, a tuple or a dict: `return model, (input_ids, labels)`"


def load_model(
    spec: str, arguments: Mapping[str, Any], device: str = "meta"
) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """The model and its example inputs, as tensors one by one: whatever it takes and returns, it is called with these.

    The argument `--loss` names a function that makes the loss of its output, with the targets that the callable returns
    as a third item, and with those keys of a dict of inputs that the forward does not take.
    `device="meta"` builds without memory or values, for planning; "cpu" builds it for real, for verification. A model
    that can't be built on meta (its constructor reads values) is built with values for what is small, or on the CPU.
    """
    if spec.endswith(".pt2"):
        _refuse_arguments(spec, arguments)
        return saved_module(load_exported(spec), device)
    build_args = dict(arguments)
    loss_name = build_args.pop(LOSS, None)
    with guarded(spec.rpartition(":")[0]), noting_autocast():
        build = find_callable(spec)
        _check_known(spec, build, build_args)
        _check_arguments(spec, build, build_args)
        loss = None if loss_name is None else find_callable(str(loss_name))
        model, inputs = _called(spec, build, build_args, device, loss)
        materialise(model, inputs, device)
        if device == "meta" and hidden_tensors(model):  # their values are in the graph
            model, inputs = _called(spec, build, build_args, "cpu", loss)
            materialise(model, inputs, "cpu")
    keep_tensors(model)
    return _with_values(model, device), tuple(_placed(value, device) for value in inputs)


def check_names(spec: str, names: Iterable[str]) -> None:
    """UsageError where the callable takes none of one of these names."""
    if spec.endswith(".pt2"):
        _refuse_arguments(spec, names)
        return
    with guarded(spec.rpartition(":")[0]):
        _check_known(spec, find_callable(spec), names)


def verify_arguments(spec: str) -> dict[str, Any]:
    """The reduced sizes for verification: the dict `VERIFY` next to the callable, {} where there is none."""
    if spec.endswith(".pt2"):
        return {}
    module, _ = _module_of(spec)
    sizes = getattr(module, "VERIFY", {})
    if not isinstance(sizes, dict):
        raise UsageError(
            f"VERIFY next to {spec} is {type(sizes).__name__}, expected a dict of arguments to their small values",
            'VERIFY = {"n_layer": 2}',
        )
    _check_known(f"VERIFY of {spec}", find_callable(spec), sizes)
    return dict(sizes)


def find_callable(spec: str) -> Callable[..., Any]:
    """The function that `spec` names; UsageError lists those that the file has."""
    module, name = _module_of(spec)
    build: Callable[..., Any] | None = getattr(module, name, None)
    if build is None or not callable(build):
        functions = sorted(key for key, value in vars(module).items() if _is_defined_in(module, key, value))
        listed = f"it has {', '.join(functions)}" if functions else "it defines no functions"
        raise UsageError(
            f"{spec}: there is no function {name!r}; {listed}", f"name one as {spec.rpartition(':')[0]}:NAME"
        )
    return build


def _is_defined_in(module: ModuleType, name: str, value: Any) -> bool:
    return not name.startswith("_") and inspect.isfunction(value) and value.__module__ == module.__name__


def load_exported(spec: str) -> Any:
    """The `torch.export.ExportedProgram` of a .pt2 file; InvalidFileError if it is missing or no such file."""
    check_spec(spec)
    if not zipfile.is_zipfile(spec):
        raise InvalidFileError(f"{spec} is not a saved torch.export program: no archive", "torch.export.save(...)")
    try:
        return torch.export.load(spec)
    except Exception as error:
        text = str(error).strip().splitlines()
        reason = text[0] if text else type(error).__name__
        raise InvalidFileError(
            f"{spec} is not a saved torch.export program: {reason}", "torch.export.save(...)"
        ) from None


def saved_module(program: Any, device: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """The module and example inputs of an exported program. What was saved without values is zero on `device`."""
    if program.example_inputs is None or program.example_inputs[1]:
        raise CaptureError(
            "the exported program has no positional example inputs", "export it with positional inputs only"
        )
    if device != "meta" and any(value.device.type == "meta" for value in program.state_dict.values()):
        for store in (program.state_dict, program.constants):
            store.update({path: _placed(value, device) for path, value in store.items()})
        program._example_inputs = (tuple(_placed(value, device) for value in program.example_inputs[0]), {})
        program = move_to_device_pass(program, device)
    return program.module(), tuple(program.example_inputs[0])


def _with_values(model: torch.nn.Module, device: str) -> torch.nn.Module:
    """Give what the constructor itself put on meta zeros on `device`, in place; ties are kept."""
    by_id: dict[int, Any] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, value in store.items():
                if value is not None:
                    store[name] = by_id.setdefault(id(value), _placed(value, device))
    return model


def _placed(value: Any, device: str) -> Any:
    if device == "meta" or value.device.type != "meta":
        return value
    placed = torch.zeros(value.shape, dtype=value.dtype, device=device)
    return torch.nn.Parameter(placed, value.requires_grad) if isinstance(value, torch.nn.Parameter) else placed


def _module_of(spec: str) -> tuple[ModuleType, str]:
    place, name = split_spec(spec)
    if place.endswith(".py"):
        check_file(Path(place), f":{name}")
    try:
        with guarded(place):
            return (_import_file(Path(place)) if place.endswith(".py") else _import_name(place)), name
    except BaseException as error:
        if is_not_guarded(error):
            raise
        raise CaptureError(f"{place} can't be imported: {blame(error)}", _ALONE.format(_import_of(place))) from error


def _import_of(place: str) -> str:
    return f"python {place}" if place.endswith(".py") else f'python -c "import {place}"'


def _import_name(name: str) -> ModuleType:
    try:
        spec = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None:
        raise UsageError(f"there is no module {name!r}", "a path of a file ends in .py, e.g. model.py:build")
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """The file as a fresh module; its folder is on the import path meanwhile and stays there, as for a script.

    A file that can be imported only once, as it defines a library of operators, is the module that it was before.
    """
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"{FILE_PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    text, (before, earlier) = path.read_bytes(), _IMPORTED.get(path.resolve(), (b"", None))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception:
        if earlier is None or text != before:
            raise
        sys.modules[name] = module = earlier
    _IMPORTED[path.resolve()] = text, module
    return module


def _refuse_arguments(spec: str, names: Iterable[str]) -> None:
    if listed := ", ".join(names):
        raise UsageError(f"{spec} is an exported program and takes no arguments, got {listed}", _NO_WITH)


def _named(build: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters of `build` that can be given by name."""
    parameters = inspect.signature(build).parameters.values()
    return {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _check_known(spec: str, build: Callable[..., Any], names: Iterable[str]) -> None:
    known = _named(build)
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(build).parameters.values()):
        return
    listed = ", ".join(f"{p.name}={p.default!r}" if p.default is not p.empty else p.name for p in known.values())
    for name in names:
        if name not in known:
            raise UsageError(f"{spec} has no argument {name!r}", f"its arguments: {listed or 'none'}")


def _check_arguments(spec: str, build: Callable[..., Any], names: Collection[str]) -> None:
    for name, parameter in _named(build).items():
        if parameter.default is parameter.empty and name not in names:
            raise UsageError(f"{spec} needs a value for its argument {name!r}", f"give it one with --with {name}=VALUE")


def _called(
    spec: str, build: Callable[..., Any], arguments: Mapping[str, Any], device: str, loss: LossFunction | None
) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """The model, which takes tensors one by one, and these tensors."""
    model, inputs, *targets = _call(spec, build, arguments, device)
    if loss is None and not targets and all_plain(inputs):
        return model, tuple(inputs)
    positions = positions_of(user_forward(model))
    call, tensors = model_call(arguments_of(model, inputs, targets[0] if targets else None, loss), positions, loss)
    return call_by(model, call), tensors


def _call(spec: str, build: Callable[..., Any], arguments: Mapping[str, Any], device: str) -> tuple[Any, ...]:
    more = WITH_MORE_VALUES.get(device)
    try:
        with placed(device) as asked_for_values:
            built = build(**arguments)
    except BaseException as error:
        if is_not_guarded(error):
            raise
        if more and needs_values(error):
            return _call(spec, build, arguments, more)
        hint = "call it by itself in Python, where it must return (model, inputs); --debug shows the traceback"
        raise CaptureError(f"{spec} failed: {blame(error)}", hint) from error
    if more and asked_for_values():
        return _call(spec, build, arguments, more)
    return _checked(spec, built)


def _checked(spec: str, built: Any) -> tuple[Any, ...]:
    """(model, inputs), or with targets for the loss function as a third item."""
    known = isinstance(built, tuple | list) and len(built) in (2, 3)
    if not (known and isinstance(built[0], torch.nn.Module) and _is_example(built[1])):
        got = (
            f"({', '.join(type(item).__name__ for item in built)})"
            if isinstance(built, tuple)
            else type(built).__name__
        )
        raise CaptureError(f"{spec} returned {got}, expected (torch.nn.Module, example inputs)", _RETURNS)
    model, inputs, *targets = built
    if not isinstance(inputs, torch.Tensor) and not _holds_tensor(inputs):
        kinds = ", ".join(sorted({type(item).__name__ for item in inputs})) or "nothing"
        raise CaptureError(f"{spec} returned example inputs as {type(inputs).__name__} of {kinds}", _RETURNS)
    return (model, (inputs,) if isinstance(inputs, torch.Tensor) else inputs, *targets)


def _is_example(inputs: Any) -> bool:
    return isinstance(inputs, torch.Tensor | tuple | list | Mapping)


def _holds_tensor(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return any(isinstance(item, torch.Tensor) or _holds_tensor(item) for item in items)
