"""A package is the same text in every process, whatever order sets of names have there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EMITTED = """
import hashlib
from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.estimate.transformer import Transformer
from autoshard.estimate.transformer_graph import transformer_graph
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search

graph = transformer_graph(Transformer(1, 64, 4, 16, 128), 8, "bf16-mixed", "adamw").graph
for level in (0, 1):
    request = SearchRequest(Mesh.parse("dp=4"), strategy="fsdp", level=level)
    plan = search(graph, load_hardware("a100-80g-sxm"), request)
    text = emit(lower(plan, graph), plan, graph)["model_parallel.py"]
    assert "del " in text
    print(hashlib.sha256(text.encode()).hexdigest())
"""


def emitted(seed: int) -> str:
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": root, "AUTOSHARD_CACHE": "off"}
    done = subprocess.run([sys.executable, "-c", EMITTED], env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def test_the_order_of_sets_does_not_show() -> None:
    assert len({emitted(seed) for seed in range(3)}) == 1
