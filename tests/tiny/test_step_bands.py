"""Bands of whole steps: made from measured steps of a kind, wide and said so where there are none."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.whole_steps.step_bands import UNMEASURED, StepKind, bands, step_kind, whole_step_band
from benchmarks import step_bands
from benchmarks.step_bands import StepCase

A100, MI300X = load_hardware("a100-80g-sxm"), load_hardware("mi300x-192g")
SPENT = {"matmul": 1.0, "collective": 0.2}


def test_a_kind_that_was_measured_has_its_own_band() -> None:
    for kind, (error, steps) in bands().items():
        band = whole_step_band(A100, SPENT, "bfloat16", kind)
        assert (band.error, band.steps) == (error, steps) and steps > 0
        assert str(band) == f"±{error:.0%} (from {steps} such steps)"


def test_a_kind_that_nobody_measured_is_wide_and_says_so() -> None:
    """Whatever the constants say of themselves."""
    for hardware in (A100, MI300X):
        band = whole_step_band(hardware, SPENT, "bfloat16", step_kind(hardware, "autoshard", "kernels", 8))
        assert band.steps == 0 and band.error >= UNMEASURED
        assert "no such step measured" in str(band)


def test_what_makes_a_kind() -> None:
    assert step_kind(A100, "fsdp", "kernels", 8) == StepKind("ampere", "fsdp", "kernels", "one", False)
    assert step_kind(A100, "fsdp", "kernels", 16).nodes == "many"
    assert step_kind(MI300X, "megatron", "kernels", 8).generation == ""
    figures = tuple(
        replace(figure, kind="measured") if figure.key == "constants.host.dispatch" else figure
        for figure in A100.figures
    )
    assert step_kind(replace(A100, figures=figures), "megatron", "kernels", 8).calibrated


KIND = StepKind("ampere", "megatron", "kernels", "one", False)


def test_a_band_is_judged_on_models_that_it_was_not_made_from() -> None:
    """By hand: each of three models by the mean error of the other two."""
    found = [StepCase(KIND, model, error) for model, error in (("a", 0.02), ("a", -0.10), ("b", 0.05), ("c", -0.30))]
    (made,) = step_bands.judged(found)
    assert (made.steps, made.models, made.inside) == (4, 3, 0.75)  # only c's step is outside: others make 10 %
    assert made.error == pytest.approx(0.212)  # 1.8 times 11.75 %
    assert made.width == pytest.approx((0.315 + 0.315 + 0.252 + 0.102) / 4)
    assert made.mean_error == pytest.approx((0.02 + 0.10 + 0.05 + 0.30) / 4)
    (alone,) = step_bands.judged([StepCase(KIND, "a", 0.1)])
    assert alone.models == 1 and math.isnan(alone.inside) and alone.error == pytest.approx(0.5)  # 5 times it
    (twice,) = step_bands.judged([StepCase(KIND, "a", error) for error in (0.1, -0.3)])
    assert twice.error == pytest.approx(2 * (6**0.5 - 1) * 0.2, abs=1e-3)


def test_few_steps_make_one_band_for_one_node_and_many() -> None:
    one = [StepCase(KIND, f"model {n}", n / 100) for n in range(20)]
    many = [StepCase(replace(KIND, nodes="many"), f"model {n}", 0.5) for n in range(step_bands.FEW)]
    assert [made.kind.nodes for made in step_bands.judged([*one, *many])] == ["one", "many"]
    (both,) = step_bands.judged([*one, *many[1:]])
    assert both.kind.nodes == "any" and both.steps == 27


def test_a_kind_falls_back_to_any_number_of_nodes() -> None:
    pooled = next((kind for kind in bands() if kind.nodes == "any"), None)
    if pooled is not None:
        for nodes in ("one", "many"):
            band = whole_step_band(A100, SPENT, "bfloat16", replace(pooled, nodes=nodes))
            assert (band.error, band.steps) == bands()[pooled]


def test_a_band_of_errors_to_one_side_is_no_wider_than_they_are() -> None:
    """All between 40 and 48 %: 1.8 times their mean would be 79 %, and hold every step."""
    errors = np.linspace(0.40, 0.48, 15)
    assert step_bands.half_width(errors) == pytest.approx(0.474)  # the 14th of 15


def test_most_stay_within_a_band() -> None:
    """Five of six, whether errors are normal or exponential."""
    source = np.random.default_rng(0)
    for errors in (source.normal(size=4000), source.laplace(size=4000)):
        inside = np.abs(errors) <= step_bands.half_width(errors[:2000])
        assert 0.81 <= inside[2000:].mean() <= 0.88


DATA = Path(__file__).resolve().parents[3] / "shared" / "validation"
measured = pytest.mark.skipif(not DATA.is_dir(), reason="published measurements (../shared/validation) are not here")


@measured
def test_the_plans_of_one_day_are_ranked() -> None:
    """BLOOM's 181B plans with the network that was measured there: nothing is fitted to them."""
    from benchmarks import bloom_steps as own
    from benchmarks.named_rows import seconds_of

    rows = own.averaged([row for row, note, full in own.bloom(DATA) if row.workload == own.RANKED and not full])
    samples = np.array([row.run.batch for row in rows])
    predicted, real = seconds_of(rows) / samples, own.measured(rows) / samples
    assert len(rows) == 11
    assert np.abs(predicted / real - 1).mean() < 0.10
    assert own.correlation(real, predicted) >= 0.75
    assert real[np.argmin(predicted)] / real.min() - 1 <= 0.03


@measured
def test_twenty_kernels_calibrate_a_b200() -> None:
    from benchmarks import cluster_steps as own
    from benchmarks.named_rows import seconds_of

    rows = [replace(row, hardware=own.calibrated_b200(DATA, 0)) for row in own.b200(DATA)]
    assert len(rows) == 16 and sum(row.run.cp > 1 for row in rows) == 4
    assert np.abs(own.errors(rows, seconds_of(rows))).mean() < 0.10


@measured
@pytest.mark.slow
def test_fsdp_of_models_that_nothing_was_fitted_to() -> None:
    from benchmarks import fsdp_steps as own

    for gpus in own.GENERATIONS.values():
        rows = [row for row in own.rows(DATA) if row.gpu in gpus and not row.fitted]
        assert len(rows) > 15
        assert np.abs(own.errors(rows, own.predict(rows))).mean() < 0.08
