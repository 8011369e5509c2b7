"""The answer in a few words: what is gained over known styles, how sure it is, and why a plan has what it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoshard.ir.plan import Candidate, OpPlan, Plan
from autoshard.replay.command_line import style_of
from autoshard.search import objectives
from autoshard.solvers.common.result import fits
from autoshard.units import counted, format_bytes, format_seconds, signed_seconds

if TYPE_CHECKING:
    from autoshard.search.style_plans import StylePlan

STEP, MEMORY = "predicted step", "memory per device"  # what these are called wherever they are shown


def gap(plan: Plan) -> float | None:
    """(objective - lower bound) / objective, of what the level minimises; None where no bound was proved."""
    objective, bound = plan.certificate.level_objective, plan.certificate.level_bound
    return max(0.0, 1 - bound / objective) if bound > 0 and objective > 0 else None


def gap_words(plan: Plan) -> str:
    share = gap(plan)
    return "not known" if share is None else f"{share:.2%}"


def space(plan: Plan) -> str:
    """Space of plans that bound and optimum are of, if not all: ` on this mesh, among plans of --strategy dp, with the
    pins`. Of several meshes that were searched the bound is of one."""
    names = sorted({style_of(op) for op in plan.ops} - {""})
    style = "".join(f" among plans of --strategy {name}" for name in names if not name.startswith("random"))
    mesh = [" on this mesh"] if len(plan.search.meshes) > 1 else []
    options = [" with the pins"] if plan.search.pins else []
    options += [] if plan.search.all_to_all else [" without all-to-all"]
    return ",".join([*mesh, *([style] if style else []), *options])


def certainty(plan: Plan) -> str:
    """One sentence on how sure the optimum is, with what each figure is of: at level 2 of the simulated step."""
    if plan.search.steps:
        count = len(plan.search.steps)
        words = f"The best of {count} whole steps that were found" if count > 1 else "The one whole step that was found"
        return f"{words}; {'; '.join(plan.search.step_messages[:2])}."
    level, certificate = plan.search.level, plan.certificate
    show = format_bytes if level == 1 else format_seconds
    objective, bound = certificate.level_objective, certificate.level_bound
    share, measure = gap(plan), _MEASURES[level]
    if plan.search.sizes and level == 2:
        measure = "its expected step is"
    elif level == 2 and (plan.step.micro_batches > 1 or plan.step.stages > 1):
        measure = f"a micro-batch on one {plan.step.word} takes on average"
    first = f"{_simulated(plan)}; {measure} {show(objective)}"
    if share is None:
        return f"{first}, and no lower bound was proved for other plans."
    if gap_words(plan) == f"{0:.2%}":  # none, as shown
        return f"{first}, and no plan{space(plan)} has less, which is proved."
    proof = f"the proved lower bound{space(plan)} is {show(bound)}: a gap of {_small(share)}."
    return f"{first}; {proof}"


def _small(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"


_MEASURES = (
    "its communication and replicated work are",
    "by the solver's count its memory is",
    "its simulated step is",
)


def _simulated(plan: Plan) -> str:
    count = len([tried for tried in plan.search.candidates if tried.predicted_seconds > 0])
    if not count:
        return "Not compared with other simulated plans"
    best = ("Kept by its communication", "The smallest", "The fastest")[plan.search.level]
    cut = "; the search was cut short" if plan.search.cut_short else ""
    large = sum(tried.outcome == "too large" for tried in plan.search.candidates)
    that_fit, count = " that fit" * (large > 0), max(1, count - large)
    return (
        f"{best} of {count} simulated plans{that_fit}{cut}"
        if count > 1
        else f"The one plan that the search simulated{cut}"
    )


def gain_words(plan: Plan, style: StylePlan) -> str:
    """`1.16x faster`, `1.02x slower`, that it does not fit, or why there is none."""
    if style.predicted_seconds <= 0 or plan.judged_seconds <= 0:
        return style.reason or "not simulated"
    ratio = style.predicted_seconds / plan.judged_seconds
    words = f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"
    words = "as fast" if abs(ratio - 1) < 0.005 else words
    there = fits(style.predicted_peak_bytes, plan.capacity_bytes)
    return words if there else f"{words}; it does not fit"


BY_LEVEL = {
    objectives.RATIO: "has the least communication and replicated work",
    objectives.MEMORY: "needs the least memory",
}
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
    """Reason why this plan was chosen, of those that the search simulated."""
    search = plan.search
    if search.steps:
        others = len(search.steps) - 1
        which = f"of {counted(len(search.steps), 'whole step')} that were found" if others else "the one that was found"
        return f"The search chose its whole step, {which}."
    chosen = next((candidate for candidate in search.candidates if candidate.outcome == CHOSEN), None)
    if chosen is None:
        return "No search is recorded for this plan."
    fitting = [candidate for candidate in search.candidates if candidate.outcome != TOO_LARGE]
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
    """Text on its sum of costs: the least of these, too, or how far from the least."""
    least = min(fitting, key=lambda candidate: candidate.objective_seconds)
    apart = chosen.objective_seconds - least.objective_seconds
    if apart <= 1e-9 * chosen.objective_seconds:
        return ", and so is its sum of costs"
    return f"; its sum of costs is {signed_seconds(apart)} from that of another ({least.name})"
