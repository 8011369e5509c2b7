"""A mean over labels keeps its share of a step's labels in whatever expression it stands, on one stage and on two."""

from __future__ import annotations

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.search.fixed_styles import random_plan
from autoshard.search.whole_step import with_step
from autoshard.verification.case import check_files, make_case
from tests.label_models import LOSSES, build

SPEC = f"{build.__code__.co_filename}:build"
RUN = ("scaled", "auxiliary", "the same twice", "stacked", "likelihood", "ignored", "masked", "positions")
NOT_COUNTED = ("unreduced", "of probabilities")


@pytest.mark.parametrize("name", LOSSES)
def test_the_step_is_that_of_the_original(name: str) -> None:
    graph = capture(SPEC, {"name": name})
    plan = random_plan(graph, Mesh.parse("tp=2"), load_hardware("cpu-local"), 1)
    one = with_step(plan, graph, StepRequest(micro_batches=3))
    program = lower(one, graph)
    files = emit(program, one, graph)
    assert files["model_parallel.py"].count("counted(") == len(program.label_counts)
    assert bool(program.label_counts) == (name not in NOT_COUNTED)
    two = with_step(plan, graph, StepRequest(micro_batches=2, stages=2))
    parts = [text for file, text in emit(lower(two, graph), two, graph).items() if file.startswith("part_")]
    assert sum(text.count("counted(") for text in parts) == len(program.label_counts)
    if name in RUN:
        case = make_case(SPEC, {"name": name}, graph, steps=2, micro_batches=3)
        proof = check_files(case, program, files)
        assert proof.passed, proof.failure
