"""Parameter servers in words: what holds what, and where a step's time goes."""

from __future__ import annotations

from autoshard.ir.plan import Plan
from autoshard.units import counted, format_bytes, format_seconds


def server_title(plan: Plan) -> str:
    """`2 parameter servers and 3 workers`."""
    spec = plan.servers
    workers = str(spec.workers) if spec.workers == spec.most_workers else f"{spec.workers} to {spec.most_workers}"
    one = spec.most_workers == 1
    return f"{counted(spec.count, 'parameter server')} and {workers} worker{'' if one else 's'} of one device each"


def server_rows(plan: Plan) -> list[tuple[str, str]]:
    """Label and text; nothing without servers."""
    spec = plan.servers
    if not spec.count:
        return []
    step = spec.step_seconds or 1.0
    updates = "synchronous: the gradients of a step's shares are added up before the update"
    if spec.staleness is not None:
        updates = f"asynchronous: each share's gradient at once, at most {spec.staleness} updates old"
    rows = [("updates", updates)]
    if spec.tables:
        named = spec.tables[0] if len(spec.tables) == 1 else f"{len(spec.tables)} tables, {spec.tables[0]} the first"
        how = "row-wise Adagrad on the rows that were read" if spec.rowwise else plan.optimizer
        rows.append(("tables", f"{named}: rows alone are pulled, trained by {how}"))
    busy = f"{spec.worker_busy_seconds / step:.0%} of the step computing"
    rows += [
        ("share", f"{counted(plan.step.micro_batches, 'share')} a step, {format_seconds(spec.share_seconds)} each"),
        ("workers", f"{busy} with all {spec.most_workers}"),
        ("a share pulls", f"{format_bytes(spec.pulled_bytes)}, while the share before is computed"),
        ("a share pushes", format_bytes(spec.pushed_bytes)),
        (
            "servers",
            f"{spec.server_busy_seconds / step:.0%} of the step busy; update {format_seconds(spec.update_seconds)}",
        ),
        ("memory per server", format_bytes(spec.server_bytes)),
    ]
    return rows
