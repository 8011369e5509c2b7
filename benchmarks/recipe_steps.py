"""Published recipes of NVIDIA and MindSpeed-LLM, as runs of `autoshard estimate`. Reads a folder; nothing of it is in
here.

NVIDIA's are Megatron-Core's with TransformerEngine on H100 and B200: distributed optimizer, sequence parallelism where
TP is, gradients summed in bfloat16, a fused loss, nothing computed again; in float8 `--precision fp8`. MindSpeed-LLM's
launch scripts are of 1.0.RC3 on Ascend 910B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.transformer import FP8_FSDP, Schedule, TrainingRun, Transformer
from benchmarks.cluster_steps import ASCEND_SOFTWARE, CORE
from benchmarks.measurements import read
from benchmarks.steps import NamedRow

MACHINES = {"h100": "h100-80g-sxm", "b200": "b200-180g-sxm"}
DGXC, RC3 = "dgxc 25.04.01", "MindSpeed-LLM 1.0.RC3"
OTHER_RELEASE = {"24.11": "dgxc 24.11.1", "24.09": "dgxc 24.11.1"}  # of rows that say so
# Its script sets `--swap-attention --recompute-method block --recompute-num-layers 30`, more than a stage has; the
# table has no column for it. Experts are computed again, and what attention and norms keep waits in the host's memory.
SWAPPED = ("mixtral_8x22b_32k",)
WORDS = 32_000  # of a script that names a tokenizer of Llama 2 and no vocabulary


@lru_cache(maxsize=4)
def nvidia(data: Path) -> tuple[tuple[NamedRow, str], ...]:
    """Rows with the release that each is of."""
    return (*_dgxc(data), *_nemo(data))


def _dgxc(data: Path) -> Iterator[tuple[NamedRow, str]]:
    for raw in read(data / "dgxc_h100_steps.csv"):
        family, _, release = raw["family"].partition("/")
        yield _nvidia_row(raw, family, "h100", float(raw["step_seconds"])), OTHER_RELEASE.get(release, DGXC)


def _nemo(data: Path) -> Iterator[tuple[NamedRow, str]]:
    for raw in read(data / "nemo_fp8_steps.csv"):
        release, _, name = raw["name"].partition(" ")
        tokens = float(raw["tokens_per_second_per_gpu"]) * int(raw["gpus"])
        seconds = int(raw["global_batch"]) * int(raw["sequence"]) / tokens
        yield _nvidia_row(raw, name, raw["machine"], seconds), f"NeMo {release}"


def _nvidia_row(raw: Mapping[str, str], name: str, machine: str, seconds: float) -> NamedRow:
    count = _counts(raw)
    model = Transformer(
        count["layers"], count["hidden"], count["heads"], count["sequence"], count["vocabulary"], count["kv_heads"],
        count["ffn"], raw["activation"], "flash", raw["positions"], raw["norm"], raw["bias"] == "1",
        raw["tied"] == "1", fused_loss=True, experts=count["experts"], top_k=count["top_k"],
        expert_hidden=count["expert_hidden"],
    )  # fmt: skip
    tp, pp, cp, chunks = (count[key] for key in ("tp", "pp", "cp", "virtual_stages"))
    fsdp = bool(count.get("fsdp"))
    schedule: Schedule = "interleaved" if chunks > 1 else "1f1b"
    dp = count["gpus"] // (tp * pp * cp)
    precision = {"bf16": "bf16", "fp8": "fp8"}[raw["precision"]]
    run = TrainingRun(
        count["global_batch"], count["micro_batch"], dp, tp, pp, schedule, max(1, chunks), zero=3 if fsdp else 1,
        sequence_parallel=tp > 1, precision=FP8_FSDP if fsdp else precision, overlap=True, reduced="bf16",
        software=CORE, cp=cp, ep=count.get("ep") or 1,
    )  # fmt: skip
    told = f"{name} {raw['precision']} on {run.devices}"
    return NamedRow(model, run, seconds, (told,), told, load_hardware(MACHINES[machine]))


def _counts(raw: Mapping[str, str]) -> dict[str, int]:
    return {key: int(text or 0) for key, text in raw.items() if not text or text.isdigit()}


@lru_cache(maxsize=4)
def mindspeed(data: Path, software: str = ASCEND_SOFTWARE) -> tuple[tuple[NamedRow, str], ...]:
    """Those whose script and table agree on the number of nodes. `mc2` and flags that `estimate` does not describe are
    left as they are; a head dim other than hidden over heads can't be said. SWAPPED is as if all were recomputed."""
    found = []
    for raw in read(data / "mindspeed_910b_rc3.csv"):
        count = _counts(raw)
        if count["nodes_in_script"] * 8 != count["npus"] or raw["head_dim"]:
            continue
        model = Transformer(
            count["layers"], count["hidden"], count["heads"], count["sequence"], count["vocabulary"] or WORDS,
            count["kv_heads"], count["ffn"], "swiglu", "flash" if raw["flash"] == "1" else "unfused", "rotary",
            "rms_norm", False, False, experts=count["experts"],
        )  # fmt: skip
        tp, pp, cp, ep = (count[key] for key in ("tp", "pp", "cp", "ep"))
        layers = tuple(map(int, raw["layers_of_stages"].split(","))) if raw["layers_of_stages"] else ()
        each = count["layers_per_virtual_stage"]
        chunks = model.layers // pp // each if each else 1
        schedule: Schedule = "interleaved" if chunks > 1 else "1f1b"
        run = TrainingRun(
            count["global_batch"], count["micro_batch"], count["npus"] // (tp * pp * cp), tp, pp, schedule, chunks,
            zero=count["distributed_optimizer"], sequence_parallel=raw["sequence_parallel"] == "1" and tp > 1,
            precision=raw["precision"], overlap=raw["overlap_grad_reduce"] == "1", software=software,
            stage_layers=layers, cp=cp, ep=ep, recompute="full" if raw["name"] in SWAPPED else "none",
        )  # fmt: skip
        seconds = run.batch * model.sequence / float(raw["tokens_per_second_per_npu"]) / run.devices
        found.append((NamedRow(model, run, seconds, (raw["name"],), raw["name"], load_hardware("ascend-910b2")), RC3))
    return tuple(found)
