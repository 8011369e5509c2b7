"""What proves the table: for every operator a few shapes, with dims that 2 and 3 divide and dims that they don't."""

from __future__ import annotations

from autoshard.rules.cases.dense import ATTENTION, CONVOLUTION, LINEAR_ALGEBRA, NORMALISATION, RECURRENT
from autoshard.rules.cases.describe import booleans, case, case_id, constants, floats, integers, positive
from autoshard.rules.cases.experts import EXPERTS
from autoshard.rules.cases.images import IMAGES, WRITES
from autoshard.rules.cases.losses import LOSSES
from autoshard.rules.cases.moving import INDEXING, VIEWS
from autoshard.rules.cases.pointwise import CREATION, ELEMENTWISE, REDUCTIONS
from autoshard.rules.cases.random import RANDOM
from autoshard.rules.cases.variants import ATTENTION_VARIANTS, DROPOUT_VARIANTS, NORMALISATION_VARIANTS, REPEATS

ALL = [
    *LINEAR_ALGEBRA, *ATTENTION, *NORMALISATION, *ELEMENTWISE, *CREATION, *REDUCTIONS,
    *VIEWS, *INDEXING, *WRITES, *CONVOLUTION, *IMAGES, *RECURRENT, *LOSSES, *RANDOM, *EXPERTS,
    *ATTENTION_VARIANTS, *DROPOUT_VARIANTS, *NORMALISATION_VARIANTS, *REPEATS,
]  # fmt: skip

__all__ = ["ALL", "RANDOM", "booleans", "case", "case_id", "constants", "floats", "integers", "positive"]
