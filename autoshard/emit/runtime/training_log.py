"""Sinks for the figures of a step: standard output, a file of JSON lines, TensorBoard. Only rank 0 writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Sink = Callable[[int, Mapping[str, float], str], None]  # step, figures, the same as a line


class TrainingLog:
    """Sinks that receive each logged step. Append your own function to `sinks` for another."""

    def __init__(self, rank: int, json_file: str | None = None, tensorboard: str | None = None) -> None:
        """Raises ImportError on every rank if TensorBoard is requested and not installed."""
        writer = _tensorboard(tensorboard, rank) if tensorboard else None
        self.sinks: list[Sink] = []
        if rank == 0:
            self.sinks.append(lambda step, figures, line: print(line, flush=True))
            self.sinks += [_json_lines(Path(json_file))] if json_file else []
            self.sinks += [writer] if writer else []

    def write(self, step: int, figures: Mapping[str, float], line: str) -> None:
        for sink in self.sinks:
            sink(step, figures, line)


def _json_lines(path: Path) -> Sink:
    """Writes one JSON object per line, null for non-finite numbers; a resumed run appends to the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(step: int, figures: Mapping[str, float], line: str) -> None:
        with path.open("a", encoding="utf-8") as file:
            known = {name: value if math.isfinite(value) else None for name, value in figures.items()}
            file.write(json.dumps({"step": step, **known}) + "\n")

    return write


def _tensorboard(folder: str, rank: int) -> Sink:
    from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

    writer: Any = SummaryWriter(folder) if rank == 0 else None

    def write(step: int, figures: Mapping[str, float], line: str) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write
