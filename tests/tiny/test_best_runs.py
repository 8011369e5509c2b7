"""`autoshard estimate --search`: the best of a space, against every configuration of a small one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from autoshard.cli.commands import main
from autoshard.cluster.hardware import load_hardware
from autoshard.errors import InfeasibleError, UsageError
from autoshard.estimate.best_runs import _MicroBatches, best_first, best_runs
from autoshard.estimate.packages.package_runs import best_runs_any
from autoshard.estimate.run_space import RunSpace, divisors, runs
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import estimate, host_of
from autoshard.estimate.step_bound import fullest, least_alone, least_seconds, program_of
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_program import build
from tests.slow import quick_at

A100 = load_hardware("a100-80g-sxm")
MODEL = Transformer(8, 1024, 8, 512, 8000)
SPACE = RunSpace(MODEL, TrainingRun(16, 1), 8, {})
SMALL_MEMORY = replace(A100, memory_bytes=0.8e9, text=A100.text + "# less memory")


def everything(space: RunSpace, hardware: Any) -> list[Any]:
    """The oracle: each one simulated."""
    return [estimate(space.model, run, hardware) for run in runs(space, hardware)]


@pytest.fixture(scope="module")
def oracle() -> list[Any]:
    return everything(replace(SPACE, fixed={"tp": 2}), SMALL_MEMORY)


def test_the_best_of_a_small_space_are_the_best_of_all(oracle: list[Any]) -> None:
    result = best_runs(replace(SPACE, fixed={"tp": 2}), SMALL_MEMORY, 5)
    fitting = sorted(m.step_seconds for m in oracle if m.memory.peak <= SMALL_MEMORY.usable_memory_bytes)
    assert (result.possible, result.fitting) == (len(oracle), len(fitting)) and 0 < len(fitting) < len(oracle)
    assert [step.step_seconds for step in result.best] == pytest.approx(fitting[:5])
    assert result.simulated < result.fitting
    tail = sorted(fitting)[result.simulated :]
    assert result.others_seconds <= tail[0] * (1 + 1e-9) or result.others_seconds >= fitting[4]


def test_no_bound_is_above_what_is_simulated_and_memory_is_the_same(oracle: list[Any]) -> None:
    ratios = []
    for step in oracle:
        built = program_of(MODEL, step.run, SMALL_MEMORY)
        bound = least_seconds(MODEL, step.run, built, SMALL_MEMORY, host_of(SMALL_MEMORY))
        assert bound <= step.step_seconds * (1 + 1e-9), step.run
        assert least_alone(MODEL, step.run, built, SMALL_MEMORY, host_of(SMALL_MEMORY)) <= bound * (1 + 1e-9), step.run
        ratios.append(bound / step.step_seconds)
        assert fullest(MODEL, step.run, built).peak == pytest.approx(step.memory.peak), step.run
    assert sum(ratios) / len(ratios) > 0.9  # a bound that is far below sorts nothing


@pytest.mark.parametrize(
    ("dp", "tp", "experts", "precision"), quick_at([(8, 3, 0, "fp32"), (8, 3, 12, "bf16"), (2, 3, 12, "bf16-mixed")], 2)
)
def test_a_device_stores_what_it_computes_with_on_any_links(dp: int, tp: int, experts: int, precision: str) -> None:
    """Three devices of nodes of eight: storing a weight whole, or cut along another dim, may move its gradient over
    quicker links. The program of one replica, and Megatron-LM, know nothing of that."""
    model = Transformer(4, 720, 12, 360, 1440, positions="rotary", tied=False, experts=experts)
    run = TrainingRun(2 * dp, 2, dp, tp, precision=precision)
    nodes = load_hardware("mi300x-192g")
    full, alone = build(model, run, nodes), program_of(model, run, nodes)
    assert [str(p.layout) for p in full.program.parameters] == [str(p.layout) for p in alone.program.parameters]
    assert fullest(model, run, alone).peak == pytest.approx(estimate(model, run, nodes).memory.peak)


def test_a_bound_is_made_exact_only_where_its_first_one_does_not_say_enough() -> None:
    first, exact = {2: 1.0, 4: 2.0, 8: 3.0, 16: 9.0}, {2: 5.0, 4: 2.5, 8: 3.0, 16: 9.5}
    runs_of = {size: TrainingRun(16, size) for size in first}
    bounded: list[int] = []

    def bound(run: TrainingRun) -> float:
        bounded.append(run.micro_batch)
        return exact[run.micro_batch]

    order = best_first([(first[size], size, runs_of[size]) for size in first], bound)
    assert [(next(order)[1].micro_batch, sorted(bounded)) for _ in range(3)] == [
        (4, [2, 4]),
        (8, [2, 4, 8]),
        (2, [2, 4, 8]),
    ]
    assert [(b, run.micro_batch) for b, run in order] == [(9.5, 16)]


def test_layers_that_stages_do_not_divide() -> None:
    """Bound and memory of every configuration of seven layers: some have stages of unequal size."""
    model, uneven = replace(MODEL, layers=7), 0
    for run in runs(RunSpace(model, TrainingRun(16, 2), 8, {"tp": 1, "zero": 1, "micro_batch": 2}), SMALL_MEMORY):
        built, step = program_of(model, run, SMALL_MEMORY), estimate(model, run, SMALL_MEMORY)
        bound = least_seconds(model, run, built, SMALL_MEMORY, host_of(SMALL_MEMORY))
        assert bound <= step.step_seconds * (1 + 1e-9), run
        assert fullest(model, run, built).peak == pytest.approx(step.memory.peak), run
        uneven += run.pp in (2, 4)
    assert uneven >= 6


def test_the_space_by_hand() -> None:
    """Two devices without tensor parallelism: two replicas, or two stages of four layers in 1, 2 or 4 chunks."""
    space = RunSpace(MODEL, TrainingRun(4, 1), 2, {"tp": 1, "recompute": "none", "zero": 0})
    degrees = {(run.dp, run.pp, run.interleave, run.micro_batch) for run in runs(space, A100)}
    replicas = {(2, 1, 1, size) for size in (1, 2)}
    stages = {(1, 2, 1, size) for size in (1, 2, 4)}
    chunks = {(1, 2, chunks, size) for chunks in (2, 4) for size in (1, 2)}  # micro-batches in multiples of two
    assert degrees == replicas | stages | chunks
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_nothing_is_left_out_of_the_space() -> None:
    """What every degree may be on two devices; one replica shards nothing, FSDP always does."""
    listed = list(runs(RunSpace(MODEL, TrainingRun(4, 1), 2, {}), A100))
    assert len(listed) == len(set(listed))
    assert {(r.tp, r.pp, r.dp) for r in listed} == {(1, 1, 2), (1, 2, 1), (2, 1, 1)}
    assert {r.zero for r in listed if r.dp == 2} == {0, 1, 2, 3} and {r.zero for r in listed if r.dp == 1} == {0}
    assert {r.recompute for r in listed} == {"none", "selective", "full"}
    assert {(r.tp, r.sequence_parallel) for r in listed} == {(1, False), (2, False), (2, True)}
    sharded = RunSpace(MODEL, TrainingRun(4, 1, precision="bf16-fsdp"), 2, {"tp": 1, "pp": 1})
    assert {r.zero for r in runs(sharded, A100)} == {2, 3}


def test_what_is_fixed_stays() -> None:
    fixed = {"tp": 4, "sequence_parallel": True, "zero": 1, "micro_batch": 2, "recompute": "full"}
    listed = list(runs(replace(SPACE, fixed=fixed), A100))
    assert listed and all(getattr(run, name) == value for run in listed for name, value in fixed.items())
    with pytest.raises(UsageError, match="can't fix shard"):
        list(runs(replace(SPACE, fixed={"shard": 2}), A100))


def test_where_nothing_fits_it_says_by_how_much() -> None:
    tiny = replace(A100, memory_bytes=1e7, text=A100.text + "# hardly any")
    with pytest.raises(InfeasibleError, match=r"none of \d+ configurations fits 8 devices .* least memory needs"):
        best_runs(replace(SPACE, fixed={"tp": 2, "recompute": "full"}), tiny, 3)
    with pytest.raises(InfeasibleError, match="nothing divides"):
        best_runs(RunSpace(MODEL, TrainingRun(7, 1), 2, {"tp": 1, "pp": 1}), A100, 3)


@pytest.mark.parametrize(
    ("run", "devices", "fixed", "told"),
    [
        (TrainingRun(16, 1, software="autoshard"), 8, {}, "packages compute in precision fp32 or .*, got bf16"),
        (TrainingRun(16, 1, software="autoshard", precision="fp32"), 8, {"tp": 3}, "tp 3 does not divide 8 devices"),
        (TrainingRun(16, 1, precision="bf16-fsdp"), 8, {"zero": 1, "dp": 8}, "it needs zero 2 or 3, got 1"),
        (TrainingRun(16, 1), 8, {"tp": 2, "pp": 1, "dp": 2}, "tp 2 x pp 1 x dp 2 makes 4 devices, not 8"),
        (TrainingRun(16, 1, cp=3), 8, {}, "cp 3 does not divide 8 devices"),
    ],
)
def test_what_suits_no_configuration_is_named(
    run: TrainingRun, devices: int, fixed: dict[str, object], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        best_runs_any(RunSpace(MODEL, run, devices, fixed), A100, 3)


def test_the_host_counts() -> None:
    space = replace(SPACE, fixed={"tp": 1, "pp": 1, "recompute": "none"})
    fast, slow = (best_runs(space, A100, 1, Host(seconds)).best[0] for seconds in (0.0, 1e-3))
    assert slow.step_seconds > fast.step_seconds
    assert slow.run.micro_batch >= fast.run.micro_batch  # fewer, larger kernels


WORDS = ["estimate", "--hardware", "a100-80g-sxm", "--layers", "8", "--hidden", "1024", "--heads", "8", "--sequence",
         "512", "--vocabulary", "8000", "--batch", "16"]  # fmt: skip


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--devices", "8", "--search", "--tp", "2", "--recompute", "none", "--top", "3"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["best"]) == 3 and all(row["run"]["tp"] == 2 for row in answer["best"])
    assert answer["others_seconds"] is None or math.isfinite(answer["others_seconds"])
    assert main(words) == 0
    shown = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in shown if line.startswith("   "))
    assert any("were simulated" in line for line in shown)
    assert main([*WORDS, "--search"]) == 2 and main([*words, "--schedule", "gpipe"]) == 2


def test_a_larger_micro_batch_may_fit_where_it_is_the_only_one() -> None:
    """Then it leaves no gradients to another one; but in Megatron's precision they stand in buffers of their own."""
    for precision, hopeless in (("fp32", False), ("bf16", True)):
        tried = _MicroBatches()
        first, second = (TrainingRun(4, size, precision=precision) for size in (2, 4))
        assert not tried.hopeless(first) and tried.hopeless(second) is hopeless


LONG = RunSpace(replace(MODEL, sequence=16384, layers=4), TrainingRun(8, 1), 8, {"tp": 2, "pp": 1, "micro_batch": 1})


@pytest.mark.slow
def test_long_sequences_are_shared_where_that_is_faster() -> None:
    """Every device keeps 4,096 tokens or more; a number that is given stays."""
    assert {run.cp for run in runs(LONG, A100)} == {1, 2, 4}
    assert {run.cp for run in runs(replace(LONG, fixed=LONG.fixed | {"cp": 8}), A100)} == set()  # no replica is left
    for other in (replace(LONG, model=replace(LONG.model, attention="unfused")), SPACE):
        assert {run.cp for run in runs(other, A100)} == {1}
    result = best_runs(LONG, A100, 3)
    seconds = sorted(m.step_seconds for m in everything(LONG, A100) if m.memory.fits(A100))
    assert [step.step_seconds for step in result.best] == pytest.approx(seconds[:3])
    few = best_runs(replace(LONG, run=TrainingRun(2, 1)), A100, 1)  # two sequences for four groups of devices
    assert few.best[0].run.cp > 1


def test_the_front_is_that_of_all(oracle: list[Any]) -> None:
    space = replace(SPACE, fixed={"tp": 2})
    result = best_runs(space, SMALL_MEMORY, 2, front=True)
    fitting = [(step.step_seconds, step.memory.peak) for step in oracle if step.memory.fits(SMALL_MEMORY)]
    front, least = [], math.inf
    for seconds, peak in sorted(fitting):
        if peak < least:
            front.append((seconds, peak))
            least = peak
    assert len(front) > 2 and not best_runs(space, SMALL_MEMORY, 2).front
    assert [step.step_seconds for step in result.front] == pytest.approx([seconds for seconds, _ in front])
    assert [step.memory.peak for step in result.front] == pytest.approx([peak for _, peak in front])


def test_the_command_draws_the_front(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "estimate --hardware a100-80g-sxm --layers 4 --hidden 256 --heads 4 --sequence 128 --vocabulary 1000 --batch 8"
    )
    picture = tmp_path / "front.svg"
    assert main([*words.split(), "--devices", "4", "--search", "--top", "2", "--pareto", str(picture)]) == 0
    assert "no configuration of the space is better in both than" in capsys.readouterr().out
    assert picture.read_text().count("<svg") == 1
    for refused in (["--pareto", "x"], ["--devices", "4"], ["--top", "3"]):
        assert main([*words.split(), *refused]) == 2
        assert f"{refused[0]} is for --search" in capsys.readouterr().err
    assert main([*words.split(), "--devices", "4", "--search", "--software", "autoshard", "--pareto", "x"]) == 2
