"""A package: what its files are made of, and how they are read back. Heavy modules are imported where they are used."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from autoshard.code_text import typed
from autoshard.errors import InvalidFileError
from autoshard.package import output_folder
from autoshard.replay.simulated_plan import ReportExtras, SimulatedPlan
from autoshard.system.files import parse_json, write_text

if TYPE_CHECKING:
    from autoshard.cluster.hardware import Hardware
    from autoshard.ir.graph import Graph
    from autoshard.ir.plan import Plan

T = TypeVar("T")
PLAN = "plan.json"
GRAPH = "graph.json"
TIMELINE = "timeline.json"
REPORT = "report.html"
VERIFICATION = "verification.json"
SEARCH_LOG = "search.log"
PARETO = "pareto.json"
PARETO_PLOT = "pareto.svg"
STYLES = "styles.json"
MODEL = "model_parallel.py"
PLAN_PICTURE = "plan.svg"
STAGES_PICTURE = "stages.svg"
DIFF = "diff.html"


def package_files(
    built: SimulatedPlan, extras: ReportExtras | None = None, other_numbers: bool = False
) -> dict[str, str]:
    """Every file of the package by name: the emitted program, the plan and graph it came from, timeline and report.

    `other_numbers`: of a package that has, or is in one that has, plans for other numbers of devices."""
    from autoshard.emit import emit
    from autoshard.ir import graph_json, plan_json

    files = dict(emit(built.program, built.plan, built.graph, other_numbers))
    files |= {PLAN: plan_json.dumps(built.plan), GRAPH: graph_json.dumps(built.graph)}
    extras = replace(extras or ReportExtras(), model_text=files[MODEL])
    if extras.front:
        from autoshard.search import pareto_front

        plot = pareto_front.plot(extras.front, f"{built.plan.mesh}")
        files |= {PARETO: pareto_front.as_json(extras.front), PARETO_PLOT: plot}
    if extras.styles:
        from autoshard.search import style_plans

        files[STYLES] = style_plans.as_json(extras.styles)
    if built.plan.step.parts and built.step.timeline is not None:
        from autoshard.html_report.picture.stages_picture import stages_svg

        files[STAGES_PICTURE] = stages_svg(built.step.timeline)
    return files | {TIMELINE: trace_text(built), REPORT: report_text(built, extras)}


def log_text(log: Sequence[tuple[str, float]]) -> str:
    """Wall seconds by what was done, and how often: it stands next to the plan, as it differs from run to run."""
    spent: dict[str, list[float]] = {}
    for what, seconds in log:
        spent.setdefault(what, []).append(seconds)
    lines = [
        f"{sum(seconds):10.3f} s  {what}" + (f", {len(seconds)} times" if len(seconds) > 1 else "")
        for what, seconds in spent.items()
    ]
    return "\n".join([*lines, f"{sum(seconds for _, seconds in log):10.3f} s  in all"]) + "\n"


def trace_text(built: SimulatedPlan) -> str:
    """The step as a Chrome trace, which Perfetto opens."""
    from autoshard.simulation.chrome_trace import chrome_trace, step_trace

    whole = built.step
    trace = step_trace(whole.operators, whole.account) if whole.operators else chrome_trace(built.timeline)
    return json.dumps(trace, ensure_ascii=False) + "\n"


def report_text(built: SimulatedPlan, extras: ReportExtras | None = None) -> str:
    """The self-contained HTML page."""
    from autoshard.html_report.render import render

    return render(built, extras or ReportExtras())


def diff_text(one: SimulatedPlan, other: SimulatedPlan) -> str:
    """Two plans compared, as a self-contained HTML page."""
    from autoshard.html_report.render import render_diff

    return render_diff(one, other)


def picture_text(built: SimulatedPlan) -> str:
    """The plan as an SVG."""
    from autoshard.html_report.picture.plan_picture import plan_svg

    return plan_svg(built.plan, built.graph, built.hardware)


def write_output(package: Path, output: Path | None, name: str, text: str) -> Path:
    """Write to `output`, or as file `name` of the package; gives the path written."""
    if output is not None:
        write_text(output, text)
        return output
    output_folder.update_package(root_of(package), {name: text})
    return root_of(package) / name


def root_of(package: Path) -> Path:
    """The folder of a package named by itself or by its plan.json."""
    return package.parent if package.name == PLAN else package


def read_package(path: Path) -> tuple[Plan, Graph, Hardware]:
    """The plan, graph and hardware of a package folder (or of its plan.json), checked to belong together."""
    from autoshard.cluster.hardware import parse_hardware
    from autoshard.ir import graph_json, plan_json
    from autoshard.replay.plan_check import check_plan
    from autoshard.rules.operator_check import check_saved

    root = root_of(path)
    output_folder.recover(root)
    if not root.is_dir():
        raise InvalidFileError(
            f"there is no package at {root}", "autoshard plan MODEL --mesh dp=2,tp=2 --hardware NAME"
        )
    texts = {name: output_folder.read_file(root, name) for name in (PLAN, GRAPH)}
    plan = plan_json.loads(texts[PLAN], str(root / PLAN))
    graph = check_saved(graph_json.loads(texts[GRAPH], str(root / GRAPH)), str(root / GRAPH))
    if graph_json.graph_hash(graph) != plan.graph_hash:
        raise InvalidFileError(f"{root / GRAPH} is not the graph that {root / PLAN} was made for", output_folder.AGAIN)
    hardware = parse_hardware(plan.hardware_text, f"{root / PLAN}, profile {plan.hardware}")
    check_plan(plan, graph, hardware, str(root / PLAN))
    output_folder.check_unedited(root, texts)
    return plan, graph, hardware


def read_verification(package: Path) -> dict[str, Any] | None:
    """Result of `verify` for this package; None if it was not verified."""
    root = root_of(package)
    if not (root / VERIFICATION).exists():
        return None
    hint = f"{typed('rm', root / VERIFICATION)}, or verify the package again: {typed('autoshard', 'verify', root)}"
    result = parse_json(output_folder.read_file(root, VERIFICATION), str(root / VERIFICATION), hint)
    if not isinstance(result, dict) or not isinstance(result.get("passed"), bool):
        raise InvalidFileError(f"{root / VERIFICATION} is damaged: it does not say what passed", hint)
    return result


def read_extras(package: Path, verified: bool = True) -> ReportExtras:
    """Files next to the plan of a package; missing ones are empty. `verified`: with the result of `verify`."""
    from autoshard.search import pareto_front, style_plans

    root = root_of(package)
    styles = _read_list(root, STYLES, style_plans.from_json)
    front = _read_list(root, PARETO, pareto_front.from_json)
    model_text = output_folder.read_file(root, MODEL) if (root / MODEL).exists() else ""
    others = tuple(_read_plan(path) for path in output_folder.nested_packages(root))
    return ReportExtras(styles, front, read_verification(package) if verified else None, model_text, others)


def _read_plan(root: Path) -> Plan:
    from autoshard.ir import plan_json

    return plan_json.loads(output_folder.read_file(root, PLAN), str(root / PLAN))


def _read_list(root: Path, name: str, read: Callable[[Any], tuple[T, ...]]) -> tuple[T, ...]:
    if not (root / name).exists():
        return ()
    content = parse_json(output_folder.read_file(root, name), str(root / name), output_folder.AGAIN)
    try:
        return read(content)
    except ValueError as error:
        raise InvalidFileError(f"{root / name} is damaged: {error}", output_folder.AGAIN) from error
