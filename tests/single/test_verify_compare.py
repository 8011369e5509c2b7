"""Every rank against its part of the reference: what is right passes, what is wrong is named with its rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoshard.ir.layout import Layout, local_sizes
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import LocalValue, Program, ProgramParameter
from autoshard.verification.comparison.compare import RankResult, RankStep, compare_ranks, local_part
from autoshard.verification.comparison.rounding_noise import Noise, StepNoise, amplified
from autoshard.verification.comparison.tolerances import Error, compare, largest
from autoshard.verification.original.reference import Reference, ReferenceStep

MESH = Mesh.parse("dp=2,tp=2")
SHAPES = {"qkv": (12, 5), "bias": (5,), "head": (7, 5)}
LAYOUTS = {"qkv": "R S0/3*2", "bias": "R R", "head": "S0 S0", "mean": "S0 R", "loss": "P R", "logits": "S0 R"}


def program() -> Program:
    def parameter(name: str, shape: tuple[int, ...]) -> ProgramParameter:
        layout = Layout.parse(LAYOUTS[name])
        return ProgramParameter(name, name, (), shape, "float32", layout, shape, layout, True)

    def value(name: str, shape: tuple[int, ...]) -> LocalValue:
        layout = Layout.parse(LAYOUTS[name])
        return LocalValue(name, name, shape, "float32", layout, local_sizes(shape, layout, MESH), True)

    values = (value("loss", ()), value("logits", (5, 3)))
    parameters = tuple(parameter(name, shape) for name, shape in SHAPES.items())
    buffers = (parameter("mean", (3,)),)
    return Program(
        "net", MESH, values, (), parameters, buffers, (), ("loss", "logits"), "loss", (), (), (), "fp32", "adamw", True
    )  # fmt: skip


def reference() -> Reference:
    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64)

    torch.manual_seed(0)
    state = {name: random(shape) for name, shape in SHAPES.items()}
    steps = tuple(
        ReferenceStep(
            (), (random(()), random((5, 3))), 2.0, {n: random(s) for n, s in SHAPES.items()}, {"mean": random((3,))}
        )
        for _ in range(2)
    )
    return Reference(state, {}, {name: random(shape) for name, shape in SHAPES.items()}, steps, 0)


def correct(expected: Reference) -> list[RankResult]:
    def part(name: str, full: torch.Tensor, rank: int) -> torch.Tensor:
        return local_part(full, Layout.parse(LAYOUTS[name]), MESH, rank)

    def step(rank: int, s: ReferenceStep) -> RankStep:
        loss = s.outputs[0] * (0.3, 0.7)[MESH.coordinates(rank)[0]]  # a partial sum on each dp rank
        return RankStep(
            (loss, part("logits", s.outputs[1], rank)),
            s.norm,
            {n: part(n, x, rank) for n, x in s.parameters.items()},
            {n: part(n, x, rank) for n, x in s.buffers.items()},
        )

    return [
        RankResult(
            {n: part(n, x, rank) for n, x in expected.gradients.items()}, tuple(step(rank, s) for s in expected.steps)
        )
        for rank in range(MESH.size)
    ]


def errors(results: list[RankResult]) -> list[Error]:
    return [error for error in compare_ranks(program(), reference(), results) if error.failed]


def test_what_is_right_passes() -> None:
    compared = list(compare_ranks(program(), reference(), correct(reference())))
    assert not [error for error in compared if error.failed]
    assert len(compared) == 4 * (2 * 2 + 3 + 2 * (1 + 3 + 1))


def test_local_parts_follow_blocks_units_and_nesting() -> None:
    full = torch.arange(12)
    assert local_part(full, Layout.parse("R S0/3*2"), MESH, 1).tolist() == [2, 3, 6, 7, 10, 11]
    assert [local_part(torch.arange(7), Layout.parse("S0 S0"), MESH, rank).tolist() for rank in range(4)] == [
        [0, 1], [2, 3], [4, 5], [6]
    ]  # fmt: skip
    assert local_part(torch.arange(1), Layout.parse("S0 R"), MESH, 2).tolist() == []


def test_an_unflattened_parameter_is_the_same_parameter() -> None:
    results = correct(reference())
    results = [replace(r, gradients=r.gradients | {"qkv": r.gradients["qkv"].reshape(3, 1, 2, 5)}) for r in results]
    assert not errors(results)


def test_a_permuted_qkv_is_named() -> None:
    results = correct(reference())
    wrong = results[2].gradients["qkv"].reshape(3, 2, 5)[[1, 0, 2]].reshape(6, 5)
    results[2] = replace(results[2], gradients=results[2].gradients | {"qkv": wrong})
    assert [(e.kind, e.name, e.rank) for e in errors(results)] == [("gradient", "qkv", 2)]


def test_a_partial_loss_is_summed_and_each_group_must_agree() -> None:
    results = correct(reference())
    first = results[3].steps[0]
    results[3] = replace(
        results[3], steps=(replace(first, outputs=(first.outputs[0] * 2, first.outputs[1])), results[3].steps[1])
    )
    assert [(e.kind, e.name, e.rank) for e in errors(results)] == [
        ("output", "loss", 1),
        ("output", "loss", 3),
    ]


def test_a_replica_that_drifts_is_named() -> None:
    results = correct(reference())
    last = results[1].steps[1]
    drifted = replace(last, parameters=last.parameters | {"bias": last.parameters["bias"] * (1 + 1e-8)})
    results[1] = replace(results[1], steps=(results[1].steps[0], drifted))
    assert [(e.kind, e.name, e.rank) for e in errors(results)] == [("parameter", "bias", 1)]


@pytest.mark.parametrize("kind", ["gradient", "buffer", "output", "norm"])
def test_what_is_missing_or_off_is_named(kind: str) -> None:
    results = correct(reference())
    step = results[0].steps[0]
    changes = {
        "gradient": lambda: replace(
            results[0], gradients={n: g for n, g in results[0].gradients.items() if n != "head"}
        ),
        "buffer": lambda: replace(results[0], steps=(replace(step, buffers={}), results[0].steps[1])),
        "output": lambda: replace(results[0], steps=(replace(step, outputs=step.outputs[:1]), results[0].steps[1])),
        "norm": lambda: replace(results[0], steps=(replace(step, norm=2.1), results[0].steps[1])),
    }
    results[0] = changes[kind]()
    problems = {(e.kind, e.name, e.rank, e.problem) for e in errors(results)}
    assert (
        problems
        == {
            "gradient": {("gradient", "head", 0, "missing")},
            "buffer": {("buffer", "mean", 0, "missing")},
            "output": {("output", "logits", 0, "missing")},
            "norm": {("gradient", "global norm", 0, "")},
        }[kind]
    )


def one_loss_each(losses: tuple[float, ...], norms: tuple[float, ...]) -> Reference:
    """The reference with these losses and norms, and nothing else to compare the outputs with."""
    before = reference()
    steps = tuple(
        replace(s, outputs=(torch.tensor(loss, dtype=torch.float64), 0 * s.outputs[1]), norm=norm)
        for s, loss, norm in zip(before.steps, losses, norms, strict=True)
    )
    return replace(before, steps=steps)


def moved(results: list[RankResult], number: int, loss: float, norm: float) -> list[RankResult]:
    """The loss of step `number` moved by `loss` on the first partial sum, every norm by `norm`."""

    def step(rank: int, s: RankStep) -> RankStep:
        offset = loss if MESH.coordinates(rank)[0] == 0 else 0.0
        return replace(s, outputs=(s.outputs[0] + offset, *s.outputs[1:]), norm=s.norm + norm)

    return [
        replace(r, steps=tuple(step(rank, s) if i == number else s for i, s in enumerate(r.steps)))
        for rank, r in enumerate(results)
    ]


def test_a_loss_that_is_learnt_by_heart_is_measured_by_what_it_was() -> None:
    """A loss of 3e-8 is the difference of numbers of size ten: it can't be right to 1e-9 of itself."""
    expected = one_loss_each((12.7, 3e-8), (700.0, 3e-5))

    def failed(number: int, loss: float, norm: float) -> list[str]:
        results = moved(correct(expected), number, loss, norm)
        return sorted({error.name for error in compare_ranks(program(), expected, results) if error.failed})

    assert failed(1, 1e-15, 3e-14) == []
    assert failed(1, 1e-13, 0.0) == ["loss"] and failed(1, 0.0, 1e-11) == ["global norm"]
    assert failed(0, 2e-8, 0.0) == ["loss"] and failed(0, 0.0, 1e-6) == ["global norm"]


def test_rounding_moves_the_norm_too() -> None:
    expected = reference()
    noise = Noise({}, (StepNoise((0.0, 0.0)), StepNoise((0.0, 0.0), norm=1e-6)))
    results = moved(correct(expected), 1, 0.0, 1e-7)
    assert [error for error in compare_ranks(program(), expected, results) if error.failed]
    assert not [error for error in compare_ranks(program(), expected, results, noise) if error.failed]


def test_outputs_that_are_compared_loosely_are_told() -> None:
    expected = one_loss_each((10.0, 5.0), (1.0, 1.0))
    assert amplified(expected, Noise({}, (StepNoise((1e-9, 0.0)), StepNoise((1e-9, 0.0))))) == ()
    (note,) = amplified(expected, Noise({}, (StepNoise((1e-9, 0.0)), StepNoise((64e-7, 0.0)))))
    assert note == "outputs compared to 6e-07 in step 2: rounding alone moves the original's by 1e-08"


def test_infinities_are_compared_as_they_are() -> None:
    """A causal mask in a buffer: the same places and signs, and what is finite beside it by its own scale."""
    mask = torch.full((3, 3), -torch.inf, dtype=torch.float64).triu(1)
    mask[0, 0] = 2.0
    wrong, turned, near = mask.clone(), mask.clone(), mask.clone()
    wrong[2, 0], turned[0, 1], near[0, 0] = -torch.inf, torch.inf, 2.1
    scale = largest([mask])
    assert scale == 2.0 and largest([torch.tensor([torch.inf])]) == 0.0

    def error(actual: torch.Tensor, expected: torch.Tensor = mask) -> Error:
        return compare("buffer", "mask", 0, 1, actual, expected, scale)

    assert not error(mask.clone()).failed
    assert all(error(actual).failed for actual in (wrong, turned, near, mask.clone().fill_(torch.nan)))
    assert error(mask, mask.clone().fill_(torch.nan)).failed and error(wrong, torch.zeros_like(mask)).failed
