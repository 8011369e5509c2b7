"""Bands of whole steps: made from measured steps of a kind, wide and said so where there are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.step_corrections.step_bands import UNMEASURED, StepKind, bands, nearest, step_kind, whole_step_band
from benchmarks import step_bands
from benchmarks.step_bands import StepCase

A100, MI300X = load_hardware("a100-80g-sxm"), load_hardware("mi300x-192g")
SPENT = {"matmul": 1.0, "collective": 0.2}


def test_a_kind_that_was_measured_has_its_own_band() -> None:
    """It says of how many steps and releases it is, of two at least."""
    measured = {kind: band for kind, band in bands().items() if not band.neighbours}
    assert measured
    for kind, known in measured.items():
        band = whole_step_band(A100, SPENT, "bfloat16", kind)
        assert (band.error, band.steps, band.releases) == (known.error, known.steps, known.releases)
        assert known.releases >= 2 and known.steps >= known.releases
        assert str(band) == f"±{known.error:.0%} (from {known.steps} such steps, {known.releases} releases)"


def test_a_kind_that_nobody_measured_is_wide_and_says_so() -> None:
    """Whatever the constants say of themselves."""
    for hardware in (A100, MI300X):
        band = whole_step_band(hardware, SPENT, "bfloat16", step_kind(hardware, "autoshard", "kernels", 8))
        assert band.steps == 0 and band.error >= UNMEASURED
        assert "not validated by measurements" in str(band)


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


def cases(kind: StepKind, release: str, *errors: float) -> list[StepCase]:
    return [StepCase(kind, release, error) for error in errors]


def test_one_release_makes_no_band() -> None:
    """910B had +-8 % of five rows of one release; of the next 6 of 29 lay within. However many rows there are."""
    alone = cases(KIND, "one", *[0.04] * 20)
    assert step_bands.made(alone) == {}
    both = step_bands.made([*alone, *cases(KIND, "two", *[-0.3] * 8)])
    assert both[KIND].releases == 2 and both[KIND].steps == 28
    assert both[KIND].error >= 0.3  # the wider of both


def test_neighbours_stand_in() -> None:
    """The same software on other devices, then other software on the same; else none."""
    there = replace(KIND, generation="hopper")
    samples = [*cases(KIND, "one", *[0.1] * 8), *cases(there, "two", *[0.2] * 8)]
    bands = step_bands.made(samples)
    assert KIND not in bands and nearest(bands, KIND) == nearest(bands, there) == step_bands.MadeBand(0.2, 16, 2)
    other = replace(KIND, software="megatron")
    assert nearest(bands, other) is None
    more = step_bands.made([*samples, *cases(other, "three", *[0.4] * 8)])
    assert nearest(more, other) == step_bands.MadeBand(0.4, 16, 2)  # of one generation
    assert nearest(more, replace(KIND, generation="")) is None  # a device that nobody measured


def test_a_band_is_judged_on_releases_that_it_was_not_made_from() -> None:
    """By hand: each of three releases by the wider of the two others."""
    samples = [*cases(KIND, "a", *[0.1] * 8), *cases(KIND, "b", *[-0.2] * 8), *cases(KIND, "c", *[0.3] * 8)]
    (one,) = step_bands.judged(samples)
    assert (one.steps, one.releases) == (24, 3)
    assert one.inside == pytest.approx(2 / 3) and not one.keeps_its_word  # c's lie outside 20 %
    (lone,) = step_bands.judged(cases(KIND, "a", UNMEASURED, UNMEASURED + 0.01))
    assert lone.inside == 0.5  # of the width where no other release makes a band


def test_few_steps_make_one_band_for_one_node_and_many() -> None:
    many = replace(KIND, nodes="many")
    one = [*cases(KIND, "a", *[0.1] * 10), *cases(KIND, "b", *[0.1] * 10)]
    few = [*cases(many, "a", *[0.5] * 3), *cases(many, "b", *[0.5] * 4)]
    bands = step_bands.made([*one, *few])
    assert many not in bands and nearest(bands, many) == bands[replace(KIND, nodes="any")]
    assert KIND in bands and bands[KIND].steps == 20
    assert many in step_bands.made([*one, *few, *cases(many, "a", 0.5)])


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
    from benchmarks import megatron_steps as own

    rows = own.averaged([row for row in own.runs.bloom(DATA) if row.workload == own.RANKED and not row.full])
    samples = np.array([row.run.batch for row in rows])
    predicted, real = own.seconds_of(rows) / samples, own.measured(rows) / samples
    assert len(rows) == 11
    assert np.abs(predicted / real - 1).mean() < 0.10
    assert own.runs.correlation(real, predicted) >= 0.75
    assert real[np.argmin(predicted)] / real.min() - 1 <= 0.03


@measured
def test_twenty_kernels_calibrate_a_b200() -> None:
    from benchmarks import published_tables as own

    rows = own.calibrated_steps(DATA, 0)
    assert len(rows) == 16 and sum(row.run.cp > 1 for row in rows) == 4
    assert np.abs(own.errors(rows)).mean() < 0.10


@measured
@pytest.mark.slow
def test_fsdp_of_models_that_nothing_was_fitted_to() -> None:
    from benchmarks import published_rows

    for gpus in published_rows.GENERATIONS.values():
        rows = [row for row in published_rows.mpt(DATA) if row.workload[0] in gpus and not row.fitted]
        assert len(rows) > 15
        assert np.abs(published_rows.errors(rows)).mean() < 0.08
