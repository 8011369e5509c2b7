"""Requests to fuse collectives: `all_reduce=25MiB`, `all_gather=none`, `all_reduce=index:10,20`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from autoshard.errors import UsageError
from autoshard.ir.plan import FUSED, FUSIONS, Fusion
from autoshard.units import parse_quantity

# What each is called -> which of FUSED it is: the weights of a bucket are gathered, and their gradients scattered.
NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "all_gather"}
EXAMPLE = "--fuse all_reduce=25MiB"


def read_fusion(texts: Sequence[str]) -> tuple[Fusion, ...]:
    """Fusion requests. UsageError for an invalid one, or two that contradict. `none` or `auto` alone is for all."""
    fusions: dict[str, tuple[str, Fusion]] = {}
    for text in texts:
        name, equals, how = text.strip().rpartition("=")
        for collective in _collectives(name, text) if equals or how not in ("none", "auto") else FUSED:
            fusion = _fusion(collective, how.strip(), text)
            before, known = fusions.setdefault(collective, (text, fusion))
            if known != fusion:
                message = (
                    f"--fuse {before} and --fuse {text}: weights that are gathered together are scattered together"
                )
                raise UsageError(message if before != text else f"--fuse {text} contradicts itself", "one of them")
    return tuple(fusion for _, fusion in fusions.values())


def fusion_text(fusion: Fusion) -> str:
    """Text of a fusion request, as typed."""
    if fusion.mode == "index":
        return f"{fusion.collective}=index:{','.join(map(str, fusion.first))}"
    return (
        f"{fusion.collective}={fusion.bucket_bytes:.17g}B"
        if fusion.mode == "size"
        else f"{fusion.collective}={fusion.mode}"
    )


def _collectives(name: str, text: str) -> tuple[str, ...]:
    key = name.strip().replace("_", "").replace("-", "").lower()
    if key not in NAMES:
        near = difflib.get_close_matches(key, NAMES, 1)
        known = "all_reduce, all_gather or reduce_scatter"
        raise UsageError(
            f"--fuse {text!r}: expected {known}, then = and how", f"--fuse {near[0]}=auto" if near else EXAMPLE
        )
    return (NAMES[key],)


def _fusion(collective: str, how: str, text: str) -> Fusion:
    if how in ("none", "auto"):
        return Fusion(collective, how)
    if how.startswith("index:"):
        return _by_index(collective, how.removeprefix("index:"), text)
    try:
        size = parse_quantity(how.removeprefix("size:"), "bytes")
    except UsageError as error:
        known = ", ".join(mode for mode in FUSIONS if mode != "size")
        raise UsageError(f"--fuse {text!r}: {error.message}, or {known}", EXAMPLE) from None
    if not size > 0:
        raise UsageError(f"--fuse {text!r}: expected more than zero bytes", f"--fuse {collective}=none")
    return Fusion(collective, "size", size)


def _by_index(collective: str, numbers: str, text: str) -> Fusion:
    if collective != "all_reduce":
        raise UsageError(f"--fuse {text!r}: only gradients that are all-reduced are counted", EXAMPLE)
    parts = [part.strip() for part in numbers.split(",")]
    first = tuple(int(part) for part in parts if part.isdecimal())
    if len(first) != len(parts) or sorted({*first}) != [*first] or first[0] == 0:
        message = "expected growing numbers of gradients with which a bucket begins, from 1 on"
        raise UsageError(f"--fuse {text!r}: {message}", "--fuse all_reduce=index:10,20")
    return Fusion(collective, "index", first=first)
