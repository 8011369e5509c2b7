# mypy: ignore-errors
# ruff: noqa: I001
"""Trains the model in model_parallel.py; start it with torchrun, one process per device (see README.md).

    torchrun --nproc-per-node 4 train.py --backend gloo --steps 5

Without --data it makes synthetic batches from the seed. A loader is a function that yields batches:

    torchrun --nproc-per-node 4 train.py --backend nccl --steps 1000 --data data.py:make_loader

A batch is a tuple in the order of model_parallel.INPUTS, or a dict with its names. Every rank may yield the same global
batch (it takes its own part) or only its local part; the shapes tell which. A step takes MICRO_BATCHES of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batches import BatchError, UserError, loader_batches, local_shape, synthetic_batches
from initial import INITIAL
from model_parallel import (
    GATHERS_AGAIN,
    GRADIENT_BUCKETS,
    HAS_LOSS,
    INPUTS,
    LABEL_COUNTS,
    LOSS_AXES,
    MESH,
    MICRO_BATCHES,
    OPTIMIZER,
    PLAN,
    WEIGHT_BUCKETS,
    build_labels,
    build_model,
)
from runtime import (
    ParallelMesh,
    accumulating,
    assign,
    clip_gradients,
    gathered_together,
    init_computed,
    init_parameter,
    init_parameters,
    label_shares,
    leave,
    load_checkpoint,
    load_full_state_dict,
    reducing,
    regathering,
    save_checkpoint,
    sharding,
)

BACKENDS = ("gloo", "nccl", "hccl")
LEARNING_RATE = 3e-4
PATIENCE = 5.0  # seconds in which rank 0 can say what is wrong, before torchrun ends it


# --- one step ---


def make_optimizer(model: nn.Module, lr: float = LEARNING_RATE) -> torch.optim.Optimizer:
    """The optimizer that the plan was made for. Parameters are DTensors: any stock optimizer works on them."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if OPTIMIZER == "sgd":
        return torch.optim.SGD(parameters, lr=lr)  # without momentum, as the plan's memory is counted
    # One kernel a parameter, where torch has it; else a dozen, and the roots of all second moments exist at once.
    fused = all(parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point() for parameter in parameters)
    return torch.optim.AdamW(parameters, lr=lr, fused=fused or None)


_PARAMETERS: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = weakref.WeakKeyDictionary()


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """By original name; looked up once."""
    if model not in _PARAMETERS:
        _PARAMETERS[model] = {sharding(parameter).name: parameter for parameter in model.parameters()}
    return _PARAMETERS[model]


def compute_gradients(
    model: nn.Module, mesh: ParallelMesh, inputs: Sequence[Tensor], last: bool = True
) -> tuple[Tensor, ...]:
    """Forward, backward, and beside it the gradient sums over devices. Inputs are local; returns the local outputs.

    Gradients are added to those of earlier calls, as by `backward`, until the optimizer zeroes them. `last=False`: a
    micro-batch after which others come; what it makes is summed over devices with the last one's.
    """
    parameters = parameters_of(model)
    sums = reducing(mesh, parameters, GRADIENT_BUCKETS) if last else accumulating(parameters, GRADIENT_BUCKETS)
    again = regathering() if GATHERS_AGAIN else contextlib.nullcontext()
    with sums, gathered_together(mesh, parameters, WEIGHT_BUCKETS), again:
        result = model(*inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        outputs[0].backward()
    return outputs


def accumulate_gradients(
    model: nn.Module, mesh: ParallelMesh, micro_batches: Sequence[Sequence[Tensor]]
) -> list[tuple[Tensor, ...]]:
    """The same of all micro-batches of a step, one after another: the gradients of the mean of their losses.

    Gradients are added up here and summed over devices once, beside the last backward. Returns the outputs of each.
    """
    parameters = parameters_of(model)
    shares = shares_of_labels(mesh, micro_batches)
    made = []
    with reducing(mesh, parameters, GRADIENT_BUCKETS, MICRO_BATCHES):
        for number, inputs in enumerate(micro_batches):
            again = regathering() if GATHERS_AGAIN else contextlib.nullcontext()
            with mesh.micro_batch(number, shares[number]), gathered_together(mesh, parameters, WEIGHT_BUCKETS), again:
                result = model(*inputs)
                outputs = result if isinstance(result, tuple) else (result,)
                (outputs[0] / MICRO_BATCHES).backward()
            made.append(outputs)
    return made


def shares_of_labels(mesh: ParallelMesh, micro_batches: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Of each micro-batch, for each loss that is a mean over labels: its share of the labels of the step."""
    labels = build_labels(mesh)
    given = [() if labels is None else labels(*inputs) for inputs in micro_batches]
    return label_shares(mesh, [(one,) if isinstance(one, Tensor) else one for one in given], LABEL_COUNTS)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: ParallelMesh,
    inputs: Sequence[Any],
    max_norm: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """One optimizer step; returns the local loss and the gradient norm before clipping.

    `inputs` are local tensors; where a step has several micro-batches, those of each.
    """
    optimizer.zero_grad(set_to_none=True)
    if MICRO_BATCHES == 1:
        loss = compute_gradients(model, mesh, inputs)[0].detach()
    else:
        losses = [outputs[0].detach() for outputs in accumulate_gradients(model, mesh, inputs)]
        loss = torch.stack(losses).mean(0)
    norm = clip_gradients(mesh, parameters_of(model).values(), max_norm)
    optimizer.step()
    return loss, norm


def whole_loss(loss: Tensor, mesh: ParallelMesh) -> float:
    """The loss of the global batch, from the partial sum of each rank."""
    total = loss.detach().to(torch.float32).clone()
    for axis in LOSS_AXES:
        mesh[axis].transport.all_reduce(total)()
    return float(total)


# --- the run ---


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", choices=BACKENDS, default="nccl", help="gloo: CPU, nccl: CUDA, hccl: Ascend")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps in all, those before --resume included")
    parser.add_argument("--lr", type=float, help=f"learning rate; without it that of --resume, or {LEARNING_RATE}")
    parser.add_argument("--max-norm", type=float, default=1.0, help="clip gradients to this global norm; inf: don't")
    parser.add_argument(
        "--seed", type=int, help="of initialisation, synthetic batches and dropout; without it that of --resume, or 0"
    )
    parser.add_argument("--data", metavar="FILE:FUNCTION", help="a function that yields batches")
    parser.add_argument("--weights", metavar="FILE", help="start from the original model's .safetensors, .pt or .bin")
    parser.add_argument("--save", metavar="DIR", help="write checkpoints to DIR/step-N")
    parser.add_argument(
        "--save-every", type=int, default=0, metavar="N", help="also every N steps, not only at the end"
    )
    parser.add_argument("--resume", metavar="DIR", help="continue from a checkpoint, or from the last one in DIR")
    parser.add_argument("--log-every", type=int, default=1, metavar="N", help="print every N steps")
    parser.add_argument("--dry-run", action="store_true", help="build the model, say what it holds, and stop")
    return parser.parse_args(argv)


def check_options(options: argparse.Namespace) -> None:
    """UserError on a number that makes no sense."""
    if options.steps < 0 or options.save_every < 0:
        name, value = ("steps", options.steps) if options.steps < 0 else ("save-every", options.save_every)
        raise UserError(f"--{name} {value}: expected 0 or more")
    if options.log_every < 1:
        raise UserError(f"--log-every {options.log_every}: expected 1 or more")
    if not options.max_norm > 0:
        raise UserError(f"--max-norm {options.max_norm:g}: expected more than 0 (inf: don't clip)")


def check_devices(backend: str) -> None:
    """UserError where this node lacks the devices that the backend needs, one a process."""
    kind = {"nccl": "CUDA", "hccl": "Ascend"}.get(backend)
    if kind is None:
        return
    if kind == "Ascend" and importlib.util.find_spec("torch_npu") is None:
        raise UserError(
            "--backend hccl needs the package torch_npu, which is not installed\n  try: pip install torch_npu"
        )
    if kind == "CUDA":
        wanted, found = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if found < wanted:
            hint = "" if found else "\n  try: --backend gloo, on the CPU"
            raise UserError(f"--backend nccl needs {wanted} CUDA devices on this node, torch finds {found}{hint}")


def check_launch() -> None:
    """UserError where the number of processes is not that of the mesh."""
    size, started = math.prod(MESH.values()), int(os.environ.get("WORLD_SIZE", "1"))
    if size != started:
        mesh = ", ".join(f"{name}={n}" for name, n in MESH.items())
        processes = "1 process was" if started == 1 else f"{started} processes were"
        line = f"torchrun --nproc-per-node {size} {Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".rstrip()
        raise UserError(f"the mesh {mesh} needs {size} processes, {processes} started\n  try: {line}")


def last_checkpoint(folder: str) -> Path:
    """The folder itself, or its subfolder step-N with the largest N."""
    path = Path(folder)
    if (path / ".metadata").exists():
        return path
    steps = [p for p in path.glob("step-*") if p.name[5:].isdecimal() and (p / ".metadata").exists()]
    if not steps:
        raise UserError(f"--resume {folder}: there is no checkpoint here\n  try: a folder that --save wrote")
    return max(steps, key=lambda p: int(p.name[5:]))


def read_weights(path: str) -> Mapping[str, Tensor]:
    from convert import read_state_dict

    try:
        return read_state_dict(path)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"--weights {path}: {error}") from None


def fill_unsaved(model: nn.Module, weights: Mapping[str, Tensor], seed: int) -> None:
    """Buffers that no state dict holds: from the weights file if it has them, else as the original model makes them."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    unknown = []
    for buffer in model.buffers():
        own = sharding(buffer)
        if id(buffer) in saved:
            continue
        if own.name in weights:
            assign(buffer, weights[own.name])
        elif own.name in INITIAL:
            init_computed(buffer, INITIAL[own.name], seed)
        elif own.init:
            init_parameter(buffer, own.init)
        else:
            unknown.append(own.name)
    if unknown:
        raise UserError(
            f"the original model computes {', '.join(unknown)} in its constructor and does not save it\n"
            "  try: --weights with a state dict that has it too: {**model.state_dict(), **dict(model.named_buffers())}"
        )


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace, rank: int) -> int:
    """Fills the model from a checkpoint, a weights file, or by initialising; returns the steps done before."""
    weights = read_weights(options.weights) if options.weights else {}
    seed = options.seed or 0
    guessed = [] if options.resume else init_parameters(model, seed, INITIAL)
    fill_unsaved(model, weights, seed)
    if options.resume:
        folder = last_checkpoint(options.resume)
        try:
            done = load_checkpoint(folder, model, optimizer)
        except (KeyError, ValueError) as error:
            raise UserError(f"--resume {folder}: not a checkpoint of this model: {error.args[0]}") from None
        if rank == 0:
            print(f"resumed {folder} at step {done}", flush=True)
        return done
    if options.weights:
        try:
            load_full_state_dict(model, weights, INITIAL)
        except (KeyError, ValueError) as error:
            raise UserError(f"--weights {options.weights}: {error.args[0]}") from None
    elif guessed and rank == 0:
        shown = ", ".join(guessed[:3]) + (", ..." if len(guessed) > 3 else "")
        print(f"note: {len(guessed)} parameters start from a guess, how the model makes them is unknown: {shown}")
    return 0


def synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def rate(seconds: float) -> str:
    """Samples (or tokens, where the first input is rows of integers) a second."""
    shape, dtype, *_ = next(iter(INPUTS.values()))
    tokens = "int" in dtype and len(shape) == 2
    count = MICRO_BATCHES * (math.prod(shape) if tokens else shape[0] if shape else 1)
    return f"{count / seconds:.0f} {'tokens' if tokens else 'samples'}/s"


def describe(model: nn.Module, mesh: ParallelMesh) -> None:
    """What this rank holds, by rank 0."""
    local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    whole = sum(math.prod(sharding(p).shape) for p in model.parameters())
    axes = ", ".join(f"{name}={n}" for name, n in mesh.axes.items())
    print(f"plan {PLAN}, mesh {axes} on {mesh.device.type}: {whole:,} parameters, {local:,} on rank 0", flush=True)
    for name in INPUTS:
        print(f"  input {name}: global {tuple(INPUTS[name][0])}, local {local_shape(name, mesh)}", flush=True)


def run(options: argparse.Namespace, mesh: ParallelMesh) -> None:
    if not HAS_LOSS:
        raise UserError(
            "this package was planned without a loss: it can't be trained\n"
            "  try: model_parallel.py in code of your own, or plan a model that returns its loss"
        )
    model = build_model(mesh)
    if options.dry_run:
        if mesh.rank == 0:
            describe(model, mesh)
        return
    optimizer = make_optimizer(model)
    done = prepare(model, optimizer, options, mesh.rank)
    if options.lr is not None:  # what is asked for goes before what the checkpoint holds
        for group in optimizer.param_groups:
            group["lr"] = options.lr
    if options.seed is not None:
        mesh.random.seed = options.seed
    if options.data:
        batches = loader_batches(options.data, mesh, mesh.random.seed, done * MICRO_BATCHES)
    else:
        batches = synthetic_batches(mesh, mesh.random.seed, done * MICRO_BATCHES)
    if done >= options.steps and mesh.rank == 0:
        print(f"nothing to do: {done} steps are done, and --steps {options.steps} counts them too", flush=True)
    for step in range(done + 1, options.steps + 1):
        batch = next(batches) if MICRO_BATCHES == 1 else [next(batches) for _ in range(MICRO_BATCHES)]
        logged = step % options.log_every == 0 or step == options.steps
        if logged:  # other steps don't wait for the device
            synchronise(mesh.device)
        start = time.perf_counter()
        mesh.random.step = step
        loss, norm = train_step(model, optimizer, mesh, batch, options.max_norm)
        if logged:
            synchronise(mesh.device)
            seconds = time.perf_counter() - start
            total = whole_loss(loss, mesh)
            if mesh.rank == 0:
                timing = f"{seconds * 1e3:.1f} ms, {rate(seconds)}"
                print(f"step {step}: loss {total:.6f}, gradient norm {float(norm):.4f}, {timing}", flush=True)
        last = step == options.steps
        if options.save and (last or (options.save_every and step % options.save_every == 0)):
            Path(options.save).mkdir(parents=True, exist_ok=True)
            save_checkpoint(f"{options.save}/step-{step}", model, optimizer, step)


def main() -> int:
    options = parse_arguments()
    try:
        check_options(options)
        check_launch()
        check_devices(options.backend)
        run(options, ParallelMesh.from_environment(MESH, options.backend))
    except UserError as error:  # the process group is left as it is: other ranks may wait in a collective
        rank = os.environ.get("RANK", "0")
        if rank != "0" and not isinstance(error, BatchError):
            time.sleep(PATIENCE)  # rank 0 fails too, and its end ends this process; if not, it is for this rank to say
        print(f"error{f' on rank {rank}' if rank != '0' else ''}: {error}", file=sys.stderr, flush=True)
        return 2
    leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
