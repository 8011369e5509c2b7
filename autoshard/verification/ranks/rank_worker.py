"""One gloo process, as torchrun starts it: `python -m autoshard.verification.ranks.rank_worker PACKAGE JOB RESULTS ...`

It runs a job, and then the package's train.py with the options that are left, if there are any.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.ir.mesh import Mesh
from autoshard.verification.ranks.job_files import load_job, save_result
from autoshard.verification.ranks.loaded_package import load_package
from autoshard.verification.ranks.rank_steps import run_rank
from autoshard.verification.ranks.started_train import run_as_program


def main(package: str, job_file: str, results: str, *options: str) -> None:
    torch.set_num_threads(1)
    runtime = _run(Path(package), Path(job_file), Path(results))
    dist.barrier()
    runtime.leave()
    if options:
        del runtime
        run_as_program(Path(package), options)


def _run(package: Path, job_file: Path, results: Path) -> Any:
    """Runs the job and leaves only its result file. Returns the package's runtime."""
    job = load_job(job_file)
    loaded = load_package(package)
    axes = dict(Mesh.parse(job.mesh).axes)
    staged: dict[str, Any] = {}
    if max(job.part_stages):
        staged = {"part_stages": job.part_stages, "places": [dict(Mesh.parse(place).axes) for place in job.places]}
    mesh = loaded.runtime.ParallelMesh.from_environment(axes, "gloo", **staged)
    save_result(run_rank(loaded, mesh, job), results / f"rank{dist.get_rank()}.pt")
    return loaded.runtime


if __name__ == "__main__":
    sys.path.append(str(Path.cwd()))  # for what the package imports
    main(*sys.argv[1:])
