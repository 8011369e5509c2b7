"""Verifies that an emitted package computes what the original model does, by running both in float64."""

from autoshard.verification.case import Case, check_files, check_folder, make_case
from autoshard.verification.comparison.proof import Proof, proof_text
from autoshard.verification.comparison.tolerances import THRESHOLD, Error, Worst
from autoshard.verification.verify_folder import verify_package

__all__ = [
    "THRESHOLD",
    "Case",
    "Error",
    "Proof",
    "Worst",
    "check_files",
    "check_folder",
    "make_case",
    "proof_text",
    "verify_package",
]
