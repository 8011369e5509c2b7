"""The answer, in one row: step, memory, utilisation, devices, and what is gained over styles that people know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.cluster.hardware import Hardware
from autoshard.constraints.host_offers import plan_host_bytes
from autoshard.costs.model_flops import ideal_seconds
from autoshard.ir.graph import Graph
from autoshard.ir.graph_json import has_code
from autoshard.ir.plan import Plan
from autoshard.search.style_plans import StylePlan
from autoshard.simulation.step_account import StepAccount
from autoshard.text.account_text import parts, stage_breakdown
from autoshard.text.answer_labels import certainty, gains
from autoshard.text.plan_summary import error_band
from autoshard.units import counted, format_bytes, format_seconds

FIGURES = ("data parallel", "FSDP", "Megatron")  # the styles that stand among the figures; the others in a sentence


def answer(
    plan: Plan, graph: Graph, hardware: Hardware, account: StepAccount, styles: Sequence[StylePlan]
) -> dict[str, Any]:
    """The headline figures, the gains over styles, how sure the optimum is, and where the step goes."""
    return {
        "figures": figures(plan, graph, hardware, account),
        "gains": [_gain(plan, style, words) for style, words in gains(plan, styles) if style.name in FIGURES],
        "more_gains": [_gain(plan, style, words) for style, words in gains(plan, styles) if style.name not in FIGURES],
        "certainty": certainty(plan),
        "parts": step_parts(account),
        "stage_parts": stage_breakdown(account) if len(account.stages) > 1 else [],
    }


def figures(plan: Plan, graph: Graph, hardware: Hardware, account: StepAccount) -> list[dict[str, Any]]:
    """Label, value, note, and a share in percent where there is a bar."""
    step, peak = account.step_seconds, plan.step_peak_bytes if plan.step.capacity_bytes else account.peak_bytes
    band = error_band(plan, graph)
    low, high = (format_seconds(step * (1 + sign * band.error), 3) for sign in (-1, 1))
    what = "one optimizer step" if graph.loss else "forward only"
    if plan.step.micro_batches > 1:
        what += f" of {counted(plan.step.micro_batches, 'micro-batch')}"
    found = [_figure("Predicted step", format_seconds(step), f"{low} to {high}, {band}; {what}")]
    finite = math.isfinite(plan.step_capacity_bytes)
    share = peak / plan.step_capacity_bytes if finite and plan.step_capacity_bytes else None
    note = f"{share:.1%} of {format_bytes(plan.step_capacity_bytes)}" if share is not None else "no limit was set"
    found.append(_figure("Peak memory of a device", format_bytes(peak), note, share))
    in_host = plan_host_bytes(plan, graph)
    if in_host:
        note = (
            f"of its host, {format_bytes(hardware.host_memory_bytes)} of which are for a device: tables, trained there"
        )
        found.append(_figure("Host memory of a device", format_bytes(in_host), note))
    ideal = ideal_seconds(graph, hardware, plan.devices)
    if ideal:
        used = ideal * plan.step.micro_batches / (step or math.inf)
        note = "MFU: the model's FLOPs over the devices' peak"
        found.append(_figure("Model FLOPs utilisation", f"{used:.1%}", note, used))
    nodes = len(hardware.nodes(plan.devices))
    where = plan.where
    note = f"{where} of {hardware.name}, {nodes} node{'s' if nodes > 1 else ''}"
    found.append(_figure("Devices", str(plan.devices), note))
    return found


def _figure(label: str, value: str, note: str, share: float | None = None) -> dict[str, Any]:
    percent = None if share is None else round(100 * min(1.0, share), 2)
    return {"label": label, "value": value, "note": note, "share": percent}


def _gain(plan: Plan, style: StylePlan, words: str) -> dict[str, str]:
    """`words` without their last word is the figure: `1.16x` of `1.16x faster`."""
    if not style.predicted_seconds:
        return {"label": style.name, "value": "–", "note": words, "meaning": style.meaning}
    note = f"it takes {format_seconds(style.predicted_seconds)} and {format_bytes(style.predicted_peak_bytes)}"
    return {"label": f"vs. {style.name}", "value": words, "note": note, "meaning": style.meaning}


def step_parts(account: StepAccount) -> list[tuple[str, str, str]]:
    """(what, seconds, share of the step), which add up to the step."""
    step = account.step_seconds
    rows = [*parts(account), ("predicted step", step)]
    return [(what, format_seconds(own), f"{own / step:.1%}" if step else "") for what, own in rows]


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
