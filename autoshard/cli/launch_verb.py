"""`autoshard launch`: the file that starts a package on a cluster."""

from __future__ import annotations

import argparse
import sys

from autoshard.cli.json_output import print_json
from autoshard.code_text import typed


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
    if wanted.unused:
        print(f"note: --on {options.on} does not use {', '.join(wanted.unused)}", file=sys.stderr)
    file = launch_files.write_launch(wanted, planned.plan, folder)
    start = typed(*starting.start_words(wanted, folder))
    if options.json:
        print_json({"file": str(file), "start": start})
    elif not options.start:
        print(f"{file}\nnext: {start}")
    return starting.start(wanted, folder) if options.start else 0
