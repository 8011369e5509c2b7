"""What a class holds, under the names of the original module: parameters and child modules as a tree of members."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autoshard.program.model import ProgramParameter
from autoshard.program.modules import Child, Definition

Leaf = ProgramParameter | Child


@dataclass
class Members:
    """Attribute name -> a parameter, a child module, or more members."""

    items: dict[str, Members | Leaf] = field(default_factory=dict)

    @property
    def is_list(self) -> bool:
        """0, 1, 2, ... and all of them modules: an nn.ModuleList."""
        numbers = [str(i) for i in range(len(self.items))]
        return list(self.items) == numbers and not any(isinstance(m, ProgramParameter) for m in self.items.values())

    @property
    def is_dict(self) -> bool:
        """Names that are no attribute names, and all of them modules: an nn.ModuleDict."""
        named = all(name.isidentifier() for name in self.items)
        return not named and not any(isinstance(m, ProgramParameter) for m in self.items.values())


def members(definition: Definition, state: dict[str, ProgramParameter]) -> Members:
    """Numbered members in the order of their numbers, the others in order of appearance."""
    root = Members()
    for path, value in definition.parameters:
        _insert(root, path, state[value])
    for child in definition.children:
        _insert(root, child.path, child)
    _sort(root)
    return root


def _insert(root: Members, path: str, leaf: Leaf) -> None:
    *scopes, name = path.split(".")
    for scope in scopes:
        inner = root.items.setdefault(scope, Members())
        assert isinstance(inner, Members), path
        root = inner
    root.items[name] = leaf


def _sort(node: Members) -> None:
    if node.items and all(name.isdecimal() for name in node.items):
        node.items = dict(sorted(node.items.items(), key=lambda item: int(item[0])))
    for inner in node.items.values():
        if isinstance(inner, Members):
            _sort(inner)


def access(root: Members, path: str) -> str:
    """How the class's own code reaches what is held at `path`: `self.h[0].attn.weight`."""
    text, node = "self", root
    for name in path.split("."):
        text += _step(node, name)
        inner = node.items.get(name)
        node = inner if isinstance(inner, Members) else _INSIDE
    return text


_INSIDE = Members()  # inside a child class, members have their own attribute names


def _step(node: Members, name: str) -> str:
    if node.items and node.is_list:
        return f"[{name}]"
    if node.items and node.is_dict:
        return f'["{name}"]'
    return f".{name}" if name.isidentifier() else f'.get_submodule("{name}")'


def leaves(node: Members, path: str = "") -> Iterator[tuple[str, Leaf]]:
    for name, inner in node.items.items():
        here = f"{path}.{name}" if path else name
        if isinstance(inner, Members):
            yield from leaves(inner, here)
        else:
            yield here, inner
