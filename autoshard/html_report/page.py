"""Data of the report, as the plain values that the template shows: one function a section."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoshard.cluster.hardware import Hardware
from autoshard.costs import provenance as provenance_of
from autoshard.html_report.alternatives_view import view
from autoshard.html_report.decision_rows import blocks, buckets, redistributions, stored, weight_buckets
from autoshard.html_report.op_records import OtherChoices, op_records
from autoshard.html_report.picture.plan_picture import about, plan_svg
from autoshard.html_report.size_view import size_view
from autoshard.html_report.timeline_series import (
    KINDS,
    LEGEND,
    by_kind,
    longest,
    memory_series,
    series,
    step_series,
    streams,
)
from autoshard.html_report.whole_step_view import whole_step
from autoshard.ir import plan_json
from autoshard.ir.graph import Graph
from autoshard.ir.graph_json import has_code
from autoshard.ir.plan import Candidate, MeshTried, Plan
from autoshard.replay.command_line import command
from autoshard.replay.reevaluate import resimulated
from autoshard.replay.simulated_plan import ReportExtras, SimulatedPlan
from autoshard.search.style_plans import StylePlan
from autoshard.servers.server_text import server_rows, server_title
from autoshard.simulation import Timeline
from autoshard.simulation.memory_curve import plan_memory
from autoshard.simulation.step_operators import StepOperators
from autoshard.solvers.common.result import fits
from autoshard.text.account_text import breakdown, left_open, stage_breakdown
from autoshard.text.answer_labels import MEMORY, STEP, certainty
from autoshard.text.collective_lines import collective_words
from autoshard.text.plan_figures import CERTIFICATE, PlanFigure, baselines, certificate, figures
from autoshard.text.plan_labels import float8_words
from autoshard.text.plan_summary import devices_note, devices_table, purpose
from autoshard.text.stage_table import STEP_HEADER, step_cells
from autoshard.units import counted, format_bytes, format_seconds

SIZES = "Sizes are of the largest buffer on one device, times of one redistribution."
FIGURES = ("data parallel", "FSDP", "Megatron")  # the styles that stand among the figures; the others in a sentence
NOT_MODELLED = ("loading of data", "slow or shared nodes and links", "fragmentation of the allocator")


def page(built: SimulatedPlan, extras: ReportExtras) -> dict[str, Any]:
    """Everything the template names."""
    plan, graph, hardware, timeline, step = built.plan, built.graph, built.hardware, built.timeline, built.step
    model = plan.model or graph.name
    return {
        "title": f"{model} on {plan.mesh}: autoshard report",
        "model": model,
        "mesh": str(plan.mesh),
        "devices": plan.devices,
        "stages": plan.step.stages,
        "whole_step": whole_step(plan, graph, step),
        **size_view(plan, graph, hardware),
        "devices_table": devices_table([plan, *extras.others]) if extras.others else [],
        "devices_note": devices_note([plan, *extras.others]),
        "servers": {"title": server_title(plan), "rows": server_rows(plan)} if plan.servers.count else None,
        "hardware": plan.hardware,
        "hardware_text": plan.hardware_text,
        "precision": plan.precision,
        "optimizer": purpose(plan, graph),
        "verification": verdict(extras.verification, plan.model),
        **_answer(built, extras.styles),
        "picture": plan_svg(plan, graph, hardware),
        "picture_text": about(plan, graph, hardware),
        "warnings": [
            *sentences(resimulated(plan, timeline.step_seconds)),
            *warnings(plan, hardware),
            *discovered(graph),
            *in_float8(plan, graph),
        ],
        "command": command(plan, graph),
        "provenance": provenance(plan, graph),
        **_timeline(timeline, step.operators),
        "data": _data(built, extras.model_text),
        **_memory(built),
        **_chosen(built),
        **_certificate(plan, timeline),
        **view(plan, extras.styles, extras.front),
    }


def _answer(built: SimulatedPlan, styles: Sequence[StylePlan]) -> dict[str, Any]:
    """The figures, what is gained over styles that people know, how sure the optimum is, and where the step goes."""
    plan, account = built.plan, built.step.account
    nodes = counted(len(built.hardware.nodes(plan.devices)), "node")
    devices = PlanFigure("devices", str(plan.devices), f"{plan.where} of {built.hardware.name}, {nodes}")
    compared = list(zip(baselines(plan, styles), styles, strict=True))
    return {
        "figures": [*figures(plan, built.graph, account), devices],
        "gains": [gain for gain in compared if gain[1].name in FIGURES],
        "more_gains": [gain for gain in compared if gain[1].name not in FIGURES],
        "certainty": certainty(plan),
        "parts": breakdown(account),
        "stage_parts": stage_breakdown(account, plan.step.word) if len(account.stages) > 1 else [],
    }


def _timeline(timeline: Timeline, operators: StepOperators | None) -> dict[str, Any]:
    """Streams and longest events; those of a whole step stage by stage."""
    rows: list[tuple[str, ...]] = []
    if operators is None:
        seconds, events, count = timeline.step_seconds, timeline.events, len(timeline.events)
        rows += streams([(1, events)], timeline.streams, seconds)
    else:
        whole, events, count, seconds = operators.timeline, (), 0, operators.timeline.step_seconds
        for stage, laid in enumerate(operators.stages):
            times = Counter(placed.segment for placed in laid)
            parts = [(often, operators.segments[number].events) for number, often in times.items()]
            count += sum(often * len(segment) for often, segment in parts)
            of = f"{whole.costs.word} {stage}: " * (whole.stages > 1)
            rows += [(of + name, *cells) for name, *cells in streams(parts, operators.lanes(), seconds)]
            events += operators.events_of(sorted({placed.segment: placed for placed in reversed(laid)}.values()))
    return {
        "legend": [row for row in LEGEND if row["key"] != "recompute" or any(e.phase == "recompute" for e in events)],
        "streams": [row for row in rows if row[-1] != "0"],
        "streams_caption": f"{count} events in {format_seconds(seconds)}",
        "longest": longest(events),
        "timeline_label": f"Timeline of one step of {format_seconds(seconds)}.",
    }


def _data(built: SimulatedPlan, model_text: str) -> dict[str, Any]:
    """Data that the script draws: events, memory, and the records of operators."""
    plan, graph, program, hardware, timeline = built.plan, built.graph, built.program, built.hardware, built.timeline
    operators = built.step.operators
    records, instructions = op_records(plan, graph, program, OtherChoices(plan, graph, hardware), model_text)
    memory = plan_memory(program, graph, block_bytes=hardware.constant("allocator.block"))
    return {
        **(step_series(operators, instructions) if operators else series(timeline, instructions)),
        "records": records,
        **({} if operators else {"memory": memory_series(memory, plan, timeline)}),
    }


def _memory(built: SimulatedPlan) -> dict[str, Any]:
    plan, timeline = built.plan, built.timeline
    peak, when = format_bytes(timeline.peak_bytes), format_seconds(timeline.peak_at_seconds)
    text = f"The peak of {peak} is reached {when} into the step."
    if math.isfinite(plan.capacity_bytes):
        text += f" A plan may use {format_bytes(plan.capacity_bytes)} of a device."
    return {
        "memory_label": f"Memory over one step, at most {peak}, {when} into the step.",
        "memory_text": text,
        "memory_kinds": by_kind(built.program, built.graph, built.hardware),
        "memory_legend": [{"key": kind, "label": words} for kind, words in KINDS.items()],
        "memory_tensors": [(held.name, KINDS[held.kind], format_bytes(held.bytes)) for held in timeline.peak_tensors],
    }


def _chosen(built: SimulatedPlan) -> dict[str, Any]:
    plan, graph, program = built.plan, built.graph, built.program
    moves = plan.redistributions
    seconds = sum(move.forward_seconds + move.backward_seconds for move in moves)
    places = f"{len(moves)} redistribution{'s' if len(moves) != 1 else ''}"
    return {
        "blocks": blocks(plan, graph),
        "stored": stored(plan, graph),
        "redistributions": redistributions(plan, graph),
        "redistribution_text": f"{places}, {format_seconds(seconds)} a step. {SIZES}",
        "collective_text": f"Collectives: {words}." if (words := collective_words(built.timeline)) else "",
        "buckets": buckets(program),
        "weight_buckets": weight_buckets(program),
    }


LEVELS = (
    "level 0, the least communication and replicated work",
    "level 1, the least memory",
    "level 2, the fastest step",
)


def _certificate(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    difference = plan.predicted_seconds - plan.certificate.objective_seconds
    what = "A micro-batch, on average," if plan.step.micro_batches > 1 else "The simulated step"
    text = f"{certainty(plan)} {what} is {format_seconds(abs(difference))}"
    text += f" {'longer' if difference >= 0 else 'shorter'} than the sum of all costs, in which nothing overlaps."
    if words := left_open(plan, timeline):
        text += f" Left open: {words}."
    return {"certificate": [CERTIFICATE, certificate(plan)], "certificate_text": text, **_search(plan)}


def _search(plan: Plan) -> dict[str, Any]:
    """Section on the search: what was asked and tried."""
    level = LEVELS[plan.search.level]
    if plan.search.pins:
        level += f"; pinned: {', '.join(plan.search.pins)}"
    simulated = ("simulated",) if plan.step.is_whole else (STEP, MEMORY)  # of a micro-batch: no device's memory
    rows = [(tried.name, tried.outcome, tried.objective_seconds, tried) for tried in plan.search.candidates]
    meshes = [(str(tried.mesh), tried.outcome, tried.bound_seconds, tried) for tried in plan.search.meshes]
    return {
        "asked": f"Asked for: {level}.",
        "of": ", of each a micro-batch on one stage" * (plan.step.is_whole and not plan.servers.count),
        "candidates": _tried(("how it was found", "outcome", "sum of costs", *simulated), rows),
        "meshes": _tried(("mesh", "outcome", "computing alone takes", *simulated), meshes),
        "searched": _steps(plan),
    }


def _tried(
    head: tuple[str, ...], rows: Sequence[tuple[str, str, float, Candidate | MeshTried]]
) -> list[tuple[str, ...]]:
    """Table with a row for each; cells are empty where nothing was simulated, or no bound is known."""
    table = [head]
    for name, outcome, seconds, tried in rows:
        simulated = (tried.predicted_seconds, tried.predicted_peak_bytes) if tried.predicted_seconds > 0 else None
        cells = (format_seconds(simulated[0]), format_bytes(simulated[1])) if simulated else ("", "")
        table.append((name, outcome, format_seconds(seconds) if seconds else "", *cells)[: len(head)])
    return table


def _steps(plan: Plan) -> dict[str, Any] | None:
    """The whole steps that a search of steps found; None for a plan whose step the user gave."""
    if not plan.search.steps:
        return None
    rows = [step_cells(step) for step in plan.search.steps]
    return {"rows": [(*STEP_HEADER[:-1], "outcome"), *rows], "notes": sentences(plan.search.step_messages)}


def not_modelled(hardware: Hardware) -> str:
    """Sentence on what the simulated step leaves out; also the host's part, if the profile lacks it."""
    host = () if dict(hardware.constants).get("host.dispatch") else ("the host's dispatch time (not in this profile)",)
    return f"Not in the simulated step: {', '.join((*host, *NOT_MODELLED))}."


def warnings(plan: Plan, hardware: Hardware) -> list[str]:
    """Warnings that a reader needs before trusting the page."""
    notes = [not_modelled(hardware), f"Error of predictions: {provenance_of(hardware)}. Constants: {hardware.error}."]
    guesses = [figure.key for figure in hardware.figures if figure.kind == "default"]
    if guesses:
        notes.append(f"{len(guesses)} figures of the profile are defaults, not measurements: {', '.join(guesses)}.")
    if not fits(plan.step_peak_bytes, plan.step_capacity_bytes):
        excess = format_bytes(plan.step_peak_bytes - plan.step_capacity_bytes)
        notes.insert(0, f"The simulated program needs {excess} more memory than a plan may use.")
    deciders = sorted({op.decided_by for op in plan.ops if not op.decided_by.startswith(("search", "pin"))})
    if deciders:
        notes.insert(0, f"Not the best plan by choice: decided by {', '.join(deciders)}.")
    if plan.search.cut_short:
        notes.insert(0, "The search was cut short: this is the best plan so far.")
    return [*sentences(plan.search.notes), *notes]


def in_float8(plan: Plan, graph: Graph) -> list[str]:
    """Sentence on what runs in float8; none if nothing does."""
    words = float8_words(plan, graph)
    return [f"In float8: {words}."] if words else []


def sentences(notes: Iterable[str]) -> list[str]:
    """Notes as whole sentences; one that begins with code, like dp=2 or place(), is not capitalised."""
    return [f"{note[:1].upper() if re.match('[a-z-]+[ ,:]', note) else note[:1]}{note[1:]}." for note in notes]


def discovered(graph: Graph) -> list[str]:
    """The operators whose rule was found by experiment, and the rule."""
    rules = {graph.by_op[name].target: rule for name, rule in graph.discovered if rule}
    return [
        f"The rule of {target} was found by experiment, not written by hand: {rule}" for target, rule in rules.items()
    ]


def provenance(plan: Plan, graph: Graph) -> list[tuple[str, str]]:
    """Hashes and versions: with these, the same command gives this page again."""
    rows = [("plan", plan_json.plan_hash(plan, graph)), ("graph", plan.graph_hash)]
    return rows + [(name, version) for name, version in plan.versions]


def verdict(verification: Mapping[str, Any] | None, model: str) -> dict[str, str]:
    """The strip under the title: verified, failed, or not verified, and how to."""
    if verification is None:
        text = (
            "Run autoshard verify on its folder." if has_code(model) else f"{model} has no code: plan from the model."
        )
        return {"state": "unknown", "title": "Not verified.", "text": text}
    passed = bool(verification.get("passed"))
    title = "Verified." if passed else "Verification failed."
    if not passed:
        return {"state": "failed", "title": title, "text": str(verification.get("failure", ""))}
    return {"state": "passed", "title": title, "text": _proof_words(verification)}


def _proof_words(verification: Mapping[str, Any]) -> str:
    """How it was verified, the largest error, at which reduced sizes or on which shorter mesh, what was left out."""
    errors = [kind["largest"] for kind in verification["errors"].values() if kind["tensors"]]
    how = {"gloo": "gloo processes", "lockstep": "devices in lock-step"}[verification["backend"]]
    text = f"{verification['ranks']} {how}, float64, {verification['steps']} steps:"
    text += f" largest relative error {max(errors):.1e}."
    reduced = ", ".join(f"{item['argument']} {item['verified']}" for item in verification["reduced"])
    text += f" At reduced sizes: {reduced}." if reduced else ""
    mesh, planned = verification.get("mesh"), verification.get("planned_mesh")
    text += f" On {mesh}, which stands for {planned}." if mesh != planned else ""
    unverified = "; ".join(verification.get("unverified", ()))
    return text + (f" Not verified: {unverified}." if unverified else "")
