"""One gloo process: `python -m autoshard.verify.worker PACKAGE JOB RESULTS`, in the environment of torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from autoshard.mesh import Mesh
from autoshard.verify.exchange import load_job, save_result
from autoshard.verify.package import load_package
from autoshard.verify.ranks import run_rank


def main(package: str, job_file: str, results: str) -> None:
    torch.set_num_threads(1)
    job = load_job(Path(job_file))
    loaded = load_package(Path(package))
    mesh = loaded.runtime.ParallelMesh.from_environment(dict(Mesh.parse(job.mesh).axes), "gloo")
    result = run_rank(loaded, mesh, job)
    save_result(result, Path(results, f"rank{mesh.rank}.pt"))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter's end


if __name__ == "__main__":
    main(*sys.argv[1:])
