"""Proof cases of every operator: small shapes, with dims that 2 and 3 devices divide and dims that they do not."""

from __future__ import annotations

from autoshard.rules.cases.convolution import CONVOLUTION
from autoshard.rules.cases.creation import CREATION, RANDOM, WRITES
from autoshard.rules.cases.elementwise import ELEMENTWISE
from autoshard.rules.cases.images import IMAGES
from autoshard.rules.cases.indexing import INDEXING
from autoshard.rules.cases.layers import ATTENTION, ATTENTION_VARIANTS, DROPOUT, DROPOUT_VARIANTS, EXPERTS, RECURRENT
from autoshard.rules.cases.linear_algebra import LINEAR_ALGEBRA
from autoshard.rules.cases.losses import LOSSES
from autoshard.rules.cases.normalisation import NORMALISATION, NORMALISATION_VARIANTS
from autoshard.rules.cases.reductions import REDUCTIONS
from autoshard.rules.cases.views import REPEATS, VIEWS

ALL = [
    *LINEAR_ALGEBRA, *ATTENTION, *NORMALISATION, *ELEMENTWISE, *CREATION, *REDUCTIONS,
    *VIEWS, *INDEXING, *WRITES, *CONVOLUTION, *IMAGES, *RECURRENT, *LOSSES, *RANDOM, *DROPOUT, *EXPERTS,
    *ATTENTION_VARIANTS, *DROPOUT_VARIANTS, *NORMALISATION_VARIANTS, *REPEATS,
]  # fmt: skip
