"""What a user waits for: CPU seconds of `autoshard plan` from a model to the package, and how near its bound is.

python benchmarks/plan_seconds.py [--only NAME] [--write]

Each command is a process of its own, of modules that are compiled as pip does when it installs, with an empty cache.
What `plan` takes beyond what `trace` takes too, the start up to a capture and the captures of the model, is told by
their own clocks of CPU seconds (beyond_capture.py): the difference of two commands would tell how loaded the machine
was. --write puts the table into benchmarks/README.md. The UNet needs diffusers.
"""

from __future__ import annotations

import compileall
import json
import resource
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoshard.cluster.hardware import load_hardware
from autoshard.ir import graph_json, plan_json
from autoshard.ir.plan import Plan
from autoshard.program.lower import lower
from autoshard.simulation import simulate
from autoshard.text.critical_path import LARGE, waits
from benchmarks import harness
from benchmarks.harness import GPT2, LLAMA, LLAMA_8B, ROOT

HARDWARE = "h100-80g-sxm"
OTHERS = str(ROOT / "benchmarks/wide_models.py")
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


def timed(*words: str, cache: str = "off") -> tuple[float, str]:
    """CPU seconds of an autoshard command, and what it printed. `cache`: the folder of what searches found."""
    return _timed(("-m", "autoshard", *words), cache)


def clocked(*words: str) -> tuple[float, dict[str, float]]:
    """CPU seconds of an autoshard command from an empty cache, and what its own clock says (beyond_capture.py)."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "seconds.json"
        script = str(ROOT / "benchmarks" / "beyond_capture.py")
        whole, _ = _timed((script, str(told), *words), str(Path(folder) / "cache"))
        known: dict[str, float] = json.loads(told.read_text(encoding="utf-8"))
    return whole, known


def _timed(arguments: Sequence[str], cache: str) -> tuple[float, str]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = harness.fresh(*arguments, cache=cache)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, printed


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
    return harness.cells(*cells, f"{gap:.1%}", reason(found, out / "graph.json") if gap > LARGE else "")


def reason(plan: Plan, path: Path) -> str:
    """What the simulated step waits for in turn."""
    graph = graph_json.load(path)
    return waits(simulate(lower(plan, graph), graph, load_hardware(HARDWARE)))


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """A model is traced once."""
    for (model, given), same in groupby(rows, lambda row: (row[1], row[2])):
        with tempfile.TemporaryDirectory() as folder:
            with_ = ["--with", *(f"{key}={value}" for key, value in given.items())] if given else []
            asked = [model, *with_, "--precision", "bf16-mixed"]
            traced, known = clocked("trace", *asked, "-o", str(Path(folder) / "graph.json"))
            yield from (line(Path(folder), traced, known["start"], asked, row) for row in same)


def main() -> None:
    parser = harness.options(__doc__, [name for name, *_ in ROWS])
    arguments = parser.parse_args()
    compileall.compile_dir(ROOT / "autoshard", quiet=1)
    found = []
    for own in lines(row for row in ROWS if not arguments.only or row[0] in arguments.only):
        found.append(own)
        print(own, flush=True)
    text = harness.section("plan_seconds", "The whole command", [
        "CPU seconds of one thread: `autoshard trace MODEL`, and `autoshard plan MODEL` to the written package, with",
        "an empty cache; autoshard's modules are compiled beforehand, as pip does when it installs. *beyond*: of the",
        "latter, by its own clock, all but what `trace` takes up to its capture (Python's start, imports) and the",
        "captures of the model (as it is, and again at other sizes).",
        f"Profile {HARDWARE}, bf16-mixed, load average {harness.load()} at the end, which adds to them.",
        "*bar*: the most that *beyond* should be. The step is simulated; no plan's step is below *bound*.",
        "Where the gap is more than 5 %, what the step waits for in turn: no resource of the bound holds all of that.",
        "",
        "| model | mesh | trace s | plan s | beyond s | bar s | step ms | bound ms | gap | waits for |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
        *found,
    ])  # fmt: skip
    if arguments.write:
        harness.put(text)


if __name__ == "__main__":
    main()
