"""Runs a package for parameter servers: servers and workers in this process, in float64 from the same state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autoshard.verification.comparison.compare import RankResult, RankStep
from autoshard.verification.original.float64 import exact_precision
from autoshard.verification.original.optimizers import OPTIMIZERS, ROW_RATE, set_options
from autoshard.verification.ranks.loaded_package import LoadedPackage
from autoshard.verification.ranks.rank_steps import Job

SERVER_PLAN = "server_plan.py"


def served_notes(folder: Path) -> tuple[str, ...]:
    """Notes on what is not verified of a package for parameter servers; empty for other packages."""
    file = folder / SERVER_PLAN
    if not file.exists():
        return ()
    asynchronous = "STALENESS = None" not in file.read_text(encoding="utf-8")
    order = ", and as one step: its order of asynchronous updates is any" if asynchronous else ""
    return (f"servers and workers in one process, without Ray{order}",)


def run_served(package: LoadedPackage, job: Job) -> RankResult:
    """Runs a step of all shares for each batch, which workers take in any order."""
    run, options = package.server_run, OPTIMIZERS[job.optimizer][1]
    with exact_precision():
        mesh_axes = package.model.MESH
        how = (package.server_plan, job.optimizer, job.micro_batches)
        cluster = run.InProcess(package.model.build_model, mesh_axes, *how, job.state, job.seed)
        for worker in cluster.workers:
            worker.mesh.random.exact, worker.mesh.random.seed = True, job.seed
        for server in cluster.servers:
            server.step = -1  # the reference counts from 0
            if server.optimizer is not None:
                set_options(server.optimizer, job.optimizer)
        gradients: dict[str, Any] = {}
        evaluation = _evaluated(package, cluster, job) if job.evaluates else ()
        steps = []
        count = len(job.input_layouts)
        for number, batch in enumerate(job.batches):
            inputs = [[x.clone() for x in batch[i : i + count]] for i in range(0, len(batch), count)]
            works = run.share_works(number, inputs, _labels(package, cluster, inputs), None)
            results = cluster.compute(run.Dealer(), works, lambda waiting: waiting - 1)
            norm = run.update_norm(cluster.client, 0, number)
            gradients = gradients or cluster.gradients()
            run.apply_update(cluster.client, 0, number, norm, job.max_norms[number], (options["lr"], ROW_RATE))
            outputs = tuple(output for result in results for output in _in_order(result.outputs, job))
            fixed = {name: value.detach().clone() for name, value in cluster.fixed.items()}
            steps.append(RankStep(outputs, norm, cluster.values() | fixed, fixed))
        return RankResult(gradients, tuple(steps), evaluation)


def _labels(package: LoadedPackage, cluster: Any, inputs: list[list[Any]]) -> list[list[Any]]:
    worker = cluster.workers[0]
    return package.server_run.labels_of_step(  # type: ignore[no-any-return]
        package.model.build_labels, package.model.LABEL_COUNTS, worker.mesh, inputs, cluster.fixed, cluster.client, 0
    )


def _evaluated(package: LoadedPackage, cluster: Any, job: Job) -> tuple[Any, ...]:
    worker, first = cluster.workers[0], [x.clone() for x in job.batches[0][: len(job.input_layouts)]]
    worker.load(0)
    return _in_order(package.evaluation.evaluated(worker.model, worker.mesh, first), job)


def _in_order(outputs: Any, job: Job) -> tuple[Any, ...]:
    """Outputs in the order of the original model; the package returns the loss first."""
    ordered = [output.detach().clone() for output in outputs]
    if job.loss > 0:
        ordered.insert(job.loss, ordered.pop(0))
    return tuple(ordered)
