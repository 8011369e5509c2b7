"""What else each choice of a plan could have been, and what that would cost more while all others stay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoshard.cluster.hardware import Hardware
from autoshard.errors import NAMED
from autoshard.formulation.cost_breakdown import Split, alternatives
from autoshard.formulation.formulate import Formulation
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.replay.reevaluate import choice_of
from autoshard.text.explain import formulated
from autoshard.text.plan_labels import strategy_words
from autoshard.units import signed_seconds


@dataclass(frozen=True)
class OtherChoice:
    """A strategy in words; seconds more than the chosen one, of which `computing_seconds` are not communication."""

    words: str
    seconds: float
    computing_seconds: float

    def __str__(self) -> str:
        talking = self.seconds - self.computing_seconds
        named = ((self.computing_seconds, "computing"), (talking, "communication"))
        parts = [f"{signed_seconds(own)} {name}" for own, name in named if abs(own) >= 1e-9]
        return f"{self.words}: {signed_seconds(self.seconds)} a step ({', '.join(parts) or 'no difference'})"


class OtherChoices:
    """Asked by operator name; nothing where the plan's choices are not offered any more."""

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
        found: dict[str, OtherChoice] = {}
        for s in sorted(range(len(totals)), key=lambda s: (float(totals[s]), s)):
            if s != chosen and math.isfinite(totals[s]):
                words = strategy_words(graph.by_op[name], site.strategies[s], graph, mesh)
                apart = float(totals[s] - totals[chosen]), float(computing[s] - computing[chosen])
                found.setdefault(words, OtherChoice(words, *apart))
        every = list(found.values())
        return every[:NAMED], len(every) - len(every[:NAMED])
