"""A model that is an object, as it was called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from autoshard.graph_capture.call_form import ModelCall


@dataclass(frozen=True, eq=False)
class LiveModel:
    """A model as an object: `module` is a copy on the caller's own tensors; `call` calls it with `tensors`."""

    module: nn.Module
    call: ModelCall
    tensors: tuple[Tensor, ...]
