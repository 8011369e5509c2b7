"""What is published of the Ascend 910C beside the profile `ascend-910c`: collectives of experts, and shares of a peak.

sgl-project/sgl-kernel-npu's README (DeepEP-Ascend on an A3 SuperPoD of 384, Apache-2.0) and the paper on CloudMatrix384
(arXiv 2506.12708, section 5). Training steps of decoders are in neither, nor in MindSpeed's or MindFormers' tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from autoshard.cluster.hardware import load_hardware
from autoshard.costs import collective_seconds
from autoshard.ir.mesh import Mesh
from benchmarks.steps import percent

PROFILE = "ascend-910c"
TOKENS, HIDDEN, TOP_K = 4096, 7168, 8  # of a device in the throughput kernels
# Devices (dies), GB/s of dispatch in int8 and of combine in bf16: 4,096 tokens a device.
THROUGHPUT = ((8, 146, 125), (16, 107, 103), (32, 102, 95), (64, 81, 91), (128, 57, 81))
# The same of 128 tokens: microseconds and GB/s of dispatch, of combine.
LATENCY = (("DeepEP-Ascend", 8, 132, 58, 126, 116), ("DeepEP-Ascend", 16, 139, 55, 135, 109),
           ("DeepEP-Ascend", 32, 153, 49, 151, 97), ("CloudMatrix384", 8, 116, 71, 118, 131),
           ("CloudMatrix384", 256, 152, 54, 149, 103))  # fmt: skip
GIGA, MICRO = 1e9, 1e-6


def _rows() -> Iterator[tuple[str, int, str, float, float]]:
    """Source, devices, what, bytes that a device sends, seconds measured."""
    for devices, dispatch, combine in THROUGHPUT:
        for what, rate, item in (("dispatch, int8", dispatch, 1), ("combine, bf16", combine, 2)):
            size = float(TOKENS * TOP_K * HIDDEN * item)
            yield "DeepEP-Ascend, 4,096 tokens", devices, what, size, size / (rate * GIGA)
    for source, devices, there, there_rate, back, back_rate in LATENCY:
        for what, micro, rate in (("dispatch, int8", there, there_rate), ("combine, bf16", back, back_rate)):
            seconds = micro * MICRO
            yield f"{source}, 128 tokens", devices, what, seconds * rate * GIGA, seconds


def published(data: Path) -> list[str]:
    """Nothing is fitted."""
    hardware = load_hardware(PROFILE)
    counts = sorted({devices for _, devices, *_ in _rows()})
    found: dict[tuple[str, str], dict[int, str]] = {}
    large, small = [], []
    for source, devices, what, size, seconds in _rows():
        made = collective_seconds(hardware, Mesh((("ep", devices),)), 0, "all_to_all", size)
        (large if "4,096" in source else small).append(made / seconds - 1)
        found.setdefault((source, what), {})[devices] = f"{made / seconds - 1:+.0%}"
    return [
        f"| source | kernel | {' | '.join(map(str, counts))} devices |",
        f"|---|---|{'--:|' * len(counts)}",
        *(
            f"| {source} | {what} | {' | '.join(own.get(devices, '–') for devices in counts)} |"
            for (source, what), own in found.items()
        ),
        "",
        f"Large messages {percent(np.array(large))}, small ones {percent(np.array(small))} (mean, median, bias). These",
        "links lose bandwidth as groups grow and small messages take a fixed time; the profile has neither, so",
        "calibrate (`autoshard calibrate`). The paper's kernels reach 65.4% of the peak in latent attention (here",
        f"{hardware.constant('attention.compute'):.0%}) and 77.4 to 82.7% in int8 products (here "
        f"{hardware.constant('matmul.compute'):.0%}, in bf16), without shapes to compare.",
    ]


TABLES = {
    "Ascend 910C": published,
}
