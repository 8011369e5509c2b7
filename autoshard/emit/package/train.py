# mypy: ignore-errors
# ruff: noqa: I001
"""Trains the model in model_parallel.py; start it with torchrun, one process per device (see README.md).

    torchrun --nproc-per-node 4 train.py --backend gloo --steps 5

Without --data it makes synthetic batches from the seed. A loader is a function that yields batches:

    torchrun --nproc-per-node 4 train.py --backend nccl --steps 1000 --data data.py:make_loader

A batch is a tuple in the order of model_parallel.INPUTS, or a dict with its names. Every rank may yield the same global
batch (it takes its own part) or only its local part; the shapes tell which, dim by dim. A step takes MICRO_BATCHES of
them. `make_loader(parts)` is told the slices of each input that its rank needs: rows of a large image, say.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from batches import BatchError, UserError, check_agreement, loader_batches, local_shape, synthetic_batches
from evaluation import check_evaluation, ends_anywhere, evaluate, evaluates
from model_parallel import (
    GATHERS_AGAIN,
    GRADIENT_BUCKETS,
    HAS_LOSS,
    HOST_TABLES,
    INPUTS,
    LABEL_COUNTS,
    LOSS_AXES,
    MESH,
    MICRO_BATCHES,
    OPTIMIZER,
    PLAN,
    PRECISION,
    SHARED,
    STAGES,
    UPDATES_BUFFERS,
    VIRTUAL_STAGES,
    WEIGHT_BUCKETS,
    ZERO,
    build_labels,
    build_model,
    build_pipeline,
)
from run_options import (
    LEARNING_RATE,
    after_nonfinite,
    check_launch,
    most_left_out,
    parse_arguments,
    profiled_steps,
    take_options,
    tell_unused_buffers,
)
from runtime import (
    EXIT_CODE,
    FiniteSteps,
    LossScaler,
    NonFinite,
    ParallelMesh,
    Pipeline,
    Prefetched,
    TrainingLog,
    accumulating,
    clip_gradients,
    compile_blocks,
    finish_saving,
    gathered_ahead,
    gathered_together,
    has_fused_adamw,
    label_shares,
    leave,
    make_schedule,
    profiling,
    reducing,
    regathering,
    save_checkpoint,
    sharding,
)
from runtime.optimizers import SGD, AdamW
from start_state import prepare, saved_loader

PATIENCE = 5.0  # seconds in which rank 0 can say what is wrong, before torchrun ends it


# --- one step ---


def make_optimizer(
    model: nn.Module, lr: float = LEARNING_RATE, weight_decay: float | None = None
) -> torch.optim.Optimizer:
    """The optimizer that the plan was made for. Parameters are DTensors: any stock optimizer works on them.

    `weight_decay`: of matrices, norms and biases then have none; None for torch's own, of all.
    """
    parameters: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained = [{"params": parameters}]  # a stage may have none, which torch takes of a group alone
    if weight_decay is not None:
        matrices = [parameter for parameter in parameters if len(sharding(parameter).shape) > 1]
        vectors = [parameter for parameter in parameters if len(sharding(parameter).shape) <= 1]
        decays = ((matrices, weight_decay), (vectors, 0.0))
        trained = [{"params": own, "weight_decay": decay} for own, decay in decays if own or STAGES > 1]
    if OPTIMIZER == "sgd":
        return SGD(trained, lr=lr)  # without momentum, as the plan's memory is counted
    # One kernel a parameter, where torch has it; else a dozen, and the roots of all second moments exist at once.
    return AdamW(trained, lr=lr, fused=has_fused_adamw(parameters) or None)


def make_scaler(mesh: ParallelMesh, scale: float | None = None) -> LossScaler | None:
    """torch's GradScaler, where the model computes in float16; `scale`: the first."""
    return LossScaler(mesh, scale) if PRECISION == "fp16-mixed" else None


def scaled(loss: Tensor, scaler: LossScaler | None) -> Tensor:
    return loss if scaler is None else scaler.scale(loss)


_PARAMETERS: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = weakref.WeakKeyDictionary()
_PIPELINES: weakref.WeakKeyDictionary[nn.Module, Pipeline] = weakref.WeakKeyDictionary()


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """By original name; looked up once."""
    if model not in _PARAMETERS:
        _PARAMETERS[model] = {sharding(parameter).name: parameter for parameter in model.parameters()}
    return _PARAMETERS[model]


def compute_gradients(
    model: nn.Module,
    mesh: ParallelMesh,
    inputs: Sequence[Tensor],
    last: bool = True,
    scaler: LossScaler | None = None,
) -> tuple[Tensor, ...]:
    """Forward, backward, and beside it the gradient sums over devices. Inputs are local; returns the local outputs.

    Gradients are added to those of earlier calls, as by `backward`, until the optimizer zeroes them. `last=False`: a
    micro-batch after which others come; what it makes is summed over devices with the last one's. `scaler`: gradients
    are those of the loss by its scale.
    """
    parameters = parameters_of(model)
    sums = reducing(mesh, parameters, GRADIENT_BUCKETS) if last else accumulating(parameters, GRADIENT_BUCKETS)
    again = regathering() if GATHERS_AGAIN else contextlib.nullcontext()
    with sums, gathered_together(mesh, parameters, WEIGHT_BUCKETS), again:
        result = model(*inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        scaled(outputs[0], scaler).backward()
    return outputs


def accumulate_gradients(
    model: nn.Module,
    mesh: ParallelMesh,
    micro_batches: Sequence[Sequence[Tensor]],
    scaler: LossScaler | None = None,
) -> list[tuple[Tensor, ...]]:
    """The same of all micro-batches of a step, one after another: the gradients of the mean of their losses.

    Gradients are added up here and summed over devices once, beside the last backward. Returns the outputs of each.
    """
    if STAGES > 1:
        return [(loss,) for loss in pipeline_gradients(model, mesh, micro_batches, scaler)]
    parameters = parameters_of(model)
    shares = shares_of_labels(mesh, micro_batches)
    made = []
    with reducing(mesh, parameters, GRADIENT_BUCKETS, MICRO_BATCHES), weights_of_step(mesh, parameters):
        for number, inputs in enumerate(micro_batches):
            again = regathering() if GATHERS_AGAIN else contextlib.nullcontext()
            with mesh.micro_batch(number, shares[number]), weights_of_micro_batch(mesh, parameters), again:
                result = model(*inputs)
                outputs = result if isinstance(result, tuple) else (result,)
                scaled(outputs[0] / MICRO_BATCHES, scaler).backward()
            made.append(outputs)
    return made


@contextlib.contextmanager
def weights_of_step(mesh: ParallelMesh, parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Around all micro-batches: weights in shards that are gathered for all of them."""
    with contextlib.ExitStack() as stack:
        if ZERO < 3:
            parts = [WEIGHT_BUCKETS] if STAGES == 1 else [WEIGHT_BUCKETS[part] for part in mesh.stages.parts]
            after = MICRO_BATCHES if ZERO == 1 else 1
            lines = [stack.enter_context(gathered_together(mesh, parameters, own, after)) for own in parts]
            gathered_ahead(lines, waits=STAGES > 1 and mesh.stages.index > 0)
        yield


def weights_of_micro_batch(
    mesh: ParallelMesh, parameters: dict[str, nn.Parameter]
) -> contextlib.AbstractContextManager[None]:
    """Around one: weights in shards that are gathered for each."""
    return gathered_together(mesh, parameters, WEIGHT_BUCKETS) if ZERO == 3 else contextlib.nullcontext()


def pipeline_gradients(
    model: nn.Module,
    mesh: ParallelMesh,
    micro_batches: Sequence[Sequence[Tensor]],
    scaler: LossScaler | None = None,
) -> list[Tensor]:
    """The same over stages: `model` holds the parts of this one. Returns the losses on the last stage."""
    if model not in _PIPELINES:
        _PIPELINES[model] = build_pipeline(model, mesh)
    parameters = parameters_of(model)
    shares = shares_of_labels(mesh, micro_batches) if _PIPELINES[model].counts_labels else []
    buckets = [bucket for part in reversed(mesh.stages.parts) for bucket in GRADIENT_BUCKETS[part]]
    again = regathering() if GATHERS_AGAIN else contextlib.nullcontext()
    with reducing(mesh, parameters, buckets, MICRO_BATCHES), weights_of_step(mesh, parameters), again:
        losses = _PIPELINES[model].run(micro_batches, shares, scaler)
    mesh.stages.sum_shared(parameters, SHARED)
    return losses


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
    scaler: LossScaler | None = None,
    judge: FiniteSteps | None = None,
) -> tuple[Tensor, Tensor]:
    """One optimizer step; returns the local loss (of a pipeline, zero but on the last stage) and the gradient norm
    before clipping.

    `inputs` are local tensors; where a step has several micro-batches, those of each. With a `scaler`, a step whose
    gradients overflow on any device leaves the parameters and the optimizer as they are, on all; its norm is no number.
    So does a step that the `judge` does not accept.
    """
    optimizer.zero_grad(set_to_none=True)
    if judge is not None:
        judge.before()
    if MICRO_BATCHES == 1:
        loss = compute_gradients(model, mesh, inputs, scaler=scaler)[0].detach()
    else:
        losses = [outputs[0].detach() for outputs in accumulate_gradients(model, mesh, inputs, scaler=scaler)]
        loss = torch.stack(losses).mean(0) if losses else torch.zeros((), device=mesh.device)
    if scaler is not None:
        scaler.unscale_(optimizer)
    if judge is not None:
        judge.begin(loss)
    norm = clip_gradients(mesh, parameters_of(model).values(), max_norm, SHARED)
    accepted = judge is None or judge.accepts(norm)
    if scaler is None and accepted:
        optimizer.step()
    elif scaler is not None:
        if accepted:
            scaler.step(optimizer)
        scaler.update()
    return loss, norm


# --- the run ---


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
    axes += f", stage 0 of {STAGES}," if STAGES > 1 else ""
    print(f"plan {PLAN}, mesh {axes} on {mesh.device.type}: {whole:,} parameters, {local:,} on rank 0", flush=True)
    for name in INPUTS:
        print(f"  input {name}: global {tuple(INPUTS[name][0])}, local {local_shape(name, mesh)}", flush=True)


def training_batches(options: argparse.Namespace, mesh: ParallelMesh, done: int) -> Prefetched:
    """From the step after `done` on."""
    start = done * MICRO_BATCHES
    if not options.data:
        made = ((batch, None) for batch in synthetic_batches(mesh, mesh.random.seed, start))
        return Prefetched(made, mesh.device, 0)
    state = saved_loader(options.resume) if options.resume else None

    def saved_after(number: int) -> bool:
        step, rest = divmod(number, MICRO_BATCHES)
        return not rest and saves(options, step)

    reading = loader_batches(options.data, mesh, mesh.random.seed, start, state, saved_after)
    return Prefetched(reading, mesh.device, options.prefetch)


def saves(options: argparse.Namespace, step: int) -> bool:
    """After this step?"""
    return bool(options.save) and (step == options.steps or bool(options.save_every and step % options.save_every == 0))


def make_log(options: argparse.Namespace, mesh: ParallelMesh) -> TrainingLog:
    try:
        return TrainingLog(mesh.global_rank, options.log_json, options.tensorboard)
    except ImportError as error:
        raise UserError(f"--tensorboard: {error}\n  try: pip install tensorboard, or --log-json FILE") from None


def check_run(options: argparse.Namespace, mesh: ParallelMesh) -> None:
    """UserError on what the package can't do."""
    if not HAS_LOSS and not options.dry_run:
        raise UserError(
            "this package was planned with --eval, or without a loss: there is nothing to train\n"
            "  try: README.md shows a program that calls the model; to train it, plan without --eval and with a loss"
        )
    if options.profile and mesh.device.type == "npu":
        raise UserError(
            "--profile records with torch.profiler, which knows no Ascend\n  try: torch_npu.profiler, or msprof"
        )


def set_matmul_precision(precision: str, device: torch.device) -> None:
    """Of float32 products."""
    torch.set_float32_matmul_precision(precision)
    if device.type == "npu":  # torch_npu has a switch of its own, and does not read torch's
        torch.get_device_module(device).matmul.allow_hf32 = precision != "highest"


def run(options: argparse.Namespace, mesh: ParallelMesh) -> None:
    check_run(options, mesh)
    check_evaluation(options)
    set_matmul_precision(options.matmul_precision, mesh.device)
    model = build_model(mesh)
    first = mesh.global_rank == 0
    if options.dry_run:
        if first:
            describe(model, mesh)
        return
    if options.compile is not None:
        count = compile_blocks(model, options.compile)
        if first:
            print(f"compiled at its first call, by {options.compile}: each of {count} blocks", flush=True)
    optimizer = make_optimizer(model, weight_decay=options.weight_decay)
    scaler = make_scaler(mesh)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    done = prepare(model, optimizer, options, mesh.global_rank, scaler)
    if scaler is not None or most_left_out(options):  # a first step that is left out is no mistake in the order
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step", UserWarning)
    if scaler is not None and options.loss_scale is not None:  # before what the checkpoint holds
        scaler.update(options.loss_scale)
    for group in optimizer.param_groups:  # what is asked for goes before what the checkpoint holds
        group |= {} if options.lr is None else {"lr": options.lr, "initial_lr": options.lr}
    if options.weight_decay is not None:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
    shape = {"shape": options.schedule, "warmup": options.warmup, "steps": options.steps, "least": options.lr_least}
    schedule = make_schedule(optimizer, done, **shape)
    if options.seed is not None:
        mesh.random.seed = options.seed
    batches, log = training_batches(options, mesh, done), make_log(options, mesh)
    if done >= options.steps and first:
        print(f"nothing to do: {done} steps are done, and --steps {options.steps} counts them too", flush=True)
    try:
        train(model, optimizer, schedule, mesh, batches, options, log, done, scaler)
    except NonFinite as error:  # on all ranks at once
        finish_saving(last=True)
        if first:
            print(f"error: {error}\n  try: {after_nonfinite(options)}", file=sys.stderr, flush=True)
        ends_anywhere(mesh, True)  # torchrun ends the others with the first: all wait until it is told
        raise
    finally:
        batches.close()
    finish_saving(last=True)
    tell_unused_buffers(options, mesh)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    mesh: ParallelMesh,
    batches: Prefetched,
    options: argparse.Namespace,
    log: TrainingLog,
    done: int,
    scaler: LossScaler | None = None,
) -> None:
    """The steps after `done`."""
    updated = model.buffers() if UPDATES_BUFFERS else ()
    judge = FiniteSteps(mesh, LOSS_AXES, most_left_out(options), scaler, updated)
    with profiling(options.profile, *profiled_steps(options), mesh.global_rank, mesh.device) as profiled:
        for step in range(done + 1, options.steps + 1):
            one_step(model, optimizer, mesh, batches, options, log, step, judge, scaler)
            schedule.step()
            profiled()
            if evaluates(options, step):
                loss = evaluate(model, mesh, options)
                log.write(step, {"eval_loss": loss}, f"step {step}: evaluation loss {loss:.6f}")
            if saves(options, step):
                judge.check_saved(model, optimizer)
                folder, background = f"{options.save}/step-{step}", options.save_async
                state = {"loader": batches.state, "scaler": scaler}
                save_checkpoint(folder, model, optimizer, step, background=background, **state)


def one_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: ParallelMesh,
    batches: Prefetched,
    options: argparse.Namespace,
    log: TrainingLog,
    step: int,
    judge: FiniteSteps,
    scaler: LossScaler | None = None,
) -> None:
    """Reads, trains, and tells of it."""
    batch = next(batches) if MICRO_BATCHES == 1 else [next(batches) for _ in range(MICRO_BATCHES)]
    logged = step % options.log_every == 0 or step == options.steps
    if logged:  # other steps don't wait for the device
        if options.data:
            check_agreement([batch] if MICRO_BATCHES == 1 else batch, mesh)
        synchronise(mesh.device)
    start = time.perf_counter()
    mesh.random.step = step
    left_out = judge.left_out
    train_step(model, optimizer, mesh, batch, options.max_norm, scaler, judge)
    if judge.left_out > left_out and mesh.global_rank == 0:
        print(f"step {step}: {judge.told()}: left out, {judge.in_a_row} in a row", flush=True)
    if not logged:
        return
    synchronise(mesh.device)
    seconds, total, of_norm = time.perf_counter() - start, judge.loss, judge.norm
    figures = {"loss": total, "gradient_norm": of_norm, "lr": optimizer.param_groups[0]["lr"], "seconds": seconds}
    scale = ""
    if scaler is not None:
        figures |= {"loss_scale": scaler.get_scale(), "skipped_steps": int(scaler.skipped)}
        scale = f"loss scale {figures['loss_scale']:g}, steps skipped {figures['skipped_steps']}, "
    timing = f"{seconds * 1e3:.1f} ms, {rate(seconds)}"
    log.write(step, figures, f"step {step}: loss {total:.6f}, gradient norm {of_norm:.4f}, {scale}{timing}")


def main() -> int:
    options, code = parse_arguments(description=(__doc__ or "").partition("\n")[0]), EXIT_CODE
    try:
        take_options(options)
        check_launch(options.backend)
        stages, host = (STAGES, VIRTUAL_STAGES), bool(HOST_TABLES)
        own = (options.timeout, *stages, host, options.hccl_buffer)
        with contextlib.suppress(NonFinite):  # which `run` has told
            run(options, ParallelMesh.from_environment(MESH, options.backend, *own))
            code = 0
    except UserError as error:  # the process group is left as it is: other ranks may wait in a collective
        rank = os.environ.get("RANK", "0")
        if rank != "0" and not isinstance(error, BatchError):
            time.sleep(PATIENCE)  # rank 0 fails too, and its end ends this process; if not, it is for this rank to say
        print(f"error{f' on rank {rank}' if rank != '0' else ''}: {error}", file=sys.stderr, flush=True)
        return 2
    leave()
    return code


if __name__ == "__main__":
    sys.exit(main())
