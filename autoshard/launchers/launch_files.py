"""The file of each launcher, from its template in `templates/`: `launch/NAME` in the package's folder."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from autoshard.cluster.hardware import backend_of, parse_hardware
from autoshard.code_text import printable, typed
from autoshard.errors import UsageError
from autoshard.ir.plan import Plan
from autoshard.package.output_folder import check_unedited, read_file, update_package

FOLDER = "launch"
DEFAULT_OPTIONS = "--steps 1000 --save checkpoints --save-every 100 --keep 2 --resume auto"
DEVICES = {"nccl": "cuda", "hccl": "npu", "gloo": "cpu"}
RESOURCES = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910", "rocm": "amd.com/gpu"}  # names in Kubernetes


@dataclass(frozen=True)
class Launcher:
    """`command`: what starts its file, after `typed`. `uses`: settings of a `Launch` that not all have a use for."""

    file: str
    command: tuple[str, ...]
    uses: tuple[str, ...] = ()


LAUNCHERS = {
    "torchrun": Launcher("torchrun.sh", ("bash",)),
    "ssh": Launcher("ssh.sh", ("bash",), ("hosts", "python")),
    "slurm": Launcher("slurm.sbatch", ("sbatch",), ("minutes", "grace", "python")),
    "kubernetes": Launcher("kubernetes.yaml", ("kubectl", "apply", "-f"), ("grace", "image")),
    "mpirun": Launcher("mpirun.sh", ("bash",), ("hosts", "python")),
    "ray": Launcher("ray_job.py", ("python",)),
}


@dataclass(frozen=True)
class Launch:
    """Launch of ranks in order on the nodes, the same number on each. `options`: of train.py."""

    on: str
    nodes: int
    per_node: int
    hosts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    minutes: int | None = None
    grace: int = 120  # seconds between the signal and the end
    image: str = ""  # the runtime's own
    python: str = "python"
    least_devices: int = 0  # that the package has a plan for, where it has several

    @property
    def least_nodes(self) -> int:
        """Least number of nodes: below `nodes` if a plan for fewer devices lets it go on with these."""
        return min(self.nodes, -(-self.least_devices // self.per_node)) if self.least_devices else self.nodes

    @property
    def unused(self) -> list[str]:
        """Options that the launcher has no use for."""
        names = {"hosts", "minutes", "grace", "image", "python"}.difference(LAUNCHERS[self.on].uses)
        unused = [name for name, value in vars(self).items() if name in names and value != getattr(Launch, name)]
        return [f"--{name}" if name != "hosts" else "the names of --hosts" for name in unused]  # their number counts

    @property
    def path(self) -> str:
        return f"{FOLDER}/{LAUNCHERS[self.on].file}"


def launch_of(
    plan: Plan, on: str, nodes: int | None = None, hosts: Sequence[str] = (), options: str | None = None, **more: Any
) -> Launch:
    """Launch on as many nodes as the profile's devices per node require, if neither nodes nor hosts are named."""
    hardware = parse_hardware(plan.hardware_text)
    if nodes is not None and hosts and nodes != len(hosts):
        raise UsageError(f"--nodes {nodes}, but --hosts names {len(hosts)}", "one of the two")
    if not re.fullmatch(r"(\w[\w.:/@-]*)?", image := more.get("image", ""), re.ASCII):
        raise UsageError(f"--image {printable(image)}: expected the name of an image", "--image registry/name:tag")
    if plan.servers.count:
        if on != "ray" or nodes is not None or hosts:
            what = f"--on {on}" if on != "ray" else "--nodes and --hosts"
            message = f"{what}: parameter servers and workers are processes of a Ray cluster that is running"
            raise UsageError(message, "--on ray, with a cluster of `ray start`")
        words = _words(DEFAULT_OPTIONS if options is None else options)
        return Launch(on, 1, plan.devices, (), tuple(words), **more)
    node_sizes = hardware.nodes(plan.devices)
    if hardware.kinds and len({*node_sizes}) > 1:
        raise UsageError(
            f"nodes of {' and '.join(map(str, node_sizes))} devices: a launcher starts as many on each",
            "the commands in the package's README.md",
        )
    count = nodes or len(hosts) or len(node_sizes)
    if plan.devices % count:
        raise UsageError(f"{plan.devices} devices can't stand on {count} nodes, as many on each", "--nodes N")
    if on == "ssh" and not hosts:
        raise UsageError("ssh needs the hosts' names, the first rank's first", "--hosts node1,node2")
    bad = [host for host in hosts if not re.fullmatch(r"[\w@.:-]+", host) or host.startswith("-")]
    if bad:
        raise UsageError(f"--hosts: {printable(bad[0])} is no name of a host", "--hosts node1,node2")
    words = ["--backend", backend_of(hardware), *_words(DEFAULT_OPTIONS if options is None else options)]
    return Launch(on, count, plan.devices // count, tuple(hosts), tuple(words), **more)


def _words(options: str) -> list[str]:
    try:
        return shlex.split(options)
    except ValueError as error:
        raise UsageError(f"--options {printable(options)}: {error}", "--options='--steps 1000'") from None


def launch_file(launch: Launch, plan: Plan, folder: Path) -> str:
    """The text of the launcher's file."""
    hardware = parse_hardware(plan.hardware_text)
    device = DEVICES[backend_of(hardware)]
    resource = "rocm" if "AMD" in hardware.summary else device
    job = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower())[:50].strip("-") or "train"
    job = job if job[0].isalpha() else f"train-{job}"
    here = launch.hosts or ("localhost",) * (launch.nodes == 1)
    values = {
        "name": f"the package {printable(folder.resolve().name)}",
        "file": launch.path, "job": job, "folder": folder.resolve().name, "device": device,
        "resource": RESOURCES.get(resource, ""),
        "least_devices": launch.least_devices, "least_nodes": launch.least_nodes,
        "nodes": launch.nodes, "per_node": launch.per_node, "processes": launch.nodes * launch.per_node,
        "hosts": launch.hosts, "slots": ",".join(f"{host}:{launch.per_node}" for host in here),
        "options": typed(*launch.options), "words": list(launch.options), "minutes": launch.minutes,
        "servers": bool(plan.servers.count),
        "grace": launch.grace, "stopped": os.EX_TEMPFAIL, "image": launch.image,
        "python": typed(launch.python),
    }  # fmt: skip
    template = f"{LAUNCHERS[launch.on].file}.j2"
    return _templates().get_template(template).render(values)


def _templates() -> jinja2.Environment:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")), undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True, trim_blocks=False,
    )  # fmt: skip
    filters: dict[str, Callable[[str], str]] = {"typed": typed, "yaml": _yaml, "double_quoted": _double_quoted}
    env.filters.update(filters)
    return env


def _yaml(text: str) -> str:
    """A string of YAML between double quotes."""
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(text, ensure_ascii=False))


def _double_quoted(text: str) -> str:
    """Text as it stands between double quotes in a shell."""
    return re.sub(r'([\\"$`])', r"\\\1", text)


def write_launch(launch: Launch, plan: Plan, folder: Path) -> Path:
    """InvalidFileError where the file is there and was edited since."""
    if (folder / launch.path).exists():
        check_unedited(folder, {launch.path: read_file(folder, launch.path)})
    (folder / FOLDER).mkdir(exist_ok=True)
    update_package(folder, {launch.path: launch_file(launch, plan, folder)})
    return folder / launch.path
