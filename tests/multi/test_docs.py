"""Every command in the docs runs, in order, and prints what the docs say (figures aside)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.commands import MEASURED, ROOT, commands, matched, refresh, run, run_all, runnable, same_screen

DOCS = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DOCS if any(runnable(c) for c, _ in commands(text_of(name)))])
def test_every_command_runs(name: str, tmp_path: Path) -> None:
    assert list(run_all(text_of(name), tmp_path))


def test_readme_starts_with_the_main_job() -> None:
    """`.ci/run` reads these three commands out of README.md."""
    assert [command for command, _ in commands(text_of("README.md"))][:3] == [
        "pip install -c constraints.txt -e '.[examples]' && autoshard plan examples/gpt2.py:build "
        "--mesh dp=2,tp=2 --hardware a100-80g-sxm --out out/gpt2 --verify",
        "torchrun --nproc-per-node 4 out/gpt2/train.py --backend gloo --steps 5",
        "pip install -c constraints.txt -e '.[test]' && pytest",
    ]


def test_the_first_screen_is_what_the_command_prints(tmp_path: Path) -> None:
    """Word for word and figure for figure, up to what is measured (the verification, which stands below)."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command, shown = commands(text_of("README.md"))[0]
    planned = runnable(command).removesuffix(" --verify")
    assert planned != runnable(command)
    same_screen(shown, run(planned, tmp_path).replace("\nnext: ", f"\n{MEASURED}\nnext: "))


def test_another_first_screen_is_refused() -> None:
    printed = (
        "m on dp=2\n\nmodule  operator\nh.0\n  a  linear\nh.1 … h.2 (2x)\n  a  relu\nhead\n  b  linear\n\nplan 1\n"
    )
    printed += "written to x: a, b, c, d, e, f, g, h, i\nverified on dp=2: 3 s\n  worst 1e-9\n"
    shown = [
        "m on dp=2", "module  operator", "…", "h.1 … h.2 (2x)", "  a  relu", "…", "plan 1",
        "written to x: a, b, c, d, e, f, g, …, i", "verified on dp=2: 4 s",
    ]  # fmt: skip
    same_screen(shown, printed)
    for line in (0, 3, 4, 6, 7):
        with pytest.raises(AssertionError, match="today it is"):
            same_screen([*shown[:line], shown[line] + "0", *shown[line + 1 :]], printed)
        with pytest.raises(AssertionError, match="today it is"):
            same_screen([*shown[:line], *shown[line + 1 :]], printed)


def test_only_figures_may_differ() -> None:
    printed = "step 3.5 ms of 4\n\nworst 1.0e-15 h.0  rank 1\nplan 0123456789abcdef\n"
    docs = ["step 12 us of 8", "…", "worst 9e-16 … rank 0", "plan fedcba9876543210"]
    assert matched(docs, printed, "x") == ["step 3.5 ms of 4", "…", "worst 9e-16 … rank 0", "plan 0123456789abcdef"]


@pytest.mark.parametrize("line", ["step 3 ms", "stop 3.5 ms of 4", "step 3.5 ms of 4 more", "worst 1 rank 1"])
def test_other_words_are_refused(line: str) -> None:
    with pytest.raises(AssertionError, match="did not print"):
        matched([line], "step 3.5 ms of 4\nworst 1 h.0 rank 1\n", "x")


def test_the_order_counts() -> None:
    with pytest.raises(AssertionError, match="did not print"):
        matched(["b", "a"], "a\nb\n", "x")


def test_a_line_after_dots_is_the_one_with_its_figures() -> None:
    """README's `step 5` after `…` must not become step 3; what follows must still be there."""
    printed = "".join(f"step {n}: loss {11 - n / 8}, {n}0 ms\n" for n in range(1, 7)) + "done in 3 s\n"
    docs = ["step 1: loss 4.5, 1 ms", "step 2: loss 4.5, 1 ms", "…", "step 5: loss 4.5, 1 ms", "…", "done in 9 s"]
    lines = matched(docs, printed, "x")
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2", "…", "step 5", "…", "done in 3 s"]
    assert matched(["…", "step 5: loss 4, 1 ms", "step 5: loss 4, 1 ms"], printed, "x")[1:] == [
        "step 4: loss 10.5, 40 ms",
        "step 5: loss 10.375, 50 ms",
    ]


def test_lines_that_follow_each_other_do_so() -> None:
    assert matched(["a", "…", "c"], "a\nb\nc\n", "x") == ["a", "…", "c"]
    assert matched(["a", "b"], "a\n\nb\n", "x") == ["a", "b"]
    with pytest.raises(AssertionError, match="did not print"):
        matched(["a", "c"], "a\nb\nc\n", "x")


def test_a_failing_command_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit code 1"):
        list(run_all("```console\n$ false | true\n```\n", tmp_path))


def test_refresh(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("About 3 ms.\n```console\n$ echo took 4 ms\ntook 3 ms\n$ echo 5\n7\n```\n", encoding="utf-8")
    refresh(path)
    assert (
        path.read_text(encoding="utf-8") == "About 3 ms.\n```console\n$ echo took 4 ms\ntook 4 ms\n$ echo 5\n5\n```\n"
    )


@pytest.mark.parametrize("name", DOCS)
def test_links_lead_somewhere(name: str) -> None:
    targets = [target for target in LINK.findall(text_of(name)) if "://" not in target]
    assert [target for target in targets if not (ROOT / name).parent.joinpath(target).exists()] == []
