"""Least squares on relative errors, and the held-out error of a fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.calibrate.fitted_models import Model, Rows

NOISE = 0.06  # relative spread of a measurement around the formula, against which the widths of constants are weighed
DRAWS = 10


@dataclass(frozen=True)
class Fitted:
    """Constants by key, and the relative error of each row that they were fitted to."""

    constants: Mapping[str, float]
    errors: np.ndarray


def take(rows: Rows, chosen: np.ndarray) -> Rows:
    return {key: column[chosen] for key, column in rows.items()}


def fit(model: Model, rows: Rows) -> Fitted:
    """The constants that fit best: soft-L1 on log(predicted / measured), so that single outliers weigh little."""
    from scipy.optimize import least_squares

    free = model.free
    start = np.log([f.centre for f in free])
    width = np.array([f.width for f in free])

    def named(point: np.ndarray) -> dict[str, float]:
        return {f.key: float(value) for f, value in zip(free, np.exp(point), strict=True)}

    def residuals(point: np.ndarray) -> np.ndarray:
        predicted = model.seconds(named(point), rows)
        return np.concatenate([np.log(predicted / rows["seconds"]) / NOISE, (point - start) / width])

    # Within e^6 of the centre: nothing physical lies outside, and powers stay finite.
    least = np.maximum(start - 6, np.log([max(f.least, 1e-300) for f in free]))
    solution = least_squares(residuals, start, loss="soft_l1", bounds=(least, start + 6))
    constants = named(solution.x)
    return Fitted(constants, model.seconds(constants, rows) / rows["seconds"] - 1)


def cross_validate(
    model: Model, rows: Rows, held_out: Callable[[np.random.Generator], np.ndarray], draws: int = DRAWS
) -> tuple[np.ndarray, np.ndarray]:
    """(row, relative error) of every held-out row of every draw. `held_out` gives a mask over the rows; the seeds are
    0, 1, 2, … ."""
    places, errors = [], []
    for seed in range(draws):
        out = held_out(np.random.default_rng(seed))
        constants = fit(model, take(rows, ~out)).constants
        places.append(np.flatnonzero(out))
        errors.append(model.seconds(constants, take(rows, out)) / rows["seconds"][out] - 1)
    return np.concatenate(places), np.concatenate(errors)


def held_out_error(model: Model, rows: Rows) -> float:
    """Mean absolute relative error on held-out rows, in each draw a random part of them."""
    count = len(rows["seconds"])

    def chosen(generator: np.random.Generator) -> np.ndarray:
        return np.isin(np.arange(count), generator.permutation(count)[: -(-count // DRAWS)])

    return float(np.abs(cross_validate(model, rows, chosen)[1]).mean())
