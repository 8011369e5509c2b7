"""The original model called as a user would, to tell its own mistakes from those of verification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoshard.errors import CaptureError
from autoshard.graph_capture.load_model import load_model
from autoshard.graph_capture.tracing.source_lines import blame


def fault_of_model(spec: str, arguments: Mapping[str, Any], seed: int) -> CaptureError | None:
    """What is wrong where `spec`, built for real, can't be called with its example inputs. A trace has no values: it
    can't know of an index beyond a table, say."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, examples = load_model(spec, arguments, device="cpu")
        try:
            module(*examples)
        except Exception as error:
            told = f"the model itself fails with its example inputs, on the CPU: {blame(error)}"
            return CaptureError(told, "call model(*inputs) in Python: it must run")
    return None
