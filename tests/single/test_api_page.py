"""The examples of docs/api.md run, each by itself, as they stand there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import launched

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


SCRIPTS = [(ROOT / "examples" / f"{name}.py").read_text("utf-8") for name in ("shard_function", "operator_strategies")]


@pytest.mark.parametrize("text", [*EXAMPLES, *SCRIPTS], ids=range(len(EXAMPLES) + len(SCRIPTS)))
def test_example(text: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = launched.run(["example.py"], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
