"""`initial.py` of a package: what the original's constructor computes, as the calls that it made.

`graph.check` ensures that calls hold names and numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.code_text import WIDTH, fresh, identifier, printable, quoted
from autoshard.emit.code_lines import statement
from autoshard.ir.graph import Attribute, Recipe, RecipeCall

_HEAD = '''"""Buffers and parameters as the original's constructor computes them, by their names in its state dict."""

from __future__ import annotations

from collections.abc import Callable
'''
_INDENT = "    "
_OWN = ("torch", "aten", "Tensor", "Callable", "unpacked", "INITIAL", "annotations", "float", "dict")


def initial_file(recipes: Sequence[Recipe]) -> str:
    """The text of initial.py."""
    names: list[str] = []
    for recipe in recipes:
        names.append(fresh(identifier(recipe.paths[0].rpartition(".")[2], _OWN), names))
    blocks = ["\n".join(_function(name, recipe)) for name, recipe in zip(names, recipes, strict=True)]
    uses_aten = any("aten." in block for block in blocks)
    imports = ["import torch"] if uses_aten or any("torch." in block for block in blocks) else []
    imports.append("from torch import Tensor")
    imports += ["", "from runtime import unpacked"] if any("unpacked(" in block for block in blocks) else []
    head = "\n".join([_HEAD, *imports, *(["", "aten = torch.ops.aten"] if uses_aten else [])])
    table = "\n".join(_table(recipes, names))
    return (f"{head}\n\n{table}" if not blocks else "\n\n\n".join([head, *blocks, table])) + "\n"


def _function(name: str, recipe: Recipe) -> list[str]:
    more = f" and {len(recipe.paths) - 1} more" if len(recipe.paths) > 1 else ""
    used = {reference for call in recipe.calls for reference in _references((call.arguments, call.keywords))}
    lines = [f"def {name}() -> Tensor:", f"    # {printable(recipe.paths[0])}{more}"]
    last = len(recipe.calls) - 1
    for number, call in enumerate(recipe.calls):
        target = "return " if number == last else f"x{number} = " if number in used else ""
        lines += _line(target, call)
    return lines


def _line(target: str, call: RecipeCall) -> list[str]:
    if call.target == "packed":
        dtype, shape, text = call.arguments
        wide = WIDTH - len(_INDENT)
        packed = [str(text)[i : i + wide] for i in range(0, len(str(text)), wide)]
        head = f'    {target}unpacked({_dtype(dtype)}, {_value(shape)}, """'
        return [head, *(f"{_INDENT}{row}" for row in packed), '    """)']
    return statement(target + _expression(call), 1)


def _expression(call: RecipeCall) -> str:
    if call.target == "result":
        return _value(call.arguments[0])
    if call.target == "values":
        dtype, shape, numbers = call.arguments
        return f"torch.tensor({_value(numbers, '[]')}, dtype={_dtype(dtype)}).reshape({_value(shape)})"
    arguments = [_value(value, "[]") for value in call.arguments]
    arguments += [f"{name}={_value(value, '[]')}" for name, value in call.keywords]
    return f"{call.target}({', '.join(arguments)})"


def _dtype(value: Attribute) -> str:
    assert isinstance(value, str)
    return value


def _value(value: Attribute, brackets: str = "()") -> str:
    """An argument as Python text."""
    if isinstance(value, tuple):
        comma = "," if brackets == "()" and len(value) == 1 else ""
        return f"{brackets[0]}{', '.join(_value(item, brackets) for item in value)}{comma}{brackets[1]}"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    if isinstance(value, str) and value.startswith("%"):
        number, dot, position = value[1:].partition(".")
        return f"x{int(number)}[{int(position)}]" if dot else f"x{int(number)}"
    if isinstance(value, str) and value.startswith("torch."):
        return _dtype(value)
    if isinstance(value, str):
        return f'"{value}"'
    return repr(value)


def _references(value: object) -> list[int]:
    if isinstance(value, tuple):
        return [number for item in value for number in _references(item)]
    return [int(value[1:].partition(".")[0])] if isinstance(value, str) and value.startswith("%") else []


def _table(recipes: Sequence[Recipe], names: Sequence[str]) -> list[str]:
    kind = "INITIAL: dict[str, Callable[[], Tensor]]"
    if not recipes:
        return [f"{kind} = {{}}"]
    pairs = [(path, name) for recipe, name in zip(recipes, names, strict=True) for path in recipe.paths]
    return [f"{kind} = {{", *(f"    {quoted(path)}: {name}," for path, name in pairs), "}"]
