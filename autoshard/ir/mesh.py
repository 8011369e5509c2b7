"""The logical mesh: named axes, outermost (slowest links) first; ranks are row-major over it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from autoshard.errors import UsageError

_AXIS = re.compile(r"^([A-Za-z][A-Za-z0-9_]*)=([0-9]{1,18})$")
MOST_AXES = 8  # the ways to split an operator multiply by them
MOST_LETTERS = 64  # of a name


@dataclass(frozen=True)
class Mesh:
    """Named axes with their sizes, outermost first. Prints as `dp=2,tp=4` and parses back."""

    axes: tuple[tuple[str, int], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    def index(self, axis: str) -> int:
        """Position of an axis; raises UsageError that lists the axes."""
        if axis not in self.names:
            raise UsageError(f"unknown mesh axis {axis!r}: the mesh {self} has {', '.join(self.names)}", self.names[0])
        return self.names.index(axis)

    def axis_size(self, axis: str) -> int:
        return self.sizes[self.index(axis)]

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Row-major coordinates of a rank, one per axis."""
        assert 0 <= rank < self.size
        result = []
        for size in reversed(self.sizes):
            rank, coordinate = divmod(rank, size)
            result.append(coordinate)
        return tuple(reversed(result))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @staticmethod
    def parse(text: str) -> Mesh:
        """`dp=2,tp=4` -> Mesh. Raises UsageError on bad syntax, a zero size or a repeated name."""
        axes: list[tuple[str, int]] = []
        if not text.strip():
            raise UsageError(
                "the mesh is empty: expected name=size", "--mesh dp=2,tp=4, or --devices 8 to search for one"
            )
        for part in text.split(","):
            match = _AXIS.match(part.strip())
            if match is None:
                raise UsageError(f"mesh {text!r}: expected name=size, got {part!r}", "--mesh dp=2,tp=4")
            axes.append((match[1], int(match[2])))
        names = [name for name, _ in axes]
        if len(axes) > MOST_AXES:
            raise UsageError(f"the mesh has {len(axes)} axes, expected at most {MOST_AXES}", "--mesh dp=2,tp=4")
        for name, size in axes:
            if len(name) > MOST_LETTERS:
                raise UsageError(f"mesh axis {name[:12]}…: expected at most {MOST_LETTERS} letters", "--mesh dp=2,tp=4")
            if size < 1:
                raise UsageError(
                    f"mesh {text!r}: axis {name} has size {size}, expected at least 1", f"--mesh {_mended(axes)}"
                )
            if names.count(name) > 1:
                raise UsageError(f"mesh {text!r}: axis {name} is named twice", f"--mesh {_mended(axes)}")
        return Mesh(tuple(axes))


def _mended(axes: list[tuple[str, int]]) -> str:
    """The axes with sizes of at least 1, each name once: what was perhaps meant."""
    names = [name for name, _ in axes]
    spare = iter(
        name for name in ("dp", "tp", "cp", "ep", *(f"axis{n}" for n in range(len(axes)))) if name not in names
    )
    return ",".join(
        f"{next(spare) if name in names[:n] else name}={max(size, 1)}" for n, (name, size) in enumerate(axes)
    )
