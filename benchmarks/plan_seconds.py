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
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from autoshard.cluster.hardware import load_hardware
from autoshard.ir import graph_json, plan_json
from autoshard.ir.plan import Plan
from autoshard.program.lower import lower
from autoshard.simulation import simulate
from autoshard.text.account_text import COUNTS, waits
from benchmarks import harness
from benchmarks.harness import GPT2, LLAMA, LLAMA_8B, ROOT

HARDWARE = "h100-80g-sxm"
OTHERS = str(ROOT / "benchmarks/sized_models.py")
# name, model, its arguments, mesh, the most CPU seconds beyond `autoshard trace` where that is said
Row = tuple[str, str, dict[str, int], str, float | None]
ROWS: tuple[Row, ...] = (
    ("GPT-2, 12 layers", GPT2, {"sequence": 1024}, "dp=2,tp=4", 2.5),
    ("Llama, 12 layers of 1024", LLAMA, {}, "dp=2,tp=4", 6.0),
    ("Llama-8B, 32 layers", LLAMA, LLAMA_8B, "dp=8,tp=8", 10.0),
    ("Llama-8B on three axes", LLAMA, LLAMA_8B, "dp=4,cp=8,tp=8", 30.0),
    *(
        (name, f"{OTHERS}:{builder}", {}, mesh, None)
        for name, builder in (
            ("ViT, base", "vit"),
            ("T5, base", "t5"),
            ("Mixtral, 8 layers of 1024", "mixtral"),
            ("ResNet-50", "resnet"),
            ("UNet, Stable Diffusion 1's", "unet"),
        )
        for mesh in ("dp=2,tp=4", "dp=8,tp=8")
    ),
)


NEXT = (("--memory-limit", "70GiB"), ("--level", "0"), ("--level", "1"))
HEADER = ("model", "mesh", "trace s", "plan s", "beyond s", "bar s", "step ms", "bound ms", "gap", "waits for")
NEXT_HEADER = ("model", "mesh", "first of the model s", "of the graph s", *(f"`{' '.join(words)}`" for words in NEXT))


def clocked(*words: str) -> tuple[float, dict[str, float]]:
    """CPU seconds of an autoshard command from an empty cache, and what its own clock says (beyond_capture.py)."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "seconds.json"
        script = str(ROOT / "benchmarks" / "beyond_capture.py")
        whole = timed(script, str(told), *words, cache=str(Path(folder) / "cache"))
        known: dict[str, float] = json.loads(told.read_text(encoding="utf-8"))
    return whole, known


def timed(*words: str, cache: str = "off") -> float:
    """CPU seconds of a fresh interpreter. `cache`: the folder of what searches found."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    harness.fresh(*words, cache=cache)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def line(folder: Path, traced: float, start: float, asked: Sequence[str], row: Row) -> str:
    """`start`: what `trace` took up to its capture."""
    name, _, _, mesh, limit = row
    out = folder / "out"
    plan, known = clocked("plan", *asked, "--mesh", mesh, "--hardware", HARDWARE, "--out", str(out))
    extra = known["all"] - known["captures"] - start
    found = plan_json.load(out / "plan.json")
    step, bound = 1e3 * found.predicted_seconds, 1e3 * found.certificate.level_bound
    gap, bar = 1 - bound / step, "" if limit is None else f"{limit:.1f}"
    seconds = [*(f"{own:.1f}" for own in (traced, plan, extra)), bar]
    cells = [name, mesh.replace(",", " "), *seconds, f"{step:.2f}", f"{bound:.2f}"]
    return harness.cells(*cells, f"{gap:.1%}", reason(found, out / "graph.json") if gap > COUNTS else "")


def reason(plan: Plan, path: Path) -> str:
    """What the simulated step waits for in turn."""
    graph = graph_json.load(path)
    return waits(simulate(lower(plan, graph), graph, load_hardware(HARDWARE)))


def asked(row: Row) -> list[str]:
    """The model as a command has it."""
    given = [f"{key}={value}" for key, value in row[2].items()]
    return [row[1], *(["--with", *given] if given else []), "--precision", "bf16-mixed"]


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """A model is traced once."""
    for words, same in groupby(rows, asked):
        with tempfile.TemporaryDirectory() as folder:
            traced, known = clocked("trace", *words, "-o", str(Path(folder) / "graph.json"))
            yield from (line(Path(folder), traced, known["start"], words, row) for row in same)


def next_lines(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        with tempfile.TemporaryDirectory() as folder:
            graph, out, cache, another = (f"{folder}/{name}" for name in ("graph.json", "out", "cache", "another"))
            command = ("-m", "autoshard", "plan")
            rest = ["--mesh", row[3], "--hardware", HARDWARE, "--out", out, "--json"]
            timed("-m", "autoshard", "trace", *asked(row), "-o", graph)
            whole = timed(*command, *asked(row), *rest, cache=another)
            first = timed(*command, graph, *rest, cache=cache)
            others = [timed(*command, graph, *rest, *other, cache=cache) for other in NEXT]
        parts = (f"{seconds:.1f} ({seconds / whole:.0%}, {seconds / first:.0%})" for seconds in others)
        yield harness.cells(row[0], row[3].replace(",", " "), f"{whole:.1f}", f"{first:.1f}", *parts)


def main() -> None:
    parser = harness.options(__doc__, [name for name, *_ in ROWS])
    parser.add_argument("--next", action="store_true", help="the next plans of each graph")
    arguments = parser.parse_args()
    compileall.compile_dir(ROOT / "autoshard", quiet=1)
    rows = [row for row in ROWS if not arguments.only or row[0] in arguments.only]
    if arguments.next:
        harness.publish(arguments, "second_plan", NEXT_HEADER, next_lines(rows))
    else:
        harness.publish(arguments, "plan_seconds", HEADER, lines(rows))


if __name__ == "__main__":
    main()
