"""The finish of a pruned file: only imports that it uses, blank lines and short brackets as a formatter writes them."""

from __future__ import annotations

import ast
import re

from autoshard.code_text import WIDTH
from autoshard.emit.pruning.module_table import flat, is_type_checking, module_table
from autoshard.emit.pruning.source_edits import Edit, Source, parsed


def with_needed_imports(name: str, text: str, requested: set[str]) -> str:
    """The text with only those imports that the rest of the file uses, or that other files import from it."""
    source, edits = parsed(text), []
    table = module_table(name, text)
    used = {*requested, "TYPE_CHECKING"}
    for effect in (*(d.references for d in table.definitions), *table.effects):
        used |= effect.names
    for definition in table.definitions:
        for *_, references in definition.methods:
            used |= references.names
    for holder in source.tree.body:
        if is_type_checking(holder):
            inner = [node for node in flat([holder]) if isinstance(node, ast.ImportFrom)]
            if not any((alias.asname or alias.name) in used for node in inner for alias in node.names):
                edits.append(source.removed(holder))
                used.discard("TYPE_CHECKING")
    for node in flat(source.tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            edits += _import_edit(source, node, used)
    return source.applied(edits)


def _import_edit(source: Source, node: ast.Import | ast.ImportFrom, used: set[str]) -> list[Edit]:
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return []
    remaining = [alias for alias in node.names if (alias.asname or alias.name).partition(".")[0] in used]
    if remaining == node.names:
        return []
    if not remaining:
        return [source.removed(node)]
    pad = " " * node.col_offset
    words = [alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in remaining]
    head = f"from {'.' * node.level}{node.module or ''} import " if isinstance(node, ast.ImportFrom) else "import "
    one = head + ", ".join(words)
    if len(pad + one) > WIDTH:
        one = f"{head}(\n" + "".join(f"{pad}    {word},\n" for word in words) + f"{pad})"
    return [source.replaced(node, one)]


_HUGGED = re.compile(r"^( *)(\S.*[(\[{])\n +([^\n#]*[^,\n#])\n *([)\]}](?!.*# fmt).*)$", re.MULTILINE)


def tidied(text: str) -> str:
    """Blank lines and short brackets as a formatter leaves them."""
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    text = re.sub(r"\n{3,}(?=[ \t]+\S|from |import )", "\n\n", text)
    text = re.sub(r"^((?:from|import) .*|\))\n{3,}(?!def |class |@|#)", r"\1\n\n", text, flags=re.MULTILINE)
    return _HUGGED.sub(_joined_lines, text).rstrip("\n") + "\n"


def _joined_lines(match: re.Match[str]) -> str:
    pad, head, inner, end = match.groups()
    if end == ")" and head.endswith(("= (", "return (")):
        tuple_ = isinstance(ast.parse(f"({inner})", mode="eval").body, ast.Tuple)
        head, end = (head, end) if tuple_ else (head[:-1], "")
    line = "".join((pad, head, inner, end))
    return line if len(line) <= WIDTH else match.group()
