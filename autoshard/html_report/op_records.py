"""Records of operators for the page: why this strategy, what it costs, the alternatives, and where its code is.

Equal operators of repeated blocks share a record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.cluster.hardware import Hardware
from autoshard.code_text import printable
from autoshard.emit.model_file import operator_lines
from autoshard.errors import NAMED
from autoshard.formulation.cost_breakdown import Split, alternatives
from autoshard.formulation.formulate import Formulation
from autoshard.ir.graph import Graph
from autoshard.ir.plan import OpPlan, Plan
from autoshard.ir.program import Compute, Program
from autoshard.replay.other_sizes import OtherSizes, at_other_sizes
from autoshard.replay.reevaluate import choice_of
from autoshard.rules.granularities import granularities
from autoshard.text import plan_labels
from autoshard.text.answer_labels import chosen_words
from autoshard.text.collective_lines import move_lines
from autoshard.text.explain import formulated
from autoshard.text.plan_labels import strategy_words, unavailable_strategies
from autoshard.units import format_bytes, format_seconds, signed_seconds


def op_records(
    plan: Plan, graph: Graph, program: Program, others: OtherChoices, model_text: str
) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """The records, and instruction -> its record. `model_text` is the emitted model_parallel.py, "" where not known."""
    record_of: dict[str, int] = {}
    records: list[dict[str, Any]] = []
    code = _places(program, model_text, at_other_sizes(program, plan, graph) if model_text else OtherSizes())
    known = granularities(graph, plan.mesh)
    ops = iter(plan.ops)
    for block in plan_labels.blocks(plan, graph):
        first = len(records)
        for row in block.rows:
            why_not = unavailable_strategies(graph, row.op, plan.mesh, known)
            reasons = {"not": [*map(printable, why_not)], "why": printable(chosen_words(plan, row.plan))}
            records.append({**_record(row, len(block.names), plan, graph, others, code), **reasons})
        for _ in block.names:
            for position in range(len(block.rows)):
                record_of[next(ops).op] = first + position
    instructions: dict[int, int] = {}
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Compute) and instruction.op in record_of:
            instructions[index] = record_of[instruction.op]
    return records, instructions


def _record(
    row: plan_labels.BlockRow, times: int, plan: Plan, graph: Graph, others: OtherChoices, code: Mapping[str, str]
) -> dict[str, Any]:
    choices, more = others.of(row.op.name)
    said = {
        "operator": row.op.target,
        "strategy": row.words + (f", by {row.plan.variant}" if row.plan.variant else ""),
        "result": f"{' × '.join(map(str, _shape(row, graph)))}: {row.result}" if row.result else "",
        "decided": row.plan.decided_by,
        "source": row.op.source,
        "emitted": code.get(row.op.name, ""),
    }
    return {
        **{key: printable(words) for key, words in said.items()},
        "times": times,
        "parts": _parts(row.plan),
        "before": [printable(line) for line in move_lines(row.moves, plan, graph)],
        "others": [printable(str(other)) for other in choices],
        "more": more,
    }


def _shape(row: plan_labels.BlockRow, graph: Graph) -> tuple[int, ...]:
    return graph.tensor(row.op.results[0]).shape if row.op.results else ()


def _parts(op: OpPlan) -> list[list[str]]:
    rows = [["forward", format_seconds(op.forward_seconds, 3)], ["backward", format_seconds(op.backward_seconds, 3)]]
    parts = op.parts
    if parts.repeated_seconds:
        rows.append(["of it replicated on other devices", format_seconds(parts.repeated_seconds, 3)])
    if parts.communication_seconds:
        rows.append(["communication for it", format_seconds(parts.communication_seconds, 3)])
    if parts.memory_bytes:
        rows.append(["kept at the peak", format_bytes(parts.memory_bytes, 3)])
    return rows


def _places(program: Program, model_text: str, sizes: OtherSizes) -> dict[str, str]:
    """Op -> `model_parallel.py:82, GPT2Attention: x = F.linear(…)`: of the first of equal modules, for all."""
    lines = model_text.splitlines()
    return {
        op: f"model_parallel.py:{line}, {name}: {lines[line - 1].strip()}"
        for op, (line, name) in operator_lines(program, model_text, sizes).items()
    }


@dataclass(frozen=True)
class OtherChoice:
    """A strategy in words; seconds more than the chosen one, of which `computing_seconds` are not communication."""

    words: str
    seconds: float
    computing_seconds: float

    def __str__(self) -> str:
        talking = self.seconds - self.computing_seconds
        named = ((self.computing_seconds, "computing"), (talking, "communication"))
        parts = [f"{signed_seconds(seconds)} {name}" for seconds, name in named if abs(seconds) >= 1e-9]
        return f"{self.words}: {signed_seconds(self.seconds)} a step ({', '.join(parts) or 'no difference'})"


class OtherChoices:
    """Other choices by operator name; nothing where the plan's choices are not offered any more."""

    def __init__(self, plan: Plan, graph: Graph, hardware: Hardware) -> None:
        self.formulation: Formulation = formulated(plan, graph, hardware).formulation
        choice = choice_of(plan, self.formulation)
        self.choice = choice or ()
        self.totals = alternatives(self.formulation.problem, self.choice) if choice is not None else []
        self.split = Split(self.formulation)
        self.node = {site.name: n for n, site in enumerate(self.formulation.sites) if site.kind == "op"}

    def of(self, name: str) -> tuple[list[OtherChoice], int]:
        """The best others, the cheapest first, and how many more there are."""
        if not self.totals:
            return [], 0
        n = self.node[name]
        site, chosen, totals = self.formulation.sites[n], self.choice[n], self.totals[n]
        computing, _ = self.split.seconds(n)
        graph, mesh = self.formulation.graph, self.formulation.mesh
        by_words: dict[str, OtherChoice] = {}
        for s in sorted(range(len(totals)), key=lambda s: (float(totals[s]), s)):
            if s != chosen and math.isfinite(totals[s]):
                words = strategy_words(graph.by_op[name], site.strategies[s], graph, mesh)
                apart = float(totals[s] - totals[chosen]), float(computing[s] - computing[chosen])
                by_words.setdefault(words, OtherChoice(words, *apart))
        every = list(by_words.values())
        return every[:NAMED], len(every) - len(every[:NAMED])
