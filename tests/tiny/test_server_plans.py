"""What is asked of parameter servers, and what is predicted of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.constraints.step_request import StepRequest
from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import ServerPlan
from autoshard.servers.server_request import ServerRequest
from autoshard.simulation.steps.server_step import ServerCosts, server_step

COSTS = ServerCosts(
    share_seconds=1.0, dense_bytes=100.0, rows_bytes=20.0, ids_bytes=8.0, add_seconds=0.0, update_seconds=0.1,
    worker_rate=1e6, server_rate=1e6, latency=0.0, server_bytes=0.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (ServerRequest(workers="2"), "there are none"),
        (ServerRequest(0), "from 1 to"),
        (ServerRequest(2, "0"), "--workers 0"),
        (ServerRequest(2, "3:2"), "--workers 3:2"),
        (ServerRequest(2, "two"), "--workers two"),
        (ServerRequest(2, staleness=3), "synchronous"),
        (ServerRequest(2, asynchronous=True, staleness=-1), "0 or more"),
        (ServerRequest(2, table_optimizer="adam"), "rowwise-adagrad or same"),
    ],
)
def test_what_contradicts_itself_is_refused(request_: ServerRequest, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        request_.check(None, 1, StepRequest())
    assert caught.value.hint


def test_a_worker_is_one_device() -> None:
    request = ServerRequest(2)
    request.check(Mesh.parse("dp=1"), None, StepRequest(micro_batches=4))
    for mesh, devices, step in (
        (Mesh.parse("dp=2"), None, StepRequest()),
        (None, 4, StepRequest()),
        (None, 1, StepRequest(stages=2)),
        (None, 1, StepRequest(zero=1)),
        (None, 1, StepRequest(global_batch=8)),
    ):
        with pytest.raises(UsageError, match="one device"):
            request.check(mesh, devices, step)


def test_the_default_staleness_lets_every_worker_have_two_shares() -> None:
    assert ServerRequest(2, "3", asynchronous=True).bound == 6 and ServerRequest(2, "3").bound is None
    assert ServerRequest(2, "2:3", True, 0).text == "--parameter-servers 2 --workers 2:3 --asynchronous --staleness 0"


def test_workers_share_a_step() -> None:
    """Where links are fast a step is its shares over the workers, and the update."""
    for workers, shares, expected in ((1, 4, 4.1), (2, 4, 2.1), (4, 4, 1.1), (3, 4, 2.1)):
        seconds, worker, _ = server_step(COSTS, ServerPlan(2, workers, workers), shares)
        assert seconds == pytest.approx(expected, rel=1e-2) and worker == pytest.approx(shares / workers)


def test_one_slow_server_is_what_all_wait_for() -> None:
    slow = replace(COSTS, server_rate=100.0)  # 4 workers pull and push 128 bytes each
    one, *_ = server_step(slow, ServerPlan(1, 4, 4), 4)
    two, *_ = server_step(slow, ServerPlan(2, 4, 4), 4)
    assert one > two > 4 * 128 / 200 and one > 4 * 128 / 100


def test_asynchronous_steps_have_no_end_to_wait_for() -> None:
    """Pulls run while a share is computed; no staleness is one share after another."""
    slow = replace(COSTS, worker_rate=240.0)  # a pull takes half a second, as does a push
    free, *_ = server_step(slow, ServerPlan(2, 2, 2, staleness=8), 4)
    none, *_ = server_step(slow, ServerPlan(2, 2, 2, staleness=0), 4)
    at_once, *_ = server_step(slow, ServerPlan(2, 2, 2), 4)
    assert free < at_once < none and free == pytest.approx(2.0, rel=0.15) and none == pytest.approx(8.4, rel=0.1)
