"""Jobs and results as files, between the process that compares and those that run."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from autoshard.verification.comparison.compare import RankResult, RankStep
from autoshard.verification.ranks.rank_steps import Job


def save_job(job: Job, path: Path) -> None:
    torch.save({field.name: getattr(job, field.name) for field in fields(job)}, path)


def load_job(path: Path) -> Job:
    """Job in the file; its tensors stay on disk until used, shared by the ranks."""
    return Job(**torch.load(path, mmap=True, weights_only=True))


def save_result(result: RankResult, path: Path) -> None:
    torch.save(asdict(result), path)


def load_result(path: Path) -> RankResult:
    data: dict[str, Any] = torch.load(path, mmap=True, weights_only=True)
    return RankResult(data["gradients"], tuple(RankStep(**step) for step in data["steps"]), tuple(data["evaluation"]))
