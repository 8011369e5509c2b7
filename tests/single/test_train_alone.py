"""The emitted train.py and convert.py in this process on one device: what they print, save, resume, read and refuse."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.graph_capture.load_model import load_model
from autoshard.ir.mesh import Mesh
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.search.fixed_styles import random_plan
from autoshard.verification.ranks.loaded_package import LoadedPackage
from tests.slow import quick_at
from tests.whole_packages import loaded_from

MODEL = f"{__file__}:tagger"
LOADER = """
import torch
def make(seed, inputs):
    for number in range(3):
        yield {"labels": torch.full((4, 6), number), "ids": torch.full((4, 6), number), "more": 0}
def nothing():
    return []
def sized(batch_size, seed, workers=2):
    return []
"""


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11)
        self.free = torch.nn.Parameter(torch.ones(8) * 3)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.table(ids) * self.free).flatten(0, 1), labels.flatten())


def tagger() -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
    return Tagger(), tuple(torch.randint(0, 11, (4, 6)) for _ in range(2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emitted(tmp_path_factory.mktemp("alone") / "package")


def emitted(out: Path) -> Path:
    graph = capture(MODEL, {})
    plan = random_plan(PlanningContext(graph, Mesh.parse("dp=1"), load_hardware("cpu-local")), 0)
    write_package(out, emit(lower(plan, graph), plan, graph))
    (out.parent / "data.py").write_text(LOADER)
    return out


@pytest.fixture
def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadedPackage]:
    yield from loaded_from(folder, monkeypatch)


@pytest.fixture
def whole_package(whole_packages: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadedPackage]:
    yield from loaded_from(emitted(tmp_path / "package"), monkeypatch)


Start = Callable[..., tuple[int, str, str]]


@pytest.fixture
def start(package: LoadedPackage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    """Runs train.py with these options; gives its code, and what it said."""

    def run(*options: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", "--backend", "gloo", *map(str, options)])
        code = package.train.main()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return (code, *capsys.readouterr())

    return run


def steps(said: str) -> dict[int, tuple[str, str]]:
    pattern = r"^step (\d+): loss (\S+), gradient norm (\S+), [\d.]+ ms, \d+ tokens/s$"
    return {int(n): (loss, norm) for n, loss, norm in re.findall(pattern, said, re.MULTILINE)}


def test_saved_and_resumed_it_goes_on_as_if_it_had_not_stopped(
    start: Start, package: LoadedPackage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ("--steps", 5, "--seed", 7, "--lr", 1e-2, "--save", tmp_path, "--save-every", 2)
    code, straight, _ = start(*options)
    assert code == 0 and sorted(steps(straight)) == [1, 2, 3, 4, 5]
    assert "note" not in straight  # how the model makes its parameters is known
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-4", "step-5"]
    (tmp_path / "step-10").mkdir()  # no checkpoint
    (tmp_path / "step-best").mkdir()
    code, resumed, _ = start("--steps", 5, "--resume", tmp_path / "step-2")
    assert code == 0 and f"resumed {tmp_path / 'step-2'} at step 2" in resumed and "note" not in resumed
    assert steps(resumed) == {n: values for n, values in steps(straight).items() if n > 2}
    code, last, _ = start("--steps", 5, "--resume", tmp_path)
    assert f"resumed {tmp_path / 'step-5'} at step 5" in last and "nothing to do: 5 steps are done" in last
    waits: list[torch.device] = []  # a step that is told is timed from an idle device to an idle device
    monkeypatch.setattr(package.train, "synchronise", waits.append)
    assert sorted(steps(start("--steps", 5, "--log-every", 2)[1])) == [2, 4, 5] and len(waits) == 2 * 3
    assert steps(start("--steps", 1)[1]) == steps(start("--steps", 1, "--seed", 0)[1])


def test_options_count(start: Start) -> None:
    code, said, _ = start("--dry-run")
    assert code == 0 and "mesh dp=1 on cpu: 195 parameters, 195 on rank 0" in said
    assert "  input ids: global (4, 6), local (4, 6)" in said and not steps(said)
    first = steps(start("--steps", 2, "--seed", 3)[1])
    assert first == steps(start("--steps", 2, "--seed", 3)[1]) != steps(start("--steps", 2, "--seed", 4)[1])
    assert first[1] == steps(start("--steps", 2, "--seed", 3, "--lr", 0.5)[1])[1]
    assert first[2] != steps(start("--steps", 2, "--seed", 3, "--lr", 0.5)[1])[2]
    assert first[2] != steps(start("--steps", 2, "--seed", 3, "--max-norm", 1e-9)[1])[2]


def test_loaders_are_read_in_order_and_begin_again(start: Start, folder: Path, tmp_path: Path) -> None:
    data = f"{folder.parent / 'data.py'}:make"
    one = steps(start("--steps", 4, "--lr", 0, "--seed", 1, "--data", data, "--save", tmp_path, "--save-every", 1)[1])
    assert one[1] == one[4] and len({one[1], one[2], one[3]}) == 3
    assert steps(start("--steps", 4, "--data", data, "--resume", tmp_path / "step-2")[1]) == {3: one[3], 4: one[4]}
    code, _, said = start("--data", f"{folder.parent / 'data.py'}:nothing")
    assert code == 2 and "the loader yields no batch" in said
    code, _, said = start("--data", f"{folder.parent / 'data.py'}:sized")
    assert code == 2 and "sized: the function asks for batch_size, and is given any of mesh, rank, seed" in said
    assert "has no function 'other'" in start("--data", f"{folder.parent / 'data.py'}:other")[2]


def test_weights_of_the_original_give_its_loss_and_come_back(
    start: Start, package: LoadedPackage, folder: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, _ = load_model(MODEL, {}, "cpu")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    data = f"{folder.parent / 'data.py'}:make"
    options = ("--steps", 1, "--lr", 0, "--data", data, "--weights", tmp_path / "weights.pt")
    said = start(*options, "--save", tmp_path / "saved")[1]
    batch = torch.zeros(4, 6, dtype=torch.int64)
    assert float(steps(said)[1][0]) == pytest.approx(float(model(batch, batch).detach()), abs=2e-6)

    import convert  # type: ignore[import-not-found]  # the package's own

    for name in ("back.pt", "back.safetensors"):
        convert.to_original(tmp_path / "saved" / "step-1", tmp_path / name)
        weights = convert.read_state_dict(tmp_path / name)
        assert weights.keys() == model.state_dict().keys()
        assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    for _ in range(2):  # the second replaces the first
        assert convert.to_sharded(tmp_path / "weights.pt", str(tmp_path / "sharded")) == []
    resumed = start("--steps", 1, "--lr", 0, "--data", data, "--resume", tmp_path / "sharded")[1]
    assert steps(resumed)[1] == steps(said)[1]
    with pytest.raises(ValueError, match=r"expected .safetensors, .pt or .bin, got 'back.txt'"):
        convert.to_original(tmp_path / "saved" / "step-1", tmp_path / "back.txt")
    assert not list(tmp_path.glob("back.txt*"))
    with pytest.raises(ValueError, match=r"expected .safetensors, .pt or .bin, got 'back.txt'"):
        convert.read_state_dict(tmp_path / "back.txt")
    state = model.state_dict()
    del state["free"]
    torch.save(state, tmp_path / "lacking.pt")
    code, _, said = start("--weights", tmp_path / "lacking.pt")
    assert code == 2 and f"error: --weights {tmp_path / 'lacking.pt'}: " in said and "free" in said


def test_only_a_buffer_that_no_state_dict_holds_is_made_anew(whole_package: LoadedPackage) -> None:
    """What a state dict holds has its value by then: of the weights, or of a start."""
    import start_state  # type: ignore[import-not-found]  # the package's own

    mesh = whole_package.runtime.ParallelMesh({"dp": 1}, 0, lambda *_: None, torch.device("cpu"))
    model = torch.nn.Module()
    for name, saved in (("saved", True), ("unsaved", False)):
        held = whole_package.runtime.shard_buffer(name, (3,), "R", mesh, init=("constant", 1.0))
        model.register_buffer(name, held, persistent=saved)
        whole_package.runtime.assign(held, torch.full((3,), 5.0))
    start_state.fill_unsaved(model, {}, 0)
    buffers = {name: whole_package.runtime.local(held).tolist() for name, held in model.named_buffers()}
    assert buffers == {"saved": [5.0] * 3, "unsaved": [1.0] * 3}


def test_weights_as_training_scripts_save_them_are_found_or_the_message_says_what_is_there(
    start: Start, tmp_path: Path
) -> None:
    state = load_model(MODEL, {}, "cpu")[0].state_dict()
    optimizer = {"state": {0: {"step": torch.zeros(())}}, "param_groups": [{"lr": 0.1}]}
    wrapped = {f"module.{name}": x for name, x in state.items()}
    for content, said in (
        ({"model": state, "optimizer": optimizer, "epoch": 3}, ""),
        ({"model": state, "ema": state}, "holds several state dicts, model, ema: save one of them by itself"),
        ({"epoch": 3, "lr": 0.1}, "holds no state dict, but epoch, lr"),
        (wrapped, "it has them with 'module.' before their names\n  try: save {name.removeprefix('module.'): x"),
        ({"model": wrapped}, "it has them with 'module.' before"),
    ):
        torch.save(content, tmp_path / "weights.pt")
        code, _, error = start("--steps", 1, "--weights", tmp_path / "weights.pt")
        assert code == (2 if said else 0) and said in error


def test_batches_are_checked(package: LoadedPackage, start: Start) -> None:
    """Names in any order, positions, dtypes; one sentence for what does not fit."""
    train = package.train
    whole = train.ParallelMesh({"dp": 1}, 0, lambda *_: None, torch.device("cpu"))
    ids = torch.randint(0, 11, (4, 6), dtype=torch.int32)
    checked = package.batches.checked
    inputs = checked({"labels": ids + 1, "ids": ids}, whole)
    assert torch.equal(inputs[0], ids.long()) and torch.equal(inputs[1], ids.long() + 1)
    assert inputs[0].dtype == torch.int64
    assert torch.equal(checked([ids, ids + 1], whole)[1], ids.long() + 1)
    for batch, words in (
        ({"ids": ids}, "the batch lacks labels: it has ids"),
        ([ids], "a batch must hold 2 tensors (ids, labels), got 1 tensors"),
        ([ids, [1]], "input 'labels': expected a tensor, got list"),
        ([ids, ids.float()], "input 'labels': expected torch.int64, got torch.float32"),
        ([ids, ids[:3]], "expected the global shape (4, 6) or the local (4, 6), got (3, 6)\n  try: drop_last=True"),
    ):
        with pytest.raises(train.BatchError, match=re.escape(words)):
            checked(batch, whole)


def test_the_rate_counts_tokens(package: LoadedPackage) -> None:
    assert package.train.rate(2.0, [[]], None) == "12 tokens/s"
    for kind, shape, words in (
        ("float32", (6, 5), "3 samples/s"),
        ("int64", (6,), "3 samples/s"),
        ("int64", (), "0 s"),
    ):
        package.model.INPUTS.clear()
        package.model.INPUTS["x"] = (shape, kind, "R", 0, 1)
        assert package.train.rate(2.0, [[]], None).startswith(words)


def test_the_rate_rises_falls_and_goes_on_where_it_was(start: Start, tmp_path: Path) -> None:
    shape = ("--steps", 6, "--lr", 0.5, "--schedule", "linear", "--warmup", 2, "--lr-least", 0.25)
    log, other = tmp_path / "log" / "run.jsonl", tmp_path / "other.jsonl"
    code, straight, _ = start(*shape, "--log-json", log, "--save", tmp_path / "saved", "--save-every", 3)
    assert code == 0
    said = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in said] == [1, 2, 3, 4, 5, 6]
    assert [row["lr"] for row in said] == pytest.approx([1 / 6, 1 / 3, 0.5, 0.40625, 0.3125, 0.21875])
    assert {"loss", "gradient_norm", "seconds"} < said[0].keys()
    code, resumed, _ = start(*shape[:2], *shape[4:], "--resume", tmp_path / "saved" / "step-3", "--log-json", other)
    assert steps(resumed) == {n: values for n, values in steps(straight).items() if n > 3}
    assert [json.loads(line)["lr"] for line in other.read_text().splitlines()] == [row["lr"] for row in said[3:]]


def test_matrices_decay_and_norms_do_not(package: LoadedPackage, start: Start) -> None:
    mesh = package.runtime.ParallelMesh({"dp": 1}, 0, lambda *_: None, torch.device("cpu"))
    model = package.model.build_model(mesh)
    groups = package.train.make_optimizer(model, weight_decay=0.3).param_groups
    shapes = [[len(package.runtime.sharding(p).shape) for p in group["params"]] for group in groups]
    assert [set(dims) for dims in shapes] == [{2}, {1}] and [g["weight_decay"] for g in groups] == [0.3, 0.0]
    plain = steps(start("--steps", 2, "--lr", 0.1)[1])
    decayed = steps(start("--steps", 2, "--lr", 0.1, "--weight-decay", 9)[1])
    assert plain[1] == decayed[1] and plain[2] != decayed[2]
    model.requires_grad_(False).get_parameter("head.weight").requires_grad_(True)
    groups = package.train.make_optimizer(model, weight_decay=0.3).param_groups
    assert [len(group["params"]) for group in groups] == [1, 0]  # two, as in a checkpoint of stages


def test_a_weight_decay_that_is_asked_for_holds_after_resuming(start: Start, tmp_path: Path) -> None:
    """Of a checkpoint without groups, and of one with another decay: the next update is that of the new one."""
    options = ("--steps", 2, "--lr", 0.1)
    start("--steps", 1, "--lr", 0.1, "--save", tmp_path / "none")
    start("--steps", 1, "--lr", 0.1, "--weight-decay", 0.0, "--save", tmp_path / "other")
    requested = (*options, "--weight-decay", 9, "--save")
    for before in ("none", "other"):
        assert start(*requested, tmp_path / f"{before}-9", "--resume", tmp_path / before)[0] == 0
        groups = json.loads((tmp_path / f"{before}-9" / "step-2" / "training.json").read_text())["groups"]
        assert [group["weight_decay"] for group in groups] == [9, 0]


def test_how_a_device_steps_is_no_matter_of_a_checkpoint(package: LoadedPackage, start: Start, tmp_path: Path) -> None:
    """A run on Ascend has no fused kernel, whatever the one had that wrote the checkpoint."""
    assert start("--steps", 1, "--save", tmp_path)[0] == 0
    file = tmp_path / "step-1" / "training.json"
    training = json.loads(file.read_text())
    file.write_text(json.dumps(training | {"groups": [g | {"fused": False} for g in training["groups"]]}))
    assert training["groups"][0]["fused"] is True
    start("--steps", 2, "--resume", tmp_path, "--save", tmp_path)
    assert json.loads((tmp_path / "step-2" / "training.json").read_text())["groups"][0]["fused"] is True


@pytest.mark.parametrize("name", quick_at(["adamw", "sgd"], 1))
def test_the_optimizer_takes_the_rate(name: str, whole_package: LoadedPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_package.train, "OPTIMIZER", name)
    mesh = whole_package.runtime.ParallelMesh({"dp": 1}, 0, lambda *_: None, torch.device("cpu"))
    optimizer = whole_package.train.make_optimizer(whole_package.model.build_model(mesh), lr=0.0625)
    assert type(optimizer).__name__.lower() == name
    assert [group["lr"] for group in optimizer.param_groups] == [0.0625]


def test_it_is_evaluated_on_batches_of_its_own(start: Start, folder: Path) -> None:
    options = ("--steps", 3, "--data", f"{folder.parent / 'data.py'}:make", "--lr", 0.0)
    held_out = ("--eval-data", f"{folder.parent / 'data.py'}:make", "--eval-every", 2, "--eval-batches", 3)
    code, said, _ = start(*options, *held_out)
    assert code == 0 and sorted(steps(said)) == [1, 2, 3]
    evaluations = re.findall(r"^step (\d): evaluation loss (\S+)$", said, re.MULTILINE)
    assert [step for step, _ in evaluations] == ["2", "3"]
    mean = sum(float(loss) for loss, _ in steps(said).values()) / 3  # the same three batches, and nothing is learnt
    assert [float(loss) for _, loss in evaluations] == pytest.approx([mean, mean], abs=2e-6)
    fewer = start(*options, *held_out[:-1], 5)[1]  # the loader has three: none counts twice
    assert re.findall(r"^step (\d): evaluation loss (\S+)$", fewer, re.MULTILINE) == evaluations
    code, _, said = start("--eval-every", 2)
    assert code == 2 and "--eval-data data.py:make_held_out" in said


def test_only_evaluation_is_without_dropout_and_gradients_of_a_step_end_with_it(
    start: Start, package: LoadedPackage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each forward finds: whether random operators draw, and whether gradients of the step before still live."""
    build, forwards = package.train.build_model, []

    def built(mesh: Any) -> torch.nn.Module:
        model: torch.nn.Module = build(mesh)

        def note(*_: object) -> None:
            held = any(parameter.grad is not None for parameter in model.parameters())
            forwards.append((mesh.random.training, torch.is_grad_enabled() and held))

        model.register_forward_pre_hook(note)
        return model

    monkeypatch.setattr(package.train, "build_model", built)
    data = f"{folder.parent / 'data.py'}:make"
    assert start("--steps", 3, "--eval-data", data, "--eval-every", 1, "--eval-batches", 2)[0] == 0
    assert forwards == [(True, False), (False, False), (False, False)] * 3


STATEFUL = """
import torch
class Loader:
    def __init__(self):
        self.number, self.read = 0, 0
    def __iter__(self):
        while self.number < 50:
            self.number, self.read = self.number + 1, self.read + 1
            yield {"labels": torch.full((4, 6), self.number % 11), "ids": torch.full((4, 6), self.number % 7)}
        self.number = 0
    def state_dict(self):
        return {"number": self.number}
    def load_state_dict(self, state):
        self.number = state["number"]
made = []
def make():
    made.append(Loader())
    return made[-1]
"""


@pytest.mark.parametrize("ahead", quick_at([0, 4], 0))
def test_a_loader_with_a_state_goes_on_where_it_was(start: Start, tmp_path: Path, ahead: int) -> None:
    """Nothing is read again: of a loader that is read ahead the state is that of the batch that was used."""
    (tmp_path / "own.py").write_text(STATEFUL)
    options = ("--steps", 5, "--data", f"{tmp_path / 'own.py'}:make", "--prefetch", ahead)
    code, straight, _ = start(*options, "--save", tmp_path / "saved", "--save-every", 2)
    assert code == 0 and sorted(steps(straight)) == [1, 2, 3, 4, 5]
    assert torch.load(tmp_path / "saved/step-2/loader-0.pt") == {"ranks": 1, "state": {"number": 2}}
    code, resumed, _ = start(*options, "--resume", tmp_path / "saved/step-2")
    assert steps(resumed) == {n: values for n, values in steps(straight).items() if n > 2}
    read = sys.modules["user_data"].made[0].read if "user_data" in sys.modules else None
    assert read is None or read <= 3 + ahead + 1


def test_saved_in_the_background_it_is_what_it_was(
    start: Start, package: LoadedPackage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runtime, under_way = package.train.finish_saving.__globals__, list[int]()
    save = runtime["dcp"].async_save
    noted = lambda *a, **k: (under_way.append(len(runtime["_SAVING"])), save(*a, **k))[1]  # noqa: E731
    monkeypatch.setattr(runtime["dcp"], "async_save", noted)
    options = ("--steps", 4, "--seed", 3, "--lr", 0.1, "--save-every", 1)
    code, straight, _ = start(*options, "--save", tmp_path / "now")
    code, _, _ = start(*options, "--save", tmp_path / "runs" / "later", "--save-async")
    later = tmp_path / "runs" / "later"
    assert code == 0 and sorted(path.name for path in later.iterdir()) == [f"step-{n}" for n in (1, 2, 3, 4)]
    assert under_way == [0, 0, 0, 0], "a save waits for the one before"
    assert not runtime["_HOST_GROUPS"], "nothing may hold a group as a process ends"
    for step in (1, 3):
        code, resumed, _ = start("--steps", 4, "--resume", later / f"step-{step}")
        assert steps(resumed) == {n: values for n, values in steps(straight).items() if n > step}


def test_a_few_steps_are_profiled(start: Start, tmp_path: Path) -> None:
    assert start("--steps", 4, "--profile", tmp_path / "trace", "--profile-steps", "2:3")[0] == 0
    trace = json.loads((tmp_path / "trace" / "rank-0.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert {"ProfilerStep#2", "ProfilerStep#1"} & set(names) and "aten::embedding" in names


class Hostile:
    """Unpickled, it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.target,)


def test_nothing_that_is_read_is_run(
    start: Start, package: LoadedPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weights file is data, and so is the state of a loader in a checkpoint."""
    ran = tmp_path / "ran"
    torch.save({"table.weight": Hostile(ran)}, tmp_path / "weights.pt")
    code, _, said = start("--steps", 1, "--weights", tmp_path / "weights.pt")
    assert code == 2 and "error: --weights" in said and "weights.pt can't be read" in said and not ran.exists()
    torch.save({"ranks": 1, "state": Hostile(ran)}, tmp_path / "loader-0.pt")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.raises(ValueError, match=r"loader-0\.pt can't be read"):
        package.runtime.loader_state(tmp_path)
    assert not ran.exists()


class Buffered(io.StringIO):
    """A stream that a file or a pipe stands behind: what is not flushed nobody reads, and a killed run loses."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.late = 0, list[str]()

    def write(self, text: str) -> int:
        waiting = self.getvalue()[self.seen :]
        self.late += [waiting] if waiting.endswith("\n") else []
        return super().write(text)

    def flush(self) -> None:
        self.seen = len(self.getvalue())


def test_each_line_is_written_as_it_is_said(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Buffered()
    monkeypatch.setattr(sys, "stdout", stream)
    (tmp_path / "data.py").write_text(LOADER)
    data = f"{tmp_path / 'data.py'}:make"
    start("--dry-run")
    start("--steps", 2, "--save", tmp_path / "saved", "--eval-data", data, "--compile", "eager")
    start("--steps", 2, "--resume", tmp_path / "saved")
    said = stream.getvalue()
    prefixes = ("plan ", "  input ids", "compiled ", "step 1: ", "step 2: evaluation ", "resumed ", "nothing to do")
    assert all(f"\n{line}" in f"\n{said}" for line in prefixes), said
    assert not stream.late and stream.seen == len(said), [*stream.late, said[stream.seen :]]


def test_hugging_face_shards_are_read_in_part(start: Start, tmp_path: Path) -> None:
    """A folder with an index, its one file, and the index itself give the same; a missing shard is named."""
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    state = {name: value.contiguous() for name, value in Tagger().state_dict().items()}
    files = {"a.safetensors": ["table.weight", "free"], "b.safetensors": ["head.weight", "head.bias"]}
    (tmp_path / "hub").mkdir()
    for file, names in files.items():
        safetensors.save_file({name: state[name] for name in names}, tmp_path / "hub" / file)
    places = {name: file for file, names in files.items() for name in names}
    index = tmp_path / "hub" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    safetensors.save_file(state, tmp_path / "one.safetensors")
    torch.save(state, tmp_path / "one.pt")
    losses = [steps(start("--steps", 2, "--weights", path)[1]) for path in (
        tmp_path / "one.pt", tmp_path / "one.safetensors", tmp_path / "hub", index)]  # fmt: skip
    assert losses[0] and all(other == losses[0] for other in losses)
    (tmp_path / "hub" / "b.safetensors").unlink()
    code, _, stderr = start("--steps", 2, "--weights", tmp_path / "hub")
    assert code == 2 and "names b.safetensors, which is not in its folder" in stderr


@pytest.mark.filterwarnings("ignore:`load_state_dict` is deprecated:FutureWarning")
def test_a_stage_reads_a_checkpoint_alone_on_an_older_torch_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch 2.6's `load` has no `no_dist`."""
    from torch.distributed import checkpoint as dcp

    from autoshard.emit.runtime import checkpoint

    dcp.save({"x": torch.arange(3.0)}, checkpoint_id=tmp_path / "saved")
    older = {"newer": dcp.load, "2.6": lambda state, *, checkpoint_id=None, planner=None: None}
    for load in older.values():
        monkeypatch.setattr(dcp, "load", load)
        tensors = {"x": torch.zeros(3)}
        checkpoint.load_tensors(tensors, tmp_path / "saved", alone=True)
        assert tensors["x"].tolist() == [0.0, 1.0, 2.0]
