"""Converts a user's request for a whole step to the space that is searched."""

from __future__ import annotations

import math
from dataclasses import replace

from autoshard.cluster.hardware import Hardware
from autoshard.constraints.model_request import recomputed_blocks, with_requests
from autoshard.constraints.pins import pin_file_texts
from autoshard.constraints.step_request import AUTO, EQUAL, RECOMPUTE, SEARCHED, STAGE_PIN, TENSORS, Count, StagePin
from autoshard.errors import UsageError
from autoshard.ir.graph import CAST, Graph
from autoshard.ir.plan import KEEP_SOME
from autoshard.rules.resize.rebatch import batch_size, rebatched
from autoshard.search.fixed_step import check_order
from autoshard.search.objectives import SPEED
from autoshard.search.search_request import SearchRequest
from autoshard.whole_step_search.blocks.block_line import BlockLine, block_line
from autoshard.whole_step_search.blocks.block_pins import StepPins, step_pins
from autoshard.whole_step_search.blocks.block_splits import SplitRequest
from autoshard.whole_step_search.blocks.context_expert_axes import expert_count, longest_tokens
from autoshard.whole_step_search.config_space import ConfigSpace, read_choices
from autoshard.whole_step_search.front_store import FrontStores
from autoshard.whole_step_search.joint_search import joint_search
from autoshard.whole_step_search.solved_steps import JointResult

ZERO_OF_STYLE = {"dp": 0, "fsdp": 3, "megatron": 0, "megatron-sp": 0, "fsdp-tp": 3}  # how each stores weights
WITHOUT_TENSOR = ("dp", "fsdp")  # styles


def searched_step(
    graph: Graph,
    hardware: Hardware,
    wanted: SearchRequest,
    stores: FrontStores | None = None,
    bounded: bool = True,
) -> JointResult:
    """The best whole step that `wanted` allows. UsageError for settings that this search does not have, InfeasibleError
    if nothing divides or fits. `stores` and `bounded` as in `joint_search`."""
    _check(graph, wanted)
    if hardware.kinds and wanted.level != SPEED:
        message = f"--level {wanted.level} of a step that is searched for is not offered on several kinds of devices"
        raise UsageError(message, "--level 2, or a profile of one kind")
    _check_batch(graph, wanted)
    wanted = replace(wanted, step=with_requests(wanted.step, graph, searched=True))
    _check_experts(graph, wanted.step.expert_parallel)
    fixed = wanted.step.stages
    check_order(graph, wanted.step.pins, fixed if isinstance(fixed, int) else _least_stages(wanted))
    pins = pins_of(graph, wanted)
    line = block_line(graph, pins.marks(graph))
    capacity = hardware.usable_memory_bytes if wanted.memory_limit_bytes is None else wanted.memory_limit_bytes
    return joint_search(
        graph,
        hardware,
        space_of(line, wanted),
        capacity,
        stage_of=_pinned(line, wanted.step.pins),
        recompute=_recompute_policies(graph, line, wanted),
        level=wanted.level,
        pins=pins,
        request=SplitRequest("" if wanted.strategy == "best" else wanted.strategy, wanted.all_to_all),
        stores=stores,
        bounded=bounded,
    )


def pins_of(graph: Graph, wanted: SearchRequest) -> StepPins:
    """All operator pins: from the model's code, the file and the command, without stage pins. UsageError if one is not
    possible."""
    filed = pin_file_texts(wanted.pins_file) if wanted.pins_file else ()
    said = [text for text in (*filed, *wanted.pins) if not text.startswith(STAGE_PIN)]
    return step_pins(graph, (*(f"op:{name}={how}" for name, how in graph.strategies), *said))


def _check(graph: Graph, wanted: SearchRequest) -> None:
    if graph.loss is None:
        raise UsageError("a step of micro-batches, stages or recomputation needs a loss to train", "--loss FUNCTION")
    said = {
        f"--batch-shares {wanted.step.batch_shares}": wanted.step.batch_shares not in (None, AUTO, EQUAL),
        "--micro-batches": wanted.step.micro_batches is not None,
        f"--strategy {wanted.strategy}": wanted.strategy not in ("best", *ZERO_OF_STYLE),
        "--solver": wanted.solver is not None,
        "--pareto": wanted.pareto,
        "--parallel-optimizer-threshold": wanted.step.parallel_optimizer_threshold not in (None, 0),
        "--time-limit": wanted.time_limit_seconds is not None,
    }
    for option, present in said.items():
        if present:
            message = (
                f"{option} is not offered where a whole step is searched for (--global-batch with --devices alone)"
            )
            raise UsageError(message, f"--mesh dp={wanted.devices}: a step that is not searched for")


def _check_experts(graph: Graph, said: Count) -> None:
    sizes = read_choices("--expert-parallel", said)
    if sizes not in (None, (1,)) and not expert_count(graph):
        raise UsageError(f"--expert-parallel {said}: the model has no layer of experts", "without it")


def _check_batch(graph: Graph, wanted: SearchRequest) -> None:
    """Raises UsageError, with options to type instead, if the model can't be planned at another batch than its own."""
    batch = batch_size(graph)
    try:
        rebatched(graph, 2 * batch)
    except UsageError as error:
        raise UsageError(error.message, error.hint if batch == 1 else with_mesh(graph, wanted)) from None


def with_mesh(graph: Graph, wanted: SearchRequest) -> str:
    """Options for a step of micro-batches of the captured batch, on a given mesh, without a search for one."""
    assert wanted.devices is not None and wanted.step.global_batch is not None
    batch = batch_size(graph)
    replicas = math.gcd(wanted.devices, batch)
    axes = (("dp", replicas), ("tp", wanted.devices // replicas))
    mesh = ",".join(f"{axis}={n}" for axis, n in axes if n > 1)
    near = max(1, round(wanted.step.global_batch / batch)) * batch
    return f"--mesh {mesh} --global-batch {near}, without --devices: micro-batches of the {batch} samples captured"


def space_of(line: BlockLine, wanted: SearchRequest) -> ConfigSpace:
    """Outer choices that the options leave."""
    step = wanted.step
    assert wanted.devices is not None and step.global_batch is not None
    keeps = SEARCHED if step.recompute in (None, AUTO) else tuple(str(step.recompute).split(","))
    schedules = None if step.schedule in (None, AUTO) else tuple(str(step.schedule).split(","))
    return ConfigSpace(
        wanted.devices,
        step.global_batch,
        len(line.blocks),
        max(map(len, line.runs())),
        read_choices("--stages", step.stages),
        read_choices("--virtual-stages", step.virtual_stages),
        schedules,
        (1,) if wanted.strategy in WITHOUT_TENSOR else None,
        read_choices("--micro-batch", step.micro_batch),
        _zero(wanted),
        tuple(KEEP_SOME if name == TENSORS else RECOMPUTE[name] for name in keeps),
        bool(step.pins),
        _shared_by_all(line),
        _least_stages(wanted),
        _second("--context-parallel", step.context_parallel),
        _second("--expert-parallel", step.expert_parallel),
        longest_tokens(line.graph),
        expert_count(line.graph),
        equal_shares=wanted.step.batch_shares == EQUAL,
    )


def _zero(wanted: SearchRequest) -> tuple[int, ...] | None:
    """Stages of ZeRO to search. UsageError if the style has another than those asked for."""
    said, level = wanted.step.zero_levels, ZERO_OF_STYLE.get(wanted.strategy)
    if level is None:
        return said or None
    if said and level not in said:
        stored = "whole" if level == 0 else "in shards"
        message = f"--strategy {wanted.strategy} stores weights {stored} over replicas, which --zero {said[0]} does not"
        raise UsageError(message, f"--zero {level}, or without it")
    return (level,)


def _second(option: str, said: Count) -> tuple[int, ...] | None:
    """Sizes of a second axis, which takes long to search; 1 unless it is asked for."""
    return (1,) if said is None else read_choices(option, said)


def _least_stages(wanted: SearchRequest) -> int:
    """Least number of stages: one more than the last stage that a pin names."""
    return 1 + max((pin.stage for pin in wanted.step.pins), default=0)


def _shared_by_all(line: BlockLine) -> str:
    """Trained parameter that every block of the longest run of equal ones reads, directly or cast; "" without one."""
    run = max(line.runs(), key=len)
    cast = {op.results[0]: op.operands[0] for op in line.graph.ops if op.target == CAST}
    read = [{cast.get(name, name) for op in line.ops(line.blocks[k]) for name in op.operands if name} for k in run]
    trained = (p for p in line.graph.parameters if line.graph.tensor(p.tensor).requires_grad)
    return next((p.path for p in trained if all(p.tensor in names for names in read)), "") if len(run) > 1 else ""


def _recompute_policies(graph: Graph, line: BlockLine, wanted: SearchRequest) -> dict[int, str]:
    """Policies of the kinds of blocks that the model wants recomputed. UsageError if equal blocks have different
    ones."""
    if wanted.step.recompute is not None:
        return {}
    policies = recomputed_blocks(graph, tuple(block.module for block in line.blocks if block.module))
    kinds = {block.kind: policies[block.module] for block in line.blocks if block.module in policies}
    left = [
        block.module for block in line.blocks if block.kind in kinds and policies.get(block.module) != kinds[block.kind]
    ]
    if left:
        message = (
            f"recompute() of some blocks, and not so of {left[0]}, which is equal: a search decides for both alike"
        )
        raise UsageError(message, "recompute() of all of them, --recompute auto, or --mesh")
    return kinds


def _pinned(line: BlockLine, pins: tuple[StagePin, ...]) -> dict[int, int]:
    """Stage of each pinned block. UsageError for a pin that names no whole block."""
    stage_of: dict[int, int] = {}
    for pin in pins:
        blocks = [
            k
            for k, block in enumerate(line.blocks)
            if block.module and (block.module == pin.path or block.module.startswith(f"{pin.path}."))
        ]
        if not blocks:
            known = [block.module for block in line.blocks if block.module]
            message = f"pin stage:{pin.path}={pin.stage}: it is no block of the model, nor holds one"
            raise UsageError(message, f"one of {known[0]} to {known[-1]}" if known else "without it")
        for k in blocks:
            if stage_of.setdefault(k, pin.stage) != pin.stage:
                raise UsageError(
                    f"pins put {line.blocks[k].module} on stage {stage_of[k]} and {pin.stage}", "one of them"
                )
    return stage_of
