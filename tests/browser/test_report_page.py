"""The report in a real browser: drawn, read by pointer, touch and keys, quick with 100,000 events, safe for all."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.html_report.timeline_series import series
from autoshard.ir.mesh import Mesh
from autoshard.package import package_files
from autoshard.package.package_files import report_text
from autoshard.replay.simulated_plan import ReportExtras, SimulatedPlan, simulate_plan
from autoshard.search.fixed_step import predicted, with_step
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.search.style_plans import style_plans
from autoshard.simulation import Event, Timeline
from tests.browser.pages import PHONE, browser, data_of, opened, with_data
from tests.graphs import mlp_graph
from tests.slow import slow
from tests.tiny.test_report import built

MANY = 100_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def made() -> SimulatedPlan:
    """Layers split so that both axes talk, one at a time and together."""
    return built(mlp_graph(3, 64, 128), seed=3)


@pytest.fixture(scope="module")
def html(made: SimulatedPlan) -> str:
    return report_text(made, ReportExtras(styles=style_plans(made.plan, made.graph, made.hardware)))


def many_events() -> Timeline:
    """A step of 100,000 operators and collectives in 96 blocks, by hand."""
    events = []
    for n in range(MANY):
        module = f"model.layers.{n * 96 // MANY}.{'attn' if n % 40 < 20 else 'mlp'}.{'abcdefgh'[n % 8]}"
        if n % 8 == 7:
            talk = {"collective": "all_reduce", "axes": ("dp", "tp")[: 1 + n % 16 // 8]}
            event = Event(f"all_reduce {n}", "communication dp", n * 1e-6, 9e-7, "forward", 1e6, module, "sums", None,
                        (n - 1,), **talk)  # type: ignore[arg-type] # fmt: skip
        else:
            phase: Any = "forward" if n < MANY // 3 else "backward"
            event = Event(f"op {n}", "compute", n * 1e-6, 9e-7, phase, 1e6, module, "", None, (n - 1,) if n else ())
        events.append(event)
    busy = (("compute", 0.0), ("communication dp", 0.0), ("communication tp", 0.0))
    memory = ((0.0, 1e9),)
    return Timeline(tuple(events), MANY * 1e-6, busy, memory, 1e9, 0.0, (), 1e9, tuple(n * 1e-6 for n in range(MANY)))


def colours(page: Any, canvas: str) -> int:
    script = """(id) => { const c = document.getElementById(id);
      return new Set(new Uint32Array(c.getContext("2d").getImageData(0, 0, c.width, c.height).data.buffer)).size; }"""
    return int(page.evaluate(script, canvas))


def operator_place(page: Any) -> tuple[float, float]:
    """Where a linear is drawn, found by the pointer, as a reader does."""
    page.locator("#timeline").scroll_into_view_if_needed()
    box = page.locator("#timeline").bounding_box()
    for y in range(30, int(box["height"]), 12):
        for x in range(120, int(box["width"]), 40):
            page.mouse.move(box["x"] + x, box["y"] + y)
            if page.locator("#tooltip").is_visible() and page.locator("#tooltip").inner_text().startswith("linear"):
                return box["x"] + x, box["y"] + y
    raise AssertionError("no linear is to be found")


@pytest.mark.parametrize("context", [{}, {"color_scheme": "dark"}, PHONE], ids=["desktop", "dark", "phone"])
def test_it_is_drawn_and_asks_for_nothing(chromium: Any, html: str, tmp_path: Path, context: dict[str, Any]) -> None:
    with opened(chromium, html, tmp_path, **context) as shown:
        page = shown.page
        page.wait_for_function("autoshardTiming.frames.length > 0")
        assert colours(page, "timeline") > 8 and colours(page, "memory") > 4
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert shown.problems == [] and [url for url in shown.requests if not url.startswith("file:")] == []
        assert len(shown.requests) == 1


def test_zoom_pan_and_reset_by_button_key_and_wheel(chromium: Any, html: str, tmp_path: Path) -> None:
    with opened(chromium, html, tmp_path) as shown:
        page, ranges = shown.page, []

        def now() -> str:
            page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            return str(page.locator("#view-range").inner_text())

        whole = now()
        page.locator('[data-view="in"]').click()
        ranges.append(now())
        for key in "dwas":
            page.locator("#timeline").press(key)
            ranges.append(now())
        page.locator("#timeline").focus()
        page.locator("#timeline").hover()
        page.mouse.wheel(0, -120)
        ranges.append(now())
        assert whole not in ranges and len(set(ranges)) >= 5
        page.locator("#timeline").press("0")
        assert now() == whole
        assert shown.problems == []


def test_touch_pinches(chromium: Any, html: str, tmp_path: Path) -> None:
    with opened(chromium, html, tmp_path, **PHONE) as shown:
        page = shown.page
        page.locator("#timeline").scroll_into_view_if_needed()
        whole = page.locator("#view-range").inner_text()
        box = page.locator("#timeline").bounding_box()
        session = page.context.new_cdp_session(page)

        def touch(kind: str, *xs: float) -> None:
            points = [{"x": box["x"] + x, "y": box["y"] + 60, "id": n} for n, x in enumerate(xs)]
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        touch("touchStart", 180, 240)
        for step in range(1, 6):
            touch("touchMove", 180 - 12 * step, 240 + 12 * step)
        touch("touchEnd")
        page.wait_for_function("(whole) => document.getElementById('view-range').textContent !== whole", arg=whole)


def test_a_click_says_all_about_an_operator(chromium: Any, html: str, made: SimulatedPlan, tmp_path: Path) -> None:
    with opened(chromium, html, tmp_path) as shown:
        page = shown.page
        page.locator("#timeline").scroll_into_view_if_needed()
        page.mouse.click(*operator_place(page))
        panel = page.locator("#panel").inner_text()
        for words in ("strategy", "decided by", "aten.linear", "mlp.py:", "Its operator", "all others staying"):
            assert words in panel
        first = page.locator("#panel h3").inner_text()
        page.locator("#timeline").press("n")
        assert page.locator("#panel h3").inner_text() != first
        page.locator("#timeline").press("Escape")
        assert page.locator("#panel").is_hidden()
        assert shown.problems == []


def test_search_finds_and_goes_there(chromium: Any, html: str, tmp_path: Path) -> None:
    with opened(chromium, html, tmp_path) as shown:
        page = shown.page
        data = data_of(html)
        wanted = next(name for name in data["names"] if name.startswith("linear_1"))
        pairs = zip(data["name"], data["reason"], strict=True)
        said = [f"{data['names'][name]} {data['reasons'][reason]}" for name, reason in pairs]
        page.locator("#search").fill(wanted.upper())
        count = page.locator("#search-count").inner_text().split()[0]
        assert count == str(sum(wanted in words for words in said)) != "0"
        page.locator("#search").press("Enter")
        assert wanted in page.locator("#panel h3").inner_text()
        page.locator("#search").fill("nothing is called so")
        assert page.locator("#search-count").inner_text().startswith("0 found")


def test_a_joint_collective_stands_on_each_of_its_axes(
    chromium: Any, html: str, made: SimulatedPlan, tmp_path: Path
) -> None:
    joint = [event for event in made.timeline.events if len(event.axes) > 1]
    assert joint
    with opened(chromium, html, tmp_path) as shown:
        page = shown.page
        page.locator("#search").fill(joint[0].name)
        page.locator("#search").press("Enter")
        panel = page.locator("#panel").inner_text()
        assert all(f"communication {axis}" in panel for axis in joint[0].axes)
        page.locator("#timeline").scroll_into_view_if_needed()
        box = page.locator("#timeline").bounding_box()
        count = 0
        tip = page.locator("#tooltip")
        for y in range(20, int(box["height"]), 10):
            for x in range(140, int(box["width"]), 60):
                page.mouse.move(box["x"] + x, box["y"] + y)
                if tip.is_visible() and tip.inner_text().startswith(joint[0].name):
                    count += 1
                    break
        assert count >= 2 * 2  # two rows of 26 pixels, a look every 10


def test_what_nothing_hides_is_what_python_says(chromium: Any, made: SimulatedPlan, html: str) -> None:
    """The page's own row, added up, is the exposed communication of the simulation."""
    marked = made.step.account.mean.exposed_seconds
    page = chromium.new_page()
    page.set_content(html.replace("drawings.push(", "window.rows = rows; drawings.push("))
    drawn = page.evaluate(
        "rows.find((own) => own.kind === 'exposed').start.reduce((sum, start, i) =>"
        " sum + rows.find((own) => own.kind === 'exposed').end[i] - start, 0) * 1e-10"
    )
    page.close()
    assert marked > 0 and drawn == pytest.approx(marked, rel=1e-4)


def test_memory_lists_what_is_alive(chromium: Any, html: str, made: SimulatedPlan, tmp_path: Path) -> None:
    with opened(chromium, html, tmp_path) as shown:
        page = shown.page
        page.locator("#show-peak").click()
        alive = page.locator("#alive")
        largest = made.timeline.peak_tensors[0]
        assert largest.name in alive.inner_text()
        first = alive.locator("tbody tr").first.inner_text()
        assert largest.name in first or str(largest.bytes) in first
        alive.evaluate("(own) => own.replaceChildren()")
        box = page.locator("#memory").bounding_box()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 100)
        assert alive.locator("tbody tr").count() > 1
        assert shown.problems == []


def with_many_events(html: str) -> str:
    data = data_of(html) | series(many_events())
    data["memory"] |= {
        "starts": [10_000] * MANY, "name": [0] * MANY, "kind": [n % 8 for n in range(MANY)],
        "bytes": [1000 + n % 977 for n in range(MANY)], "first": [0] + [1] * (MANY - 1), "length": [0] * MANY,
    }  # fmt: skip
    return with_data(html, data)


def test_a_frame_costs_as_much_as_there_are_pixels(chromium: Any, html: str, tmp_path: Path) -> None:
    """However many events: shapes drawn in a frame, counted, are few for each row and pixel."""
    with opened(chromium, with_many_events(html), tmp_path) as shown:
        page = shown.page
        page.evaluate(
            """() => { const own = CanvasRenderingContext2D.prototype; window.shapes = 0;
            for (const name of ["fillRect", "fillText", "lineTo", "stroke"]) { const before = own[name];
              own[name] = function (...given) { window.shapes += 1; return before.apply(this, given); }; } }"""
        )
        for key in "wwwwwwwwdd0":
            before = page.evaluate("window.shapes")
            page.locator("#timeline").press(key)
            page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            drawn = page.evaluate("window.shapes") - before
            assert 100 < drawn < 1280 * 48  # eight kinds of memory change in every pixel, up and down, here


@pytest.mark.slow
def test_a_hundred_thousand_events(chromium: Any, html: str, tmp_path: Path) -> None:
    """First picture in 0.3 s; while panning and zooming 8 ms of script a frame in the median, 16 ms at the 95th
    percentile. Other work on this machine makes single tries slower: the best of three counts."""
    tries = [measured(chromium, with_many_events(html), tmp_path) for _ in range(3)]
    first, median, late = (min(timings[n] for timings in tries) for n in range(3))
    print(f"first {first:.1f} ms, median {median:.2f} ms, 95th percentile {late:.2f} ms")
    assert first < 300 and median < 8 and late < 16, tries


def measured(chromium: Any, html: str, folder: Path) -> tuple[float, float, float]:
    """(first picture, median and 95th percentile of frames), milliseconds."""
    with opened(chromium, html, folder) as shown:
        page = shown.page
        page.wait_for_function("autoshardTiming.first > 0")
        page.evaluate("autoshardTiming.frames.length = 0")
        page.locator("#timeline").focus()
        for key in "wwdwwaawwddwwsaswwddasssddssaaswwwwwwwwddddaaaassss":
            page.keyboard.press(key)
            page.evaluate("new Promise(requestAnimationFrame)")
        frames = page.evaluate("autoshardTiming.frames")
        assert len(frames) > 30 and shown.problems == []
        return (
            page.evaluate("autoshardTiming.first"), statistics.median(frames), statistics.quantiles(frames, n=20)[-1]
        )  # fmt: skip


def test_hostile_names_stay_text(chromium: Any, tmp_path: Path) -> None:
    graph = mlp_graph(2)
    evil = "</script><img src=x onerror=document.title='hit'>\u202e\"'`${1}"
    plan = built(replace(graph, ops=tuple(replace(op, module=evil) for op in graph.ops), modules=()))
    with opened(chromium, report_text(plan), tmp_path) as shown:
        page = shown.page
        page.locator("#timeline").scroll_into_view_if_needed()
        page.mouse.click(*operator_place(page))
        assert "onerror" in page.locator("#panel").inner_text()
        assert page.title() != "hit" and page.locator("img").count() == 0
        assert "\u202e" not in page.evaluate("document.documentElement.outerHTML")
        assert shown.problems == [] and len(shown.requests) == 1


@pytest.mark.parametrize("scheme", [slow("light"), "dark"])
def test_contrast_names_and_keyboard(chromium: Any, html: str, tmp_path: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe: pip install -e '.[test]'")
    with opened(chromium, html, tmp_path, color_scheme=scheme) as shown:
        page = shown.page
        for item in page.locator("details").all():
            item.evaluate("(own) => { own.open = true; }")
        page.mouse.click(*operator_place(page))
        page.locator("#show-peak").click()
        audit = axe.Axe().run(page)
        said = [(v["id"], v["nodes"][0]["html"][:200]) for v in audit.response["violations"]]
        assert said == []


def test_it_prints_with_everything_open(chromium: Any, html: str, tmp_path: Path) -> None:
    with opened(chromium, html, tmp_path, color_scheme="dark") as shown:
        printed = shown.page.pdf(format="A4", print_background=True)
        assert printed.startswith(b"%PDF") and len(printed) > 20_000
        assert shown.page.evaluate("[...document.querySelectorAll('details')].every((own) => own.open)")


def test_tables_sort_and_filter(chromium: Any, html: str, tmp_path: Path) -> None:
    """By what a cell means, not by its letters: 9 us is less than 1.2 ms."""
    with opened(chromium, html, tmp_path) as shown:
        page = shown.page
        table = page.locator("table.data", has=page.locator("caption", has_text="Simulated plans")).first
        values = "(own) => [...own.tBodies[0].rows].map((line) => line.cells[3].textContent)"
        page.evaluate(
            """() => { const body = document.querySelector("#alternatives table.data").tBodies[0];
            for (const text of ["9 us", "1.2 ms", "3 s", "850 ns"]) { const line = body.rows[0].cloneNode(true);
              line.removeAttribute("id"); line.cells[3].textContent = text; body.append(line); } }"""
        )
        button = table.locator("th button", has_text="predicted step")
        button.click()
        rows = table.evaluate(values)
        assert rows.index("850 ns") < rows.index("9 us") < rows.index("1.2 ms") < rows.index("3 s")
        button.click()
        assert table.evaluate(values) == rows[::-1]
        filters = page.locator("label.filter input")
        assert filters.count() > 0
        for item in page.locator("details").all():
            item.evaluate("(own) => { own.open = true; }")
        scroll = page.locator("label.filter + .scroll").first
        before = scroll.locator("tbody tr:visible").count()
        text = scroll.locator("tbody tr").first.locator("td").nth(1).inner_text()
        filters.first.fill(text)
        assert 0 < scroll.locator("tbody tr:visible").count() < before
        filters.first.fill("no such text")
        assert scroll.locator("tbody tr:visible").count() == 0


def test_a_phone_shows_every_column(chromium: Any, html: str, tmp_path: Path) -> None:
    with opened(chromium, html, tmp_path, **PHONE) as shown:
        page = shown.page
        for item in page.locator("details").all():
            item.evaluate("(own) => { own.open = true; }")
        wide = page.evaluate(
            """() => [...document.querySelectorAll("table.data td")].filter((cell) => cell.offsetParent &&
              (cell.getBoundingClientRect().right > innerWidth + 1 || cell.scrollWidth > cell.clientWidth + 1))
              .map((cell) => cell.textContent.slice(0, 40))"""
        )
        assert wide == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_two_plans_compared(chromium: Any, made: SimulatedPlan, tmp_path: Path) -> None:
    other = built(mlp_graph(3, 64, 128), "dp=4")
    with opened(chromium, package_files.diff_text(made, other), tmp_path) as shown:
        assert "B - A" in shown.page.locator("#figures").inner_text()
        assert shown.problems == [] and len(shown.requests) == 1


@pytest.mark.slow
def test_ninety_six_layers_on_sixty_four_devices(chromium: Any, tmp_path: Path) -> None:
    """The page of a deep model on many devices stays below 2 MB, and opens."""
    from autoshard.graph_capture.capture import capture

    sizes = {"n_layer": 96, "n_embd": 96, "sequence": 64, "batch": 64, "vocabulary": 97}
    graph = capture("examples/gpt2.py:build", sizes)
    hardware = load_hardware("a100-80g-sxm")
    plan = search(graph, hardware, SearchRequest(Mesh.parse("dp=8,tp=8")))
    simulated = simulate_plan(plan, graph, hardware)
    page = package_files.package_files(simulated, ReportExtras(style_plans(plan, graph, hardware)))["report.html"]
    print(f"{len(page.encode()) / 1e6:.2f} MB, {len(simulated.timeline.events)} events")
    assert len(page.encode()) < 2e6
    with opened(chromium, page, tmp_path) as shown:
        shown.page.wait_for_function("autoshardTiming.first > 0")
        assert shown.problems == []


# --- a step of several stages -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def staged() -> str:
    """The page of two stages with six micro-batches."""
    plan, graph, hardware = (one := built(mlp_graph(4, 64, 128), "tp=2", seed=3)).plan, one.graph, one.hardware
    plan = predicted(with_step(plan, graph, StepRequest(micro_batches=6, stages=2)), graph)
    return report_text(simulate_plan(plan, graph, hardware))


def test_the_whole_step_is_read_slot_by_slot(chromium: Any, staged: str, tmp_path: Path) -> None:
    with opened(chromium, staged, tmp_path) as shown:
        page = shown.page
        page.wait_for_function("autoshardTiming.frames.length > 0")
        assert colours(page, "stages") > 4 and not page.locator("#stages-picture").is_visible()
        said = page.locator("#stages-panel")
        slots = []
        for _ in range(3):
            page.locator("#stages").press("n")
            slots.append(said.locator("h3").inner_text())
        assert slots == [f"stage 0: forward of micro-batch {n}" for n in (0, 1)] + [
            "stage 0: backward of micro-batch 0"
        ]
        assert "stage 1, until" in said.inner_text()  # whose backward it needs
        page.select_option("#stage", "1")
        said.locator("button").click()  # to the operators of the slot, which is on stage 0
        page.wait_for_function("!document.getElementById('view-range').textContent.startsWith('0 s')")
        assert page.locator("#stage").input_value() == "0" and colours(page, "timeline") > 6
        page.locator("#stages").press("w")
        box = page.locator("#stages").bounding_box()
        page.locator("#stages").press("0")
        page.mouse.click(box["x"] + box["width"] - 2, box["y"] + 10)
        assert said.is_visible() is False or "once a step" in said.inner_text()
        page.locator("#stages").press("Escape")
        assert not said.is_visible() and shown.problems == []
        page.emulate_media(media="print")
        assert page.locator("#stages-picture").is_visible() and not page.locator("#stages").is_visible()
