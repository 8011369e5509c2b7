"""Watches a constructor and keeps, for each tensor it makes, the calls that make it: nothing is computed twice.

A call is kept with what it reads and writes, storage by storage, so that views and changes in place replay as they ran.
"""

from __future__ import annotations

import base64
import keyword
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.graph_capture.tracing import LARGE_ELEMENTS, LISTED, ONE_BY_ONE
from autoshard.ir.graph import Attribute, RecipeCall

_PLACES = ("device", "layout", "pin_memory", "non_blocking", "generator")
_FILLS = ("normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "bernoulli_")
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")

Place = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]  # storage, dtype, sizes, strides, offset


@dataclass(frozen=True)
class _Step:
    """A call as it ran. `reads` are the storages whose numbers it uses, `writes` those it makes or changes."""

    call: RecipeCall | None  # None where it can't be written down
    needs: tuple[int, ...]  # the steps whose results it takes
    reads: frozenset[int]
    writes: frozenset[int]
    kind: str = ""  # "view", "change" in place; "fill": a change that does not look, "cover": one of a whole storage
    leaf: torch.Tensor | None = None  # numbers that no call made, as they were at `version`
    version: int = 0
    source: tuple[str, int] | None = None  # of a whole `copy_` or `clone`: the like tensor, and its storage


@dataclass
class CallRecorder:
    """All calls of a constructor, in order."""

    steps: list[_Step] = field(default_factory=list)
    named: dict[Place, str] = field(default_factory=dict)  # the reference to each view seen: `%3`, `%3.1`
    alive: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)  # address -> the storage's number
    storages: int = 0
    writers: dict[int, list[int]] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)  # storages whose numbers come from somewhere unseen

    # --- watching ---

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record one call that has just run."""
        inputs = list(_tensors((tuple(args), dict(kwargs))))
        outputs = list(_tensors(result))
        written = _written(func, args, kwargs)
        if not written and outputs and all(self._place(out) in self.named for out in outputs):
            return  # another name of what is known: detach, alias
        needs: list[int] = []
        arguments = tuple(self._argument(value, needs) for value in args)
        options = {name: value for name, value in kwargs.items() if name not in _PLACES}
        if not inputs and outputs and _takes_dtype(func) and options.get("dtype") is None:
            options["dtype"] = outputs[0].dtype  # not what the default happens to be elsewhere
        keywords = tuple((name, self._argument(value, needs)) for name, value in options.items())
        odd = func.namespace != "aten" or any(map(keyword.iskeyword, options))
        known = not odd and _UNKNOWN not in _flat((arguments, keywords))
        target = f"aten.{func.overloadpacket.__name__}.{_without_generator(func)}"
        step = self._step(func, inputs, outputs, written)
        call = RecipeCall(target, arguments, keywords) if known else None
        source = None
        if target == "aten.copy_.default" and step.kind == "cover":
            source = self._source(arguments[1], *inputs[:2])
        elif target == "aten.clone.default":
            source = self._source(arguments[0], outputs[0], inputs[0])
        number = self._add(replace(step, call=call, needs=tuple(needs), source=source))
        several = isinstance(result, tuple | list)
        for position, out in enumerate(result if several else [result]):
            if isinstance(out, torch.Tensor) and not any(out is tensor for tensor in written):
                self.named.setdefault(self._place(out), f"%{number}.{position}" if several else f"%{number}")

    def _step(
        self, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], written: list[torch.Tensor]
    ) -> _Step:
        read = frozenset(map(self._storage, inputs))
        if not written:
            fresh = frozenset(map(self._storage, outputs)) - read
            return _Step(None, (), read, fresh, "" if fresh else "view")
        changed = frozenset(map(self._storage, written))
        if len(written) > 1 or func.overloadpacket.__name__ not in _FILLS:
            return _Step(None, (), read, changed, "change")
        others = frozenset(self._storage(tensor) for tensor in inputs if tensor is not written[0])
        return _Step(None, (), others, changed, "cover" if is_whole(written[0]) else "fill")

    def _source(self, name: Attribute, copy: torch.Tensor, source: torch.Tensor) -> tuple[str, int] | None:
        alike = copy.dtype == source.dtype and copy.shape == source.shape
        return (str(name), self._storage(source)) if alike else None

    def _add(self, step: _Step) -> int:
        for storage in step.writes:
            self.writers.setdefault(storage, []).append(len(self.steps))
        self.steps.append(step)
        return len(self.steps) - 1

    def forget(self, tensor: torch.Tensor) -> None:
        """Note that the numbers of `tensor` come from something that no call shows."""
        self.unknown.add(self._storage(tensor))

    def note_values(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Note that the numbers of `tensor` are `values`, not the result of a call."""
        self.named[self._place(tensor)] = f"%{self._leaf(values)}"

    def _storage(self, tensor: torch.Tensor) -> int:
        """Number of a storage: a separate one for each, though an address may be used again."""
        storage = tensor.untyped_storage()
        entry = self.alive.get(storage._cdata)
        if entry is None or entry[0].expired():
            self.storages += 1
            entry = self.alive[storage._cdata] = StorageWeakRef(storage), self.storages
        return entry[1]

    def _place(self, tensor: torch.Tensor) -> Place:
        return self._storage(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()

    # --- arguments ---

    def _argument(self, value: Any, needs: list[int]) -> Attribute:
        if isinstance(value, torch.Tensor):
            reference = self._reference(value)
            if reference != _UNKNOWN:
                needs.append(_step_of(reference))
            return reference
        if isinstance(value, tuple | list):
            return tuple(self._argument(item, needs) for item in value)
        if isinstance(value, torch.dtype | torch.memory_format):
            return str(value)
        word = isinstance(value, str) and value.isidentifier() and value.isascii()
        plain: Attribute = value if word or value is None or type(value) in (int, float, bool) else _UNKNOWN
        return plain

    def _reference(self, tensor: torch.Tensor) -> str:
        """Name of `tensor` for later calls; a view that no call made is taken from another tensor of its storage."""
        place = self._place(tensor)
        if place not in self.named:
            base = next((name for other, name in self.named.items() if other[:2] == place[:2]), None)
            if base is not None:
                call = RecipeCall("aten.as_strided.default", (base, place[2], place[3], place[4]), ())
                step = _Step(call, (_step_of(base),), frozenset({place[0]}), frozenset(), "view")
                self.named[place] = f"%{self._add(step)}"
            elif tensor.is_meta or tensor.numel() > LARGE_ELEMENTS:  # weights that a constructor loads are not kept
                return _UNKNOWN
            else:
                self.named[place] = f"%{self._leaf(tensor)}"
        return self.named[place]

    def _leaf(self, values: torch.Tensor) -> int:
        call = RecipeCall("values", (), ())
        return self._add(_Step(call, (), frozenset(), frozenset(), "", values.detach(), values._version))

    # --- what made a tensor ---

    def calls(self, tensor: torch.Tensor) -> tuple[RecipeCall, ...]:
        """The calls that make the numbers of `tensor` as they are now; () where they are not known."""
        numbers, reference = self.origin(tensor)
        if not numbers:
            return ()
        order = {step: position for position, step in enumerate(numbers)}
        calls = [_renumbered(self._written_down(self.steps[number]), order) for number in numbers]
        last = _moved(reference, order)
        return tuple(calls) if last == f"%{len(calls) - 1}" else (*calls, RecipeCall("result", (last,), ()))

    def origin(self, tensor: torch.Tensor) -> tuple[list[int], str]:
        """Steps of the recipe, [] if there is none, and the name of the result; a whole copy has its source's."""
        storage = self._storage(tensor)
        if storage not in self.writers and self._place(tensor) not in self.named:
            return [], ""
        reference = self._reference(tensor)
        numbers = self._recipe_steps(reference, storage)
        while numbers and (source := self._copied(numbers[-1], reference)):
            reference, storage = source
            numbers = self._recipe_steps(reference, storage)
        return numbers, reference

    def _recipe_steps(self, reference: str, storage: int) -> list[int]:
        """The steps of the recipe; [] where there is none."""
        wanted = self._needed(_step_of(reference), storage) if reference != _UNKNOWN else None
        numbers = self._used(self._uncovered(wanted), _step_of(reference)) if wanted else []
        return numbers if self._all_filled(numbers) else []

    def _copied(self, number: int, reference: str) -> tuple[str, int] | None:
        """Source of `reference`, if this step copies it as a whole and the source has not changed since."""
        step = self.steps[number]
        if step.source is None or step.call is None:
            return None
        if reference != (step.call.arguments[0] if step.kind == "cover" else f"%{number}"):
            return None
        return step.source if all(writer < number for writer in self.writers.get(step.source[1], ())) else None

    def _written_down(self, step: _Step) -> RecipeCall:
        assert step.call is not None
        return step.call if step.leaf is None else values_call(step.leaf)

    def _needed(self, first: int, storage: int) -> list[int] | None:
        """The steps that the result depends on: what they take, and all that writes what they read."""
        wanted: set[int] = set()
        todo = [first, *self.writers.get(storage, ())]
        while todo:
            number = todo.pop()
            if number in wanted:
                continue
            step = self.steps[number]
            changed = step.leaf is not None and step.leaf._version != step.version
            if step.call is None or changed or (step.reads | step.writes) & self.unknown or len(wanted) > ONE_BY_ONE:
                return None
            wanted.add(number)
            todo += step.needs
            todo += [writer for touched in step.reads | step.writes for writer in self.writers.get(touched, ())]
        return sorted(wanted)

    def _uncovered(self, wanted: Sequence[int]) -> list[int]:
        """The steps, without writes to a storage that are covered before anything reads it."""
        pending: dict[int, list[int]] = defaultdict(list)
        dropped: set[int] = set()
        for number in wanted:
            step = self.steps[number]
            for read in step.reads if step.kind != "view" else ():
                pending[read].clear()
            for storage in step.writes if step.kind in ("fill", "cover") else ():
                if step.kind == "cover":
                    dropped.update(pending[storage])
                    pending[storage].clear()
                pending[storage].append(number)
        return [number for number in wanted if number not in dropped]

    def _all_filled(self, numbers: Sequence[int]) -> bool:
        """False if a storage begins as uninitialised memory and no call covers all of it."""
        steps = [self.steps[number] for number in numbers]
        covered = {storage for step in steps if step.kind == "cover" for storage in step.writes}
        return all(step.writes <= covered for step in steps if _is_empty(step.call))

    def _used(self, wanted: Sequence[int], last: int) -> list[int]:
        used, numbers = {last}, []
        for number in reversed(wanted):
            step = self.steps[number]
            if number in used or step.kind in ("change", "fill", "cover"):
                numbers.append(number)
                used.update(step.needs)
        return numbers[::-1]


_UNKNOWN = "%?"


def values_call(tensor: torch.Tensor) -> RecipeCall:
    """The numbers themselves: written out where they are few, else packed."""
    plain = tensor.detach().cpu().contiguous()
    dtype, shape = str(tensor.dtype), tuple(tensor.shape)
    if plain.numel() <= LISTED and not plain.is_complex() and bool(torch.isfinite(plain).all()):
        return RecipeCall("values", (dtype, shape, tuple(plain.flatten().tolist())), ())
    packed = zlib.compress(plain.view(-1).view(torch.uint8).numpy().tobytes(), 9)
    return RecipeCall("packed", (dtype, shape, base64.b64encode(packed).decode()), ())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that the call changes."""
    by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    changed = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [tensor for name in changed if name in by_name for tensor in _tensors(by_name[name])]


def _is_empty(call: RecipeCall | None) -> bool:
    return call is not None and call.target.removeprefix("aten.").partition(".")[0] in _EMPTY


def _without_generator(func: Any) -> str:
    """The overload that draws the same without a generator of its own, which is no part of a call that is kept."""
    words = func._overloadname.split("_")
    plain = "_".join(word for word in words if word != "generator") or "default"
    return plain if "generator" in words and plain in func.overloadpacket.overloads() else str(func._overloadname)


def _takes_dtype(func: Any) -> bool:
    return any(a.name == "dtype" for a in func._schema.arguments)


def is_whole(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes())


def _step_of(reference: str) -> int:
    return int(reference[1:].partition(".")[0])


def _moved(reference: str, order: Mapping[int, int]) -> str:
    number, dot, position = reference[1:].partition(".")
    return f"%{order[int(number)]}{dot}{position}"


def _renumbered(call: RecipeCall, order: Mapping[int, int]) -> RecipeCall:
    def now(value: Attribute) -> Attribute:
        if isinstance(value, tuple):
            return tuple(now(item) for item in value)
        return _moved(value, order) if isinstance(value, str) and value.startswith("%") else value

    arguments = tuple(now(value) for value in call.arguments)
    return RecipeCall(call.target, arguments, tuple((name, now(value)) for name, value in call.keywords))
