"""Models that nobody here wrote: captured, planned, and every plan run against the original; the rest is `slow`.

The quick ones take one random plan on dp=2,tp=2, which uses far more rules than the best; the slow ones are the whole
measurement of benchmarks/architectures.py, whose bookkeeping is tested here without runs.
"""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from torch import nn

from benchmarks import architectures, harness
from benchmarks.architecture_row import QUICK as QUICK_EXTENT
from benchmarks.architecture_row import STAGES, Extent, Row, measure, plans, verify
from benchmarks.architectures import HEADER, cells, counts, page
from tests.models import NAMES, missing_library
from tests.slow import slow

ONE_RANDOM = Extent("one", ("dp=2,tp=2",), (3,), ())
QUICK = ("llama", "bert", "t5", "vit", "resnet")


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_trains_and_infers_the_same(name: str) -> None:
    row = verify(Row(name), ONE_RANDOM)
    assert row.all_verified, row.reasons
    assert row.verified == 2 and 0.0 < row.largest_error < 1e-8
    assert row.without_rule == ()


@pytest.mark.parametrize("name", ("nanogpt", slow("blocks")))
@pytest.mark.slow
def test_first_own_models_under_their_best_plan(name: str) -> None:
    """A loop over blocks, then a loss of flattened logits and labels."""
    row = verify(Row(name), Extent("best", ("dp=2,tp=2",), (), ("dp=2,tp=2",)))
    assert row.all_verified and row.verified == 2, row.reasons  # trained, and run without a loss


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in QUICK])
def test_every_architecture(name: str) -> None:
    if library := missing_library(name):
        pytest.skip(f"{library} is not installed")
    row = verify(Row(name), ONE_RANDOM)
    assert row.all_verified, row.reasons


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_a_builder(name: str) -> None:
    module, _, function = NAMES[name].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_a_failure_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(loss: bool = True) -> tuple[nn.Module, tuple[()]]:
        raise ValueError("no such | layer")

    monkeypatch.setattr("tests.models.plain.lenet", broken)
    row = verify(Row("lenet"), QUICK_EXTENT)
    assert not row.passed and row.plans == 0
    assert [reason.partition(":")[0] for reason in row.reasons] == ["training", "inference"]
    assert "no such | layer" in row.reasons[0]
    assert "no such \\| layer" in page([row], QUICK_EXTENT)


def test_an_original_that_does_not_run_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[nn.Module, tuple[()]]:
        raise ImportError("a library of another release")

    monkeypatch.setattr("tests.models.plain.lenet", broken)
    row = measure("lenet", QUICK_EXTENT)
    assert not row.refused and not row.passed and row.stages == ()
    assert row.reasons == ("the original does not run here: ImportError: a library of another release",)


GOOD = Row("gpt2", "quick", stages=STAGES, ops=9, operators=3, plans=2, verified=2, largest_error=1e-15)
WRONG = Row("opt", "quick", stages=STAGES, plans=2, verified=1, reasons=("tp=2 best: output differs",))
STUCK = Row("bert", "quick", stages=STAGES[:4], plans=2, verified=2, reasons=("--resume: no such file",))
REFUSED = Row("vit", "quick", refused=True, reasons=("it branches on values\ntry where",))
MISSING = Row("timm_vit", "quick", missing="timm")


def test_the_table_counts_what_is_in_every_column() -> None:
    rows = [GOOD, WRONG, STUCK, REFUSED, MISSING]
    said = counts(rows)
    assert said == ("1 of 4 through every stage; refused: vit; failed: opt, bert; not installed, not counted: timm_vit")
    assert said in page(rows, QUICK_EXTENT)
    by_column = [dict(zip(HEADER, cells(row), strict=True)) for row in rows]
    assert [row["reached"] for row in by_column] == ["all", "all", "saved", "nothing", ""]
    assert [row["verified"] for row in by_column] == ["2/2", "1/2", "2/2", "", ""]
    assert "| refused: it branches on values try where |" in page(rows, QUICK_EXTENT)
    assert counts([GOOD]) == "1 of 1 through every stage"
    assert counts([replace(GOOD, stages=STAGES[:-1])]) == "0 of 1 through every stage; failed: gpt2"
    assert counts([replace(GOOD, plans=0, verified=0)]) == "0 of 1 through every stage; failed: gpt2"


def _results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row]) -> tuple[list[str], list[str]]:
    """The names that are run, and the command's arguments; only `rows` exist."""
    ran: list[str] = []

    def run(name: str, extent: Extent) -> Row:
        ran.append(name)
        return next(row for row in rows if row.name == name)

    monkeypatch.setattr(architectures, "run", run)
    monkeypatch.setattr(architectures, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(architectures, "NAMES", {row.name: NAMES[row.name] for row in rows})
    monkeypatch.setattr(architectures, "missing_library", lambda name: "timm" if name == "timm_vit" else "")
    return ran, ["--quick", "--results", str(tmp_path / "rows.jsonl")]


def test_rows_that_are_there_do_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, options = _results(tmp_path, monkeypatch, [GOOD, REFUSED, MISSING])
    assert architectures.main([*options, "--part", "0/2"]) == 0
    with (tmp_path / "rows.jsonl").open("a") as stream:
        stream.write('{"name": "vit", "ext')  # killed while it wrote
    assert architectures.main([*options, "--write"]) == 0
    assert ran == ["gpt2", "timm_vit", "vit"]
    assert architectures.read(tmp_path / "rows.jsonl") == {row.name: row for row in (GOOD, MISSING, REFUSED)}
    assert (tmp_path / "page.md").read_text() == page([GOOD, REFUSED, MISSING], QUICK_EXTENT)
    monkeypatch.setattr(architectures, "missing_library", lambda name: "")  # installed since
    assert architectures.main([*options, "--again", "gpt2", "timm_vit"]) == 0
    assert ran[3:] == ["timm_vit"]


def test_rows_that_failed_run_again_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, options = _results(tmp_path, monkeypatch, [GOOD, WRONG])
    assert architectures.main(options) == architectures.main(options) == 6
    assert architectures.main([*options, "--again"]) == 6
    assert ran == ["gpt2", "opt", "opt"]
    assert architectures.main([*options[1:], "gpt2"]) == 0  # all plans: another extent
    assert ran[3:] == ["gpt2"]


def test_a_page_says_what_was_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, options = _results(tmp_path, monkeypatch, [GOOD, WRONG])
    assert architectures.main([*options, "--write", "gpt2"]) == 0
    written = (tmp_path / "page.md").read_text()
    assert "1 of 1 through every stage; not run, not counted: opt" in written
    assert f"| opt |{'  |' * (len(HEADER) - 2)} not run |" in written


def test_the_page_says_what_the_rows_say() -> None:
    rows = architectures.read(architectures.RESULTS)
    said = page([rows.get(name, Row(name, "quick")) for name in NAMES], QUICK_EXTENT)
    assert said == architectures.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ("1", "2/2", "a/b", "-1/2", "0/0"))
def test_a_part_is_one_of_all(text: str) -> None:
    with pytest.raises(ValueError, match="--part is K/N"):
        harness.part(list(NAMES), text)
    assert sorted([*harness.part("abcde", "0/2"), *harness.part("abcde", "1/2")]) == list("abcde")


def test_a_worker_that_is_killed_leaves_its_last_whole_row() -> None:
    output = f"a library's words\n{json.dumps(asdict(STUCK))}\n{json.dumps(asdict(GOOD))[:40]}"
    assert architectures._last_row("bert", QUICK_EXTENT, output) == STUCK
    assert architectures._last_row("bert", QUICK_EXTENT, "") == Row("bert", "quick")


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
"""


def test_nothing_is_left_of_a_killed_run() -> None:
    """Children too: else they hold the pipes, and train on."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        said = {process.stdout.readline().strip() for _ in range(2)}
        harness.kill_family(process)
        assert process.stdout.read() == b""  # ends when the child's end of the pipe is closed
        assert b"up" in said and process.returncode == -signal.SIGKILL
        harness.kill_family(process)  # nothing to do


@pytest.mark.slow
def test_a_row_that_is_really_run() -> None:
    row = measure("lenet", QUICK_EXTENT)
    assert row.passed and row.plans == 2, row


def test_the_plans_are_the_best_and_the_random_ones_of_each_mesh() -> None:
    from autoshard.graph_capture.capture import capture

    graph = capture(NAMES["lenet"], {})
    extent = Extent("two", ("tp=2", "dp=2,tp=2"), (1, 2), ("tp=2",))
    labels = [label for label, _ in plans(graph, extent)]
    assert labels == ["tp=2 best", *(f"{mesh} random:{seed}" for mesh in ("tp=2", "dp=2,tp=2") for seed in (1, 2))]
