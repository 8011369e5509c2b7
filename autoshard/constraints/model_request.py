"""Requests of the model's own modules for a step; the command line takes precedence over them."""

from __future__ import annotations

from dataclasses import replace

from autoshard.constraints.step_request import NO_PLACES, StagePin, StepRequest
from autoshard.errors import UsageError
from autoshard.ir.graph import FUSION, Graph
from autoshard.ir.plan import COMMUNICATED

# among what a graph's modules ask for -> what is kept of them
RECOMPUTED = {"recompute": "input", f"recompute:{COMMUNICATED}": COMMUNICATED}


def with_requests(request: StepRequest, graph: Graph, searched: bool = False) -> StepRequest:
    """`request`, completed by the graph's model where it leaves things open: stages of modules, the number of
    micro-batches. `searched`: see `StepRequest.check`."""
    said = {pin.path for pin in request.pins}
    pins = tuple(StagePin(path, int(n)) for path, n in _values(graph, "stage") if path not in said)
    known = {pin.path for pin in request.places}
    place_pins = [StagePin(path, int(n)) for path, n in _values(graph, "place") if path not in known]
    places = (*request.places, *(place_pins if request.place != NO_PLACES else ()))
    stages = request.stages
    if places and stages is None:
        stages = 1 + max(pin.stage for pin in places)
    if pins and stages is None:
        stages = 1 + max(pin.stage for pin in (*request.pins, *pins))
    if stages == 1 and all(pin.stage == 0 for pin in pins):
        pins = ()  # all on one stage: there is no pipeline
    counts = [int(n) for _, n in _values(graph, "micro_batches")]
    count = request.micro_batches
    if counts and count is None and request.global_batch is None:
        count = counts[0]
    completed = replace(request, pins=(*request.pins, *pins), places=places, stages=stages, micro_batches=count)
    if completed != request:
        completed.check(searched)
    return completed


def without_idle_place(request: StepRequest, graph: Graph) -> StepRequest:
    """`request` without a `--place none` that has no effect."""
    idle = request.place == NO_PLACES and not _values(graph, "place")
    return replace(request, place=None) if idle else request


def asks_of_the_step(graph: Graph) -> bool:
    """True if the model requests anything of its step except fused collectives."""
    return any(not how.startswith(f"{FUSION}:") for _, how in graph.module_requests)


def asks_to_recompute(graph: Graph) -> bool:
    """True if the model wants any of its blocks recomputed."""
    return any(what in RECOMPUTED for _, what in graph.module_requests)


def recomputed_blocks(graph: Graph, blocks: tuple[str, ...], inside: bool = False) -> dict[str, str]:
    """Blocks of `blocks` that the model wants recomputed, with what each keeps; with `inside`, also modules in a block,
    or in none. UsageError for one that is neither a block nor holds one, or has no operator."""
    keeps: dict[str, str] = {}
    for path, what in graph.module_requests:
        if what not in RECOMPUTED:
            continue
        matching = [block for block in blocks if not path or block == path or block.startswith(f"{path}.")]
        if not matching and inside and any(op.module == path or op.module.startswith(f"{path}.") for op in graph.ops):
            matching = [path]
        if not matching:
            raise _no_recompute(path, blocks, inside)
        keeps |= dict.fromkeys(matching, RECOMPUTED[what])
    return keeps


def _no_recompute(path: str, blocks: tuple[str, ...], inside: bool) -> UsageError:
    if inside:
        message = f"recompute() of {path}: it makes no operator of the model"
        return UsageError(message, "recompute() of a module that does, or of what holds it")
    known = f": blocks are {blocks[0]} to {blocks[-1]}" if blocks else ""
    message = f"recompute() of {path}: a search of whole steps computes items of lists of modules again, whole{known}"
    return UsageError(message, "recompute() of a block, or of what holds blocks; or --mesh dp=2,tp=2 --stages 1")


def _values(graph: Graph, what: str) -> list[tuple[str, str]]:
    return [(path, how.removeprefix(f"{what}:")) for path, how in graph.module_requests if how.startswith(f"{what}:")]
