"""Time breakdown of a traced step: operators by name and phase, collectives by kind, and waiting.

On a GPU a kernel belongs to the operator that launched it (`External id`); on a CPU the operator's own span is the
work. An operator is the outermost `aten` call, or the autograd function around it. What runs in the backward is
matched, by sequence number, with the forward call that it is the gradient of.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autoshard.redistribute import CARRIED
from autoshard.rules.operators import OPERATORS
from autoshard.trace_comparison.trace_events import OPTIMIZER, TraceSpan, step_limits

ENGINE = "autograd::engine::evaluate_function: "
FORWARD, BACKWARD, UPDATE = "forward", "backward", "optimizer"
_TRACED = {name: re.compile(collective.traced, re.I) for name, collective in CARRIED.items()}
_COLLECTIVE = re.compile(r"^(nccl|gloo:|hccl|hcom_)", re.I)


@dataclass(frozen=True)
class Item:
    """Seconds of one step, a mean over the steps. `group`: ranks of a collective, 0 if the trace does not say."""

    name: str
    phase: str
    seconds: float
    calls: float
    collective: bool = False
    group: int = 0


@dataclass(frozen=True)
class MeasuredStep:
    """Means over `steps` steps. `waiting_seconds`: time of the step in which no operator ran on the device."""

    step_seconds: float
    steps: int
    items: tuple[Item, ...]
    on_device: bool

    @property
    def compute_seconds(self) -> float:
        return sum(item.seconds for item in self.items if not item.collective)

    @property
    def communication_seconds(self) -> float:
        return sum(item.seconds for item in self.items if item.collective)

    @property
    def waiting_seconds(self) -> float:
        return max(0.0, self.step_seconds - self.compute_seconds)


def measured_step(spans: Sequence[TraceSpan]) -> MeasuredStep:
    """The mean of the whole steps of a trace."""
    limits = step_limits(spans)
    kernels = [span for span in spans if span.category in ("kernel", "gpu_memcpy", "gpu_memset")]
    durations: dict[tuple[str, str, bool, int], list[float]] = defaultdict(list)
    for low, high in limits:
        inside = [span for span in spans if low <= span.start_seconds < high]
        timed = _on_device(inside, kernels, low, high) if kernels else _on_host(inside)
        for key, seconds in timed:
            durations[key].append(seconds)
    items = tuple(
        Item(name, phase, sum(seconds) / len(limits), len(seconds) / len(limits), collective, group)
        for (name, phase, collective, group), seconds in durations.items()
    )
    mean = sum(high - low for low, high in limits) / len(limits)
    return MeasuredStep(mean, len(limits), items, bool(kernels))


Timed = tuple[tuple[str, str, bool, int], float]


def _on_host(inside: Sequence[TraceSpan]) -> Iterator[Timed]:
    """Work on a CPU: operators of the busiest thread, and collectives of the threads that carry them out."""
    main = Counter(span.thread for span in inside if span.category == "cpu_op").most_common(1)
    origin = _origins(span for span in inside if main and span.thread == main[0][0])
    for span in inside:
        if _COLLECTIVE.match(span.name):
            yield (collective_kind(span.name), _phase(span), True, _group(span)), span.seconds
        elif main and span.thread == main[0][0] and _is_operator(span):
            yield (_name(span, origin), _phase(span), False, 0), span.seconds


def _on_device(inside: Sequence[TraceSpan], kernels: Sequence[TraceSpan], low: float, high: float) -> Iterator[Timed]:
    """Kernels that start in the step, each named by the operator that launched it."""
    by_id = {span.arguments.get("External id"): span for span in inside if span.category == "cpu_op"}
    origin = _origins(inside)
    for kernel in kernels:
        if not low <= kernel.start_seconds < high:
            continue
        launched = by_id.get(kernel.arguments.get("External id"))
        phase = kernel.arguments.get("phase") or (_phase(launched) if launched else FORWARD)
        if _COLLECTIVE.match(kernel.name):
            yield (collective_kind(kernel.name), phase, True, _group(kernel)), kernel.seconds
        else:
            name = _name(_outermost(launched), origin) if launched else canonical(kernel.name)
            yield (name, phase, False, 0), kernel.seconds


def _is_operator(span: TraceSpan) -> bool:
    """Is this the outermost aten call? The calls inside it count as part of it."""
    return span.name.startswith("aten::") and not any(outer.name.startswith("aten::") for outer in span.around())


def _outermost(span: TraceSpan) -> TraceSpan:
    calls = [outer for outer in (span, *span.around()) if outer.name.startswith("aten::")]
    return calls[-1] if calls else span


def _origins(spans: Iterable[TraceSpan]) -> dict[int, str]:
    """Operator that each node of the backward is the gradient of: the last call with the node's sequence number."""
    origins: dict[int, str] = {}
    for span in spans:
        number = span.arguments.get("Sequence number")
        if number is None or span.arguments.get("Fwd thread id"):
            continue
        if not any(outer.name.startswith(ENGINE) for outer in span.around()):
            origins[number] = canonical(_function_of(span) or _outermost(span).name)
    return origins


def _function_of(span: TraceSpan) -> str:
    """The outermost autograd function around the span; "" if there is none."""
    outer = [o.name for o in (span, *span.around()) if o.category == "cpu_op" and "::" not in o.name]
    return outer[-1] if outer and not outer[-1].islower() else ""


def _name(span: TraceSpan, origin: dict[int, str]) -> str:
    node = next((outer for outer in span.around() if outer.name.startswith(ENGINE)), None)
    if node is None:
        return canonical(_function_of(span) or span.name)
    number = node.arguments.get("Sequence number")
    return origin.get(int(number or -1), "") or canonical(node.name.removeprefix(ENGINE))


def _phase(span: TraceSpan) -> str:
    for outer in (span, *span.around()):
        if outer.name.startswith(ENGINE):
            return BACKWARD
        if outer.name.startswith(OPTIMIZER):
            return UPDATE
    return str(span.arguments.get("phase") or FORWARD)


def _group(span: TraceSpan) -> int:
    return int(span.arguments.get("Group size") or 0)


def collective_kind(name: str) -> str:
    """`ncclDevKernel_AllReduce_Sum_f32_RING_LL` -> all_reduce."""
    return next((kind for kind, pattern in _TRACED.items() if pattern.search(name)), "other")


def canonical(name: str) -> str:
    """Common name for what trace, graph and package call an operator: `aten::layer_norm`, `aten.layer_norm`,
    `layer_norm_3`, `NativeLayerNormBackward0` -> layer_norm."""
    text = re.split(r"::|\.", name)[-1]
    text = re.sub(r"Backward\d*$", "", text)
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower().strip("_")
    text = re.sub(r"_\d+$", "", text)
    for before in ("native_", "vocabulary_parallel_", "parallel_", "_"):
        text = text.removeprefix(before)
    for after in ("_in_out", "_loss"):
        text = text.removesuffix(after)
    return _OTHER_NAMES.get(text, text)


_OTHER_NAMES = {name: target.partition(".")[2] for target, known in OPERATORS.items() for name in known.traced_as}
_OTHER_NAMES["redistribution"] = "redistribute"
