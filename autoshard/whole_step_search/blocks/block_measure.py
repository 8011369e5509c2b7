"""Measures the costs of blocks: simulates the program of a split and assigns its costs to each block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from autoshard.cluster.hardware import Hardware
from autoshard.constraints.recomputed_blocks import called_modules
from autoshard.costs.device_bytes import optimizer_seconds, parameter_parts
from autoshard.formulation.cost_breakdown import copies
from autoshard.ir.graph import CAST, DTYPE_BYTES, Graph
from autoshard.ir.layout import REPLICATE_PARTIAL, Shard, largest_shape
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import KEEP_SOME, PLAIN, StepPlan
from autoshard.ir.program import Compute, Program, ProgramParameter
from autoshard.program.instruction_storage import LINEAR, communicated, is_expensive, rerun_ids, some_results
from autoshard.program.lower import lower
from autoshard.program.module_scopes import inside, reads_of, results_of
from autoshard.program.weights import weight_ways
from autoshard.rules.algebra.strategy import Choice
from autoshard.rules.operators import constants
from autoshard.search.build_plan import Origin, plan_of
from autoshard.simulation.engine import timed
from autoshard.simulation.memory_curve import MemoryPlan, Span, levels, plan_memory
from autoshard.simulation.working_memory import local_bytes
from autoshard.whole_step_search.blocks.block_costs import (
    BlockCosts,
    HeldParameters,
    InnerSums,
    Move,
    ShardedCosts,
    held_together,
    inner_together,
)
from autoshard.whole_step_search.blocks.block_line import ShortGraph
from autoshard.whole_step_search.blocks.block_splits import BlockSplit
from autoshard.whole_step_search.blocks.replicated_split import replicated_split
from autoshard.whole_step_search.blocks.stage_axes import DATA, INNER

PHASES = ("forward", "backward")


def block_costs(short: ShortGraph, split: BlockSplit, hardware: Hardware) -> tuple[BlockCosts, ...]:
    """Costs of every block of the short line."""
    measured = _Measured(short, split.program, split.graph, hardware)
    return tuple(measured.block(number) for number in range(len(short.line.blocks)))


def sharded_costs(
    wide: ShortGraph,
    captured: Graph,
    split: BlockSplit,
    replicas: int,
    whole: tuple[BlockCosts, ...],
    hardware: Hardware,
) -> tuple[ShardedCosts, ...]:
    """Costs of `split` with weights sharded over `replicas`. `wide`: the short graph `captured` with the samples of all
    replicas together; `whole`: the costs with whole weights. Costs of shards other than collectives (casts of a shard,
    copies into flat tensors) are those for this many replicas."""
    graph = wide.graph
    formulation, solution = replicated_split(wide.line, captured, wide, split, replicas, True, hardware)
    plan = plan_of(formulation, solution, Origin(graph.source), float("inf"), "search")
    program = lower(plan, graph)
    apart = (plan.mesh.names[DATA],)
    alone, together = (
        _Measured(wide, variant, graph, hardware, apart) for variant in (replace(program, weight_buckets=()), program)
    )
    once = [
        _Measured(wide, lower(replace(plan, step=StepPlan(2, zero=zero)), graph), graph, hardware, apart)
        for zero in (1, 2)
    ]

    def costs(measured: _Measured, number: int) -> BlockCosts:
        block = measured.block(number)
        same = whole[number]
        held = replace(same.held, inner=inner[number], moved_bytes=moved[number])
        return replace(block, held=held, shared=same.shared, overhead_seconds=same.overhead_seconds)

    cuts = _inner_cuts(split.program, program)
    inner = [together.inner(number, split.program, cuts) for number in range(len(whole))]
    moved = [together.moved_bytes(number, split.program) for number in range(len(whole))]

    def of_block(number: int) -> ShardedCosts:
        first, second = (costs(measured, number) for measured in once)
        return ShardedCosts(costs(alone, number), costs(together, number), (first, second))

    return tuple(map(of_block, range(len(wide.line.blocks))))


class _Measured:
    """Costs of one program. `apart`: axes whose collectives take no time here, as they are the moves of blocks."""

    def __init__(
        self, short: ShortGraph, program: Program, graph: Graph, hardware: Hardware, apart: tuple[str, ...] = ()
    ) -> None:
        self.short, self.graph, self.hardware, self.apart = short, graph, hardware, apart
        body = replace(program, gradient_buckets=())  # gradients wait for the step's end
        self.program: Program = body
        self.timeline = timed(body, graph, hardware, frozenset(apart), among=True)
        self.memory: MemoryPlan = plan_memory(body, graph, accumulates=True)
        self.count = len(body.instructions)
        self.block_of = self._blocks_of_instructions()
        self.first = [self.block_of.index(b) if b in self.block_of else -1 for b in range(len(short.line.blocks))]

    def _blocks_of_instructions(self) -> list[int]:
        """Block of each instruction; a collective belongs to the block whose operator comes next."""
        owner = {
            op.name: number for number, block in enumerate(self.short.line.blocks) for op in self.short.line.ops(block)
        }
        block_of, current = [0] * self.count, len(self.short.line.blocks) - 1
        for i in range(self.count - 1, -1, -1):
            instruction = self.program.instructions[i]
            if isinstance(instruction, Compute):
                current = owner[instruction.op]
            block_of[i] = current
        return block_of

    @cached_property
    def saved(self) -> list[tuple[int, Span]]:
        """Spans alive between forward and backward, each with its block: the first one that keeps it, if only later
        blocks do."""
        turn, spans = self.count - 1, []
        for span in self.memory.spans:
            if span.held.kind in ("activation", "extra") and span.start <= turn < span.last:
                keeper = min(max(2 * self.count - 1 - span.last, span.start), turn)
                spans.append((self.block_of[keeper], span))
        return spans

    @cached_property
    def working(self) -> list[float]:
        """Peak bytes of each block while it runs, without what outlives it."""
        lasting = {id(span) for _, span in self.saved}
        steps = len(self.memory.bytes)
        transient = [
            span
            for span in self.memory.spans
            if id(span) not in lasting and not (span.start == 0 and span.last >= steps - 2)
        ]
        level = levels(transient, steps)
        peaks = [0.0] * len(self.short.line.blocks)
        for i, block in enumerate(self.block_of):
            peaks[block] = max(peaks[block], level[i], level[2 * self.count - 1 - i])
        return peaks

    def block(self, number: int) -> BlockCosts:
        forward, backward = self._wall(number)
        indices = [i for i in range(self.count) if self.block_of[i] == number]
        run = self._rerun(number, indices)
        everything = sum(span.held.bytes for block, span in self.saved if block == number)
        entered = self._entered(number) + self._handed_inside(number)
        dear = self._dear_bytes(number)
        kept_bytes = {"all": everything, "expensive": dear + entered, "input": min(everything, entered)}
        recompute = {"all": 0.0, "expensive": self._seconds(run, cheap=True), "input": self._seconds(run)}
        collectives = self._reusable(number, run)
        for both, plain in PLAIN.items():
            kept_bytes[both] = kept_bytes[plain] + self._result_bytes(collectives)
            recompute[both] = self._seconds([i for i in run if i not in collectives], cheap=plain == "expensive")
        for keep, saved in self._some(number, indices).items():
            kept_bytes[keep] = self._result_bytes(saved) + entered
            recompute[keep] = self._seconds([i for i in run if i not in saved])
        working = {keep: self.working[number] + max(0.0, everything - size) for keep, size in kept_bytes.items()}
        return BlockCosts(
            forward,
            backward,
            tuple(recompute.items()),
            tuple(kept_bytes.items()),
            tuple(working.items()),
            self._received(number),
            self._received(number, number - 1),
            *self._held(number),
            self._moves[number],
            self._overhead[number],
            self._free(number),
        )

    @cached_property
    def _overhead(self) -> list[float]:
        """Overhead seconds of each block: collectives with their copies, and replicated computation."""
        steps, overhead = self.program.instructions, [0.0] * len(self.short.line.blocks)
        for event in self.timeline.events:
            if event.instruction is not None:
                step, share = steps[event.instruction], 1.0
                if isinstance(step, Compute) and not event.collective:
                    share = 1 - 1 / _times(step.strategy, self.program.mesh)
                overhead[self.block_of[event.instruction]] += share * event.duration_seconds
        return overhead

    @cached_property
    def _moves(self) -> list[tuple[Move, ...]]:
        moves: list[list[Move]] = [[] for _ in self.short.line.blocks]
        for event in self.timeline.events:
            if event.collective and event.instruction is not None and not {*self.apart}.isdisjoint(event.axes):
                backward = event.phase == "backward"
                inner = self._inner_axes(event.axes)
                moves[self.block_of[event.instruction]].append(Move(event.collective, event.bytes, backward, inner))
        return [tuple(block_moves) for block_moves in moves]

    def _inner_axes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Axes of a replica among these, by their position among a replica's."""
        inner = [name for name in self.program.mesh.names if name not in self.apart]
        return tuple(inner.index(name) for name in axes if name in inner)

    def inner(self, number: int, used: Program, cuts: Mapping[str, tuple[int, ...]]) -> tuple[InnerSums, ...]:
        """Parameters that the block reads first whose gradients are sums inside a replica, or whose shards are split
        there: `used` on its mesh alone, `cuts` by path."""
        parameters, paths = {p.tensor: p for p in self.graph.parameters}, {p.path: p for p in used.parameters}
        sums = []
        for stored in self.program.parameters:
            use, cut = paths[stored.path], cuts.get(stored.path, ())
            placements = used.value(use.value).layout.placements
            summed = tuple(axis for axis, placement in enumerate(placements) if placement == REPLICATE_PARTIAL)
            if not (summed or cut) or number != min(self._read.get(stored.value, {0})):
                continue
            parameter = parameters[used.value(use.value).tensor]
            parts = parameter_parts(self.graph, parameter, use.layout, used.mesh)
            moved = math.prod(largest_shape(use.shape, use.layout, used.mesh)) * self._moved_bytes(stored, number)
            update = optimizer_seconds(self.hardware, self.graph, parameter, use.layout, used.mesh)
            times = math.prod(used.mesh.sizes[axis] for axis in cut)
            sums.append(InnerSums(summed, cut, times, parts[1], moved, sum(parts), update))
        return inner_together(sums)

    def moved_bytes(self, number: int, used: Program) -> int:
        """Bytes of the parameters that the block reads first, as this program gathers them, in the layouts of `used`:
        shards whose cast would leave a sum to it are gathered before the cast."""
        layouts = {p.path: p.layout for p in used.parameters}
        return sum(
            math.prod(largest_shape(stored.shape, layouts[stored.path], used.mesh)) * self._moved_bytes(stored, number)
            for stored in self.program.parameters
            if number == min(self._read.get(stored.value, {0}))
        )

    def _wall(self, number: int) -> tuple[float, float]:
        """Seconds from the start of the block to the start of the next one, as (forward, backward)."""
        indices = [i for i in range(self.count) if self.block_of[i] == number]
        if not indices:
            return 0.0, 0.0
        starts, first, last = self.timeline.starts, indices[0], indices[-1]
        forward = starts[last + 1] - starts[first]
        turn = 2 * self.count - 1
        backward = starts[turn - first + 1] - starts[turn - last]
        return max(forward, 0.0), max(backward, 0.0)

    def _free(self, number: int) -> tuple[float, float]:
        """Seconds of (forward, backward) until the first collective inside a replica."""
        indices, free = [i for i in range(self.count) if self.block_of[i] == number], []
        if not indices:
            return 0.0, 0.0
        starts, turn, whole = self.timeline.starts, 2 * self.count - 1, self._wall(number)
        for phase, begin, wall in zip(PHASES, (starts[indices[0]], starts[turn - indices[-1]]), whole, strict=True):
            first = self._first_waited.get((number, phase), math.inf)
            free.append(min(max(first - begin, 0.0), wall))
        return free[0], free[1]

    @cached_property
    def _first_waited(self) -> dict[tuple[int, str], float]:
        """Start of the first collective inside a replica, by (block, phase)."""
        starts: dict[tuple[int, str], float] = {}
        for event in self.timeline.events:
            inside_one = event.collective and {*self.apart}.isdisjoint(event.axes)
            if inside_one and event.instruction is not None:
                key = self.block_of[event.instruction], event.phase
                starts[key] = min(starts.get(key, math.inf), event.start_seconds)
        return starts

    def _rerun(self, number: int, indices: list[int]) -> list[int]:
        """Instructions of a block that backward reruns if only inputs are kept. In a list of modules each module stops
        by itself."""
        path, steps = self.short.line.blocks[number].module, self.program.instructions
        called = called_modules(self.graph, path) if path else ()
        rerun, left = list[int](), set(indices)
        for module in called:
            mine = [i for i in indices if steps[i].module == module or inside(steps[i].module, module)]
            rerun += rerun_ids(steps, mine if len(called) > 1 else indices, self.graph)
            left -= {*(mine if len(called) > 1 else indices)}
        return [*rerun, *sorted(left)]

    def _seconds(self, indices: list[int], cheap: bool = False) -> float:
        """Forward seconds of these instructions; `cheap`: without the expensive ones."""
        starts, steps = self.timeline.starts, self.program.instructions
        dear = {i for i in indices if cheap and isinstance(step := steps[i], Compute) and is_expensive(step.target)}
        return math.fsum(starts[i + 1] - starts[i] for i in indices if i not in dear)

    def _reusable(self, number: int, run: list[int]) -> set[int]:
        """Collectives among the rerun instructions `run` whose results may be kept."""
        path, steps = self.short.line.blocks[number].module, self.program.instructions
        called = called_modules(self.graph, path) if path else ()
        ways = self.program.once(weight_ways)
        within = (i for i in run if any(steps[i].module == owner or inside(steps[i].module, owner) for owner in called))
        return communicated(steps, within, ways)

    def _some(self, number: int, indices: list[int]) -> dict[str, set[int]]:
        """Policies that keep some expensive results, those with the most recompute time for each byte first: at prices
        of memory in between, one of these is the best. The time is that of the whole graph, whatever the split."""
        path = self.short.line.blocks[number].module
        if not path or called_modules(self.graph, path) != (path,):
            return {}
        results = some_results(self.program.instructions, indices, self.graph, path)
        worth = {name: self._operations_of_element(makers[0]) for name, makers in results.items()}
        policies, names, saved = dict[str, set[int]](), list[str](), set[int]()
        dear = {i for i in indices if self._is_dear(i)}
        for most in sorted({*worth.values()}, reverse=True):
            alike = [name for name in results if worth[name] == most]
            names, saved = names + alike, saved | {i for name in alike for i in results[name]}
            if saved != dear:
                in_order = [name for name in results if name in names]
                policies[KEEP_SOME + ", ".join(in_order)] = saved
        return policies

    def _operations_of_element(self, index: int) -> int:
        """Multiplications for each element of the result: for a linear layer its number of inputs, for attention the
        number of keys (twice, and half of them masked)."""
        step = self.program.instructions[index]
        assert isinstance(step, Compute)
        op = self.graph.by_op[step.op]
        first, second = (self.graph.tensor(name).shape for name in op.operands[:2] if name is not None)
        return first[-1] if step.target in LINEAR else second[-2]

    def _dear_bytes(self, number: int) -> float:
        """Bytes of a block's expensive operators: all results, whether a backward reads them or not, and what else they
        keep."""
        return self._result_bytes({i for i in range(self.count) if self.block_of[i] == number and self._is_dear(i)})

    def _result_bytes(self, indices: set[int]) -> float:
        """Bytes of the results of these instructions, and of what else they keep."""
        spans = (
            span for span in self.memory.spans if span.held.kind in ("activation", "extra") and span.start in indices
        )
        return sum(span.held.bytes for span in spans)

    def _is_dear(self, index: int) -> bool:
        """Is its result expensive to compute?"""
        instruction = self.program.instructions[index]
        return isinstance(instruction, Compute) and is_expensive(instruction.target)

    @cached_property
    def _maker(self) -> dict[str, int]:
        """Value -> the block that makes it."""
        return {name: self.block_of[i] for i, ins in enumerate(self.program.instructions) for name in results_of(ins)}

    @cached_property
    def _read(self) -> dict[str, set[int]]:
        """Value -> the blocks that read it."""
        readers: dict[str, set[int]] = {}
        for i, instruction in enumerate(self.program.instructions):
            operands = instruction.operands if isinstance(instruction, Compute) else (instruction.operand,)
            for name in operands:
                if name is not None:
                    readers.setdefault(name, set()).add(self.block_of[i])
        return readers

    def _entered(self, number: int) -> float:
        """Bytes that the block reads from the one before."""
        return sum(
            local_bytes(self.program.value(name), self.program.mesh)
            for name, maker in self._maker.items()
            if maker == number - 1 and number in self._read.get(name, ())
        )

    def _handed_inside(self, number: int) -> float:
        """Bytes read by one module of a block that is a list of modules, and made by the block outside it; else 0."""
        path = self.short.line.blocks[number].module
        called = called_modules(self.graph, path)
        if called == (path,):
            return 0.0
        indices = [i for i in range(self.count) if self.block_of[i] == number]
        steps, read = self.program.instructions, set[str]()
        for module in called:
            within = [steps[i] for i in indices if steps[i].module == module or inside(steps[i].module, module)]
            results = {name for step in within for name in results_of(step)}
            read |= {name for step in within for name in reads_of(step) if name and name not in results}
        there = [name for name in read if self._maker.get(name) == number]
        return sum(local_bytes(self.program.value(name), self.program.mesh) for name in there)

    def _received(self, number: int, first: int = 0) -> float:
        """Bytes made by blocks from `first` up to this block that it reads. Results that depend on nothing are
        recomputed instead."""
        fixed = constants(self.graph)
        return sum(
            local_bytes(self.program.value(name), self.program.mesh)
            for name, maker in self._maker.items()
            if first <= maker < number
            and number in self._read.get(name, ())
            and self.program.value(name).tensor not in fixed
        )

    def _moved_bytes(self, stored: ProgramParameter, number: int) -> int:
        """Bytes of an element of a weight gathered for a block: of the target type if the weight is only cast."""
        readers = [
            step
            for i, step in enumerate(self.program.instructions)
            if self.block_of[i] == number and isinstance(step, Compute) and stored.value in step.operands
        ]
        if not readers or any(reader.target != CAST for reader in readers):
            return DTYPE_BYTES[stored.dtype]
        return max(DTYPE_BYTES[self.program.value(reader.results[0]).dtype] for reader in readers)

    def _held(self, number: int) -> tuple[HeldParameters, HeldParameters]:
        """Held parameters: those that the block uses first, and those shared with an earlier block."""
        graph, mesh, program = self.graph, self.program.mesh, self.program
        parameters = {p.tensor: p for p in (*graph.parameters, *graph.buffers)}
        buffers = {b.value for b in program.buffers}
        total, shared = HeldParameters(), HeldParameters()
        for stored in (*program.parameters, *program.buffers):
            readers = self._read.get(stored.value, {0})
            parameter = parameters[program.value(stored.value).tensor]
            parts = parameter_parts(graph, parameter, stored.layout, mesh)
            if number not in readers:
                continue
            numel = math.prod(largest_shape(stored.shape, stored.layout, mesh))
            moved = numel * self._moved_bytes(stored, number)
            if stored.value in buffers:
                held = HeldParameters(buffer_bytes=parts[0])
            else:
                update = optimizer_seconds(self.hardware, graph, parameter, stored.layout, mesh)
                held = HeldParameters(*parts, moved, update, 0.0, update / copies(stored.layout, mesh))
            if number == min(readers):
                total = held_together(total, held)
            else:
                shared = held_together(shared, held)
        return total if self.apart else replace(total, inner=self.inner(number, program, {})), shared


def _inner_cuts(used: Program, stored: Program) -> dict[str, tuple[int, ...]]:
    """Parameter -> axes of a replica over which its shards in `stored` are split, and its use is not."""
    before = {p.path: p.layout.placements for p in used.parameters}
    cuts = {}
    for parameter in stored.parameters:
        pairs = enumerate(zip(before[parameter.path], parameter.layout.placements[INNER:], strict=True))
        cuts[parameter.path] = tuple(
            a for a, (use, shard) in pairs if isinstance(shard, Shard) and not isinstance(use, Shard)
        )
    return cuts


def _times(strategy: str, mesh: Mesh) -> int:
    """Number of devices that do the same work under a strategy, given as it prints."""
    pairs = zip(strategy.split(), mesh.sizes, strict=False)  # behind the choices may stand where it runs
    return math.prod(size for choice, size in pairs if Choice.parse(choice).kind != "factor")
