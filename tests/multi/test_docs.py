"""Every command in the docs runs, in order, and prints what the docs say (figures aside)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
SECONDS = 420  # a command
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FIGURE = re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?(?:\s?(?:[kMGTu]?s|[mu]s|ns|[KMGT]?i?B))?|[0-9a-f]{16}")


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(command, lines that the docs print below it); a line `…` stands for any lines."""
    found: list[tuple[str, list[str]]] = []
    for block in _BLOCK.findall(text):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line.strip():
                found[-1][1].append(line)
    return found


def runnable(command: str) -> str:
    """The command without the parts that install things or run this very suite."""
    parts = [part.strip() for part in command.split("&&")]
    return " && ".join(part for part in parts if not part.startswith("pip install") and part != "pytest")


def figureless(line: str) -> str:
    return re.sub(r"\s+", " ", _FIGURE.sub("#", line)).strip()


def check_output(expected: list[str], printed: str, command: str) -> None:
    """Each line of the docs stands in what was printed, in order, figures aside."""
    lines = iter([figureless(line) for line in printed.splitlines()])
    for line in expected:
        if line.strip() != "…":
            assert figureless(line) in lines, f"`{command}` did not print:\n{line}\nbut:\n{printed}"


def run_all(text: str, folder: Path) -> None:
    for name in ("examples", "constraints.txt"):
        (folder / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command, expected in commands(text):
        typed = runnable(command)
        if not typed:
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", typed],
            cwd=folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"$ {typed}\n{done.stdout}{done.stderr}"
        check_output(expected, done.stdout, command)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["README.md", *(f"docs/{name}" for name in DOCS)])
def test_every_command_runs(name: str, tmp_path: Path) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    if not any(runnable(command) for command, _ in commands(text)):
        pytest.skip("no command in this file")
    run_all(text, tmp_path)


def test_readme_starts_with_the_main_job() -> None:
    """`.ci/run` reads these three commands out of README.md."""
    assert [command for command, _ in commands((ROOT / "README.md").read_text(encoding="utf-8"))][:3] == [
        "pip install -c constraints.txt -e '.[examples]' && autoshard plan examples/gpt2.py:build "
        "--mesh dp=2,tp=2 --hardware a100-80g-sxm --out out/gpt2 --verify",
        "torchrun --nproc-per-node 4 out/gpt2/train.py --backend gloo --steps 5",
        "pip install -c constraints.txt -e '.[test]' && pytest",
    ]


def test_the_doc_tester_can_fail(tmp_path: Path) -> None:
    run_all("```console\n$ echo step 3.5 ms and done\nstep 4.25 ms and done\n```\n", tmp_path)
    for name in ("examples", "constraints.txt"):
        (tmp_path / name).unlink()
    with pytest.raises(AssertionError, match="did not print"):
        run_all("```console\n$ echo done\nundone\n```\n", tmp_path)
    for name in ("examples", "constraints.txt"):
        (tmp_path / name).unlink()
    with pytest.raises(AssertionError, match="false"):
        run_all("```console\n$ false\n```\n", tmp_path)


LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{name}" for name in DOCS)])
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    targets = [target for target in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []
