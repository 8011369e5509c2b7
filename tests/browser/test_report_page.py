"""The report in a real browser: it draws, zooms, answers keys and the pointer, fetches nothing and logs no error."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from autoshard.package import package_files
from tests.tiny.test_report import built, data_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (on Debian: apt install chromium)")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-dev-shm-usage", "--window-size=1200,900",
    "--virtual-time-budget=4000",
)  # fmt: skip

# Runs in the page after its own script; what it finds is left in <pre id="found"> for --dump-dom.
PROBE = """
<script>
const found = { errors: window.problems, requests: performance.getEntriesByType("resource").length };
const canvas = document.getElementById("timeline"), range = document.getElementById("view-range");
const pixels = (element) => element.getContext("2d").getImageData(0, 0, element.width, element.height).data;
const painted = (element) => new Set(pixels(element)).size;
const pause = () => new Promise((done) => setTimeout(done, 10));
const change = async (act) => {
  const before = range.textContent;
  act();
  for (let tries = 0; tries < 100 && range.textContent === before; tries += 1) await pause();
  return range.textContent;
};
const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
(async () => {
  found.shades = [painted(canvas), painted(document.getElementById("memory"))];
  found.whole = range.textContent;
  found.zoomed = await change(() => document.querySelector('[data-view="in"]').click());
  found.moved = await change(() => press("ArrowRight"));
  found.reset = await change(() => press("0"));
  const box = canvas.getBoundingClientRect(), tip = document.getElementById("tooltip");
  found.tips = [];
  for (let x = 0; x < box.width; x += 10) {
    const at = { clientX: box.left + x, clientY: box.top + 10, bubbles: true };
    canvas.dispatchEvent(new PointerEvent("pointermove", at));
    if (!tip.hidden) found.tips.push(tip.textContent);
  }
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
})();
</script>
"""
# Headless pages that dump their document draw few frames: a timer stands in.
WATCH = """<script>
window.problems = [];
addEventListener("error", (event) => window.problems.push(event.message));
window.requestAnimationFrame = (draw) => setTimeout(draw, 0);
</script>"""


def probe(html: str, folder: Path, *flags: str) -> dict[str, object]:
    page = folder / "page.html"
    page.write_text(html.replace("<head>", f"<head>{WATCH}").replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert '<pre id="found">' in done.stdout, done.stderr[-2000:]
    text = done.stdout.rpartition('<pre id="found">')[2].partition("</pre>")[0]
    for entity, letter in (("&gt;", ">"), ("&lt;", "<"), ("&amp;", "&")):
        text = text.replace(entity, letter)
    return data_of(f'<script type="application/json" id="data">{text}</script>')


@pytest.mark.parametrize("flags", [(), ("--blink-settings=preferredColorScheme=0",)], ids=["light", "dark"])
def test_the_page_works(flags: tuple[str, ...], tmp_path: Path) -> None:
    made = built()
    found = probe(package_files.report_text(made, None), tmp_path, *flags)
    assert found["errors"] == []
    assert found["requests"] == 0
    assert min(found["shades"]) > 3  # type: ignore[call-overload]
    assert found["whole"] == found["reset"]
    assert len({found["whole"], found["zoomed"], found["moved"]}) == 3
    tips = "\n".join(found["tips"])  # type: ignore[call-overload]
    assert {event.name for event in made.timeline.events if event.name in tips} >= {"linear_0", "linear_1"}
