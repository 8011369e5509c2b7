"""JSON on stdout."""

from __future__ import annotations

import json

from autoshard.system import terminal


def print_json(content: object) -> None:
    """Prints JSON, with letters that the terminal can't show escaped."""
    print(json.dumps(content, indent=1, ensure_ascii=not terminal.speaks_unicode()))
