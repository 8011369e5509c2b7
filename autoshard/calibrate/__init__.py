"""Fits the constants of a cost model to measurements, and writes it."""

from autoshard.calibrate.fitted_models import Attention, Collectives, Products, Rows
from autoshard.calibrate.least_squares import Fitted, cross_validate, fit

__all__ = ["Attention", "Collectives", "Fitted", "Products", "Rows", "cross_validate", "fit"]
