"""Every hint that names options or a command is typed: it works, or what is then wrong is something else."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autoshard.cli import commands
from autoshard.cluster.hardware import load_hardware
from autoshard.ir import graph_json, plan_json
from autoshard.ir.mesh import Mesh
from autoshard.joint.found_steps import _untried
from autoshard.joint.outer_space import OuterChoice
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.text.plan_summary import next_command
from tests.graphs import mlp_graph

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
        made = tmp_path_factory.mktemp("hints")
        patch.chdir(made)
        Path(GRAPH).write_text(graph_json.dumps(mlp_graph(2, 64, 256)), encoding="utf-8")
        assert commands.main(f"plan {GRAPH} --mesh dp=2,tp=2 --hardware a100-80g-sxm --out {OUT}".split()) == 0
        yield made


def proposals(hint: str) -> list[str]:
    """The commands, options and placements that a hint names, each of them as it would be typed."""
    quoted: list[str] = []
    bare = re.sub("'[^']*'", lambda found: quoted.append(found[0]) or f"<{len(quoted) - 1}>", hint)  # type: ignore[func-returns-value]
    parts = re.split(r"(?:,? or |, and |, (?=[^\d()]*$)|; |, (?=--|Shard|Repl))", bare)
    whole = [re.sub(r"<(\d+)>", lambda found: quoted[int(found[1])], part.strip(" .:")) for part in parts]
    return [part for part in whole if re.match(r"--[a-z]|autoshard |\S+@\w+$", part)]


def retyped(words: list[str], proposal: str) -> list[list[str]]:
    """The command lines to type in place of `words`."""
    if proposal.startswith("autoshard "):
        return [shlex.split(line)[1:] for line in proposal.split(" && ")]
    if not proposal.startswith("--"):
        return [[re.sub(r"=.*", f"={proposal}", w) if n == _last_how(words) and "=" in w else
                 proposal if n == _last_how(words) else w for n, w in enumerate(words)]]  # fmt: skip
    own = shlex.split(re.split(r": | \((?=[^']*(?:'[^']*'[^']*)*$)", proposal)[0])  # outside of quotes
    if len(own) == 1:  # a misspelt option, or its value as it stands
        return [[own[0] if word.startswith("--") and own[0].startswith(word[:6]) else word for word in words]]
    new, given = list(words), [n for n, word in enumerate(own) if word.startswith("--")]
    for start, end in zip(given, [*given[1:], len(own)], strict=True):
        option, value = own[start], own[start + 1 : end]
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


@pytest.mark.parametrize("line", TYPED)
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
        for again in retyped(bare, proposal):
            try:
                code = commands.main(again)
            except SystemExit as ended:
                code = int(ended.code or 0)
            told = capsys.readouterr().err
            told = told[told.index("autoshard: ") :] if "autoshard: " in told else ""
            assert code != 1, f"{proposal}: {told}"
            same = told.splitlines()[-1:] == [hint] if code == 3 else kind(told) == kind(first)  # memory: other advice
            assert code == 0 or not same, f"{shlex.join(again)}\n{told}"


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
    problem = SimpleNamespace(choice=OuterChoice(2, 1, "1f1b", 2, 2, samples, 4, zero), keeps=(keeps,))
    hint = _untried([problem], 3.0)  # type: ignore[list-item]
    assert re.findall("--(?!devices)[a-z-]+ [a-z0-9]+", hint) == advised and "--devices 32" in hint
