# mypy: ignore-errors
# ruff: noqa: I001
"""Trains the model in model_parallel.py; start it with torchrun, one process per device (see README.md).

    torchrun --nproc-per-node 4 train.py --backend gloo --steps 5

Without --data it makes synthetic batches from the seed. A loader is a function that yields batches:

    torchrun --nproc-per-node 4 train.py --backend nccl --steps 1000 --data data.py:make_loader

A batch is a tuple in the order of model_parallel.INPUTS, or a dict with its names. Every rank may yield the same global
batch (it takes its own part) or only its local part; the shapes tell which, dim by dim. A step takes MICRO_BATCHES of
them. `make_loader(parts)` is given the slices of each input that its rank needs: rows of a large image, say.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import model_parallel
from batches import BatchError, ElsewhereError, UserError, check_agreement, check_ends
from dynamic_sizes import BUCKETS, DYNAMIC_SIZES, agree, module_of, rate, step_sizes
from elastic import end_surplus, run_fitting_plan
from evaluation import check_evaluation, ends_anywhere, evaluate, evaluates
from model_parallel import (
    BATCH_SHARES,
    GATHERS_AGAIN,
    GRADIENT_BUCKETS,
    HOST_TABLES,
    LABEL_COUNTS,
    LOSS_AXES,
    MESH,
    MESHES,
    MICRO_BATCHES,
    OPTIMIZER,
    OTHER_NUMBERS,
    PACKED_BY,
    PART_STAGES,
    PRECISION,
    SHARED,
    STAGES,
    UPDATES_BUFFERS,
    WEIGHT_BUCKETS,
    ZERO,
    build_labels,
    build_model,
)
from pipelines import pipeline_of
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
from run_start import check_nodes, check_run, describe, make_log, packs, set_matmul_precision, training_batches
from runtime import (
    EXIT_CODE,
    EXIT_STOPPED,
    Failures,
    FiniteSteps,
    LossScaler,
    NonFinite,
    ParallelMesh,
    Prefetched,
    StartError,
    StopSignals,
    TrainingLog,
    accumulating,
    clip_gradients,
    compile_blocks,
    described,
    finish_saving,
    gathered_ahead,
    gathered_together,
    has_fused_adamw,
    label_shares,
    leave,
    listening,
    losses_of,
    make_schedule,
    profiling,
    reducing,
    regathering,
    sharding,
    slices_of,
    take_start,
    tell_left,
    whole_tensors,
)
from runtime.optimizers import SGD, AdamW
from saving import Saving, failing, locked, resumed_from, saves
from start_state import prepare

# --- one step ---


def make_optimizer(
    model: nn.Module, lr: float = LEARNING_RATE, weight_decay: float | None = None
) -> torch.optim.Optimizer:
    """The optimizer that the plan was made for. Parameters are DTensors: optimizers of torch that work by
    element take them (Adafactor does not).

    `weight_decay`: of matrices, norms and biases then have none; None for torch's own, of all.
    """
    parameters: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained = [{"params": parameters}]  # a stage may have none, which torch takes of a group alone
    if weight_decay is not None:
        matrices = [parameter for parameter in parameters if len(sharding(parameter).shape) > 1]
        vectors = [parameter for parameter in parameters if len(sharding(parameter).shape) <= 1]
        decays = ((matrices, weight_decay), (vectors, 0.0))  # both, so that a checkpoint has two groups anywhere
        trained = [{"params": group, "weight_decay": decay} for group, decay in decays]
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


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by original name; looked up once."""
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
    """Forward and backward; gradient sums over devices overlap with it. Inputs are local; returns the local outputs.

    Gradients are added to those of earlier calls, as by `backward`, until the optimizer zeroes them. `last=False`: a
    micro-batch after which others come; what it makes is summed over devices with the last one's. `scaler`: gradients
    are those of the loss by its scale.
    """
    parameters = parameters_of(model)
    source = module_of([inputs], mesh) if BUCKETS else model_parallel
    buckets = source.GRADIENT_BUCKETS
    sums = reducing(mesh, parameters, buckets) if last else accumulating(parameters, buckets)
    regathered = regathering() if source.GATHERS_AGAIN else contextlib.nullcontext()
    weights = contextlib.nullcontext()
    if source.WEIGHT_BUCKETS:
        weights = gathered_together(mesh, parameters, source.WEIGHT_BUCKETS)
    with sums, weights, regathered:
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
    """Forward and backward of all micro-batches of a step, one after another: gradients of the mean of their losses.

    Gradients are added up here and summed over devices once, during the last backward. Returns the loss of each alone:
    no micro-batch's other outputs are held while the next one runs.
    """
    if STAGES > 1:
        return [(loss,) for loss in pipeline_gradients(model, mesh, micro_batches, scaler)]
    parameters = parameters_of(model)
    slices = slices_of(BATCH_SHARES, micro_batches, mesh)
    shares = shares_of_labels(model, mesh, [entry.inputs for entry in slices])
    source, results, count = module_of(micro_batches, mesh) if BUCKETS else model_parallel, [], len(slices)
    weights_of_all = contextlib.nullcontext()
    if ZERO < 3:
        weights_of_all = weights_of_step(mesh, parameters, [source.WEIGHT_BUCKETS], count)
    with reducing(mesh, parameters, source.GRADIENT_BUCKETS, count), weights_of_all:
        for (number, inputs, at), labels in zip(slices, shares, strict=True):
            regathered = regathering() if source.GATHERS_AGAIN else contextlib.nullcontext()
            weights = contextlib.nullcontext()
            if ZERO == 3 and source.WEIGHT_BUCKETS:  # gathered for each micro-batch
                weights = gathered_together(mesh, parameters, source.WEIGHT_BUCKETS)
            with mesh.micro_batch(number, labels, at), weights, regathered:
                result = model(*inputs)
                outputs = result if isinstance(result, tuple) else (result,)
                scaled(outputs[0] / MICRO_BATCHES, scaler).backward()
            results.append((outputs[0].detach(),))
            del result, outputs
    return results if BATCH_SHARES is None else [(loss,) for loss in losses_of(results, slices, MICRO_BATCHES)]


@contextlib.contextmanager
def weights_of_step(
    mesh: ParallelMesh, parameters: dict[str, nn.Parameter], parts: Sequence[Any], count: int = MICRO_BATCHES
) -> Iterator[None]:
    """Context of all micro-batches: sharded weights that are gathered once for all of them. `parts`: which, of each
    part; `count`: how many run here."""
    with contextlib.ExitStack() as stack:
        after = count if ZERO == 1 else 1
        lines = [stack.enter_context(gathered_together(mesh, parameters, buckets, after, count)) for buckets in parts]
        gathered_ahead(lines, waits=STAGES > 1 and mesh.stages.index > 0)
        yield


def pipeline_gradients(
    model: nn.Module,
    mesh: ParallelMesh,
    micro_batches: Sequence[Sequence[Tensor]],
    scaler: LossScaler | None = None,
) -> list[Tensor]:
    """Gradients of a step over stages: `model` holds the parts of this one. Returns the losses on the last stage."""
    pipeline = pipeline_of(model, mesh)
    parameters = parameters_of(model)
    shares = shares_of_labels(model, mesh, micro_batches) if pipeline.counts_labels else []
    buckets = [bucket for part in reversed(mesh.stages.parts) for bucket in GRADIENT_BUCKETS[part]]
    regathered = regathering() if GATHERS_AGAIN else contextlib.nullcontext()
    weights_of_all = contextlib.nullcontext()
    if ZERO < 3:
        weights_of_all = weights_of_step(mesh, parameters, [WEIGHT_BUCKETS[part] for part in mesh.stages.parts])
    with reducing(mesh, parameters, buckets, MICRO_BATCHES), weights_of_all, regathered:
        losses = pipeline.run(micro_batches, shares, scaler, step_sizes(micro_batches, mesh))
    mesh.stages.sum_shared(parameters, SHARED)
    return losses


def shares_of_labels(
    model: nn.Module, mesh: ParallelMesh, micro_batches: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """Share of each micro-batch in the labels of the step, for each loss that is a mean over labels."""
    labels = build_labels(mesh)
    targets = [() if labels is None else labels(*inputs) for inputs in micro_batches]
    every = [(one,) if isinstance(one, Tensor) else one for one in targets]
    weights = whole_tensors(model, (name for *_, name in LABEL_COUNTS))
    sliced = (BATCH_SHARES.axis, MICRO_BATCHES) if BATCH_SHARES is not None else ()
    return label_shares(mesh, every, LABEL_COUNTS, weights, *sliced)


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
    if UPDATES_BUFFERS and judge is not None:
        judge.before()
    if MICRO_BATCHES == 1 and STAGES == 1:
        loss = compute_gradients(model, mesh, inputs, scaler=scaler)[0].detach()
    else:
        each = inputs if MICRO_BATCHES > 1 else [inputs]
        losses = [loss for loss, *_ in accumulate_gradients(model, mesh, each, scaler=scaler)]
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


def run(options: argparse.Namespace, mesh: ParallelMesh, stop: StopSignals | None = None) -> int:
    """Returns the exit code: 0, or that of a run that a signal has stopped. `stop` hears it."""
    check_run(options, mesh)
    check_evaluation(options)
    set_matmul_precision(options.matmul_precision, mesh.device)
    model = build_model(mesh)
    first = mesh.global_rank == 0
    if options.dry_run:
        if first:
            describe(model, mesh)
        return 0
    if options.compile is not None:
        every = (model, *model.smaller) if BUCKETS else (model,)
        count = sum(compile_blocks(module, options.compile, bool(DYNAMIC_SIZES)) for module in every)
        if first:
            print(f"compiled at its first call, by {options.compile}: each of {count} blocks", flush=True)
    with locked(options.save if first else None):
        stopped = trained(options, mesh, model, stop or StopSignals())
    tell_unused_buffers(options, mesh)
    return EXIT_STOPPED if stopped else 0


def trained(options: argparse.Namespace, mesh: ParallelMesh, model: nn.Module, stop: StopSignals) -> bool:
    """Runs from the start state to the last checkpoint. True where a signal has stopped it before."""
    first = mesh.global_rank == 0
    optimizer = make_optimizer(model, weight_decay=options.weight_decay)
    scaler = make_scaler(mesh)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    options.resume = resumed_from(options, mesh.global_rank)
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
    saved_rate, schedule = optimizer.param_groups[0]["lr"], make_schedule(optimizer, done, **shape)
    rate_now = optimizer.param_groups[0]["lr"]
    if first and done and options.lr is None and not math.isclose(rate_now, saved_rate, rel_tol=1e-6):
        print(f"note: the learning rate is {rate_now:g}, saved as {saved_rate:g}: --schedule, --warmup, --steps differ")
    if options.seed is not None:
        mesh.random.seed = options.seed
    saving = Saving(options, mesh.global_rank)
    if PACKED_BY:
        options.packs = packs(options, model, mesh)
    batches, log = training_batches(options, mesh, done), make_log(options, mesh)
    if done >= options.steps and first:
        print(f"nothing to do: {done} steps are done, and --steps {options.steps} counts them too", flush=True)
    try:
        stopped = train(model, optimizer, schedule, mesh, batches, options, log, done, scaler, saving, stop)
    except NonFinite as error:  # on all ranks at once
        finish_saving(last=True)
        if first:
            print(f"error: {error}\n  try: {after_nonfinite(options)}", file=sys.stderr, flush=True)
        ends_anywhere(mesh, True)  # torchrun ends the others with the first: all wait until it is known
        raise
    finally:
        batches.close()
    with failing(options):
        finish_saving(last=True)
    saving.remove_older()
    if stopped:
        if first:
            heard = stop.name or "a signal to another rank"
            print(f"{heard}: stopped{saving.stop_report()}; exit code {EXIT_STOPPED}", flush=True)
        ends_anywhere(mesh, True)  # all have saved: signals from here on are of a launcher that ends the others
    return stopped


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    mesh: ParallelMesh,
    batches: Prefetched,
    options: argparse.Namespace,
    log: TrainingLog,
    done: int,
    scaler: LossScaler | None,
    saving: Saving,
    stop: StopSignals,
) -> bool:
    """Runs the steps after `done`. True where a signal, to whatever rank, stops it before the last."""
    updated = [*model.buffers()] if UPDATES_BUFFERS else None
    judge = FiniteSteps(
        mesh, LOSS_AXES, most_left_out(options), scaler, updated, lambda: (bool(stop.name), batches.ends_of_step)
    )
    with profiling(options.profile, *profiled_steps(options), mesh.global_rank, mesh.device) as profiled:
        for step in range(done + 1, options.steps + 1):
            one_step(model, optimizer, mesh, batches, options, log, step, judge, scaler)
            schedule.step()
            profiled()
            stopped = judge.sums[0] > 0 and step < options.steps
            if evaluates(options, step) and not stopped:
                loss = evaluate(model, mesh, options)
                log.write(step, {"eval_loss": loss}, f"step {step}: evaluation loss {loss:.6f}")
            if saves(options, step, stopped):
                judge.check_saved(model, optimizer)
                saving.save(step, model, optimizer, batches.state, scaler)
            if stopped:
                return True
    return False


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
    """Reads a batch, trains on it, and reports the step."""
    batch = batches.of_step(MICRO_BATCHES)
    logged = step % options.log_every == 0 or step == options.steps
    if options.data:
        agree(batch, mesh, step)
    if logged:  # other steps don't wait for the device
        if options.data:
            check_agreement(batch, mesh, step, batches.ends_of_step)
        synchronise(mesh.device)
    start = time.perf_counter()
    mesh.random.step = step
    left_out = judge.left_out
    train_step(model, optimizer, mesh, batch if MICRO_BATCHES > 1 else batch[0], options.max_norm, scaler, judge)
    check_ends(mesh, step, batches.ends_of_step, judge.sums[1])
    if judge.left_out > left_out and mesh.global_rank == 0:
        print(f"step {step}: {judge.words()}: left out, {judge.in_a_row} in a row", flush=True)
    if not logged:
        return
    synchronise(mesh.device)
    seconds, total, of_norm = time.perf_counter() - start, judge.loss, judge.norm
    figures = {"loss": total, "gradient_norm": of_norm, "lr": optimizer.param_groups[0]["lr"], "seconds": seconds}
    scale = ""
    if scaler is not None:
        figures |= {"loss_scale": scaler.get_scale(), "skipped_steps": int(scaler.skipped)}
        scale = f"loss scale {figures['loss_scale']:g}, steps skipped {figures['skipped_steps']}, "
    timing = f"{seconds * 1e3:.1f} ms, {rate(seconds, batch, mesh)}"
    log.write(step, figures, f"step {step}: loss {total:.6f}, gradient norm {of_norm:.4f}, {scale}{timing}")


def main() -> int:
    options = parse_arguments(description=(__doc__ or "").partition("\n")[0])
    with listening() as stop:
        try:
            if not (run_fitting_plan() if OTHER_NUMBERS else take_start()):
                return 0
        except StartError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        failures = Failures()
        try:
            take_options(options)
            check_launch(options.backend)
            mesh = ParallelMesh.from_environment(
                MESH, options.backend, options.timeout, hccl_buffers=options.hccl_buffer, host=bool(HOST_TABLES),
                part_stages=PART_STAGES if STAGES > 1 else (), places=MESHES if STAGES > 1 else (),
            )  # fmt: skip
            failures.watch()
            check_nodes(mesh)
            code = run(options, mesh, stop)
        except NonFinite:  # which `run` has reported
            code = EXIT_CODE
        except UserError as error:
            knows = isinstance(error, BatchError) or (not failures.rank and not isinstance(error, ElsewhereError))
            return failures.end(str(error), 2, knows)
        except Exception as error:  # noqa: BLE001 (the rank that knows reports it)
            if options.traceback:
                traceback.print_exc()
            return failures.end(f"{described(error)}; --traceback shows more", 1, knows=True)
        stop.closing = True
        failures.close()
        mesh = None
        if OTHER_NUMBERS:
            end_surplus()
        leave()
        tell_left(waits=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
