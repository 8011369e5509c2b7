"""Printed commands and hints are typed through a shell: they arrive as meant, and work."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cli import commands
from autoshard.cluster.hardware import load_hardware
from autoshard.code_text import typed, typed_lines
from autoshard.emit.code_lines import docstring
from autoshard.ir import graph_json, plan_json
from autoshard.ir.mesh import Mesh
from autoshard.replay.command_line import command
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.text.plan_summary import next_command
from autoshard.whole_step_search.best_first import _untried
from autoshard.whole_step_search.config_space import ParallelConfig
from tests.graphs import mlp_graph
from tests.hangs import HANGS
from tests.slow import quick_at

# --- commands that are printed are typed through a shell as they stand, and arrive as they were meant ---


NAMES = (
    "a b", "a\nb", "$(touch planted)", "`touch planted`", "a'b", 'a"b', "-x", "--json", "a;b", "a&b", "a|b", "*", "~",
    "~x",
    "#x", "a\\", "a\\nb", "\tx", "!x", "{a,b}", "$HOME", "é", "名", "a\u202eb", "a\x1b[31m", "a\x017", "<x>", "a=b",
    "''",
)  # fmt: skip
_CODE = "import json, os, sys; print(json.dumps([os.fsencode(word).hex() for word in sys.argv[1:]]))"
ECHO = shlex.join([sys.executable, "-c", _CODE])
TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=20)


def arrived(command_text: str, folder: Path, program: str = "autoshard") -> list[str]:
    """The words that `program` is given when a shell reads this. Nothing else may be run, and nothing written."""
    script = f'{program}() {{ {ECHO} "$@"; }}\n{command_text}\n'
    environment = {"PATH": "/nowhere", "HOME": "/nowhere", "LC_ALL": "C"}
    shell = ["/bin/bash", "--norc", "-c", script]
    done = subprocess.run(shell, capture_output=True, text=True, cwd=folder, env=environment, timeout=HANGS)
    assert done.returncode == 0 and not done.stderr, (command_text, done.stderr)
    assert not [*folder.iterdir()]
    return [bytes.fromhex(word).decode("utf-8") for word in json.loads(done.stdout)]


def test_each_name_arrives(tmp_path: Path) -> None:
    text = f"autoshard {typed(*NAMES)}"
    assert "\n" not in text and text.isprintable()
    assert arrived(text, tmp_path) == [*NAMES]
    lines = typed_lines(text, 30)
    assert len(lines) > 5 and arrived("\n".join(lines), tmp_path) == [*NAMES]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(words=st.lists(TEXT, min_size=1, max_size=30))
def test_any_words_arrive(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("w")
    assert arrived("\n".join(typed_lines(f"autoshard {typed(*words)}", 60)), folder) == words


def test_a_path_is_no_option(tmp_path: Path) -> None:
    assert arrived(f"autoshard verify {typed(Path('-x'))}", tmp_path) == ["verify", "./-x"]


def test_a_docstring_shows_a_command_as_it_is_typed(tmp_path: Path) -> None:
    lines = docstring("\n".join(["Made by", *typed_lines(f"autoshard {typed(*NAMES[:20])}", 30)]), 0)
    assert arrived("\n".join(lines[1:-1]), tmp_path) == [*NAMES[:20]]
    namespace: dict[str, object] = {}
    exec("\n".join(lines), namespace)


@pytest.mark.parametrize("name", quick_at((name for name in NAMES if name not in ("~", "''")), 18))
def test_what_is_printed_is_typed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of `plan` and of the package that it writes into a folder of this name."""
    (tmp_path / "w").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "w")
    graph = Path(f"./{name}.json")
    graph.write_text(graph_json.dumps(mlp_graph(1)), encoding="utf-8")
    out = f"./{name}" if name.startswith("-") else name
    words = [str(graph) if not name.startswith("-") else f"./{graph}", "--mesh", "dp=2", "--hardware", "a100-80g-sxm"]
    assert commands.main(["plan", *words, "--strategy", "random:1", f"--out={out}"]) == 0
    (following,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    typed = arrived(following.removeprefix("next: "), tmp_path / "empty", "torchrun")
    assert typed[:2] == ["--nproc-per-node", "2"] and (tmp_path / "w" / typed[2]).samefile(Path(name) / "train.py")
    plan = plan_json.load(Path(name) / "plan.json")
    plan_args = arrived(command(plan), tmp_path / "empty")
    assert plan_args[0] == "plan" and (tmp_path / "w" / plan_args[1]).samefile(graph)
    head = (Path(name) / "model_parallel.py").read_text(encoding="utf-8").partition("autoshard plan")[2]
    shown = "autoshard plan" + head.partition("\nPredicted for")[0]
    assert arrived(shown, tmp_path / "empty") == plan_args
    inference = next_command(replace(plan, model="m.py:f"), replace(mlp_graph(1), loss=None), Path(name))
    checked = arrived(inference.partition("; ")[0], tmp_path / "empty")
    assert checked[0] == "verify" and (tmp_path / "w" / checked[1]).samefile(name)
    assert os.listdir(tmp_path / "empty") == []


def test_hints_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    graph_json.save(mlp_graph(1), "$(x) y.json")
    base = ["plan", "./$(x) y.json", "--mesh", "dp=2", "--hardware", "a100-80g-sxm", "--strategy", "random:1"]
    assert commands.main([*base, "--out", "a b$(x)"]) == 0
    tried = {
        ("report", "a b$(x)", "a b$(x)", "--svg"): ["report", "a b$(x)", "--svg"],
        (*base, "--eval", "--out", "o"): ["trace", "MODEL", "--eval", "…", "-o", "./$(x) y.json"],
    }
    for words, expected in tried.items():
        capsys.readouterr()
        assert commands.main(words) == 2
        hint = capsys.readouterr().err.partition("  try: ")[2].strip()
        assert [w.removeprefix("./") for w in arrived(hint, tmp_path / "empty")] == [
            w.removeprefix("./") for w in expected
        ]
    (tmp_path / "a b$(x)" / "verification.json").write_text("{")
    assert commands.main(["report", "a b$(x)"]) == 5
    hint = capsys.readouterr().err.partition("  try: ")[2].strip()
    assert arrived(hint.partition(", or")[0], tmp_path / "empty", "rm") == ["a b$(x)/verification.json"]
    assert arrived(hint.partition("again: ")[2], tmp_path / "empty") == ["verify", "a b$(x)"]


# --- every hint that names options or a command is typed: it works, or what is then wrong is something else ---


GRAPH, OUT = "m.graph.json", "one"
PLAN = f"plan {GRAPH} --hardware a100-80g-sxm --out other"
ON4 = f"{PLAN} --mesh dp=2,tp=2"
STEP = f"{PLAN} --devices 4 --global-batch 256"
# what is typed; where there is none, its hint proposes no option
TYPED = [
    f"{PLAN} --mesh dp=4,pp=2",
    f"{PLAN} --mesh fsdp=8",
    f"{PLAN} --mesh dp=2,fsdp=2",
    f"{PLAN} --mesh fsdp=2,tp=2",
    f"{PLAN} --mesh dp=2,sp=2",
    f"{PLAN} --mesh ga=4,dp=2",
    f"{PLAN} --mesh zero1=4",
    f"{PLAN} --mesh vpp=2,pp=2,dp=2",
    f"{PLAN} --mesh dp=0,tp=2",
    f"{PLAN} --mesh dp=2,dp=2",
    f"{PLAN} --mesh 2x2",
    PLAN,
    f"{ON4} --devices 8",
    f"{ON4} --pin h.0.fc=tp",
    f"{ON4} --pin h.0.fc=dp",
    f"{ON4} --pin h.0.fc=column-parallel",
    f"{ON4} --pin h.0.fc=colum-parallel@tp",
    f"{ON4} --pin 'h.0.fc=Shard(1)'",
    f"{ON4} --pin 'h.0.fc=Shard(1)@pp'",
    f"{ON4} --pin h.0.fc=fsdp",
    f"{ON4} --pin h.0.fc=Shrd(1)@tp",
    f"{ON4} --pin h.0.fc",
    f"{ON4} --level fast",
    f"{ON4} --strategy fdsp",
    f"{ON4} --strategy random",
    f"{ON4} --solver propagate",
    f"{ON4} --solver exhaustive",
    f"{ON4} --fuse all_reduc=auto",
    f"{ON4} --fuse all_reduce=5",
    f"{ON4} --memory-limit 60",
    f"{ON4} --time-limit 10",
    f"{ON4} --precision bf16",
    f"{ON4} --precision fp8-mixed",
    f"{ON4} --mode semi-autoo",
    f"{ON4} --mode data-parallel --pin 'h.0.fc=Shard(1)@tp'",
    f"{ON4} --mode stand-alone",
    f"{ON4} --zero 7",
    f"{ON4} --gradient-accumulation-shard",
    f"{ON4} --schedule 1f1b",
    f"{ON4} --stages 2 --micro-batches 2 --schedule ifib",
    f"{ON4} --stages 2 --micro-batches 2 --virtual-stages 2 --schedule 1f1b",
    f"{ON4} --stages 2 --micro-batches 3 --virtual-stages 2",
    f"{ON4} --stages 2 --micro-batches 0",
    f"{ON4} --stages 2 --micro-batches 2 --pin stage:h.0=5",
    f"{ON4} --stages 50 --micro-batches 64",
    f"{ON4} --recompute half",
    f"{ON4} --recompute none,full",
    f"{ON4} --memory-limit 100KiB",
    f"{ON4} --stages 2 --micro-batches 2 --memory-limit 100KiB",
    f"{ON4} --micro-batches 2 --recompute full --memory-limit 100KiB",
    f"{ON4} --bogus",
    f"{ON4} --recomput full",
    f"{STEP} --memory-limit 100KiB",
    f"{STEP} --memory-limit 100KiB --zero 3 --recompute full --micro-batch 1",
    f"{STEP} --strategy hsdp",
    f"{STEP} --expert-parallel 4",
    f"{PLAN} --global-batch 256 --stages 2,3 --mesh dp=2",
    f"{PLAN} --devices 6 --stages 4 --micro-batches 4",
    f"explain {OUT} --why-not fsdp",
    f"explain {OUT} --why-not column-parallel",
    f"explain {OUT} h.0.fc --why-not column-parallel",
    f"explain {OUT} h.0.fc --why-not tp",
    f"explain {OUT} h.0.fc --why-not megatron",
    f"explain {OUT} h.0.fc --why-not 'Shard(7)'",
    f"explain {OUT} --why-not Replicate@tp",
    f"explain {OUT} h.9.fc",
    f"simulate {OUT} --export profile",
    f"report {OUT} {OUT} --svg",
    "explain nowhere",
    "profiles b20",
    "prove relu --seeds 0",
    "prove relu --mesh tp=999",
    "prove relu --mesh pp=2",
    "plann x",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("hints")
        patch.chdir(path)
        Path(GRAPH).write_text(graph_json.dumps(mlp_graph(2, 64, 256)), encoding="utf-8")
        assert commands.main(f"plan {GRAPH} --mesh dp=2,tp=2 --hardware a100-80g-sxm --out {OUT}".split()) == 0
        yield path


def proposals(hint: str) -> list[str]:
    """The commands, options and placements that a hint names, each of them as it would be typed."""
    quoted: list[str] = []
    bare = re.sub("'[^']*'", lambda match: quoted.append(match[0]) or f"<{len(quoted) - 1}>", hint)  # type: ignore[func-returns-value]
    parts = re.split(r"(?:,? or |, and |, (?=[^\d()]*$)|; |, (?=--|Shard|Repl))", bare)
    whole = [re.sub(r"<(\d+)>", lambda match: quoted[int(match[1])], part.strip(" .:")) for part in parts]
    return [part for part in whole if re.match(r"--[a-z]|autoshard |\S+@\w+$", part)]


def retyped(words: list[str], proposal: str) -> list[list[str]]:
    """The command lines to type in place of `words`."""
    if proposal.startswith("autoshard "):
        return [shlex.split(line)[1:] for line in proposal.split(" && ")]
    if not proposal.startswith("--"):
        return [[re.sub(r"=.*", f"={proposal}", w) if n == _last_how(words) and "=" in w else
                 proposal if n == _last_how(words) else w for n, w in enumerate(words)]]  # fmt: skip
    proposed = shlex.split(re.split(r": | \((?=[^']*(?:'[^']*'[^']*)*$)", proposal)[0])  # outside of quotes
    if len(proposed) == 1:  # a misspelt option, or its value as it stands
        return [[proposed[0] if word.startswith("--") and proposed[0].startswith(word[:6]) else word for word in words]]
    new, starts = list(words), [n for n, word in enumerate(proposed) if word.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(proposed)], strict=True):
        option, value = proposed[start], proposed[start + 1 : end]
        while option in new:
            place = new.index(option)
            del new[place : place + 1 + (len(new) > place + 1 and not new[place + 1].startswith("--"))]
        new += [option, *value]
    return [new]


def _last_how(words: list[str]) -> int:
    return 1 + max(n for n, word in enumerate(words) if word in ("--pin", "--why-not"))


def kind(message: str) -> str:
    """A message without what is quoted and counted."""
    return re.sub(r"\d+|'[^']*'", "#", message.splitlines()[0]) if message else ""


@pytest.mark.parametrize("line", quick_at(TYPED, 25, 50, 55, 60, 65))
def test_what_is_proposed_works(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)
    assert commands.main(words) in (2, 3, 5)
    first = capsys.readouterr().err
    first = first[first.index("autoshard: ") :]
    hint = first.rstrip().splitlines()[-1]
    assert hint.startswith("  try: ")
    for proposal in proposals(hint.removeprefix("  try: ")):
        if "DIR" in proposal.split() or "MODEL" in proposal or "--help" in proposal or "…" in proposal:
            continue
        bare = words[: words.index("--pin")] if ", without this" in hint else words
        for retry in retyped(bare, proposal):
            try:
                code = commands.main(retry)
            except SystemExit as ended:
                code = int(ended.code or 0)
            err = capsys.readouterr().err
            err = err[err.index("autoshard: ") :] if "autoshard: " in err else ""
            assert code != 1, f"{proposal}: {err}"
            same = err.splitlines()[-1:] == [hint] if code == 3 else kind(err) == kind(first)  # memory: other advice
            assert code == 0 or not same, f"{shlex.join(retry)}\n{err}"


NEXT = [  # (hardware, devices, bytes a device) -> what is proposed
    ("a100-80g-sxm", "dp=2,tp=2", 1e9, "torchrun --nproc-per-node 4 out/train.py --backend gloo --steps 5"),
    ("h100-80g-sxm", "dp=8", 24e9, "torchrun --nproc-per-node 8 out/train.py --backend nccl --steps 100"),
    ("ascend-910b4", "dp=8", 24e9, "torchrun --nproc-per-node 8 out/train.py --backend hccl --steps 100"),
    ("mi300x-192g", "dp=8", 24e9, "torchrun --nproc-per-node 8 out/train.py --backend nccl --steps 100"),
    ("cpu-local", "dp=8", 4e9, "torchrun --nproc-per-node 8 out/train.py --backend gloo --steps 5"),
]


@pytest.mark.parametrize(("name", "mesh", "held", "said"), NEXT, ids=[row[0] for row in NEXT])
def test_the_next_command_is_for_where_it_can_run(name: str, mesh: str, held: float, said: str) -> None:
    """gloo where the CPUs here can hold all devices, else what the devices of the profile have."""
    graph, hardware = mlp_graph(2, 64, 256), load_hardware(name)
    plan = replace(search(graph, hardware, SearchRequest(Mesh.parse(mesh), strategy="dp")), predicted_peak_bytes=held)
    typed, _, comment = next_command(plan, graph, "out").partition("  # ")
    assert typed == said
    assert shlex.split(next_command(plan, graph, "out"), comments=True) == shlex.split(said)
    assert bool(comment) == (name != "cpu-local")


def test_words_that_plans_are_printed_in_are_pins(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = [*shlex.split(ON4), "--json", "--pin"]
    same = ["Shard(1)@tp", "column-parallel@tp", "column-parallel over tp", "colwise@tp", "Column_Parallel@tp"]
    strategies = set()
    for how in same:
        assert commands.main([*one, f"h.0.fc={how}"]) == 0
        plan = plan_json.load("other/plan.json")
        strategies.add(next(op.strategy for op in plan.ops if op.op == "linear_0"))
    assert len(strategies) == 1
    assert commands.main([*one, "h.0.fc=row-parallel@tp"]) == 0
    plan = plan_json.load("other/plan.json")
    assert next(op.strategy for op in plan.ops if op.op == "linear_0") not in strategies
    capsys.readouterr()
    assert commands.main([*one, "h.0.fc=vocabulary-parallel@tp"]) == 2
    offered = re.search(r"\(over tp it offers: ([^)]*)\)", capsys.readouterr().err)
    assert offered and {"column-parallel", "row-parallel", "batch split"} <= {*offered[1].split(", ")}


PROBLEMS = [  # (zero, kept, samples of a micro-batch) -> what is advised beside more devices
    (0, ("all",), 4, ["--zero 3", "--recompute full", "--micro-batch 1"]),
    (3, ("all", "input"), 1, []),
    (3, ("all", "expensive"), 1, ["--recompute full"]),
    (1, ("input",), 1, ["--zero 3"]),
]


@pytest.mark.parametrize(("zero", "keeps", "samples", "advised"), PROBLEMS)
def test_nothing_is_advised_that_was_had(zero: int, keeps: tuple[str, ...], samples: int, advised: list[str]) -> None:
    problem = SimpleNamespace(choice=ParallelConfig(2, 1, "1f1b", 2, 2, samples, 4, zero), keeps=(keeps,))
    hint = _untried([problem], 3.0)  # type: ignore[list-item]
    assert re.findall("--(?!devices)[a-z-]+ [a-z0-9]+", hint) == advised and "--devices 32" in hint
