"""`lower(plan, graph) -> Program`: apply every decision of a plan once, and nothing else.

Redistributions stand where their first consumer runs, and are shared by all consumers that need the same layout.
Gradients of parameters that every use leaves partial over an axis are not reduced inside the backward: the parameter
enters as `R+` and its gradient joins a bucket, reduced once a step, overlapping the rest of backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autoshard import redistribute, rules
from autoshard.ir.graph import CAST, FUSION, Graph, Op, Parameter
from autoshard.ir.layout import (
    REPLICATE,
    REPLICATE_PARTIAL,
    Layout,
    Shard,
    local_sizes,
    parse_placement,
)
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import OUTPUT, PLAIN, OpPlan, Plan, PlanStep, RedistributionPlan
from autoshard.ir.program import Collective, Compute, Instruction, LocalValue, Program, ProgramParameter
from autoshard.program.early_reductions import with_early_reductions
from autoshard.program.gradient_buckets import gradient_buckets
from autoshard.program.instruction_storage import communicated, rerun_ids
from autoshard.program.label_counts import label_counts
from autoshard.program.module_scopes import called_in
from autoshard.program.short_lived import short_lived
from autoshard.program.step_check import check_batch_shares
from autoshard.program.weight_buckets import gathered_once, gradient_ready_at, weight_buckets
from autoshard.program.weights import weight_path, weight_ways, with_gathers
from autoshard.redistribute import Step, reason
from autoshard.rules.algebra.strategy import Strategy


def lower(plan: Plan, graph: Graph, strategies: dict[str, Strategy] | None = None) -> Program:
    """The SPMD program of `plan`. Raises UsageError where the plan names a strategy that an op doesn't offer.
    `strategies`: `chosen_strategies`, where they are known."""
    program = _Lowering(plan, graph, chosen_strategies(plan, graph) if strategies is None else strategies).run()
    known = {plan.mesh: program}  # places of one mesh run one program
    for placed in plan.place_plans:
        if placed.mesh not in known:
            known[placed.mesh] = lower(plan.of_place(placed), graph)
    others = tuple((placed.place, known[placed.mesh]) for placed in plan.place_plans if placed.mesh != plan.mesh)
    return replace(program, others=others) if others else program


@dataclass(frozen=True, eq=False)
class _KnownParts:
    """Parts that programs of one graph and mesh share: those that are compared differ in few of them. `calls`: each
    with its strategy."""

    values: dict[tuple[str, str, Layout], LocalValue] = field(default_factory=dict)
    calls: dict[tuple[str, str, tuple[str | None, ...]], tuple[Strategy, Compute]] = field(default_factory=dict)


def _known_parts(graph: Graph) -> dict[Mesh, _KnownParts]:
    return {}


@dataclass
class _Lowering:
    plan: Plan
    graph: Graph
    strategies: dict[str, Strategy]
    values: dict[str, LocalValue] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    by_layout: dict[tuple[str, Layout], str] = field(default_factory=dict)  # (tensor, layout) -> value
    origin: dict[str, str] = field(default_factory=dict)  # tensor -> the value it was first made as

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    def run(self) -> Program:
        graph, plan = self.graph, self.plan
        self.known = graph.once(_known_parts).setdefault(plan.mesh, _KnownParts())
        self.variables = dict(graph.variables)
        self.steps = {(r.tensor, r.target): r for r in plan.redistributions}
        layouts = {t.name: t.layout for t in (*plan.inputs, *plan.parameters, *plan.buffers)}
        inputs = tuple(self._start(name, layouts[name]) for name in graph.inputs)
        self.weights = {p.tensor for p in graph.parameters}
        for cast in (op for op in graph.ops if op.target == CAST):
            self.weights |= {*cast.results} if cast.operands[0] in self.weights else set()
        self.deferred = self._deferred_axes(layouts)
        parameters = tuple(self._parameter(p, layouts[p.tensor]) for p in graph.parameters)
        buffers = tuple(self._parameter(b, layouts[b.tensor]) for b in graph.buffers)
        for op_plan in plan.ops:
            self._op(graph.by_op[op_plan.op], op_plan, self.strategies[op_plan.op])
        outputs = tuple(self._output(name) for name in graph.outputs)
        updates = tuple(
            (self.origin[b], self._value_in(v, layouts[b], "", f"{b} is stored so")) for b, v in graph.buffer_updates
        )
        loss = outputs[graph.outputs.index(graph.loss)] if graph.loss else None
        stored, recomputed = [p.value for p in parameters], tuple(plan.step.keeps)
        whole = plan.step.zero < 3 and graph.loss is not None
        once = gathered_once(parameters, self.instructions, self.values) if whole else frozenset()
        instructions = with_gathers(self.instructions, self.values, stored, graph, recomputed, once)
        if graph.loss is not None:
            instructions = with_early_reductions(instructions, self.values, stored)
        fixed = (*inputs, *stored, *(b.value for b in buffers))
        gathered = parameters, instructions, self.values, self.mesh, plan.fusion, whole
        together = weight_buckets(*gathered) if graph.loss else ()
        paths = {entry.tensor: entry.path for entry in (*graph.parameters, *graph.buffers)}
        program = Program(
            graph.name,
            self.mesh,
            tuple(self.values.values()),
            inputs,
            parameters,
            buffers,
            instructions,
            outputs,
            loss,
            updates,
            gradient_buckets(
                parameters, instructions, self.values, self.mesh, gradient_ready_at(together), plan.fusion
            ),
            graph.modules,
            plan.precision,
            plan.optimizer,
            graph.training,
            graph.schemas,
            together,
            plan.step,
            label_counts(instructions, self.values, self.mesh, paths, graph) if plan.step.micro_batches > 1 else (),
            short_lived(instructions, self.values, self.mesh, graph, fixed, (*outputs, *(new for _, new in updates))),
            plan.fusion,
        )
        check_batch_shares(program, bool(graph.dynamic))
        return _with_retention(program, graph)

    # --- values ---

    def _add(self, name: str, tensor: str, layout: Layout) -> str:
        key = name, tensor, layout
        if key not in self.known.values:
            info = self.graph.tensor(tensor)
            sizes = local_sizes(info.shape, layout, self.mesh)
            named = self.variables.get(tensor, "")
            value = LocalValue(name, tensor, info.shape, info.dtype, layout, sizes, info.requires_grad, named)
            self.known.values[key] = value
        self.values[name] = self.known.values[key]
        self.by_layout[tensor, layout] = name
        return name

    def _start(self, tensor: str, layout: Layout) -> str:
        self.origin[tensor] = self._add(tensor, tensor, layout)
        return self.origin[tensor]

    def _value_in(self, tensor: str, layout: Layout, module: str, consumer: str) -> str:
        """The value that holds `tensor` in `layout`, made now if it isn't there yet."""
        if (tensor, layout) in self.by_layout:
            return self.by_layout[tensor, layout]
        plan = self.steps.get((tensor, layout))
        assert plan is not None, f"the plan has no redistribution of {tensor} to {layout}"
        current = self.origin[tensor]
        stored = self.values[current]
        is_weight = tensor in self.weights
        for step in weight_path(plan.steps, stored.layout, stored.shape, self.mesh) if is_weight else plan.steps:
            current = self._step(current, step, module, consumer)
        assert self.values[current].layout == layout, (tensor, self.values[current].layout, layout)
        return current

    def _step(self, operand: str, planned: PlanStep, module: str, consumer: str) -> str:
        value = self.values[operand]
        step = self._not_deferred(planned, value.layout)
        if step is None:
            return operand
        layout = step.applied(value.layout)
        if (value.tensor, layout) in self.by_layout:
            return self.by_layout[value.tensor, layout]
        joined, cut = redistribute.dim_cuts(step, value.layout, value.shape, self.mesh)
        result = self._fresh(value.tensor)
        self._add(result, value.tensor, layout)
        axes = tuple(self.mesh.names[axis] for axis in step.axes)
        why = reason(axes, step.before, step.after, step.by_index, value.tensor, consumer)
        does = (axes, step.before, step.after, step.forward, step.backward)
        self.instructions.append(Collective(*does, operand, result, module, why, joined, cut))
        return result

    def _not_deferred(self, planned: PlanStep, layout: Layout) -> Step | None:
        """The step over the axes whose gradient is not left to a gradient bucket; None where there are no others."""
        axes = [self.mesh.index(axis) for axis in planned.axes]
        placements = zip(map(parse_placement, planned.before), map(parse_placement, planned.after), strict=True)
        changes = [
            (axis, before, after)
            for axis, (before, after) in zip(axes, placements, strict=True)
            if (before, after, layout.placements[axis]) != (REPLICATE, REPLICATE_PARTIAL, REPLICATE_PARTIAL)
        ]
        if not changes:
            return None
        left, before, after = zip(*changes, strict=True)
        return Step(left, before, after, planned.forward, planned.backward)

    def _fresh(self, tensor: str) -> str:
        number = 1
        while f"{tensor}_{number}" in self.values or f"{tensor}_{number}" in self.graph.by_name:
            number += 1
        return f"{tensor}_{number}"

    # --- parameters ---

    def _deferred_axes(self, layouts: dict[str, Layout]) -> dict[str, tuple[int, ...]]:
        """Parameter -> the axes over which every use leaves its gradient partial, by one step R -> R+."""
        used_as_stored = {
            name
            for op in self.graph.ops
            for name, layout in zip(op.operands, self.strategies[op.name].operands, strict=True)
            if name in layouts and layout == layouts[name]
        }
        uses: dict[str, list[RedistributionPlan]] = {}
        for redistribution in self.plan.redistributions:
            uses.setdefault(redistribution.tensor, []).append(redistribution)
        return {
            parameter.tensor: tuple(
                axis
                for axis, placement in enumerate(layouts[parameter.tensor].placements)
                if placement == REPLICATE and all(self._only_sums(use, axis) for use in uses[parameter.tensor])
            )
            for parameter in self.graph.parameters
            if parameter.tensor in uses and parameter.tensor not in used_as_stored
        }

    def _only_sums(self, redistribution: RedistributionPlan, axis: int) -> bool:
        name = self.mesh.names[axis]
        steps = [step for step in redistribution.steps if name in step.axes]
        return [(set(step.before), set(step.after)) for step in steps] == [({"R"}, {"R+"})]

    def _parameter(self, parameter: Parameter, storage: Layout) -> ProgramParameter:
        layout = storage
        for axis in self.deferred.get(parameter.tensor, ()):
            layout = layout.replace(axis, REPLICATE_PARTIAL)
        value = self._start(parameter.tensor, layout)
        info = self.graph.tensor(parameter.tensor)
        split_shape, split_layout = split(info.shape, storage)
        return ProgramParameter(
            value,
            parameter.path,
            parameter.ties,
            info.shape,
            info.dtype,
            storage,
            split_shape,
            split_layout,
            parameter.trainable,
            parameter.init,
            parameter.persistent,
            self._together(parameter),
        )

    def _together(self, parameter: Parameter) -> int | None:
        """Fusion number of a parameter, from the innermost module that has one; the command line takes precedence."""
        if any(fusion.collective == "all_reduce" for fusion in self.plan.fusion):
            return None
        requests = ((path, what.partition(":")) for path, what in self.graph.module_requests)
        matches = [
            (len(path), int(number))
            for path, (what, _, number) in requests
            if what == FUSION and number.isdecimal() and f"{parameter.path}.".startswith(f"{path}." if path else "")
        ]
        return max(matches)[1] if matches else None

    # --- operators ---

    def _op(self, op: Op, op_plan: OpPlan, strategy: Strategy) -> None:
        operands = tuple(
            None if name is None or layout is None else self._value_in(name, layout, op.module, op.name)
            for name, layout in zip(op.operands, strategy.operands, strict=True)
        )
        for name, layout in zip(op.results, strategy.results, strict=True):
            self._start(name, layout)
        key = op.name, op_plan.strategy, operands
        known, call = self.known.calls.get(key, (None, None))
        if call is None or known is not strategy:
            call = self._call(op, op_plan, strategy, operands)
            self.known.calls[key] = strategy, call
        self.instructions.append(call)

    def _call(self, op: Op, op_plan: OpPlan, strategy: Strategy, operands: tuple[str | None, ...]) -> Compute:
        local = rules.localise(self.graph, op, strategy, self.mesh)
        return Compute(
            op.name,
            local.target,
            operands,
            local.attributes,
            op.results,
            op.module,
            op.source,
            op_plan.strategy,
            local.variant,
            local.axes,
            host=strategy.host,
        )

    def _output(self, name: str) -> str:
        """Keep an output's layout, unless the end of a step can't take it: see formulate's sinks."""
        wanted = [r for r in self.plan.redistributions if r.tensor == name and OUTPUT in r.consumers]
        return self._value_in(name, wanted[0].target, "", OUTPUT) if wanted else self.origin[name]


def _with_retention(program: Program, graph: Graph) -> Program:
    """The program with `reused` set, as its step says."""
    paths = [path for path, keep in program.step.keeps.items() if keep in PLAIN]
    if not paths:
        return program
    ways, steps = program.once(weight_ways), list(program.instructions)
    for path in paths:
        for i in communicated(steps, rerun_ids(steps, called_in(program, path), graph), ways):
            step = steps[i]
            assert isinstance(step, Collective)
            steps[i] = replace(step, reused=True)
    return replace(program, instructions=tuple(steps))


def chosen_strategies(plan: Plan, graph: Graph) -> dict[str, Strategy]:
    """Op name -> the strategy that the plan names. Raises UsageError where an op doesn't offer it."""
    granularities = rules.granularities(graph, plan.mesh)
    known = graph.once(_known_strategies).setdefault(plan.mesh, {})

    def chosen(op: str, text: str) -> Strategy:
        if (op, text) not in known:
            query = graph, graph.by_op[op], plan.mesh, granularities, text
            known[op, text] = rules.named(*query) or rules.find(*query)
        return known[op, text]

    return {op_plan.op: chosen(op_plan.op, op_plan.strategy) for op_plan in plan.ops}


def _known_strategies(graph: Graph) -> dict[Mesh, dict[tuple[str, str], Strategy]]:
    """Cache of strategies that plans named, by mesh, op and text: plans that are compared differ in few."""
    return {}


def split(shape: tuple[int, ...], layout: Layout) -> tuple[tuple[int, ...], Layout]:
    """The unflattened shape and its plain-shard layout: (2304, 768) `S0/3*64` -> (3, 12, 64, 768) `S1`."""
    sizes: list[int] = []
    position: dict[int, int] = {}  # original dim -> the dim of the split shape that is cut
    for dim, size in enumerate(shape):
        cuts = {(s.blocks, s.unit) for _, s in layout.shards(dim)}
        assert len(cuts) <= 1, f"{layout}: one kind of shard a dim"
        blocks, unit = cuts.pop() if cuts else (1, 1)
        unit = unit if isinstance(unit, int) else 1  # parts of given lengths stay as they are
        sizes += [blocks] if blocks > 1 else []
        position[dim] = len(sizes)
        sizes += [size // (blocks * unit)]
        sizes += [unit] if unit > 1 else []
    placements = (_moved(p, position) if isinstance(p, Shard) else p for p in layout.placements)
    return tuple(sizes), Layout(tuple(placements))


def _moved(shard: Shard, position: dict[int, int]) -> Shard:
    return Shard(position[shard.dim], 1, shard.unit if isinstance(shard.unit, tuple) else 1)
