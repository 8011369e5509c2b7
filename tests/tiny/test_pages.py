"""Pages that the code must agree with: glossary, troubleshooting, interface."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

# --- the glossary names things that are there, and the words that it replaces are gone ---


ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `([^`]+)` `([^`]+)` \|$", PAGE, re.MULTILINE)
# English that stood for a term of the field; the term is in the glossary, or in every textbook.
# More such are in the second table, which text that users read is held against.
REPLACED = "## Words not used"
REPLACE = [
    word
    for row in re.findall(r"^\| ([^|]+) \| [^|]+ \|$", PAGE.partition(REPLACED)[2], re.M)
    for word in row.split(", ")
]
PRIVATE = re.compile(rf"\b(?:{'|'.join(word.replace(' ', chr(92) + 's+') for word in REPLACE[1:])})\b", re.IGNORECASE)
OF_FIRST = re.compile(r"(?:^|[.:] |\| )Of [a-z0-9][^.\n]{0,40}", re.MULTILINE)
BEGINS = re.compile(r"(Of|The same|Those|That|And|But|Beside|What|Whether|Where) ")
NO_NAMES = frozenset({"own", "found", "made", "given", "told", "kept", "way", "again", "asked", "rest"})
OF_CALLS = frozenset({"kept", "again"})  # keywords in the code of packages
SAVED = {"plan.py": frozenset({"again"})}  # of `StepTried`: plan.json has its fields by name
GONE = ("dearest", "dearer", "summand", "the mend", "a person", "lies as", "wishes")


def names(path: Path) -> set[str]:
    """What a module defines at its top."""
    defined: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        targets = getattr(node, "targets", [node.target] if isinstance(node, ast.AnnAssign) else [])
        defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    return defined


@pytest.mark.parametrize(("term", "sentence", "place", "name"), ROWS, ids=[row[0] for row in ROWS])
def test_a_term(term: str, sentence: str, place: str, name: str) -> None:
    assert len(sentence) < 130, "one sentence"
    assert name in names(ROOT / "autoshard" / place)


def test_every_row_is_read() -> None:
    lines = [line for line in PAGE.partition(REPLACED)[0].splitlines() if line.startswith("| ")]
    assert len(ROWS) == len(lines) - 1 > 40


@pytest.mark.parametrize("word", GONE)
def test_a_word_is_gone(word: str) -> None:
    pattern = re.compile(rf"\b{word}s?\b", re.IGNORECASE)
    files = [*(ROOT / "autoshard").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    matches = [path.relative_to(ROOT) for path in files if pattern.search(path.read_text(encoding="utf-8"))]
    assert not matches


def read_by_users() -> Iterator[tuple[str, str]]:
    """(place, text): pages, the report, launchers' files, and all text in the code that is no docstring."""
    for glob in (
        "README.md",
        "CHANGELOG.md",
        "docs/*.md",
        "benchmarks/*.md",
        "reports/*",
        "autoshard/launchers/templates/*",
    ):
        for path in sorted(ROOT.glob(glob)):
            text = path.read_text(encoding="utf-8")
            yield str(path.relative_to(ROOT)), text.partition(REPLACED)[0] if path.name == "glossary.md" else text
    for path in sorted((ROOT / "autoshard").rglob("*.py")):
        yield from printed(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))


def printed(place: str, source: str) -> Iterator[tuple[str, str]]:
    """Strings of a module that are no docstrings: help, messages, templates."""
    tree = ast.parse(source)
    bare = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in bare:
            yield f"{place}:{node.lineno}", node.value


def not_used(text: str) -> list[str]:
    """The words of `text` that the second table of the glossary replaces, though a line ends within them."""
    return PRIVATE.findall(text)


def test_the_words_that_the_glossary_replaces_are_not_used() -> None:
    assert not {place: words for place, text in read_by_users() if (words := not_used(text))}


def test_no_sentence_of_a_page_begins_with_of() -> None:
    """ "Of three plans one is written": subject, verb, object reads at once."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
    by_page = {path.name: OF_FIRST.findall(path.read_text(encoding="utf-8")) for path in pages}
    assert not {name: sentences for name, sentences in by_page.items() if sentences}


def begun_badly(source: str) -> list[str]:
    return [
        text[:60]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and BEGINS.match(text := ast.get_docstring(node) or "")
    ]


def empty_names(source: str, of_calls: Set[str] = frozenset(), saved: Set[str] = frozenset()) -> list[str]:
    """Variables and parameters whose names say nothing of what they hold; functions and members with such a word."""
    nodes = [*ast.walk(ast.parse(source))]
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    names = {x.arg for x in nodes if isinstance(x, ast.arg)} - of_calls | {getattr(x, "id", "") for x in stored}
    members = [x.name for x in nodes if isinstance(x, ast.FunctionDef)] + [getattr(x, "attr", "") for x in stored]
    fields = [line for node in nodes if isinstance(node, ast.ClassDef) for line in node.body]
    members += [ast.unparse(line.target) for line in fields if isinstance(line, ast.AnnAssign)]
    return sorted((NO_NAMES & names | {name for name in members if NO_NAMES & {*name.split("_")}}) - saved)


@pytest.mark.parametrize("folder", sorted(path.name for path in (ROOT / "autoshard").iterdir() if path.is_dir()))
def test_names_and_docstrings_are_read_without_their_callers(folder: str) -> None:
    """A docstring says what the function returns or does; "Of a stage, in bytes" needs the name, and the name needs it.
    A variable is called by what it holds."""
    texts = {
        path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "autoshard" / folder).rglob("*.py"))
    }
    assert not {name: bad for name, text in texts.items() if (bad := begun_badly(text))}
    allowed = OF_CALLS if folder == "emit" else frozenset()
    assert not {n: bad for n, text in texts.items() if (bad := empty_names(text, allowed, SAVED.get(n, frozenset())))}


def test_a_planted_word_is_found() -> None:
    source = '"""Told beside a docstring."""\nHELP = f"lies beside\\n{1} and is\\n told anew"\n'
    assert [not_used(text) for _, text in printed("x.py", source)] == [["beside"], ["is\n told", "anew"]]
    assert not_used("Dear, or computed  again") == ["Dear", "computed  again"]
    assert not not_used("besides, a resolution was computed; against told tales")
    assert OF_FIRST.findall("It ends. Of three one is kept.") and not OF_FIRST.findall("one of three. Often")
    assert len(REPLACE) > 18
    assert begun_badly('def f(own):\n    """Of a stage."""\n') and not begun_badly('"""Offers."""')
    assert empty_names("def f(own):\n    found = [way for way in own]") == ["found", "own", "way"]
    assert not empty_names("def f(kept): return x.kept", OF_CALLS)
    assert empty_names("class A:\n    own_x: int\n    def _made(s): s.kept = 1") == ["_made", "kept", "own_x"]


# --- every message that the troubleshooting page explains is one that the code can print ---


TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [
    message for line in TROUBLES.splitlines() if line.startswith("### ") for message in re.findall("`(.+?)`", line)
]


def printable() -> str:
    """The source, with every figure of a message as `…` and strings that Python joins joined."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "autoshard").rglob("*.py"))]
    joined = re.sub(r'"\s*\+?\s*f?"', "", "\n".join(texts))
    return re.sub(r"\{[^{}]*\}", "…", joined)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_can_print_it(message: str) -> None:
    source = printable()
    missing = [part for part in message.split("…") if part.strip(" ,:") and part.strip(" ,:") not in source]
    assert not missing


def test_messages_are_found() -> None:
    assert len(MESSAGES) > 20


# --- docs/interface.md names tests that there are, and has a row for every item ---


INTERFACE = (ROOT / "docs" / "interface.md").read_text(encoding="utf-8")
LAST = {"A": 20, "D": 18, "E": 3, "F": 9, "G": 4, "H": 2, "I": 8}  # of each section


def test_every_test_is_there() -> None:
    """A name alone is one of the file named before it."""
    named = re.findall(r"`(?:(tests/[\w/]+\.py)(?:::(\w+))?|(test_\w+))`", INTERFACE)
    assert len(named) > 30
    missing, file = [], ""
    for path, name, alone in named:
        file = path or file
        if f"def {name or alone}" not in (ROOT / file).read_text(encoding="utf-8"):
            missing.append((file, name or alone))
    assert not missing


def test_every_item_has_a_row() -> None:
    items: set[str] = set()
    for row in re.findall(r"^\| ([A-I]\d.*?) \|", INTERFACE, re.MULTILINE):
        for section, first, last in re.findall(r"([A-I])(\d+)(?:–[A-I](\d+))?", row):
            items |= {f"{section}{number}" for number in range(int(first), int(last or first) + 1)}
    assert {f"{section}{number}" for section, last in LAST.items() for number in range(1, last + 1)} <= items
