"""One gloo process: `python -m autoshard.verify.worker PACKAGE JOB RESULTS`, in the environment of torchrun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.mesh import Mesh
from autoshard.verify.exchange import load_job, save_result
from autoshard.verify.package import load_package
from autoshard.verify.ranks import run_rank


def main(package: str, job_file: str, results: str) -> None:
    torch.set_num_threads(1)
    runtime = _run(Path(package), Path(job_file), Path(results))
    dist.barrier()
    runtime.leave()


def _run(package: Path, job_file: Path, results: Path) -> Any:
    """The job; nothing is left of it but its result file. Returns the package's runtime."""
    job = load_job(job_file)
    loaded = load_package(package)
    mesh = loaded.runtime.ParallelMesh.from_environment(dict(Mesh.parse(job.mesh).axes), "gloo")
    save_result(run_rank(loaded, mesh, job), results / f"rank{mesh.rank}.pt")
    return loaded.runtime


if __name__ == "__main__":
    main(*sys.argv[1:])
