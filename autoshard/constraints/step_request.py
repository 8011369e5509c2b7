"""Requests of a user for a whole training step: micro-batches, stages, the schedule, what backward recomputes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields

from autoshard.code_text import typed
from autoshard.constraints.axis_names import check_axis_names
from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import COMMUNICATED, SCHEDULES
from autoshard.program.step_check import check_counts

AUTO = "auto"
# as said -> what a block keeps
RECOMPUTE = {
    "none": "all",
    "selective+communicated": f"expensive+{COMMUNICATED}",
    "selective": "expensive",
    "communicated": COMMUNICATED,
    "full": "input",
}
SEARCHED = ("none", "selective", "full")  # where nothing is said; with more a search takes up to a fifth longer
TENSORS = "tensors"  # in a search: what some of the results are kept of, tensor by tensor (ir.plan.KEEP_SOME)
STAGE_PIN = "stage:"
PLACE_PIN = "place:"
NO_PLACES = "none"
EQUAL = "equal"  # shares of the batch
PINNED = ("pins", "places")  # fields of a StepRequest that pins say
Count = int | str | None  # AUTO, numbers with commas, or None where nothing was said
THRESHOLD_KB = 64  # MindSpore's: parameters of no more stay whole under its parallel optimizer
ZERO_LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True)
class StagePin:
    """Modules at `path`, and all inside them, are on `stage`, or on the place with that number."""

    path: str
    stage: int


@dataclass(frozen=True)
class StepRequest:
    """A field is None where nothing was given. `global_batch`: samples a step; the captured batch is one micro-batch.

    Where a step is searched for, each may be AUTO or several with commas; `micro_batch` is of one replica, and devices
    that share a block may have a second axis, cp or ep. `enable_parallel_optimizer` and the two after it are
    MindSpore's words for `zero` 1, or 2 where accumulated gradients are sharded too; the threshold in KB.
    """

    micro_batches: int | None = None
    global_batch: int | None = None
    stages: Count = None
    virtual_stages: Count = None
    schedule: str | None = None
    recompute: str | None = None
    pins: tuple[StagePin, ...] = ()
    places: tuple[StagePin, ...] = ()
    # AUTO: which place runs what no place says is searched for; NO_PLACES: what the model says of places has no effect
    place: str | None = None
    place_mesh: tuple[str, ...] = ()  # as typed: `1:dp=2,tp=2`, the mesh of place 1 alone
    micro_batch: Count = None
    zero: Count = None
    enable_parallel_optimizer: bool = False
    gradient_accumulation_shard: bool = False
    parallel_optimizer_threshold: int | None = None
    context_parallel: Count = None
    expert_parallel: Count = None
    batch_shares: str | None = None

    @property
    def zero_levels(self) -> tuple[int, ...]:
        """Stages of ZeRO that are asked for; all for AUTO, none where nothing was given. UsageError for others."""
        if self.enable_parallel_optimizer:
            return (2,) if self.gradient_accumulation_shard else (1,)
        if self.zero is None:
            return ()
        words = [str(n) for n in ZERO_LEVELS] if self.zero == AUTO else str(self.zero).split(",")
        if any(word.strip() not in map(str, ZERO_LEVELS) for word in words):
            raise UsageError(f"--zero {self.zero}: expected auto, or of 0, 1, 2, 3 with commas", "--zero auto")
        return tuple(dict.fromkeys(int(word) for word in words))

    @property
    def threshold_bytes(self) -> float:
        """Bytes up to which a whole parameter is not stored in shards."""
        if not self.enable_parallel_optimizer:
            return 0.0
        threshold = THRESHOLD_KB if self.parallel_optimizer_threshold is None else self.parallel_optimizer_threshold
        return 1024.0 * threshold

    @property
    def text(self) -> str:
        """The options that say this, as typed."""
        listed = (*PINNED, "place_mesh")
        named = [(field.name, getattr(self, field.name)) for field in fields(self) if field.name not in listed]
        flags = [f"--{name.replace('_', '-')}" for name, value in named if value is True]
        said = [(name, value) for name, value in named if value is not None and not isinstance(value, bool)]
        options = [f"--{name.replace('_', '-')} {typed(str(value))}" for name, value in said]
        texts = (*pin_texts(self.pins), *pin_texts(self.places, PLACE_PIN))
        pins = [f"--pin {typed(text)}" for text in texts]
        meshes = [f"--place-mesh {typed(text)}" for text in self.place_mesh]
        return " ".join([*options, *meshes, *flags, *pins])

    @property
    def place_meshes(self) -> dict[int, Mesh]:
        """Meshes of places that have one of their own. UsageError for one that can't be read, and for a place given
        twice."""
        meshes: dict[int, Mesh] = {}
        for text in self.place_mesh:
            place, colon, mesh = text.partition(":")
            if not colon or not place.strip().isdecimal():
                message = f"--place-mesh {text}: expected a place and its mesh"
                raise UsageError(message, "--place-mesh 1:dp=2,tp=2")
            if int(place) in meshes:
                raise UsageError(f"--place-mesh says the mesh of place {int(place)} twice", "one of them")
            meshes[int(place)] = check_axis_names(Mesh.parse(mesh))
        return meshes

    def check_place_meshes(self) -> None:
        """UsageError where places, which the model's own modules may name, can't have them."""
        if not self.place_mesh:
            return
        count = self.fixed_stages()
        if not (self.places or self.place == AUTO) or self.place == NO_PLACES:
            how = f"--place {self.place}" if self.place else "a model without places"
            hint = f"--pin place:MODULE={max(self.place_meshes)}, and --mesh for the others"
            raise UsageError(f"--place-mesh {self.place_mesh[0]} with {how}: there is no such place", hint)
        for place, mesh in self.place_meshes.items():
            if place >= count:
                message = f"--place-mesh {place}:{mesh}: there are places 0 to {count - 1}"
                raise UsageError(message, f"--place-mesh {count - 1}:{mesh}, or a module on place {place}")

    @property
    def open_(self) -> bool:
        """True if something is left to a search."""
        said = (self.stages, self.virtual_stages, self.schedule, self.recompute, self.micro_batch)
        return any(isinstance(value, str) and (value == AUTO or "," in value) for value in said)

    @property
    def said(self) -> bool:
        return self != StepRequest()

    @property
    def changes_memory(self) -> bool:
        """True if a device holds a part of the model, stores weights otherwise, or recomputes what it does not keep."""
        return self.fixed_stages() > 1 or self.recompute not in (None, "none") or bool(self.zero_levels)

    @property
    def order(self) -> str:
        """The schedule, where it is given or follows."""
        return self.schedule or ("1f1b" if self.virtual_stages in (None, 1) else "interleaved")

    def fixed_stages(self) -> int:
        if self.stages is None and self.places:
            return 1 + max(pin.stage for pin in self.places)
        return self.stages if isinstance(self.stages, int) else 1

    def check(self, searched: bool = False, captured: bool = True) -> None:
        """Raises UsageError where the options contradict each other, whatever the model is. `searched`: a search
        chooses what is not given of stages. Without `captured` the model's own modules may yet ask for stages."""
        if self.micro_batches is not None and self.global_batch is not None:
            raise UsageError("--micro-batches and --global-batch both say how many micro-batches a step has", "one")
        self._check_shards()
        for name in (AUTO if self.schedule is None else self.schedule).split(","):
            if name not in (AUTO, *SCHEDULES):
                raise UsageError(f"unknown schedule {name!r}", f"--schedule {' or '.join(SCHEDULES)}")
        for name in (AUTO if self.recompute is None else self.recompute).split(","):
            if name not in (AUTO, *RECOMPUTE, TENSORS):
                known = " or ".join((*RECOMPUTE, TENSORS))
                raise UsageError(f"unknown recomputation {name!r}", f"--recompute {known}")
        if self.open_:
            return
        if self.place not in (None, AUTO, NO_PLACES):
            hint = "--place auto --stages 2, or --pin place:PATH=RANK"
            raise UsageError(f"--place {self.place}: expected auto or none", hint)
        if self.place == AUTO and not isinstance(self.stages, int):
            raise UsageError("--place auto needs to know how many places there are", "--place auto --stages 2")
        if self.place == NO_PLACES and self.places:
            raise UsageError("--place none, and --pin place says where a module is", "one of them")
        if self.places or self.place == AUTO:
            self._check_places(searched)
            return
        one = self.fixed_stages() == 1 and not ((searched or not captured) and self.stages is None)
        said = {"--virtual-stages": self.virtual_stages, "--schedule": self.schedule, "--pin stage": self.pins or None}
        for option, value in said.items():
            if one and value is not None:
                raise UsageError(f"{option} is about stages, and there is one", "--stages 2")
        if self.virtual_stages not in (None, 1) and self.schedule not in (None, "interleaved"):
            raise UsageError(
                f"--virtual-stages {self.virtual_stages} with --schedule {self.schedule}: a stage has one part in it",
                "--schedule interleaved",
            )
        for pin in self.pins if self.stages is not None else ():
            if not pin.stage < self.fixed_stages():
                message = f"pin {STAGE_PIN}{pin.path}={pin.stage}: there are stages 0 to {self.fixed_stages() - 1}"
                raise UsageError(message, f"--stages {pin.stage + 1}")
        if self.micro_batches is not None:
            parts = self.virtual_stages if isinstance(self.virtual_stages, int) else 1
            check_counts(self.micro_batches, self.fixed_stages(), parts, self.order)

    def _check_places(self, searched: bool) -> None:
        workers = 1 + max((pin.stage for pin in self.places), default=0)
        workers = max(workers, self.fixed_stages()) if self.place else workers
        said = {"--virtual-stages": self.virtual_stages, "--pin stage": self.pins or None}
        for option, value in said.items():
            if value is not None:
                raise UsageError(
                    f"{option} and places both say which device runs a module", f"no {option}, or no place"
                )
        if self.stages not in (None, workers):
            message = f"a module is placed on worker {workers - 1}, and there are {self.fixed_stages()} workers"
            raise UsageError(f"{message}, one a stage", f"--stages {workers}, or no --stages")
        if searched:
            message = "places are for a mesh that is given: each place has one of its own"
            raise UsageError(message, "--mesh dp=1, and --micro-batches instead of --global-batch")

    def _check_shards(self) -> None:
        said = {
            "gradient_accumulation_shard": self.gradient_accumulation_shard,
            "parallel_optimizer_threshold": self.parallel_optimizer_threshold is not None,
        }
        for name, is_set in said.items():
            if is_set and not self.enable_parallel_optimizer:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} is about the parallel optimizer", "add --enable-parallel-optimizer")
        if self.enable_parallel_optimizer and self.zero is not None:
            message = f"--enable-parallel-optimizer and --zero {self.zero} both say where weights are stored"
            raise UsageError(message, "--zero 1 or 2 alone")
        threshold = self.parallel_optimizer_threshold
        if threshold is not None and (type(threshold) is not int or threshold < 0):
            message = f"parallel_optimizer_threshold {threshold!r}: expected a whole number of KB from 0 on"
            raise UsageError(message, f"--parallel-optimizer-threshold {THRESHOLD_KB}")
        assert self.zero_levels is not None  # it says what is wrong


def pin_texts(pins: Iterable[StagePin], kind: str = STAGE_PIN) -> list[str]:
    """Pins as typed; items of one list in a row on one stage are one pin: `stage:model.layers.0-15=0`."""
    runs: list[tuple[str, int, int, int]] = []  # before the number, first, last, stage; without a number both are -1
    for pin in pins:
        match = re.fullmatch(r"(.*?)(\d+)", pin.path)
        before, number = (match[1], int(match[2])) if match else (pin.path, -1)
        first = number
        if match and runs and (before, number - 1, pin.stage) == (runs[-1][0], *runs[-1][2:]):
            first = runs.pop()[1]
        runs.append((before, first, number, pin.stage))
    numbers = [("" if first < 0 else str(first) if first == last else f"{first}-{last}") for _, first, last, _ in runs]
    return [f"{kind}{run[0]}{number}={run[3]}" for run, number in zip(runs, numbers, strict=True)]


def read_stage_pins(texts: tuple[str, ...], kind: str = STAGE_PIN) -> tuple[StagePin, ...]:
    """Pins of `--pin` that begin with `kind`; `stage:model.layers.0-15=0` is a pin of each of the sixteen."""
    pins: list[StagePin] = []
    for text in texts:
        if not text.startswith(kind):
            continue
        what, _, stage = text.removeprefix(kind).rpartition("=")
        if not what or not stage.strip().isdecimal():
            raise UsageError(f"pin {text!r}: expected {kind}MODULE=NUMBER", f"--pin {kind}model.layers.0-15=0")
        series = re.fullmatch(r"(.*?)(\d+)-(\d+)", what.strip())
        paths = [what.strip()]
        if series:
            first, last = int(series[2]), int(series[3])
            if last < first:
                raise UsageError(
                    f"pin {text!r}: {first} to {last} is empty", f"{kind}{series[1]}{last}-{first}={stage}"
                )
            paths = [f"{series[1]}{number}" for number in range(first, last + 1)]
        pins += [StagePin(path, int(stage)) for path in paths]
    return tuple(pins)
