"""The options of `autoshard estimate`, and what they say as a Transformer, a Run and a Host."""

from __future__ import annotations

import argparse

from autoshard.cli.option_values import path, quantity, whole
from autoshard.estimate.transformer import (
    ACTIVATIONS,
    ATTENTIONS,
    NORMS,
    POSITIONS,
    PRECISIONS,
    RECOMPUTE,
    SCHEDULES,
    TrainingRun,
    Transformer,
)

_SIZES = {
    "layers": "transformer layers",
    "hidden": "width of the residual stream",
    "heads": "attention heads",
    "sequence": "tokens in a sequence",
    "vocabulary": "words",
    "batch": "sequences a step, of all devices",
}
_DEGREES = {
    "micro-batch": (1, "sequences that a replica computes at once"),
    "dp": (1, "replicas, data parallelism"),
    "tp": (1, "devices that share every layer, tensor parallelism"),
    "pp": (1, "pipeline stages"),
    "interleave": (1, "model chunks a stage, for the interleaved schedule"),
    "shard": (0, "replicas that share one set of shards, as HSDP has it; default: all"),
    "kv-heads": (0, "of grouped-query attention; default: as many as heads"),
    "feedforward": (0, "width of the feed-forward layer; default 4 x hidden"),
}
_CHOICES = {
    "schedule": (SCHEDULES, "1f1b"),
    "recompute": (RECOMPUTE, "none"),
    "precision": (PRECISIONS, "bf16"),
    "activation": (ACTIVATIONS, "gelu"),
    "attention": (ATTENTIONS, "flash"),
    "positions": (POSITIONS, "learned"),
    "norm": (NORMS, "layer_norm"),
    "optimizer": (("adamw", "sgd"), "adamw"),
}
_SWITCHES = {
    "sequence-parallel": "cut along the sequence between tensor-parallel layers",
    "no-bias": "linear layers without bias",
    "untied": "the head has its own table",
    "dropout": "dropout operators take their time",
    "overlap": "reduce gradients and gather weights beside computation",
    "fused-loss": "the loss is one kernel that works in place",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `read` reads."""
    parser.add_argument("--hardware", required=True, metavar="NAME", help="see `autoshard profiles`, or a .toml file")
    for name, text in _SIZES.items():
        parser.add_argument(f"--{name}", type=whole(f"--{name}"), required=True, metavar="N", help=text)
    for name, (default, text) in _DEGREES.items():
        shown = f"{text}; default {default}" if default else text
        parser.add_argument(f"--{name}", type=whole(f"--{name}"), default=default, metavar="N", help=shown)
    for name, (choices, usual) in _CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices, default=usual, help=f"default {usual}")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="optimizer sharding; default 0")
    for name, text in _SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("--reduce", choices=("fp32", "bf16"), help="what gradients are summed in; default by precision")
    software = "whose whole steps the rates are of, see docs/estimate.md; default kernels: those of kernels alone"
    parser.add_argument("--software", default="kernels", metavar="NAME", help=software)
    dispatch = quantity("--host-dispatch", "seconds", zero=True)
    time = 'host time per operator, such as "60 us"'
    parser.add_argument("--host-dispatch", type=dispatch, metavar="TIME", help=time)
    parser.add_argument("-o", "--output", type=path("--output"), metavar="FILE", help="the pipeline as a Chrome trace")


def read(options: argparse.Namespace) -> tuple[Transformer, TrainingRun]:
    """The numbers that the options give."""
    model = Transformer(
        layers=options.layers,
        hidden=options.hidden,
        heads=options.heads,
        sequence=options.sequence,
        vocabulary=options.vocabulary,
        kv_heads=options.kv_heads,
        feedforward=options.feedforward,
        activation=options.activation,
        attention=options.attention,
        positions=options.positions,
        norm=options.norm,
        bias=not options.no_bias,
        tied=not options.untied,
        dropout=options.dropout,
        fused_loss=options.fused_loss,
    )
    run = TrainingRun(
        batch=options.batch,
        micro_batch=options.micro_batch,
        dp=options.dp,
        tp=options.tp,
        pp=options.pp,
        schedule=options.schedule,
        interleave=options.interleave,
        recompute=options.recompute,
        zero=options.zero,
        sequence_parallel=options.sequence_parallel,
        precision=options.precision,
        optimizer=options.optimizer,
        overlap=options.overlap,
        shard=options.shard,
        reduced=options.reduce or "",
        software=options.software,
    )
    return model, run
