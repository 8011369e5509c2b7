"""A package whose devices take unequal shares of the batch, as a user runs it: the losses of equal shares."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import StepPlan
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests import launched
from tests.slow import slow

GPT2 = "examples/gpt2.py:build"
SIZES = {"n_layer": 1, "sequence": 8, "n_embd": 48, "vocabulary": 29, "dropout": 0.0, "batch": 4}
LOADER = """
import torch

def make_loader(seed, inputs):
    for number in range(40):
        generator = torch.Generator().manual_seed(100 + number)
        ids = torch.randint(0, 29, (4, 8), generator=generator)
        labels = torch.where(torch.rand((4, 8), generator=generator) < 0.3, -100, ids)
        yield {"labels": labels, "input_ids": ids}
"""
LOSS = re.compile(r"(step \d+: (?:evaluation )?loss [\d.]+)(?:, gradient norm ([\d.]+))?")


def figures(out: str) -> list[float]:
    matches = [LOSS.match(line) for line in out.splitlines()]
    return [float(word) for match in matches if match for word in (match[1].split()[-1], match[2]) if word]


@pytest.mark.parametrize("zero", [1, slow(3)])
def test_training_evaluation_and_resuming_give_the_losses_of_equal_shares(zero: int, tmp_path: Path) -> None:
    """Three processes, of which one computes eight of twelve slices; ZeRO 3 says that nothing is in shards."""
    graph, sizes = capture(GPT2, {**SIZES, "batch": 6}), {**SIZES, "batch": 6}
    (tmp_path / "data.py").write_text(LOADER.replace("(4, 8)", "(6, 8)"))
    style = "fsdp" if zero == 1 else "dp"
    plan = search(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse("dp=3"), strategy=style))
    data = ["--data", f"{tmp_path / 'data.py'}:make_loader", "--backend", "gloo", "--log-every", 1]
    data += ["--eval-data", f"{tmp_path / 'data.py'}:make_loader", "--eval-every", 2, "--eval-batches", 2]
    every = []
    for name, shares in (("equal", ()), ("unequal", (8, 1, 3))):
        variant = replace(plan, model_arguments=tuple(sizes.items()), step=StepPlan(4, zero=zero, batch_shares=shares))
        folder, program = tmp_path / name, lower(variant, graph)
        write_package(folder, emit(program, variant, graph))
        saved = ["--save", tmp_path / f"{name}.checkpoints"]
        first = launched.torchrun(folder / "train.py", 3, *data, *saved, "--steps", 2)
        then = launched.torchrun(folder / "train.py", 3, *data, *saved, "--resume", "auto", "--steps", 4)
        assert (first.returncode, then.returncode) == (0, 0), first.stderr + then.stderr
        every.append(figures(first.stdout) + figures(then.stdout))
    assert len(every[0]) == 10
    assert every[1] == pytest.approx(every[0], rel=2e-5)
