"""`autoshard launch`: the file that starts a package on a cluster."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoshard.cli.json_output import print_json
from autoshard.cli.parser import Parser

_CHECKED = ("action", "choices", "const", "nargs", "type")  # of an option


def launch(options: argparse.Namespace) -> int:
    """Write the job file of a launcher or scheduler into a package, and start it."""
    from autoshard.api import verbs
    from autoshard.launchers import launch_files, starting

    planned, folder = verbs.load_plan(options.plan), options.plan
    more = {name: getattr(options, name) for name in ("minutes", "grace", "python", "image")}
    hosts = options.hosts.split(",") if options.hosts else []
    if nested := verbs.packages_in(folder)[1:]:
        more["least_devices"] = verbs.load_plan(nested[-1]).plan.devices
    wanted = launch_files.launch_of(planned.plan, options.on, options.nodes, hosts, options.options, **more)
    _check_options(folder, wanted.options, bool(planned.plan.servers.count))
    if wanted.unused:
        print(f"note: --on {options.on} does not use {', '.join(wanted.unused)}", file=sys.stderr)
    file = launch_files.write_launch(wanted, planned.plan, folder)
    start = starting.start_command(wanted, folder)
    if options.json:
        print_json({"file": str(file), "start": start})
    elif not options.start:
        print(f"{file}\nnext{', on each node' if starting.on_each_node(wanted) else ''}: {start}")
    return starting.start(wanted, folder) if options.start else 0


def _check_options(folder: Path, words: Sequence[str], servers: bool) -> None:
    """UsageError where train.py refuses its options. They are read from its source, as importing it takes torch."""
    from autoshard.launchers.launch_files import DEVICES
    from autoshard.package.output_folder import read_file

    known = Parser(prog="train_servers.py" if servers else "train.py", add_help=False, conflict_handler="resolve")
    shapes = re.findall(r'^    "(\w+)": lambda', read_file(folder, "runtime/learning_rate.py"), re.MULTILINE)
    names = {"int": int, "float": float, "BACKENDS": [*DEVICES], "sorted(SHAPES)": shapes}

    def value(node: ast.expr) -> Any:
        return names.get(ast.unparse(node)) if isinstance(node, ast.Name | ast.Call) else ast.literal_eval(node)

    text = read_file(folder, "server_options.py" if servers else "run_options.py")
    try:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                more = {str(item.arg): value(item.value) for item in node.keywords if item.arg in _CHECKED}
                known.add_argument(*map(ast.literal_eval, node.args), **more)
    except (SyntaxError, ValueError, TypeError):  # edited: it can be anything
        return
    known.parse_args(words)
