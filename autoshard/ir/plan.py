"""The Plan: every decision of a search. With the graph it reproduces everything after it, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.ir.graph import Derives
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh

SCHEMA_VERSION = 8
SCHEDULES = ("gpipe", "1f1b", "interleaved")
KEEP_ALL = "all"
COMMUNICATED = "communicated"
# of a block's values, until its backward; the most first
KEEPS = (KEEP_ALL, f"expensive+{COMMUNICATED}", "expensive", COMMUNICATED, "input")
PLAIN = {f"expensive+{COMMUNICATED}": "expensive", COMMUNICATED: "input"}  # what is kept beside what collectives gave
KEEP_SOME = "some: "  # and of its products and attention those named behind, as in `policy_results`
ATTENTION = "attention"


@dataclass(frozen=True)
class Parts:
    """Costs of one choice by the additive model, on the device that holds most; all parts add up to the objective.

    `compute_seconds`: forward and backward, or the optimizer's update; `repeated_seconds`: what of it other devices do
    too. `communication_seconds`: collectives inside it, and the redistributions made for it (for the first of several
    consumers). `memory_bytes`: what it keeps alive at the peak. `runner_up`: the best other choice while all else
    stays, `runner_up_seconds`: what it would cost more; "" if there is no other.
    """

    compute_seconds: float = 0.0
    repeated_seconds: float = 0.0
    communication_seconds: float = 0.0
    memory_bytes: float = 0.0
    runner_up: str = ""
    runner_up_seconds: float = 0.0


@dataclass(frozen=True)
class OpPlan:
    """The strategy of one op (choices as text, mesh order), its variant, predicted seconds, and who decided."""

    op: str
    strategy: str
    variant: str
    forward_seconds: float
    backward_seconds: float
    decided_by: str = "search"
    parts: Parts = Parts()


@dataclass(frozen=True)
class TensorPlan:
    """Stored layout of an input, parameter or buffer. `name` is the graph tensor, `path` what a user calls it."""

    name: str
    path: str
    layout: Layout
    decided_by: str = "search"
    parts: Parts = Parts()


@dataclass(frozen=True)
class PlanStep:
    """One step of a redistribution: `axes` go from `before` to `after` (placements as text) at once.

    `forward` and `backward` name what it does to the value and the gradient, as in `Collective`.
    """

    axes: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    forward: str
    backward: str

    def __str__(self) -> str:
        return f"{' '.join(self.before)} → {' '.join(self.after)} over {' and '.join(self.axes)}"


OUTPUT, BUFFER_UPDATE = "output", "buffer update"  # consumers that are no operator


@dataclass(frozen=True)
class RedistributionPlan:
    """One materialisation: graph tensor `tensor` from `source` to `target`, step by step, for `consumers`: names of
    operators, OUTPUT or BUFFER_UPDATE.

    Seconds are predicted, forward and backward.
    """

    tensor: str
    source: Layout
    target: Layout
    consumers: tuple[str, ...]
    steps: tuple[PlanStep, ...]
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class Certificate:
    """The solver's word on the additive problem, in seconds: objective of this plan and a bound on every plan's.

    `level_objective` and `level_bound` are the same for what the level minimises: seconds of communication and
    repeated work (level 0), bytes (level 1), seconds (level 2). A bound of 0 says nothing.
    """

    solver: str
    status: str
    objective_seconds: float
    lower_bound_seconds: float
    level_objective: float = 0.0
    level_bound: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A whole plan that was simulated: how it was found, its objective, and the step and memory of its program.

    `outcome`: chosen, not better, or too large.
    """

    name: str
    outcome: str
    objective_seconds: float
    predicted_seconds: float
    predicted_peak_bytes: float


@dataclass(frozen=True)
class MeshTried:
    """One mesh of the mesh search. `outcome`: chosen, slower, not better, too large, not faster, out of time.

    `bound_seconds` is what no plan on it can be below; the predictions are 0 where no plan was made on it.
    """

    mesh: Mesh
    outcome: str
    bound_seconds: float = 0.0
    predicted_seconds: float = 0.0
    predicted_peak_bytes: float = 0.0


@dataclass(frozen=True)
class StepTried:
    """A whole step that a search of steps found: its outer choice, what its blocks compute again (`again`), seconds by
    the costs of its blocks and of its own program (0 where it was not made a plan), bytes of its fullest device.
    `outcome`: chosen, or why not."""

    stages: int
    virtual_stages: int
    schedule: str
    replicas: int
    tensor: int
    micro_batches: int
    micro_batch: int  # samples of one replica
    zero: int
    again: str
    outcome: str
    blocks_seconds: float
    program_seconds: float
    peak_bytes: float
    context: int = 1
    expert: int = 1


@dataclass(frozen=True)
class SizeStep:
    """A step at dynamic sizes that `weight` of all steps have: what this plan takes, what the plan that is best there
    takes, and what no plan takes less than (0: nothing is proved)."""

    sizes: tuple[tuple[str, int], ...]
    weight: float
    seconds: float
    best_seconds: float
    bound_seconds: float


@dataclass(frozen=True)
class Search:
    """Record of what a search was asked and tried. `pins` as typed; `notes` are sentences that a reader must not miss.

    For whole steps: `step_options` are the options that ask for this one, `steps` those that were found, the chosen one
    first, and `step_messages` how far any other could be better, what that covers, and what was left out.
    """

    level: int = 2
    pins: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    meshes: tuple[MeshTried, ...] = ()
    notes: tuple[str, ...] = ()
    outputs_seconds: float = 0.0  # redistributions that only the end of the step needs: no choice's part
    all_to_all: bool = True  # may redistributions exchange
    cut_short: bool = False  # by the clock, or Ctrl-C
    step_options: str = ""
    steps: tuple[StepTried, ...] = ()
    step_messages: tuple[str, ...] = ()
    sizes: tuple[SizeStep, ...] = ()  # of a plan for a histogram of sizes

    @property
    def expected_seconds(self) -> float:
        """The mean step over its sizes; 0 without any."""
        return sum(point.weight * point.seconds for point in self.sizes)


@dataclass(frozen=True)
class StagePart:
    """Part `chunk * stages + stage` of the model: from operator `first_op` on, in the graph's order, to the next.

    Of a placed model: part `chunk` of place `stage`, which has the operators `ops`, in the graph's order; a part reads
    nothing of a later one.
    """

    stage: int
    chunk: int
    first_op: str
    ops: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockPolicy:
    """Results that backward finds of the block at `module`, a path: "all", "expensive" (its inputs, products and
    attention), "communicated" (its inputs, and what collectives of activations gave), "expensive+communicated", "input"
    (its inputs alone) or "some: ..." (its inputs, and of its products and attention those that `policy_results` reads
    there). The rest is recomputed, and collectives run again."""

    module: str
    keep: str


def policy_results(keep: str) -> tuple[tuple[str, str], ...]:
    """(place, module) of each result that a policy names: `some: 0 attn.c_attn, attention attn` is what the first
    linear layer of the block makes, in the order in which they run, and what attention makes. ValueError for others."""
    parts = tuple(tuple(part.split(" ")) for part in keep.removeprefix(KEEP_SOME).split(", "))
    pairs = tuple(
        (part[0], part[1]) for part in parts if len(part) == 2 and (part[0] == ATTENTION or part[0].isdecimal())
    )
    if not keep.startswith(KEEP_SOME) or len(pairs) < len(parts):
        raise ValueError(keep)
    return pairs


@dataclass(frozen=True)
class StepPlan:
    """How one optimizer step is made of micro-batches, each the batch that the graph was captured with.

    Without `parts` there is one stage. Ranks count through the stages, each with its mesh: the plan's, or of a place
    its own (`Plan.place_plans`).
    Blocks that `recompute` does not name keep all. Predicted are the seconds of the whole step and the bytes of its
    fullest device; 0 of a step of one micro-batch, of which the plan says them. `samples`: of a micro-batch over the
    mesh, where the step was searched for and the graph is the captured one at that batch; 0: as captured.

    `zero`, of weights that are stored in shards: 3 gathers them for every forward and again for its backward; 1 and 2
    gather them once a step; 1 adds up whole gradients and scatters them once, 2 and 3 those of each micro-batch.

    Of stages on several kinds of devices the fullest is that which uses most of what its devices have, which is
    `capacity_bytes`; 0: that of the plan.

    `batch_shares`, where devices take unequal ones: each micro-batch is split into as many slices as the first axis of
    the mesh has coordinates, and these are the slices of a step that the devices of each coordinate compute.
    """

    micro_batches: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1  # parts of each stage
    parts: tuple[StagePart, ...] = ()
    recompute: tuple[BlockPolicy, ...] = ()
    predicted_seconds: float = 0.0
    predicted_peak_bytes: float = 0.0
    samples: int = 0
    zero: int = 3
    capacity_bytes: float = 0.0
    places: tuple[tuple[str, int], ...] = ()  # module -> the place that a user gave it
    batch_shares: tuple[int, ...] = ()

    @property
    def placed(self) -> bool:
        """Are the stages places: parts of a graph that need not be a chain?"""
        return any(part.ops for part in self.parts)

    @property
    def word(self) -> str:
        """Word for one of its stages."""
        return "place" if self.placed else "stage"

    @property
    def part_stages(self) -> tuple[int, ...]:
        """The stage of each part."""
        return tuple(part.stage for part in self.parts) or (0,)

    def parts_of(self, stage: int) -> tuple[int, ...]:
        """The numbers of the parts on a stage, in the order of the model."""
        return tuple(number for number, place in enumerate(self.part_stages) if place == stage)

    @property
    def keeps(self) -> dict[str, str]:
        """Module -> what is kept of it, where that is not all."""
        return {policy.module: policy.keep for policy in self.recompute if policy.keep != KEEP_ALL}

    @property
    def is_whole(self) -> bool:
        """Is a step more than one micro-batch on one stage that keeps all?"""
        return self.micro_batches > 1 or bool(self.parts) or bool(self.recompute)

    @property
    def stages(self) -> int:
        return len({part.stage for part in self.parts}) or 1


FUSED = ("all_reduce", "all_gather")  # what is fused: gradients; weights, with the reduce-scatters of theirs
FUSIONS = ("none", "size", "index", "auto")


@dataclass(frozen=True)
class Fusion:
    """How collectives of one kind go together, if a user asked for it: one of FUSED, by one of FUSIONS.

    A bucket closes with `bucket_bytes` of one device, of "auto" by the cost model. "index": a new bucket begins with
    each of the gradients `first`, counted as backward completes them.
    """

    collective: str
    mode: str
    bucket_bytes: float = 0.0
    first: tuple[int, ...] = ()


@dataclass(frozen=True)
class SizeBucket:
    """Decisions for steps with no dynamic size above `most`; inputs and stored tensors keep the plan's layouts."""

    most: tuple[tuple[str, int], ...]
    ops: tuple[OpPlan, ...]
    redistributions: tuple[RedistributionPlan, ...]

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Does a step of these sizes belong to the bucket?"""
        return all(sizes[name] <= size for name, size in self.most)


@dataclass(frozen=True)
class ServerPlan:
    """Parameter servers, and workers of one device each, between `workers` and `most_workers`; `count` 0: none.

    A micro-batch is a share of a step. `staleness`: how many updates old a gradient may be, None where all shares of a
    step are of the same parameters. `tables`: paths of parameters whose rows alone are read; `rowwise`: these are
    trained by row-wise Adagrad. Predicted: seconds of a step, of a share on its worker, of the update on a server, and
    that each worker and server is busy in a step; bytes of a share pulled and pushed, and of the fullest server.
    """

    count: int = 0
    workers: int = 1
    most_workers: int = 1
    staleness: int | None = None
    tables: tuple[str, ...] = ()
    rowwise: bool = True
    step_seconds: float = 0.0
    share_seconds: float = 0.0
    update_seconds: float = 0.0
    worker_busy_seconds: float = 0.0
    server_busy_seconds: float = 0.0
    pulled_bytes: float = 0.0
    pushed_bytes: float = 0.0
    server_bytes: float = 0.0


@dataclass(frozen=True)
class PlacePlan:
    """Decisions on the mesh that a place has for itself: for the whole model, of which it runs its parts."""

    place: int
    mesh: Mesh
    inputs: tuple[TensorPlan, ...]
    parameters: tuple[TensorPlan, ...]
    buffers: tuple[TensorPlan, ...]
    ops: tuple[OpPlan, ...]
    redistributions: tuple[RedistributionPlan, ...]


@dataclass(frozen=True)
class Plan(Derives):
    graph_hash: str
    model: str  # what the user named: file.py:callable, package.module:callable, file.pt2, file.graph.json
    model_arguments: tuple[tuple[str, str | int | float | bool], ...]  # keyword arguments given to the callable
    mesh: Mesh
    hardware: str  # profile name
    hardware_text: str  # the resolved profile, verbatim TOML
    precision: str
    optimizer: str
    inputs: tuple[TensorPlan, ...]
    parameters: tuple[TensorPlan, ...]
    buffers: tuple[TensorPlan, ...]
    ops: tuple[OpPlan, ...]
    redistributions: tuple[RedistributionPlan, ...]
    predicted_seconds: float  # of one step
    predicted_peak_bytes: float  # per device
    capacity_bytes: float
    certificate: Certificate
    versions: tuple[tuple[str, str], ...] = ()
    search: Search = Search()
    step: StepPlan = StepPlan()
    fusion: tuple[Fusion, ...] = ()  # of what none is said, buckets are as `program` makes them
    buckets: tuple[SizeBucket, ...] = ()  # from small to large; of larger steps the plan's own decisions hold
    servers: ServerPlan = ServerPlan()
    place_plans: tuple[PlacePlan, ...] = ()  # of places with a mesh of their own

    def of_place(self, place_plan: PlacePlan) -> Plan:
        """Plan of the whole model on the mesh of that place."""
        decided = {name: getattr(place_plan, name) for name in PLACED_FIELDS}
        return replace(self, **decided, place_plans=())

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Mesh of each stage."""
        meshes = {other.place: other.mesh for other in self.place_plans}
        return tuple(meshes.get(stage, self.mesh) for stage in range(self.step.stages))

    def first_rank(self, place: int) -> int:
        """First rank of a place, or of any stage."""
        meshes = {other.place: other.mesh for other in self.place_plans}
        return sum(meshes.get(before, self.mesh).size for before in range(place))

    @property
    def where(self) -> str:
        """Meshes in words."""
        return meshes_text(self.meshes, self.step.word)

    def of_bucket(self, bucket: SizeBucket) -> Plan:
        """Plan of the bucket's steps alone."""
        return replace(self, ops=bucket.ops, redistributions=bucket.redistributions, buckets=())

    def at_sizes(self, sizes: Mapping[str, int]) -> Plan:
        """Plan of a step of these dynamic sizes."""
        bucket = next((bucket for bucket in self.buckets if bucket.holds(sizes)), None)
        return self if bucket is None else self.of_bucket(bucket)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the whole step."""
        return self.step.predicted_seconds or self.predicted_seconds

    @property
    def judged_seconds(self) -> float:
        """Seconds by which plans are compared: the expected step over a histogram of sizes, or the whole step."""
        return self.search.expected_seconds or self.step_seconds

    @property
    def step_peak_bytes(self) -> float:
        """Peak bytes of the whole step, on the device that holds most."""
        return self.step.predicted_peak_bytes or self.predicted_peak_bytes

    @property
    def step_capacity_bytes(self) -> float:
        """Bytes that a plan may use of the device with that peak."""
        return self.step.capacity_bytes or self.capacity_bytes

    def peak_within(self, limit_bytes: float) -> float:
        """Peak bytes of the whole step, scaled to a device that has `limit_bytes`."""
        capacity = self.step.capacity_bytes
        return self.step_peak_bytes * limit_bytes / capacity if capacity else self.step_peak_bytes

    @property
    def devices(self) -> int:
        """Number of devices of all stages, or of all workers of parameter servers."""
        workers = self.servers.most_workers if self.servers.count else 1
        return sum(mesh.size for mesh in self.meshes) * workers


PLACED_FIELDS = ("mesh", "inputs", "parameters", "buffers", "ops", "redistributions")


def meshes_text(meshes: Sequence[Mesh], word: str) -> str:
    """`dp=2 on each of 3 places`, or `place 0: dp=2, place 1: dp=2,tp=2`."""
    if len(set(meshes)) > 1:
        return ", ".join(f"{word} {number}: {mesh}" for number, mesh in enumerate(meshes))
    return f"{meshes[0]} on each of {len(meshes)} {word}s" if len(meshes) > 1 else str(meshes[0])
