"""Buckets of dynamic sizes: the best chain against all there are, emission, proofs, planted faults, bad inputs."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoshard import plan as plan_of
from autoshard.api.package_verbs import at_sizes
from autoshard.api.planned import CapturedModel, PlannedModel
from autoshard.api.verbs import capture as captured_model
from autoshard.api.verbs import load_plan, planned, write
from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.size_histogram import SizePoint, read_histogram
from autoshard.emit import emit
from autoshard.errors import InvalidFileError, UsageError
from autoshard.graph_capture.capture import capture
from autoshard.ir import plan_json
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan, SizeBucket
from autoshard.program.lower import lower
from autoshard.replay.command_line import command
from autoshard.replay.size_buckets import _chains, _Options, within
from autoshard.replay.sized_plans import Sized, SizedRequest
from autoshard.search.search_request import SearchRequest
from autoshard.text.plan_diff import diff, text
from autoshard.verification.case import check_files, make_case
from autoshard.verification.sizing.dynamic_steps import step_sizes
from tests.dynamic_models import spec
from tests.slow import quick_at

SIZES = "batch=4:50;batch=64:5;batch=65536:1"
WANTED = SearchRequest(mesh=Mesh.parse("dp=4"), sizes=read_histogram(SIZES), buckets=3)


@cache
def captured() -> CapturedModel:
    return captured_model(spec("wide"), dynamic="batch=4..65536/4")


@cache
def made(**settings: Any) -> PlannedModel:
    """Of a model whose gradients are long in coming over PCIe: with few samples every device computes all."""
    return planned(captured(), load_hardware("rtx-4090-24g"), replace(WANTED, **settings))


@cache
def files(micro_batches: int = 1) -> Mapping[str, str]:
    built = made()
    plan = replace(built.plan, step=replace(built.plan.step, micro_batches=micro_batches))
    return emit(lower(plan, built.graph), plan, built.graph)


def proof(texts: Mapping[str, str], micro_batches: int = 1) -> Any:
    built = made()
    plan = replace(built.plan, step=replace(built.plan.step, micro_batches=micro_batches))
    sizes = step_sizes(built.graph, plan.buckets)
    case = make_case(plan.model, {}, built.graph, micro_batches=micro_batches, sizes=sizes)
    return check_files(case, lower(plan, built.graph), texts)


# --- search ---


@pytest.mark.slow
def test_small_steps_have_strategies_of_their_own() -> None:
    plan = made().plan
    assert [dict(bucket.most) for bucket in plan.buckets] == [{"batch": 64}]
    small, large = plan.at_sizes({"batch": 64}), plan.at_sizes({"batch": 68})
    assert small.ops != large.ops == plan.ops
    alone = made(buckets=1).plan
    assert plan.search.expected_seconds < 0.9 * alone.search.expected_seconds
    said = next(note for note in plan.search.notes if note.startswith("buckets with their own strategies: "))
    assert re.search(r": batch up to 64 \(\d of 6 operators\); expected step", said)
    assert "2 buckets of sizes" in text(diff(plan, made().graph, alone, made().graph))
    assert "--buckets 2" in command(plan, made().graph)


@pytest.mark.slow
def test_steps_at_sizes_are_those_of_their_bucket() -> None:
    plan = made()
    for row in plan.plan.search.sizes:
        text = ",".join(f"{name}={size}" for name, size in row.sizes)
        assert at_sizes(plan, text).plan.step_seconds == pytest.approx(row.seconds)


@pytest.mark.slow
def test_buckets_that_bring_nothing_are_said() -> None:
    plan = made(sizes=read_histogram("batch=4:1")).plan
    assert not plan.buckets
    assert any(note.startswith("no buckets: none make the expected step 1% shorter") for note in plan.search.notes)


class _Step:
    """Stands for a plan."""

    def __init__(self, number: int) -> None:
        self.ops, self.redistributions, self.step_peak_bytes, self.step_seconds = (number,), (), 1.0, 1.0
        self.buckets: tuple[Any, ...] = ()


def test_the_best_chain_is_that_of_all_assignments() -> None:
    """Brute force: every assignment of sizes to plans that some chain of boxes gives."""
    draw = random.Random(3)
    for _ in range(60):
        count, most = draw.randint(2, 5), draw.randint(2, 4)
        corners = draw.sample([(a, b) for a in range(1, 4) for b in range(1, 4)], count)
        points = [SizePoint((("a", a), ("b", b)), draw.random()) for a, b in corners]
        seconds = [tuple(draw.random() for _ in points) for _ in range(3)]
        plans = [Sized(str(n), cast(Plan, _Step(n)), times) for n, times in enumerate(seconds)]
        options = object.__new__(_Options)
        options.wanted = cast(SizedRequest, SimpleNamespace(points=points))
        options.plans = options.largest = plans
        options._peaks = {(n, point.sizes): 1.0 for n in range(3) for point in points}
        costs = []
        for chain in _chains([point.sizes for point in points], most):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("autoshard.replay.size_buckets.replace", lambda plan, **_: plan)
                taken = options.taken(chain)
            if taken is not None:
                costs.append(sum(p.weight * value for p, value in zip(points, taken.seconds, strict=True)))
        best = _brute_force(points, seconds, most)
        assert min(costs, default=None) == (None if best is None else pytest.approx(best))


def _brute_force(points: list[SizePoint], seconds: list[tuple[float, ...]], most: int) -> float | None:
    totals = []
    for limited in range(1, most):  # buckets; steps of none of them are at the level above
        for level in itertools.product(range(limited + 1), repeat=len(points)):
            if not {*range(limited)} <= {*level}:
                continue
            limits = []
            for bucket in range(limited):
                corners = [p.sizes for p, at in zip(points, level, strict=True) if at <= bucket]
                limits.append([c for c in corners if all(within(dict(other), c) for other in corners)])
            chosen = all(limits) and all(
                within(dict(p.sizes), limits[bucket][0]) == (at <= bucket)
                for bucket in range(limited)
                for p, at in zip(points, level, strict=True)
            )
            if chosen:
                groups = [[n for n, at in enumerate(level) if at == bucket] for bucket in range(limited + 1)]
                costs = [[sum(points[n].weight * times[n] for n in group) for times in seconds] for group in groups]
                totals.append(sum(map(min, costs)))
    return min(totals, default=None)


# --- packages ---


@pytest.mark.parametrize("micro_batches", quick_at([1, 2], 0))
def test_a_package_with_buckets_is_proved_in_each(micro_batches: int) -> None:
    texts = files(micro_batches)
    assert "all_reduce" not in texts["smaller_0.py"]
    result = proof(texts, micro_batches)
    assert result.passed, result.failure


def test_each_bucket_has_a_step_that_is_verified() -> None:
    """The second is longer and not wider: a wider step would be none of it."""
    graph = capture(spec("words"), {}, dynamic=("batch=4..32/4,sequence=8..64/8",))
    boxes = ((8, 8), (8, 32), (16, 32))
    buckets = [SizeBucket((("batch", rows), ("sequence", length)), (), ()) for rows, length in boxes]
    used = {
        next((number for number, bucket in enumerate(buckets) if bucket.holds(sizes)), -1)
        for sizes in step_sizes(graph, buckets)
    }
    assert used == {-1, 0, 1, 2}


def test_a_file_of_a_bucket_says_no_figure_of_another_step() -> None:
    small, large = files()["smaller_0.py"], files()["model_parallel.py"]
    assert "Predicted for" in large and "Predicted for" not in small
    assert "Steps of batch up to 64 run this forward" in small
    assert "--buckets 2" in small and "--buckets 2" in large


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    quick_at([
        ("smaller_0.py", "F.relu(", "F.gelu("),
        ("model_parallel.py", "    ({\"batch\": 64}, smaller_0),", "    ({\"batch\": 65536}, smaller_0),"),
        ("train.py", "source.GRADIENT_BUCKETS", "[]"),
    ], 2),
)  # fmt: skip
def test_planted_faults_are_found(name: str, right: str, wrong: str) -> None:
    """The second is none: a bucket's forward is right at every size."""
    texts = dict(files())
    assert right in texts[name]
    texts[name] = texts[name].replace(right, wrong)
    assert proof(texts).passed == (name == "model_parallel.py")


def test_the_parameters_of_a_bucket_are_the_models_own(tmp_path: Path) -> None:
    """Nothing is held twice, and a state dict has each once."""
    from autoshard.verification.ranks.loaded_package import load_package
    from autoshard.verification.ranks.lockstep import run_lockstep

    write(made(), tmp_path / "out")
    package = load_package(tmp_path / "out")

    def names(mesh: Any) -> tuple[list[str], bool]:
        model = package.model.build_model(mesh)
        (small,) = model.smaller
        pairs = zip(model.parameters(), small.parameters(), strict=True)
        return list(model.state_dict()), all(one is other for one, other in pairs)

    for state_names, same in run_lockstep({"dp": 4}, names, 60.0, package.runtime.ParallelMesh):
        assert same and len(state_names) == len({*state_names}) == len(made().graph.parameters)


# --- files ---


def test_plans_with_buckets_are_read_back(tmp_path: Path) -> None:
    plan, graph = made().plan, made().graph
    assert plan_json.loads(plan_json.dumps(plan)) == plan
    assert plan_json.plan_hash(plan, graph) != plan_json.plan_hash(replace(plan, buckets=()), graph)
    write(made(), tmp_path / "out")
    assert load_plan(tmp_path / "out").plan == plan
    broken = replace(plan.buckets[0], ops=plan.buckets[0].ops[:-1])
    (tmp_path / "out" / "plan.json").write_text(plan_json.dumps(replace(plan, buckets=(broken,))))
    with pytest.raises(InvalidFileError, match="lacks the operator"):
        load_plan(tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sizes": ()}, "--buckets 3 without --sizes"),
        ({"level": 1}, "--buckets 3 with --level 1"),
        ({"strategy": "dp"}, "--buckets 3 with --strategy dp"),
        ({"step": replace(WANTED.step, stages=2, micro_batches=2)}, "--buckets 3 with stages"),
        ({"buckets": 0}, "--buckets 0: expected a whole number from 1 to 8"),
        ({"buckets": 2.5}, "--buckets 2.5: expected"),
        ({"buckets": "3"}, "--buckets 3: expected"),
    ],
)
def test_where_there_can_be_no_buckets(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(WANTED, **settings).check_buckets()


def test_a_program_is_refused_as_the_command_is() -> None:
    with pytest.raises(UsageError, match="--buckets 3 without --sizes"):
        plan_of(captured(), mesh="dp=4", hardware="rtx-4090-24g", buckets=3)
