"""The package's README.md."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from autoshard.code_text import prose
from autoshard.emit.header import Header
from autoshard.emit.readme_use import calling, training
from autoshard.emit.user_operators import readme_section
from autoshard.ir.plan import meshes_text
from autoshard.ir.program import Collective, Program
from autoshard.units import format_bytes, format_seconds


def readme(program: Program, header: Header) -> str:
    """README text: how to launch the package, what is in it, and how data and weights go in and out."""
    stages = program.step.stages
    size = program.firsts[-1]
    mesh = ", ".join(f"{name}={n}" for name, n in program.mesh.axes)
    mesh += f" on each of {stages} {program.step.word}s" if stages > 1 else ""
    mesh = meshes_text(program.meshes, program.step.word) if program.others else mesh
    columns = ["stage"] * (stages > 1) + [*program.mesh.names]
    columns = [program.step.word, "on its mesh"] if program.others else columns
    ranks = "\n".join(f"| {rank} | {_coordinates(program, rank)} |" for rank in _shown(size))
    kinds = f" The {header.kinds}." if header.kinds else ""
    more = "\n| ... | ... |" if size > 16 else ""
    words = "\n".join(f"- {sentence}" for sentence in header.strategy)
    return f"""# {prose(program.name)} on {size} devices

Written by autoshard from plan `{header.plan_hash}`. Needs only PyTorch. Mesh: {mesh} (outermost, slowest links first).

{words}

Predicted for {prose(header.hardware)}: {format_seconds(header.predicted_seconds, 3)} a step,
{format_bytes(header.predicted_peak_bytes)} at the peak on {"each" if stages == 1 else "the fullest"} device.{kinds}

## Launch

{launch(header.nodes, _started(program))}
`{_backend(program)}` is for CUDA, `hccl` for Ascend (with `torch_npu` installed), `gloo` for CPU. HCCL takes twice
`HCCL_BUFFSIZE` (200 MB unless set) of a device's memory for each group of devices that it is in;
`--hccl-buffer {program.mesh.names[-1]}=400` sets that of the groups over an axis.

{_first_look(program)}
{_order_of_kernels(program)}
Ranks are row-major over the mesh, so that the last axis is on neighbouring ranks (within a node):

| rank | {" | ".join(columns)} |
|---|{"---|" * len(columns)}
{ranks}{more}

## Files

| file | what it is |
|---|---|
| {_model_files(program)}: local tensors, every collective a visible call with its mesh axis and its reason |
| `train.py` | {_TRAINS if program.loss is not None else _DOES_NOT_TRAIN} |
| `run_options.py`, `run_start.py`, `start_state.py`, `user_errors.py` | its options; what it starts from; its errors |
| `batches.py`, `dynamic_sizes.py` | its batches, and their sizes |
{_ELASTIC * header.other_numbers}| `saving.py` | the folder of checkpoints: of one job at a time, of one run |
| `evaluation.py` | the loss of batches that are not trained on |
| `initial.py` | what the original's constructor computes: rotary frequencies, masks, tables of positions |
| `convert.py` | weights of the original model in and out |
| `runtime/` | the few functions that the model calls: collectives with gradients, sharded parameters |
| `plan.json`, `graph.json` | the plan (every decision with its predicted cost) and the model it was made for |
| `report.html`, `timeline.json` | the predicted step as a page, and as a trace for Perfetto |{_stage_files(program)}
| `styles.json` | what known styles (dp, fsdp, megatron, …) would take on this mesh, where that was simulated |
| `search.log` | how long the search took |
| `manifest.json`, `ruff.toml` | what autoshard wrote, with hashes; the linter's line length |
{readme_section(header.registrations)}
{_use(program, header)}"""


_ELASTIC = "| `elastic.py` | which of the plans for several numbers of devices runs |\n"
_TRAINS = "the training loop: gradient reduction, clipping, schedule, evaluation, checkpoints"
_DOES_NOT_TRAIN = "a training loop, which this package has no use for: no loss was planned"


def _started(program: Program) -> str:
    return "train.py --backend nccl --steps 100" if program.loss is not None else "infer.py"


def _backend(program: Program) -> str:
    return "--backend nccl" if program.loss is not None else "nccl"


def _first_look(program: Program) -> str:
    if program.loss is None:
        return "`infer.py` is below. `train.py --dry-run` in its place builds the model and says what each rank holds."
    return "`--dry-run` builds the model and says what each rank holds. `--help` lists everything."


def _order_of_kernels(program: Program) -> str:
    """README section on kernel order: keeps a collective that overlaps a product ahead of it; "" without one.
    (Megatron-LM asserts it for tensor parallelism on GPUs before Blackwell.)"""
    early = sum(isinstance(step, Collective) and step.early for step in program.instructions)
    if not early:
        return ""
    both = " It may also serialise the collectives that overlap it: compare both on your cluster."
    more = both if program.gradient_buckets or program.weight_buckets else ""
    return f"""
{early} reductions of gradients overlap a product of weights. On GPUs before Blackwell,
`export CUDA_DEVICE_MAX_CONNECTIONS=1` starts kernels in the order in which they were called, so that none of these
waits until its product has left room. It changes no number.{more}
"""


def _use(program: Program, header: Header) -> str:
    return calling(program, header) if program.loss is None else training(program, header)


def launch(nodes: Sequence[int], started: str = "train.py --backend nccl --steps 100") -> str:
    """The torchrun lines: for one node if it has all devices, else for every node; some may use fewer devices."""
    if len(nodes) == 1:
        return f"One node:\n\n```\ntorchrun --nproc-per-node {nodes[0]} {started}\n```\n"
    most, each = str(nodes[0]), ""
    if len(set(nodes[:-1])) > 1 or nodes[-1] > nodes[0]:
        most, each = "$DEVICES", f", `DEVICES` is {', '.join(map(str, nodes[:-1]))} and {nodes[-1]} in their order"
    elif nodes[-1] < nodes[0]:
        each = f", and `--nproc-per-node {nodes[-1]}` on the last"
    of = f" of {most} devices" if most != "$DEVICES" else ""
    return f"""{len(nodes)} nodes{of}; on each (`NODE` is 0 on the first{each}):

```
torchrun --nnodes {len(nodes)} --node-rank $NODE --nproc-per-node {most} \\
    --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 {started}
```
"""


def _shown(size: int) -> range:
    return range(min(size, 16))


def _stage_files(program: Program) -> str:
    """An extra table row, for a plan with stages."""
    return "\n| `stages.svg` | the whole step of all stages as a picture |" if program.step.parts else ""


def _model_files(program: Program) -> str:
    parts = len(program.step.parts)
    if not parts:
        return "`model_parallel.py` | the model"
    return (
        f"`part_0.py` to `part_{parts - 1}.py`, `model_parallel.py` | the parts of the model and which stage has which"
    )


def _coordinates(program: Program, rank: int) -> str:
    stage = bisect_right(program.firsts, rank) - 1
    mesh, rank = program.meshes[stage], rank - program.firsts[stage]
    if program.others:
        return (
            f"{stage} | {', '.join(f'{name}={n}' for name, n in zip(mesh.names, mesh.coordinates(rank), strict=True))}"
        )
    return " | ".join(map(str, [*[stage] * (program.step.stages > 1), *program.mesh.coordinates(rank)]))
