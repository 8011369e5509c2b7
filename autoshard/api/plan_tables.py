"""A plan as tables: the layout of every parameter, and the graph with the strategy of every operator."""

from __future__ import annotations

from typing import Any

from autoshard.api.planned import PlannedModel
from autoshard.constraints.shard_counts import counts, of_operands, operand_shapes
from autoshard.ir.layout import Layout, local_sizes
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import chosen_strategies


def parameter_layouts(plan: PlannedModel) -> dict[str, dict[str, Any]]:
    """Layout of every parameter and buffer between steps, by name, as JSON data.

    `mesh` names its axes with their sizes, `layout` is one placement per axis, `dims` the axes that shard each dim
    (outer ones first), `counts` how often, `shape` and `local_shape` (of rank 0) the whole and a device's part.
    """
    mesh = plan.plan.mesh
    return {
        one.path: _laid_out(one.layout, plan.graph.tensor(one.name).shape, mesh) | {"decided_by": one.decided_by}
        for one in (*plan.plan.parameters, *plan.plan.buffers)
    }


def _laid_out(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> dict[str, Any]:
    first = (0,) * len(mesh.axes)
    return {
        "mesh": dict(mesh.axes),
        "layout": str(layout),
        "dims": [[mesh.names[axis] for axis, _ in layout.shards(dim)] for dim in range(len(shape))],
        "counts": list(counts(layout, len(shape), mesh)),
        "shape": list(shape),
        "local_shape": [size.evaluate(mesh, first) for size in local_sizes(shape, layout, mesh)],
    }


def operator_strategies(plan: PlannedModel) -> list[dict[str, Any]]:
    """The graph in execution order, each operator with its strategy, as JSON data.

    `counts` and `result_counts`: how often each dim of each operand and result is cut, None for an absent operand.
    `moved`: what is redistributed before it, from which layout to which.
    """
    graph, mesh = plan.graph, plan.plan.mesh
    chosen = chosen_strategies(plan.plan, graph)
    rows = []
    for op_plan in plan.plan.ops:
        op, strategy = graph.by_op[op_plan.op], chosen[op_plan.op]
        moved = [one for one in plan.plan.redistributions if op_plan.op in one.consumers]
        results = zip(op.results, strategy.results, strict=True)
        rows.append({
            "operator": op.name, "target": op.target, "module": op.module, "source": op.source,
            "operands": list(op.operands), "results": list(op.results), "strategy": op_plan.strategy,
            "counts": [cut and list(cut) for cut in of_operands(strategy, operand_shapes(graph, op), mesh)],
            "result_counts": [list(counts(layout, len(graph.tensor(name).shape), mesh)) for name, layout in results],
            "moved": [{"tensor": one.tensor, "from": str(one.source), "to": str(one.target)} for one in moved],
            "decided_by": op_plan.decided_by,
        })  # fmt: skip
    return rows


def strategies_text(plan: PlannedModel) -> str:
    """Text of these, a line an operator: `linear = aten.linear(x, first.weight)  ((2, 1), (2, 1))  pin`."""
    lines = []
    for row in operator_strategies(plan):
        operands = ", ".join(str(name) for name in row["operands"] if name is not None)
        cuts = str(tuple(tuple(cut) for cut in row["counts"] if cut is not None))
        moved = "".join(f"  [{one['tensor']}: {one['from']} to {one['to']}]" for one in row["moved"])
        lines.append(f"{', '.join(row['results'])} = {row['target']}({operands})  {cuts}  {row['decided_by']}{moved}")
    return "\n".join(lines) + "\n"
