"""`autoshard estimate --offload optimizer`: states in the memory of the host, which updates them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autoshard.cli.commands import main
from autoshard.cluster.hardware import load_hardware
from autoshard.errors import InfeasibleError, UsageError
from autoshard.estimate.best_runs import best_runs
from autoshard.estimate.run_space import RunSpace
from autoshard.estimate.step import estimate
from autoshard.estimate.step_tail import stage_parameters
from autoshard.estimate.transformer import FSDP, TrainingRun, Transformer
from autoshard.estimate.transformer_program import build

A100 = load_hardware("a100-80g-sxm")
MODEL = Transformer(4, 1024, 8, 512, 8000)


def parts(run: TrainingRun) -> dict[str, float]:
    return {name: seconds for name, seconds in estimate(MODEL, run, A100).parts if name.startswith("optimizer")}


@pytest.mark.parametrize(("precision", "weight"), [("bf16", 2), ("fp32", 4), ("bf16-mixed", 4)])
def test_by_hand(precision: str, weight: int) -> None:
    """Gradients down, as many passes as on the device through an eighth of the host's memory, weights up."""
    run = TrainingRun(8, 1, 4, precision=precision, offload="optimizer")
    count = stage_parameters(build(MODEL, run, A100), MODEL, run, 0).all
    host = A100.host
    assert host is not None
    link = host.link_bandwidth * host.link_efficiency
    passes = {"bf16": 40, "fp32": 32, "bf16-mixed": 32}[precision]
    found = parts(run)
    assert found["optimizer: gradients to the host"] == pytest.approx(host.link_latency_seconds + 4 * count / link)
    assert found["optimizer: weights from the host"] == pytest.approx(host.link_latency_seconds + weight * count / link)
    memory = host.memory_bandwidth * host.memory_efficiency / A100.devices_per_node
    assert found["optimizer: on the host"] == pytest.approx(passes * count / memory)
    made, here = estimate(MODEL, run, A100), estimate(MODEL, replace(run, offload=""), A100)
    assert made.memory.host == (4 + 4 + 8) * count and made.memory.optimizer == 0 < here.memory.optimizer
    assert made.memory.peak == here.memory.peak - here.memory.optimizer
    assert sum(seconds for _, seconds in made.parts) == pytest.approx(made.step_seconds) and here.memory.host == 0
    assert made.step_seconds > here.step_seconds
    assert made.band.steps == 0 and made.band.error >= 0.6  # nobody measured such a step


@pytest.mark.parametrize(("precision", "zero"), [("bf16", 1), ("bf16", 3), (FSDP, 3)])
def test_replicas_share_it(precision: str, zero: int) -> None:
    run = TrainingRun(8, 1, 4, precision=precision, zero=zero, offload="optimizer")
    count = stage_parameters(build(MODEL, run, A100), MODEL, run, 0).all
    assert estimate(MODEL, run, A100).memory.host == 16 * count / 4
    if precision == "bf16":
        whole = parts(replace(run, zero=0))["optimizer: on the host"]
        assert parts(run)["optimizer: on the host"] == pytest.approx(whole / 4)


def test_of_a_pipeline_the_fullest_host_counts() -> None:
    run = TrainingRun(8, 1, pp=4, stage_layers=(1, 1, 1, 1), offload="optimizer")
    built = build(MODEL, run, A100)
    most = max(stage_parameters(built, MODEL, run, stage).all for stage in range(4))
    assert estimate(MODEL, run, A100).memory.host == 16 * most


def test_a_host_has_an_end() -> None:
    assert A100.host is not None
    small = replace(A100, host=replace(A100.host, memory_bytes=2e9), text=A100.text + "# a small host")
    run = TrainingRun(8, 1, offload="optimizer")
    made = estimate(MODEL, run, small)
    assert not made.memory.fits(small) and estimate(MODEL, run, A100).memory.fits(A100)
    fixed = {"tp": 1, "pp": 1, "recompute": "none", "micro_batch": 1, "zero": 0}
    with pytest.raises(InfeasibleError, match="of its host"):
        best_runs(RunSpace(MODEL, run, 2, fixed), small, 1)
    found = best_runs(RunSpace(MODEL, run, 2, fixed), A100, 1).best[0]
    assert found.memory.host > 0
    without = replace(A100, host=None, text=A100.text + "# no host")
    for refused in (
        lambda: estimate(MODEL, run, without),
        lambda: best_runs(RunSpace(MODEL, run, 2, fixed), without, 1),
    ):
        with pytest.raises(UsageError, match=r"has no \[host\]"):
            refused()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "sequence": 512, "vocabulary": 1000, "batch": 8, "dp": 4}
    words = ["estimate", "--hardware", "a100-80g-sxm", *(w for k, v in sizes.items() for w in (f"--{k}", str(v)))]
    assert main([*words, "--offload", "optimizer"]) == 0
    told = capsys.readouterr().out
    assert "optimizer: on the host" in told and "of its host: fits the" in told
    assert main([*words, "--offload", "optimizer", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_bytes"]["host"] > 0
    assert main([*words, "--offload", "weights"]) == 2
