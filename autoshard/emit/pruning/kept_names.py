"""Names that a package keeps although nothing in it uses them: what README.md shows, and what other programs call."""

from __future__ import annotations

from typing import Any

from autoshard.emit.pruning.constant_folding import GIVEN, NO_CONTEXT
from autoshard.emit.pruning.module_table import Name

PROGRAMS = ("train", "convert", "train_servers")
# What README.md shows, and verification and programs of one's own call.
ROOTS: dict[Name, int | None] = {
    ("runtime", "ParallelMesh"): 4, ("runtime", "leave"): 0, ("runtime", "local"): 1, ("runtime", "sharding"): 1,
    ("runtime", "assign"): 2, ("runtime", "full_value"): 4, ("runtime", "full_tensor"): 1,
    ("runtime", "full_state_dict"): 1, ("runtime", "load_full_state_dict"): 3,
    ("runtime", "init_parameters"): 3, ("train", "train_step"): 5, ("train", "make_optimizer"): None,
    ("train", "compute_gradients"): 3, ("train", "parse_arguments"): None, ("train", "take_options"): 1,
    ("train", "run"): None, ("batches", "checked"): 2, ("batches", "synthetic_batches"): None,
    ("batches", "local_part"): 3, ("start_state", "start_from"): 3,
    **{
        ("runtime.servers.server_run", name): None
        for name in ("InProcess", "Dealer", "share_works", "apply_update", "labels_of_step", "update_norm")
    },
}  # fmt: skip
# Functions without effect where nothing reaches these: only they make what is looked for.
_GATHERS = (("runtime.redistribution", "regather"), ("runtime.redistribution", "gather_once"))
MADE_BY: dict[Name, tuple[Any, tuple[Name, ...]]] = {
    ("runtime.weights", "gathered_of"): (None, _GATHERS),
    ("runtime.weights", "regather_before"): (GIVEN, _GATHERS),
    ("runtime.weights", "regathering"): (NO_CONTEXT, _GATHERS),
    ("runtime.weights", "cast_of"): (None, (("runtime.redistribution", "cast_weight"),)),
}
PASSED_ON = (("runtime", "Stages"),)  # where there is such a thing
# Methods and attributes that verification or torch uses.
USED = frozenset({"groups", "joint", "global_rank", "stages", "_init_group"})
SET = frozenset({"exact", "seed", "step", "training", "grad"})  # attributes that others set
OUTSIDE = {
    ("runtime.mesh", "ParallelMesh.__init__"): 4, ("runtime.mesh", "ParallelMesh.from_environment"): 2,
    ("train", "make_scaler"): 2,
}  # fmt: skip
# Constants of model_parallel.py that other programs, or people, read.
READ = frozenset({"PLAN", "MESH", "INPUTS", "LABEL_COUNTS", "FREE_SIZES", "FIXED_SIZES"})
