"""An autoshard command in this process, and what it takes beyond capturing its model: CPU seconds.

python -m benchmarks.beyond_capture FILE plan MODEL --mesh dp=2,tp=4 ...

Into FILE goes {"all": ..., "start": ..., "captures": ...}: from the start of the process to the end of the command, and
of these what `autoshard trace` takes too: to the first capture, and the captures (of the model as it is, and anew for
what it tells of other sizes). Before its first capture `plan` reads more than `trace` does: the start of `trace` says
what both take.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CAPTURES = ("read_graph", "with_probed_sizes")  # of autoshard.workflow


def main() -> int:
    sys.path[0] = ""  # as `python -m autoshard` has it
    from autoshard import workflow
    from autoshard.cli import commands

    starts, spent = list[float](), list[float]()

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def captured(*args: Any) -> Any:
            before = time.process_time()
            starts.append(before)
            try:
                return work(*args)
            finally:
                spent.append(time.process_time() - before)

        return captured

    for name in CAPTURES:
        setattr(workflow, name, counted(getattr(workflow, name)))
    code = commands.main(sys.argv[2:])
    seconds = {"all": time.process_time(), "start": min(starts, default=0.0), "captures": sum(spent)}
    Path(sys.argv[1]).write_text(json.dumps(seconds), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
