"""Converts an outer choice and a split to a stage problem, and a plan of it to the costs that are simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from autoshard.cluster.hardware import Hardware
from autoshard.costs.collective import joint_seconds
from autoshard.ir.graph import Derives
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import Floats
from autoshard.program.step_check import dealt
from autoshard.simulation.step_timeline import PartCosts, StageCosts, StepCosts, live_micro_batches
from autoshard.solvers.stages.least_held import least_held, of_dealt, of_every_part
from autoshard.solvers.stages.stage_problem import Front, Part, StagePlan, StageProblem
from autoshard.solvers.stages.stage_values import StageValues, stage_values
from autoshard.whole_step_search.blocks.block_costs import BlockCosts, ShardedCosts
from autoshard.whole_step_search.blocks.block_fronts import (
    ALL,
    STAGES,
    BlockFront,
    Moved,
    block_front,
    ends_seconds,
    exposed_seconds,
    late_exposed,
    moved,
    sharded_front,
    static_bytes,
    step_mesh,
    takes_turns,
)
from autoshard.whole_step_search.config_space import ParallelConfig


@dataclass(frozen=True, eq=False)
class StepProblem(Derives):
    """One outer choice with one split. `kinds[k]` of block k; `costs` and `keeps` by kind; `allowed[s, k]`: may block k
    be on stage s. `sharded`: by kind, if weights are in shards (ZeRO). `withheld_bytes`: of a stage's capacity.
    `by_stage`: if stages are on several kinds of devices, the problem with all of them on that stage's kind, with
    `cluster` for transfers between stages. `by_replica`: the same for one stage whose replicas are on several kinds: a
    micro-batch takes the harmonic mean of its times on each, as if slices could be split in any shares; the simulation
    is of the replica that takes longest, in the best shares of whole slices."""

    choice: ParallelConfig
    kinds: tuple[int, ...]
    costs: tuple[BlockCosts, ...]
    keeps: tuple[tuple[str, ...], ...]
    hardware: Hardware
    capacity_bytes: float
    allowed: np.ndarray | None = None
    sharded: tuple[ShardedCosts, ...] = ()
    withheld_bytes: float | Floats = 0.0
    by_stage: tuple[StepProblem, ...] = ()
    cluster: Hardware | None = None
    by_replica: tuple[StepProblem, ...] = ()

    def of_stage(self, stage: int) -> StepProblem:
        return self.by_stage[stage] if self.by_stage else self

    @property
    def each_kind(self) -> tuple[StepProblem, ...]:
        return tuple(dict.fromkeys(self.by_stage)) or (self,)

    @cached_property
    def capacities(self) -> Floats:
        """Bytes of a device of each stage."""
        return np.array([self.of_stage(stage).capacity_bytes for stage in range(self.choice.stages)])

    def fullest_bytes(self, peak_bytes: Sequence[float]) -> float:
        """Peak of the stage that is fullest relative to its devices' memory, scaled to `capacity_bytes`."""
        return max(
            peak if room == self.capacity_bytes else peak * self.capacity_bytes / room
            for peak, room in zip(peak_bytes, self.capacities.tolist(), strict=True)
        )

    @property
    def mesh(self) -> Mesh:
        return step_mesh(self.choice.stages, self.choice.replicas, self.choice.inner)

    @cached_property
    def fronts(self) -> tuple[BlockFront, ...]:
        """Fronts by kind."""
        kinds, zero = self.kinds, self.choice.zero
        first = self.kinds.count(kinds[0]) == 1
        if zero == 3:
            fronts = [
                sharded_front(costs, self.mesh, self.hardware, self.keeps[kind], first and kind == kinds[0])
                for kind, costs in enumerate(self.sharded)
            ]
        else:
            fronts = [
                block_front(costs, zero, self.mesh, self.hardware, self.keeps[kind], first and kind == kinds[0])
                for kind, costs in enumerate(self._each_micro_batch)
            ]
        if first and self._surely_tied:
            curve = fronts[kinds[0]]
            front = replace(curve.front, tail_seconds=curve.front.tail_seconds + self._surely_tied)
            fronts[kinds[0]] = replace(curve, front=front)
        if not self.by_replica:
            return tuple(fronts)
        each = zip(*(problem.fronts for problem in self.by_replica), strict=True)
        return tuple(
            replace(curve, front=_mean(curve.front, [f.front for f in of]))
            for curve, of in zip(fronts, each, strict=True)
        )

    def batch_shares(self, plan: StagePlan) -> tuple[int, ...]:
        """Slices of a step for each replica if there are several kinds of devices: the best shares for a plan."""
        pairs = [*zip(self.kinds, plan.points, strict=True)]
        each = {
            problem: sum(float(problem.fronts[kind].front.seconds[point]) for kind, point in pairs)
            for problem in dict.fromkeys(self.by_replica)
        }
        slices = self.choice.micro_batches * len(self.by_replica)
        return dealt([each[problem] for problem in self.by_replica], slices) if each else ()

    @property
    def _surely_tied(self) -> float:
        """Seconds in which the first and the last stage exchange gradients of weights that the last block reads too."""
        return self._copied_seconds(self.kinds[-1:]) if self.choice.stages > 1 else 0.0

    def _copied_seconds(self, kinds: Sequence[int]) -> float:
        """Seconds to exchange gradients of weights that blocks of these kinds read and another stage has."""
        replicas = self.choice.replicas
        copies = [self.costs[kind].shared for kind in kinds]
        sizes = [held.gradient_share(replicas) if self.choice.zero else held.gradient_bytes for held in copies]
        return sum(map(self._sent_seconds, sizes))

    def _sent_seconds(self, size: float) -> float:
        """Seconds to send this many bytes from one stage to another."""
        return joint_seconds(self.cluster or self.hardware, self.mesh, (STAGES,), "send_receive", size)

    @property
    def _each_micro_batch(self) -> tuple[BlockCosts, ...]:
        """Block costs with weights that are whole from the first forward of a step on."""
        zero = self.choice.zero
        return tuple(costs.once[zero - 1] for costs in self.sharded) if zero else self.costs

    def _ends(self, plan: StagePlan) -> tuple[float, float]:
        """Seconds of (forward, backward) not included in the blocks' own."""
        if self.choice.zero < 3 or self.choice.stages > 1 or len(self.kinds) < 2:
            return 0.0, 0.0

        def near(block: int) -> Moved | None:
            kind = self.kinds[block]
            if self.keeps[kind][plan.points[block]] != ALL:
                return None
            return moved(self.sharded[kind].together.moves, self.mesh, self.hardware)

        return ends_seconds(near(1), near(-2), self.sharded[self.kinds[0]].together.backward_seconds)

    @cached_property
    def least_seconds(self) -> float:
        """Seconds of one micro-batch through all blocks, each at its fastest point."""
        every = zip(*(problem.fronts for problem in self.each_kind), strict=True)
        fastest = [min(float(curve.front.seconds.min()) for curve in fronts) for fronts in every]
        return sum(fastest[kind] for kind in self.kinds)

    @property
    def any_order_least(self) -> float:
        """Lower bound on the step of every plan of this choice: work split in any shares, each stage starting once a
        micro-batch has passed those before it."""
        choice = self.choice
        if choice.virtual_stages > 1:
            one = min(
                float(curve.front.seconds.min()) for curve in self.fronts
            )  # each chunk before has a block at least
            return choice.micro_batches * self.least_seconds / choice.stages + (choice.stages - 1) / 2 * one
        return self.least_seconds / (1 - (1 - 1 / choice.micro_batches) ** choice.stages)

    def received_seconds(self, block: int) -> float:
        """Seconds to receive what a block reads from earlier stages."""
        if self.choice.stages == 1:
            return 0.0
        return self._sent_seconds(self.costs[self.kinds[block]].received_bytes)

    @cached_property
    def stage_problem(self) -> StageProblem:
        choice = self.choice
        send = self._sent_seconds(self._entering) if choice.stages > 1 and len(self.kinds) > 1 else 0.0
        handed, of_order = self._handed
        by_stage = tuple(problem.stage_problem.fronts for problem in self.by_stage)
        return StageProblem(
            _least_of(by_stage) if by_stage else tuple(curve.front for curve in self.fronts),
            self.kinds,
            choice.stages,
            choice.micro_batches,
            self.live,
            self._room,
            choice.virtual_stages,
            send,
            self.allowed,
            handed_bytes=handed,
            of_order_bytes=of_order,
            stage_fronts=by_stage,
        )

    @cached_property
    def bounding(self) -> StageProblem:
        """Stage problem whose bounds hold for every plan that fits as it is simulated: `stage_problem` spreads what
        several chunks keep evenly, and adds any block's working memory to all that is kept."""
        if self.by_stage:
            each = tuple(problem.bounding for problem in self.by_stage)
            fronts = tuple(problem.fronts for problem in each)
            first = each[0].late_beside
            return replace(self.stage_problem, fronts=_least_of(fronts), stage_fronts=fronts, late_beside=first)
        counted = replace(self.stage_problem, fronts=self._surely_held, late_beside=self._late_beside)
        problem, works = counted, self._works
        if problem.chunks == 1:
            return replace(problem, fronts=self._with_working(problem.fronts))
        kept_bytes = [front.saved_bytes for front in problem.fronts]
        working = of_dealt(self.kinds, problem.run, problem.stages, works, kept_bytes)
        return least_held(problem, self._values, working)

    @property
    def one_stage_least_bytes(self) -> float:
        """Lower bound on the bytes of a one-stage plan, 0 with more: as each block runs, what it and those before it
        keep, its working memory, and with a single micro-batch the gradients of those after it."""
        if self.choice.stages > 1:
            return 0.0
        zero = self.choice.zero == 1 and self._alone
        static, kept_bytes, most = 0.0, 0.0, 0.0
        fresh = sum(self.fresh_bytes(block) for block in range(len(self.kinds)))
        for block, kind in enumerate(self.kinds):
            curve = self.fronts[kind]
            works = [self.working_bytes(block, point) for point in range(curve.front.points)]
            most = max(most, kept_bytes + fresh + float((curve.front.saved_bytes + np.array(works)).min()))
            kept_bytes += float(curve.front.saved_bytes.min())
            static += float(curve.front.static_bytes.min()) - curve.costs.held.gradient_bytes * zero
            static -= self.fresh_bytes(block)
            fresh -= self.fresh_bytes(block)
        return static + most

    @property
    def _late_beside(self) -> float:
        """Exposed seconds for each second of collectives after the last backward (`late_exposed`); ZeRO 1 only."""
        if self.choice.zero != 1:
            return 0.0
        return 1.0 if takes_turns(self.mesh, self.hardware) else self.hardware.constant("overlap.slowdown")

    @property
    def _surely_held(self) -> tuple[Front, ...]:
        """Fronts by kind, without gradients for a single micro-batch, which finds none. Collectives after the last
        backward are counted separately, not in the first block's tail."""
        fronts = []
        for kind, curve in enumerate(self.fronts):
            absent_bytes = self.fresh_bytes(self._block[kind]) if kind in self._block else 0.0
            absent_bytes += curve.costs.held.gradient_bytes * (self._alone and self.choice.zero == 1)
            sure = self._surely_tied if kind == self.kinds[0] and self.kinds.count(kind) == 1 else 0.0
            tail = np.full(curve.front.points, curve.update_seconds + sure)
            static = curve.front.static_bytes - absent_bytes
            fronts.append(replace(curve.front, static_bytes=static, tail_seconds=tail, late_seconds=curve.late_seconds))
        return tuple(fronts)

    @cached_property
    def _block(self) -> dict[int, int]:
        """A block of each kind."""
        return {kind: number for number, kind in enumerate(self.kinds)}

    @property
    def _works(self) -> list[Floats]:
        """Working bytes of a block at each point, by kind."""
        return [
            np.array([self.working_bytes(self._block[kind], point) for point in range(curve.front.points)])
            if kind in self._block
            else np.zeros(curve.front.points)
            for kind, curve in enumerate(self.fronts)
        ]

    def _with_working(self, fronts: tuple[Front, ...]) -> tuple[Front, ...]:
        """Fronts of one chunk plus the working bytes that a stage surely needs with a block of the kind on it. The
        line's last block is its stage's."""
        works, last = self._works, self.kinds[-1]
        needed = of_every_part(self.kinds, works, [front.saved_bytes for front in fronts])
        working = [np.full(front.points, least) for front, least in zip(fronts, needed, strict=True)]
        if self.kinds.count(last) == 1:
            working[last] = np.maximum(working[last], works[last])
        return tuple(replace(front, working_bytes=each) for front, each in zip(fronts, working, strict=True))

    @cached_property
    def live(self) -> Floats:
        choice = self.choice
        return live_micro_batches(choice.schedule, choice.stages, choice.micro_batches, choice.virtual_stages)

    @property
    def _values(self) -> tuple[StageValues, ...]:
        choice = self.choice
        return stage_values(choice.schedule, choice.stages, choice.micro_batches, choice.virtual_stages)

    @cached_property
    def _entering(self) -> float:
        """Least bytes that a stage receives from the one before, for one micro-batch."""
        return min((self.costs[kind].following_bytes for kind in self.kinds[1:]), default=0.0)

    @property
    def _handed(self) -> tuple[Floats, Floats]:
        """Bytes of a stage: the output of each micro-batch that it holds, and the sends in flight that only its own
        order causes."""
        gives = np.arange(self.choice.stages) < self.choice.stages - 1
        sent = np.array([stage.sent for stage in self._values]) * (self.choice.stages > 1)
        return np.array(gives * self._entering, float), np.array(sent * self._entering, float)

    @cached_property
    def _room(self) -> Floats:
        """Bytes of each stage, without transfers between stages at its fullest moment (an input of each micro-batch is
        among what its blocks keep) and, on the last, the copy of shared parameters of the last block: blocks before it
        may stand on other stages, where the simulated step counts theirs."""
        choice = self.choice
        room = self.capacities - self.withheld_bytes
        if choice.stages > 1:
            room -= np.array([stage.beside for stage in self._values], float) * self._entering
            last = self.of_stage(choice.stages - 1).costs[self.kinds[-1]].shared
            room[-1] -= static_bytes(last, choice.zero, choice.replicas)
        return room

    def step_costs(self, plan: StagePlan) -> StepCosts:
        """Costs to simulate: receive buffers and sends at the plan's stage boundaries, exposed collectives once a
        step."""
        choice = self.choice
        if self.by_replica:
            shares = zip(self.batch_shares(plan), self.by_replica, strict=True)
            every = [replace(problem.step_costs(plan), micro_batches=share) for share, problem in dict.fromkeys(shares)]
            each = [
                costs.micro_batches * (costs.parts[0].forward_seconds + costs.parts[0].backward_seconds)
                for costs in every
            ]
            return every[each.index(max(each))]
        parts = tuple(self._received(self.of_stage(part.stage)._part(part, plan), part) for part in plan.parts)
        stages = []
        for stage in range(choice.stages):
            stage_parts, of = [part for part in plan.parts if part.stage == stage], self.of_stage(stage)
            blocks = [k for part in stage_parts for k in range(part.first, part.stop)]
            fronts = [(of.fronts[self.kinds[k]], plan.points[k]) for k in blocks]
            static = sum(map(of.always_bytes, blocks))
            copies = [of.costs[self.kinds[k]].shared for k in blocks] if choice.stages > 1 else []
            shared = sum(static_bytes(held, choice.zero, choice.replicas) for held in copies)
            last = [
                of.fronts[self.kinds[k]] for k in blocks[: stage_parts[0].stop - stage_parts[0].first]
            ]  # whose backward is last
            backward = [float(f.front.backward_seconds[p]) for f, (_, p) in zip(last, fronts, strict=False)]
            moving = [f.late_seconds for f in last]
            if choice.zero == 1:
                late = late_exposed(backward, moving, self.mesh, of.hardware)
            else:
                late = exposed_seconds(backward, [f.copy_seconds for f in last], moving)
            share = choice.replicas if choice.zero else 1
            update = sum(f.update_seconds for f, _ in fronts) + sum(held.update_seconds / share for held in copies)
            tied = self._tied_seconds(stage, plan)
            between = (("gradients between stages", tied),) if tied else ()
            tail = (("gradients and weights between replicas", late), *between, ("optimizer", update))
            stages.append(StageCosts(static + shared, tail))
        return StepCosts(choice.schedule, choice.micro_batches, parts, tuple(stages))

    def _tied_seconds(self, stage: int, plan: StagePlan) -> float:
        """Seconds in which a stage exchanges gradients of weights that a later block reads too: the line's first block,
        which has them, is on stage 0."""
        if self.choice.stages == 1:
            return 0.0
        parts = [part for part in plan.parts if part.stage and stage in (0, part.stage)]
        return sum(self._copied_seconds(self.kinds[part.first : part.stop]) for part in parts)

    @property
    def _alone(self) -> bool:
        """Is there a single micro-batch, which finds no gradients? A block's gradients exist from its backward on."""
        return self.choice.micro_batches == 1

    def always_bytes(self, block: int) -> float:
        """Bytes of a block, at any point, that are held all through the step."""
        curve = self.fronts[self.kinds[block]]
        whole = curve.costs.held.gradient_bytes * (self._alone and self.choice.zero == 1)
        return float(curve.front.static_bytes[0]) - whole - self.fresh_bytes(block)

    def fresh_bytes(self, block: int) -> float:
        """Bytes of the gradients that a block's backward makes in a single micro-batch."""
        held = self.fronts[self.kinds[block]].costs.held
        whole = held.gradient_share(self.choice.replicas) if self.choice.zero else held.gradient_bytes
        return whole if self._alone else 0.0

    def working_bytes(self, block: int, point: int) -> float:
        """Working bytes of a block. ZeRO 1 scatters a single micro-batch's gradients block by block, like ZeRO 2."""
        kind = self.kinds[block]
        if self._alone and self.choice.zero == 1:
            return dict(self.sharded[kind].once[1].working_bytes)[self.keeps[kind][point]]
        return float(self.fronts[kind].front.working_bytes[point])

    def _scattered_last(self, part: Part) -> float:
        """Exposed seconds of a backward under ZeRO 2, for gradients that no remaining block of the part hides."""
        if self.choice.zero != 2 or takes_turns(self.mesh, self.hardware):
            return 0.0
        number = min(1, part.stop - 1) if part.first == 0 else part.first
        costs = self._each_micro_batch[self.kinds[number]]
        moving = moved(costs.moves, self.mesh, self.hardware).scattered
        before = sum(self._each_micro_batch[self.kinds[k]].backward_seconds for k in range(part.first, number))
        return max(0.0, moving - before) if number else 0.0

    def _part(self, part: Part, plan: StagePlan) -> PartCosts:
        """Costs of a part. While a block runs, those after it keep nothing: not yet, or no longer."""
        forward, backward = self._ends(plan)
        retained = most = once = copies = gathered = 0.0
        fresh_bytes = sum(map(self.fresh_bytes, range(part.first, part.stop))) if self._alone else 0.0
        for block in range(part.first, part.stop):
            curve, point = self.fronts[self.kinds[block]], plan.points[block]
            forward += float(curve.front.forward_seconds[point])
            backward += float(curve.front.backward_seconds[point])
            retained += float(curve.front.saved_bytes[point])
            once += curve.first_seconds
            copies += curve.once_copy_seconds
            gathered += curve.gather_seconds
            most = max(most, retained + self.working_bytes(block, point) + fresh_bytes)
            fresh_bytes -= self.fresh_bytes(block)
        working = max(0.0, most - retained)
        backward += self._scattered_last(part)
        if self.choice.stages > 1 and part.stop < len(self.kinds):
            retained += self.costs[self.kinds[part.stop]].following_bytes
        return PartCosts(
            forward, backward, retained, working, first_seconds=once, once_copy_seconds=copies, gather_seconds=gathered
        )

    def _received(self, costs: PartCosts, part: Part) -> PartCosts:
        """Costs of a part with those of its input from the stage before."""
        if part.first == 0 or self.choice.stages == 1:
            return costs
        entering = self.of_stage(part.stage).costs[self.kinds[part.first]]
        received = entering.received_bytes
        kept_bytes = costs.saved_bytes - min(received, dict(entering.saved_bytes)["input"])  # it has a buffer
        return replace(
            costs, saved_bytes=kept_bytes, received_bytes=received, receive_seconds=self.received_seconds(part.first)
        )


def _mean(front: Front, each: Sequence[Front]) -> Front:
    """`front` with the harmonic mean of the seconds on each replica. No shares of whole slices take less than this
    mean, of which the sum over blocks and passes of their means is no more."""

    def mean(seconds: Sequence[Floats]) -> Floats:
        with np.errstate(divide="ignore"):
            average: Floats = len(seconds) / np.sum([1 / values for values in seconds], axis=0)
        return average

    forward, backward = mean([item.forward_seconds for item in each]), mean([item.backward_seconds for item in each])
    return replace(front, forward_seconds=forward, backward_seconds=backward)


def _least_of(each: Sequence[tuple[Front, ...]]) -> tuple[Front, ...]:
    """Front by kind of block: at every point the least that any of `each` has."""
    return tuple(_least(fronts) for fronts in zip(*dict.fromkeys(each), strict=True))


def _least(fronts: Sequence[Front]) -> Front:
    return Front(
        **{field.name: np.minimum.reduce([getattr(front, field.name) for front in fronts]) for field in fields(Front)}
    )
