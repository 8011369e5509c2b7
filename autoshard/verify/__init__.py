"""Proof that an emitted package computes what the original model does, by running both in float64 and comparing."""

from autoshard.verify.case import Case, check_files, check_folder, make_case
from autoshard.verify.folder import verify_package
from autoshard.verify.measure import THRESHOLD, Error, Worst
from autoshard.verify.proof import Proof, proof_text

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
