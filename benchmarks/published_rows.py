"""Published training steps as runs of `autoshard estimate`, and what it predicts: what all tables share.

What stands in papers and READMEs is in `published_runs.toml`; tables of measurements are read from a folder, and
nothing of them is in this repository. What a source leaves out is assumed, and said here.
"""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import Estimate, estimate, host_of
from autoshard.estimate.transformer import FP8_FSDP, FSDP, TrainingRun, Transformer
from benchmarks import harness
from benchmarks.measurements import read

Floats = NDArray[np.float64]
GIB = 2**30
WIDTH = 118  # of the page
Cells = tuple[object, ...]
Figures = dict[str, Any]  # what a part of validation.md.j2 says
VOCABULARY = 51_200  # of Megatron's runs: GPT-2's, padded
WORDS = 50_257  # of GPT-2; the single-node runs share them without padding, and leave out what is over
CORE, ASCEND, FSDP_SOFTWARE, MEGATRON = "megatron-core", "mindspeed", "fsdp", "megatron"
A100, CLUSTER, BLOOM_CLUSTER = "a100-80g-sxm", "a100-80g-sxm-4hdr", "a100-80g-sxm-4opa"
FITTED_WIDTH = 1024  # of the single-node models that Megatron's host is fitted to
GPUS = {"a100_40gb": "a100-40g-sxm", "a100_80gb": A100, "h100_80gb": "h100-80g-sxm"}
GENERATIONS = {"ampere": ("a100_40gb", "a100_80gb"), "hopper": ("h100_80gb",)}
MPT_SIZES = ("125m", "350m", "760m", "1b", "3b", "7b", "13b", "30b", "70b")
MACHINES = {"h100": "h100-80g-sxm", "b200": "b200-180g-sxm"}
OTHER_RELEASE = {"24.11": "dgxc 24.11.1", "24.09": "dgxc 24.11.1"}  # of rows that say so
# Its script sets `--swap-attention --recompute-method block --recompute-num-layers 30`, more than a stage has; the
# table has no column for it. Experts are computed again, and what attention and norms keep waits in the host's memory.
SWAPPED = ("mixtral_8x22b_32k",)
CELLS: dict[str, Callable[[str], Any]] = {"numbers": int, "figures": float, "texts": str, "flags": "1".__eq__}
CASE = re.compile(r"llama3_(\d+)b_l(\d+)_tp(\d+)(?:_cp(\d+))?_pp(\d+)_dp(\d+)(?:_seq(\d+))?_mbc(\d+)_cef$")


@dataclass(frozen=True, eq=False)
class Step:
    """One measured step. `workload` is what a user would hold fixed while choosing the split. `release`: of the
    framework. `fitted`: a number of the software was fitted to it. `again`: "half" where every second layer is computed
    again, else as the run has it. `memory_gb`: what was reported, NaN where nothing; `full`: it ran out of memory."""

    model: Transformer
    run: TrainingRun
    measured_seconds: float
    hardware: Hardware
    name: str = ""
    workload: tuple[object, ...] = ()
    release: str = ""
    fitted: bool = False
    again: str = ""
    memory_gb: float = float("nan")
    full: bool = False


def step(record: Mapping[str, Any]) -> Step:
    """Of columns by their names; a run is parallel along the sequence where it is tensor parallel, if nothing says
    otherwise."""
    model = Transformer(**_fields(Transformer, record))
    setup = _fields(TrainingRun, record)
    recompute = record.get("again", "")
    setup |= {"recompute": recompute} if recompute and recompute != "half" else {}
    chunked = setup.get("interleave", 1) > 1
    setup = {"schedule": "interleaved" if chunked else "1f1b", "sequence_parallel": setup.get("tp", 1) > 1} | setup
    run = TrainingRun(**setup)
    extra = {key: record[key] for key in ("workload", "release", "fitted", "memory_gb", "full") if key in record}
    hardware = _hardware(record["hardware"])
    return Step(model, run, _seconds(record, model, run), hardware, record.get("name", ""), again=recompute, **extra)


def _fields(kind: type[Transformer] | type[TrainingRun], record: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: record[field.name] for field in fields(kind) if field.name in record}


def _seconds(record: Mapping[str, Any], model: Transformer, run: TrainingRun) -> float:
    """NaN where none was measured."""
    if "tokens" in record:
        return run.batch * model.sequence / record["tokens"] / run.devices
    if "milliseconds" in record:
        return float(record["milliseconds"]) * 1e-3
    if "teraflops" in record:
        flops = 72 * run.batch * model.sequence * model.layers * model.hidden**2 * (
            1 + model.sequence / (6 * model.hidden) + model.vocabulary / (12 * model.hidden * model.layers)
        )  # fmt: skip
        return float(flops / (record["teraflops"] * 1e12 * run.devices))
    return float(record.get("seconds", "nan"))


TABLES = harness.rows_of("published_runs.toml")


# --- published_runs.toml ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _hardware(name: str) -> Hardware:
    """A profile, or one with other figures."""
    known = TABLES["hardware"].get(name)
    if known is None:
        return load_hardware(name)
    base = load_hardware(known["profile"])
    if "memory_bandwidth" in known:
        return replace(base, name=name, memory_bandwidth=known["memory_bandwidth"])
    network = replace(base.links[1], bandwidth=known["node_bits"] / 8 / base.devices_per_node)
    return replace(base, links=(base.links[0], network, *base.links[2:]))


def records(table: str) -> Iterator[dict[str, Any]]:
    """The rows of a table with what they have in common, and the sizes of their models."""
    content = TABLES[table]
    for cells in content["rows"]:
        record = content.get("common", {}) | dict(zip(content["columns"], cells, strict=True))
        models = {} if table == "models" else {row["model"]: row for row in records("models")}
        yield models.get(record.get("model"), {}) | record


@lru_cache(maxsize=16)
def published(table: str) -> tuple[Step, ...]:
    return tuple(step(record) for record in records(table))


@lru_cache(maxsize=4)
def ascend(software: str = ASCEND) -> tuple[Step, ...]:
    """Every second model of a device is what the rate of products is fitted to."""
    steps = []
    for table in ("mindspeed", "mindspeed_bloom", "mindformers"):
        for number, row in enumerate(published(table)):
            fitted = number % 2 == 0 and table != "mindspeed_bloom"
            steps.append(replace(row, fitted=fitted, run=replace(row.run, software=software)))
    return tuple(steps)


@lru_cache(maxsize=1)
def fsdp_runs() -> tuple[Step, ...]:
    """FSDP on other hosts than the MPT table's, each eager run followed by the compiled one. Nothing is fitted to any
    of them."""
    steps = []
    for record in (*records("torchtitan"), *records("fms-fsdp")):
        device = "A100" if "a100" in record["hardware"] else "H100"
        name = f"{record['release']} {record['model']}, {device}"
        for compiled, column in enumerate(("tokens", "compiled_tokens")):
            if record[column]:
                tokens = record[column]
                tokens = tokens[0] * tokens[1] / tokens[2] if isinstance(tokens, list) else float(tokens)
                steps.append(step(record | {"name": name, "tokens": tokens, "compiled": bool(compiled)}))
    return tuple(steps)


def is_known(row: Step) -> bool:
    """Whether such a run's step can be judged: what it computes again is known, or (13B, eager) told by its HFU."""
    return not row.run.compiled or row.release == "torchtitan" or row.again == "none"


# --- tables of measurements -------------------------------------------------------------------------------------------


def _rows(data: Path, file: str, table: str = "") -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """The cells of each row of a file, and what published_files.toml makes of them."""
    schema = harness.rows_of("published_files.toml")[table or file]
    columns = [(name, field, kind) for kind in CELLS for name, field in schema.get(kind, {}).items()]
    for raw in read(data / f"{file}.csv"):
        row = {name.strip(): cell for name, cell in raw.items()}
        yield row, schema["common"] | {field: CELLS[kind](row[name]) for name, field, kind in columns if row.get(name)}


def vtrain(data: Path, file: str, single: bool = False) -> list[Step]:
    """vTrain's iterations (VIA-Research/vTrain, MIT): fp16, 1F1B, full recomputation. `single`: those of one node, in
    which nothing is computed again (docs/validation.md says why) and the vocabulary is not padded (the source's
    ShardedGptModel); the narrower models are what Megatron's host is fitted to."""
    steps = []
    for row, record in _rows(data, file, "vtrain"):
        record["vocabulary"] = WORDS // record["tp"] * record["tp"] if single else VOCABULARY
        record |= {"hardware": A100 if single else CLUSTER, "recompute": "none" if single else "full"}
        record |= {"fitted": single and record["hidden"] == FITTED_WIDTH, "name": f"{record['hidden']} wide"}
        parsed = step(record)
        workload = (replace(parsed.model, vocabulary=VOCABULARY), parsed.run.batch, int(row["# GPUs"]))
        steps.append(replace(parsed, workload=workload))
    return steps


def single_rows(data: Path) -> list[Step]:
    """The steps on one node."""
    return vtrain(data, "vtrain_a100_single_node", single=True)


def multi_rows(data: Path) -> list[Step]:
    return vtrain(data, "vtrain_a100_multi_node")


@lru_cache(maxsize=4)
def bloom(data: Path) -> tuple[Step, ...]:
    """BLOOM's plans on the cluster with the network that was measured there; full recomputation and eager attention are
    assumed. No second is fitted."""
    steps = []
    for raw, record in _rows(data, "bloom_steps"):
        if not raw["dp"]:
            continue  # one node: the replicas are not stated
        if record["batch"] % (record["micro_batch"] * record["dp"]) or record["heads"] % record["tp"]:
            continue
        full = "OOM" in (raw["memory_gb"], raw["note"])
        seconds = float("nan") if full or raw["step_seconds"] in ("", "x") else float(raw["step_seconds"])
        record |= {
            "seconds": seconds,
            "memory_gb": float(raw["memory_gb"]) if raw["memory_gb"].isdigit() else float("nan"),
            "name": f"{raw['size']} {raw['layers']}x{raw['hidden']}, {raw['heads']} heads",
            "workload": (raw["size"], raw["note"]), "full": full or not seconds > 0,
        }  # fmt: skip
        steps.append(step(record))
    return tuple(steps)


@lru_cache(maxsize=4)
def b200(data: Path) -> tuple[Step, ...]:
    """SimuMax's dense rows: those with experts are of DeepSeek, whose latent attention `estimate` does not describe."""
    models, steps = {row["model"]: row for row in records("models")}, []
    for raw, record in _rows(data, "simumax_b200_steps"):
        known = CASE.match(raw["case"])
        if not known:
            continue
        size, layers, tp, cp, pp, dp, length, micro_batches = (int(group or 0) for group in known.groups())
        record |= models[f"Llama 3 {size}B"] | {
            "layers": layers, "sequence": length or 4096, "batch": micro_batches * dp, "dp": dp, "tp": tp, "pp": pp,
            "cp": cp or 1, "name": f"Llama 3 {size}B", "workload": (size, micro_batches, length),
        }  # fmt: skip
        steps.append(step(record))
    return tuple(steps)


@lru_cache(maxsize=8)
def mpt(data: Path, software: str = FSDP_SOFTWARE, float8: bool = False) -> tuple[Step, ...]:
    """MosaicML's llm-foundry benchmarks: MPT models on 8 to 512 A100 and H100, all but those in amp_fp8
    (TransformerEngine, eager), or those alone. No biases, no dropout, the table tied, Triton's flash-attention, a fused
    loss. One number a device generation is fitted to every second model by size. `workload` begins with the device."""
    steps = []
    for raw, record in _rows(data, "mpt_fsdp_steps"):
        if raw["gpu"] not in GPUS or (raw["precision"] == "amp_fp8") != float8:
            continue
        devices = record["dp"]
        record |= {
            "software": software,
            "recompute": "full" if raw["checkpointing"] == "True" else "none",
            "zero": 3 if raw["sharding"].startswith("FULL") else 2, "precision": FP8_FSDP if float8 else FSDP,
            "reduced": "bf16" if raw["sharding"].endswith("PURE") else "fp32",
            "seconds": record["batch"] * record["sequence"] / float(raw["tokens_per_second_per_gpu"]) / devices,
            "workload": (raw["gpu"], raw["model"], record["sequence"], devices), "hardware": GPUS[raw["gpu"]],
            "fitted": raw["model"] in MPT_SIZES[::2],
        }  # fmt: skip
        steps.append(step(record))
    return tuple(steps)


@lru_cache(maxsize=2)
def mpt_float8(data: Path) -> tuple[Step, ...]:
    """Those in amp_fp8, with names."""
    rows = mpt(data, float8=True)
    return tuple(replace(r, name=f"MPT {r.name} on {r.run.devices}, {r.model.sequence} tokens, eager") for r in rows)


@lru_cache(maxsize=4)
def nvidia(data: Path) -> tuple[Step, ...]:
    """NVIDIA's recipes, Megatron-Core's with TransformerEngine on H100 and B200: distributed optimizer, sequence
    parallelism where TP is, gradients summed in bfloat16, a fused loss, nothing computed again; in float8
    `--precision fp8`."""
    steps = []
    for raw, record in _rows(data, "dgxc_h100_steps", "recipes"):
        family, _, release = raw["family"].partition("/")
        steps.append(_recipe(record, family, OTHER_RELEASE.get(release, "dgxc 25.04.01")))
    for raw, record in _rows(data, "nemo_fp8_steps", "recipes"):
        release, _, name = raw["name"].partition(" ")
        record["seconds"] = (
            record["batch"] * record["sequence"] / (float(raw["tokens_per_second_per_gpu"]) * record["dp"])
        )
        steps.append(_recipe(record, name, f"NeMo {release}"))
    return tuple(steps)


def _recipe(record: dict[str, Any], name: str, release: str) -> Step:
    devices, precision = record["dp"], record["precision"]
    record |= {"name": f"{name} {precision} on {devices}", "release": release, "hardware": MACHINES[record["machine"]]}
    record |= {"zero": 3, "precision": FP8_FSDP} if record["fsdp"] else {}
    return step(record | {"dp": devices // (record["tp"] * record["pp"] * record["cp"])})


@lru_cache(maxsize=4)
def mindspeed(data: Path, software: str = ASCEND) -> tuple[Step, ...]:
    """MindSpeed-LLM's launch scripts of 1.0.RC3 on Ascend 910B, where script and table agree on the number of nodes.
    `mc2` and flags that `estimate` does not describe are left as they are; a head dim other than hidden over heads
    can't be said. SWAPPED is as if all were recomputed."""
    steps = []
    for raw, record in _rows(data, "mindspeed_910b_rc3"):
        if record["nodes"] * 8 != record["npus"] or raw["head_dim"]:
            continue
        tp, pp, cp, each = (record[key] for key in ("tp", "pp", "cp", "each"))
        record |= {
            "attention": "flash" if raw["flash"] == "1" else "unfused",
            "interleave": record["layers"] // pp // each if each else 1, "dp": record["npus"] // (tp * pp * cp),
            "sequence_parallel": record["sequence_parallel"] and tp > 1, "software": software,
            "stage_layers": tuple(map(int, filter(None, raw["layers_of_stages"].split(",")))),
            "recompute": "full" if raw["name"] in SWAPPED else "none",
        }  # fmt: skip
        steps.append(step(record))
    return tuple(steps)


# --- compared with what `autoshard estimate` predicts -----------------------------------------------------------------


@lru_cache(maxsize=65536)
def predicted(model: Transformer, run: TrainingRun, hardware: Hardware, host: Host) -> Estimate:
    return estimate(model, run, hardware, host)


def predicted_of(row: Step, host: Host | None = None) -> Estimate:
    """With a host, or that of its profile or software."""
    return predicted(row.model, row.run, row.hardware, host or host_of(row.hardware, row.run.software))


def seconds_of(rows: Sequence[Step], host: Host | None = None) -> Floats:
    """Half of the layers computed again is the mean of none and all."""
    return np.array([np.mean([predicted_of(step, host).step_seconds for step in both_ways(row)]) for row in rows])


def both_ways(row: Step) -> list[Step]:
    kinds = ("none", "full") if row.again == "half" else (row.run.recompute,)
    return [replace(row, run=replace(row.run, recompute=kind)) for kind in kinds]


def that_ran(data: Path) -> dict[str, list[Step]]:
    """By table, the runs that ran, so that they must fit. Half of the layers computed again lies between none and all:
    all is what is known to fit."""
    return {
        "NVIDIA's recipes": list(nvidia(data)),
        "MindSpeed-LLM 1.0.RC3, 910B": list(mindspeed(data)),
        "MindSpeed-LLM 1.0.RC1, MindFormers": list(ascend()),
        "Megatron-Core on B200": list(b200(data)),
        "Megatron-Core on H100": list(published("megatron_core")),
        "BLOOM's plans": [row for row in bloom(data) if not row.full],
        "torchtitan and fms-fsdp": [both_ways(row)[-1] for row in fsdp_runs()],
        "torchtitan in float8": list(published("float8")),
        "MPT by FSDP": list(mpt(data)),
        "Megatron-LM on A100": [
            *single_rows(data),
            *published("scaling"),
            *published("selective"),
        ],
    }


def measured(rows: Sequence[Step]) -> Floats:
    return np.array([row.measured_seconds for row in rows])


def errors(rows: Sequence[Step], seconds: Floats | None = None) -> Floats:
    """Of `seconds`, or of what is predicted."""
    return (seconds_of(rows) if seconds is None else seconds) / measured(rows) - 1


def with_software(rows: Sequence[Step], software: str) -> list[Step]:
    return [replace(row, run=replace(row.run, software=software)) for row in rows]


@dataclass(frozen=True)
class Ranking:
    """Of workloads with at least three measured splits: the mean rank correlation, and how much slower than the best
    measured split the one is that the prediction would pick."""

    correlation: float
    regret: float
    worst_regret: float
    workloads: int


def workloads(rows: Sequence[Step]) -> list[NDArray[np.int64]]:
    """Positions of the rows of each workload with at least three splits."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.workload].append(index)
    return [np.array(group) for group in groups.values() if len(group) >= 3]


def ranking(rows: Sequence[Step], seconds: Floats) -> Ranking:
    real, several = measured(rows), workloads(rows)
    correlations = [correlation(real[group], seconds[group]) for group in several]
    regrets = [float(real[group][np.argmin(seconds[group])] / real[group].min() - 1) for group in several]
    return Ranking(float(np.nanmean(correlations)), float(np.mean(regrets)), max(regrets), len(several))


def correlation(real: Floats, seconds: Floats) -> float:
    """Of the ranks; NaN where all are predicted alike."""
    return float(spearmanr(real, seconds).statistic) if np.ptp(seconds) > 0 else float("nan")


# --- tables ---------------------------------------------------------------------------------------------------------


def off(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}"


def percent(values: Floats) -> str:
    return f"{np.abs(values).mean():.1%} / {np.median(np.abs(values)):.1%} / {values.mean():+.1%}"


def section(title: str, figures: Mapping[str, object]) -> list[str]:
    """The lines of a part of validation.md.j2: sentences in lines of one width, tables as they are."""
    head, *parts = (harness.ROOT / "benchmarks" / "validation.md.j2").read_text(encoding="utf-8").split("\n## ")
    part = next(text for text in parts if text.startswith(f"{title}\n")).removeprefix(f"{title}\n")
    harness.JINJA.filters |= {"percent": percent, "off": off}
    harness.JINJA.globals["abs"] = np.abs
    lines = list[str]()
    rendered = harness.JINJA.from_string(f"{head}\n{part}").render(figures).strip().splitlines()
    for plain, group in groupby(rendered, lambda line: bool(line) and line[0] != "|"):
        block = list(group)
        lines += textwrap.wrap(" ".join(block), WIDTH, break_on_hyphens=False) if plain else block
    return lines
