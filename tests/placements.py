"""Random places of a model's operators: of modules, as a user places them, or of each operator."""

from __future__ import annotations

import random

from autoshard.errors import UsageError
from autoshard.ir.graph import Graph
from autoshard.ir.plan import StagePart
from autoshard.program.schedules.placed_parts import op_places, parts_on, rewritten

MESHES = ("dp=1", "dp=2", "tp=2", "tp=3", "dp=2,tp=2")


def random_meshes(places: int, seed: int) -> tuple[str, ...]:
    """As `--place-mesh` takes them, of about half of the places."""
    rng = random.Random(f"meshes {seed}")
    return tuple(f"{place}:{rng.choice(MESHES)}" for place in range(places) if rng.random() < 0.5)


def random_parts(graph: Graph, seed: int) -> tuple[StagePart, ...]:
    """On 2 to 4 places, of which each has work."""
    rng = random.Random(seed)
    count = rng.randint(2, 4)
    if rng.random() < 0.5:
        places = [rng.randrange(count) for _ in graph.ops]
    else:
        paths = sorted({op.module for op in graph.ops})
        some = rng.sample(paths, rng.randint(1, len(paths)))
        places = op_places(graph, {path: rng.randrange(count) for path in some})
    for group in rewritten(graph):
        places = [places[group[0]] if i in group else place for i, place in enumerate(places)]
    known = sorted(set(places))
    if len(known) == 1:
        raise UsageError("one place", "another seed")
    return parts_on(graph, [known.index(place) for place in places])
