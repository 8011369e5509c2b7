from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster.hardware import Hardware, list_profiles, load_hardware
from autoshard.costs.bands import NAMES, error_of, family, kind_of, provenance, step_band

A100, ASCEND, V100 = (load_hardware(name) for name in ("a100-80g-sxm", "ascend-910b2", "v100-32g-sxm2"))


def with_errors(**errors: float) -> Hardware:
    changed = {f"error.{name}": value for name, value in errors.items()}
    return replace(A100, constants=tuple((key, changed.get(key, value)) for key, value in A100.constants))


def test_families_of_operators():
    assert [family(f"aten.{name}") for name in ("linear", "scaled_dot_product_attention", "gelu")] == [
        "matmul", "attention", "memory",
    ]  # fmt: skip


def test_a_band_by_hand():
    hardware = with_errors(matmul=0.1, collective=0.3)
    band = step_band(hardware, {"matmul": 3.0, "collective": 1.0})
    assert band.error == pytest.approx(math.hypot(0.3, 0.3) / 4)
    assert str(band) == "±11% (measured)"
    assert step_band(hardware, {"matmul": 2.0}).error == pytest.approx(0.1)
    assert step_band(hardware, {}).error == 0


seconds = st.dictionaries(st.sampled_from(list(NAMES)), st.floats(1e-6, 10), min_size=1)


@given(seconds=seconds, factor=st.floats(1, 5))
def test_a_step_is_at_most_as_unsure_as_its_worst_family(seconds, factor):
    band = step_band(A100, seconds)
    errors = [error_of(A100, name) for name in seconds]
    assert min(errors) / math.sqrt(len(errors)) * (1 - 1e-9) <= band.error <= max(errors) * (1 + 1e-9)
    worse = with_errors(**{name: error_of(A100, name) * factor for name in NAMES})
    assert step_band(worse, seconds).error == pytest.approx(factor * band.error)


def test_the_weakest_figures_that_matter_name_the_kind():
    assert kind_of(V100, "collective") == "measured" and kind_of(V100, "matmul") == "datasheet"
    assert step_band(V100, {"matmul": 1.0, "collective": 1.0}).kind == "datasheet"
    assert step_band(V100, {"matmul": 0.01, "collective": 1.0}).kind == "measured"


def test_another_dtype_than_was_fitted_is_less_sure():
    assert A100.fitted_dtypes == ("bfloat16",)
    fitted, other = (step_band(A100, {"matmul": 1.0}, dtype) for dtype in ("bfloat16", "float32"))
    assert fitted.error < 0.1 and fitted.kind == "measured"
    assert other.error == 0.2 and other.kind == "datasheet"
    assert step_band(A100, {"collective": 1.0}, "float32") == step_band(A100, {"collective": 1.0})
    assert "matmuls ±9% (measured, bfloat16)" in provenance(A100)


def test_what_nobody_measured_says_so():
    assert provenance(ASCEND).startswith("uncalibrated, nothing was fitted to this device: matmuls ±35%")
    assert str(step_band(ASCEND, {"matmul": 1.0})) == "±35% (uncalibrated, datasheet figures)"
    assert "uncalibrated" not in provenance(A100)


@pytest.mark.parametrize("name", list_profiles())
def test_fitted_constants_are_surer(name):
    hardware = load_hardware(name)
    for each in NAMES:
        assert (error_of(hardware, each) <= 0.15) == (kind_of(hardware, each) == "measured") or each == "memory"
