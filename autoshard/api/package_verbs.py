"""Verbs on a package that only the command line has: explain, compare, export, and the files that it writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.api.planned import PlannedModel
from autoshard.api.verbs import report
from autoshard.package import package_files
from autoshard.program.step_check import check_one_batch

if TYPE_CHECKING:
    from autoshard.calibrate.run_files import RunFiles
    from autoshard.text.explain import Explained
    from autoshard.text.plan_diff import Difference
    from autoshard.trace_comparison.differences import Comparison
    from autoshard.trace_comparison.measured_step import MeasuredStep


def explain(plan: PlannedModel, what: str | None = None, why_not: str | None = None) -> Explained:
    """Cost of each choice and of the next best one; `why_not`: the cost of another choice at `what`."""
    from autoshard.text.explain import explain as explained

    folder = "DIR" if plan.folder is None else str(plan.folder)
    return explained(plan.plan, plan.graph, plan.hardware, what, why_not, folder)


def diff(one: PlannedModel, other: PlannedModel) -> Difference:
    """Decisions that differ between two plans, and the predicted cost of that."""
    from autoshard.text.plan_diff import diff as differences

    return differences(one.plan, one.graph, other.plan, other.graph)


def read_run(plan: PlannedModel, trace: Path) -> MeasuredStep:
    """The steps of a profiler's trace of a real run."""
    from autoshard.trace_comparison.measured_step import measured_step
    from autoshard.trace_comparison.trace_events import read_trace

    check_one_batch(plan.plan.step, "comparing with a trace")
    return measured_step(read_trace(trace))


def compare(plan: PlannedModel, measured: MeasuredStep) -> Comparison:
    """Comparison of a real run with the prediction."""
    from autoshard.trace_comparison.differences import compare as compared

    built = plan.simulated
    return compared(built.timeline, built.program, built.graph, measured)


def fit_run(plan: PlannedModel, measured: MeasuredStep, out: Path) -> RunFiles:
    """Writes a profile and constants that predict the run to `out`."""
    from autoshard.calibrate import run_files, run_fit

    built = plan.simulated
    fitted = run_fit.run_fit(built.program, built.graph, built.hardware, measured)
    run = f"{measured.steps} steps of {built.graph.name} on {built.plan.mesh}"
    return run_files.write_run(out, built.hardware, fitted, run)


def compiled(plan: PlannedModel) -> PlannedModel:
    """The plan with its step simulated with blocks that `train.py --compile` has compiled."""
    check_one_batch(plan.plan.step, "--compiled")
    return replace(plan, compiled=True)


def at_sizes(plan: PlannedModel, text: str) -> PlannedModel:
    """Plan with its step at other dynamic sizes, as `batch=16,sequence=256`. UsageError for one not allowed."""
    from autoshard.constraints.size_histogram import read_histogram
    from autoshard.graph_capture.dynamic_sizes.graph_numbers import sizes_of
    from autoshard.graph_capture.dynamic_sizes.numbers import resized
    from autoshard.replay.resize import reapply
    from autoshard.search.fixed_step import predicted

    sizes = dict(read_histogram(text)[0].sizes)
    graph = resized(plan.graph, sizes)
    there = plan.plan.at_sizes(sizes_of(graph))
    sized_plan = predicted(reapply(there, plan.graph, graph, plan.hardware), graph)
    return replace(plan, plan=sized_plan, graph=graph)


def export(plan: PlannedModel, kind: str, output: Path | None = None) -> tuple[Path, list[str]]:
    """The simulated step in another tool's format: the folder, in the package by default, and its files."""
    from autoshard.exports.export_files import export as exported

    built = plan.simulated
    check_one_batch(built.plan.step, f"--export {kind}")
    target = output or _folder(plan) / kind
    return target, exported(kind, target, built.timeline, built.program, built.graph, built.hardware)


def write_timeline(plan: PlannedModel, output: Path | None = None) -> Path:
    """The simulated step as a Chrome trace, which Perfetto opens. Into the package by default, as all that follow."""
    text = package_files.trace_text(plan.simulated)
    return package_files.write_output(_folder(plan), output, package_files.TIMELINE, text)


def write_report(plan: PlannedModel, output: Path | None = None) -> Path:
    """The HTML page that shows the plan."""
    return package_files.write_output(_folder(plan), output, package_files.REPORT, report(plan))


def write_picture(plan: PlannedModel, output: Path | None = None) -> Path:
    """The plan as an SVG."""
    text = package_files.picture_text(plan.simulated)
    return package_files.write_output(_folder(plan), output, package_files.PLAN_PICTURE, text)


def write_difference(one: PlannedModel, other: PlannedModel, output: Path | None = None) -> Path:
    """Two plans compared, as a self-contained HTML page."""
    text = package_files.diff_text(one.simulated, other.simulated)
    return package_files.write_output(_folder(one), output, package_files.DIFF, text)


def _folder(plan: PlannedModel) -> Path:
    assert plan.folder is not None, "a plan that was read from a package"
    return plan.folder
