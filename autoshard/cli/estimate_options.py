"""Options of `autoshard estimate`, read into a Transformer, a Run and a Host."""

from __future__ import annotations

import argparse
from typing import Any

from autoshard.cli.option_values import factor, path, quantity, whole
from autoshard.errors import UsageError
from autoshard.estimate.run_space import FREE, RunSpace
from autoshard.estimate.transformer import (
    ACTIVATIONS,
    ATTENTIONS,
    NORMS,
    OFFLOADS,
    POSITIONS,
    PRECISIONS,
    RECOMPUTE,
    SCHEDULES,
    TrainingRun,
    Transformer,
)
from autoshard.step_corrections.software import PACKAGES

_SIZES = {
    "layers": "transformer layers",
    "hidden": "width of the residual stream",
    "heads": "attention heads",
    "sequence": "tokens per sequence",
    "vocabulary": "vocabulary size",
    "batch": "sequences per step, over all devices",
}
_DEGREES = {
    "micro-batch": (1, "sequences per replica and micro-batch"),
    "dp": (1, "data-parallel degree"),
    "tp": (1, "tensor-parallel degree"),
    "pp": (1, "pipeline stages"),
    "cp": (1, "context-parallel degree (ring attention)"),
    "ep": (1, "expert-parallel degree; divides dp"),
    "interleave": (1, "model chunks per stage, for the interleaved schedule"),
    "shard": (0, "sharding degree of HSDP (replicas that share one set of shards); default: all"),
    "kv-heads": (0, "key/value heads of grouped-query attention; default: as many as heads"),
    "feedforward": (0, "width of the feed-forward layer; default 4 x hidden"),
    "experts": (0, "experts per layer, in place of the feed-forward layer"),
    "top-k": (0, "experts per token; default 2"),
    "expert-hidden": (0, "width of an expert; default: the feed-forward width"),
    "shared-experts": (0, "shared experts (for every token)"),
}
_CHOICES = {
    "schedule": (SCHEDULES, "1f1b"),
    "recompute": (RECOMPUTE, "none"),
    "precision": (PRECISIONS, f"bf16 (bf16-mixed with --software {PACKAGES})"),
    "activation": (ACTIVATIONS, "gelu"),
    "attention": (ATTENTIONS, "flash"),
    "positions": (POSITIONS, "learned"),
    "norm": (NORMS, "layer_norm"),
    "optimizer": (("adamw", "sgd"), "adamw"),
}
_SWITCHES = {
    "sequence-parallel": "shard activations along the sequence between tensor-parallel layers",
    "no-bias": "linear layers without bias",
    "untied": "the output head does not share the embedding's weight",
    "dropout": "count the time of dropout",
    "overlap": "overlap gradient reductions and weight gathers with computation",
    "compiled": "torch.compile: fused kernels in every layer",
    "fused-loss": "fused in-place loss kernel",
    "fp32-loss": "cast logits to float32 before the loss, as torchtitan and transformers do",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds every option that `read` reads."""
    parser.add_argument("--hardware", required=True, metavar="NAME", help="see `autoshard profiles`, or a .toml file")
    for name, text in _SIZES.items():
        parser.add_argument(f"--{name}", type=whole(f"--{name}"), required=True, metavar="N", help=text)
    for name, (default, text) in _DEGREES.items():
        shown = f"{text}; default {default}" if default else text
        parser.add_argument(f"--{name}", type=whole(f"--{name}"), metavar="N", help=shown)
    for name, (choices, usual) in _CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices, help=f"default {usual}")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="optimizer sharding; default 0")
    for name, text in _SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    search = "search all configurations of --devices; degrees that are given stay fixed"
    parser.add_argument("--search", action="store_true", help=search)
    parser.add_argument("--devices", type=whole("--devices"), metavar="N", help="number of devices for --search")
    read = whole("--top")
    parser.add_argument("--top", type=read, metavar="N", help="how many results --search prints; default 10")
    front = "with --search: print the Pareto front of step time and memory, and plot it to this file"
    parser.add_argument("--pareto", type=path("--pareto"), metavar="FILE.svg", help=front)
    parser.add_argument(
        "--reduce", choices=("fp32", "bf16"), help="dtype of gradient reduction; default by --precision"
    )
    software = "framework whose measured efficiency is used, see docs/estimate.md; default kernels (kernel rates only)"
    parser.add_argument("--software", default="kernels", metavar="NAME", help=software)
    uneven = "load imbalance of experts: tokens on the most loaded device over the average; default 1"
    parser.add_argument("--imbalance", type=factor("--imbalance"), default=1.0, metavar="X", help=uneven)
    dispatch = quantity("--host-dispatch", "seconds", zero=True)
    time = 'host time per operator, such as "60 us"'
    parser.add_argument("--host-dispatch", type=dispatch, metavar="TIME", help=time)
    away = "keep and update this in host memory; default nothing"
    parser.add_argument("--offload", choices=[name for name in OFFLOADS if name], help=away)
    stages = "layers of each stage (or chunk) in the model's order, such as 5,6,6,5; default: as even as possible"
    parser.add_argument("--stage-layers", type=_counts, default=(), metavar="N,…", help=stages)
    parser.add_argument(
        "-o",
        "--output",
        "--out",
        type=path("--output"),
        metavar="FILE",
        help="write the timeline as a Chrome trace",
    )


def _counts(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between."""
    return tuple(map(whole("--stage-layers", 0), text.split(",")))


def read(options: argparse.Namespace) -> tuple[Transformer, TrainingRun]:
    """Model and run from the numbers that the options give; what is not given has its default."""
    usual: dict[str, Any] = {name.replace("-", "_"): default for name, (default, _) in _DEGREES.items()}
    usual.update({name: default for name, (_, default) in _CHOICES.items()}, zero=0)
    usual["precision"] = "bf16-mixed" if options.software == PACKAGES else "bf16"
    values = {
        name: default if getattr(options, name) is None else getattr(options, name) for name, default in usual.items()
    }
    model = Transformer(
        options.layers,
        options.hidden,
        options.heads,
        options.sequence,
        options.vocabulary,
        values["kv_heads"],
        values["feedforward"],
        values["activation"],
        values["attention"],
        values["positions"],
        values["norm"],
        not options.no_bias,
        not options.untied,
        options.dropout,
        options.fused_loss,
        values["experts"],
        values["top_k"],
        values["expert_hidden"],
        values["shared_experts"],
        options.imbalance,
        options.fp32_loss,
    )
    run = TrainingRun(
        options.batch,
        values["micro_batch"],
        values["dp"],
        values["tp"],
        values["pp"],
        values["schedule"],
        values["interleave"],
        values["recompute"],
        values["zero"],
        options.sequence_parallel,
        values["precision"],
        values["optimizer"],
        options.overlap,
        values["shard"],
        options.reduce or "",
        options.software,
        options.stage_layers,
        values["cp"],
        values["ep"],
        options.offload or "",
        options.compiled,
    )
    return model, run


def space(options: argparse.Namespace) -> RunSpace:
    """Configurations that `--search` chooses from. UsageError if the devices are not given, or the schedule is."""
    if options.devices is None:
        raise UsageError("--search needs --devices", "--devices 1024 --search")
    if options.schedule is not None:
        hint = "leave it out: 1f1b, or interleaved where a stage has several chunks"
        raise UsageError(f"--search chooses the schedule, got --schedule {options.schedule}", hint)
    model, run = read(options)
    values = {name: getattr(options, name) for name in FREE if name != "sequence_parallel"}
    fixed = {name: value for name, value in values.items() if value is not None}
    if options.sequence_parallel:
        fixed["sequence_parallel"] = True
    return RunSpace(model, run, options.devices, fixed)
