"""Configurations that a search may choose: all ways to train a transformer on N devices, but for fixed settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from autoshard.cluster.hardware import Hardware
from autoshard.errors import UsageError
from autoshard.estimate.transformer import SHARDED, Schedule, TrainingRun, Transformer, is_possible, wrong
from autoshard.step_corrections.shared_sequences import shared_sequences
from autoshard.step_corrections.software import PACKAGES

FREE = ("tp", "sequence_parallel", "dp", "pp", "cp", "interleave", "micro_batch", "recompute", "zero", "ep")
SEARCHED = ["none", "selective", "full"]  # of recomputation


@dataclass(frozen=True)
class RunSpace:
    """`run` gives the batch and all settings that are not searched; `fixed` the values that a user pinned."""

    model: Transformer
    run: TrainingRun
    devices: int
    fixed: Mapping[str, object]


def runs(space: RunSpace, hardware: Hardware) -> Iterator[TrainingRun]:
    """All possible configurations, micro-batches ascending. Unless it is fixed, tensor parallelism stays in a node, and
    a sequence is shared only if each device keeps `LEAST_TOKENS` of it."""
    return (run for run in configurations(space, hardware) if is_possible(space.model, run))


def configurations(space: RunSpace, hardware: Hardware) -> Iterator[TrainingRun]:
    """All configurations, possible or not."""
    unknown = sorted(set(space.fixed) - set(FREE))
    if unknown:
        raise UsageError(f"can't fix {', '.join(unknown)}: a search chooses {', '.join(FREE)}", "")
    model, batch = space.model, space.run.batch
    for tp in _choices(space, "tp", [d for d in divisors(space.devices) if d <= hardware.devices_per_node]):
        if space.devices % tp:
            continue
        stages = _choices(space, "pp", divisors(space.devices // tp))
        for pp, cp in product(stages, _choices(space, "cp", _shared_sequences(space))):
            dp = space.devices // (tp * pp * cp)
            if space.devices % (tp * pp * cp) or dp != space.fixed.get("dp", dp) or batch % dp or model.layers < pp:
                continue
            chunks = divisors(model.layers // pp) if pp > 1 and model.layers % pp == 0 else [1]
            inner = (
                _choices(space, "sequence_parallel", [False, True] if tp > 1 else [False]),
                _choices(space, "interleave", chunks),
                _choices(space, "micro_batch", divisors(batch // dp)),
                _choices(space, "recompute", SEARCHED),
                _choices(space, "zero", _zeros(space.run, dp * cp)),
                _choices(space, "ep", divisors(math.gcd(dp, model.experts)) if model.experts else [1]),
            )
            for sequence_parallel, interleave, micro_batch, recompute, zero, ep in product(*inner):
                schedule: Schedule = "interleaved" if interleave > 1 else "1f1b"
                yield replace(
                    space.run, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, micro_batch=micro_batch, schedule=schedule,
                    interleave=interleave, recompute=recompute, zero=zero, sequence_parallel=sequence_parallel,
                )  # fmt: skip


def _shared_sequences(space: RunSpace) -> list[int]:
    """Numbers of devices that may share a sequence, powers of two: one in packages and without fused attention."""
    run, model = space.run, space.model
    if run.cp > 1 or run.software == PACKAGES or model.attention == "unfused":
        return [run.cp]
    return shared_sequences(space.devices, model.sequence)


def _zeros(run: TrainingRun, replicas: int) -> list[int]:
    if replicas == 1:
        return [0]
    return [2, 3] if run.precision in SHARDED else [0, 1, 2, 3]


def _choices(space: RunSpace, name: str, free: list) -> list:  # type: ignore[type-arg]
    return [space.fixed[name]] if name in space.fixed else free


def divisors(number: int) -> list[int]:
    """Divisors of a number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def check_none(space: RunSpace, runs: Iterable[TrainingRun]) -> None:
    """Raises if none of the `runs` of the space is possible: UsageError if the fixed settings do not divide the
    devices, or if all have an error."""
    message = _undivided(space) or "; ".join(_wrong_in_all(space.model, runs))
    if message:
        raise UsageError(message, "see `autoshard estimate --help`")


def _undivided(space: RunSpace) -> str:
    shared = space.fixed.get("cp", space.run.cp)
    sizes: dict[str, int] = {"cp": shared} if isinstance(shared, int) and shared > 1 else {}
    sizes |= {name: size for name in ("tp", "pp", "dp") if isinstance(size := space.fixed.get(name), int)}
    product_, words = math.prod(sizes.values()), " x ".join(f"{name} {size}" for name, size in sizes.items())
    if space.devices % product_:
        return f"{words} does not divide {space.devices} devices"
    return f"{words} makes {product_} devices, not {space.devices}" if sizes.keys() >= {"tp", "pp", "dp"} else ""


def _wrong_in_all(model: Transformer, runs: Iterable[TrainingRun]) -> list[str]:
    left: dict[str, None] | None = None
    for run in runs:
        left = dict.fromkeys(text for text in wrong(model, run) if left is None or text in left)
        if not left:
            break
    return list(left or ())
