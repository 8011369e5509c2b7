"""What a package uses and an older torch lacks is told, from its sources alone."""

from __future__ import annotations

from pathlib import Path

from benchmarks.oldest_torch import Sources, faults

OLD = {
    "torch/__init__.py": "from torch import nn as nn\nfrom torch._tools import *\nfrom ._C import zeros\n",
    "torch/_tools.py": "def merge(x, *, dim): ...\nif True:\n    from torch.late import later\n",
    "torch/late.py": "from torch import merge\ndef later(x, **more): ...\n",
    "torch/_C/__init__.pyi": "def zeros(size): ...\n",
    "torch/nn/__init__.py": "class Linear:\n    def __init__(self, given, made): ...\n",
}


def test_names_and_keywords(tmp_path: Path) -> None:
    for name, text in OLD.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    used = tmp_path / "package" / "used.py"
    used.parent.mkdir()
    used.write_text(
        "import torch\nfrom torch import nn\nfrom torch.late import later, never\n"
        "torch.merge(1, dim=2)\ntorch.merge(1, dims=2)\ntorch.later(1, any=2)\ntorch.zeros(3)\ntorch.ones(3)\n"
        "nn.Linear(given=1, made=2)\nnn.Linear(1, bias=2)\nnn.Norm(1)\nlater(never)\ntorch.ops.aten.what(1)\n"
    )
    assert sorted(faults(used, Sources(tmp_path))) == [
        "package/used.py:10: torch.nn.Linear(bias=…)",
        "package/used.py:11: torch.nn.Norm",
        "package/used.py:12: torch.late.never",
        "package/used.py:5: torch.merge(dims=…)",
        "package/used.py:8: torch.ones",
    ]
