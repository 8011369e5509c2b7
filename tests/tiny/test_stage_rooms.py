"""What a stage problem counts of a stage's memory, against the simulated step of the same plan, whose costs are random:
no plan that fits may be left out of a bound."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.errors import InfeasibleError
from autoshard.program.schedules.pipeline_schedule import interleaved, most_in_flight, receive_buffers
from autoshard.search.objectives import MEMORY, SPEED
from autoshard.simulation.step_timeline import PartCosts, StageCosts, StepCosts, simulate_step
from autoshard.solvers.stages.room_bound import RoomBound
from autoshard.solvers.stages.stage_partition import certificate, is_possible, solve_stages
from autoshard.solvers.stages.stage_problem import Front, StagePlan, StageProblem, bytes_of
from autoshard.solvers.stages.stage_values import stage_values
from autoshard.whole_step_search.best_first import Problem, best_steps
from autoshard.whole_step_search.blocks.block_costs import BlockCosts, HeldParameters
from autoshard.whole_step_search.blocks.block_line import block_line
from autoshard.whole_step_search.config_space import ParallelConfig, RejectedConfigs
from autoshard.whole_step_search.point_reassignment import reassigned_points
from autoshard.whole_step_search.solved_steps import JointResult, SolvedStep
from autoshard.whole_step_search.step_costs import StepProblem
from autoshard.whole_step_search.step_levels import OBJECTIVES
from autoshard.whole_step_search.step_local_search import StepLocalSearch
from tests.graphs import mlp_graph
from tests.slow import quick, quick_at, slow
from tests.stage_brute_force import every_plan

FREE = 1e15  # bytes
KEEPS = ("all", "expensive", "input")
A100, V100 = load_hardware("a100-80g-sxm"), load_hardware("v100-32g-sxm2")
LINE = block_line(mlp_graph())


def found_of(level: int, problems: list[Problem]) -> JointResult:
    return best_steps(OBJECTIVES[level], problems, LINE, RejectedConfigs(), 1)


def held(draw: random.Random) -> HeldParameters:
    return HeldParameters(*(draw.choice([0.0, draw.random() * 2e9]) for _ in range(3)))


def block(draw: random.Random, entering: float) -> BlockCosts:
    forward, backward = draw.random() + 0.1, draw.random() + 0.2
    lean = entering * draw.choice([1.0, 1.0, 0.5, 2.0])
    middle = lean + draw.random() * 2e9
    saved = (middle + draw.random() * 2e9, middle, lean)
    recompute = (0.0, draw.random() * forward, forward)
    working = [draw.random() * 5e8 for _ in KEEPS]
    each = (tuple(zip(KEEPS, values, strict=True)) for values in (recompute, saved, working))
    received = entering * draw.choice([1.0, 1.0, 1.5])
    shared = held(draw) if draw.random() < 0.2 else HeldParameters()
    return BlockCosts(forward, backward, *each, received, received, held(draw), shared)


def problem(
    draw: random.Random, chunks: int, replicas: int = 1, kinds: bool = False, following: float = 1.0
) -> StepProblem:
    """`kinds`: of devices, several where there is one chunk. `following`: the share of what a block reads that the one
    before makes."""
    stages = draw.choice([2, 3]) if chunks > 1 else draw.choice([1, 2, 3, 4])
    run = stages * chunks * draw.choice([1, 1 + (stages * chunks < 6)]) if chunks > 1 else draw.randint(stages, 5)
    count = stages * draw.randint(1, 4) if chunks > 1 else stages + draw.randint(0, 8)
    schedule = "interleaved" if chunks > 1 else draw.choice(["1f1b", "1f1b", "gpipe"])
    line = (0,) * draw.randint(0, 1) + (1,) * run + (2,) * draw.randint(0, 1) + (1,) * (draw.random() < 0.1)
    entering = draw.random() * 1e9
    blocks = block(draw, entering), block(draw, entering), block(draw, entering)
    costs = tuple(replace(cost, following_bytes=cost.received_bytes * following) for cost in blocks)
    keeps = (draw.choice([KEEPS, ("all",)]), KEEPS, draw.choice([KEEPS, ("all",)]))
    choice = ParallelConfig(stages, chunks, schedule, replicas, 1, 1, count, 0)
    base = StepProblem(choice, line, costs, keeps, A100, FREE)
    if chunks > 1 or not kinds:
        return base
    sizes = [{"received_bytes": each.received_bytes, "following_bytes": each.following_bytes} for each in costs]
    costs = tuple(replace(block(draw, entering), **each) for each in sizes)
    every = base, replace(base, costs=costs, hardware=V100, capacity_bytes=FREE / 2, cluster=A100)
    return replace(base, by_stage=tuple(draw.choice(every) for _ in range(stages)))


def with_room(problem: StepProblem, room: float) -> StepProblem:
    """Each kind of device with the same share of what it has."""
    share = room / problem.capacity_bytes
    resized = {id(each): replace(each, capacity_bytes=each.capacity_bytes * share) for each in problem.by_stage}
    return replace(problem, capacity_bytes=room, by_stage=tuple(resized[id(each)] for each in problem.by_stage))


def some_plans(draw: random.Random, problem: StepProblem) -> list[StagePlan]:
    every = list(itertools.islice(every_plan(problem.stage_problem), 20_000))
    return draw.sample(every, min(len(every), 25))


@pytest.mark.parametrize("replicas", [1, slow(16)])
@pytest.mark.parametrize("chunks", [1, slow(2), 3])
@pytest.mark.parametrize("kinds", [False, True])
@pytest.mark.parametrize("seed", quick(range(12), range(1)))
def test_no_plan_holds_less_than_its_bound_knows_nor_takes_less(
    seed: int, kinds: bool, chunks: int, replicas: int
) -> None:
    """Blocks that keep most may all stand in the chunk of which fewest micro-batches are in flight. Of several replicas
    the gradients are summed between nodes after the last backward."""
    draw = random.Random(f"{seed} {chunks}")
    free = problem(draw, chunks, replicas, kinds, 1.0 if seed % 2 else 0.5)
    runs = []
    for plan in some_plans(draw, free):
        step, bounding = simulate_step(free.step_costs(plan)), free.bounding
        held_bytes = bytes_of(bounding, plan.parts, plan.points) + (free.capacities - bounding.capacity_bytes)
        assert (held_bytes <= np.array(step.peak_bytes) * (1 + 1e-9) + 1).all()
        runs.append((free.fullest_bytes(step.peak_bytes), step.step_seconds))
    for peak, _ in sorted(runs)[:: max(1, len(runs) // 4)]:
        fastest = min(seconds for held, seconds in runs if held <= peak)
        tight = with_room(free, peak * (1 + 1e-9)).bounding
        assert certificate(tight, 1.5 * fastest) <= fastest * (1 + 1e-9)
        assert RoomBound(tight).step_seconds <= fastest * (1 + 1e-9)


@pytest.mark.parametrize(("schedule", "count"), [("1f1b", 2), ("1f1b", 9), ("gpipe", 5)])
def test_of_equal_inputs_the_room_of_one_chunk_is_what_the_step_holds(schedule: str, count: int) -> None:
    """Not a buffer too few: what a search thinks fits, fits as it is simulated."""
    draw = random.Random(count)
    stages = min(count, 3)
    saved, nothing = (("all", 3e9), ("expensive", 2e9), ("input", 1e9)), tuple((keep, 0.0) for keep in KEEPS)
    one = replace(block(draw, 1e9), received_bytes=1e9, following_bytes=1e9, saved_bytes=saved, working_bytes=nothing)
    choice = ParallelConfig(stages, 1, schedule, 1, 1, 1, count, 0)
    free = StepProblem(choice, (0,) * 4, (one,), (KEEPS,), A100, FREE)
    for plan in some_plans(draw, free):
        peaks = simulate_step(free.step_costs(plan)).peak_bytes
        counted = bytes_of(free.stage_problem, plan.parts, plan.points) + (FREE - free.stage_problem.capacity_bytes)
        assert peaks == pytest.approx(counted)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
@pytest.mark.parametrize(("stages", "chunks", "rounds"), [(2, 2, 3), (3, 2, 1), (4, 3, 4), (1, 1, 3)])
def test_what_torch_holds_of_sends_is_counted_as_the_step_has_it(
    schedule: str, stages: int, chunks: int, rounds: int
) -> None:
    """Of every backward before the last forward: the output, and the gradient of an input whose buffer is not used
    again."""
    chunks = chunks if schedule == "interleaved" else 1
    parts = tuple(PartCosts(1.0, 1.0, received_bytes=1.0) for _ in range(stages * chunks))
    costs = StepCosts(schedule, rounds * stages, parts, (StageCosts(),) * stages)
    for stage, values in enumerate(stage_values(schedule, stages, rounds * stages, chunks)):
        order = costs.order(stage)
        last = max(place for place, slot in enumerate(order) if slot.kind == "F")
        assert values.sent == sum(costs.sent_bytes(stage, slot) for slot in order[:last])


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (3, 2), (4, 3)])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_an_input_has_its_buffer_as_long_as_its_micro_batch_is_in_flight(stages: int, chunks: int, rounds: int) -> None:
    count = receive_buffers("interleaved", stages, rounds * stages, chunks)
    for part in range(1, stages * chunks):
        order = interleaved(part % stages, stages, rounds * stages, chunks)
        assert count[part].inputs >= most_in_flight(order, part // stages)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("count", [1, 3])
def test_of_one_stage_the_fastest_and_the_leanest_that_fit_are_found(seed: int, count: int) -> None:
    """Of every plan, as it is simulated: its fullest moment, and with one micro-batch no gradients before it."""
    draw = random.Random(f"one {seed} {count}")
    line = (0, *(1,) * draw.randint(1, 5), 2)
    costs = tuple(block(draw, 1e9) for _ in range(3))
    choice = ParallelConfig(1, 1, "1f1b", 1, 1, 1, count, 0)
    free = StepProblem(choice, line, costs, (KEEPS, KEEPS, ("all",)), A100, FREE)
    steps = [simulate_step(free.step_costs(plan)) for plan in every_plan(free.stage_problem)]
    runs = sorted((step.peak_bytes[0], step.step_seconds) for step in steps)
    for peak, _ in runs[:: max(1, len(runs) // 4)]:
        tight = [(replace(free, capacity_bytes=peak * (1 + 1e-9)), None)]
        result = found_of(SPEED, tight)
        fastest = min(seconds for held, seconds in runs if held <= peak)
        assert result.best.peak_bytes <= peak * (1 + 1e-9)
        assert result.bound <= fastest * (1 + 1e-9)
        assert result.best.seconds <= fastest * 1.001
        leanest = found_of(MEMORY, tight)
        assert leanest.bound <= runs[0][0] * (1 + 1e-9) and leanest.best.peak_bytes <= runs[0][0] * (1 + 1e-6)


def test_that_none_fits_is_said_of_what_is_proven_alone() -> None:
    """Two stages of one block each: even shares fit, and the larger block does not."""
    draw = random.Random(0)
    small, large = (replace(block(draw, 0.0), held=HeldParameters(weights_bytes=size)) for size in (1e9, 9e9))
    line = StepProblem(ParallelConfig(2, 1, "1f1b", 1, 1, 1, 2, 0), (0, 1), (small, large), (KEEPS, KEEPS), A100, FREE)
    for room, said in (
        (8.99e9, "was found to fit, which is not proven: even"),
        (1e9, "fits by the costs of blocks: even"),
    ):
        for level in (SPEED, MEMORY):
            with pytest.raises(InfeasibleError, match=f"^none of 1 ways to train {said}"):
                found_of(level, [(replace(line, capacity_bytes=room), None)])


@pytest.mark.parametrize("chunks", [1, 2, slow(3)])
@pytest.mark.parametrize("seed", quick(range(4), (1,)))
def test_points_dealt_anew_fit_and_are_about_the_fastest_of_their_cuts(seed: int, chunks: int) -> None:
    """Of every plan with the same cuts that fits as it is simulated."""
    draw = random.Random(f"dealt {seed} {chunks}")
    stages = draw.choice([2, 3])
    line = (0, *(1,) * stages * chunks, 2)
    costs = tuple(replace(block(draw, 5e8), received_bytes=5e8, following_bytes=5e8) for _ in range(3))
    schedule = "interleaved" if chunks > 1 else "1f1b"
    choice = ParallelConfig(stages, chunks, schedule, 1, 1, 1, 2 * stages, 0)
    free = StepProblem(choice, line, costs, (("all",), KEEPS, ("all",)), A100, FREE)
    every = [plan for plan in every_plan(free.stage_problem) if all(1 in line[p.first : p.stop] for p in plan.parts)]
    runs = sorted((max(simulate_step(free.step_costs(plan)).peak_bytes), plan.seconds, plan.parts) for plan in every)
    for peak, _, parts in runs[:: max(1, len(runs) // 6)]:
        tight = replace(free, capacity_bytes=peak * (1 + 1e-9))
        start = next(plan for plan in every if plan.parts == parts)
        reassigned = reassigned_points(tight, start)
        assert reassigned is not None
        assert max(simulate_step(free.step_costs(reassigned)).peak_bytes) <= tight.capacity_bytes
        fastest = min(seconds for held, seconds, other in runs if held <= peak and other == parts)
        assert fastest * (1 - 1e-9) <= reassigned.seconds <= fastest * (1.03 if chunks > 1 else 1 + 1e-9)


@pytest.mark.parametrize("seed", quick_at([3, 5, 6], 1))
def test_a_plan_that_alone_fits_as_it_is_simulated_is_found(seed: int) -> None:
    """A stage problem, which counts two chunks alike and work beside all that is kept, has no room for it."""
    free = problem(random.Random(f"tight {seed}"), 2)
    steps = (simulate_step(free.step_costs(plan)) for plan in every_plan(free.stage_problem))
    runs = [(max(step.peak_bytes), step.step_seconds) for step in steps]
    room = min(runs)[0] * (1 + 1e-9)
    tight = replace(free, capacity_bytes=room)
    assert (solve_stages(tight.stage_problem) is None) == (seed == 3)
    result = found_of(SPEED, [(tight, None)])
    assert result.best.peak_bytes <= room
    assert result.best.seconds == pytest.approx(min(seconds for peak, seconds in runs if peak <= room))


def fastest_of_a_share(seed: int, chunks: int, share: float) -> tuple[float, JointResult]:
    """The fastest step that fits between what the leanest plan holds and what the fastest does, and what is found."""
    free = problem(random.Random(f"tight {seed}"), chunks)
    steps = (simulate_step(free.step_costs(plan)) for plan in every_plan(free.stage_problem))
    runs = [(max(step.peak_bytes), step.step_seconds) for step in steps]
    least, enough = min(runs)[0], min(runs, key=lambda run: run[1])[0]
    room = (least + share * (enough - least)) * (1 + 1e-9)
    result = found_of(SPEED, [(replace(free, capacity_bytes=room), None)])
    assert result.best.peak_bytes <= room
    return min(seconds for peak, seconds in runs if peak <= room), result


@pytest.mark.parametrize(("seed", "chunks", "share"), quick_at([(18, 1, 0.6), (1, 2, 0.6), (20, 3, 0.6)], 2))
def test_a_plan_that_fits_after_all_ends_no_search_for_a_faster_one(seed: int, chunks: int, share: float) -> None:
    """Points dealt anew may fit, slower, where stages cut with less room hold faster ones."""
    fastest, result = fastest_of_a_share(seed, chunks, share)
    assert result.best.seconds <= fastest * (1 + 1e-9)


@pytest.mark.parametrize(("seed", "chunks", "share"), quick_at([(6, 1, 0.25), (14, 2, 0.25), (9, 2, 0.5)], 1))
def test_a_plan_that_its_closed_form_has_for_a_slower_one_is_found(seed: int, chunks: int, share: float) -> None:
    """The form is exact for equal stages alone; other cuts, or points in other chunks, were up to a tenth faster."""
    fastest, result = fastest_of_a_share(seed, chunks, share)
    assert result.best.seconds <= fastest * (1 + 1e-9)


@pytest.mark.parametrize("seed", [0, 11, 37])
def test_blocks_go_to_other_stages_where_that_makes_the_simulated_step_faster(seed: int) -> None:
    """Few blocks on a stage, a first and a last one that take other times: of every cut that fits."""
    draw = random.Random(f"cuts {seed}")
    costs = tuple(block(draw, 1e8) for _ in range(3))
    choice = ParallelConfig(3, 1, "1f1b", 1, 1, 1, 4, 0)
    free = StepProblem(choice, (0, 1, 1, 1, 1, 2), costs, (("all",),) * 3, A100, FREE)
    result = found_of(SPEED, [(free, None)])
    every = [simulate_step(free.step_costs(plan)).step_seconds for plan in every_plan(free.stage_problem)]
    assert result.best.seconds <= min(every) * (1 + 1e-9)


def test_near_a_plan_of_one_stage_are_faster_ones() -> None:
    """What it takes may hang on which blocks stand at its ends, which costs of single blocks do not say (ZeRO 3)."""
    draw = random.Random("one stage")
    choice = ParallelConfig(1, 1, "1f1b", 1, 1, 1, 3, 0)
    free = StepProblem(choice, (0, 1, 1, 2), tuple(block(draw, 1e8) for _ in range(3)), (KEEPS,) * 3, A100, FREE)
    every = [(simulate_step(free.step_costs(plan)), plan) for plan in every_plan(free.stage_problem)]
    slowest, plan = max(every, key=lambda pair: pair[0].step_seconds)
    improved = StepLocalSearch().best(SolvedStep(free, None, plan, slowest))
    assert improved.seconds == pytest.approx(min(step.step_seconds for step, _ in every))


@pytest.mark.parametrize(("seed", "chunks"), quick_at([(2, 1), (20, 1), (3, 2), (14, 3)], 0, 1))
def test_the_least_memory_is_found_where_only_the_simulated_step_has_room(seed: int, chunks: int) -> None:
    """By the stage problem none fits; it was said that none was found, of a plan that level 2 finds."""
    free = problem(random.Random(f"tight {seed}"), chunks)
    peaks = (max(simulate_step(free.step_costs(plan)).peak_bytes) for plan in every_plan(free.stage_problem))
    room = min(peaks) * (1 + 1e-9)
    result = found_of(MEMORY, [(replace(free, capacity_bytes=room), None)])
    assert result.bound <= result.best.peak_bytes <= room


def test_only_the_last_stage_may_hold_the_last_block() -> None:
    """What early stages could hold as well is left to the others: it was said that nothing fits."""
    small, large = (
        Front(np.ones(1), np.ones(1), np.full(1, size), np.zeros(1), np.zeros(1), np.zeros(1)) for size in (0.1, 4.0)
    )
    problem = StageProblem((small, large), (0, 0, 0, 0, 1), 3, 6, np.array([3.0, 2.0, 1.0]), np.full(3, 5.0))
    assert is_possible(problem)
    best = solve_stages(problem)
    assert best is not None and best.seconds == min(plan.seconds for plan in every_plan(problem))
    assert not is_possible(replace(problem, capacity_bytes=np.full(3, 3.0)))
