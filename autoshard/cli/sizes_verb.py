"""The verb `sizes`: a data loader's batches as a histogram."""

from __future__ import annotations

import argparse

from autoshard.cli.json_output import print_json
from autoshard.code_text import typed
from autoshard.system.files import write_text
from autoshard.system.progress import step


def sizes(options: argparse.Namespace) -> int:
    """Read a data loader and write how often its batches have which sizes."""
    from autoshard.api import size_reader

    with step(f"reading {options.loader}", options.json):
        rows = size_reader.read(options.loader, tuple(options.dynamic), options.batches)
    write_text(options.output, size_reader.as_text(rows))
    if options.json:
        print_json({"written": str(options.output), "sizes": rows})
    else:
        count = sum(row["weight"] for row in rows)
        print(f"{options.output}: {count} batches of {len(rows)} different sizes")
        print(f"for autoshard plan: --dynamic {typed(','.join(options.dynamic))} --sizes {typed(options.output)}")
    return 0
