"""What a forward reads and changes in Python: random numbers and attributes, which a graph would keep as they were."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.nn import Module
from torch.utils._python_dispatch import _disable_current_modes

from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing.call_caches import attributes_put_back, cached_alike
from autoshard.graph_capture.tracing.source_lines import is_visible, quote

_OWN = frozenset(Module().__dict__)
_FAR = 1_000_003  # a step that no warm-up reaches
_RANDOM = "torch.rand, or nn.Dropout: packages draw torch's numbers alike on all replicas"
_STATE = (
    "a buffer for what changes from call to call: self.register_buffer(...), updated in place; what only the first "
    "call does (RWKV's rescaling for inference) is done where model(*inputs) is called once as the model is built"
)
_REPLACED = "compute the changed weight under another name; parameters change in the optimizer only"
Export = Callable[[Module, tuple[Any, ...]], Any]  # torch.export
Trace = Callable[[], Any]  # runs it on the model and gives the program


def steady(model: Module, inputs: tuple[Any, ...], export: Export) -> Any:
    """What `export` gives of them. CaptureError where the next call of the forward would compute something else."""

    def trace() -> Any:
        with _without_new_attributes(model):
            return export(model, inputs)

    seen = _Seen(model)
    with seen.watching():
        program = trace()
    if seen.replaced:
        raise CaptureError(f"the forward replaces the parameter {seen.replaced}", _REPLACED)
    if seen.drew:
        sources = _random_sources()
        place = _place(trace, lambda: [_state(source) for source in sources])
        if place:
            raise CaptureError(f"the forward draws from Python's or NumPy's random numbers at {place}", _RANDOM)
    alike = not seen.changed or _goes_on_alike(model, trace, program, seen)
    if not alike and not cached_alike(model, inputs, export, lambda: _attributes(model)):
        _refuse(model, trace, seen)
    return program


@contextmanager
def _without_new_attributes(model: Module) -> Iterator[None]:
    """What the forward sets and was not there is gone afterwards; what was there export puts back."""
    names = [(module, {*module.__dict__}) for module in model.modules()]
    try:
        yield
    finally:
        for module, own in names:
            for name in [name for name in module.__dict__ if name not in own]:
                del module.__dict__[name]


def _goes_on_alike(model: Module, trace: Trace, program: Any, first: _Seen) -> bool:
    """A second call with the attributes that the first left, and one far away where they change again."""
    again = _Seen(model, first.left)
    same = _traces_alike(trace, again, program)
    if same and again.changed:
        same = _traces_alike(trace, _Seen(model, {key: _far(value) for key, value in again.left.items()}), program)
    return same


def _refuse(model: Module, trace: Trace, first: _Seen) -> NoReturn:
    owner, name = next(iter(first.changed))
    before, after = first.changed[owner, name]
    place = _place(trace, lambda: _frozen(model.get_submodule(owner).__dict__.get(name)))
    what = f"{owner}.{name}" if owner else name
    raise CaptureError(
        f"the forward changes its attribute {what} from {_shown(before)} to {_shown(after)} and depends on it"
        + f", at {place}" * bool(place),
        _STATE,
    )


def _traces_alike(trace: Trace, seen: _Seen, program: Any) -> bool:
    try:
        with attributes_put_back(seen.model), seen.watching():
            return _text(trace()) == _text(program)
    except Exception:
        return False


def _text(program: Any) -> tuple[Any, ...]:
    """A program as text, with its literal values."""
    values = {name: _frozen(value) for name, value in program.constants.items()}
    return (program.graph_module.code, tuple(sorted(values.items())))


def _far(value: Any) -> Any:
    return value + _FAR if type(value) in (int, float) else value


def _shown(value: Any) -> str:
    text = repr(value).replace("FakeTensor", "a tensor")
    return text if len(text) <= 40 else f"{text[:37]}..."


# --- around one run of the forward ------------------------------------------------------------------------------------

_Key = tuple[str, str]  # module path, attribute


@dataclass(frozen=True)
class _ByType:
    """What is known of a value by its type alone."""

    name: str

    def __repr__(self) -> str:
        return self.name


_ABSENT = _ByType("nothing")


class _Seen:
    """Compares just before and just after the model's forward, for export puts things back. `start` are attributes to
    begin with, `left` those that the forward changed, as it left them."""

    def __init__(self, model: Module, start: dict[_Key, Any] | None = None) -> None:
        self.model, self.start = model, start or {}
        self.changed: dict[_Key, tuple[Any, Any]] = {}
        self.left: dict[_Key, Any] = {}
        self.drew = False
        self.replaced = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [
            self.model.register_forward_pre_hook(self._before, prepend=True),
            self.model.register_forward_hook(self._after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, *_: Any) -> None:
        for (owner, name), value in self.start.items():
            self.model.get_submodule(owner).__dict__[name] = value
        self.attributes = _attributes(self.model)
        self.parameters = {path: id(value) for path, value in self.model.named_parameters(remove_duplicate=False)}
        self.sources = _random_sources()
        self.random = [_state(source) for source in self.sources]

    def _after(self, *_: Any) -> None:
        self.drew = [_state(source) for source in self.sources] != self.random
        now = _attributes(self.model)
        for key in dict.fromkeys((*self.attributes, *now)):
            before, after = self.attributes.get(key, _ABSENT), now.get(key, _ABSENT)
            if after != before:
                self.changed[key] = (before, after)
                self.left[key] = self.model.get_submodule(key[0]).__dict__.get(key[1])
        given = {path: id(value) for path, value in self.model.named_parameters(remove_duplicate=False)}
        self.replaced = next((path for path, own in self.parameters.items() if given.get(path) != own), "")


def _attributes(model: Module) -> dict[_Key, Any]:
    """Every attribute of every module: numbers, text, tensors, containers of them by value; other objects by type."""
    return {
        (path, name): _frozen(value)
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if name not in _OWN
    }


_PLAIN = (int, float, bool, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set)


def _frozen(value: Any) -> Any:
    """A value that compares equal as long as nothing in `value` changes; of tensors, the real ones' numbers."""
    if type(value) in _PLAIN:
        return value
    if type(value) is dict:
        return tuple((_frozen(key), _frozen(item)) for key, item in value.items())
    if type(value) in _CONTAINERS:
        return tuple(_frozen(item) for item in value)
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.numel() <= _LARGEST:
        with _disable_current_modes():  # a trace would take the numbers for unknown ones
            return (str(value.dtype), tuple(value.detach().flatten().tolist()))
    return _ByType(type(value).__name__)


_LARGEST = 1 << 16


def _random_sources() -> list[Any]:
    """Every Python and NumPy generator there is."""
    numpy = sys.modules.get("numpy")
    kinds = (random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    found = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    return [each for each in found if not isinstance(each, random.SystemRandom)]


def _state(source: Any) -> str:
    if isinstance(source, random.Random):
        return str(hash(source.getstate()))
    bits = source.bit_generator if hasattr(source, "bit_generator") else source._bit_generator
    return str(bits.state)


# --- where a change happens -------------------------------------------------------------------------------------------


class _Found(Exception):
    pass


def _place(trace: Trace, probe: Callable[[], Any]) -> str:
    """The line of the model's code during which what `probe` gives changes, "" where it is none of its lines."""
    last: list[Any] = ["", probe()]

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if not is_visible(frame.f_code.co_filename):
            return None
        if probe() != last[1] and last[0]:
            raise _Found
        if event in ("line", "call"):
            last[0] = quote(frame.f_code.co_filename, frame.f_lineno)
        return look

    before = sys.gettrace()
    try:
        sys.settrace(look)
        trace()
    except Exception:
        sys.settrace(before)
        return str(last[0])
    finally:
        sys.settrace(before)
    return ""
