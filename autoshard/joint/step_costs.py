"""From an outer choice and a split to a stage problem, and from a plan of it to the costs that are simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.cluster.hardware import Hardware
from autoshard.costs.collective import joint_seconds
from autoshard.ir.problem import Floats
from autoshard.joint.block_costs import BlockCosts
from autoshard.joint.block_fronts import STAGES, BlockFront, block_front, exposed_seconds, step_mesh
from autoshard.joint.outer_space import OuterChoice
from autoshard.simulation.step_timeline import PartCosts, StageCosts, StepCosts, live_micro_batches
from autoshard.solvers.stages.stage_problem import Part, StagePlan, StageProblem


@dataclass(frozen=True, eq=False)
class StepProblem:
    """One outer choice with one split. `kinds[k]` of block k; `costs` and `keeps` by kind; `allowed[s, k]`: may block k
    be on stage s."""

    choice: OuterChoice
    kinds: tuple[int, ...]
    costs: tuple[BlockCosts, ...]
    keeps: tuple[tuple[str, ...], ...]
    hardware: Hardware
    capacity_bytes: float
    allowed: np.ndarray | None = None

    @cached_property
    def fronts(self) -> tuple[BlockFront, ...]:
        """By kind."""
        choice = self.choice
        mesh = step_mesh(choice.stages, choice.replicas, choice.tensor)
        alone = self.kinds.count(self.kinds[0]) == 1
        return tuple(
            block_front(own, mesh, choice.zero, self.hardware, self.keeps[kind], alone and kind == self.kinds[0])
            for kind, own in enumerate(self.costs)
        )

    @cached_property
    def least_seconds(self) -> float:
        """Of one micro-batch through all blocks, each at its fastest point."""
        fastest = [float(own.front.seconds.min()) for own in self.fronts]
        return sum(fastest[kind] for kind in self.kinds)

    @property
    def any_order_least(self) -> float:
        """Below the step of every plan of this choice: work that could be dealt out in any shares, each stage starting
        once a micro-batch has passed those before it."""
        choice = self.choice
        if choice.virtual_stages > 1:
            one = min(float(own.front.seconds.min()) for own in self.fronts)  # each chunk before has a block at least
            return choice.micro_batches * self.least_seconds / choice.stages + (choice.stages - 1) / 2 * one
        return self.least_seconds / (1 - (1 - 1 / choice.micro_batches) ** choice.stages)

    @property
    def model_least(self) -> float:
        """Below the closed form of every plan of this choice."""
        choice = self.choice
        chunks, total = choice.virtual_stages, self.least_seconds
        return total / chunks + (choice.micro_batches - 1 / chunks) * total / choice.stages

    def received_seconds(self, block: int) -> float:
        """Of what enters a block, from the stage before."""
        if self.choice.stages == 1:
            return 0.0
        mesh = step_mesh(self.choice.stages, self.choice.replicas, self.choice.tensor)
        size = self.costs[self.kinds[block]].received_bytes
        return joint_seconds(self.hardware, mesh, (STAGES,), "send_receive", size)

    @cached_property
    def stage_problem(self) -> StageProblem:
        choice = self.choice
        send = min((self.received_seconds(k) for k in range(1, len(self.kinds))), default=0.0)
        return StageProblem(
            tuple(own.front for own in self.fronts),
            self.kinds,
            choice.stages,
            choice.micro_batches,
            self.live,
            self._room(),
            choice.virtual_stages,
            send,
            self.allowed,
        )

    @cached_property
    def live(self) -> Floats:
        choice = self.choice
        return live_micro_batches(choice.schedule, choice.stages, choice.micro_batches, choice.virtual_stages)

    def _room(self) -> Floats:
        """Of each stage, without what it receives and, on the last, its copy of shared parameters."""
        choice = self.choice
        room = np.full(choice.stages, self.capacity_bytes)
        if choice.stages > 1:
            entering = min((self.costs[kind].received_bytes for kind in self.kinds[1:]), default=0.0)
            for stage in range(choice.stages):
                ends = 2 * choice.virtual_stages - (stage == 0) - (stage == choice.stages - 1)
                room[stage] -= ends * entering * choice.micro_batches
            room[-1] -= sum(self.costs[kind].shared_bytes for kind in self.kinds)
        return room

    def step_costs(self, plan: StagePlan) -> StepCosts:
        """What is simulated: receive buffers and sends of the very cuts, collectives once a step where nothing hides
        them."""
        choice = self.choice
        parts = tuple(self._part(part, plan) for part in plan.parts)
        stages = []
        for stage in range(choice.stages):
            own = [part for part in plan.parts if part.stage == stage]
            blocks = [k for part in own for k in range(part.first, part.stop)]
            fronts = [(self.fronts[self.kinds[k]], plan.points[k]) for k in blocks]
            static = sum(float(f.front.static_bytes[p]) for f, p in fronts)
            shared = sum(f.costs.shared_bytes for f, _ in fronts) if choice.stages > 1 else 0.0
            last = blocks[: own[0].stop - own[0].first]  # of the chunk whose backward is the step's last
            late = exposed_seconds(
                [float(self.fronts[self.kinds[k]].front.backward_seconds[plan.points[k]]) for k in last],
                [self.fronts[self.kinds[k]].late_seconds for k in last],
            )
            update = sum(f.update_seconds for f, _ in fronts)
            tail = (("gradients and weights between replicas", late), ("optimizer", update))
            stages.append(StageCosts(static + shared, tail))
        return StepCosts(choice.schedule, choice.micro_batches, parts, tuple(stages))

    def _part(self, part: Part, plan: StagePlan) -> PartCosts:
        found = PartCosts(0.0, 0.0)
        for block in range(part.first, part.stop):
            front, point = self.fronts[self.kinds[block]].front, plan.points[block]
            found = replace(
                found,
                forward_seconds=found.forward_seconds + float(front.forward_seconds[point]),
                backward_seconds=found.backward_seconds + float(front.backward_seconds[point]),
                kept_bytes=found.kept_bytes + float(front.kept_bytes[point]),
                working_bytes=max(found.working_bytes, float(front.working_bytes[point])),
            )
        if part.first == 0 or self.choice.stages == 1:
            return found
        received = self.costs[self.kinds[part.first]].received_bytes
        return replace(found, received_bytes=received, receive_seconds=self.received_seconds(part.first))
