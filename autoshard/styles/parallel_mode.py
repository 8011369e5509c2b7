"""Parallel modes by the names that MindSpore gives them, as what they ask of a search."""

from __future__ import annotations

import difflib

from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh

BEST, DATA_PARALLEL = "best", "dp"
STAND_ALONE = "stand-alone"
MODES = (STAND_ALONE, "data-parallel", "semi-auto", "auto")
SYNONYMS = {"hybrid": "semi-auto"}
ONE_DEVICE = Mesh((("dp", 1),))


def read_mode(text: str) -> str:
    """One of MODES, also as `semi_auto_parallel`. UsageError with the nearest."""
    name = text.lower().replace("_", "-")
    short = name if name in MODES else name.removesuffix("-parallel")
    short = SYNONYMS.get(short, short)
    if short not in MODES:
        near = difflib.get_close_matches(short, MODES, 1) or MODES
        raise UsageError(f"unknown mode {text!r}: expected {', '.join(MODES)}", f"--mode {near[0]}")
    return short


def of_mode(mode: str, strategy: str, mesh: Mesh | None, devices: int | None, pins: bool) -> tuple[str, Mesh | None]:
    """The strategy and mesh of a request in `mode`; `pins`: are there any.

    `stand-alone`: one device. `data-parallel`: every axis splits the batch. `semi-auto`: so does every operator that no
    pin or strategy in the model's code decides. `auto`: all that is not pinned is searched. UsageError where the
    request contradicts the mode.
    """
    if mode == "auto":
        return strategy, mesh
    if strategy != BEST:
        raise UsageError(f"--mode {mode} and --strategy {strategy} both say how to split", "one of them")
    if mode in ("stand-alone", "data-parallel") and pins:
        raise UsageError(f"--mode {mode} takes no pins", "--mode semi-auto: the pinned operators as said, others dp")
    if mode != "stand-alone":
        return DATA_PARALLEL, mesh
    if (there := mesh.size if mesh else devices or 1) > 1:
        raise UsageError(f"--mode stand-alone runs on one device, and there are {there}", "--mesh dp=1")
    return strategy, mesh or ONE_DEVICE
