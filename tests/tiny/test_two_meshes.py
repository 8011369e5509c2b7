"""What travels between two meshes, against a look at each element of the tensor."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from autoshard.constraints.step_request import StagePin, StepRequest
from autoshard.errors import UsageError
from autoshard.ir.layout import PARTIAL, Layout, Partial, Shard, local_sizes, parse_placement
from autoshard.ir.mesh import Mesh
from autoshard.redistribute.two_meshes import On, transfers

MESHES = ("a=1", "a=2", "b=3", "a=2,b=2", "a=2,b=3", "a=4")


def drawn(rng: random.Random) -> tuple[tuple[int, ...], On, On]:
    """A shape, and a layout on each of two meshes; the first holds no sum."""
    shape = tuple(rng.choice((1, 2, 5, 6, 7, 12)) for _ in range(rng.randint(0, 2)))
    return shape, _on(rng, shape, ("R", "R+")), _on(rng, shape, ("R", "R+", "P"))


def _on(rng: random.Random, shape: tuple[int, ...], whole: tuple[str, ...]) -> On:
    mesh = Mesh.parse(rng.choice(MESHES))
    shards = [f"S{dim}" for dim in range(len(shape))]
    shards += [f"S{dim}/{n}" for dim, size in enumerate(shape) for n in (2, 3) if size % n == 0]
    shards += [f"S{dim}*{n}" for dim, size in enumerate(shape) for n in (2, 3) if size % n == 0]
    texts = [rng.choice(whole) if rng.random() < 0.4 or not shards else rng.choice(shards) for _ in mesh.axes]
    return mesh, Layout(tuple(map(parse_placement, texts)))


def elements(shape: tuple[int, ...], on: On, rank: int) -> set[tuple[int, ...]]:
    """The global positions that a device holds."""
    mesh, layout = on
    dims = []
    for size in local_sizes(shape, layout, mesh):
        runs = size.intervals(mesh, mesh.coordinates(rank)) if size.shards else [(0, size.size)]
        dims.append([i for start, stop in runs for i in range(start, stop)])
    return set(itertools.product(*dims))


def owners(first: On, rank: int) -> tuple[int, ...]:
    """What makes a device other than its replicas: its coordinates on the axes that shard."""
    mesh, layout = first
    return tuple(c for c, p in zip(mesh.coordinates(rank), layout.placements, strict=True) if isinstance(p, Shard))


def test_each_reader_gets_each_element_once() -> None:
    rng = random.Random(0)
    for _ in range(600):
        shape, first, second = drawn(rng)
        sent = transfers(shape, first, second)
        mesh, layout = second
        for receiver in range(mesh.size):
            at = mesh.coordinates(receiver)
            alone = all(at[axis] == 0 for axis, p in enumerate(layout.placements) if isinstance(p, Partial))
            wanted = elements(shape, second, receiver) if alone else set()
            senders = [sender for sender, to in sent if to == receiver]
            parts = [elements(shape, first, sender) & wanted for sender in senders]
            assert set().union(*parts) == wanted
            assert sum(map(len, parts)) == len(wanted), "an element comes twice"
            assert [len(part) for part in parts] == [sent[sender, receiver] for sender in senders]
            assert len({owners(first, sender) for sender in senders}) == len(senders)


def test_replicas_share_what_is_sent() -> None:
    whole, cut = (Mesh.parse("a=4"), Layout.parse("R")), (Mesh.parse("b=2,c=2"), Layout.parse("S0 R"))
    sent = dict.fromkeys(range(4), 0)
    for (sender, _), count in transfers((8, 3), whole, cut).items():
        sent[sender] += count
    assert sent == dict.fromkeys(range(4), 12)
    # back, a gradient that is a sum over c was added up there: each of four gets all of it, once
    assert sum(transfers((8, 3), cut, whole).values()) == 4 * 24


def test_a_sum_is_entered_once() -> None:
    summed = Mesh.parse("b=2,c=2"), Layout((PARTIAL, PARTIAL))
    assert transfers((5,), (Mesh.parse("a=2"), Layout.parse("S0")), summed) == {(0, 0): 3, (1, 0): 2}
    assert math.prod(()) == 1 and transfers((), (Mesh.parse("a=2"), Layout.parse("R")), summed) == {(0, 0): 1}


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (("dp=2",), "expected a place and its mesh"),
        (("one:dp=2",), "expected a place and its mesh"),
        (("-1:dp=2",), "expected a place and its mesh"),
        (("1:",), "the mesh is empty"),
        (("1:dp=0",), "size 0"),
        (("1:dp",), "expected name=size"),
        (("1:dp=2,dp=2",), "named twice"),
        (("1:dp=2", "1:tp=2"), "place 1 twice"),
        (("2:dp=2",), "there are places 0 to 1"),
    ],
)
def test_a_mesh_that_cannot_be(texts: tuple[str, ...], told: str) -> None:
    request = StepRequest(places=(StagePin("a", 0), StagePin("b", 1)), place_mesh=texts)
    with pytest.raises(UsageError, match=told) as raised:
        request.check_place_meshes()
    assert raised.value.hints if hasattr(raised.value, "hints") else str(raised.value)


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (StepRequest(place_mesh=("1:dp=2",)), "a model without places"),
        (StepRequest(place_mesh=("1:dp=2",), stages=2), "a model without places"),
        (StepRequest(place_mesh=("1:dp=2",), stages=2, place="none"), "--place none"),
    ],
)
def test_places_that_there_are_not(request_: StepRequest, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        request_.check_place_meshes()
