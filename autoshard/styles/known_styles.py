"""Plans that people know by name: `--strategy NAME` plans in one of them, and every plan is compared with all."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from autoshard.errors import InfeasibleError
from autoshard.formulation.fewer_choices import Keep, narrowed
from autoshard.formulation.formulate import Formulation
from autoshard.styles.batch_styles import data_parallel, fully_sharded, hybrid_sharded
from autoshard.styles.tensor_styles import fsdp_tp, megatron, megatron_sp


@dataclass(frozen=True)
class Style:
    """`keep` says which choices of a formulation are in the style, or in a sentence why none are. `low_weights`: in
    mixed precision an expert gathers every weight in the low one."""

    title: str
    meaning: str
    keep: Callable[[Formulation], Keep | str]
    low_weights: bool = False


STYLES: dict[str, Style] = {
    "dp": Style("data parallel", "every axis splits the batch, weights and optimizer are copied", data_parallel),
    "fsdp": Style(
        "FSDP",
        "every axis splits the batch, weights and optimizer are stored in shards and gathered for use (ZeRO-3)",
        fully_sharded,
        low_weights=True,
    ),
    "hsdp": Style(
        "HSDP",
        "every axis splits the batch, weights and optimizer are stored in shards over the last and copied over others",
        hybrid_sharded,
        low_weights=True,
    ),
    "megatron": Style(
        "Megatron", "the last axis splits heads, hidden dims and vocabulary, the others the batch", megatron
    ),
    "megatron-sp": Style(
        "Megatron-SP",
        "as Megatron, and the last axis splits norms and residual sums along the sequence",
        megatron_sp,
    ),
    "fsdp-tp": Style(
        "FSDP-TP",
        "the last axis splits tensors as Megatron, the others the batch, and weights are stored in shards over these",
        fsdp_tp,
        low_weights=True,
    ),
}


def in_style(formulation: Formulation, name: str, free: Collection[int] = ()) -> Formulation:
    """Formulation with only the choices of the style, of all nodes but `free` ones. Raises InfeasibleError with the
    style's sentence where there are none."""
    keep = STYLES[name].keep(formulation)
    if isinstance(keep, str):
        raise InfeasibleError(f"--strategy {name}: {keep}", "--strategy best, or another mesh", proven=True)
    return narrowed(formulation, {node: choices for node, choices in keep.items() if node not in free})
