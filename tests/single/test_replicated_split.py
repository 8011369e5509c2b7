"""A split of one replica on the mesh of all: weights in shards reach their use by gathers over the replicas alone."""

from __future__ import annotations

from autoshard.cluster.hardware import load_hardware
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import CAST
from autoshard.ir.layout import Shard
from autoshard.ir.mesh import Mesh
from autoshard.rules.resize.rebatch import rebatched
from autoshard.whole_step_search.blocks.block_line import BlockLine, block_line, shortened
from autoshard.whole_step_search.blocks.block_splits import block_splits
from autoshard.whole_step_search.blocks.replicated_split import replicated_split
from tests.single.test_joint_search import GPT2

GPT3 = {"batch": 2, "sequence": 2048, "n_layer": 3, "n_embd": 12288, "n_head": 96}


def test_weights_are_cast_and_used_as_they_are_stored_inside_a_replica() -> None:
    """Of GPT-3's size: where a row-parallel weight was cast as cut by columns, each micro-batch exchanged all of it (a
    step by program took 64 s, by blocks 18.7); and a column-parallel one was used in finer blocks than was searched."""
    graph = capture(str(GPT2), GPT3, "bf16-mixed")
    hardware, short = load_hardware("a100-80g-sxm"), shortened(block_line(graph))
    splits = block_splits(rebatched(short.graph, 2), Mesh((("tp", 8),)), hardware)
    wide = rebatched(short.graph, 64)
    rows = 0
    for split in splits:
        line = BlockLine(wide, short.line.blocks)
        formulation, solution = replicated_split(line, short.graph, shortened(line), split, 32, True, hardware, 24)
        chosen = {
            site.name: (site.strategies or site.layouts)[s]
            for site, s in zip(formulation.sites, solution.choice, strict=True)
        }
        for op in wide.ops:
            if op.target == CAST and op.operands[0] in {p.tensor for p in wide.parameters}:
                stored, taken = chosen[op.operands[0]], chosen[op.name].operands[0]
                (reader, position), *_ = wide.consumers[op.results[0]]
                used = chosen[reader.name].operands[position].placements[1]
                if isinstance(used, Shard):
                    assert stored.placements[1] == taken.placements[1] == used, (split.name, op.name)
                    rows += used.dim == 0 and len(wide.tensor(op.operands[0]).shape) == 2
    assert rows, "no product was cut by rows"
