"""Edits of Python source by the positions of its syntax tree: comments and layout stay as they are written."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

Block = list[ast.stmt]
Located = ast.expr | ast.stmt | ast.arg | ast.keyword | ast.alias
_BLOCKS = ("body", "orelse", "finalbody")
_HOLDERS = (ast.mod, ast.stmt, ast.ExceptHandler, ast.match_case)
_WITHIN = "within"  # an attribute of each node


@dataclass(frozen=True)
class Edit:
    """Replaces the bytes from `start` to `end` of a source."""

    start: int
    end: int
    text: str


def walk(root: ast.AST) -> list[ast.AST]:
    """All nodes of a source's tree, or of a part of it, in the order of the text: without contexts and operators."""
    nodes, start, end = vars(root)[_WITHIN]
    return nodes[start:end]  # type: ignore[no-any-return]


def _numbered(root: ast.AST) -> list[ast.AST]:
    """The nodes of a tree, depth first. Each node records which part of the list it and its descendants take up,
    because trees are walked more often than parsed."""
    nodes: list[ast.AST] = []

    def visit(node: ast.AST) -> None:
        start = len(nodes)
        nodes.append(node)
        held = vars(node)
        for value in [*held.values()]:
            if type(value) is list:
                for child in value:
                    if isinstance(child, ast.AST):
                        visit(child)
            elif isinstance(value, ast.AST) and value._fields:
                visit(value)
        held[_WITHIN] = nodes, start, len(nodes)

    visit(root)
    return nodes


@lru_cache(maxsize=1024)
def parsed(text: str) -> Source:
    return Source(text)


class Source:
    """A module's text and tree. Offsets count bytes, as in `ast`."""

    def __init__(self, text: str) -> None:
        self.text, self.tree = text, ast.parse(text)
        self.nodes = _numbered(self.tree)

    @cached_property
    def in_texts(self) -> set[ast.AST]:
        """Nodes inside formatted strings, whose positions Python 3.11 does not know."""
        return {node for text in self.nodes if isinstance(text, ast.JoinedStr) for node in walk(text)}

    @cached_property
    def functions(self) -> list[tuple[ast.FunctionDef, list[ast.AST]]]:
        """Each function with all its nodes."""
        return [(function, walk(function)) for function in self.nodes if isinstance(function, ast.FunctionDef)]

    @cached_property
    def data(self) -> bytes:
        return self.text.encode()

    @cached_property
    def lines(self) -> list[int]:
        """The offset at which each line begins; one more for the end."""
        starts = [0]
        for line in self.data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def start(self, node: Located) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def end(self, node: Located) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def segment(self, node: ast.expr | ast.stmt) -> str:
        return self.data[self.start(node) : self.end(node)].decode()

    def replaced(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(self.start(node), self.end(node), text)

    def first_line(self, node: ast.stmt) -> int:
        """First line of a statement, from 0: that of its first decorator, or of the comment above it."""
        decorators = getattr(node, "decorator_list", [])
        line: int = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
        while line and self.line(line - 1).strip().startswith("#") and not self._is_heading(line - 1):
            line -= 1
        return line

    def _is_heading(self, line: int) -> bool:
        """Is this a comment that stands by itself, as a heading of all that follows?"""
        return self.line(line).startswith("# ---")

    def line(self, number: int) -> str:
        return self.data[self.lines[number] : self.lines[number + 1]].decode()

    def removed(self, node: ast.stmt) -> Edit:
        """The whole lines of a statement."""
        assert node.end_lineno is not None
        return Edit(self.lines[self.first_line(node)], self.lines[node.end_lineno], "")

    def without(self, node: ast.stmt, block: Block, start: int, end: int) -> Edit:
        """Edit that replaces the lines `start` to `end`, which hold `node`, by those of `block`, indented likewise."""
        if not block:
            return Edit(start, end, "")
        last = block[-1].end_lineno
        assert last is not None
        first = self.first_line(block[0])
        shift = block[0].col_offset - node.col_offset
        fixed = self._inside_strings
        text = "".join(
            self.line(n) if n in fixed or not self.line(n).strip() else self.line(n)[shift:] for n in range(first, last)
        )
        return Edit(start, end, text)

    @cached_property
    def _inside_strings(self) -> set[int]:
        """Lines, from 0, that begin within a string of several lines."""
        lines: set[int] = set()
        for node in self.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
                assert node.end_lineno is not None
                if re.search("\"{3}|'{3}", self.line(node.lineno - 1)):
                    lines.update(range(node.lineno, node.end_lineno))
        return lines

    def applied(self, edits: Sequence[Edit]) -> str:
        """The text with all edits applied. An edit inside another one is left for the next round."""
        data, at = [], 0
        for edit in sorted(edits, key=lambda edit: (edit.start, -edit.end, len(edit.text))):
            if edit.start >= at:
                data += [self.data[at : edit.start], edit.text.encode()]
                at = edit.end
        return b"".join([*data, self.data[at:]]).decode()


def blocks(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, Block]]:
    """Every list of statements, with the node that holds it."""
    for node in nodes:
        for name in _BLOCKS if isinstance(node, _HOLDERS) else ():
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield node, block
