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
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jinja2

if TYPE_CHECKING:  # planted_faults.py has imported nothing of the code
    from autoshard.ir.graph import Graph
    from autoshard.ir.mesh import Mesh
    from autoshard.ir.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
Item = TypeVar("Item")
README = ROOT / "benchmarks" / "README.md"


def options(doc: str | None, only: Iterable[str] = (), data: bool = False) -> argparse.ArgumentParser:
    """--write, and where they are asked for --only NAME (repeatable) and --data FOLDER."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put what comes out into its page or file")
    if only:
        parser.add_argument("--only", choices=list(dict.fromkeys(only)), action="append")
    if data:
        parser.add_argument("--data", type=Path, required=True, help="the folder of measurements")
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
    text, count = re.subn(place, lambda m: "\n".join([m[1], "", *lines, m[2]]), old, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{page.name} has {count} places for {name}")
    page.write_text(text, encoding="utf-8")


def publish(
    options: argparse.Namespace, name: str, header: Sequence[str], rows: Iterable[str], words: int = 2, head: str = ""
) -> None:
    """Prints a table; with --write also into benchmarks/README.md, under `head` and what is said of the machine."""
    lines = table(header, rows, words)
    if options.write:
        put(name, [f"{head}{machine()}", "", *lines])


JINJA = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
JINJA.filters |= {"f": format, "lines": lambda rows: "\n".join(cells(*row) for row in rows)}


def rendered(template: str, **values: object) -> str:
    """The text of a page, of a template that stands beside the benchmarks."""
    return JINJA.from_string((ROOT / "benchmarks" / template).read_text(encoding="utf-8")).render(values)


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


class Ended(NamedTuple):
    """A process: its `code`, None where it was stopped; `end`: in words, where it is not 0; what it printed."""

    code: int | None
    end: str
    output: str
    errors: str


def ended(command: Sequence[str], seconds: float, folder: Path | None = None, **environment: str) -> Ended:
    """Runs it on one thread to its end, in `folder`, or until its time is over. Nothing that it started is left."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+", errors="replace") as errors:
        env = one_thread(**environment)
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=errors)
        try:
            code: int | None = process.wait(limit := patience(seconds))
            end = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            code, end = None, f"stopped after {limit:.0f} s"
        finally:
            kill_family(process)
        output.seek(0)
        errors.seek(0)
        return Ended(code, end, output.read(), errors.read())


def one_thread(**more: str) -> dict[str, str]:
    """The environment of a process that computes on one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def patience(seconds: float) -> float:
    """`seconds`, longer where more programs run than there are cores: a machine with other work makes no row fail."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def kill_family(process: subprocess.Popen[Any]) -> None:
    """The process and all that it started, at once, as a power cut would; nothing where it has ended."""
    if process.poll() is not None:  # its number may be another's by now
        return
    family = [process.pid]
    for pid in family:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                family += map(int, children.read_text().split())
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def fresh(*words: str, cache: str = "off") -> str:
    """What a fresh interpreter prints, on one thread, with this clone's autoshard."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = one_thread(PYTHONPATH=path, AUTOSHARD_CACHE=cache)
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def measured(name: str, *values: object) -> Any:
    """What `measure` of a benchmark gives for these JSON values, in a fresh process."""
    work = (
        f"import json, sys; from benchmarks.{name} import measure; print(json.dumps(measure(*json.loads(sys.argv[1]))))"
    )
    return json.loads(fresh("-W", "ignore", "-c", work, json.dumps(values)).splitlines()[-1])


def rows_of(file: str) -> dict[str, Any]:
    """A file of TOML beside the benchmarks."""
    return tomllib.loads((ROOT / "benchmarks" / file).read_text(encoding="utf-8"))


def planned(graph: Graph, hardware: str, mesh: Mesh, style: str | int = "best") -> Plan:
    """The best plan of a style, or the random one of a seed."""
    from autoshard.cluster.hardware import load_hardware
    from autoshard.formulation.planning_context import PlanningContext
    from autoshard.search.fixed_styles import random_plan
    from autoshard.search.search_request import SearchRequest
    from autoshard.search.select_plan import search

    if isinstance(style, int):
        return random_plan(PlanningContext(graph, mesh, load_hardware(hardware)), style)
    return search(graph, load_hardware(hardware), SearchRequest(mesh, strategy=style))
