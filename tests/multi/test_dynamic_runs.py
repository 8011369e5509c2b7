"""Packages whose batches have another size in each step: what a run takes, and how it ends where one can't be taken."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.ir.mesh import Mesh
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.verification.case import check_files, make_case
from autoshard.verification.sizing.dynamic_steps import step_sizes
from autoshard.workflow import make_plan
from tests.captured import captured
from tests.dynamic_models import spec
from tests.launched import torchrun

ROOT = Path(__file__).resolve().parents[2]
WORDS = "batch=4..32/4,sequence=8..64/8"
LOADER = """
import torch

def batch(rows, length, seed=0):
    source = torch.Generator().manual_seed(100 * rows + length + seed)
    ids = torch.randint(0, 23, (rows, length), generator=source)
    return ids, ids

SIZES = [(4, 8), (16, 24), (8, 64), (32, 16), (12, 40), (4, 64), (28, 8), (20, 56), (8, 8), (24, 32)]

def growing():
    yield from (batch(*size) for size in SIZES)

def parts(mesh):
    for rows, length in SIZES:
        ids, labels = batch(rows, length)
        own = rows // 2
        at = own * mesh.coordinates["dp"]
        yield ids[at:at + own], labels[at:at + own]

def alone(rank):
    for n in range(4):
        yield batch(6 if rank == 1 and n == 2 else 8, 8)

def unequal(rank):
    for n in range(4):
        yield batch(12 if rank == 1 and n == 2 else 8, 8)

def apart():
    yield batch(8, 8)[0], batch(8, 16)[1]

def large():
    yield batch(64, 8)

def odd():
    yield from (batch(rows, 8 * (1 + rows % 3) - rows % 5) for rows in (6, 4, 14, 2, 30))

def rows():
    yield batch(8, 8)[0][0], batch(8, 8)[1]
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("dynamic") / "package", WORDS)


def written(folder: Path, sizes: str, dropout: float = 0.1) -> Path:
    graph = captured(spec("words"), {"dropout": dropout}, dynamic=(sizes,))
    wanted = SearchRequest(Mesh.parse("dp=2"), strategy="fsdp")
    plan = make_plan(graph, load_hardware("cpu-local"), wanted).plan
    write_package(folder, emit(lower(plan, graph), plan, graph))
    (folder.parent / "data.py").write_text(LOADER)
    return folder


def losses(package: Path, loader: str, *options: object, steps: int = 10) -> list[float]:
    log = package.parent / f"{loader}.json"
    log.unlink(missing_ok=True)
    arguments = ("--backend", "gloo", "--steps", steps, "--seed", 5, "--data", f"{package.parent}/data.py:{loader}")
    ended = torchrun(package / "train.py", 2, *arguments, "--log-json", log, *options)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def test_ten_sizes_in_ten_steps_whole_or_in_parts(package: Path) -> None:
    whole = losses(package, "growing")
    assert len(whole) == 10 and losses(package, "parts", "--own-parts") == pytest.approx(whole, rel=1e-5)


def test_padding_leaves_losses_and_gradients_as_they_are(tmp_path: Path) -> None:
    """Of rows and lengths that are no multiples, compared with a plan that takes them as they are; trained on, too."""
    package = written(tmp_path / "one" / "package", WORDS, dropout=0.0)
    free = written(tmp_path / "two" / "package", "batch=2..32/2,sequence=3..64", dropout=0.0)
    assert losses(package, "odd", "--pad", steps=5) == pytest.approx(losses(free, "odd", steps=5), rel=1e-5)
    parts = ("--backend", "gloo", "--pad", "--own-parts", "--data", f"{package.parent}/data.py:odd")
    ended = torchrun(package / "train.py", 2, *parts)
    assert ended.returncode == 2 and "no rank knows the whole batch" in ended.stderr


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ("alone", r"on rank 1: batch of 6 \(dim 0 of ids, dim 0 of labels\): expected a multiple of 4 from 4 to 32"),
        ("unequal", r"--data: step 3: ranks got batches of different sizes: batch from 8 to 12"),
        ("apart", r"sequence: the inputs of a batch disagree: dim 1 of ids is 8, dim 1 of labels is 16"),
        ("large", r"batch of 64 .*: expected a multiple of 4 from 4 to 32"),
        ("rows", r"input 'ids': expected 2 dims, got the shape \(8,\)"),
    ],
)  # fmt: skip
def test_a_size_that_can_t_be_ends_all_ranks_with_one_sentence(package: Path, loader: str, message: str) -> None:
    options = ("--backend", "gloo", "--steps", 4, "--data", f"{package.parent}/data.py:{loader}")
    ended = torchrun(package / "train.py", 2, *options)
    assert ended.returncode == 2
    said = [line for line in ended.stderr.splitlines() if line.startswith("error")]
    assert len(said) == 1 and re.search(message, said[0]), ended.stderr
    assert "try:" in ended.stderr


def test_synthetic_batches_are_drawn_or_of_one_size(package: Path) -> None:
    ended = torchrun(package / "train.py", 2, "--backend", "gloo", "--steps", 4)
    assert ended.returncode == 0 and ended.stdout.count("step ") == 4
    fixed = torchrun(package / "train.py", 2, "--backend", "gloo", "--steps", 2, "--sizes", "batch=8,sequence=16")
    assert fixed.returncode == 0
    sizes = ("--batch-size", 8, "--sequence-length", 16)
    other = torchrun(package / "train.py", 2, "--backend", "gloo", "--steps", 2, *sizes)
    numbers = [re.findall(r"loss \S+", text.stdout) for text in (fixed, other)]
    assert numbers[0] == numbers[1]
    for text in ("batch=6", "rows=4", "batch=x"):
        wrong = torchrun(package / "train.py", 2, "--backend", "gloo", "--sizes", text)
        assert 2 in wrong.codes and "batch" in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2])
def test_stages_compute_the_shapes_of_what_is_handed_on(stages: int) -> None:
    graph = captured(spec("words"), {}, dynamic=(WORDS,))
    wanted = SearchRequest(Mesh.parse("dp=2"), step=StepRequest(micro_batches=3, stages=stages))
    plan = make_plan(graph, load_hardware("cpu-local"), wanted).plan
    program = lower(plan, graph)
    files = emit(program, plan, graph)
    assert "lambda batch, sequence:" in files["part_1.py"]
    case = make_case(spec("words"), {}, graph, micro_batches=3, sizes=step_sizes(graph))
    proof = check_files(case, program, files, "gloo")
    assert proof.passed, proof.failure


@pytest.mark.slow
def test_the_documented_example() -> None:
    """On 8 processes, another batch in each step, each loss that of one process."""
    ended = torchrun(ROOT / "examples" / "dynamic_shapes.py", 8)
    assert ended.returncode == 0, ended.stderr
    steps = re.findall(r"batch (\d+), loss (\S+), of one process (\S+)", ended.stdout)
    assert len(steps) == 5 and len({batch for batch, *_ in steps}) > 3
    for _, split, alone in steps:
        assert float(split) == pytest.approx(float(alone), rel=1e-5)
