# mypy: ignore-errors
# ruff: noqa: I001
"""The options of train.py, and what can be known to be wrong with them before a collective runs."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from batches import UserError, set_size
from dynamic_sizes import DYNAMIC_SIZES, PADDING, mesh_devices, parsed
from elastic import planned_numbers
from model_parallel import MESH, MESHES, OTHER_NUMBERS, PACKED_BY, PLACE_INPUTS, PLACED, PRECISION, STAGES
from runtime import SHAPES, ParallelMesh

BACKENDS = ("gloo", "nccl", "hccl")
LEARNING_RATE = 3e-4
AUTO = "auto"  # of --resume


def parse_arguments(argv: Sequence[str] | None = None, description: str = "") -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    _add_run(parser.add_argument_group("the run"))
    _add_optimizer(parser.add_argument_group("optimizer"))
    _add_data(parser.add_argument_group("data"))
    _add_state(parser.add_argument_group("weights and checkpoints"))
    _add_log(parser.add_argument_group("log"))
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        only = "a package has no option that its plan has no use for; --help lists those that it has"
        parser.error(f"unrecognized arguments: {' '.join(unknown)} ({only})")
    return options


def _add_run(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--backend", choices=BACKENDS, default="nccl", help="gloo: CPU, nccl: CUDA, hccl: Ascend")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps in all, those before --resume included")
    parser.add_argument(
        "--seed", type=int, help="of initialisation, synthetic batches and dropout; without it that of --resume, or 0"
    )
    timeout = "of a collective, before the run is given up; without it the backend's own"
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help=timeout)
    buffer = "MB that HCCL takes twice for each group over these axes; of others HCCL_BUFFSIZE, or 200"
    parser.add_argument("--hccl-buffer", metavar="AXIS=MB,...", help=f"{buffer}. Such as tp=400,dp+tp=50")
    precision = "of float32 matmuls: high is TF32 (on Ascend HF32) where the device has it"
    parser.add_argument("--matmul-precision", choices=("highest", "high", "medium"), default="highest", help=precision)
    compiled = "each block whole, by torch.compile's inductor or another backend of it"
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help=compiled)
    parser.add_argument("--traceback", action="store_true", help="also show where in the code an error was raised")
    parser.add_argument("--dry-run", action="store_true", help="build the model, say what it holds, and stop")


def _add_optimizer(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--lr", type=float, help=f"(highest) learning rate; without it that of --resume, or {LEARNING_RATE}"
    )
    parser.add_argument("--schedule", choices=sorted(SHAPES), default="constant", help="of the rate, down to --steps")
    parser.add_argument("--warmup", type=int, default=0, metavar="N", help="steps in which the rate rises first")
    parser.add_argument("--lr-least", type=float, default=0.0, metavar="SHARE", help="of the rate, left at the end")
    decay = "of matrices; norms and biases have none. Without it all decay as torch's optimizer has it"
    parser.add_argument("--weight-decay", type=float, metavar="X", help=decay)
    if PRECISION == "fp16-mixed":
        scale = "the first scale of the loss; without it that of --resume, or 65536"
        parser.add_argument("--loss-scale", type=float, metavar="X", help=scale)
    nonfinite = "at a loss or gradient norm of NaN or inf: stop before the update, with exit code 7; or leave out the"
    nonfinite += " update of up to N such steps in a row, then stop"
    parser.add_argument("--nonfinite", default="stop", metavar="stop|skip:N", help=nonfinite)
    parser.add_argument("--max-norm", type=float, default=1.0, help="clip gradients to this global norm; inf: don't")


def _add_data(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--data", metavar="FILE:FUNCTION", help="a function that yields batches")
    other = "samples of a (micro-)batch, over all devices, where the plan allows others than planned"
    parser.add_argument("--batch-size", type=int, metavar="N", help=other)
    length = "of the sequences of a batch, over all devices, where the plan allows others than planned"
    parser.add_argument("--sequence-length", type=int, metavar="N", help=length)
    if DYNAMIC_SIZES:
        sizes = "dynamic sizes of all synthetic batches, such as batch=16,sequence=256; without it they are drawn"
        parser.add_argument("--sizes", metavar="NAME=N,…", help=sizes)
        parts = "batches of --data hold this rank's own part of what dynamic sizes cut, not the global batch"
        parser.add_argument("--own-parts", action="store_true", help=parts)
        pad = "make batches of --data up to the next allowed size, by what has labels that do not count"
        parser.add_argument("--pad", action="store_true", help=pad)
    if PACKED_BY:
        pack = "--data yields documents: as many as fit go into each row, which the model's positions keep apart"
        parser.add_argument("--pack", action="store_true", help=pack)
    parser.add_argument("--prefetch", type=int, default=2, metavar="N", help="batches that are read ahead; 0: none")
    parser.add_argument("--eval-data", metavar="FILE:FUNCTION", help="a function that yields batches to evaluate on")
    parser.add_argument("--eval-every", type=int, default=0, metavar="N", help="steps; 0: only at the end")
    parser.add_argument("--eval-batches", type=int, default=10, metavar="N", help="at most, of --eval-data")


def _add_state(parser: argparse._ArgumentGroup) -> None:
    weights = "start from the original model's .safetensors, .pt or .bin; or a folder of .safetensors, or their index"
    parser.add_argument("--weights", metavar="FILE", help=weights)
    parser.add_argument("--save", metavar="DIR", help="write checkpoints to DIR/step-N")
    parser.add_argument(
        "--save-every", type=int, default=0, metavar="N", help="also every N steps, not only at the end"
    )
    parser.add_argument("--save-async", action="store_true", help="write them while training goes on")
    keep_help = "the last N of them; an older one is removed when a newer one is whole. Without it all are kept"
    parser.add_argument("--keep", type=int, metavar="N", help=keep_help)
    resume = "continue from a checkpoint, or from the last one in DIR; auto: in the folder of --save, if it has one"
    parser.add_argument("--resume", metavar="DIR|auto", help=resume)


def _add_log(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--log-every", type=int, default=1, metavar="N", help="print every N steps")
    parser.add_argument("--log-json", metavar="FILE", help="also add them to FILE, one JSON object a line")
    parser.add_argument("--tensorboard", metavar="DIR", help="also write them for TensorBoard, if it is installed")
    parser.add_argument("--profile", metavar="DIR", help="record a few steps with torch.profiler: DIR/rank-N.json")
    parser.add_argument(
        "--profile-steps", metavar="A:B", default="3:5", help="the first and the last, counted from this start on"
    )


def take_options(options: argparse.Namespace) -> None:
    """UserError on a number that makes no sense. Sizes other than planned count from here on."""
    for name, size in (("batch", options.batch_size), ("sequence", options.sequence_length)):
        if size is not None:
            set_size(name, size)
    if DYNAMIC_SIZES:
        take_sizes(options)
    if PACKED_BY and options.pack and not options.data:
        raise UserError("--pack makes the rows of a batch of --data's documents\n  try: --pack --data FILE:FUNCTION")
    for name in ("steps", "save-every", "warmup", "prefetch", "eval-every", "lr", "weight-decay"):
        value = getattr(options, name.replace("-", "_"))
        if value is not None and not value >= 0:
            raise UserError(f"--{name} {value:g}: expected 0 or more")
    for name in ("log-every", "eval-batches"):
        if getattr(options, name.replace("-", "_")) < 1:
            raise UserError(f"--{name} {getattr(options, name.replace('-', '_'))}: expected 1 or more")
    if not 0 <= options.lr_least <= 1:
        raise UserError(f"--lr-least {options.lr_least:g}: expected a share of the rate, from 0 to 1")
    if options.timeout is not None and not options.timeout > 0:
        raise UserError(f"--timeout {options.timeout:g}: expected seconds, more than 0")
    if options.eval_every and not options.eval_data:
        raise UserError("--eval-every needs batches to evaluate on\n  try: --eval-data data.py:make_held_out")
    if options.save_async and not options.save:
        raise UserError("--save-async needs a folder\n  try: --save checkpoints --save-async")
    if options.keep is not None and not (options.save and options.keep >= 1):
        raise UserError(f"--keep {options.keep}: expected 1 or more, and a folder\n  try: --save checkpoints --keep 2")
    if options.resume == AUTO and not options.save:
        raise UserError("--resume auto goes on in the folder of --save\n  try: --save checkpoints --resume auto")
    if PRECISION == "fp16-mixed" and options.loss_scale is not None and not 0 < options.loss_scale < math.inf:
        raise UserError(f"--loss-scale {options.loss_scale:g}: expected more than 0, such as 65536")
    most_left_out(options)
    profiled_steps(options)
    options.hccl_buffer = hccl_buffers(options)
    if not options.max_norm > 0:
        raise UserError(f"--max-norm {options.max_norm:g}: expected more than 0 (inf: don't clip)")
    for name in ("save", "profile", "tensorboard"):
        if folder := getattr(options, name):
            check_writable(f"--{name} {folder}", folder)
    if options.log_json:
        check_file(f"--log-json {options.log_json}", options.log_json)


def take_sizes(options: argparse.Namespace) -> None:
    """Takes the sizes of synthetic batches; UserError on what can't be done with those of a loader."""
    for name, size in parsed(options.sizes) if options.sizes else ():
        set_size(name, size)
    if options.pad and (options.own_parts or not PADDING):
        why = (
            "with --own-parts no rank knows the whole batch"
            if PADDING
            else "it is not known that padding leaves this model's loss as it is"
        )
        raise UserError(f"--pad: {why}\n  try: batches of an allowed size")
    if PACKED_BY and options.pack and (options.pad or options.own_parts):
        raise UserError("--pack makes whole batches\n  try: without --pad and --own-parts")
    if options.data and options.sizes:
        raise UserError("--sizes is of synthetic batches\n  try: --data or --sizes; a loader's batches have their own")


def most_left_out(options: argparse.Namespace) -> int:
    """Number of steps in a row whose loss or gradients may be no numbers."""
    word, _, count = options.nonfinite.partition(":")
    if options.nonfinite != "stop" and not (word == "skip" and count.isdecimal() and int(count)):
        raise UserError(f"--nonfinite {options.nonfinite}: expected stop, or skip:N with N of 1 or more, as skip:3")
    return int(count or 0)


def after_nonfinite(options: argparse.Namespace) -> str:
    """Hint for a run that has ended with a loss or gradients that are no numbers."""
    resume = f"--resume {options.save}, whose last checkpoint is from before, with " if options.save else ""
    return f"{resume}a lower --lr, a --warmup, or --nonfinite skip:3 where it is for single batches"


def hccl_buffers(options: argparse.Namespace) -> dict[str, int]:
    """MB by axes in the order of the mesh, joined by +."""
    if options.hccl_buffer is None:
        return {}
    if options.backend != "hccl":
        raise UserError(f"--hccl-buffer: {options.backend} has no such buffers\n  try: without it")
    buffers = {}
    for part in options.hccl_buffer.split(","):
        names, _, size = part.partition("=")
        axes = names.split("+")
        if not size.isdecimal() or int(size) < 1 or len(set(axes)) < len(axes) or not {*axes} <= MESH.keys():
            message = f"--hccl-buffer {part}: expected axes of the mesh ({', '.join(MESH)}) and MB, 1 or more"
            raise UserError(f"{message}\n  try: --hccl-buffer {'+'.join(MESH)}=400")
        buffers["+".join(name for name in MESH if name in axes)] = int(size)
    return buffers


def tell_unused_buffers(options: argparse.Namespace, mesh: ParallelMesh) -> None:
    """Reports groups that --hccl-buffer names in vain: known after training, as groups are made at their first use."""
    unused = [names for names in options.hccl_buffer or () if names not in mesh.group_names]
    if unused and mesh.global_rank == 0:
        print(f"note: --hccl-buffer {', '.join(unused)}: no collective ran over these axes", file=sys.stderr)


def check_writable(option: str, folder: str) -> None:
    """Raises UserError where a folder can't be made or written in: before any step, not after the last."""
    path = Path(folder).absolute()
    there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not os.path.isdir(there):
        raise UserError(f"{option}: {there} is no folder\n  try: the name of a folder, or of a new one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{option}: no permission to write in {there}\n  try: a folder of your own")


def check_file(option: str, name: str) -> None:
    """Raises UserError where a file can't be written; an existing one, as /dev/stdout, may lie where no new one can."""
    if os.path.isdir(name):
        raise UserError(f"{option}: it is a folder\n  try: the name of a file")
    if not os.path.exists(name):
        check_writable(option, os.path.dirname(os.path.abspath(name)))
    elif not os.access(name, os.W_OK):
        raise UserError(f"{option}: no permission to write in it\n  try: a file of your own")


def profiled_steps(options: argparse.Namespace) -> tuple[int, int]:
    """First and last profiled step."""
    first, _, last = options.profile_steps.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UserError(f"--profile-steps {options.profile_steps}: expected FIRST:LAST, counted from 1, such as 3:5")
    return int(first), int(last)


def _check_devices(backend: str) -> None:
    """UserError where this node lacks the devices that the backend needs, one a process."""
    kind = {"nccl": "CUDA", "hccl": "Ascend"}.get(backend)
    if kind is None:
        return
    if kind == "Ascend" and importlib.util.find_spec("torch_npu") is None:
        raise UserError(
            "--backend hccl needs the package torch_npu, which is not installed\n  try: pip install torch_npu"
        )
    if kind == "CUDA":
        wanted, available = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if available < wanted:
            hint = "" if available else "\n  try: --backend gloo, on the CPU"
            raise UserError(f"--backend nccl needs {wanted} CUDA devices on this node, torch finds {available}{hint}")


def check_launch(backend: str) -> None:
    """UserError where the number of processes is not that of the mesh, or this node lacks the backend's devices."""
    size, started = mesh_devices(), int(os.environ.get("WORLD_SIZE", "1"))
    if size != started:
        mesh = ", ".join(f"{name}={n}" for name, n in MESH.items())
        processes = "1 process was" if started == 1 else f"{started} processes were"
        line = f"torchrun --nproc-per-node {size} {shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}"
        mesh += f" on each of {STAGES} {'places' if PLACED else 'stages'}" if STAGES > 1 else ""
        if PLACE_INPUTS:
            mesh = f"of {STAGES} places, {'; '.join(', '.join(f'{n}={k}' for n, k in row.items()) for row in MESHES)},"
        if OTHER_NUMBERS and (others := sorted(planned_numbers().keys() - {size})):
            mesh += f" (and there are plans for {', '.join(map(str, others))} devices)"
        raise UserError(f"the mesh {mesh} needs {size} processes, {processes} started\n  try: {line}")
    _check_devices(backend)
