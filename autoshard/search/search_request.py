"""Request for a search, from the command line or a program to the solvers: one object, never changed."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from autoshard.cluster.hardware import Hardware
from autoshard.constraints.fusion_request import read_fusion
from autoshard.constraints.pins import Pin, read_pins
from autoshard.constraints.size_histogram import MOST_POINTS, SizePoint
from autoshard.constraints.step_request import PLACE_PIN, STAGE_PIN, StepRequest
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.program.step_check import micro_batches_of
from autoshard.search.build_plan import Origin
from autoshard.search.objectives import SPEED
from autoshard.servers.server_request import ServerRequest
from autoshard.styles.known_styles import STYLES
from autoshard.system.disk_cache import DiskCache

SOLVER = "auto"
SEARCHED = ("best", *STYLES)  # strategies that are searched for; the others are `random:SEED`


@dataclass(frozen=True)
class SearchRequest:
    """A user's request for a plan; None or empty if a field was not set.

    Either `mesh`, or `devices` for a search over meshes. `strategy`: "best", a style of `STYLES`, or "random:SEED".
    `level`: 0 ratio, 1 memory, 2 speed. `memory_limit_bytes` None: what the profile allows a device. `pins` as
    `WHAT=HOW`, further ones from `pins_file`. `pareto` asks for the front of time against memory. `origin`: the model
    as the user named it. `step`: micro-batches, stages and recomputation; with stages, `mesh` is that of each. `fuse`:
    which collectives go together, see fusion_request.py. `sizes`: how often steps have which dynamic sizes; without any
    the plan is for the largest. `buckets`: into how many of these sizes a plan may be split. `servers`: parameter
    servers, whose workers are devices by themselves. `cache`: results of earlier searches; it changes no plan.
    """

    mesh: Mesh | None = None
    devices: int | None = None
    strategy: str = "best"
    level: int = SPEED
    solver: str | None = None
    ilp_engine: str | None = None
    pins: tuple[str, ...] = ()
    pins_file: Path | None = None
    memory_limit_bytes: float | None = None
    time_limit_seconds: float | None = None
    pareto: bool = False
    all_to_all: bool = True
    origin: Origin = field(default_factory=Origin)
    step: StepRequest = field(default_factory=StepRequest)
    fuse: tuple[str, ...] = ()
    sizes: tuple[SizePoint, ...] = ()
    buckets: int = 1
    servers: ServerRequest = field(default_factory=ServerRequest)
    cache: DiskCache | None = field(default=None, repr=False, compare=False)

    @property
    def searches_step(self) -> bool:
        """True if stages, micro-batches, recomputation, ZeRO and the mesh are searched for together."""
        return self.mesh is None and self.step.global_batch is not None

    @property
    def solver_name(self) -> str:
        return self.solver or SOLVER

    def of_one_stage(self) -> SearchRequest:
        """Request with the devices of one of its stages, if a search is to lay them out. UsageError if stages would not
        get equally many."""
        stages = self.step.fixed_stages()
        if self.mesh is not None or stages == 1 or self.searches_step:
            return self
        assert self.devices is not None
        if self.devices % stages:
            near = max(count for count in range(1, stages) if self.devices % count == 0)
            message = f"{self.devices} devices are not equally many for each of {stages} stages"
            raise UsageError(message, f"--stages {near}, or --devices {-(-self.devices // stages) * stages}")
        return replace(self, devices=self.devices // stages)

    def pins_on(self, mesh: Mesh) -> tuple[Pin, ...]:
        """Pins in the words of `mesh`. UsageError if one names an axis or a layout that does not exist."""
        texts = tuple(text for text in self.pins if not text.startswith((STAGE_PIN, PLACE_PIN)))
        return read_pins(texts, self.pins_file, mesh)

    def searches_parts(self, graph: Graph) -> bool:
        """True if each mesh of places also gets decisions for what these run alone. False if a style, a pin or a size
        decides, or if the search for places decides what each runs."""
        meshes = (self.mesh, *self.step.place_meshes.values())
        free = self.strategy == "best" and self.level in (1, 2) and not graph.dynamic and self.step.place is None
        return free and len(meshes) > 1 and not any(self.pins_on(mesh) for mesh in meshes if mesh)

    def origin_of(self, graph: Graph) -> Origin:
        """Origin: the model, and the requests for all its plans."""
        origin = self.origin if self.origin.model else Origin(graph.source)
        return replace(origin, fusion=read_fusion(self.fuse))

    def check_servers(self) -> None:
        """Raises UsageError if parameter servers can't be."""
        if not self.servers.said:
            return
        self.servers.check(self.mesh, self.devices, self.step)
        others = {"--sizes": bool(self.sizes), "--pareto": self.pareto, "--fuse": bool(self.fuse)}
        others |= {f"--strategy {self.strategy}": self.strategy != "best"}
        for option, is_set in others.items():
            if is_set:
                raise UsageError(f"{option} and parameter servers: a worker is one device", f"no {option}")

    def check_buckets(self) -> None:
        """Raises UsageError if buckets can't be."""
        if type(self.buckets) is not int or not 1 <= self.buckets <= MOST_POINTS:
            message = f"--buckets {self.buckets}: expected a whole number from 1 to {MOST_POINTS}"
            raise UsageError(message, "--buckets 2")
        reasons = {
            "without --sizes": not self.sizes and "they are buckets of the sizes that steps have",
            f"with --level {self.level}": self.level != SPEED and "buckets are chosen by time",
            f"with --strategy {self.strategy}": self.strategy != "best" and "the plan of each is searched for",
            "with --global-batch and no --mesh": self.searches_step and "such a search has one plan for all sizes",
            "with stages": self.step.fixed_stages() > 1 and "stages and places run one plan at all sizes",
        }
        for what, reason in reasons.items():
            if self.buckets > 1 and reason:
                hint = '--sizes "batch=8:3;batch=64:1"' if not self.sizes else "--buckets 1"
                raise UsageError(f"--buckets {self.buckets} {what}: {reason}", hint)

    def random_seed(self) -> int | None:
        """Seed of a random plan, None for a searched one. UsageError if there is no such strategy."""
        kind, _, seed = self.strategy.partition(":")
        if kind != "random":
            if self.strategy not in SEARCHED:
                near = difflib.get_close_matches(self.strategy, SEARCHED, 1)
                known = f"--strategy {', '.join(SEARCHED)} or random:SEED"
                raise UsageError(f"unknown strategy {self.strategy!r}", f"--strategy {near[0]}" if near else known)
            return None
        if not re.fullmatch("[0-9]{1,18}", seed):
            message = f"--strategy {self.strategy[:40]}: expected a whole number of at most 18 digits after the colon"
            raise UsageError(message, "--strategy random:1")
        if self.mesh is None:
            raise UsageError("--strategy random needs a mesh", "--mesh dp=2,tp=2")
        return int(seed)

    def check_kinds(self, hardware: Hardware) -> None:
        """Raises UsageError for features that several kinds of devices do not have."""
        if hardware.kinds and self.memory_limit_bytes is not None:
            message = "--memory-limit is one for all devices, and each kind of device has its own"
            raise UsageError(message, "usable_memory in a copy of a profile: autoshard profiles NAME > mine.toml")
        if hardware.kinds and self.servers.said:
            raise UsageError("--parameter-servers on several kinds of devices", "a profile of one kind")

    def ignored(self) -> tuple[str, ...]:
        """Sentences about options that have no effect."""
        notes = []
        if self.strategy.startswith("random"):
            said = {
                "--level": self.level != SPEED,
                "--solver": self.solver is not None,
                "--pin": bool(self.pins),
                "--pins": self.pins_file is not None,
                "--memory-limit": self.memory_limit_bytes is not None,
                "--time-limit": self.time_limit_seconds is not None,
                "--pareto": self.pareto,
            }
            reason = "is ignored: a random plan is not searched for"
            notes += [f"{option} {reason}" for option, is_set in said.items() if is_set]
        if self.ilp_engine is not None and self.solver != "ilp":
            notes.append("--ilp-engine is ignored: it is for --solver ilp")
        return tuple(notes)


def micro_batches(graph: Graph, request: SearchRequest) -> int:
    """Number of micro-batches of a step, each `graph`'s batch. UsageError unless it divides the global batch."""
    if request.step.global_batch is not None:
        return micro_batches_of(graph, request.step.global_batch)
    return request.step.micro_batches or 1
