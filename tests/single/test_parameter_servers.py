"""Parameter servers in one process: equal to the original, gradients as old as they may be, convergence, faults."""

from __future__ import annotations

import importlib
import random
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import autoshard
from autoshard.api.live_model import on_cpu
from autoshard.emit import emit
from autoshard.emit.runtime.servers.dealing import Dealer
from autoshard.emit.runtime.servers.parameter_server import ParameterServer, TooOld
from autoshard.emit.runtime.servers.served import Served
from autoshard.emit.runtime.servers.served_table import Lookups, served_table
from autoshard.emit.runtime.servers.server_run import InProcess
from autoshard.errors import InfeasibleError, UsageError
from autoshard.package.package_files import report_text
from autoshard.text.explain import explain
from autoshard.text.plan_summary import as_dict, summary
from autoshard.units import format_bytes
from autoshard.verification.case import case_of, check_files
from autoshard.verification.comparison.proof import Proof
from autoshard.verification.ranks.loaded_package import _private_imports, load_package
from autoshard.verification.verify_folder import by_rows
from tests.slow import quick_at, slow

SHARES = 3


class Reader(nn.Module):
    """Tables that are read once, twice, with padding, as bags, and by computed ids; one that a product reads, too; a
    frozen one; a mean over labels, of which some are ignored, class by class; dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(40, 8, padding_idx=-3), nn.Embedding(6, 8)
        self.bag = nn.EmbeddingBag(50, 8, mode="mean", padding_idx=2)
        self.weighted = nn.EmbeddingBag(31, 8, mode="sum")
        self.tied, self.frozen = nn.Embedding(9, 8), nn.Embedding(40, 8).requires_grad_(False)
        self.up, self.drop = nn.Linear(8, 12), nn.Dropout(0.2)
        self.register_buffer("classes", torch.rand(9) + 0.5)

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        x = self.words(ids) + self.words(ids.flip(1)) + self.places(torch.arange(6)) + self.frozen(ids)
        x = x + self.bag(ids)[:, None] + self.weighted(ids % 31, per_sample_weights=torch.sigmoid(x.sum(2)))[:, None]
        x = F.gelu(self.up(self.drop(x)))[..., :8] + self.tied(tags.clamp(min=0))
        logits = x @ self.tied.weight.T
        return F.cross_entropy(logits.flatten(0, 1), tags.flatten(), self.classes, ignore_index=-1)


def reader_inputs() -> tuple[Tensor, Tensor]:
    tags = torch.randint(0, 9, (4, 6))
    return torch.randint(0, 40, (4, 6)), torch.where(torch.rand(4, 6) < 0.4, -1, tags)


def planned(model: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> Any:
    return autoshard.plan(model, inputs, hardware="a100-80g-sxm", **{"parameter_servers": 3, "workers": 2} | options)


def proof_of(plan: Any, steps: int) -> Proof:
    real = on_cpu(plan.live)
    inner, graph = plan.plan, plan.graph
    case = case_of(
        real.module, real.tensors, graph, steps=steps, micro_batches=inner.step.micro_batches, by_rows=by_rows(inner)
    )
    return check_files(case, plan.simulated.program, emit(plan.simulated.program, inner, graph))


@pytest.mark.parametrize(
    ("optimizer", "tables"), [slow("adamw", "same"), slow("sgd", "same"), ("adamw", "rowwise-adagrad")]
)
def test_synchronous_steps_are_those_of_the_original(optimizer: str, tables: str) -> None:
    torch.manual_seed(0)
    plan = planned(Reader(), reader_inputs(), micro_batches=SHARES, optimizer=optimizer, table_optimizer=tables)
    tables_read = {"words", "places", "bag", "weighted", "frozen"}
    assert {name.partition(".")[0] for name in plan.plan.servers.tables} == tables_read
    proof = proof_of(plan, 20)
    assert proof.passed and proof.steps == 20 and proof.clipped_steps > 5, proof.summary()


def test_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that is trained, and a row that is read twice and counted once: in the package's own files."""
    torch.manual_seed(0)
    plan = planned(Reader(), reader_inputs(), micro_batches=SHARES)
    real = on_cpu(plan.live)
    case = case_of(real.module, real.tensors, plan.graph, steps=2, micro_batches=SHARES, by_rows=by_rows(plan.plan))
    files = emit(plan.simulated.program, plan.plan, plan.graph)
    faults = {
        "runtime/servers/served_table.py": ("return int(positions[0]) if len(positions) else None", "return None"),
        "runtime/servers/parameter_server.py": (".index_add_(0, places, values)", ".index_copy_(0, places, values)"),
        "runtime/servers/share_worker.py": ("(outputs[0] / work.count)", "outputs[0]"),
    }
    for name, (right, wrong) in faults.items():
        assert right in files[name]
        assert not check_files(case, plan.simulated.program, files | {name: files[name].replace(right, wrong)}).passed


@pytest.mark.parametrize("shares", [1, 0])
def test_rows_of_a_server_that_none_reads_are_trained_like_the_rest(shares: int) -> None:
    """By a dense optimizer, whose moments move rows, and whose decay shrinks them, in each step."""
    served = {"w": Served("w", (4, 2), (4, 2), torch.float32, (), (), True, True, ((0, 0, 2), (1, 2, 4)))}
    how: Any = {"optimizer": "adamw", "rowwise": False, "shares": shares, "staleness": 9}
    servers = [ParameterServer(served, 2, number, **how) for number in range(2)]
    table = nn.Parameter(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
    for server in servers:
        server.start(0, {"w": table.detach()}, {}, 0)
    original = torch.optim.AdamW([table], lr=0.1)
    for step, read in enumerate(([0, 1, 2, 3], [0], [1], [2, 3]), 1):
        table.grad = torch.zeros(4, 2).index_fill_(0, torch.tensor(read), step)
        original.step()
        for number, server in enumerate(servers):
            ids = torch.tensor([row - 2 * number for row in read if row // 2 == number])
            rows = {"w": [(ids, torch.full((len(ids), 2), float(step)))]} if len(ids) else {}
            server.push(0, (step, 0), server.version, {}, rows, (0.1, 0.0))
            if shares:
                server.squares(0, step)
                server.update(0, step, 1.0, (0.1, 0.0))
    values = torch.cat([server.values["w"].detach() for server in servers])
    torch.testing.assert_close(values, table.detach())


# --- dealing ---


def one_parameter() -> dict[str, Served]:
    return {"w": Served("w", (2,), (2,), torch.float32, (), (), True, False, ((0, 0, 2),))}


def one_server(staleness: int, shares: int = 0) -> ParameterServer:
    how: Any = {"optimizer": "sgd", "rowwise": True, "shares": shares, "staleness": staleness}
    server = ParameterServer(one_parameter(), 1, 0, **how)
    server.start(0, {"w": torch.zeros(2)}, {}, 0)
    return server


class Heedless(Dealer):
    def _young_enough(self) -> bool:
        return True


def walk(dealer: Dealer, staleness: int, seed: int) -> int:
    """Workers that pull late, push in any order, and are killed before or after their push: the oldest gradient."""
    server, chance, works = one_server(staleness), random.Random(seed), 4
    dealer.add((1, number) for number in range(60))
    pulled: list[tuple[int, Any, int]] = []
    for _ in range(10_000):
        if not dealer.waiting and not dealer.outstanding:
            break
        worker = chance.randrange(works)
        if chance.random() < 0.5 and (share := dealer.deal(worker)) is not None:
            pulled.append((worker, share, server.pull(0)[0]))
        elif pulled and chance.random() < 0.6:
            worker, share, version = pulled.pop(chance.randrange(len(pulled)))
            server.push(0, share, version, {"w": torch.ones(2)}, {}, (0.1, 0.1))
            if chance.random() < 0.8:
                dealer.done(share)
            else:  # killed after the push, before it could say so
                dealer.lose(worker)
                pulled = [entry for entry in pulled if entry[0] != worker]
        elif chance.random() < 0.05:
            dealer.lose(worker)
            pulled = [entry for entry in pulled if entry[0] != worker]
    assert not dealer.outstanding and server.version == 60
    return server.oldest


@pytest.mark.parametrize("staleness", quick_at([0, 1, 2, 5], 0))
def test_no_gradient_is_older_than_it_may_be(staleness: int) -> None:
    oldest = [walk(Dealer(staleness), staleness, seed) for seed in range(30)]
    assert max(oldest) <= staleness and (not staleness or max(oldest) > 0)


def test_a_dealer_that_ignores_the_rule_is_caught() -> None:
    with pytest.raises(TooOld, match="at most 2 may be"):
        for seed in range(10):
            walk(Heedless(2), 2, seed)


# --- runs of whole packages ---


def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.int64), torch.tensor(labels)


class Digits(nn.Module):
    """The 17 shades of each of 64 places, from a table; then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.shades, self.up, self.down = nn.Embedding(64 * 17, 8), nn.Linear(512, 32), nn.Linear(32, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.shades(images + 17 * torch.arange(64)).flatten(1)
        return F.cross_entropy(self.down(F.relu(self.up(x))), labels)

    def guess(self, images: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.shades(images + 17 * torch.arange(64)).flatten(1)))).argmax(1)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    images, labels = digits()
    folder = tmp_path_factory.mktemp("servers") / "package"
    plan = planned(Digits(), (images[:32], labels[:32]), asynchronous=True, staleness=4, workers=4)
    autoshard.write(plan, folder)
    return load_package(folder)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((f"--workers {count}", f"--workers {count}: expected a number") for count in ("0", "3:2", "1:2:3", "some")),
        ("--steps -1", "--steps -1: expected 0 or more"),
        ("--log-every 0", "--log-every 0: expected 1 or more"),
        *((f"--{option}", "--lr, --table-lr: ") for option in ("lr -1", "table-lr -1", "lr-least 2", "max-norm 0")),
        *((f"--{option}", "--save-every, --keep and ") for option in ("save-every 2", "keep 2", "resume auto")),
        ("--eval-every 2", "--eval-every needs batches"),
    ],
)
def test_settings_that_make_no_sense(package: Any, words: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with _private_imports(Path(package.train.__file__).parent):
        settings = importlib.import_module("server_options")
    monkeypatch.setattr("sys.argv", ["train_servers.py", "--workers", "2:4"])
    options = settings.parse_arguments("")
    settings.take_options(options)
    assert (options.least, options.most) == (2, 4)
    monkeypatch.setattr("sys.argv", ["train_servers.py", *words.split()])
    with pytest.raises(settings.UserError, match=re.escape(message)):
        settings.take_options(settings.parse_arguments(""))


def run_of(package: Any, shares: int, staleness: int | None, workers: int = 4, servers: int = 3) -> InProcess:
    torch.manual_seed(0)
    names = {"SERVERS": servers, "STALENESS": staleness, "MOST_WORKERS": workers, "TABLE_OPTIMIZER": "rowwise-adagrad"}
    plan = types.SimpleNamespace(TABLES=["shades.weight"], **names)
    run: InProcess = package.server_run.InProcess(
        package.model.build_model, package.model.MESH, plan, "adamw", shares, dict(Digits().state_dict())
    )
    return run


def trained(package: Any, run: InProcess, staleness: int, steps: int, seed: int = 0) -> dict[str, Tensor]:
    images, labels = digits()
    chance, dealer, server_run = random.Random(seed), package.server_run.Dealer(staleness), package.server_run
    for step in range(1, steps + 1):
        places = [torch.arange(32) + 32 * ((4 * step + n) % 40) for n in range(4)]
        works = server_run.share_works(step, [[images[at], labels[at]] for at in places], [], (1.0, (3e-3, 5e-2)))
        run.compute(dealer, works, lambda count: chance.randrange(count))
    return run.values()


def test_asynchronous_training_converges_on_digits(package: Any) -> None:
    run = run_of(package, 0, 4)
    values = trained(package, run, 4, 90)
    model = Digits()
    model.load_state_dict(values)
    images, labels = digits()
    right = float((model.guess(images[1400:]) == labels[1400:]).float().mean())
    oldest = max(server.oldest for server in run.servers)
    assert right > 0.8 and 0 < oldest <= 4, (right, oldest)


def test_without_staleness_it_is_training_on_shares_one_by_one(package: Any) -> None:
    values = trained(package, run_of(package, 0, 0), 0, 5, seed=3)
    torch.manual_seed(0)
    model, (images, labels) = Digits(), digits()
    table = model.shades.weight
    others = torch.optim.AdamW([p for p in model.parameters() if p is not table], lr=3e-3)
    sums = torch.zeros(len(table))
    for share in range(20):
        at = torch.arange(32) + 32 * ((4 + share) % 40)
        model.zero_grad()
        model(images[at], labels[at]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        others.step()
        with torch.no_grad():
            sums += table.grad.square().mean(1)  # type: ignore[union-attr]
            table -= 5e-2 * table.grad / (sums.sqrt() + 1e-10)[:, None]  # type: ignore[operator]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-5)


def synchronous(package: Any, run: InProcess, first: int, last: int, order: Any = lambda count: 0) -> None:
    images, labels = digits()
    server_run = package.server_run
    for step in range(first, last + 1):
        places = [torch.arange(32) + 32 * ((4 * step + n) % 40) for n in range(4)]
        works = server_run.share_works(step, [[images[at], labels[at]] for at in places], [()] * 4, None)
        run.compute(server_run.Dealer(), works, order)
        server_run.apply_update(run.client, 0, step, server_run.update_norm(run.client, 0, step), 1.0, (3e-3, 5e-2))


def test_bits_do_not_depend_on_who_computes_and_when(package: Any, tmp_path: Path) -> None:
    """Nor on going back to a snapshot; on other servers the norm is summed in another order, and no more differs."""
    run = run_of(package, 4, None)
    synchronous(package, run, 1, 6)
    chance = random.Random(1)
    other = run_of(package, 4, None, workers=2)
    synchronous(package, other, 1, 3, lambda count: chance.randrange(count))
    other.client.all("save", 0, str(tmp_path))
    third = run_of(package, 4, None, workers=1, servers=4)
    synchronous(package, third, 1, 2, lambda count: count - 1)
    third.client.all("restore", 0, str(tmp_path))
    synchronous(package, third, 4, 6)
    synchronous(package, other, 4, 5)
    other.client.all("restore", 0, str(tmp_path))
    synchronous(package, other, 4, 6, lambda count: count - 1)
    for name, value in run.values().items():
        assert torch.equal(value, other.values()[name]), name
        torch.testing.assert_close(third.values()[name], value, rtol=1e-5, atol=1e-6)
    for server in other.servers:  # a run that begins anew
        server.start(0, dict(run.values()), {}, 0)
    fresh = other.servers[0]
    assert not fresh.optimizer.state and not any(bool(total.any()) for total in fresh.sums.values())  # type: ignore[union-attr]


def test_calls_of_another_generation_are_refused(package: Any) -> None:
    run = run_of(package, 4, None, servers=1)
    run.servers[0].generation = 3
    for call in (lambda: run.client.pull(2), lambda: run.client.push(2, (1, 0), [0], {}, [], None)):
        with pytest.raises(Exception, match="is in generation 3, the call of 2"):
            call()


@pytest.mark.parametrize("shares", [0, 2])
@pytest.mark.parametrize("restored", [False, True])
def test_where_a_server_starts_again_nothing_of_a_step_is_left(shares: int, restored: bool, tmp_path: Path) -> None:
    server, rates = one_server(0, shares), (1.0, 1.0)
    server.save(0, str(tmp_path))
    server.push(0, (1, 0), 0, {"w": torch.ones(2)}, {}, rates)
    if restored:
        server.restore(1, str(tmp_path))
    else:
        server.start(1, {"w": torch.zeros(2)}, {}, 0)
    for number in range(max(shares, 1)):
        server.push(1, (1, number), 0, {"w": torch.full((2,), 3.0)}, {}, rates)
    if shares:
        assert server.squares(1, 1) == 2 * (2 * 3) ** 2
        server.update(1, 1, 1.0, rates)
    assert server.pull(1)[1]["w"].tolist() == 2 * [-3.0 * max(shares, 1)]


def test_rows_of_views() -> None:
    """A part of an input that is itself a part of a batch, which lies elsewhere in the next batch."""
    table, calls = torch.arange(40.0).reshape(20, 2), []

    def rows_of(name: str, ids: Tensor) -> Tensor:
        calls.append(name)
        return table[ids]

    lookups = Lookups(rows_of, {})
    weight = served_table((20, 2), "t", True, lambda: lookups)
    batch, other = torch.randint(0, 20, (6, 4)), torch.randint(0, 20, (6, 4))
    for count, (whole, first) in enumerate(((batch, 0), (batch, 3), (other, 3))):
        inputs = [whole[first : first + 3]]
        ahead = lookups.pull_ahead(inputs)
        assert len(ahead) == (count > 0) and len(calls) == (1 + count if count else 0)
        lookups = Lookups(rows_of, lookups.ways, inputs, ahead)
        assert torch.equal(F.embedding(inputs[0][:, 1], weight), table[inputs[0][:, 1]])
        assert len(calls) == 1 + count
    lookups = Lookups(rows_of, lookups.ways, inputs, {key: (torch.tensor([0]), table[:1]) for key in ahead})
    with pytest.raises(AssertionError, match="not those of its ids"):
        F.embedding(inputs[0][:, 1], weight)


def test_rows_are_pulled_ahead_and_a_worker_holds_no_table(package: Any) -> None:
    run = run_of(package, 4, None)
    run2 = package.server_run
    images, labels = digits()
    works = run2.share_works(1, [[images[:32], labels[:32]]] * 4, [()] * 4, None)
    results = run.compute(run2.Dealer(), works)
    assert all(result.pulled_ahead == 0 for result in results)  # the ids are computed
    table = dict(run.workers[0].model.named_buffers())["shades.weight"]
    assert table.is_meta and table.shape == (64 * 17, 8)
    with pytest.raises(IndexError, match="has 1088 rows"):
        run.client.rows(0, [("shades.weight", torch.tensor([3, 1088]))])


def test_evaluation_is_that_of_the_original(tmp_path: Path) -> None:
    """Without dropout, of all labels of a batch; then training goes on with dropout."""
    torch.manual_seed(0)
    model, inputs = Reader(), reader_inputs()
    package = load_package(autoshard.write(planned(model, inputs, micro_batches=SHARES), tmp_path / "package"))
    how = (package.model.build_model, package.model.MESH, package.server_plan, package.model.OPTIMIZER, SHARES)
    run, dealer = package.server_run.InProcess(*how, model.state_dict()), package.server_run.Dealer()
    work = package.server_run.ShareWork((1, SHARES), inputs, trains=False)
    losses = [run.compute(dealer, [work])[0].loss for _ in range(2)]
    assert losses == pytest.approx([float(model.eval()(*inputs).detach())] * 2, abs=1e-5)
    trained = package.server_run.share_works(1, [inputs], [()], None)
    assert abs(run.compute(dealer, trained)[0].loss - losses[0]) > 1e-3


class Wide(nn.Module):
    """A table, and dense weights that are nearly all that a worker holds."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.up, self.down = nn.Embedding(1000, 256), nn.Linear(256, 4096), nn.Linear(4096, 10)

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        return F.cross_entropy(self.down(F.relu(self.up(self.rows(ids)))), tags)


@pytest.mark.parametrize(
    "hardware", quick_at(["a100-80g-sxm", "cpu-local"], 1)
)  # a profile with [host], and one without
def test_a_worker_is_planned_without_the_state_that_servers_hold(hardware: str) -> None:
    inputs, dense = (torch.randint(0, 1000, (8,)), torch.randint(0, 10, (8,))), 4 * (257 * 4096 + 4097 * 10)
    options: dict[str, Any] = {"hardware": hardware, "parameter_servers": 2, "workers": 2}
    for recompute in (None, "full"):
        plan = autoshard.plan(Wide(), inputs, memory_limit=3 * dense, recompute=recompute, **options)
        peak = plan.plan.step_peak_bytes
        assert 2 * dense < peak < 2.2 * dense  # weights and gradients; with AdamW's state it is 4 times
        account = plan.simulated.step.account
        fields = as_dict(plan.plan, plan.graph, account)
        assert account.peak_bytes == peak == fields["predicted_peak_bytes"] and not fields["host_bytes"]
        assert f"{format_bytes(peak)} of {format_bytes(3 * dense)}" in summary(plan.plan, plan.graph)
        assert not explain(plan.plan, plan.graph, plan.hardware, None, None).notes
        report = report_text(plan.simulated)
        assert f"{format_bytes(peak)}</" in report and "rows on the parameter servers" in report
        assert "on the host" not in summary(plan.plan, plan.graph) + report.partition("<canvas")[0]
    with pytest.raises(InfeasibleError, match="try: --recompute full or a model with"):
        autoshard.plan(Wide(), inputs, memory_limit=1.9 * dense, **options)


def test_what_servers_can_not_train_is_said() -> None:
    x = torch.randn(4, 3), torch.randn(4, 2)
    norm = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    frozen = nn.Linear(3, 2).requires_grad_(False)
    for model, message in ((norm, "batch norm"), (frozen, "no trainable")):
        with pytest.raises(UsageError, match=message):
            autoshard.plan(model, x[:1], targets=x[1], loss=F.mse_loss, hardware="a100-80g-sxm", parameter_servers=2)
