"""What the benchmarks share: options, fresh processes, captured graphs, tables, and their places in a page.

Each is a module, run from the root of the clone: `python -m benchmarks.NAME`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jinja2

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3  # rounds of steps that do not count
Item = TypeVar("Item")
README = ROOT / "benchmarks" / "README.md"
GPT2, LLAMA = str(ROOT / "examples/gpt2.py:build"), str(ROOT / "benchmarks/sized_models.py:llama")
LLAMA_8B = {
    "hidden": 4096, "inner": 14336, "heads": 32, "heads_of_keys": 8, "words": 128256, "layers": 32, "batch": 16,
}  # fmt: skip


def options(
    doc: str | None, only: Sequence[str] | None = None, graphs: bool = False, data: bool = False
) -> argparse.ArgumentParser:
    """--write, and where they are asked for --only NAME (repeatable), --graphs FOLDER and --data FOLDER."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put what comes out into its page or file")
    if only is not None:
        parser.add_argument("--only", choices=list(dict.fromkeys(only)), action="append")
    if data:
        parser.add_argument("--data", type=Path, required=True, help="the folder of measurements")
    if graphs:
        parser.add_argument("--graphs", type=Path, help="a folder that keeps captured graphs for the next run")
    return parser


def machine() -> str:
    """Where and beside how much else something was measured."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()}, {cores} cores, no accelerator, load average {os.getloadavg()[0]:.1f} at the end."


def peak_gib() -> float:
    """Most resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def cells(*values: object) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, values))} |"


def table(header: Sequence[str], rows: Iterable[str], words: int = 2) -> list[str]:
    """Markdown; the columns after the first `words` are numbers. `rows`: as `cells` has them, printed as they come."""
    lines = [cells(*header), "|" + "---|" * words + "--:|" * (len(header) - words)]
    print("\n".join(lines), flush=True)
    for row in rows:
        lines.append(row)
        print(row, flush=True)
    return lines


def put(name: str, lines: Sequence[str], page: Path = README) -> None:
    """Writes between the marks of a name; the words around them are the page's own."""
    old = page.read_text(encoding="utf-8")
    place = rf"(<!-- {re.escape(name)}: [^\n]*-->).*?(<!-- {re.escape(name)} end -->)"
    made, count = re.subn(place, lambda m: "\n".join([m[1], "", *lines, m[2]]), old, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{page.name} has {count} places for {name}")
    page.write_text(made, encoding="utf-8")


def publish(
    given: argparse.Namespace, name: str, header: Sequence[str], rows: Iterable[str], words: int = 2, head: str = ""
) -> None:
    """Prints a table; with --write also into benchmarks/README.md, under `head` and what is said of the machine."""
    lines = table(header, rows, words)
    if given.write:
        put(name, [f"{head}{machine()}", "", *lines])


def rendered(template: str, **values: object) -> str:
    """The text of a page, of a template that stands beside the benchmarks."""
    rules = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return rules.from_string(Path(__file__).with_name(template).read_text(encoding="utf-8")).render(values)


def part(items: Sequence[Item], text: str) -> list[Item]:
    """`K/N`: every N-th from the K-th, counted from 0. ValueError for anything else."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ValueError(f"--part is K/N with K below N, such as 0/2, got {text!r}")
    return list(items)[int(number) :: int(count)]


def logged(path: Path | None) -> list[dict[str, Any]]:
    """The entries of a file of JSON lines, none where it is not there; a last line that was cut off is none."""
    text = path.read_text(encoding="utf-8") if path and path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def log(path: Path, entry: Mapping[str, Any]) -> None:
    """Adds an entry; a line that was cut off before it is dropped."""
    text = path.read_bytes() if path.exists() else b""
    with path.open("ab") as stream:
        stream.truncate(text.rfind(b"\n") + 1)
        stream.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")


def fresh(*words: str, environment: Mapping[str, str] | None = None, cache: str = "off") -> str:
    """What a fresh interpreter prints, on one thread, with this clone's autoshard."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "AUTOSHARD_CACHE": cache, **(environment or {})}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=own, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def measured(name: str, *words: str) -> Any:
    """What a benchmark measures in a fresh process, as the JSON of the last line that it prints."""
    return json.loads(fresh("-W", "ignore", "-m", f"benchmarks.{name}", "--measure", *words).splitlines()[-1])


def ranks(name: str, count: int, *words: str, seconds: float = 900.0) -> Any:
    """What rank 0 of a benchmark's `count` processes under torchrun prints last, as JSON."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += ["-m", f"benchmarks.{name}", *words]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    if made.returncode:
        raise SystemExit(made.stderr)
    return json.loads(made.stdout.splitlines()[-1])


def captured(folder: Path, name: str, source: str, sizes: Mapping[str, int], precision: str = "fp32") -> Path:
    """The graph of a model, captured where the folder has none."""
    from autoshard.graph_capture.capture import capture
    from autoshard.ir.graph_json import save

    path = folder / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.json"
    if not path.exists():
        save(capture(source, dict(sizes), precision), path)
    return path


def in_turns(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of each step in a process group, wall and this rank's processor, run in turns after three rounds
    that do not count."""
    import torch.distributed as dist

    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(WARM_UP + rounds):
        for name, step in steps.items():
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            step()
            taken = time.perf_counter() - wall
            if number >= WARM_UP:
                seconds[name].append((taken, time.process_time() - processor))
    return {
        name: {"wall": statistics.median(w for w, _ in own), "cpu": statistics.median(c for _, c in own)}
        for name, own in seconds.items()
    }


def write_package(folder: Path, plan: Any, graph: Any) -> None:
    """The files of a plan's package that its train.py needs."""
    from autoshard.emit import emit
    from autoshard.program.lower import lower

    for name, text in emit(lower(plan, graph), plan, graph).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def kept(folder: Path | None) -> Iterator[Path]:
    """The folder, made where it is not there, or else a temporary one."""
    with tempfile.TemporaryDirectory() as temporary:
        own = folder or Path(temporary)
        own.mkdir(parents=True, exist_ok=True)
        yield own
