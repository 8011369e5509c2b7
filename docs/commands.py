"""Runs the commands of the docs and keeps what they print true: `python docs/commands.py README.md docs/*.md`; with
`--write` before them the first screen of README.md, which is what its first command prints, is made anew.

A command is a line `$ …` in a ```console block; the lines below it are what it prints, where `…` stands for anything (a
whole line for any lines). Figures may differ: this script writes new ones into the file, the tests compare words only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("examples", "constraints.txt")  # of the clone, by the commands
COMMAND_SECONDS = 600
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FIGURE = re.compile(r"[0-9a-f]{16}|\d[\d.,]*(?:e[+-]?\d+)?(?:\s?(?:h|min|s|ms|us|ns|B|KiB|MiB|GiB|TiB)\b)?")


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(command, lines that the docs print below it), in order."""
    found: list[tuple[str, list[str]]] = []
    for block in _BLOCK.findall(text):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line.strip():
                found[-1][1].append(line)
    return found


def runnable(command: str) -> str:
    """The command without the parts that install things or run the test suite."""
    parts = [part.strip() for part in command.split("&&")]
    return " && ".join(part for part in parts if not part.startswith("pip install") and part != "pytest")


def run(command: str, folder: Path) -> str:
    """What the command prints on stdout, in `folder` with the interpreter's own programs first on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )
    if done.returncode != 0:
        raise AssertionError(f"$ {command}\nexit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def pattern(line: str) -> re.Pattern[str]:
    """Matches a printed line that differs from `line` in figures, spacing, and what `…` stands for."""
    parts = [" ".join(_FIGURE.sub("#", part).split()) for part in line.split("…")]
    return re.compile(r"\s*" + ".*".join(re.escape(part).replace(r"\#", "#") for part in parts) + r"\s*")


def plain(line: str) -> str:
    return " ".join(_FIGURE.sub("#", line).split())


def matched(expected: list[str], printed: str, command: str) -> list[str]:
    """`expected` with today's figures: lines that follow each other were printed one after another.

    Where a line after `…` could be one of several, it is the one with most of the same figures (`step 5` is no other
    step), the first of equals. AssertionError names the first line that was not printed.
    """
    lines = [line for line in printed.splitlines() if line.strip()]
    furthest = 0

    @cache
    def align(i: int, j: int, free: bool) -> tuple[int, tuple[int, ...]] | None:
        """(figures that stay, printed line for each expected one) of `expected[i:]` on `lines[j:]`."""
        nonlocal furthest
        furthest = max(furthest, i)
        if i == len(expected):
            return 0, ()
        if expected[i].strip() == "…":
            return align(i + 1, j, True)
        found = None
        for k in range(j, len(lines) if free else min(j + 1, len(lines))):
            rest = align(i + 1, k + 1, False) if pattern(expected[i]).fullmatch(plain(lines[k])) else None
            if rest is not None and (found is None or rest[0] + same_figures(expected[i], lines[k]) > found[0]):
                found = rest[0] + same_figures(expected[i], lines[k]), (k, *rest[1])
        return found

    best = align(0, 0, True)
    if best is None:
        line = expected[furthest]
        raise AssertionError(f"$ {command}\ndid not print (in this order):\n{line}\nbut:\n{printed}")
    places = iter(best[1])
    today = [line if line.strip() == "…" else lines[next(places)] for line in expected]
    return [old if "…" in old else new for old, new in zip(expected, today, strict=True)]


def same_figures(line: str, printed: str) -> int:
    """How many of the figures of `line` the printed one has at the same place."""
    return sum(one == other for one, other in zip(_FIGURE.findall(line), _FIGURE.findall(printed), strict=False))


def run_all(text: str, folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Runs every command of a document in `folder`; gives (command, lines of the docs, the same lines today)."""
    for name in NEEDED:
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    for command, expected in commands(text):
        typed = runnable(command)
        if typed:
            yield command, expected, matched(expected, run(typed, folder), command)


SHOWN_FILES = 7
MEASURED = "verified on"  # from this line on, seconds and errors are those of one run


def screen(printed: str) -> list[str]:
    """What README.md shows of its first command's output: of the table of operators the block that repeats."""
    found: list[str] = []
    for part in re.split(r"\n\s*\n", printed.strip("\n")):
        lines = [line.rstrip() for line in part.splitlines()]
        found += ["", *(_repeated(lines) if lines[0].startswith("module ") else map(_shorter, lines))]
    return found[1:]


def _repeated(table: list[str]) -> list[str]:
    """The table's head, and the block that stands for several."""
    starts = [n for n, line in enumerate(table) if n and not line.startswith(" ")]
    block = next(n for n in starts if re.search(r"\(\d+x\)$", table[n]))
    behind = next((n for n in starts if n > block), len(table))
    return [*table[: starts[0]], "…", *table[block:behind], "…"]


def _shorter(line: str) -> str:
    """Of the files that were written the first and the last; of an error how large it is."""
    if line.startswith("written to "):
        where, _, names = line.partition(": ")
        files = names.split(", ")
        return f"{where}: {', '.join([*files[:SHOWN_FILES], '…', files[-1]])}"
    return re.sub(r"(largest error \S+)  .*  (\S+)$", r"\1  …  \2", line)


def same_screen(expected: list[str], printed: str) -> None:
    """AssertionError at the first line of `expected`, README.md's, that `printed` has otherwise; of what is measured
    words alone count."""
    today = [line for line in screen(printed) if line]
    for line, own in zip_longest(expected, today, fillvalue=""):
        if own.startswith(MEASURED) and line.startswith(MEASURED):
            break
        assert line == own, f"README.md shows\n{line}\nbut today it is\n{own}\npython docs/commands.py --write"


def rewrite_screen(path: Path) -> None:
    """What the first command of a document prints today, in place of what stands below it."""
    text = path.read_text(encoding="utf-8")
    command = commands(text)[0][0]
    with tempfile.TemporaryDirectory() as folder:
        for name in NEEDED:
            (Path(folder) / name).symlink_to(ROOT / name)
        printed = run(runnable(command), Path(folder))
    start = text.index(f"$ {command}\n") + len(command) + 3
    end = text.index("\n```\n", start)
    path.write_text(text[:start] + "\n".join(screen(printed)) + text[end:], encoding="utf-8")


def refresh(path: Path) -> None:
    """Write today's figures into a document."""
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for command, old, new in run_all(text, Path(folder)):
            start = text.index(f"$ {command}\n")
            for before, after in zip(old, new, strict=True):
                place = text.index(before, start)
                text = text[:place] + after + text[place + len(before) :]
                start = place + len(after)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    named = [name for name in sys.argv[1:] if name != "--write"]
    if "--write" in sys.argv:
        rewrite_screen(ROOT / "README.md")
    for name in named:
        refresh(Path(name))
