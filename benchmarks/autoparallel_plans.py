"""A plan by a checkout of meta-pytorch/autoparallel, on fake devices of this machine, and its prices of all plans.

python benchmarks/autoparallel_plans.py CHECKOUT FILE.py:FUNCTION OUT.pickle --mesh dp=2,tp=4 [--with layers=2 …]

Its own process, for `beside_autoparallel.py`. Nothing is compiled or run. Its planner asks which GPU there is: that is
answered here. On the CPU attention has another operator, so models call the one of GPUs by name.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import operator
import pickle
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface

from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import Node, Problem, Value
from benchmarks.autoparallel_mapping import Operator, Placements, Theirs, module_path

ATTENTION = "autoparallel"
DEVICE, DEVICES_OF_A_HOST = "NVIDIA H100", 8
MICRO = 1e-6  # its costs are microseconds
_NORM = torch.ops.aten.native_layer_norm.default


def cpu_seconds() -> float:
    """Of this process and of those that it waited for: the solver is one."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def use(checkout: Path) -> None:
    """Makes the checkout importable, and this machine's devices H100s."""
    sys.path.insert(0, str(checkout))
    torch.cpu.get_device_name = lambda device=None: DEVICE  # type: ignore[attr-defined]
    torch.cpu.device_count = lambda: DEVICES_OF_A_HOST
    AttentionInterface.register(ATTENTION, _attention)
    from autoparallel.shardings import propagation_rules  # type: ignore[import-not-found]

    propagation_rules._op_rules[_NORM] = _with_dtypes(propagation_rules._op_rules[_NORM])


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object,
    dropout: float = 0.0, scaling: float | None = None, **other: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal, of (batch, heads, sequence, width)."""
    assert mask is None
    if groups := query.shape[1] // key.shape[1] - 1:
        key, value = (x.repeat_interleave(groups + 1, dim=1) for x in (key, value))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(query, key, value, dropout, True, scale=scaling)[0].transpose(1, 2), None


def _with_dtypes(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Mean and deviation of a layer norm are in the type of its input on the CPU, in float32 on a GPU."""

    def found(mesh: DeviceMesh, schema: Any) -> Any:
        strategies = rule(mesh, schema)
        for strategy in strategies.strategies:
            dtype = strategy.input_specs[0].tensor_meta.dtype
            for spec in strategy.output_specs[1:]:
                spec.tensor_meta = spec.tensor_meta._replace(dtype=dtype)
        return strategies

    return found


@dataclass(frozen=True)
class Planned:
    """Its planner after one plan: `solution` is node -> strategy; the rest as of `Theirs`."""

    optimizer: Any
    solution: Mapping[Any, Any]
    objective_seconds: float
    trace_seconds: float
    plan_seconds: float


@contextmanager
def planned(model: Any, shape: tuple[int, ...], mesh: Mesh) -> Iterator[Planned]:
    """Its plan of a model that returns its loss from two inputs of words, both of `shape`; bfloat16 over float32.

    Equal layers are tied, which it can be told to do; there is no limit of memory, and nothing else is asked of it.
    """
    import pulp
    from autoparallel.api import AutoParallel  # type: ignore[import-not-found]

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(mesh.sizes))
    devices = init_device_mesh("cpu", tuple(mesh.sizes), mesh_dim_names=tuple(mesh.names))
    model.config._attn_implementation = ATTENTION
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    started, traced = cpu_seconds(), [0.0]
    whole = AutoParallel.build_model_graph

    def build(self: Any) -> None:
        whole(self)
        traced[0] = cpu_seconds()

    AutoParallel.build_model_graph = build
    words = lambda: tuple(torch.randint(0, 100, shape) for _ in range(2))  # noqa: E731
    try:
        with AutoParallel(model, words, devices, precision, repeated_subgraphs=True) as tool:
            solution = tool.optimize_placement(verbose=False)
            ended, optimizer = cpu_seconds(), tool.sharding_optimizer
            value = pulp.value(optimizer.prob.objective) * MICRO
            yield Planned(optimizer, solution, value, traced[0] - started, ended - traced[0])
    finally:
        AutoParallel.build_model_graph = whole
        dist.destroy_process_group()


# --- its graph and layouts in plain words ---------------------------------------------------------------------------


def placements(spec: Any) -> Placements:
    """Of a spec, or of the first of several."""
    own = spec if isinstance(spec, DTensorSpec) else next(one for one in spec if one is not None)
    partial = {"sum": "P"}  # a mean or a maximum is none of autoshard's
    return tuple(
        f"S{p.dim}" if p.is_shard() else partial.get(p.reduce_op, str(p)) if p.is_partial() else "R"
        for p in own.placements
    )


def operators(planned: Planned) -> dict[str, Operator]:
    """Name -> the operator."""
    found = {}
    for node in planned.optimizer.strats:
        if node.op == "call_function":
            value = node.meta["val"]
            value = value if isinstance(value, torch.Tensor) else next(v for v in value if isinstance(v, torch.Tensor))
            stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
            module = module_path(list(stack.values())[-1][0]) if stack else ""
            forward = node.meta.get("partitioner_tag") != "is_backward"
            found[node.name] = Operator(node.name, str(node.target), module, tuple(value.shape), forward)
    return found


def parameters(planned: Planned) -> dict[str, Any]:
    """Path -> its node."""
    from torch._functorch._aot_autograd.fx_utils import get_named_param_nodes

    return dict(get_named_param_nodes(planned.optimizer.graph))


# --- its problem in autoshard's arrays ------------------------------------------------------------------------------


def problem(planned: Planned) -> tuple[Problem, list[Any]]:
    """Its whole problem with no layer folded, and node i's node of the graph. Costs are its own, in seconds."""
    from autoparallel.cost_models.compute_estimation import estimate_strategy_runtime_cost  # type: ignore[import-not-found]

    own = planned.optimizer
    nodes = [node for node in own.strats if node.op != "output"]
    index = {node: i for i, node in enumerate(nodes)}
    roots = {key[0]: root[0] for key, root in own.cluster_links.items()}
    shared: dict[Any, Any] = {}

    def once(key: Any, make: Callable[[], Any]) -> Any:
        if key not in shared:
            shared[key] = make()
        return shared[key]

    def root(node: Any) -> int:
        return roots.get(own.node_map[node], own.node_map[node])

    def seconds(node: Any) -> Any:
        every = own.strats[node].strategies
        return np.array([estimate_strategy_runtime_cost(node, strategy) for strategy in every]) * MICRO

    made = []
    for node in nodes:
        costs = once(("node", root(node)), functools.partial(seconds, node))
        made.append(Node(node.name, costs, once(("none", len(costs)), functools.partial(np.zeros, len(costs)))))
    values = []
    for node in nodes:
        for position, producer in enumerate(own._all_input_nodes(node)):
            key = ("edge", root(node), root(producer), position)
            table = once(
                key, lambda node=node, position=position, producer=producer: _edge(own, node, position, producer)
            )
            values.append(_value(index[producer], index[node], table, once))
    for one, other in _paired(own):
        texts = tuple(tuple(str(s.output_specs) for s in own.strats[node].strategies) for node in (one, other))
        table = once(("pair", texts), functools.partial(_equal, *texts))
        values.append(_value(index[one], index[other], table, once))
    return Problem(tuple(made), tuple(values)), nodes


def _value(producer: int, consumer: int, table: Any, once: Callable[[Any, Callable[[], Any]], Any]) -> Value:
    rows, columns = (once(("all", count), functools.partial(np.arange, count)) for count in table.shape)
    none = once(("none", len(columns)), lambda: np.zeros(len(columns)))
    return Value("", producer, (consumer,), rows, (columns,), table, none, ((0, 0),))


def _edge(own: Any, node: Any, position: int, producer: Any) -> Any:
    """[its strategy, this one's]: moving the operand, and a microsecond for a move at all."""
    sources = [strategy.output_specs for strategy in own.strats[producer].strategies]
    if node.target is operator.getitem:
        sources = [source[node.args[1]] for source in sources]
    targets = [strategy.input_specs[position] for strategy in own.strats[node].strategies]
    moved = np.array([strategy.redistribute_cost[position] for strategy in own.strats[node].strategies]).T
    lies = [getattr(source, "placements", None) for source in sources]
    needed = [getattr(target, "placements", None) for target in targets]
    changes = np.array([[a is not None and b is not None and a != b for b in needed] for a in lies])
    return (moved + changes) * MICRO


def _paired(own: Any) -> Iterator[tuple[Any, Any]]:
    """Nodes that must lie alike: parameters, inputs and outputs with their gradients."""
    from torch._functorch._aot_autograd import fx_utils

    pairs = ("get_param_and_grad_nodes", "get_plain_input_and_grad_nodes", "get_plain_output_and_tangent_nodes")
    for name in pairs:
        for one, other in getattr(fx_utils, name)(own.graph).values():
            if other is not None:
                yield one, other


def _equal(one: Sequence[str], other: Sequence[str]) -> Any:
    """0 where two nodes lie alike, infinity where they don't."""
    return np.array([[0.0 if a == b else math.inf for b in other] for a in one])


# --- one model ------------------------------------------------------------------------------------------------------


def theirs(spec: str, arguments: Mapping[str, int], mesh: Mesh) -> Theirs:
    """Of the model that `FILE.py:FUNCTION` returns with its example inputs; it is built without values."""
    path, _, function = spec.rpartition(":")
    made = importlib.util.spec_from_file_location("model", path)
    assert made is not None and made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    with torch.device("meta"):
        model, (words, _) = getattr(module, function)(**arguments)
    with planned(model, tuple(words.shape), mesh) as found:
        own = found.optimizer
        whole, nodes = problem(found)
        choice = [_position(own, node, found.solution.get(node)) for node in nodes]
        every = [own.strats[node].strategies for node in nodes]
        return Theirs(
            whole,
            tuple(choice),
            tuple(tuple(placements(strategy.output_specs) for strategy in some) for some in every),
            tuple(tuple(_reachable(strategy) for strategy in some) for some in every),
            operators(found),
            {path: node.name for path, node in parameters(found).items()},
            found.objective_seconds,
            found.trace_seconds,
            found.plan_seconds,
        )


def _position(own: Any, node: Any, strategy: Any) -> int:
    return next((s for s, other in enumerate(own.strats[node].strategies) if other is strategy), 0)


def _reachable(strategy: Any) -> bool:
    return all(any(map(math.isfinite, row)) for row in strategy.redistribute_cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("model", metavar="FILE.py:FUNCTION")
    parser.add_argument("out", type=Path)
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--with", dest="given", nargs="*", default=[], metavar="NAME=NUMBER")
    arguments = parser.parse_args()
    use(arguments.checkout)
    given = {name: int(number) for name, number in (text.split("=") for text in arguments.given)}
    found = theirs(arguments.model, given, Mesh.parse(arguments.mesh))
    arguments.out.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
