"""Number of layers in each part of a pipeline.

Part c * stages + s of the model is chunk c of stage s. If the layers do not divide, the embedding and the head count as
a layer each, as in Megatron-Core with account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split,
and in DeepSpeed's partition by type:transformer|embedding. What is then left over goes to the first part, as an
embedding takes little time, and to the last ones that hold layers alone, which have the fewest micro-batches in flight.
"""

from __future__ import annotations

from functools import lru_cache

from autoshard.estimate.transformer import TrainingRun, Transformer


def part_layers(model: Transformer, run: TrainingRun) -> tuple[int, ...]:
    """Layers of each part, in the model's order; they add up to those of the model."""
    return run.stage_layers or balanced(model.layers, run.pp * run.interleave)


def layers_of(model: Transformer, run: TrainingRun, stage: int) -> tuple[int, ...]:
    """Layers of each chunk of a stage."""
    return part_layers(model, run)[stage :: run.pp]


@lru_cache(maxsize=4096)
def balanced(layers: int, parts: int) -> tuple[int, ...]:
    """Layers of each part: equal if they divide; at least one each, if there are enough."""
    if layers % parts == 0:
        return (layers // parts,) * parts
    each, left = divmod(layers + 2, parts)
    counts = [each + (part == 0 < left or parts - left <= part < parts - 1) for part in range(parts)]
    counts[0] -= 1
    counts[-1] -= 1
    for part in (0, parts - 1):
        if counts[part] == 0 and layers >= parts:  # more parts than half of the layers
            counts[counts.index(max(counts))] -= 1
            counts[part] = 1
    return tuple(counts)
