"""One plan for the lengths of real texts, against padding to the longest and a plan for each length.

    python -m benchmarks.dynamic_sizes --write

The texts are the docstrings of Python's own library, in tokens that are words and signs; a batch is as long as its
longest text. Writes the table of docs/dynamic-shapes.md.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from benchmarks import harness

PAGE = harness.ROOT / "docs" / "dynamic-shapes.md"
BATCH, LAYERS, UNIT, LONGEST = 32, 12, 64, 1024
HARDWARE, MESHES = "a100-80g-sxm", ("dp=8", "dp=2,tp=4", "tp=8")
TOKEN = re.compile(r"\w+|[^\w\s]")


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            num_hidden_layers=LAYERS, hidden_size=2048, intermediate_size=5632, num_attention_heads=16,
            num_key_value_heads=8, vocab_size=32000, max_position_embeddings=LONGEST, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss


def texts() -> Iterator[str]:
    """The docstrings of the library, file by file."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in file.parts or "test" in file.parts:
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
        yield from (text for node in nodes if (text := ast.get_docstring(node)))


def histogram() -> tuple[Counter[int], int, int]:
    """Batches by padded length, the number of texts, and the share of tokens (in %) that are no padding."""
    lengths = [min(LONGEST, len(TOKEN.findall(text))) for text in texts()]
    random.Random(0).shuffle(lengths)
    batches = [lengths[at : at + BATCH] for at in range(0, len(lengths) - BATCH + 1, BATCH)]
    padded = [max(UNIT, -(-max(batch) // UNIT) * UNIT) for batch in batches]
    useful = 100 * sum(map(sum, batches)) // (BATCH * sum(padded))
    return Counter(padded), len(lengths), useful


def rows() -> list[tuple[str, ...]]:
    """By mesh: padded to the longest, the plan of the longest, the plan for the histogram, a plan for each length."""
    counts, _, _ = histogram()
    sizes = [{"batch": BATCH, "sequence": length, "weight": count} for length, count in sorted(counts.items())]
    with torch.device("meta"):
        model = Llama()
    ids = torch.zeros(BATCH, LONGEST, dtype=torch.long)
    text = f"batch=8..{BATCH}/8,sequence={UNIT}..{LONGEST}/{UNIT}"
    graph = autoshard.capture(model, (ids, ids), precision="bf16-mixed", dynamic=text)
    found = []
    for mesh in MESHES:
        longest = autoshard.plan(graph, hardware=HARDWARE, mesh=mesh)
        plan = autoshard.plan(graph, hardware=HARDWARE, mesh=mesh, sizes=sizes).plan
        expected, best = plan.search.expected_seconds, sum(s.weight * s.best_seconds for s in plan.search.sizes)
        bound = plan.certificate.level_bound
        figures = (longest.plan.step_seconds, expected, best, bound)
        shown = [f"{1e3 * seconds:.2f} ms" for seconds in figures]
        found.append((mesh, *shown, f"{longest.plan.step_seconds / expected:.2f}x"))
    return found


HEADER = (
    "mesh",
    f"all padded to {LONGEST}",
    "one plan, expected step",
    "a plan for each length",
    "lower bound",
    "gain",
)


def main() -> None:
    options = harness.options(__doc__).parse_args()
    counts, number, useful = histogram()
    head = [
        f"{number:,} docstrings of Python's library in batches of {BATCH}, each padded to its longest",
        f"({useful} % of the tokens are text): {sum(counts.values())} steps of {len(counts)} lengths up to {LONGEST}.",
        f"Llama of {LAYERS} layers and width 2,048, bf16-mixed, 8 devices of {HARDWARE}.",
    ]
    lines = harness.table(HEADER, (harness.cells(*row) for row in rows()), 1)
    if options.write:
        harness.put("lengths", [*head, "", *lines], PAGE)


if __name__ == "__main__":
    main()
