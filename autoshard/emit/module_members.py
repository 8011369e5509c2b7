"""Members of a class, named after the original model: parameters and child modules as a tree.

An original name that is no Python name gets an attribute of its own; state dicts go by the original ones, which every
parameter and buffer carries with it (`sharding(parameter).name`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from autoshard.code_text import distinct, fresh, quoted
from autoshard.ir.program import ProgramParameter
from autoshard.program.module_tree import Child, Definition

Leaf = ProgramParameter | Child

# What nn.Module and its lists and dicts have themselves: no member may hide it.
_TAKEN = """
    T_destination _apply _backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl
    _forward_hooks _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks
    _forward_pre_hooks_with_kwargs _get_backward_hooks _get_backward_pre_hooks _get_name _is_full_backward_hook
    _load_from_state_dict _load_state_dict_post_hooks _load_state_dict_pre_hooks
    _maybe_warn_non_full_backward_hook _modules _named_members _non_persistent_buffers_set _parameters
    _register_load_state_dict_pre_hook _register_state_dict_hook _replicate_for_data_parallel
    _save_to_state_dict _slow_forward _state_dict_hooks _state_dict_pre_hooks _version _wrapped_call_impl
    add_module apply bfloat16 buffers call_super_init children clear compile cpu cuda double dump_patches eval
    extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu items keys
    load_state_dict modules mtia named_buffers named_children named_modules named_parameters parameters pop
    register_backward_hook register_buffer register_forward_hook register_forward_pre_hook
    register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook
    register_load_state_dict_pre_hook register_module register_parameter register_state_dict_post_hook
    register_state_dict_pre_hook requires_grad_ self set_extra_state set_submodule sharding share_memory
    state_dict to to_empty train training type update values xpu zero_grad
"""
TAKEN = frozenset(_TAKEN.split())


@dataclass
class Members:
    """Original name -> a parameter, a child module, or more members. `buffers` are values of the whole program."""

    buffers: frozenset[str] = frozenset()
    items: dict[str, Members | Leaf] = field(default_factory=dict)
    is_class: bool = False
    numbered: Members | None = None  # of a class, such as nn.Sequential: those whose names are numbers

    @property
    def numbers_name(self) -> str:
        """The attribute that holds the numbered members of a class."""
        return fresh("layers", self.attributes().values())

    def member(self, name: str) -> Members | Leaf:
        return self.items[name] if name in self.items or self.numbered is None else self.numbered.items[name]

    def attributes(self) -> dict[str, str]:
        """Original name -> attribute, where they are held as attributes."""
        return distinct(self.items, TAKEN)

    @property
    def is_list(self) -> bool:
        """True for 0, 1, 2, ... that are all modules: an nn.ModuleList."""
        return self._is_numbered and self._are_modules

    @property
    def is_parameter_list(self) -> bool:
        """True for 0, 1, 2, ... that are all parameters: an nn.ParameterList."""
        return self._is_numbered and all(self._is_parameter(member) for member in self.items.values())

    @property
    def is_dict(self) -> bool:
        """True for names that are no attribute names and are all modules: an nn.ModuleDict."""
        plain = all(name == attribute for name, attribute in self.attributes().items())
        return self._are_modules and not plain and not TAKEN & set(self.items)

    @property
    def _is_numbered(self) -> bool:
        return bool(self.items) and list(self.items) == [str(i) for i in range(len(self.items))]

    def _is_parameter(self, member: Members | Leaf) -> bool:
        return isinstance(member, ProgramParameter) and member.value not in self.buffers

    @property
    def _are_modules(self) -> bool:
        return not any(isinstance(member, ProgramParameter) for member in self.items.values())


def members(definition: Definition, state: dict[str, ProgramParameter], buffers: frozenset[str]) -> Members:
    """Numbered members in the order of their numbers, the others in order of appearance."""
    root = Members(buffers, is_class=True)
    for path, value in definition.parameters:
        _insert(root, path, state[value])
    for child in definition.children:
        _insert(root, child.path, child)
    _sort(root)
    numbers = {name: root.items.pop(name) for name in [*root.items] if name.isdecimal()}
    root.numbered = Members(buffers, dict(sorted(numbers.items(), key=lambda item: int(item[0])))) if numbers else None
    return root


def _insert(root: Members, path: str, leaf: Leaf) -> None:
    *scopes, name = path.split(".")
    for scope in scopes:
        inner = root.items.setdefault(scope, Members(root.buffers))
        assert isinstance(inner, Members), path
        root = inner
    assert name not in root.items, path
    root.items[name] = leaf


def _sort(node: Members) -> None:
    if node.items and all(name.isdecimal() for name in node.items):
        node.items = dict(sorted(node.items.items(), key=lambda item: int(item[0])))
    for inner in node.items.values():
        if isinstance(inner, Members):
            _sort(inner)


def access(root: Members, path: str, inside: Callable[[Child], Members]) -> str:
    """Expression by which the class's own code reads `path`: `self.h[0].attn.weight`. `inside`: what a child holds."""
    text, node = "self", root
    for name in path.split("."):
        text += step(node, name)
        inner = node.member(name)
        node = inner if isinstance(inner, Members) else inside(inner) if isinstance(inner, Child) else node
    return text


def container(root: Members, path: str, inside: Callable[[Child], Members]) -> tuple[str, Members]:
    """The list, dict or holder at `path`; "" is where a class keeps its own numbered members."""
    if not path:
        assert root.numbered is not None
        return f"self.{root.numbers_name}", root.numbered
    node: Members | Leaf = root
    for name in path.split("."):
        assert isinstance(node, Members), path
        node = node.member(name)
    assert isinstance(node, Members), path
    return access(root, path, inside), node


def step(node: Members, name: str) -> str:
    """Text that leads from what holds a member to the member."""
    if node.numbered is not None and name in node.numbered.items:
        return f".{node.numbers_name}{step(node.numbered, name)}"
    if node.is_class:
        return f".{node.attributes()[name]}"
    if node.is_list or node.is_parameter_list:
        return f"[{name}]"
    return f"[{quoted(name)}]" if node.is_dict else f".{node.attributes()[name]}"


def unsaved(node: Members, text: str) -> Iterator[tuple[str, str, ProgramParameter]]:
    """(holder, attribute, buffer) of all buffers below `text` that no state dict holds."""
    for name, inner in node.items.items():
        if isinstance(inner, Members):
            yield from unsaved(inner, text + step(node, name))
        elif isinstance(inner, ProgramParameter) and not inner.persistent:
            yield text, node.attributes()[name], inner
