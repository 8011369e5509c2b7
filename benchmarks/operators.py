"""Every operator of torch's own tests through capture and emission: `python -m benchmarks.operators [NAME ...]`.

Each entry's sample inputs (torch.testing's, on CPU) become small modules of that one call, which are captured, planned
for one device, emitted, run as the package runs, and compared with torch: shapes, dtypes and values. An entry ends as
`same`, `refused` (at capture, with a reason), `random` (torch gives other numbers each time), `not emitted` (nothing to
emit: the call makes no operator on tensors), or, and then the exit code is 6, `wrong` or `crashed`.
`--sample N --seed S` takes N by seed. `--rules` instead proves what the table says of the captured operators, on
shards of unequal sizes and of one element, and reads the graphs back. Rounding to a dtype that an operator is given
(`cumsum(dtype=float32)` of a float64 proof) shows there as an error of about 1e-7, and is none.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from autoshard.emit import emit
from autoshard.errors import UserError
from autoshard.graph_capture.capture import capture_model
from autoshard.ir import graph_json
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.rules.operator_check import check_rules
from autoshard.rules.operator_table import has_rule
from autoshard.rules.operators import is_random, record
from autoshard.rules.proof.discover import case_of, with_discovered
from autoshard.verification.case import written
from autoshard.verification.operator_calls import run_emitted
from autoshard.verification.ranks.loaded_package import load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from autoshard.verification.rule_table import prove_case
from benchmarks import harness

MESH = "dp=2,tp=3"  # shards of one element, and of unequal sizes
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)
SAMPLES = 6  # of an entry, spread over those that torch has
BAD = ("wrong", "crashed")


@dataclass(frozen=True)
class End:
    """How one entry ended, and why where that says something."""

    name: str
    end: str
    samples: int
    why: str = ""


class Drawn(Exception):
    """The captured call draws random numbers, or leaves them undefined."""


class One(nn.Module):
    """A call of torch with the tensors of its arguments as inputs."""

    def __init__(self, call: Callable[..., Any], arguments: Any) -> None:
        super().__init__()
        self.call = call
        leaves, self.tree = tree_flatten(arguments)
        self.tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.fixed = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.inputs = tuple(leaves[i].detach() for i in self.tensors)

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.fixed)
        for i, tensor in zip(self.tensors, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = tree_unflatten(leaves, self.tree)
        return [leaf for leaf in tree_leaves(self.call(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]


def samples(entry: Any, limit: int) -> list[One]:
    """Modules of the entry's sample inputs, small ones and spread over all that torch has."""
    dtype = next((d for d in DTYPES if d in entry.supported_dtypes("cpu")), None)
    if dtype is None:
        return []
    modules = [
        One(entry.op, ((sample.input, *sample.args), sample.kwargs))
        for sample in entry.sample_inputs("cpu", dtype, requires_grad=False)
    ]
    step = max(1, len(modules) // limit)
    return modules[::step][:limit]


def run_package(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The outputs of the emitted model on a mesh of one device."""
    graph = capture_model(model, inputs, training=False)
    if any(is_random(op) or "empty" in op.target for op in graph.ops):
        raise Drawn
    plan = harness.planned(graph, "a100-80g-sxm", Mesh.parse("dp=1"))
    with written(emit(lower(plan, graph), plan, graph)) as folder:
        package = load_package(folder)

    def rank(mesh: object) -> Any:
        return package.model.build_model(mesh).eval()(*(x.clone() for x in inputs))

    return [x for x in tree_leaves(run_lockstep({"dp": 1}, rank)[0]) if isinstance(x, torch.Tensor)]


def wrong_rules(entry: Any, seen: set[object]) -> Iterator[str]:
    """What is wrong with the operators of the table in an entry's graphs that were not seen yet."""
    for model in samples(entry, SAMPLES):
        try:
            graph = capture_model(model, model.inputs, training=False)
        except Exception:  # refused with its reason, or by torch.export
            continue
        for op in graph.ops:
            case = case_of(graph, op)
            ranks = tuple(None if operand is None else (len(operand.shape), operand.dtype) for operand in case.operands)
            key = op.target, ranks, tuple((name, type(value)) for name, value in op.attributes)
            if record(op.target).rule is None or key in seen:
                continue
            seen.add(key)
            if has_rule(graph, op):
                verdicts = prove_case(case, Mesh.parse(MESH))
                yield from (f"{case}: {verdict.strategy}: {verdict.failure}" for verdict in verdicts if verdict.failure)
        check_rules(graph_json.loads(graph_json.dumps(with_discovered(graph, run_call=run_emitted)[0]), "saved"))


def outcome(entry: Any, limit: int = SAMPLES) -> End:
    """The worst end of an entry's samples; `same` where the others are refused or random."""
    name = entry.name + (f".{entry.variant_test_name}" if entry.variant_test_name else "")
    ends = [_one(model) for model in samples(entry, limit)]
    if not ends:
        return End(name, "refused", 0, "no sample on CPU of a dtype that graphs hold")
    order = (*BAD, "same", "random", "refused", "not emitted")
    end, why = min(ends, key=lambda pair: order.index(pair[0]))
    return End(name, end, len(ends), why)


def _one(model: One) -> tuple[str, str]:
    try:
        wanted = model(*(x.clone() for x in model.inputs))
        repeated = model(*(x.clone() for x in model.inputs))
    except Exception as error:
        return "refused", f"torch itself: {_first(error)}"
    if not model.inputs or not wanted:
        return "not emitted", "no tensor goes in or none comes out"
    if any(_differs(a, b) for a, b in zip(wanted, repeated, strict=True)):
        return "random", ""
    try:
        got = run_package(model, model.inputs)
    except Drawn:
        return "random", ""
    except UserError as error:
        return "refused", _first(error)
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {_first(error)}"
    distinct = list({id(x): x for x in wanted}.values())
    if len(got) != len(distinct):
        return "wrong", f"{len(got)} results, {len(distinct)} wanted"
    return next((("wrong", why) for a, b in zip(got, distinct, strict=True) if (why := _differs(a, b))), ("same", ""))


def _differs(got: torch.Tensor, wanted: torch.Tensor) -> str:
    try:
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
    except AssertionError as error:
        return _first(error)
    return ""


def _first(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__


def ends(entries: Sequence[Any], limit: int = SAMPLES) -> Iterator[End]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry in entries:
            torch.manual_seed(0)
            yield outcome(entry, limit)


def chosen(names: Sequence[str] = (), count: int = 0, seed: int = 0) -> list[Any]:
    """Entries by name, or `count` by seed, or all."""
    entries = [entry for entry in op_db if not names or entry.name in names]
    return random.Random(seed).sample(entries, count) if count else entries


def rules(entries: Sequence[Any]) -> int:
    warnings.simplefilter("ignore")
    seen, wrong = set[object](), 0
    for entry in entries:
        try:
            for text in wrong_rules(entry, seen):
                wrong += 1
                print(f"{entry.name}: {text}", flush=True)
        except Exception as error:  # of a proof whose indices are out of range
            print(f"{entry.name}: not tried: {type(error).__name__}: {_first(error)}", flush=True)
    print(f"{len(seen)} calls, {wrong} wrong")
    return 6 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rules", action="store_true", help="prove the rules of what is captured")
    options = parser.parse_args()
    entries = chosen(options.names, options.sample, options.seed)
    if options.rules:
        return rules(entries)
    start = time.process_time()
    rows = []
    for end in ends(entries):
        rows.append(end)
        print(f"{end.name:50} {end.end:12} {end.samples:2}  {end.why}", flush=True)
    counts = Counter(end.end for end in rows)
    said = ", ".join(f"{counts[end]} {end}" for end in sorted(counts))
    print(f"{len(rows)} entries, {sum(e.samples for e in rows)} calls: {said}; {time.process_time() - start:.0f} CPU-s")
    return 6 if any(end.end in BAD for end in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
