"""How long a test waits for what it started: what works ends before on any machine, what hangs ends at last."""

from __future__ import annotations

HANGS = 3000.0  # seconds; below the limit of a whole test in pyproject.toml
