"""A real browser for the tests of the page: Debian's Chromium, driven by Playwright; skipped where one is missing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DATA = re.compile(r'(<script type="application/json" id="data">)(.*?)(</script>)', re.DOTALL)
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}


@dataclass
class Opened:
    """An open page with what it logged, and what it asked for beside itself."""

    page: Any
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium; the test is skipped, with the reason, where it or Playwright is not installed."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install -e '.[test]'")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (on Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@contextmanager
def opened(launched: Any, html: str, folder: Path, **context: Any) -> Iterator[Opened]:
    """The page as a file in a window of its own; every problem it logs and every request are noted."""
    path = folder / "page.html"
    path.write_text(html, encoding="utf-8")
    window = launched.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
    result = Opened(window.new_page())
    noted = result.problems
    result.page.on("console", lambda message: noted.append(message.text) if message.type == "error" else None)
    result.page.on("pageerror", lambda error: noted.append(str(error)))
    result.page.on("request", lambda request: result.requests.append(request.url))
    result.page.goto(path.as_uri())
    yield result
    window.close()


def with_data(html: str, changed: dict[str, Any]) -> str:
    """The page with other numbers to draw."""
    text = json.dumps(changed).replace("<", "\\u003c")
    return DATA.sub(lambda match: f"{match[1]}{text}{match[3]}", html)


def data_of(html: str) -> dict[str, Any]:
    match = DATA.search(html)
    assert match
    return json.loads(match[2])
