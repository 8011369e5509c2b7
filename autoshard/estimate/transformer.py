"""A standard decoder transformer as numbers, and how a cluster trains it as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoshard.errors import UsageError
from autoshard.program.step_check import MOST_PASSES
from autoshard.step_corrections.software import PACKAGES
from autoshard.units import counted

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Recompute = Literal["none", "selective", "operators", "full"]
ACTIVATIONS = ("gelu", "gelu_new", "swiglu")
ATTENTIONS = ("flash", "flash1", "triton", "flash2", "flash3", "unfused")  # flash: what the constants were fitted to
POSITIONS = ("learned", "rotary")
NORMS = ("layer_norm", "rms_norm", "rms_norm_apart")  # apart: in float32, operator by operator
FSDP, FP8_FSDP = "bf16-fsdp", "fp8-fsdp"
SHARDED = (FSDP, FP8_FSDP)  # float32 shards, gathered in bf16
PRECISIONS = {  # computed in
    "fp32": "float32", "bf16-mixed": "bfloat16", "fp16-mixed": "float16", "bf16": "bfloat16", "fp16": "float16",
    "fp8": "float8", "fp8-mixed": "float8", FSDP: "bfloat16", FP8_FSDP: "float8",
}  # fmt: skip
MIXED = ("bf16-mixed", "fp16-mixed", "fp8-mixed")  # cast at every use
MEGATRON = ("bf16", "fp16", "fp8")  # weights in half precision, masters in the optimizer, gradients in buffers
HALF = {  # of weights, not cast at a use
    "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16", FSDP: "bfloat16", FP8_FSDP: "bfloat16",
}  # fmt: skip
IN_FLOAT8 = ("fp8", FP8_FSDP)  # of those, whose linear layers multiply in float8
OFFLOADS = ("", "optimizer")
REDUCED = ("", "fp32", "bf16")  # "": as the precision has it
SCHEDULES = ("gpipe", "1f1b", "interleaved")
RECOMPUTE = ("none", "selective", "operators", "full")


LARGEST = {"layers": 10**4, "hidden": 10**7, "feedforward": 10**8, "vocabulary": 10**8, "sequence": 10**8}


@dataclass(frozen=True)
class Transformer:
    """Sizes of a model. `kv_heads` and `feedforward` of 0 mean heads and 4 x hidden. `attention`: one fused kernel, or
    separate product, softmax and product. `dropout`: whether there are dropout operators. `fp32_loss`: logits are cast
    to float32 before the loss, if they are not computed in it.

    `experts`: every layer has that many in place of its feed-forward layer, each as wide as `expert_hidden` (0: as that
    layer), and a router sends a token to `top_k` (0: two) of them. `shared_experts`: this many more that every token
    passes, as one layer. `imbalance`: pairs of token and expert on the fullest device, relative to the average.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    kv_heads: int = 0
    feedforward: int = 0
    activation: str = "gelu"
    attention: str = "flash"
    positions: str = "learned"
    norm: str = "layer_norm"
    bias: bool = True
    tied: bool = True
    dropout: bool = False
    fused_loss: bool = False
    experts: int = 0
    top_k: int = 0
    expert_hidden: int = 0
    shared_experts: int = 0
    imbalance: float = 1.0
    fp32_loss: bool = False

    @property
    def fused_attention(self) -> str:
        """Name of the kernel; "" for none, or for the one that the constants were fitted to."""
        return "" if self.attention in ("flash", "unfused") else self.attention

    @property
    def kv_head_count(self) -> int:
        return self.kv_heads or self.heads

    @property
    def feedforward_width(self) -> int:
        return self.feedforward or 4 * self.hidden

    @property
    def active_experts(self) -> int:
        return (self.top_k or min(2, self.experts)) if self.experts else 0

    @property
    def expert_width(self) -> int:
        return self.expert_hidden or self.feedforward_width

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class TrainingRun:
    """One training step: `batch` is the global number of sequences, `micro_batch` that of one device and pass.

    `precision`: "bf16" and "fp16" hold the weights in half precision with float32 masters in the optimizer, as Megatron
    does, and "fp8" the same with linear layers that multiply in float8; "bf16-mixed" and "fp16-mixed" cast float32
    weights at every use, as torch.autocast does; "bf16-fsdp" keeps float32 shards and gathers them in bf16 (FSDP's
    mixed precision). "fp8-mixed" and "fp8-fsdp" are "bf16-mixed" and "bf16-fsdp" whose linear layers multiply in
    float8, except for the head and experts. `zero`: stage 0 to 3. `shard`: replicas that share one set of shards; each
    such group is a replica of the others (HSDP); 0 for all. `interleave`: model chunks per device. `overlap`: gradients
    are reduced and weights gathered during the computation of neighbours. `reduced`: dtype of gradient sums.
    `stage_layers`: layers of each chunk of the pipeline, in the model's order; () for as even as possible. `cp`:
    devices that share every sequence (context parallelism): attention passes keys and values around a ring of them.
    `ep`: replicas that share one set of experts (expert parallelism, a part of `dp`): tokens are sent to their experts
    among them, and back. `offload`: "optimizer" keeps its states and float32 weights in the host's memory, where the
    host updates them. `compiled`: `torch.compile` joins the kernels of each layer.
    """

    batch: int
    micro_batch: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    schedule: Schedule = "1f1b"
    interleave: int = 1
    recompute: Recompute = "none"
    zero: int = 0
    sequence_parallel: bool = False
    precision: str = "bf16"
    optimizer: str = "adamw"
    overlap: bool = False
    shard: int = 0
    reduced: str = ""
    software: str = "kernels"
    stage_layers: tuple[int, ...] = ()
    cp: int = 1
    ep: int = 1
    offload: str = ""
    compiled: bool = False

    @property
    def replicas(self) -> int:
        """Number of devices that hold the same weights, including those that share a sequence."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Number of replicas over which ZeRO shards."""
        return self.shard or self.replicas

    @property
    def expert_replicas(self) -> int:
        """Number of devices that hold the same experts."""
        return self.replicas // self.ep

    @property
    def expert_shards(self) -> int:
        """Number of the experts' replicas over which ZeRO shards."""
        return self.shards if self.ep == 1 else self.expert_replicas

    @property
    def devices(self) -> int:
        return self.replicas * self.tp * self.pp

    @property
    def weight_bytes(self) -> int:
        """Bytes of one parameter in computation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one parameter's gradient in sums over replicas."""
        if self.reduced:
            return 4 if self.reduced == "fp32" else 2
        return 2 if self.precision in MEGATRON else 4

    @property
    def keeps_gradients(self) -> bool:
        """Do gradients exist when a backward begins? They accumulate over micro-batches, or are in separate buffers, as
        Megatron's are."""
        return self.micro_batches > 1 or self.precision in MEGATRON

    @property
    def activation_bytes(self) -> int:
        """Bytes of one element of the residual stream."""
        return 2 if self.precision in HALF else 4

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.micro_batch * self.dp)


def check(model: Transformer, run: TrainingRun) -> None:
    """Raises UsageError that lists all inconsistent settings."""
    if message := "; ".join(wrong(model, run)):
        raise UsageError(message, "see `autoshard estimate --help`")


def wrong(model: Transformer, run: TrainingRun) -> list[str]:
    """Messages on inconsistent settings."""
    return [text for holds, text in _conditions(model, run) if not holds]


def is_possible(model: Transformer, run: TrainingRun) -> bool:
    """Are all settings consistent?"""
    return all(holds for holds, _ in _conditions(model, run))


def _conditions(model: Transformer, run: TrainingRun) -> list[tuple[bool, str]]:
    chunks = run.pp * run.interleave
    sizes = {"layers": model.layers, "hidden": model.hidden, "heads": model.heads, "sequence": model.sequence,
             "vocabulary": model.vocabulary, "batch": run.batch, "micro-batch": run.micro_batch,
             "dp": run.dp, "tp": run.tp, "pp": run.pp, "cp": run.cp, "ep": run.ep, "interleave": run.interleave,
             "shard": run.shards}  # fmt: skip
    positive = [(size > 0, f"{name} must be positive, got {size}") for name, size in sizes.items()]
    positive += [(getattr(model, name) <= most, f"{name} {getattr(model, name)}: expected at most {most}")
                 for name, most in LARGEST.items()]  # fmt: skip
    if not all(holds for holds, _ in positive):
        return positive
    return [
        *_known(model, run),
        (
            not (model.fp32_loss and model.fused_loss),
            "fp32-loss and fused-loss: give one of them, a fused loss casts inside its kernel",
        ),
        (model.hidden % model.heads == 0, f"{model.heads} heads do not divide hidden {model.hidden}"),
        (model.heads % model.kv_head_count == 0, f"{model.kv_head_count} KV heads do not divide {model.heads} heads"),
        (model.heads % run.tp == 0, f"tp {run.tp} does not divide {model.heads} heads"),
        (model.kv_head_count % run.tp == 0, f"tp {run.tp} does not divide {model.kv_head_count} KV heads"),
        (model.feedforward_width % run.tp == 0, f"tp {run.tp} does not divide feed-forward {model.feedforward_width}"),
        (
            run.batch % (run.micro_batch * run.dp) == 0,
            f"batch {run.batch} is no multiple of micro-batch {run.micro_batch} x dp {run.dp}",
        ),
        (run.replicas % run.shards == 0, f"shard groups of {run.shard} do not divide {run.replicas} replicas"),
        *_shared_sequences(model, run),
        *_experts(model, run),
        (
            run.precision not in SHARDED or run.zero >= 2 or run.replicas == 1,
            f"precision {run.precision} keeps shards of the weights: it needs zero 2 or 3, got {run.zero}",
        ),
        (
            model.layers + 2 * (run.software != PACKAGES) >= chunks,  # the embedding and the head may be chunks alone
            f"{model.layers} layers are too few for {chunks} pipeline chunks",
        ),
        *_explicit_stages(model, run, chunks),
        (
            run.micro_batches * chunks <= MOST_PASSES,
            f"batch {run.batch} / (micro-batch {run.micro_batch} x dp {run.dp}) is {run.micro_batches} micro-batches "
            f"through {chunks} pipeline chunks, each of which is simulated: at most {MOST_PASSES} together",
        ),
        *_package(run),
        (
            run.interleave == 1 or (run.schedule == "interleaved" and run.pp > 1),
            f"interleave {run.interleave} needs the interleaved schedule and pp > 1",
        ),
        (
            run.schedule != "interleaved" or run.micro_batches % run.pp == 0,
            f"the interleaved schedule needs micro-batches in multiples of pp {run.pp}, got {run.micro_batches}",
        ),
    ]


def _shared_sequences(model: Transformer, run: TrainingRun) -> list[tuple[bool, str]]:
    cut = run.cp * (run.tp if run.sequence_parallel else 1)
    names = " x ".join([f"cp {run.cp}"] * (run.cp > 1) + [f"tp {run.tp}"] * run.sequence_parallel)
    return [
        (model.sequence % cut == 0, f"sequence parallelism: {names} does not divide the sequence {model.sequence}"),
        (
            run.cp == 1 or model.attention != "unfused",
            f"context parallelism (cp {run.cp}) needs a fused attention, got {model.attention}",
        ),
    ]


def _package(run: TrainingRun) -> list[tuple[bool, str]]:
    """Conditions on packages of `autoshard plan`, if the run is of one."""
    if run.software != PACKAGES:
        return []
    precisions = [name for name in PRECISIONS if name not in HALF]
    message = f"software {PACKAGES}: packages"
    return [
        (run.recompute != "operators", f"{message} recompute selectively or in full, got recompute operators"),
        (
            run.precision in precisions,
            f"{message} compute in precision {' or '.join(precisions)}, got {run.precision}",
        ),
        (run.cp == 1, f"{message} of plans by blocks share no sequence, got cp {run.cp}"),
        (run.ep == 1, f"{message} of plans by blocks share no experts, got ep {run.ep}"),
        (
            run.shards == run.replicas,
            f"{message} of plans by blocks cut weights over all replicas, got shard {run.shard}",
        ),
        (not run.compiled, f"{message} that are compiled are not estimated: leave compiled out"),
        (not run.offload, f"{message} keep the optimizer on the device, got offload {run.offload}"),
        (not run.reduced, f"{message} sum gradients in float32, got reduce {run.reduced}"),
        (
            run.micro_batches >= run.pp,
            f"{message} need a micro-batch for each of their stages, got {run.micro_batches} for pp {run.pp}",
        ),
    ]


def _experts(model: Transformer, run: TrainingRun) -> list[tuple[bool, str]]:
    if not model.experts:
        flags = {"top-k": model.top_k, "expert-hidden": model.expert_hidden, "shared-experts": model.shared_experts,
                 "imbalance": model.imbalance != 1.0, "ep": run.ep != 1}  # fmt: skip
        return [(not value, f"{name} says something of experts: how many are there?") for name, value in flags.items()]
    width, most = model.expert_width, float(model.experts)
    return [
        (
            0 < model.active_experts <= model.experts,
            f"top-k {model.active_experts}: expected 1 to {model.experts}, the experts there are",
        ),
        (model.experts % run.ep == 0, f"ep {run.ep} does not divide {model.experts} experts"),
        (run.dp % run.ep == 0, f"ep {run.ep} does not divide dp {run.dp}: experts are shared among replicas"),
        (width % run.tp == 0, f"tp {run.tp} does not divide expert width {width}"),
        (1.0 <= model.imbalance <= most, f"imbalance {model.imbalance:g}: expected 1 (even) to {most:g} (one has all)"),
        (run.ep == 1 or not run.shard, f"shard groups of {run.shard} and ep {run.ep}: give one of them"),
    ]


def _explicit_stages(model: Transformer, run: TrainingRun, chunks: int) -> list[tuple[bool, str]]:
    layers = run.stage_layers
    message = f"stage layers {','.join(map(str, layers))}"
    return [
        (
            len(layers) in (0, chunks),
            f"{message}: expected {counted(chunks, 'number')}, one for each chunk of pp {run.pp} x interleave "
            f"{run.interleave}, got {len(layers)}",
        ),
        (
            not layers or sum(layers) == model.layers,
            f"{message}: expected {model.layers} layers together, got {sum(layers)}",
        ),
        (all(count >= 0 for count in layers), f"{message}: expected none below 0"),
    ]


def _known(model: Transformer, run: TrainingRun) -> list[tuple[bool, str]]:
    choices = [
        ("activation", model.activation, ACTIVATIONS),
        ("attention", model.attention, ATTENTIONS),
        ("positions", model.positions, POSITIONS),
        ("norm", model.norm, NORMS),
        ("schedule", run.schedule, SCHEDULES),
        ("recompute", run.recompute, RECOMPUTE),
        ("precision", run.precision, PRECISIONS),
        ("zero", run.zero, (0, 1, 2, 3)),
        ("reduced", run.reduced, REDUCED),
        ("offload", run.offload, OFFLOADS),
    ]
    return [(v in known, f"{name} {v!r}: expected one of {', '.join(map(str, known))}") for name, v, known in choices]
