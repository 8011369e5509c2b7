"""Fits the constants of the cost formulas to measurements, and writes them to `costmodels/`."""

from autoshard.calibrate.fitted_models import Attention, Collectives, Products, Rows
from autoshard.calibrate.least_squares import Fitted, cross_validate, fit

__all__ = ["Attention", "Collectives", "Fitted", "Products", "Rows", "cross_validate", "fit"]
