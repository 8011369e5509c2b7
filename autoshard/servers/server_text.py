"""Parameter servers in words: what holds what, and where a step's time goes."""

from __future__ import annotations

from autoshard.ir.plan import Plan
from autoshard.units import counted, format_bytes, format_seconds


def server_title(plan: Plan) -> str:
    """`2 parameter servers and 3 workers`."""
    own = plan.servers
    workers = str(own.workers) if own.workers == own.most_workers else f"{own.workers} to {own.most_workers}"
    one = own.most_workers == 1
    return f"{counted(own.count, 'parameter server')} and {workers} worker{'' if one else 's'} of one device each"


def server_rows(plan: Plan) -> list[tuple[str, str]]:
    """Label and text; nothing without servers."""
    own = plan.servers
    if not own.count:
        return []
    step = own.step_seconds or 1.0
    updates = "synchronous: the gradients of a step's shares are added up before the update"
    if own.staleness is not None:
        updates = f"asynchronous: each share's gradient at once, at most {own.staleness} updates old"
    rows = [("updates", updates)]
    if own.tables:
        named = own.tables[0] if len(own.tables) == 1 else f"{len(own.tables)} tables, {own.tables[0]} the first"
        how = "row-wise Adagrad on the rows that were read" if own.rowwise else plan.optimizer
        rows.append(("tables", f"{named}: rows alone are pulled, trained by {how}"))
    busy = f"{own.worker_busy_seconds / step:.0%} of the step computing"
    rows += [
        ("share", f"{counted(plan.step.micro_batches, 'share')} a step, {format_seconds(own.share_seconds)} each"),
        ("workers", f"{busy} with all {own.most_workers}"),
        ("a share pulls", f"{format_bytes(own.pulled_bytes)}, while the share before is computed"),
        ("a share pushes", format_bytes(own.pushed_bytes)),
        (
            "servers",
            f"{own.server_busy_seconds / step:.0%} of the step busy; update {format_seconds(own.update_seconds)}",
        ),
        ("memory per server", format_bytes(own.server_bytes)),
    ]
    return rows
