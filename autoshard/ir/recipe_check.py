"""Check of recipes: a graph file that was passed on must not bring code of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from keyword import iskeyword

from autoshard.ir.graph import Attribute, Graph, GraphFault, RecipeCall, require

OWN_CALLS = ("values", "packed", "result")
_TARGET = re.compile(rf"aten\.[A-Za-z_]\w*\.[A-Za-z_]\w*|{'|'.join(OWN_CALLS)}", re.ASCII)
_WORD = re.compile(r"%(\d+)(\.\d+)?|torch\.[a-z0-9_]+|[A-Za-z_][A-Za-z0-9_]*|", re.ASCII)
_PACKED = re.compile(r"[A-Za-z0-9+/]*=*", re.ASCII)


def check_recipes(graph: Graph) -> None:
    """GraphFault names the first call that is more than names and numbers: calls become code."""
    paths = {stored.path for stored in graph.parameters + graph.buffers}
    listed = [path for recipe in graph.recipes for path in recipe.paths]
    require(len(listed) == len(set(listed)), "two recipes make one tensor")
    for recipe in graph.recipes:
        require(recipe.paths and set(recipe.paths) <= paths, f"a recipe makes {recipe.paths}, not all of the model")
        require(recipe.calls, f"the recipe of {recipe.paths[0]} is empty")
        for number, call in enumerate(recipe.calls):
            _check_call(call, number, f"call {number} of the recipe of {recipe.paths[0]}")


def _check_call(call: RecipeCall, number: int, where: str) -> None:
    require(_TARGET.fullmatch(call.target), f"{where} is {call.target!r}")
    for name, _ in call.keywords:
        plain = name.isidentifier() and name.isascii() and not iskeyword(name)
        require(plain, f"{where} has the keyword {name!r}")
    arguments = (*call.arguments, *(value for _, value in call.keywords))
    if call.target in ("values", "packed"):
        _check_numbers(where, arguments)
        arguments = arguments[:2]
    for word in _words(arguments):
        match = _WORD.fullmatch(word)
        if match is None:
            raise GraphFault(f"{where} has {word!r}")
        require(match[1] is None or int(match[1]) < number, f"{where} takes {word}, which is not there yet")


def _check_numbers(where: str, arguments: tuple[Attribute, ...]) -> None:
    named = len(arguments) == 3 and isinstance(arguments[0], str) and arguments[0].startswith("torch.")
    require(named, f"{where}: dtype")
    shape, numbers = arguments[1:]
    require(isinstance(shape, tuple) and all(type(size) is int for size in shape), f"{where}: shape")
    if isinstance(numbers, tuple):
        plain = all(type(number) in (int, float, bool) for number in numbers)
    else:
        plain = _PACKED.fullmatch(str(numbers)) is not None
    require(plain, f"{where}: numbers")


def _words(value: Attribute) -> Iterable[str]:
    if isinstance(value, tuple):
        for item in value:
            yield from _words(item)
    elif isinstance(value, str):
        yield value
