"""A package without a loss: its README's program runs as it stands, and what it returns is the original's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests import launched
from tests.slow import slow


class Tower(torch.nn.Module):
    """Batch norm, and two results: what an encoder returns that is called after training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 10)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.head(self.norm(x)) * scale
        return y.softmax(-1), y.norm(dim=-1)


def tower() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return Tower(), (torch.randn(8, 6), torch.rand(8, 1))


@pytest.mark.parametrize("strategy", [slow("dp"), "fsdp"])
def test_the_program_of_the_readme_gives_the_whole_result_of_the_original(strategy: str, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    graph = capture(f"{__file__}:tower", {}, training=False)
    plan = search(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse("dp=2"), strategy=strategy))
    write_package(folder, emit(lower(plan, graph), plan, graph))
    model, inputs = tower()
    model.norm.running_mean += torch.rand(6)  # type: ignore[operator, union-attr]
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save([inputs, tuple(x.clone() for x in inputs)], tmp_path / "batches.pt")

    readme = (folder / "README.md").read_text()
    assert "--steps" not in readme and "--eval-data" not in readme  # nothing of what train.py would refuse
    named = ("| input |", "| `x`", "| `scale`")
    rows = [line.split("|")[1:4] for line in readme.splitlines() if line.startswith(named)]
    assert [[word.strip() for word in row] for row in rows] == [
        ["input", "shape", "dtype"], ["`x`", "(8, 6)", "float32"], ["`scale`", "(8, 1)", "float32"],
    ]  # fmt: skip
    (block,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert "S0" in block, block  # there is something to gather
    said = block.replace('"nccl"', '"gloo"').replace("model.safetensors", "model.pt")
    mine = "def my_batches():\n    return torch.load('batches.pt')\n\n\nmain()"
    said = said.replace("\nmain()", f"\n{mine}").replace("print(whole)", "torch.save(whole, 'whole.pt')")
    (folder / "infer.py").write_text(said)
    done = launched.torchrun(folder / "infer.py", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "whole.pt"), model.eval()(*inputs)[0])
