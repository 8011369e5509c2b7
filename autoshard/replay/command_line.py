"""The command that rebuilds a plan."""

from __future__ import annotations

import math
from pathlib import Path

from autoshard.cluster.hardware import parse_hardware
from autoshard.code_text import typed
from autoshard.constraints.fusion_request import fusion_text
from autoshard.constraints.size_histogram import SizePoint, histogram_text
from autoshard.constraints.step_request import PLACE_PIN, RECOMPUTE, StagePin, pin_texts
from autoshard.graph_capture.model_spec import LOSS
from autoshard.ir.dynamic import DynamicSize
from autoshard.ir.graph import Graph
from autoshard.ir.plan import OpPlan, Plan, ServerPlan
from autoshard.servers.server_request import SAME, ServerRequest


def command(plan: Plan, graph: Graph | None = None) -> str:
    """Command that rebuilds `plan`. `graph`: the plan's, which may be one of evaluation, have dynamic sizes, or name
    modules. A clock or Ctrl-C that ended the search early is in no command."""
    parts = ["autoshard plan", typed(Path(plan.model)) if plan.model else "MODEL"]
    arguments = dict(plan.model_arguments)
    loss = arguments.pop(LOSS, None)
    if arguments:
        parts += ["--with", *(typed(f"{name}={value}") for name, value in arguments.items())]
    if loss is not None:
        parts.append(f"{LOSS} {typed(str(loss))}")
    if plan.servers.count:
        parts.append(servers_text(plan.servers))
    else:
        parts.append(f"--devices {plan.devices}" if plan.step.samples else f"--mesh {plan.mesh}")
    parts.append(f"--hardware {typed(Path(plan.hardware))}")
    points = [SizePoint(row.sizes, row.weight) for row in plan.search.sizes]
    parts += [f"--sizes {typed(histogram_text(points))}"] * bool(points)
    parts += [f"--buckets {len(plan.buckets) + 1}"] * bool(plan.buckets)
    if not plan.model.endswith(".json"):
        parts += [f"--dynamic {typed(dynamic_text(graph))}"] if graph and graph.dynamic else []
        parts += [f"--precision {typed(plan.precision)}", f"--optimizer {typed(plan.optimizer)}"]
        parts += ["--eval"] * bool(graph and not graph.training)
    else:
        registered = graph.registrations if graph else ()
        parts += [f"--allow-module {typed(item.module)}" for item in registered if item.module]
    parts += [plan.search.step_options] if plan.search.step_options else _step_options(plan)
    deciders = {style_of(op) for op in plan.ops} - {""}
    parts += [f"--strategy {typed(name)}" for name in sorted(deciders)]
    if plan.search.level != 2:
        parts.append(f"--level {plan.search.level}")
    if plan.certificate.solver not in ("dp", *deciders) and not plan.step.samples:
        parts.append(f"--solver {typed(plan.certificate.solver)}")
    if not plan.search.all_to_all:
        parts.append("--no-all-to-all")
    parts += [f"--fuse {typed(fusion_text(fusion))}" for fusion in plan.fusion]
    usable = parse_hardware(plan.hardware_text).usable_memory_bytes
    if math.isfinite(plan.capacity_bytes) and plan.capacity_bytes != usable:
        parts.append(f"--memory-limit '{plan.capacity_bytes:.17g} B'")
    return " ".join([*parts, *(f"--pin {typed(pin)}" for pin in plan.search.pins)])


def servers_text(servers: ServerPlan) -> str:
    """Options that ask for these parameter servers."""
    workers = (
        str(servers.workers) if servers.workers == servers.most_workers else f"{servers.workers}:{servers.most_workers}"
    )
    how = None if servers.rowwise else SAME
    asynchronous = servers.staleness is not None
    return ServerRequest(servers.count, workers, asynchronous, servers.staleness, how).text


def dynamic_text(graph: Graph) -> str:
    """Dynamic sizes as --dynamic takes them."""
    return ",".join(_size_text(size, graph) for size in graph.dynamic)


def _size_text(size: DynamicSize, graph: Graph) -> str:
    form = f"/{size.divisor}" * (size.divisor > 1) + f"+{size.remainder}" * bool(size.remainder)
    dims = "".join(f"@{graph.inputs.index(name)}.{dim}" for name, dim in size.dims)
    return f"{size.name}={size.least}..{size.most or ''}{form}{dims}"


def _step_options(plan: Plan) -> list[str]:
    """Step options of a plan that does not record them: a policy for all blocks, and stages as options split."""
    step = plan.step
    if step.samples:  # it was searched for
        parts = [f"--global-batch {step.samples * step.micro_batches}", f"--stages {step.stages}"]
        return [*parts, f"--micro-batch {step.samples // plan.mesh.sizes[0]}"]
    parts = [f"--micro-batches {step.micro_batches}"] * (step.micro_batches > 1)
    if step.placed:
        pins = pin_texts((StagePin(path, place) for path, place in step.places), PLACE_PIN)
        parts += [f"--pin {pin}" for pin in pins] + [f"--schedule {step.schedule}"] * (step.schedule != "1f1b")
    elif step.stages > 1:
        parts += [f"--stages {step.stages}", f"--schedule {step.schedule}"]
        parts += [f"--virtual-stages {step.virtual_stages}"] * (step.virtual_stages > 1)
    keeps = {policy.keep for policy in step.recompute}
    said = [word for word, keep in RECOMPUTE.items() if keeps == {keep} and keep != "all"]
    parts += [f"--zero {step.zero}"] * (step.zero != 3)
    parts += [f"--batch-shares {','.join(map(str, step.batch_shares))}"] * bool(step.batch_shares)
    return parts + [f"--recompute {word}" for word in said]


def style_of(op: OpPlan) -> str:
    """Strategy option behind a choice: megatron, random:1; "" if it was searched for, pinned or propagated."""
    return "" if op.decided_by.startswith(("search", "pin", "propagated")) else op.decided_by
