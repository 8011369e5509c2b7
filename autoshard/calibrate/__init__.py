"""Fits the constants of the cost formulas to measurements, and writes them as a file of `costmodels/`."""

from autoshard.calibrate.fit import Fitted, cross_validate, fit
from autoshard.calibrate.models import Attention, Collectives, Products, Rows

__all__ = ["Attention", "Collectives", "Fitted", "Products", "Rows", "cross_validate", "fit"]
