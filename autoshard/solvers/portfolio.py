"""Exact min-plus elimination of the strategy graph, and all that stands around it: anytime, for every problem.

Each step finds the best plan and bound so far and leaves better ones. The clock is checked in all of them: whenever it
ends, the best plan goes out with what is proved. A step that shows, by its pace or by its tables, that it won't end in
its part of the time makes room for the next.

1. Under a clock a plan at once (`warm_start.py`); where nodes have hundreds of choices, the best over the few that
   messages rank first (`hub_relaxation.sketched`).
2. Exact: reduce the domains, write the values as layout-level terms, take the cheaper of a few elimination orders. A
   plan above the memory capacity goes on to limited_search.py.
3. Where no order fits: messages and few choices (`hub_relaxation.py`), then mini-buckets.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import MANY, Problem, objective
from autoshard.solvers.common.clock import attempt, check, watched
from autoshard.solvers.common.effort import (
    BUDGET_ENTRIES,
    CLOSE,
    FIRST,
    LOOSE,
    ROUGHLY,
    SHARE,
    SMALL_ENTRIES,
    SOME,
    SOON_ENTRIES,
)
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.result import Solution, finish
from autoshard.solvers.common.solver_options import Clock, Options, PartialClock
from autoshard.solvers.elimination.compress_blocks import shortened
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import Minimum, minimise, minimum_within
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax import hub_relaxation, hubs_apart, wide_choices
from autoshard.solvers.relax.limited_search import LimitedSearch, fitted
from autoshard.solvers.relax.memory_columns import condensed
from autoshard.solvers.relax.reader_shares import ReaderShares
from autoshard.solvers.relax.restricted_start import exact_work, solve_top_k, worthwhile
from autoshard.solvers.relax.wide_choices import WideChoices

FEW_CHOICES = 5_000  # of all nodes together: a proof to the last digit takes little


def solve(
    problem: Problem,
    *,
    budget_entries: int = BUDGET_ENTRIES,
    clock: Clock | None = None,
    rough: bool = False,
    unfit: set[int] | None = None,
) -> Solution:
    """The fastest plan within the memory capacity, with a lower bound; the best so far when the clock is over.

    `rough`: where that takes long, a good plan, and quickly. `unfit`: see Options. Raises InfeasibleError where no
    choice is allowed or none fits (the message says whether that is proven).
    """
    started, clock, state = time.perf_counter(), clock or Clock(), Incumbent(problem)
    with watched(clock):
        attempt(_search, state, budget_entries, clock, rough, set() if unfit is None else unfit)
    if state.choice is None:
        _something(state)
    assert state.choice is not None
    return finish(problem, state.choice, state.bound, "dp", started, cut=clock.cut)


def _search(state: Incumbent, budget: int, clock: Clock, rough: bool, unfit: set[int]) -> None:
    problem, limited = state.problem, math.isfinite(clock.limit_seconds)
    if limited:
        _known(state)
    if rough:
        _rough(state, budget, unfit)
        return
    wide = worthwhile(problem) and limited
    if wide:
        hub_relaxation.sketched(state)
    part = PartialClock(SHARE * clock.left, whole=clock)
    with watched(part):
        attempt(_exact, state, budget, part, exact_work(problem) if wide else 0.0, unfit)
    if wide and state.gap > CLOSE and not clock.over:
        hub_relaxation.bounded(state, clock)


def _known(state: Incumbent) -> None:
    from autoshard.solvers.ilp import warm_start

    warm_start.known(state)


def _something(state: Incumbent) -> None:
    from autoshard.solvers.ilp import warm_start

    warm_start.something(state)


def auto(problem: Problem, options: Options) -> Solution:
    """Solve exactly where that is cheap, or but for what is read all over (hubs_apart.py); else shares of readers first
    (reader_shares.py): plan and bound in tables as small as those of a chain; where even these are too large, messages
    and few choices (wide_choices.py). `solve` closes a gap that is left, where it is worth it or the problem small."""
    started, clock, state = time.perf_counter(), options.clock, Incumbent(problem)
    with watched(clock):
        attempt(_auto, state, options)
    if state.choice is None:
        _something(state)
    assert state.choice is not None
    return finish(problem, state.choice, state.bound, "auto", started, cut=clock.cut)


def _auto(state: Incumbent, options: Options) -> None:
    problem, budget = state.problem, options.budget_entries or BUDGET_ENTRIES
    if all(len(value.consumers) == 1 for value in problem.values):
        _search(state, budget, options.clock, options.rough, options.unfit)
        return
    if math.isfinite(options.clock.limit_seconds):
        _known(state)
    exact = _exact_soon(state, options)
    if exact and state.closed:
        return
    shares = options.cache.get("shares")
    if not isinstance(shares, ReaderShares) or structure(shares.problem) != structure(problem):
        shares = options.cache["shares"] = ReaderShares(problem)
    given_time = math.isfinite(options.clock.limit_seconds) and math.isinf(problem.capacity_bytes)
    loose = LOOSE if given_time else ROUGHLY
    settled = not exact and bool(attempt(_limited_soon, state, shares, options, loose))
    if not settled:
        wide = worthwhile(problem) and not options.rough
        free = math.isinf(problem.capacity_bytes)
        at_once = wide and free and bool(shares.cut)  # neither shares of hundreds of choices nor exact tables pay
        fits = exact or _hubs_apart(state, shares, options)
        if not (fits or at_once):
            fits = shares.search(state, *((FIRST, ROUGHLY) if options.rough else ()))
        check()
        if not fits and wide:
            attempt(wide_choices.search, state, shares, budget, loose, options.clock)
            settled = at_once and state.choice is not None and math.isinf(options.clock.limit_seconds)
        elif state.near is not None and state.gap > loose:  # what is best without the limit overflows
            attempt(LimitedSearch(state, shares, budget, exact).run)
    check()
    if state.choice is None and state.near is not None:
        fitted(state, Minimum(state.bound, state.near, True), budget)
    if options.rough and state.choice is not None:
        return
    few = sum(len(node.seconds) for node in problem.nodes) <= FEW_CHOICES
    if not state.closed and (few or (state.gap > loose and not settled)):
        _search(state, budget, options.clock, options.rough, options.unfit)


def _limited_soon(state: Incumbent, shares: ReaderShares, options: Options, loose: float) -> bool:
    """Search few choices if a plan near the one that is best without the memory limit overflows, as equal layers show
    quickly. Leaves what it finds; True if no price of bytes gives more."""
    if math.isinf(state.problem.capacity_bytes):
        return False
    near = solve_top_k(shares.apart(state.problem), SOON_ENTRIES)
    if near is None or shares.offered(state, near.choice) or state.near is None:
        return False
    among = WideChoices(state, condensed(state.problem), shares, options.budget_entries or BUDGET_ENTRIES, loose)
    return among.run(exact_rounds=0) if options.rough else among.run()


def _hubs_apart(state: Incumbent, shares: ReaderShares, options: Options) -> bool:
    """Solve with hubs apart if worth more than shares: few choices a node, and the best plan without a limit fits."""
    free = math.isinf(state.problem.capacity_bytes) or state.choice is not None
    if options.rough or not free or worthwhile(state.problem):
        return False
    return hubs_apart.search(state, shares) and state.near is None


def _exact_soon(state: Incumbent, options: Options) -> bool:
    """Leaves the optimum and returns True if exact tables are small; under a limit it may overflow. Where values that
    are read all over keep layers from being solved once, only for nodes of few choices."""
    problem, number = state.problem, structure(state.problem)
    hubs = any(len(value.consumers) > MANY for value in problem.values)
    if number in options.unfit or (hubs and not _narrow(problem, options)):
        return False
    contents = Contents(problem)
    repeats = not hubs and shortened(additive(problem), contents) is not None  # else shares may be sooner
    most = BUDGET_ENTRIES if repeats else SMALL_ENTRIES
    budget = min(options.budget_entries or BUDGET_ENTRIES, most)
    with watched(PartialClock(SHARE * options.clock.left, whole=options.clock)):
        minimum = attempt(minimum_within, problem, contents, budget_entries=budget)
    if minimum is None or not minimum.exact:
        options.unfit.add(number)
        return False
    state.raise_bound(minimum.bound)
    state.offer(minimum.choice)
    return True


def _narrow(problem: Problem, options: Options) -> bool:
    """True if small exact tables are worth a try in spite of hubs: in larger ones hubs take seconds to write down."""
    most = max(len(node.seconds) for node in problem.nodes)
    return most <= SOME and math.isinf(problem.capacity_bytes) and not options.rough


def _rough(state: Incumbent, budget: int, unfit: set[int]) -> None:
    """A good plan soon: exact where small tables do, else the best over the few choices that messages rank first."""
    few = min(budget, SOON_ENTRIES)
    if not worthwhile(state.problem) and structure(state.problem) not in unfit:
        minimum = minimum_within(state.problem, Contents(state.problem), budget_entries=few)
        if minimum is not None and minimum.exact:
            fitted(state, minimum, few)
            return
    hub_relaxation.sketched(state)


def structure(problem: Problem) -> int:
    """A hash, equal for problems that differ only in costs."""
    sizes = tuple(len(node.seconds) for node in problem.nodes)
    return hash((sizes, tuple((value.producer, value.consumers, value.seconds.shape) for value in problem.values)))


def _exact(state: Incumbent, budget: int, clock: Clock, work: float, unfit: set[int]) -> None:
    """`work`: joint entries that this is known to take."""
    check(work)
    problem, contents = state.problem, Contents(state.problem)
    try:
        minimum = minimum_within(problem, contents, budget_entries=budget)
        if minimum is None:
            unfit.add(structure(problem))
            minimum = _bounded(state, contents, budget, clock)
        fitted(state, minimum, budget)
    except InfeasibleError as error:
        state.failed(error)


def _bounded(state: Incumbent, contents: Contents, budget: int, clock: Clock) -> Minimum:
    """Plan and bound if no exact tables fit: by messages, and if these leave a gap by mini-buckets too."""
    problem = state.problem
    near = hub_relaxation.bounded(state, clock)
    if near is not None and (clock.over or objective(problem, near.choice) - near.bound <= LOOSE * abs(near.bound)):
        return near
    try:
        minimum = minimise(problem, contents, budget_entries=budget)
    except InfeasibleError:
        if near is None:
            raise
        return near
    if near is None:
        return minimum
    choice = min(near.choice, minimum.choice, key=lambda choice: objective(problem, choice))
    return replace(minimum, bound=max(near.bound, minimum.bound), choice=choice)
