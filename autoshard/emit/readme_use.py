"""Part of a package's README.md on the use of data and weights, and on training it or calling it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from autoshard.code_text import code_span, identifier, quoted
from autoshard.emit.header import Header
from autoshard.ir.program import Program


def exit_code(name: str) -> int:
    """Exit code of a run that this module of the runtime ends. Read from its source, as it can't be imported without
    torch."""
    text = (Path(__file__).parent / "runtime" / f"{name}.py").read_text("utf-8")
    match = re.search(r"^EXIT_\w+ = (\d+)", text, re.MULTILINE)
    assert match is not None, name
    return int(match[1])


def training(program: Program, header: Header) -> str:
    """README part for a package with a loss: train.py does all of the training."""
    names = ", ".join(identifier(i.name) for i in header.inputs)
    items = ", ".join(f"{quoted(i.name)}: batch.{identifier(i.name)}" for i in header.inputs)
    nonfinite, stopped = exit_code("nonfinite"), os.EX_TEMPFAIL
    return f"""## Data

Without `--data`, batches are synthetic. With `--data data.py:make_loader`:

```python
def make_loader():
    for batch in my_dataset:
        yield {{{items}}}  # or a tuple: {names}
```

Every rank may yield the same global batch, of which it takes its part, or its local part alone: the shapes tell which,
dim by dim. `make_loader(parts)` receives the slices of each input that its rank needs. Global shapes:

{_inputs(header)}

`--batch-size N` takes another batch than planned, of all devices, and `--sequence-length N` other sequences, where
`FREE_SIZES` in `model_parallel.py` has it, in the multiples named there and between the sizes at which the model itself
was captured, too; else `FIXED_SIZES` says why not. What is predicted is of the planned one.

A loader with `state_dict` and `load_state_dict`, as torchdata's `StatefulDataLoader`, resumes where it was; of others
the batches before are read again and thrown away. A thread reads `--prefetch` batches ahead.

## A run

```
torchrun ... train.py --lr 3e-4 --schedule cosine --warmup 2000 --lr-least 0.1 --weight-decay 0.1 --steps 100000
{_evaluates(program, header)}torchrun ... train.py --log-json run.jsonl --tensorboard runs --log-every 10
torchrun ... train.py --profile trace --profile-steps 3:5    # trace/rank-N.json, for Perfetto and `autoshard compare`
torchrun ... train.py --timeout 600 --matmul-precision high  # seconds of a collective; TF32
torchrun ... train.py --compile                              # each block one graph of torch.compile's inductor
```

A loss or gradient norm of NaN or inf ends the run before the optimizer's update, on all ranks, with exit code
{nonfinite} (torchrun shows it as `exitcode : {nonfinite}`, and ends with 1 itself). `--nonfinite skip:N` leaves out
the update of up to N such steps in a row instead; their batches are used up. What holds NaN or inf is never saved: the
last checkpoint is from before. In float16, gradients that overflow under the scale of a finite loss are no such step.

{_scaling(program)}## Weights and checkpoints

```
torchrun ... train.py --weights model.safetensors            # start from the original model's weights
torchrun ... train.py --weights folder                       # of shards with their index: each rank reads its part
torchrun ... train.py --save checkpoints --save-every 100    # model, optimizer and step; --save-async: during training
torchrun ... train.py --resume checkpoints                   # also in a package planned for another mesh
torchrun ... train.py --save checkpoints --resume auto       # go on with the last whole one there, or begin; --keep N
python convert.py --to-original checkpoints model.safetensors    # of the last whole one there, or checkpoints/step-100
python convert.py --to-sharded model.safetensors checkpoint
```

SIGTERM or SIGINT, to one rank or all, ends a run after the step that is running: a checkpoint is saved, and all ranks
end with exit code {stopped}, which says "start it again, with `--resume auto`" (torchrun ends with 1 itself, and kills
what has not ended after 30 s). A second signal, a second or more later, ends at once. One job writes in a folder at a
time, and only checkpoints of one run. The rank that knows a failure reports it in a line; `--traceback` shows more.

Checkpoints are `torch.distributed.checkpoint` folders. Names and shapes outside are those of the original model.
`train.py` and `convert.py` read them, and files of weights, as data: what would run code is refused. torch's own
loaders unpickle a checkpoint's `.metadata` and whatever in it is no tensor, which runs any code in there. To them a
checkpoint is trusted code: load only those that you trust. `.safetensors` files hold data only.
"""


def calling(program: Program, header: Header) -> str:
    """README part for a package without a loss: planned for inference, or for a model that returns none."""
    values = [program.value(name) for name in program.outputs]
    outputs = "\n".join(
        f"| {i} | {code_span(v.tensor)} | {v.shape} | {v.dtype} | `{v.layout}` |" for i, v in enumerate(values)
    )
    first = values[0]
    host = ", host=True" * any(p.layout.host for p in program.parameters)
    return f"""## Call it

It was planned with `--eval`, or for a model that returns no loss: there is nothing to train. A program of yours calls
it, `infer.py` in this folder:

```python
import torch

from batches import checked
from model_parallel import MESH, build_model
from runtime import ParallelMesh, leave, full_value
from start_state import start_from


@torch.no_grad()
def main() -> None:
    mesh = ParallelMesh.from_environment(MESH, "nccl"{host})
    model = build_model(mesh)
    start_from(model, "model.safetensors")  # of the original model; .pt, or a folder of shards, too
    for batch in my_batches():
        outputs = model(*(x.to(mesh.device) for x in checked(batch, mesh)))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)  # each is this rank's part
        whole = full_value(outputs[0], {first.shape}, {quoted(str(first.layout))}, mesh)  # on every rank
        if mesh.rank == 0:
            print(whole)


main()
leave()
```

A batch is a dict or a tuple of the inputs. Every rank may give the same global batch, of which it takes its part, or
its local part alone: the shapes tell which, dim by dim. Global shapes:

{_inputs(header)}

What it returns, in order:

| | output | shape | dtype | layout |
|---|---|---|---|---|
{outputs}

With autoshard installed, `autoshard.parallelize(model, autoshard.load_plan(folder))` gives the original's own call,
with whole outputs, and with gradients unless it was `--eval`.

## Weights

```
python convert.py --to-original checkpoints model.safetensors    # by the convert.py of a package that trained
```

Names and shapes outside are those of the original model.
"""


def _inputs(header: Header) -> str:
    rows = "\n".join(f"| {code_span(i.name)} | {i.shape} | {i.dtype} | `{i.layout}` |" for i in header.inputs)
    return f"| input | shape | dtype | layout |\n|---|---|---|---|\n{rows}"


def _evaluates(program: Program, header: Header) -> str:
    """The note that train.py can evaluate, if it can."""
    if program.buffer_updates or header.evaluation:
        return ""
    return "torchrun ... train.py --eval-data data.py:make_held_out --eval-every 500 --eval-batches 20\n"


def _scaling(program: Program) -> str:
    """README section on float16 or float8: what a run in these precisions does in addition."""
    return {"fp16-mixed": _LOSS_SCALE, "fp8-mixed": _FLOAT8}.get(program.precision, "")


_LOSS_SCALE = """## Loss scale

Products are computed in float16, weights and sums of gradients are float32. The loss is scaled by torch's `GradScaler`:
it begins at `--loss-scale` (65536) and halves when a gradient overflows on any rank. Such a step counts, and its batch
is used up, but parameters and optimizer stay as they were; the first steps of a run are often left out so. The scale is
in the checkpoints. Gradients are clipped, and their norm is printed, without it.

"""
_FLOAT8 = """## Float8

`float8_linear` (`runtime/float8.py`) makes the three products of a linear layer in float8: input and weight in e4m3,
the gradient that comes in in e5m2, each with a scale of its largest element, computed every time; as torchao's
`Float8Linear` does by default. All else is as in bfloat16 mixed precision: weights are float32, and kept for backward
is what bfloat16 keeps. A device scales the shard that it holds. Where rows or a dim of it are no multiple of 16 the
layer multiplies in bfloat16. It needs torch's `_scaled_mm` on the device (NVIDIA from compute capability 8.9, AMD
from MI300). Eager torch makes five passes or small kernels of each cast: `--compile` lets it join them.

"""
