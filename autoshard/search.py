"""What stands around one solve: pins and styles, the memory limit, the plan made of a solution, and its real price.

`search` gives the best plan, `megatron_plan` the best one of a fixed style, `random_plan` a seeded random valid one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard import redistribute, solvers
from autoshard.errors import InfeasibleError, UsageError
from autoshard.formulate import Allowed, Formulation, Site, formulate
from autoshard.graph.model import Graph, Op
from autoshard.graph.serialize import graph_hash
from autoshard.hardware import Hardware, check_mesh, check_precision, hardware_text
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.plan import Certificate, OpPlan, Plan, RedistributionPlan, TensorPlan
from autoshard.problem import Solution, objective
from autoshard.rules.strategy import Strategy
from autoshard.solvers import sampler
from autoshard.units import format_bytes

MEMORY_ROUNDS = 4  # how often the solver's limit is tightened when the simulated program needs more than it said


@dataclass(frozen=True)
class Origin:
    """What the user named, so that a plan can be rebuilt and verified: the model and its keyword arguments."""

    model: str = ""
    arguments: tuple[tuple[str, str | int | float | bool], ...] = ()


def search(
    graph: Graph,
    mesh: Mesh,
    hardware: Hardware,
    *,
    solver: str = "dp",
    memory_limit_bytes: float | None = None,
    origin: Origin | None = None,
    allowed: Allowed | None = None,
    decided_by: str = "search",
) -> Plan:
    """The fastest plan that fits. Raises InfeasibleError only where a lower bound on memory is above the limit."""
    check_mesh(hardware, mesh)
    check_precision(hardware, graph.precision)
    limit = memory_limit_bytes or hardware.usable_memory_bytes
    formulation = formulate(graph, mesh, hardware, limit, allowed)
    target = limit
    for _ in range(MEMORY_ROUNDS):
        solution = _solve(formulation, solver, target, limit)
        plan = priced(
            plan_of(formulation, solution, origin or Origin(graph.source), limit, decided_by), graph, hardware
        )
        if plan.predicted_peak_bytes <= limit:
            return plan
        target = min(target, solution.peak_bytes) * limit / plan.predicted_peak_bytes * 0.999
    return plan


def _solve(formulation: Formulation, solver: str, target: float, limit: float) -> Solution:
    try:
        return solvers.solve(replace(formulation.problem, capacity_bytes=target), solver)
    except InfeasibleError as error:
        raise InfeasibleError(
            f"{error.message}; the limit is {format_bytes(limit)} a device; the largest tensors, unsplit: "
            + ", ".join(_largest(formulation.graph)),
            "more devices, --precision bf16-mixed, --optimizer sgd, or a smaller batch",
        ) from error


def _largest(graph: Graph, count: int = 5) -> list[str]:
    names = {p.tensor: p.path for p in graph.parameters}
    largest = sorted(graph.tensors, key=lambda tensor: (-tensor.bytes, tensor.name))[:count]
    return [f"{names.get(t.name, t.name)} {list(t.shape)} {format_bytes(t.bytes)}" for t in largest]


def megatron_plan(graph: Graph, mesh: Mesh, hardware: Hardware, *, origin: Origin | None = None) -> Plan:
    """The best plan in Megatron's style: the last axis splits heads, hidden and vocabulary, the others the batch.

    Shoeybi et al. 2019, arXiv:1909.08053: column-parallel then row-parallel linears, heads split, vocabulary split.
    """
    return search(graph, mesh, hardware, origin=origin, allowed=_megatron, decided_by="megatron")


# By target: the factors that tensor parallelism splits, the further factors of a weight that stay whole, and
# whether the tensor axis may also leave the op whole.
_WEIGHTS = {
    "aten.linear": (("n", "m"), (), False),
    "autoshard.linear_in_out": (("n", "m"), (), False),
    "aten.embedding": (("vocabulary",), ("d",), False),
    "aten.conv2d": (("o", "c"), (), False),
    "aten.scaled_dot_product_attention": (("h",), (), True),
    "aten.cross_entropy_loss": (("vocabulary",), (), True),
}


def _megatron(op: Op, strategy: Strategy) -> bool:
    if op.target not in _WEIGHTS:
        return True
    split, whole, optional = _WEIGHTS[op.target]
    *data, tensor = strategy.choices
    if any(choice.factor in (*split, *whole) for choice in data):
        return False
    return tensor.factor in split or (optional and tensor.kind == "repeat")


def random_plan(graph: Graph, mesh: Mesh, hardware: Hardware, seed: int, *, origin: Origin | None = None) -> Plan:
    """A seeded random valid plan: any strategy of any op, every redistribution possible. Memory is not limited."""
    formulation = formulate(graph, mesh, hardware, float("inf"))
    choice = sampler.random_choice(formulation.problem, seed)
    return _chosen(formulation, choice, origin, f"random:{seed}")


def covering_plans(
    graph: Graph, mesh: Mesh, hardware: Hardware, seed: int, *, origin: Origin | None = None
) -> list[Plan]:
    """A few valid plans that together use every strategy that every *different* op of the graph offers."""
    formulation = formulate(graph, mesh, hardware, float("inf"))
    wanted = _different_ops(formulation)
    choices = sampler.cover(formulation.problem, seed, wanted)
    return [_chosen(formulation, choice, origin, f"cover:{seed}.{i}") for i, choice in enumerate(choices)]


def _different_ops(formulation: Formulation) -> list[int]:
    """One node for each different (target, strategies) among the ops."""
    seen: dict[tuple[object, ...], int] = {}
    for node, site in enumerate(formulation.sites):
        if site.kind == "op":
            op = formulation.graph.by_op[site.name]
            seen.setdefault((op.target, tuple(map(str, site.strategies))), node)
    return list(seen.values())


def _chosen(formulation: Formulation, choice: Sequence[int], origin: Origin | None, decided_by: str) -> Plan:
    seconds = objective(formulation.problem, choice)
    solution = Solution(tuple(choice), seconds, 0.0, 0.0, 0.0, decided_by, "feasible")
    graph = formulation.graph
    plan = plan_of(formulation, solution, origin or Origin(graph.source), float("inf"), decided_by)
    return priced(plan, graph, formulation.hardware)


def priced(plan: Plan, graph: Graph, hardware: Hardware) -> Plan:
    """The plan with the step time and peak memory of the very program that is emitted."""
    from autoshard.program.lower import lower
    from autoshard.simulate import simulate

    timeline = simulate(lower(plan, graph), graph, hardware)
    return replace(plan, predicted_seconds=timeline.step_seconds, predicted_peak_bytes=timeline.peak_bytes)


# --- from a solution to a plan --------------------------------------------------------------------------------------


def plan_of(
    formulation: Formulation, solution: Solution, origin: Origin, capacity_bytes: float, decided_by: str
) -> Plan:
    """Every decision of `solution`, in the words of the graph."""
    graph, sites = formulation.graph, formulation.sites
    chosen = list(zip(sites, solution.choice, strict=True))
    stored = {
        kind: tuple(_tensor_plan(graph, s, c, decided_by) for s, c in chosen if s.kind == kind)
        for kind in ("input", "parameter", "buffer")
    }
    ops = tuple(_op_plan(formulation, site, choice, decided_by) for site, choice in chosen if site.kind == "op")
    return Plan(
        graph_hash(graph),
        origin.model,
        origin.arguments,
        formulation.mesh,
        formulation.hardware.name,
        hardware_text(formulation.hardware),
        graph.precision,
        graph.optimizer,
        stored["input"],
        stored["parameter"],
        stored["buffer"],
        ops,
        _redistributions(formulation, solution.choice),
        solution.objective,
        solution.peak_bytes,
        capacity_bytes,
        Certificate(solution.solver, solution.status, solution.objective, solution.lower_bound),
        _versions(),
    )


def _versions() -> tuple[tuple[str, str], ...]:
    from importlib.metadata import version

    from autoshard import __version__  # of this very code: a clone need not be installed

    return (("autoshard", __version__), ("numpy", version("numpy")))


def _tensor_plan(graph: Graph, site: Site, choice: int, decided_by: str) -> TensorPlan:
    paths = {p.tensor: p.path for p in (*graph.parameters, *graph.buffers)}
    return TensorPlan(site.name, paths.get(site.name, site.name), site.layouts[choice], decided_by)


def _op_plan(formulation: Formulation, site: Site, choice: int, decided_by: str) -> OpPlan:
    from autoshard import costs

    strategy = site.strategies[choice]
    op = formulation.graph.by_op[site.name]
    forward, backward = costs.op_seconds(formulation.hardware, formulation.mesh, formulation.graph, op, strategy)
    return OpPlan(op.name, str(strategy), strategy.variant, forward, backward, decided_by)


def _redistributions(formulation: Formulation, choice: Sequence[int]) -> tuple[RedistributionPlan, ...]:
    found = []
    for value, site in zip(formulation.problem.values, formulation.values, strict=True):
        if site.tied:
            continue
        source = site.sources[value.source[choice[value.producer]]]
        consumers: dict[Layout, list[str]] = {}
        for consumer, targets in zip(value.consumers, value.targets, strict=True):
            target = site.targets[targets[choice[consumer]]]
            consumers.setdefault(target, []).append(_label(formulation.sites[consumer]))
        for target, names in consumers.items():
            if target != source:
                found.append(
                    redistribution(
                        formulation.graph, formulation.mesh, formulation.hardware, site.tensor, source, target, names
                    )
                )
    return tuple(found)


def _label(site: Site) -> str:
    return site.name if site.kind == "op" else "output" if site.name.startswith("output") else "buffer update"


def redistribution(
    graph: Graph, mesh: Mesh, hardware: Hardware, tensor: str, source: Layout, target: Layout, consumers: Sequence[str]
) -> RedistributionPlan:
    """The cheapest path from `source` to `target`, with its price."""
    from autoshard import costs

    info = graph.tensor(tensor)
    differentiable = info.requires_grad and graph.loss is not None
    path = redistribute.path(
        source,
        target,
        info.shape,
        info.dtype,
        mesh,
        differentiable,
        lambda axis, kind, size: costs.collective_seconds(hardware, mesh, axis, kind, size),
    )
    if path is None:
        raise UsageError(f"{tensor}: no way from {source.on(mesh)} to {target.on(mesh)}")
    steps = tuple((mesh.names[step.axis], str(step.before), str(step.after)) for step in path.steps)
    return RedistributionPlan(
        tensor, source, target, tuple(consumers), steps, path.forward_seconds, path.backward_seconds
    )
