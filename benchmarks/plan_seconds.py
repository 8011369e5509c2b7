"""What a user waits for: CPU seconds of `autoshard plan` from a model to the package, and how near its bound is.

python -m benchmarks.plan_seconds [--only NAME] [--next] [--write]

Each command is a process of its own, of modules that are compiled as pip does when it installs, with an empty cache.
What `plan` takes beyond what `trace` takes too, the start up to a capture and the captures of the model, is told by
their own clocks of CPU seconds (beyond_capture.py): the difference of two commands would tell how loaded the machine
was. With --next it is measured what the next plan of a graph takes, with another memory limit or level: the first one
finds an empty cache and fills it; that of the model, its capture included, has a cache of its own. The UNet needs
diffusers.
"""

from __future__ import annotations

import compileall
import json
import resource
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from autoshard.cluster.hardware import load_hardware
from autoshard.ir import graph_json, plan_json
from autoshard.ir.plan import Plan
from autoshard.program.lower import lower
from autoshard.simulation import simulate
from autoshard.text.account_text import COUNTS, waits
from benchmarks import harness
from benchmarks.harness import ROOT

HARDWARE = "h100-80g-sxm"
MESHES = {"dp=2,tp=4": None, "dp=8,tp=8": None}  # of models without a bar


@dataclass(frozen=True)
class Row:
    """A model with the arguments of its builder on a mesh. `bar`: the most CPU seconds beyond `autoshard trace`."""

    name: str
    model: str
    sizes: dict[str, int]
    mesh: str
    bar: float | None

    @property
    def asked(self) -> list[str]:
        """The model as a command has it."""
        sizes = [f"{key}={value}" for key, value in self.sizes.items()]
        return [str(ROOT / self.model), *(["--with", *sizes] if sizes else []), "--precision", "bf16-mixed"]


ROWS = [
    Row(entry["name"], entry["model"], entry.get("sizes", {}), mesh, bar)
    for entry in harness.rows_of("planned_models.toml")["plan_seconds"]
    for mesh, bar in entry.get("bars", MESHES).items()
]
NEXT = (("--memory-limit", "70GiB"), ("--level", "0"), ("--level", "1"))
HEADER = ("model", "mesh", "trace s", "plan s", "beyond s", "bar s", "step ms", "bound ms", "gap", "waits for")
NEXT_HEADER = ("model", "mesh", "first of the model s", "of the graph s", *(f"`{' '.join(words)}`" for words in NEXT))


def clocked(*words: str) -> tuple[float, dict[str, float]]:
    """CPU seconds of an autoshard command from an empty cache, and what its own clock says (beyond_capture.py)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        script = str(ROOT / "benchmarks" / "beyond_capture.py")
        whole = timed(script, str(path), *words, cache=str(Path(folder) / "cache"))
        known: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return whole, known


def timed(*words: str, cache: str = "off") -> float:
    """CPU seconds of a fresh interpreter. `cache`: the folder of what searches found."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    harness.fresh(*words, cache=cache)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def line(folder: Path, traced: float, start: float, row: Row) -> str:
    """`start`: what `trace` took up to its capture."""
    out = folder / "out"
    plan, known = clocked("plan", *row.asked, "--mesh", row.mesh, "--hardware", HARDWARE, "--out", str(out))
    extra = known["all"] - known["captures"] - start
    saved_plan = plan_json.load(out / "plan.json")
    step, bound = 1e3 * saved_plan.predicted_seconds, 1e3 * saved_plan.certificate.level_bound
    gap, bar = 1 - bound / step, "" if row.bar is None else f"{row.bar:.1f}"
    seconds = [*(f"{value:.1f}" for value in (traced, plan, extra)), bar]
    cells = [row.name, row.mesh.replace(",", " "), *seconds, f"{step:.2f}", f"{bound:.2f}"]
    return harness.cells(*cells, f"{gap:.1%}", reason(saved_plan, out / "graph.json") if gap > COUNTS else "")


def reason(plan: Plan, path: Path) -> str:
    """What the simulated step waits for in turn."""
    graph = graph_json.load(path)
    return waits(simulate(lower(plan, graph), graph, load_hardware(HARDWARE)))


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """A model is traced once."""
    for words, same in groupby(rows, attrgetter("asked")):
        with tempfile.TemporaryDirectory() as folder:
            traced, known = clocked("trace", *words, "-o", str(Path(folder) / "graph.json"))
            yield from (line(Path(folder), traced, known["start"], row) for row in same)


def next_lines(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        with tempfile.TemporaryDirectory() as folder:
            graph, out, cache, another = (f"{folder}/{name}" for name in ("graph.json", "out", "cache", "another"))
            command = ("-m", "autoshard", "plan")
            options = ["--mesh", row.mesh, "--hardware", HARDWARE, "--out", out, "--json"]
            timed("-m", "autoshard", "trace", *row.asked, "-o", graph)
            whole = timed(*command, *row.asked, *options, cache=another)
            first = timed(*command, graph, *options, cache=cache)
            others = [timed(*command, graph, *options, *other, cache=cache) for other in NEXT]
        parts = (f"{seconds:.1f} ({seconds / whole:.0%}, {seconds / first:.0%})" for seconds in others)
        yield harness.cells(row.name, row.mesh.replace(",", " "), f"{whole:.1f}", f"{first:.1f}", *parts)


def main() -> None:
    parser = harness.options(__doc__, [row.name for row in ROWS])
    parser.add_argument("--next", action="store_true", help="the next plans of each graph")
    arguments = parser.parse_args()
    compileall.compile_dir(ROOT / "autoshard", quiet=1)
    rows = [row for row in ROWS if not arguments.only or row.name in arguments.only]
    if arguments.next:
        harness.publish(arguments, "second_plan", NEXT_HEADER, next_lines(rows))
    else:
        harness.publish(arguments, "plan_seconds", HEADER, lines(rows))


if __name__ == "__main__":
    main()
