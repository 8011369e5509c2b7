"""Python state that a forward reads and changes: random numbers and attributes, which a graph would keep unchanged."""

from __future__ import annotations

import gc
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any, NoReturn

import torch
from torch.nn import Module
from torch.utils._python_dispatch import _disable_current_modes

from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing import ONE_BY_ONE
from autoshard.graph_capture.tracing.call_caches import attributes_put_back, cached_alike
from autoshard.graph_capture.tracing.source_lines import is_visible, quote

_OWN = frozenset(Module().__dict__) - {"training"}
_FAR = torch.iinfo(torch.int32).max  # a step that no warm-up reaches
_RANDOM = "torch.rand, or nn.Dropout: packages draw torch's numbers alike on all replicas"
_STATE = (
    "a buffer for what changes from call to call: self.register_buffer(...), updated in place; what only the first "
    "call does (RWKV's rescaling for inference) is done where model(*inputs) is called once as the model is built"
)
_HOOKED = "register hooks where the model is built; those of its first call are there if it is called once there"
_REPLACED = "compute the changed weight under another name; parameters change in the optimizer only"
Export = Callable[[Module, tuple[Any, ...]], Any]  # torch.export
Trace = Callable[[], Any]  # runs it on the model and gives the program


def steady(model: Module, inputs: tuple[Any, ...], export: Export) -> Any:
    """Result of `export(model, inputs)`. CaptureError if the next call of the forward would compute something else."""

    def once(module: Module, args: tuple[Any, ...]) -> Any:
        with hooks_put_back(model):
            return export(module, args)

    def trace() -> Any:
        with _without_new_attributes(model):
            return once(model, inputs)

    seen = _Seen(model)
    with seen.watching():
        program = trace()
    if seen.replaced:
        raise CaptureError(f"the forward replaces the parameter {seen.replaced}", _REPLACED)
    if seen.drew:
        sources = random_sources(model)
        place = _place(trace, lambda: [_state(source) for source in sources])
        if place:
            raise CaptureError(f"the forward draws from Python's or NumPy's random numbers at {place}", _RANDOM)
    alike = not (seen.changed or seen.hooks) or _goes_on_alike(model, trace, program, seen)
    if not alike and not cached_alike(model, inputs, once, lambda: _attributes(model)):
        _refuse(model, trace, seen)
    return program


@contextmanager
def _without_new_attributes(model: Module) -> Iterator[None]:
    """Remove, at the end, attributes that the forward added; `export` restores those that were there."""
    names = [(module, {*module.__dict__}) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in names:
            for name in [name for name in module.__dict__ if name not in attributes]:
                del module.__dict__[name]


@contextmanager
def modes_put_back(model: Module) -> Iterator[None]:
    """Every module has its own mode again at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def hooks_put_back(model: Module) -> Iterator[None]:
    """Restore hooks and modes at the end. Attributes that the forward sets are removed, so its next call would register
    its hooks again."""
    stores = [(store, store.copy()) for module in model.modules() for store in _stores(module).values()]
    try:
        with modes_put_back(model):
            yield
    finally:
        for store, was in stores:
            store.clear()
            store.update(was)


def _goes_on_alike(model: Module, trace: Trace, program: Any, first: _Seen) -> bool:
    """A second call with the attributes that the first left, and one far away where they change again."""
    second = _Seen(model, first.left, first.hooks)
    same = _traces_alike(trace, second, program)
    if same and (second.changed or second.hooks):
        left = first.left | {key: _far(value) for key, value in second.left.items()}
        same = _traces_alike(trace, _Seen(model, left, [*first.hooks, *second.hooks]), program)
    return same


def _refuse(model: Module, trace: Trace, first: _Seen) -> NoReturn:
    if not first.changed:
        where = first.hooks[0].owner or "the model"
        raise CaptureError(f"the forward adds or removes forward hooks of {where} and depends on them", _HOOKED)
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
    """Value of which only the type is known."""

    name: str

    def __repr__(self) -> str:
        return self.name


_ABSENT = _ByType("nothing")
_HOOKS = tuple(name for name in Module().__dict__ if name.startswith(("_forward_hooks", "_forward_pre_hooks")))


@dataclass(frozen=True)
class _Hooks:
    """Changes that a call made to one table of hooks of the module at `owner`."""

    owner: str
    name: str
    added: dict[int, Any]
    removed: frozenset[int]

    def apply(self, model: Module) -> None:
        store = model.get_submodule(self.owner).__dict__[self.name]
        for key in self.removed:
            store.pop(key, None)
        store.update(self.added)


class _Seen:
    """Compares just before and just after the model's forward, for export puts things back. `start` are attributes to
    begin with, `left` those that the forward changed, as it left them; so with changes of hooks."""

    def __init__(self, model: Module, start: dict[_Key, Any] | None = None, start_hooks: Sequence[_Hooks] = ()) -> None:
        self.model, self.start, self.start_hooks = model, start or {}, start_hooks
        self.hooks: list[_Hooks] = []
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
        for change in self.start_hooks:
            change.apply(self.model)
        self.attributes, self.hooked = _attributes(self.model), _hooks(self.model)
        self.parameters = {path: id(value) for path, value in self.model.named_parameters(remove_duplicate=False)}
        self.sources = random_sources(self.model)
        self.random = [_state(source) for source in self.sources]

    def _after(self, *_: Any) -> None:
        self.drew = [_state(source) for source in self.sources] != self.random
        now = _attributes(self.model)
        for key in dict.fromkeys((*self.attributes, *now)):
            before, after = self.attributes.get(key, _ABSENT), now.get(key, _ABSENT)
            if after != before:
                self.changed[key] = (before, after)
                self.left[key] = self.model.get_submodule(key[0]).__dict__.get(key[1])
        for (owner, name), hooks in _hooks(self.model).items():
            before = self.hooked.get((owner, name), {})
            if hooks.keys() != before.keys():
                added = {key: hook for key, hook in hooks.items() if key not in before}
                self.hooks.append(_Hooks(owner, name, added, frozenset(before.keys() - hooks.keys())))
        ids = {path: id(value) for path, value in self.model.named_parameters(remove_duplicate=False)}
        self.replaced = next((path for path, old_id in self.parameters.items() if ids.get(path) != old_id), "")


def _attributes(model: Module) -> dict[_Key, Any]:
    """Every attribute of every module: numbers, text, tensors, containers of them by value; other objects by type."""
    return {
        (path, name): _frozen(value)
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if name not in _OWN
    }


def _hooks(model: Module) -> dict[_Key, dict[int, Any]]:
    """Current tables of forward hooks of every module."""
    return {
        (path, name): dict(store) for path, module in model.named_modules() for name, store in _stores(module).items()
    }


def _stores(module: Module) -> dict[str, dict[int, Any]]:
    """Tables of forward hooks of a module by name; torch's scripted modules may lack some."""
    return {name: module.__dict__[name] for name in _HOOKS if name in module.__dict__}


_PLAIN = (int, float, bool, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set)
_NO_HOLDERS = (ModuleType, torch.Tensor, Module)


def _frozen(value: Any) -> Any:
    """A value that compares equal as long as nothing in `value` changes; of tensors, the real ones' numbers."""
    if type(value) in _PLAIN:
        return value
    if type(value) is dict:
        return tuple((_frozen(key), _frozen(item)) for key, item in value.items())
    if type(value) in _CONTAINERS:
        return tuple(_frozen(item) for item in value)
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.numel() <= ONE_BY_ONE:
        with _disable_current_modes():  # a trace would take the numbers for unknown ones
            return (str(value.dtype), tuple(value.detach().flatten().tolist()))
    return _ByType(type(value).__name__)


def random_sources(model: Module) -> list[Any]:
    """Python's and NumPy's generators that the model's code draws from: the shared ones, and those that its modules and
    the globals of its files hold, in containers and objects of users' classes. To look at all objects of the process
    took half of a capture; what other generators change is seen where the forward is called again."""
    numpy = sys.modules.get("numpy")
    kinds = (random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    shared = [getattr(draw, "__self__", None) for draw in (random.random, numpy.random.random if numpy else None)]
    generators = {id(each): each for each in shared if isinstance(each, kinds)}
    files = {type(part).__module__ for part in model.modules() if not type(part).__module__.startswith("torch.")}
    held: list[Any] = [*model.modules(), *(vars(sys.modules[name]) for name in files if name in sys.modules)]
    others = {name: module for name, module in [*sys.modules.items()] if name not in files and not _is_users(module)}
    others.pop("builtins", None)  # functions and containers
    seen = {id(each) for each in held} | {id(getattr(module, "__dict__", None)) for module in others.values()}
    while held:
        near = {id(x): x for x in gc.get_referents(*held) if gc.is_tracked(x)}
        held = [x for key, x in near.items() if key not in seen]
        seen |= near.keys()
        generators |= {id(x): x for x in held if isinstance(x, kinds)}
        held = [x for x in held if not isinstance(x, _NO_HOLDERS)]
        held = [x for x in held if (x if isinstance(x, type) else type(x)).__module__ not in others]
    return [each for each in generators.values() if not isinstance(each, random.SystemRandom)]


def _is_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None) or "<"
    return is_visible(file) and "site-packages" not in file


def _state(source: Any) -> bytes:
    if isinstance(source, random.Random):
        return pickle.dumps(source.getstate())
    bits = source.bit_generator if hasattr(source, "bit_generator") else source._bit_generator
    return pickle.dumps(bits.state)


# --- where a change happens -------------------------------------------------------------------------------------------


class _Found(Exception):
    pass


def _place(trace: Trace, probe: Callable[[], Any]) -> str:
    """The line of the model's code during which what `probe` gives changes, "" where it is none of its lines."""
    last: list[Any] = ["", probe()]
    lines: list[str] = []

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if not is_visible(frame.f_code.co_filename):
            return None
        if probe() != last[1] and last[0]:
            lines.append(str(last[0]))
            raise _Found
        if event in ("line", "call"):
            last[0] = quote(frame.f_code.co_filename, frame.f_lineno)
        return look

    before = sys.gettrace()
    try:
        sys.settrace(look)
        trace()
    except Exception:  # torch may have made another of it
        pass
    finally:
        sys.settrace(before)
    return lines[0] if lines else ""
