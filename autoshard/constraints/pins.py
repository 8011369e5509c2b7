"""Pins that a user sets before the search: `WHAT=HOW`, from the command line or a TOML or JSON file.

WHAT is the path of a parameter or buffer, the name of an input, of an operator or of a module, or a pattern of these
(`*.mlp.c_fc`); `parameter:`, `input:`, `op:` and `module:` before it select one kind. HOW is one of

- placements by axis, `Shard(0)@dp,Replicate@tp`; axes that it does not name stay free. `S1/3*64@tp` means exactly
  that shard, `n@tp` exactly that factor of an operator's rule, `column-parallel@tp` a strategy as printed plans call
  it;
- shard counts for each dim of each operand, `((4, 2), None)`, None being free; with further shards of the result,
  `((4, 2), (2, 1)) -> ((8, 1),)`. For the rows of a table the lengths of its parts may stand for their count,
  `(((10, 20, 30, 4), 1),)`, as in `S0[10+20+30+4]@tp` by axis.

`host` or `device`, alone or behind either (`Shard(0)@tp,host`; `((8, 1), None) host`), says in whose memory a table
lies, and where its look-ups run.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.constraints.step_request import STAGE_PIN
from autoshard.errors import InvalidFileError, UsageError
from autoshard.ir.graph import Graph
from autoshard.ir.layout import parse_placement
from autoshard.ir.mesh import Mesh
from autoshard.rules.strategy_text import known_words, plain_words
from autoshard.system.files import LARGEST_TOML, parse_json, parse_toml, read_text

ON_HOST, ON_DEVICE = "host", "device"
KINDS = ("parameter", "input", "op", "module")
EXAMPLE = "--pin '*.mlp.c_fc=Shard(2)@tp' or --pin 'fc=((4, 1), (2, 1))'"
FILE_EXAMPLE = """a line such as "*.mlp.c_fc" = "Shard(2)@tp" in a .toml file"""
EXPECTED = "Shard(DIM), Replicate, Partial, a strategy's words (column-parallel) or a factor of the operator's rule"
STYLE_NAMES = ("fsdp", "hsdp", "megatron", "megatron sp", "fsdp tp")  # of --strategy
_TORCH = re.compile(r"^(Shard)\((-?\d+)\)$|^(Replicate|Partial)(?:\(\))?$")
Cut = tuple[int, ...] | None
Parts = tuple[int, int, tuple[int, ...]]  # (operand, dim, the lengths of the parts that it is to be in)


@dataclass(frozen=True)
class Want:
    """Request for one axis: `kind` is shard (of `dim`), replicate, partial, or exact, words or choice, as in `text`."""

    axis: str
    kind: str
    text: str
    dim: int = 0

    def __str__(self) -> str:
        return f"{self.text}@{self.axis}"


@dataclass(frozen=True)
class Pin:
    """`text` as typed. Either `wants`, or `cuts` of every operand and `out_cuts` of every result (None: free); `parts`
    of those cuts that are not equal. `memory`: ON_HOST, ON_DEVICE, or "" where the pin does not say."""

    what: str
    text: str
    wants: tuple[Want, ...] = ()
    cuts: tuple[Cut, ...] | None = None
    out_cuts: tuple[Cut, ...] | None = None
    parts: tuple[Parts, ...] = ()
    kind: str = ""  # of KINDS, where the pin says so
    memory: str = ""

    def __str__(self) -> str:
        return self.text


def parse_pin(text: str, mesh: Mesh) -> Pin:
    """`WHAT=HOW` -> Pin. UsageError says which part is wrong."""
    what, equals, how = text.partition("=")
    if not equals or not what.strip() or not how.strip():
        raise UsageError(f"pin {text!r}: expected WHAT=HOW", EXAMPLE)
    what, how = what.strip(), how.strip()
    kind, colon, target = what.partition(":")
    if colon and kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, 1) or ["parameter"]
        hint = f"{near[0]}:{target}={how}"
        raise UsageError(f"pin {text!r}: unknown kind {kind!r}, expected {', '.join(KINDS)}", hint)
    kind, what = (kind, target) if colon else ("", what)
    how, memory = said_memory(how)
    if how.startswith(("(", "[")):
        cuts, out_cuts, parts = parse_cuts(how, text)
        return Pin(what, text, (), cuts, out_cuts, parts, kind, memory)
    return Pin(what, text, parse_wants(how, mesh, f"pin {text!r}") if how else (), kind=kind, memory=memory)


def said_memory(how: str) -> tuple[str, str]:
    """Splits `how` into what stands before or behind the memory, and the memory."""
    if first := re.match(r"(host|device)[\s,]+(?=\S)", how):
        return how[first.end() :], first[1]
    head, last = re.fullmatch(r"(.*?)[\s,]*(\bhost|\bdevice)?", how, re.DOTALL).groups()  # type: ignore[union-attr]
    return (head, last) if last else (how, "")


def parse_wants(how: str, mesh: Mesh, quoted: str) -> tuple[Want, ...]:
    """`Shard(0)@dp,n@tp` -> one Want an axis. `quoted` is what an error says it is about: `pin 'fc=n@tp'`."""
    wants = tuple(_want(part.strip(), mesh, quoted) for part in how.split(","))
    for want in wants:
        if sum(other.axis == want.axis for other in wants) > 1:
            raise UsageError(f"{quoted}: axis {want.axis} is used twice", "one placement an axis")
    return wants


def _want(part: str, mesh: Mesh, quoted: str) -> Want:
    placement, at, axis = part.rpartition("@" if "@" in part else " over ")
    if not at:
        placement, axis = part, mesh.names[0] if len(mesh.names) == 1 else ""
    placement, axis = placement.strip(), axis.strip()
    if placement in mesh.names and not at:
        raise UsageError(f"{quoted}: what is split over {placement}? expected {EXPECTED}", f"Shard(0)@{placement}")
    if plain_words(placement) in STYLE_NAMES:
        message = f"{quoted}: {placement} is a style of the whole plan, not what one operator or tensor does"
        raise UsageError(message, f"--strategy {plain_words(placement).replace(' ', '-')}, without this")
    want = _read_placement(placement, axis, mesh, quoted)
    if axis not in mesh.names:
        said = f"unknown mesh axis {axis!r}" if axis else "no mesh axis"
        hint = " or ".join(f"{placement}@{name}" for name in mesh.names)
        of = f" {mesh}" if mesh.size > 1 else ""
        raise UsageError(f"{quoted}: {said} in {part!r}, the mesh{of} has {', '.join(mesh.names)}", hint)
    return want


def _read_placement(placement: str, axis: str, mesh: Mesh, quoted: str) -> Want:
    torch = _TORCH.match(placement)
    if torch and torch[1]:
        return Want(axis, "shard", placement, int(torch[2]))
    if torch:
        return Want(axis, torch[3].lower(), torch[3])
    words = known_words().get(plain_words(placement))
    if words is not None:
        return Want(axis, "words", words)
    try:
        return Want(axis, "exact", str(parse_placement(placement)))
    except ValueError:
        if re.fullmatch(r"[=+~\w./*]+", placement):
            return Want(axis, "choice", placement)
        near = _meant(placement, axis if axis in mesh.names else mesh.names[0])
        raise UsageError(f"{quoted}: can't read {placement!r}: expected {EXPECTED}", near) from None


def _meant(placement: str, axis: str) -> str:
    """Nearest placement, `Shard(0)@tp`, with the dim that was given, or the nearest words."""
    known = [words for words in known_words() if words != "replicated"]  # for which there is Replicate
    words = difflib.get_close_matches(plain_words(placement), known, 1)
    if words:
        return f"{known_words()[words[0]]}@{axis}"
    name, dim = re.match(r"\w*", placement), re.search(r"-?\d+", placement)
    near = difflib.get_close_matches(name[0].title() if name else "", ("Shard", "Replicate", "Partial"), 1) or ["Shard"]
    return f"{near[0]}({dim[0] if dim else 0})@{axis}" if near[0] == "Shard" else f"{near[0]}@{axis}"


def parse_cuts(how: str, text: str) -> tuple[tuple[Cut, ...], tuple[Cut, ...] | None, tuple[Parts, ...]]:
    """`((4, 2), None) -> ((8, 1),)` -> cuts of the operands, of the results where they are given, and unequal parts."""
    operands, arrow, results = how.partition("->")
    cuts, parts = _cuts(operands, text)
    if not arrow:
        return cuts, None, parts
    out_cuts, uneven = _cuts(results, text)
    if uneven:
        raise UsageError(f"pin {text!r}: a result is cut in equal parts", "a count after ->")
    return cuts, out_cuts, parts


def _cuts(part: str, text: str) -> tuple[tuple[Cut, ...], tuple[Parts, ...]]:
    try:
        value = ast.literal_eval(part.strip())
    except (ValueError, SyntaxError, MemoryError):
        raise UsageError(f"pin {text!r}: can't read the cuts {part.strip()!r}", EXAMPLE) from None
    if isinstance(value, (tuple, list)) and any(type(item) is int for item in value):
        value = (value,)  # of one tensor: (4, 1) is ((4, 1),)
    if not isinstance(value, (tuple, list)):
        raise UsageError(f"pin {text!r}: expected a tuple of cuts for each operand, got {part.strip()}", EXAMPLE)
    cuts = [_cut(item, text) for item in value]
    parts = ((number, dim, lengths) for number, (_, uneven) in enumerate(cuts) for dim, lengths in uneven)
    return tuple(cut for cut, _ in cuts), tuple(parts)


def _cut(item: Any, text: str) -> tuple[Cut, list[tuple[int, tuple[int, ...]]]]:
    """The shard counts, and (dim, lengths) of those that are given as parts."""
    if not isinstance(item, (tuple, list)) or not any(isinstance(cut, (tuple, list)) for cut in item):
        return _counts(item, text), []
    uneven = [(dim, _counts(cut, text) or ()) for dim, cut in enumerate(item) if isinstance(cut, (tuple, list))]
    if any(not lengths for _, lengths in uneven):
        raise UsageError(f"pin {text!r}: a dim is cut in at least one part, got {item!r}", EXAMPLE)
    return _counts([len(cut) if isinstance(cut, (tuple, list)) else cut for cut in item], text), uneven


def _counts(item: Any, text: str) -> Cut:
    if item is None:
        return None
    if not isinstance(item, (tuple, list)) or not all(type(count) is int for count in item):
        raise UsageError(f"pin {text!r}: expected whole numbers, one a dim, or None, got {item!r}", EXAMPLE)
    if any(count < 1 for count in item):
        bad = next(count for count in item if count < 1)
        raise UsageError(f"pin {text!r}: a cut must be at least 1, got {bad}", EXAMPLE)
    return tuple(item)


def read_pins(texts: Sequence[str], path: Path | None, mesh: Mesh) -> tuple[Pin, ...]:
    """The pins of the file, then those of the command line; those of stages are read elsewhere."""
    file_texts = [text for text in (pin_file_texts(path) if path else ()) if not text.startswith(STAGE_PIN)]
    return tuple(parse_pin(text, mesh) for text in (*file_texts, *texts))


def graph_pins(graph: Graph, mesh: Mesh) -> tuple[Pin, ...]:
    """The strategies that the model's own code asks for."""
    return tuple(parse_pin(f"op:{name}={how}", mesh) for name, how in graph.strategies)


def pin_file_texts(path: Path) -> list[str]:
    """The file's table of pins (all of it, or its table `pins`) as `WHAT=HOW`."""
    content = read_text(path, "the pins", "--pins with a .toml or .json file", LARGEST_TOML)
    parse = parse_json if path.suffix == ".json" else parse_toml
    data: Any = parse(content, f"the file of pins {path}", FILE_EXAMPLE)
    table = data.get("pins", data) if isinstance(data, dict) else data
    if not isinstance(table, dict):
        raise InvalidFileError(f"the pins {path}: expected a table of WHAT = HOW", FILE_EXAMPLE)
    return [f"{what}={_how(how, what, path)}" for what, how in table.items()]


def _how(how: Any, what: str, path: Path) -> str:
    if isinstance(how, str) or (what.startswith(STAGE_PIN) and type(how) is int):
        return str(how)
    if isinstance(how, list):
        return repr(how)
    raise InvalidFileError(f"the pins {path}: {what} is {how!r}, expected text or a list of cuts", FILE_EXAMPLE)
