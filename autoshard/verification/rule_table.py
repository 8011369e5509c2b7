"""Proves the table: every strategy of every operator's cases, with variants run by the runtime that packages carry."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from autoshard.constraints.axis_names import check_axis_names
from autoshard.constraints.verify_request import MOST_RANKS
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.rules import OPERATORS, LocalCall, Strategy, instance, localise
from autoshard.rules.cases import ALL
from autoshard.rules.granularities import Refinements
from autoshard.rules.proof.case_text import case_id
from autoshard.rules.proof.operator_call import plain
from autoshard.rules.proof.rule_proof import OpCase, Run, Verdict, offered_by, one_op_graph, verdict
from autoshard.text.tables import table
from autoshard.units import format_seconds

if TYPE_CHECKING:
    from torch import Tensor

    from autoshard.emit.runtime.mesh import ParallelMesh

MESHES = ("tp=2", "tp=3", "dp=2,tp=2")
WHOLE_ONLY = "whole only"  # what offers no way to cut it: nothing was proved but that it can be repeated
UNPROVED = {"aten.empty_like": "its values are undefined"}


@dataclass(frozen=True)
class Outcome:
    """Outcome of one operator's cases. `strategies` counts those of every case, mesh and seed.

    `cuts` is False if all of them repeat the whole operator. `error` is the largest relative error of a result or
    gradient in float64; `failures` has a line for each wrong strategy; `reason` explains why the operator has no case.
    """

    target: str
    cases: int
    strategies: int
    error: float
    seconds: float
    failures: tuple[str, ...]
    reason: str = ""
    cuts: bool = True

    @property
    def proved(self) -> bool:
        return not self.failures and not self.reason and self.cuts


def prove_table(targets: Sequence[str] = (), meshes: Sequence[str] = (), seeds: int = 1) -> Iterator[Outcome]:
    """One outcome for each operator, alphabetical: the named ones (`aten.` may be left out), or all."""
    if seeds < 1:
        raise UsageError(f"--seeds {seeds} would prove nothing", "--seeds 1")
    wanted = [_named(target) for target in targets] or _ruled()
    parsed = [_mesh(text) for text in meshes or MESHES]
    for target in sorted(set(wanted)):
        start = time.perf_counter()
        cases = [case for case in ALL if case.target == target]
        verdicts = [(case, mesh, v) for case in cases for mesh in parsed for v in prove_case(case, mesh, seeds)]
        failures = tuple(f"{case_id(case)} on {mesh}: {_line(v)}" for case, mesh, v in verdicts if v and _line(v))
        unknown = tuple(f"{case_id(case)}: the rule does not fit" for case in cases if not _known(case))
        reason = "" if cases else UNPROVED.get(target, "no proof case")
        if reason and target not in UNPROVED:
            unknown = (reason,)
        error = max((v.error for _, _, v in verdicts), default=0.0)
        seconds = time.perf_counter() - start
        cuts = any(_cuts(v.strategy) for _, _, v in verdicts)
        yield Outcome(
            target=target,
            cases=len(cases),
            strategies=len(verdicts),
            error=error,
            seconds=seconds,
            failures=unknown + failures,
            reason=reason,
            cuts=cuts,
        )


def _cuts(strategy: Strategy) -> bool:
    """Does the strategy shard over an axis, rather than repeat the whole operator?"""
    return any(choice.kind not in ("repeat", "repeat_partial") for choice in strategy.choices)


def _mesh(text: str) -> Mesh:
    """Mesh to prove on; UsageError if it has too many devices, which all run here in turn."""
    mesh = check_axis_names(Mesh.parse(text))
    if mesh.size > MOST_RANKS:
        message = f"--mesh {text} has {mesh.size} devices: a proof runs each of them here, at most {MOST_RANKS}"
        raise UsageError(message, "--mesh dp=2,tp=4")
    return mesh


def outcome_table(outcomes: Sequence[Outcome]) -> str:
    """A line for each operator, then what is wrong, then the sums."""
    rows: list[Sequence[str]] = [("operator", "cases", "strategies", "largest error", "time", "")]
    for o in outcomes:
        word = f"{len(o.failures)} WRONG" if o.failures else f"not proved: {o.reason}" if o.reason else ""
        word = word or ("" if o.cuts else WHOLE_ONLY)
        figures = (str(o.cases), str(o.strategies), f"{o.error:.1e}", format_seconds(o.seconds, 2))
        rows.append((o.target, *figures, word))
    wrong = [f"{o.target}: {line}" for o in outcomes for line in o.failures]
    proved, whole = sum(o.proved for o in outcomes), sum(not (o.failures or o.reason or o.cuts) for o in outcomes)
    strategies = sum(o.strategies for o in outcomes)
    seconds = format_seconds(sum(o.seconds for o in outcomes), 2)
    also = f", {whole} {WHOLE_ONLY}" if whole else ""
    last = f"{proved} of {len(outcomes)} operators proved{also}, {strategies} strategies, in {seconds}"
    return "\n".join([*table(rows), *wrong, last])


def outcome_dict(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Data for `--json`; seconds."""
    return {
        "proved": sum(o.proved for o in outcomes),
        "strategies": sum(o.strategies for o in outcomes),
        "operators": [asdict(o) for o in outcomes],
    }


def _line(v: Verdict) -> str:
    return f"{v.strategy}: {v.failure or v.skipped}" if v.failure or v.skipped else ""


def _known(case: OpCase) -> bool:
    graph = one_op_graph(case)
    return instance(graph, graph.ops[0]).known


def _ruled() -> list[str]:
    return [target for target, known in OPERATORS.items() if known.rule is not None]


def _named(target: str) -> str:
    ruled = _ruled()
    name = target if target in ruled else f"aten.{target}"
    if name not in ruled:
        near = difflib.get_close_matches(name, ruled, 3)
        raise UsageError(f"there is no rule for {target!r}", ", ".join(near) or "autoshard prove, which lists them all")
    return name


def prove_case(case: OpCase, mesh: Mesh, seeds: int = 1, refined: Refinements = ()) -> list[Verdict]:
    """Verdict on every strategy of the case, with operands of each seed."""
    graph = one_op_graph(case)
    offered = offered_by(graph, mesh, refined=refined)
    return [prove_strategy(case, graph, strategy, mesh, seed) for strategy in offered for seed in range(seeds)]


def prove_strategy(case: OpCase, graph: Graph, strategy: Strategy, mesh: Mesh, seed: int = 0) -> Verdict:
    """Verdict on one strategy of the case with graph `one_op_graph`'s; in lock-step if its variant communicates."""
    talks = bool(localise(graph, graph.ops[0], strategy, mesh).axes)
    run = _lockstep(mesh) if talks else _each(mesh)
    from autoshard.verification.operator_calls import run_emitted

    return verdict(case, graph, strategy, mesh, run, partial(run_variant, mesh), seed, run_emitted)


def _lockstep(mesh: Mesh) -> Run:
    """Runs all devices at once, for a variant that communicates."""
    from autoshard.verification.ranks.lockstep import run_lockstep

    return lambda work: run_lockstep(dict(mesh.axes), lambda device: work(device.rank, device))


def _each(mesh: Mesh) -> Run:
    return lambda work: [work(rank, _alone(mesh, rank)) for rank in range(mesh.size)]


def _alone(mesh: Mesh, rank: int) -> ParallelMesh:
    """Mesh of a device without collectives."""
    import torch

    from autoshard.emit.runtime.mesh import ParallelMesh

    device = ParallelMesh(dict(mesh.axes), rank, lambda *_: None, torch.device("cpu"))  # type: ignore[arg-type]
    device.random.exact = True
    return device


def run_variant(mesh: Mesh, context: Any, local: LocalCall, operands: Sequence[Tensor | None]) -> Any:
    """Runs the runtime's variant on one device; without a context, the whole operator on a mesh of one device."""
    from autoshard.emit import runtime

    device = context or _alone(Mesh(tuple((name, 1) for name in mesh.names)), 0)
    axes = {role: tuple(device[name] for name in names) for role, names in local.axes}
    arguments = list(operands)
    if local.variant == "random_attention":
        arguments += [None] * (4 - len(arguments))  # its mask is no optional argument
    else:
        while arguments and arguments[-1] is None:
            arguments.pop()
    attributes = {name: plain(value) if name == "dtype" else value for name, value in local.attributes}
    extra = [device.random] if local.variant.startswith("random_") else []
    return getattr(runtime, local.variant)(*arguments, *extra, **attributes, **axes)
