"""A process ends only when the threads of its process groups have: one that is late aborts it (SIGABRT, once in sixty).

Gloo's threads let go of tensors some time after a collective; in an interpreter that is ending that is fatal. So the
groups must really end, which anything that holds one (a cache of torch, a default argument) prevents.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture_model
from autoshard.ir.mesh import Mesh
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests import launched

RUN_AND_LIST_THREADS = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
own = [open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")]
os.write(1, f"threads: {[name for name in own if 'gloo' in name]}\\n".encode())  # whole, whatever other ranks write
"""


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_no_thread_of_a_process_group_outlives_training(tmp_path: Path) -> None:
    graph = capture_model(Small(), (torch.randn(8, 8),))
    plan = search(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse("dp=2")))
    write_package(tmp_path / "package", emit(lower(plan, graph), plan, graph))
    (tmp_path / "run.py").write_text(RUN_AND_LIST_THREADS)
    train = [tmp_path / "package" / "train.py", "--backend", "gloo", "--steps", 2]
    for more in (["--save", str(tmp_path / "saved")], ["--resume", str(tmp_path / "saved"), "--steps", "3"]):
        done = launched.torchrun(tmp_path / "run.py", 2, *train, *more)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("threads: []") == 2, done.stdout
