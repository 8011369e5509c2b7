"""Tables in the memory of the devices' hosts: which can lie there, and the strategies of look-ups that run there.

The link between a host and its device carries looked-up rows and their gradients; all other communication stays between
devices. So a table's gradient must be whole where its rows are: no strategy leaves it partial.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.errors import UsageError
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import REPLICATE_PARTIAL
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.operators import OPERATORS, record

LOOK_UPS = {"aten.embedding", "autoshard.embedding_bags"}
TABLE = 0  # the operand of a look-up that may lie on the host
SUMMED = "the gradient of a table on the host is never summed over devices: each holds rows or columns of its own"


def host_tables(graph: Graph) -> tuple[str, ...]:
    """The parameters (tensors) that can lie on the host."""
    return tuple(p.tensor for p in graph.parameters if not host_problem(graph, p.tensor))


def served_tables(graph: Graph) -> tuple[str, ...]:
    """Parameters (tensors) of which look-ups read rows, and nothing else reads: parameter servers keep them."""
    reads = {p.tensor: {op.target for op, _ in graph.consumers[p.tensor]} for p in graph.parameters}
    return tuple(table for table in host_tables(graph) if reads[table] <= LOOK_UPS)


def host_problem(graph: Graph, tensor: str) -> str:
    """Reason why a parameter can't lie on the host, "" if it can: all its readers must run there."""
    if tensor in graph.outputs:
        return "the model returns it"
    uses = graph.consumers[tensor]
    for op, position in uses:
        if not (record(op.target).on_host and position == TABLE and op.operands.count(tensor) == 1):
            kinds = " and ".join(name for name, known in OPERATORS.items() if known.on_host)
            return f"{op.name} ({op.target}) reads it too, and only {kinds} run on the host"
    return "" if uses else "nothing reads it"


def strategy_problem(strategy: Strategy) -> str:
    """Reason why a look-up can't run so on the host, "" if it can."""
    layout = strategy.operands[TABLE]
    if layout is not None and REPLICATE_PARTIAL in layout.placements:
        return SUMMED
    return ""


def on_host(graph: Graph, op: Op, strategy: Strategy) -> Strategy:
    """Strategy with its table and its work on the hosts. UsageError if that can't be."""
    table = op.operands[TABLE] if record(op.target).on_host else None
    known = {p.tensor for p in graph.parameters}
    reason = host_problem(graph, table) if table in known and table else "it looks up no parameter"
    if reason or (reason := strategy_problem(strategy)):
        raise UsageError(f"{op.name} ({op.target}) can't run on the host: {reason}", "the same strategy without `host`")
    first = strategy.operands[TABLE]
    assert first is not None
    return replace(strategy, operands=(first.in_host_memory(), *strategy.operands[1:]), host=True)


def host_strategies(graph: Graph, op: Op, strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    """Strategies of a look-up that its table allows on the host, moved there."""
    return tuple(on_host(graph, op, strategy) for strategy in strategies if not strategy_problem(strategy))
