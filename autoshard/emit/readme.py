"""The package's README.md."""

from __future__ import annotations

from autoshard.code_text import code_span, identifier, prose, quoted
from autoshard.emit.header import Header
from autoshard.emit.user_operators import readme_section
from autoshard.ir.program import Program
from autoshard.units import format_bytes, format_seconds


def readme(program: Program, header: Header) -> str:
    """How to launch the package, what is in it, and how data and weights go in and out."""
    stages = program.step.stages
    size = program.mesh.size * stages
    mesh = ", ".join(f"{name}={n}" for name, n in program.mesh.axes)
    mesh += f" on each of {stages} stages" if stages > 1 else ""
    columns = ["stage"] * (stages > 1) + [*program.mesh.names]
    ranks = "\n".join(f"| {rank} | {_coordinates(program, rank)} |" for rank in _shown(size))
    more = "\n| ... | ... |" if size > 16 else ""
    inputs = "\n".join(f"| {code_span(i.name)} | {i.shape} | {i.dtype} | `{i.layout}` |" for i in header.inputs)
    words = "\n".join(f"- {sentence}" for sentence in header.strategy)
    names = ", ".join(identifier(i.name) for i in header.inputs)
    items = ", ".join(f"{quoted(i.name)}: batch.{identifier(i.name)}" for i in header.inputs)
    return f"""# {prose(program.name)} on {size} devices

Written by autoshard from plan `{header.plan_hash}`. Needs only PyTorch. Mesh: {mesh} (outermost, slowest links first).

{words}

Predicted for {prose(header.hardware)}: {format_seconds(header.predicted_seconds, 3)} a step,
{format_bytes(header.predicted_peak_bytes)} at the peak on each device.

## Launch

{launch(size, header.devices_per_node)}
`--backend nccl` is for CUDA, `hccl` for Ascend (with `torch_npu` installed), `gloo` for CPU.

`--dry-run` builds the model and says what each rank holds. `--help` lists everything.

Ranks are row-major over the mesh, so that the last axis is on neighbouring ranks (within a node):

| rank | {" | ".join(columns)} |
|---|{"---|" * len(columns)}
{ranks}{more}

## Files

| file | what it is |
|---|---|
| {_model_files(program)}: local tensors, every collective a visible call with its mesh axis and its reason |
| `train.py` | the training loop: gradient reduction, clipping, schedule, evaluation, checkpoints |
| `run_options.py`, `batches.py`, `start_state.py` | its options; its batches; what it starts from |
| `initial.py` | what the original's constructor computes: rotary frequencies, masks, tables of positions |
| `convert.py` | weights of the original model in and out |
| `runtime/` | the few functions that the model calls: collectives with gradients, sharded parameters |
| `plan.json`, `graph.json` | the plan (every decision with its predicted cost) and the model it was made for |
| `report.html`, `timeline.json` | the predicted step as a page, and as a trace for Perfetto |{_stage_files(program)}
| `styles.json` | what known styles (dp, fsdp, megatron, …) would take on this mesh, where that was simulated |
| `search.log` | how long the search took |
| `manifest.json`, `ruff.toml` | what autoshard wrote, with hashes; the linter's line length |
{readme_section(header.registrations)}
## Data

Without `--data`, batches are synthetic. With `--data data.py:make_loader`:

```python
def make_loader():
    for batch in my_dataset:
        yield {{{items}}}  # or a tuple: {names}
```

Every rank may yield the same global batch, of which it takes its part, or its local part alone: the shapes tell which,
dim by dim. `make_loader(parts)` is told the slices of each input that its rank needs. Global shapes:

| input | shape | dtype | layout |
|---|---|---|---|
{inputs}

A loader with `state_dict` and `load_state_dict`, as torchdata's `StatefulDataLoader`, resumes where it was; of others
the batches before are read again and thrown away. A thread reads `--prefetch` batches ahead.

## A run

```
torchrun ... train.py --lr 3e-4 --schedule cosine --warmup 2000 --lr-least 0.1 --weight-decay 0.1 --steps 100000
torchrun ... train.py --eval-data data.py:make_held_out --eval-every 500 --eval-batches 20
torchrun ... train.py --log-json run.jsonl --tensorboard runs --log-every 10
torchrun ... train.py --profile trace --profile-steps 3:5    # trace/rank-N.json, for Perfetto and `autoshard compare`
torchrun ... train.py --timeout 600 --matmul-precision high  # seconds of a collective; TF32
torchrun ... train.py --compile                              # each block one graph of torch.compile's inductor
```

{_scaling(program)}## Weights and checkpoints

```
torchrun ... train.py --weights model.safetensors            # start from the original model's weights
torchrun ... train.py --weights folder                       # of shards with their index: each rank reads its part
torchrun ... train.py --save checkpoints --save-every 100    # model, optimizer and step; --save-async: beside training
torchrun ... train.py --resume checkpoints                   # also in a package planned for another mesh
python convert.py --to-original checkpoints/step-100 model.safetensors
python convert.py --to-sharded model.safetensors checkpoint
```

Checkpoints are `torch.distributed.checkpoint` folders. Names and shapes outside are those of the original model.
"""


def _scaling(program: Program) -> str:
    """What a run in float16 does besides."""
    if program.precision != "fp16-mixed":
        return ""
    return """## Loss scale

Products are computed in float16, weights and sums of gradients are float32. The loss is scaled by torch's `GradScaler`:
it begins at `--loss-scale` (65536) and halves when a gradient overflows on any rank. Such a step counts, and its batch
is used up, but parameters and optimizer stay as they were; the first steps of a run are often left out so. The scale is
in the checkpoints. Gradients are clipped, and their norm is told, without it.

"""


def launch(size: int, per_node: int) -> str:
    """The torchrun lines: of one node where it has all devices, else of every node, the last perhaps with fewer."""
    if size <= per_node:
        return f"One node:\n\n```\ntorchrun --nproc-per-node {size} train.py --backend nccl --steps 100\n```\n"
    nodes, rest = -(-size // per_node), size % per_node
    last = f", and `--nproc-per-node {rest}` on the last" if rest else ""
    return f"""{nodes} nodes of {per_node} devices; on each (`NODE` is 0 on the first{last}):

```
torchrun --nnodes {nodes} --node-rank $NODE --nproc-per-node {per_node} \\
    --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 train.py --backend nccl --steps 100
```
"""


def _shown(size: int) -> range:
    return range(min(size, 16))


def _stage_files(program: Program) -> str:
    """A row more, of a plan with stages."""
    row = "\n| `step_timeline.json`, `stages.svg` | the whole step of all stages: a trace for Perfetto, and a picture |"
    return row if program.step.parts else ""


def _model_files(program: Program) -> str:
    parts = len(program.step.parts)
    if not parts:
        return "`model_parallel.py` | the model"
    return (
        f"`part_0.py` to `part_{parts - 1}.py`, `model_parallel.py` | the parts of the model and which stage has which"
    )


def _coordinates(program: Program, rank: int) -> str:
    stage, rank = divmod(rank, program.mesh.size)
    return " | ".join(map(str, [*[stage] * (program.step.stages > 1), *program.mesh.coordinates(rank)]))
