"""Every message that the troubleshooting page explains is one that the code can print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [message for line in PAGE.splitlines() if line.startswith("### ") for message in re.findall("`(.+?)`", line)]


def printable() -> str:
    """The source, with every figure of a message as `…` and strings that Python joins joined."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "autoshard").rglob("*.py"))]
    joined = re.sub(r'"\s*\+?\s*f?"', "", "\n".join(texts))
    return re.sub(r"\{[^{}]*\}", "…", joined)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_can_print_it(message: str) -> None:
    source = printable()
    missing = [part for part in message.split("…") if part.strip(" ,:") and part.strip(" ,:") not in source]
    assert not missing


def test_messages_are_found() -> None:
    assert len(MESSAGES) > 20
