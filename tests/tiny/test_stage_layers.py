"""Pipelines whose stages hold unequal numbers of layers: by themselves, and as a user gives them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cli.commands import main
from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.pieces import pieces
from autoshard.estimate.stage_layers import balanced, layers_of, part_layers
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import estimate
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_program import build

A100 = load_hardware("a100-80g-sxm")
MODEL = Transformer(8, 256, 8, 128, 1000)
EVEN = TrainingRun(16, 2, pp=4)


@pytest.mark.parametrize(
    ("layers", "parts", "own"),
    [
        (70, 12, (5, *[6] * 10, 5)),  # BLOOM's 176B
        (8, 4, (2, 2, 2, 2)),
        (61, 8, (7, 8, 8, 8, 8, 8, 8, 6)),
        (7, 4, (2, 2, 2, 1)),
        (78, 12, (6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 5)),
        (5, 4, (1, 1, 2, 1)),
    ],
)
def test_embedding_and_head_count_as_a_layer(layers: int, parts: int, own: tuple[int, ...]) -> None:
    assert balanced(layers, parts) == own


@given(st.integers(1, 200), st.integers(1, 64))
def test_no_layer_is_lost_and_no_part_is_empty(layers: int, parts: int) -> None:
    parts = min(layers, parts)
    found = balanced(layers, parts)
    assert len(found) == parts and sum(found) == layers and min(found) >= 1
    whole = [count + (i == 0) + (i == parts - 1) for i, count in enumerate(found)]
    assert layers % parts == 0 or max(whole) - min(whole) <= 2


def test_the_fullest_stage_sets_the_pace() -> None:
    """With many micro-batches a step is the slots of the slowest stage; layers given as they would be are no change."""
    run = replace(EVEN, batch=256)
    even, given = (estimate(MODEL, r, A100, Host()) for r in (run, replace(run, stage_layers=(2, 2, 2, 2))))
    assert (even.step_seconds, even.memory) == (given.step_seconds, given.memory)
    layer = pieces(build(MODEL, run, A100), A100).layer
    each = layer.forward_seconds + layer.backward_seconds
    wide = estimate(MODEL, replace(run, stage_layers=(1, 5, 1, 1)), A100, Host())
    slots = run.micro_batches * 5 * each
    assert slots < wide.step_seconds < even.step_seconds + (run.micro_batches + 3) * 3 * each
    assert wide.memory.peak > even.memory.peak
    assert sum(part for _, part in wide.parts) == pytest.approx(wide.step_seconds)


def test_chunks_of_a_stage_may_differ() -> None:
    run = replace(EVEN, pp=2, schedule="interleaved", interleave=2, stage_layers=(1, 2, 3, 2))
    assert part_layers(MODEL, run) == (1, 2, 3, 2)
    assert layers_of(MODEL, run, 0) == (1, 3) and layers_of(MODEL, run, 1) == (2, 2)
    assert estimate(MODEL, run, A100).step_seconds > 0


def test_the_command_takes_and_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"layers": 7, "hidden": 256, "heads": 8, "sequence": 128, "vocabulary": 1000, "batch": 16, "pp": 4}
    words = ["estimate", "--hardware", "a100-80g-sxm", *(w for k, v in sizes.items() for w in (f"--{k}", str(v)))]
    assert main(words) == 0
    assert "layers of its stages: 2 x 3, 1\n" in capsys.readouterr().out
    assert main([*words, "--stage-layers", "1,2,2,2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["stage_layers"] == [1, 2, 2, 2]
    assert main([*words, "--stage-layers", "2,2,x"]) == 2
    assert "--stage-layers" in capsys.readouterr().err
