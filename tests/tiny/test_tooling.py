"""ruff and mypy as tests, so that one command checks everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {
    "ruff": ["ruff", "check", "--no-cache", "."],
    "format": ["ruff", "format", "--no-cache", "--check", "."],
    "mypy": ["mypy", "--no-error-summary"],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tool_is_content(tool: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *TOOLS[tool]], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
