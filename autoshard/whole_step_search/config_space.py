"""Outer choices of a whole step: stages, their parts, schedule, replicas, the axes of each, micro-batch, ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import merge

from autoshard.cluster.hardware import Hardware
from autoshard.constraints.step_request import ZERO_LEVELS
from autoshard.errors import UsageError
from autoshard.units import counted
from autoshard.whole_step_search.blocks.context_expert_axes import CONTEXT, EXPERT, TENSOR, second_axes, unsearched

AUTO = "auto"
Inner = tuple[tuple[str, int], ...]  # of them, (name, size)


@dataclass(frozen=True)
class ConfigSpace:
    """Choices that a search may make. None: everything that divides.

    `keeps` has `KEEP_SOME` if each kind of block may keep some of its results, tensor by tensor. `blocks`: length of
    the longest run of equal ones; `line`: all blocks. `micro_batch`: samples of one replica and pass.
    """

    devices: int
    global_batch: int
    line: int
    blocks: int
    stages: tuple[int, ...] | None = None
    virtual_stages: tuple[int, ...] | None = None
    schedules: tuple[str, ...] | None = None
    tensor: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] | None = None
    zero: tuple[int, ...] | None = None
    keeps: tuple[str, ...] = ("all", "expensive", "input")
    pinned: bool = False  # blocks to stages: parts of a stage then lie together
    shared: str = ""  # a weight that all blocks of that run read: of several parts each would train it
    least_stages: int = 1  # that pins name
    context: tuple[int, ...] | None = (1,)  # None: as `long_tokens` and `experts` offer
    expert: tuple[int, ...] | None = (1,)
    long_tokens: int = 0  # of the longest sequence
    experts: int = 0  # that every layer of experts has, or a multiple of it
    equal_shares: bool = False  # of the batch, on several kinds of devices, too


@dataclass(frozen=True)
class ParallelConfig:
    """`micro_batches` of `micro_batch` samples on each of `replicas`; every stage has replicas x context x expert x
    tensor devices. At least one of the second axis's sizes, cp and ep, is 1."""

    stages: int
    virtual_stages: int
    schedule: str
    replicas: int
    tensor: int
    micro_batch: int
    micro_batches: int
    zero: int
    context: int = 1
    expert: int = 1

    @property
    def inner(self) -> Inner:
        """The axes of a replica's devices, tp the innermost."""
        second = ((CONTEXT, self.context), (EXPERT, self.expert))
        return (*((name, size) for name, size in second if size > 1), (TENSOR, self.tensor))

    def __str__(self) -> str:
        parts = f", {self.virtual_stages} parts each" if self.virtual_stages > 1 else ""
        staged = f"{self.stages} stages{parts} ({self.schedule}), " if self.stages > 1 else ""
        zero = f", ZeRO {self.zero}" if self.zero else ""
        counts = f"{counted(self.micro_batches, 'micro-batch')} of {self.micro_batch}"
        inner = ", ".join(f"{name}={size}" for name, size in self.inner)
        return f"{staged}dp={self.replicas}, {inner}, {counts}{zero}"


@dataclass
class RejectedConfigs:
    """Reasons why configurations were rejected, in words, each with how often it was met."""

    reasons: dict[str, int] = field(default_factory=dict)

    def no(self, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


def parallel_configs(
    space: ConfigSpace, hardware: Hardware, log: RejectedConfigs | None = None
) -> Iterator[ParallelConfig]:
    """Every choice whose sizes divide. Tensor parallelism stays in a node, unless its size is given."""
    log = log or RejectedConfigs()
    most = min(space.line, space.devices)
    for message in unsearched(space.context, space.expert, (space.long_tokens, space.experts)):
        log.no(message)
    for stages in space.stages or divisors(space.devices, most):
        if space.devices % stages:
            log.no(f"{space.devices} devices are not divided by {stages} stages")
            continue
        if stages < space.least_stages:
            log.no(f"a pin names stage {space.least_stages - 1}, and there would be {counted(stages, 'stage')}")
            continue
        if stages > space.line:
            message = f"{counted(space.line, 'block')} for {stages} stages, which are cut between blocks"
            log.no(f"{message} (--mesh with --stages shards inside them, too)")
            continue
        inner = space.devices // stages
        for tensor in space.tensor or [d for d in divisors(inner) if d <= hardware.devices_per_node]:
            if inner % tensor:
                log.no(f"{inner} devices of a stage are not divided by tp={tensor}")
                continue
            for context, expert in _second_axes(space, inner // tensor, tensor, hardware, log):
                configs = _of_mesh(space, stages, inner // (tensor * context * expert), tensor, log)
                yield from (replace(choice, context=context, expert=expert) for choice in configs)


def _second_axes(
    space: ConfigSpace, devices: int, tensor: int, hardware: Hardware, log: RejectedConfigs
) -> Iterator[tuple[int, int]]:
    """Pairs (cp, ep) of the second axis. With tp=1 one within a node is left out: it does what tp of its size does."""

    def apart(size: int) -> bool:
        return tensor > 1 or size > hardware.devices_per_node

    return second_axes(devices, apart, space.context, space.expert, (space.long_tokens, space.experts), log.no)


def _of_mesh(
    space: ConfigSpace, stages: int, replicas: int, tensor: int, log: RejectedConfigs
) -> Iterator[ParallelConfig]:
    if space.global_batch % replicas:
        log.no(f"a batch of {space.global_batch} is not divided by {replicas} replicas")
        return
    samples = space.global_batch // replicas
    for micro_batch in space.micro_batch or divisors(samples):
        if samples % micro_batch:
            log.no(f"{samples} samples of a replica are not divided by micro-batches of {micro_batch}")
            continue
        count = samples // micro_batch
        if count < stages:
            log.no("fewer micro-batches than stages")
            continue
        for zero in space.zero or (ZERO_LEVELS if replicas > 1 else (0,)):
            if zero and replicas == 1:
                log.no("ZeRO needs several replicas")
                continue
            for virtual, schedule in _schedules(space, stages, count, log):
                yield ParallelConfig(stages, virtual, schedule, replicas, tensor, micro_batch, count, zero)


def _schedules(space: ConfigSpace, stages: int, count: int, log: RejectedConfigs) -> Iterator[tuple[int, str]]:
    """Pairs (virtual stages, schedule). 1F1B takes GPipe's time with less memory, so GPipe is only tried on request."""
    if stages == 1:
        if space.virtual_stages in (None, (1,)) or 1 in (space.virtual_stages or ()):
            yield 1, "1f1b"
        return
    wanted = space.schedules or ("1f1b", "interleaved")
    for virtual in space.virtual_stages or divisors(space.blocks):
        if virtual == 1:
            for schedule in wanted:
                if schedule != "interleaved":
                    yield 1, schedule
            continue
        if "interleaved" not in wanted:
            continue
        reason = _not_interleaved(space, stages, virtual, count)
        if reason:
            log.no(reason)
            continue
        yield virtual, "interleaved"


def _not_interleaved(space: ConfigSpace, stages: int, virtual: int, count: int) -> str:
    """Reason why stages can't have `virtual` parts with `count` micro-batches; "" if they can."""
    if space.pinned:
        return "pins of stages leave one part to a stage"
    if space.shared:
        return f"several parts of one stage would train {space.shared}"
    if count % stages:
        return "stages of several parts take micro-batches in groups, one for each stage"
    if space.blocks % virtual or space.blocks < stages * virtual:
        message = (
            "stages of several parts need equal blocks in a row, one for each part at least, that the parts divide"
        )
        return f"{message}: there are {space.blocks}"
    return ""


def what_divides(space: ConfigSpace, hardware: Hardware) -> str:
    """Options to type when nothing divides: the nearest batches that do, else the numbers of stages that may."""
    batch, parts = space.global_batch, space.micro_batch or (1,)  # only their multiples may be divided
    lower = merge(*(range((batch - 1) // m * m, 0, -m)[: space.devices] for m in parts), reverse=True)
    upper = merge(*(range((batch // m + 1) * m, (batch // m + 1 + space.devices) * m, m) for m in parts))
    near = (next((size for size in each if _divides(space, hardware, size)), None) for each in (lower, upper))
    batches = [str(size) for size in near if size]
    if batches:
        return f"--global-batch {' or '.join(batches)}"
    stages = [s for s in divisors(space.devices, min(space.line, space.devices)) if s >= space.least_stages]
    other = f"--stages {', '.join(map(str, stages))}, or " if space.stages and stages else ""
    return f"{other}other numbers of devices or samples"


def _divides(space: ConfigSpace, hardware: Hardware, batch: int) -> bool:
    return any(True for _ in parallel_configs(replace(space, global_batch=batch), hardware))


def divisors(number: int, most: int | None = None) -> list[int]:
    """Divisors of `number`, ascending, at most `most`."""
    return [d for d in range(1, min(number, most or number) + 1) if number % d == 0]


def read_choices(option: str, text: str | int | None) -> tuple[int, ...] | None:
    """Sizes from `auto`, a number or numbers with commas, each once. UsageError for anything else."""
    if text in (None, AUTO):
        return None
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in str(text).split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{option} {text}: expected auto, or numbers from 1 on with commas", f"{option} auto")
    return numbers
