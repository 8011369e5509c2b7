"""A table on a worker that does not hold it: a look-up fetches the rows of its ids from the servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

RowsOf = Callable[[str, Tensor], Tensor]  # of a table, the rows of rising ids
Way = tuple[int, int, tuple[int, ...], tuple[int, ...], int]  # of ids: which input, of what size, and which part


@dataclass
class Lookups:
    """The look-ups of the running share. `read`: for each table the ids, once each, and the rows, whose `grad` backward
    fills; in the order of the look-ups."""

    rows_of: RowsOf
    ways: dict[str, list[Way]]  # kept from share to share
    inputs: Sequence[Tensor] = ()
    ahead: Mapping[tuple[str, Way], tuple[Tensor, Tensor]] = field(default_factory=dict)
    read: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def take(self, table: ServedTable, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of all ids, each once, as a leaf of autograd; and the position of each id among them."""
        view = view_of(getattr(ids, "on_device", ids), self.inputs)
        unique, rows = self.ahead.get((table.table_name, view), (None, None)) if view is not None else (None, None)
        if view is not None and view not in self.ways.setdefault(table.table_name, []):
            self.ways[table.table_name].append(view)
        if unique is None or rows is None:
            unique = ids.unique()
            rows = self.rows_of(table.table_name, unique)
        rows = rows.detach().requires_grad_(table.trained)
        self.read.append((table.table_name, unique, rows))
        places = torch.searchsorted(unique, ids.contiguous())
        if ids.numel() and not torch.equal(unique[places.clamp(max=len(unique) - 1)], ids):
            raise AssertionError(f"{table.table_name}: the rows that were pulled are not those of its ids")
        return rows, places

    def pull_ahead(self, inputs: Sequence[Tensor]) -> dict[tuple[str, Way], tuple[Tensor, Tensor]]:
        """Rows that the next share will look up, if their ids are parts of its inputs."""
        pulled = {}
        for table, ways in [(name, list(ways)) for name, ways in list(self.ways.items())]:
            for view in ways:
                number, size, shape, stride, offset = view
                source = inputs[number].contiguous()
                if source.numel() == size:
                    ids = source.as_strided(shape, stride, source.storage_offset() + offset).unique()
                    pulled[table, view] = ids, self.rows_of(table, ids)
        return pulled


def view_of(ids: Tensor, inputs: Sequence[Tensor]) -> Way | None:
    """How ids are a view of an input; None if they are computed."""
    address = ids.untyped_storage().data_ptr()
    for number, source in enumerate(inputs):
        if source.untyped_storage().data_ptr() == address and source.dtype == ids.dtype and source.is_contiguous():
            offset = ids.storage_offset() - source.storage_offset()
            return number, source.numel(), tuple(ids.shape), tuple(ids.stride()), offset
    return None


class ServedTable(torch.Tensor):
    """Stand-in for the table in a model: it has its shape, no memory, and supports look-ups only."""

    table_name: str
    trained: bool
    lookups: Callable[[], Lookups]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looks_up = _LOOK_UPS.get(func)
        if looks_up is not None:
            return looks_up(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def served_table(shape: Sequence[int], name: str, trained: bool, lookups: Callable[[], Lookups]) -> ServedTable:
    table = cast(ServedTable, torch.Tensor._make_subclass(ServedTable, torch.empty(tuple(shape), device="meta")))
    table.table_name, table.trained, table.lookups = name, trained, lookups
    return table


def _padding(padding_idx: int | None, table: ServedTable, ids: Tensor) -> int | None:
    """Position of the padding among the rows, None if it is absent."""
    if padding_idx is None:
        return None
    index = padding_idx + table.shape[0] if padding_idx < 0 else padding_idx
    positions = (ids == index).nonzero()
    return int(positions[0]) if len(positions) else None


def _embedding(
    input: Tensor, weight: Any, padding_idx: int | None = None, max_norm: Any = None, *args: Any, **keywords: Any
) -> Tensor:
    rows, places = weight.lookups().take(weight, input)
    ids = weight.lookups().read[-1][1]
    return F.embedding(places, rows, _padding(padding_idx, weight, ids), None, *args, **keywords)


def _embedding_bag(
    input: Tensor, weight: Any, offsets: Tensor | None = None, *, padding_idx: int | None = None, **keywords: Any
) -> Tensor:
    rows, places = weight.lookups().take(weight, input)
    keywords["padding_idx"] = _padding(padding_idx, weight, weight.lookups().read[-1][1])
    return F.embedding_bag(places, rows, offsets, **keywords)


_LOOK_UPS: dict[Any, Callable[..., Tensor]] = {F.embedding: _embedding, F.embedding_bag: _embedding_bag}
