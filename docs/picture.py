"""Draws the picture of README.md from a package: `python docs/picture.py out/gpt2 docs/gpt2.svg`."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

from autoshard.package.package_files import build, read_package
from autoshard.simulate import Event, Timeline

COLOURS = {"forward": "#3b78b8", "backward": "#7d5ba6", "optimizer": "#6b7280", "communication": "#c2611f"}
MILLISECONDS = 1e3
MIB = 2.0**20


def category(event: Event) -> str:
    return event.phase if event.stream == "compute" else "communication"


def spans(events: list[Event], step_seconds: float) -> list[tuple[float, float]]:
    """(start, length) in ms; neighbours closer than half a pixel are drawn as one."""
    merged: list[tuple[float, float]] = []
    for event in events:
        if merged and event.start_seconds - merged[-1][1] < step_seconds / 2000:
            merged[-1] = (merged[-1][0], event.end_seconds)
        else:
            merged.append((event.start_seconds, event.end_seconds))
    return [(start * MILLISECONDS, (end - start) * MILLISECONDS) for start, end in merged]


def draw(timeline: Timeline, title: str, path: Path) -> None:
    """Streams above, memory below, one time axis; the same timeline gives the same file."""
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "autoshard", "font.size": 9, "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, (streams, memory) = pyplot.subplots(2, sharex=True, figsize=(10, 3.4), height_ratios=(3, 2))
    for row, stream in enumerate(reversed(timeline.streams)):
        for name, colour in COLOURS.items():
            events = [event for event in timeline.events if event.stream == stream and category(event) == name]
            streams.broken_barh(spans(events, timeline.step_seconds), (row - 0.4, 0.8), color=colour, linewidth=0)
    streams.set_yticks(range(len(timeline.streams)), list(reversed(timeline.streams)))
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    memory.legend(handles, COLOURS, ncols=4, loc="upper right", bbox_to_anchor=(1, -0.25), frameon=False)
    streams.set_title(title, loc="left", fontsize=10)
    times = [seconds * MILLISECONDS for seconds, _ in timeline.memory]
    memory.fill_between(times, [size / MIB for _, size in timeline.memory], step="post", color="#3b78b8", alpha=0.35)
    memory.set_xlabel("ms", loc="left")
    memory.set(ylabel="memory, MiB", xlim=(0, timeline.step_seconds * MILLISECONDS), ylim=(0, None))
    for axes in (streams, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    built = build(*read_package(options.package))
    title = f"One step of {built.plan.model} on {built.plan.mesh} of {built.plan.hardware}, simulated"
    draw(built.timeline, title, options.output)


if __name__ == "__main__":
    main()
