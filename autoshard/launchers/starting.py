"""Starts a launcher's file, where its program is on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from autoshard.code_text import typed
from autoshard.errors import UsageError
from autoshard.launchers.launch_files import LAUNCHERS, Launch

_NEEDS = {"ssh": "ssh", "mpirun": "mpirun", "torchrun": "torchrun"}  # what a script calls


def start_words(launch: Launch, folder: Path) -> list[str]:
    """The command that starts it. Slurm copies its script, and so needs the folder's name."""
    command, file = LAUNCHERS[launch.on].command, folder / launch.path
    return [*command, *(["--chdir", str(folder.resolve())] if launch.on == "slurm" else []), str(file)]


def start_command(launch: Launch, folder: Path) -> str:
    """The command as typed; with torchrun on several nodes, that of the first."""
    command = typed(*start_words(launch, folder))
    if not on_each_node(launch):
        return command
    return f"{'NODE=0 ' if launch.least_nodes == launch.nodes else ''}FIRST_NODE=host {command}"


def on_each_node(launch: Launch) -> bool:
    """True if a user starts the file on each node by hand."""
    return launch.on == "torchrun" and launch.nodes > 1


def start(launch: Launch, folder: Path) -> int:
    """Start it. Returns the exit code: of the run if it stays in the foreground, else of the scheduler's command."""
    words = start_words(launch, folder)
    program = _NEEDS.get(launch.on, words[0])
    if on_each_node(launch):
        raise UsageError("torchrun is started on each node by itself", start_command(launch, folder))
    if program != "python" and shutil.which(program) is None:
        raise UsageError(
            f"there is no {program} on this machine", f"where it is, in a copy of {folder}: {typed(*words)}"
        )
    words[0] = sys.executable if words[0] == "python" else words[0]
    return subprocess.run(words, check=False).returncode
