"""What torchtitan's selective activation checkpointing by operators runs again in the backward of a layer."""

from __future__ import annotations

from autoshard.estimate.transformer_graph import layer
from autoshard.estimate.transformer_program import LAYERS, BuiltTransformer
from autoshard.ir.program import Collective, Instruction
from autoshard.rules.algebra.operator_record import Product, Work
from autoshard.rules.operators import record

KEPT_COLLECTIVE = "reduce_scatter"


def kept_operators(built: BuiltTransformer, index: int = LAYERS - 1) -> frozenset[int]:
    """Positions, in the program, of what is not run again of layer `index`: every second product from the first on,
    attention, and reduce-scatters (torchtitan's `_save_list` and its policy)."""
    path = layer(index)
    found: set[int] = set()
    products = 0
    for position, instruction in enumerate(built.program.instructions):
        if instruction.module != path and not instruction.module.startswith(f"{path}."):
            continue
        if _is_product(instruction):
            products += 1
            if products % 2:
                found.add(position)
        elif _is_kept(instruction):
            found.add(position)
    return frozenset(found)


def _is_product(instruction: Instruction) -> bool:
    return not isinstance(instruction, Collective) and isinstance(record(instruction.target).work, Product)


def _is_kept(instruction: Instruction) -> bool:
    if isinstance(instruction, Collective):
        return instruction.forward == KEPT_COLLECTIVE
    return record(instruction.target).work is Work.ATTENTION
