"""What else was possible, as rows and points, and two plans compared on a page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cli import commands
from autoshard.html_report.alternatives_view import alternatives, plot
from autoshard.html_report.picture.plot_axis import PlotAxis
from autoshard.ir.plan import Candidate, Plan
from autoshard.package import package_files
from autoshard.replay.simulated_plan import ReportExtras
from autoshard.search.pareto_front import Point
from autoshard.search.style_plans import StylePlan, style_plans
from tests.graphs import mlp_graph
from tests.tiny.test_report import built, checked

GIB = 2.0**30


def planned() -> Plan:
    """A plan of 2 s and 2 GiB, of two that were simulated, with a limit of 3 GiB."""
    plan = built().plan
    tried = (Candidate("optimum", "chosen", 2.5, 2.0, 2 * GIB), Candidate("lean", "not better", 2.6, 3.0, 1 * GIB))
    return replace(
        plan,
        predicted_seconds=2.0,
        predicted_peak_bytes=2 * GIB,
        capacity_bytes=3 * GIB,
        search=replace(plan.search, candidates=tried),
    )


STYLES = (StylePlan("ZeRO-3", "shards", 3.0, 2.5 * GIB), StylePlan("Megatron", "heads", 1.0, 4 * GIB),
          StylePlan("data parallel", "copies", reason="no batch"))  # fmt: skip


def test_those_that_no_other_is_better_than_are_marked() -> None:
    rows = alternatives(planned(), STYLES, (Point(5.0, 0.5 * GIB, 5.0, True),))
    assert [(row.seconds, row.best) for row in rows] == [
        (1.0, True), (2.0, True), (3.0, True), (3.0, False), (5.0, True)
    ]  # fmt: skip
    assert [row.kind for row in rows] == ["style", "chosen", "simulated", "style", "front"]
    assert rows[0].outcome == "too large" and rows[3].outcome == "1 s slower"
    assert not any("data parallel" in row.name for row in rows)  # it was not simulated


def test_a_plan_found_twice_is_one_point() -> None:
    rows = alternatives(planned(), (StylePlan("Megatron", "heads", 3.0, 1 * GIB),), ())
    assert [row.name for row in rows] == [rows[0].name, "Megatron; also lean"]


def test_every_point_leads_to_its_row() -> None:
    package = built(seed=2)
    styles = style_plans(package.plan, package.graph, package.hardware)
    page = package_files.report_text(package, ReportExtras(styles, (Point(1.0, 1.0, 1.0, True),)))
    links = re.findall(r'href="#(alternative-\d+)"', page)
    assert len(links) >= 4 and set(links) <= set(checked(page).ids)


def test_the_plot_is_to_scale() -> None:
    rows = alternatives(planned(), STYLES, ())
    text = plot(rows, planned())
    assert "memory limit" in text and plot(rows, planned()) == text
    axis = PlotAxis.of([1.0, 3.0], 0.0, 100.0)
    assert axis.at(1.0) < axis.at(2.0) < axis.at(3.0) and axis.at(2.0) == pytest.approx(50)
    wide = PlotAxis.of([1.0, 100.0], 0.0, 100.0)
    assert wide.logarithmic and wide.at(10.0) == pytest.approx(50)
    assert PlotAxis.of([5.0], 0.0, 10.0).at(5.0) == pytest.approx(5)


@pytest.mark.parametrize("values", [(1.0, 3.0), (0.0213, 0.033), (1e-4, 2e-4), (7 * GIB, 9 * GIB), (1.0, 900.0)])
def test_marks_are_few_and_round(values: tuple[float, float]) -> None:
    unit = 1024.0 if values[0] > 1e6 else 1.0
    axis = PlotAxis.of(values, 0, 100, unit)
    marks = [mark / axis.unit for mark in axis.ticks()]
    assert 3 <= len(marks) <= 10
    for mark in marks:
        assert float(f"{mark:.2g}") == pytest.approx(mark)


def test_two_packages_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from autoshard.package import output_folder

    packages = {"a": built(mlp_graph(3, 64, 128)), "b": built(mlp_graph(3, 64, 128), "dp=4", seed=1)}
    for name, package in packages.items():
        output_folder.write_package(tmp_path / name, package_files.package_files(package))
    assert commands.main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a" / "diff.html")
    text = (tmp_path / "a" / "diff.html").read_text(encoding="utf-8")
    page = checked(text)
    assert len(set(page.ids)) == len(page.ids) and set(page.references) <= set(page.ids)
    said = " ".join(page.text)
    for words in ("dp=2,tp=2", "dp=4", "predicted step", "B - A", "Decisions that differ", "exposed all-reduce"):
        assert words in said
    assert text == package_files.diff_text(packages["a"], packages["b"])


def test_a_plan_compared_with_itself_differs_nowhere() -> None:
    package = built()
    said = " ".join(checked(package_files.diff_text(package, package)).text)
    assert "None differs." in said and "+0 s" in said


def test_a_picture_is_of_one_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["report", str(tmp_path), str(tmp_path), "--svg"]) == 2
    assert "--svg draws one plan" in capsys.readouterr().err
