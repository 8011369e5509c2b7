"""Reads the rank from the variables of whatever started this process, and sets torchrun's variables accordingly.

Known are Slurm's srun, Open MPI and other MPIs, rank tables of Ascend, and the variables that MindSpore documents for a
start without any launcher: MS_WORKER_NUM, MS_SCHED_HOST, MS_SCHED_PORT, and MS_ROLE, where MS_SCHED marks the process
that introduces the others; without one, a worker on that host does. torchrun's own take precedence.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout as WAIT

PORT = "29500"
_LEAVE_SECONDS = 60.0  # a rank that ends well leaves within the time of one collective; killed ranks never say so
# rank, processes, rank on this node, processes on this node; the first that are all set count
_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_STORES: list[tuple[Any, bool]] = []  # and whether it is this process's own


class StartError(Exception):
    """Contradicting variables, or a variable that names an unreadable file."""


def take_start() -> bool:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. False for a process that only had to introduce
    the others, and has done so."""
    environment = os.environ
    if "RANK" in environment:
        return True
    if "RANK_TABLE_FILE" in environment and "RANK_ID" in environment:
        environment.update(_of_table(environment))
    elif "MS_WORKER_NUM" in environment:
        return _join(environment)
    else:
        for names in _NAMES:
            if all(name in environment for name in names):
                values = [environment[name].partition("(")[0].partition(",")[0] for name in names]  # "4(x2)" is Slurm's
                environment.update(zip(_TORCHRUN, values, strict=True))
                break
    if "RANK" in environment:
        environment.setdefault("MASTER_PORT", PORT)
        if "MASTER_ADDR" not in environment:
            if environment["WORLD_SIZE"] != environment["LOCAL_WORLD_SIZE"]:
                raise StartError("MASTER_ADDR is not set\n  try: export it, as the host of rank 0, for all processes")
            environment["MASTER_ADDR"] = "127.0.0.1"
    return True


def processes_started() -> int:
    """Number of processes, by the variables, before any has joined. Raises StartError, see `take_start`."""
    environment = os.environ
    if "RANK" not in environment and "RANK_TABLE_FILE" in environment and "RANK_ID" in environment:
        return int(_of_table(environment)["WORLD_SIZE"])
    names = ("WORLD_SIZE", "MS_WORKER_NUM", *(name for _, name, *_ in _NAMES))
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), 1)


def node_name() -> str:
    """Name of the node on which this process runs."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _of_table(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables from RANK_TABLE_FILE: servers, with their devices and ranks. DEVICE_ID overrides the table's."""
    path, rank = Path(environment["RANK_TABLE_FILE"]), environment["RANK_ID"]
    try:
        servers = json.loads(path.read_text(encoding="utf-8"))["server_list"]
        of_servers = [(str(server["server_id"]), server["device"]) for server in servers]
        places = {
            str(device["rank_id"]): (host, str(device["device_id"]), len(devices))
            for host, devices in of_servers
            for device in devices
        }
        first, (_, device, here) = places["0"], places[rank]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StartError(f"RANK_TABLE_FILE {path}: no rank table with ranks 0 and {rank}: {error!r}") from None
    values = (rank, str(len(places)), environment.get("DEVICE_ID", device), str(here))
    return dict(zip(_TORCHRUN, values, strict=True)) | {"MASTER_ADDR": environment.get("MASTER_ADDR", first[0])}


def _join(environment: MutableMapping[str, str]) -> bool:
    """Joins MS_WORKER_NUM processes at MS_SCHED_HOST; RANK_ID, MS_NODE_ID or their order of arrival is their rank."""
    workers, role = environment["MS_WORKER_NUM"], environment.get("MS_ROLE", "MS_WORKER")
    host, port = environment.get("MS_SCHED_HOST", "127.0.0.1"), environment.get("MS_SCHED_PORT", PORT)
    if not workers.isdecimal() or not int(workers) or not port.isdecimal() or role not in ("MS_WORKER", "MS_SCHED"):
        settings = f"MS_ROLE={role}, MS_WORKER_NUM={workers}, MS_SCHED_PORT={port}"
        raise StartError(f"{settings}: expected MS_WORKER or MS_SCHED, a number of workers and a port")
    store, has_it = _store(host, int(port))
    if role == "MS_SCHED":
        store.add("ms/others", 1)
        _wait_for(store, int(workers))
        with contextlib.suppress(RuntimeError):
            store.add("ms/left", 1)
        return False
    rank = next((environment[name] for name in ("RANK_ID", "MS_NODE_ID") if environment.get(name, "").isdecimal()), "")
    rank = rank or str(store.add("ms/joined", 1) - 1)
    node = f"ms/node/{node_name()}"
    local = environment.get("DEVICE_ID") or str(store.add(node, 1) - 1)
    if store.add("ms/there", 1) == int(workers):
        store.set("ms/all", "")
    store.wait(["ms/all"])
    here = str(max(store.add(node, 0), 1))
    environment.update(zip(_TORCHRUN, (rank, workers, local, here), strict=True))
    environment.update(MASTER_ADDR=host, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
    _STORES.append((store, has_it))
    return True


def _store(host: str, port: int) -> tuple[Any, bool]:
    """The store, and whether this process owns it: the first one on that host. Nodes may start half an hour apart."""
    if _is_here(host):
        try:
            return dist.TCPStore(host, port, None, is_master=True, timeout=WAIT, wait_for_workers=False), True
        except RuntimeError:  # another process has the port
            pass
    return dist.TCPStore(host, port, None, is_master=False, timeout=WAIT), False


def _is_here(host: str) -> bool:
    """Is `host` an address of this host? No other can be bound."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _wait_for(store: Any, count: int) -> None:
    """Waits until `count` processes have left; killed ones don't report it, and are not waited for."""
    first = 0.0
    with contextlib.suppress(RuntimeError):  # a worker has the store, and has ended: so have the others
        while (left := store.add("ms/left", 0)) < count:
            first = first or (time.monotonic() if left else 0.0)
            if first and time.monotonic() > first + _LEAVE_SECONDS:
                break
            time.sleep(0.2)


def tell_left(waits: bool = False) -> None:
    """Reports to the others that this process needs nothing more. `waits`: the store's owner ends last."""
    with contextlib.suppress(RuntimeError):
        for store, has_it in _STORES:
            store.add("ms/left", 1)
            if has_it and waits:
                _wait_for(store, int(os.environ["WORLD_SIZE"]) + store.add("ms/others", 0))
    _STORES.clear()
