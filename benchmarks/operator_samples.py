"""Torch's own samples of its operators, overload by overload: captured, proved on uneven shards, saved and read back.

    python benchmarks/operator_samples.py [FIRST LAST]

prints what fails of the operators in torch's list from FIRST to LAST. Rounding to a dtype that an operator is told
(`cumsum(dtype=float32)` of a float64 proof) shows as an error of about 1e-7, and is none.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from autoshard.api.live_model import captured, live_model
from autoshard.errors import UserError
from autoshard.ir import graph_json
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.rules.operator_check import check_rules
from autoshard.rules.operator_table import has_rule
from autoshard.rules.operators import record
from autoshard.rules.proof.discover import case_of, with_discovered
from autoshard.verification.operator_calls import run_emitted
from autoshard.verification.rule_table import prove_case

MESH = "dp=2,tp=3"  # shards of one element, and of unequal sizes
SAMPLES, SECONDS = 12, 60  # kinds of samples of an operator, and for each


class Called(torch.nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.run(tensors)


def graphs(info: Any) -> Iterator[Graph]:
    """A graph for each kind of sample: ranks of tensors, types of the other arguments."""
    dtype = torch.float32 if torch.float32 in info.dtypes else next(iter(info.dtypes), torch.float32)
    seen: set[str] = set()
    for sample in info.sample_inputs("cpu", dtype, requires_grad=False):
        leaves, tree = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        kind = str([x.dim() if isinstance(x, torch.Tensor) else type(x) for x in leaves]) + str(tree)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if kind in seen or not at or len(seen) >= SAMPLES:
            continue
        seen.add(kind)

        def run(tensors: Any, leaves: Any = leaves, tree: Any = tree, at: Any = at) -> Any:
            own = list(leaves)
            for place, tensor in zip(at, tensors, strict=True):
                own[place] = tensor
            args, kwargs = tree_unflatten(own, tree)
            return info.op(*args, **kwargs)

        live = live_model(Called(run), tuple(leaves[i].detach().clone() for i in at), None, None, "never")
        try:
            yield captured(live, "fp32", "adamw", False)
        except UserError:
            continue  # refused with its reason


def failures(graph: Graph, seen: set[object]) -> Iterator[str]:
    """What is wrong with the operators of the table in it that were not seen yet."""
    for op in graph.ops:
        case = case_of(graph, op)
        ranks = tuple(None if own is None else (len(own.shape), own.dtype) for own in case.operands)
        key = op.target, ranks, tuple((name, type(value)) for name, value in op.attributes)
        if record(op.target).rule is None or key in seen:
            continue
        seen.add(key)
        if has_rule(graph, op):
            wrong = next((verdict for verdict in prove_case(case, Mesh.parse(MESH)) if verdict.failure), None)
            if wrong is not None:
                yield f"{op.target} {case.operands} {op.attributes}: {wrong.strategy}: {wrong.failure}"
    found, _ = with_discovered(graph, run_call=run_emitted)
    check_rules(graph_json.loads(graph_json.dumps(found), "saved"))


def main(first: int, last: int) -> int:
    warnings.filterwarnings("ignore")
    seen: set[object] = set()
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    wrong = 0
    for info in op_db[first:last]:
        try:
            for graph in graphs(info):
                signal.alarm(SECONDS)
                for text in failures(graph, seen):
                    wrong += 1
                    print(f"{info.name}: {text}", flush=True)
        except Exception as error:  # of a sample, of torch.export, or of a proof whose indices are out of range
            print(f"{info.name}: not tried: {type(error).__name__}: {str(error)[:200]}", flush=True)
        finally:
            signal.alarm(0)
    print(f"{len(seen)} calls, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    bounds = [int(word) for word in sys.argv[1:]] or [0, len(op_db)]
    raise SystemExit(main(*bounds))
