"""Why a plan has what it has at an operator, by the record of its search: who decided, and what the plan was chosen
for."""

from __future__ import annotations

from autoshard.ir.plan import Candidate, OpPlan, Plan
from autoshard.replay.command_line import style_of
from autoshard.search.objectives import MEMORY, RATIO
from autoshard.units import counted, format_seconds, signed_seconds

BY_LEVEL = {RATIO: "has the least communication and replicated work", MEMORY: "needs the least memory"}
CHOSEN, TOO_LARGE = "chosen", "too large"


def chosen_words(plan: Plan, op: OpPlan) -> str:
    """One or two sentences."""
    by = op.decided_by
    if by.startswith("pin"):
        return "It is pinned."
    if by.startswith("propagated"):
        return "It follows from the pins by propagation."
    if style := style_of(op):
        return f"--strategy {style} has it so."
    return plan_words(plan)


def plan_words(plan: Plan) -> str:
    """Why this plan was chosen, of those that the search simulated."""
    search = plan.search
    if search.steps:
        others = len(search.steps) - 1
        rest = f"of {counted(len(search.steps), 'whole step')} that were found" if others else "the one that was found"
        return f"The search chose its whole step, {rest}."
    chosen = next((own for own in search.candidates if own.outcome == CHOSEN), None)
    if chosen is None:
        return "No search is recorded for this plan."
    fitting = [own for own in search.candidates if own.outcome != TOO_LARGE]
    large = len(search.candidates) - len(fitting)
    fit = f"; {counted(large, 'other')} did not fit the memory" if large else ""
    what = "its simulated micro-batch" if plan.step.is_whole else "its simulated step"
    if len(fitting) == 1:
        return f"Its plan is the one that was simulated{' and fits' if large else ''} ({chosen.name}){fit}."
    if search.level in BY_LEVEL:
        return f"Of {len(fitting)} simulated plans its plan {BY_LEVEL[search.level]}{fit}."
    taken = f"{what}, {format_seconds(chosen.predicted_seconds)}, is the shortest of {len(fitting)} that were simulated"
    return f"Its plan was chosen as {taken}{_by_sum(chosen, fitting)}{fit}."


def _by_sum(chosen: Candidate, fitting: list[Candidate]) -> str:
    """Whether its sum of costs is the least of these, too."""
    least = min(fitting, key=lambda own: own.objective_seconds)
    apart = chosen.objective_seconds - least.objective_seconds
    if apart <= 1e-9 * chosen.objective_seconds:
        return ", and so is its sum of costs"
    return f"; its sum of costs is {signed_seconds(apart)} from that of another ({least.name})"
