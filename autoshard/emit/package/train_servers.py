# mypy: ignore-errors
# ruff: noqa: I001
"""Trains the model of model_parallel.py on parameter servers and workers, which are processes of Ray.

    python train_servers.py --steps 100                             on this machine
    python train_servers.py --steps 100 --address auto              in the Ray cluster that runs here: ray start --head
    python train_servers.py --to-original checkpoints model.safetensors

This process reads batches, as train.py does, and deals them to workers. A worker or server that is killed is started
again: the worker's batches go to others, the servers all go back to their last snapshot.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from batches import UserError, loader_batches, synthetic_batches
from evaluation import check_evaluation, evaluates
from initial import INITIAL
from model_parallel import LABEL_COUNTS, MESH, MICRO_BATCHES, build_labels, build_model
from run_options import AUTO
from runtime import (
    EXIT_CODE,
    EXIT_STOPPED,
    ParallelMesh,
    Prefetched,
    TrainingLog,
    assign,
    init_computed,
    init_parameter,
    local,
    put_in_place,
    sharding,
)
from runtime.learning_rate import share_of_rate
from runtime.servers.dealing import DEPTH, Dealer
from runtime.servers.served import served_parameters, stored_tensors
from runtime.servers.server_client import ServerClient
from runtime.servers.server_run import apply_update, labels_of_step, share_works, update_norm
from runtime.servers.share_worker import ShareWork
from saving import locked
from server_options import SNAPSHOT_EVERY, parse_arguments, take_options
from server_plan import SERVERS, STALENESS, TABLES
from start_state import read_weights

GONE, NEW = "servers gone", "worker new"  # as of server_actors.py, which needs Ray


# --- what is no parameter on the servers ---


def fixed_tensors(stored: dict, served: dict, weights: Any, seed: int) -> dict[str, torch.Tensor]:
    """Frozen parameters and buffers, whole, by original name: of the weights, else as the original model makes them."""
    tensors = {}
    for name, tensor in stored.items():
        if name in served:
            continue
        held = sharding(tensor)
        filled = torch.empty(tensor.shape, dtype=tensor.dtype)
        filled.sharding = held
        key = next((key for key in (name, *held.ties) if key in weights), None)
        if key is not None:
            assign(filled, weights[key])
        elif name in INITIAL:
            init_computed(filled, INITIAL[name], seed)
        elif held.init and not (weights and isinstance(tensor, torch.nn.Parameter)):
            init_parameter(filled, held.init, seed)
        else:
            raise UserError(f"{name} is not trained, and how the model makes it is unknown\n  try: --weights FILE")
        tensors[name] = local(filled).reshape(held.shape)
    return tensors


# --- snapshots ---


def last_snapshot(folder: str) -> Path | None:
    """The folder itself, or its step-N with the largest N."""
    path = Path(folder)
    if (path / "training.json").exists():
        return path
    steps = [item for item in path.glob("step-*") if item.name[5:].isdecimal() and (item / "training.json").exists()]
    return max(steps, key=lambda item: int(item.name[5:]), default=None)


def to_original(folder: str, target: str) -> None:
    from convert import write_state_dict

    latest = last_snapshot(folder)
    if latest is None:
        raise UserError(f"--to-original {folder}: there is no checkpoint here")
    state = dict(torch.load(latest / "fixed.pt", weights_only=True))
    parts: dict[str, list] = {}
    for path in sorted(latest.glob("server-*.pt")):
        for name, part in torch.load(path, weights_only=True, mmap=True)["parts"].items():
            parts.setdefault(name, []).append((part["start"], part["value"]))
    for name, entry in parts.items():
        values = [value for _, value in sorted(entry, key=lambda part: part[0])]
        state[name] = values[0] if len(values) == 1 else torch.cat(values)
    ties = {}
    for name, entry in stored_tensors(build_model, MESH).items():
        state[name] = state[name].reshape(sharding(entry).shape)
        ties |= dict.fromkeys(sharding(entry).ties, name)
    write_state_dict(target, state | {tie: state[name] for tie, name in ties.items()}, ties)
    print(f"{target}: the weights of {latest}", flush=True)


# --- the run ---


class Run:
    """The driver: deals shares, updates the servers, and goes back with them where one is lost."""

    def __init__(self, options: argparse.Namespace) -> None:
        import ray

        from server_actors import LOST, ServerActor, WorkerActor

        self.ray, self.options, self.lost = ray, options, LOST
        self.stored = stored_tensors(build_model, MESH)
        self.served = served_parameters(self.stored, TABLES, SERVERS)
        self.mesh = ParallelMesh(MESH, 0, lambda *_: None, torch.device("cpu"))
        self.mesh.random.seed = options.seed
        self.source = self.first_source()
        if self.source is not None:
            self.fixed = torch.load(self.source / "fixed.pt", weights_only=True)
        else:
            weights = read_weights(options.weights) if options.weights else {}
            self.fixed = fixed_tensors(self.stored, self.served, weights, options.seed)
        connected = {"address": options.address} if options.address else {
            "num_cpus": SERVERS + options.most, "include_dashboard": False
        }  # fmt: skip
        path = os.pathsep.join(filter(None, [os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH")]))
        ray.init(
            **connected, runtime_env={"env_vars": {"PYTHONPATH": path}}, logging_level="ERROR", log_to_driver=False
        )
        needed = {"cuda": "GPU", "npu": "NPU"}.get(options.device)
        if needed and not options.address and not ray.cluster_resources().get(needed):
            raise UserError(f"--device {options.device}: this machine has none\n  try: --device cpu, or --address auto")
        retry = {"max_restarts": -1, "max_task_retries": 0, "num_cpus": 1}
        server, worker = ray.remote(ServerActor), ray.remote(WorkerActor)
        self.servers = [server.options(**retry).remote(number, options.weight_decay) for number in range(SERVERS)]
        device = {"cuda": {"num_gpus": 1}, "npu": {"resources": {"NPU": 1}}}.get(options.device, {})
        self.fixed_put = ray.put(self.fixed)
        self.workers = [worker.options(**retry, **device, max_concurrency=DEPTH).remote() for _ in range(options.most)]
        self.client = ServerClient(self.served, SERVERS, self.send, ray.get)
        self.dealer = Dealer(STALENESS)
        self.generation, self.done = 0, 0
        self.calls: dict[Any, tuple[int, Any]] = {}  # of workers: which, and the share; None: it says that it is there
        self.present: set[int] = set()
        self.works: dict[tuple[int, int], Any] = {}  # since the last snapshot
        self.results: dict[tuple[int, int], Any] = {}
        self.evaluated: list[tuple[int, int]] = []  # shares of the evaluation that runs
        self.started, self.stopped, self.begun = 0, "", time.perf_counter()
        self.folder = options.save or tempfile.mkdtemp(prefix="servers-")
        self.every = options.snapshot_every or options.save_every or SNAPSHOT_EVERY
        self.log = TrainingLog(0, options.log_json)

    def first_source(self) -> Path | None:
        folder = self.options.save if self.options.resume == AUTO else self.options.resume
        latest = last_snapshot(folder) if folder else None
        if folder and latest is None and self.options.resume != AUTO:
            raise UserError(f"--resume {folder}: there is no checkpoint here\n  try: a folder that --save wrote")
        if latest is None and self.options.resume == AUTO:
            print(f"--resume auto: no checkpoint in {folder}: a fresh start", flush=True)
        if latest is None and self.options.save and last_snapshot(self.options.save):
            raise UserError(f"--save {self.options.save}: it has checkpoints of another run\n  try: --resume auto")
        return latest

    def send(self, number: int, method: str, *arguments: Any) -> Any:
        return getattr(self.servers[number], method).remote(*arguments)

    # --- servers ---

    def start_servers(self) -> None:
        """Starts the servers from the last snapshot, or from where the run starts."""
        for number in range(SERVERS):
            if self.source is not None:
                guessed = self.patiently(number, "restore", self.generation, str(self.source)) or []
            else:
                guessed = self.patiently(number, "begin", self.generation, self.options.weights, self.options.seed)
            if guessed and not self.generation:
                print(f"note: {', '.join(guessed[:3])} start from a guess: how the model makes them is unknown")
        self.done = self.started = (
            int(json.loads((self.source / "training.json").read_text())["step"]) if self.source else 0
        )

    def patiently(self, number: int, method: str, *arguments: Any) -> Any:
        """Calls a server that Ray may be starting again."""
        until = time.monotonic() + self.options.patience
        while True:
            try:
                return self.ray.get(self.send(number, method, *arguments))
            except self.ray.exceptions.RayActorError as error:
                if time.monotonic() > until or "creation task" in str(error):
                    raise
                time.sleep(0.2)

    def go_back(self) -> None:
        """Returns all servers to the last snapshot; steps in work since are done again."""
        before, evaluated = self.done, bool(self.evaluated)
        self.generation += 1
        self.calls = {ref: call for ref, call in self.calls.items() if call[1] is None}
        self.dealer.clear()
        self.results.clear()
        self.evaluated = []
        self.start_servers()
        if evaluated and self.done == before:
            self.evaluate()
        what = f"all are back at step {self.done}: {before - self.done} steps are lost and done again"
        print(f"a server was lost in step {before + 1}; {what}", flush=True)

    def snapshot(self) -> None:
        """Saves a snapshot of all servers, between two updates; with --save a checkpoint."""
        folder = f"{self.folder}/step-{self.done}"
        partial = Path(f"{folder}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self.client.all("save", self.generation, str(partial))
        torch.save(self.fixed, partial / "fixed.pt")
        (partial / "training.json").write_text(json.dumps({"step": self.done, "seed": self.options.seed}))
        put_in_place(folder)
        self.source = Path(folder)
        self.works = {share: work for share, work in self.works.items() if share[0] > self.done}
        count = self.options.keep if self.options.save else 1
        there = sorted(Path(self.folder).glob("step-*[0-9]"), key=lambda path: int(path.name[5:]))
        for path in there[: -count if count else 0]:
            shutil.rmtree(path, ignore_errors=True)

    def due(self, step: int) -> bool:
        saved = self.options.save and (step == self.options.steps or bool(self.stopped))
        return bool(
            step % self.every == 0 or (self.options.save_every and step % self.options.save_every == 0) or saved
        )

    # --- workers ---

    def call_worker(self, number: int) -> None:
        arguments = (self.servers, self.fixed_put, self.options.device, self.options.seed)
        self.calls[self.workers[number].prepare.remote(*arguments)] = number, None

    def deal(self) -> None:
        for number in sorted(self.present):
            while (share := self.dealer.deal(number)) is not None:
                ref = self.workers[number].compute.remote(self.generation, self.works[share])
                self.calls[ref] = number, share

    def arrived(self, ref: Any) -> None:
        number, share = self.calls.pop(ref)
        try:
            result = self.ray.get(ref)
        except self.ray.exceptions.RayActorError as error:
            if "creation task" in str(error):
                raise
            result = NEW
        if result == NEW:
            if number in self.present:
                self.present.discard(number)
                count = len(self.dealer.lose(number))
                print(
                    f"worker {number} was lost in step {self.done + 1}; {count} of its shares go to others", flush=True
                )
                self.call_worker(number)
            elif share is None:
                time.sleep(0.2)
                self.call_worker(number)
            return
        if share is None:
            self.present.add(number)
            if self.generation or self.done or self.results or self.dealer.outstanding:
                print(f"worker {number} joined in step {self.done + 1}", flush=True)
        elif result == GONE:
            if share in self.dealer.dealt:
                raise self.lost[1]("a worker has seen it")
        elif share in self.dealer.dealt:
            self.dealer.done(share)
            self.results[share] = result

    # --- steps ---

    def rates(self, step: int) -> tuple[float, float]:
        options = self.options
        shape = {"shape": options.schedule, "warmup": options.warmup, "steps": options.steps, "least": options.lr_least}
        share = share_of_rate(step - 1, **shape)
        return options.lr * share, options.table_lr * share

    def fill(self) -> None:
        """Makes shares of the next step if none wait; asynchronously, of all up to the next snapshot or evaluation."""
        if self.evaluated or (self.stopped and self.started > self.done):
            return
        every = (1,) if STALENESS is None else (self.every, self.options.save_every, self.options.eval_every)
        last = min(self.options.steps, *(self.done - self.done % period + period for period in every if period))
        if self.started < last and len(self.dealer.waiting) < len(self.workers):
            self.started += 1
            if (self.started, 0) not in self.works:
                self.read(self.started)
            self.dealer.add((self.started, number) for number in range(MICRO_BATCHES))

    def read(self, step: int) -> None:
        read = self.batches.of_step(MICRO_BATCHES)
        batches = [[x.clone() for x in batch] for batch in read]  # of a view all that it is a part of would travel
        if STALENESS is not None:
            works = share_works(step, batches, [], (self.options.max_norm, self.rates(step)))
        else:
            works = share_works(
                step,
                batches,
                labels_of_step(
                    build_labels, LABEL_COUNTS, self.mesh, batches, self.fixed, self.client, self.generation
                ),
                None,
            )
        self.works |= {work.share: self.ray.put(work) for work in works}

    def finish(self) -> None:
        """Finishes steps, and evaluations, all of whose shares are there."""
        if self.evaluated:
            self.finish_evaluation()
            return
        step = self.done + 1
        shares = [(step, number) for number in range(MICRO_BATCHES)]
        if any(share not in self.results for share in shares):
            return
        results = [self.results[share] for share in shares]
        loss = sum(result.loss for result in results) / len(results)
        norm = math.sqrt(sum(result.norm**2 for result in results) / len(results))
        if math.isfinite(loss):
            if STALENESS is None:
                norm = update_norm(self.client, self.generation, step)
                if math.isfinite(norm):
                    clipped = (norm, self.options.max_norm, self.rates(step))
                    apply_update(self.client, self.generation, step, *clipped)
            else:
                self.client.all("done", self.generation, step)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(f"step {step}: loss {loss}, gradient norm {norm}")
        for share in shares:
            del self.results[share]
        self.done = step
        now, self.begun = time.perf_counter() - self.begun, time.perf_counter()
        if step % self.options.log_every == 0 or step == self.options.steps:
            figures = {"loss": loss, "gradient_norm": norm, "lr": self.rates(step)[0], "seconds": now}
            self.log.write(step, figures, f"step {step}: loss {loss:.6f}, gradient norm {norm:.4f}, {now * 1e3:.1f} ms")
        if self.due(step) and not self.dealer.outstanding:
            self.snapshot()
        if evaluates(self.options, step) and not self.stopped:
            self.evaluate()

    def evaluate(self) -> None:
        """Workers compute the loss of the first batches of --eval-data, with the parameters as they are now."""
        reading = loader_batches(self.options.eval_data, self.mesh, 0, 0, option="--eval-data", once=True)
        batches = itertools.islice(Prefetched(reading, self.mesh.device, 0), self.options.eval_batches)
        for number, batch in enumerate(batches, MICRO_BATCHES):
            share = self.done + 1, number  # after those of a step, of the same parameters
            self.works[share] = self.ray.put(ShareWork(share, tuple(x.clone() for x in batch), trains=False))
            self.evaluated.append(share)
        if not self.evaluated:
            raise UserError(f"--eval-data {self.options.eval_data}: a loader yields no batch")
        self.dealer.add(self.evaluated)

    def finish_evaluation(self) -> None:
        if any(share not in self.results for share in self.evaluated):
            return
        loss = sum(self.results.pop(share).loss for share in self.evaluated) / len(self.evaluated)
        for share in self.evaluated:
            del self.works[share]
        self.evaluated, self.begun = [], time.perf_counter()
        self.log.write(self.done, {"eval_loss": loss}, f"step {self.done}: evaluation loss {loss:.6f}")

    def batches_from(self, step: int) -> Prefetched:
        start = step * MICRO_BATCHES
        if not self.options.data:
            batches = ((batch, None, 0) for batch in synthetic_batches(self.mesh, self.options.seed, start))
            return Prefetched(batches, self.mesh.device, 0)
        reading = loader_batches(self.options.data, self.mesh, self.options.seed, start)
        return Prefetched(reading, self.mesh.device, self.options.prefetch)

    def go(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda heard, _: setattr(self, "stopped", signal.Signals(heard).name))
        self.start_servers()
        if self.done:
            print(f"resumed {self.source} at step {self.done}", flush=True)
        self.batches = self.batches_from(self.done)
        for number in range(len(self.workers)):
            self.call_worker(number)
        enough, begun, message = False, time.monotonic(), False
        while self.evaluated or (self.done < self.options.steps and not (self.stopped and self.started == self.done)):
            if not enough and len(self.present) >= self.options.least:
                enough, self.begun = True, time.perf_counter()
            if not enough and not message and time.monotonic() - begun > 60:
                message = True
                print(f"waiting for {self.options.least} workers: {len(self.present)} are there", flush=True)
            try:
                if enough:
                    self.fill()
                    self.deal()
                ready, _ = self.ray.wait(list(self.calls), num_returns=1, timeout=0.5) if self.calls else ([], [])
                for ref in ready:
                    self.arrived(ref)
                self.finish()
            except self.lost:
                self.go_back()
        self.batches.close()
        return self.end()

    def end(self) -> int:
        if self.options.save and self.source != Path(f"{self.folder}/step-{self.done}") and self.done:
            self.snapshot()
        if STALENESS is not None:
            oldest = max(status["oldest"] for status in self.client.all("report"))
            print(f"the oldest gradient was {oldest} updates old, at most {STALENESS} may be", flush=True)
        if self.stopped and self.done < self.options.steps:
            saved = f", which is saved in {self.options.save}: --resume auto goes on" if self.options.save else ""
            print(f"{self.stopped}: stopped after step {self.done}{saved}; exit code {EXIT_STOPPED}", flush=True)
            return EXIT_STOPPED
        return 0

    def close(self) -> None:
        if not self.options.save:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.ray.shutdown()


def main() -> int:
    options = parse_arguments((__doc__ or "").partition("\n")[0])
    try:
        if options.to_original:
            to_original(*options.to_original)
            return 0
        take_options(options)
        check_evaluation(options)
        try:
            import ray  # noqa: F401
        except ImportError:
            raise UserError("parameter servers need Ray\n  try: pip install 'ray>=2.40'") from None
        with locked(options.save):
            run = Run(options)
            try:
                return run.go()
            finally:
                run.close()
    except FloatingPointError as error:
        print(f"error: {error}\n  try: a lower --lr, or a --warmup", file=sys.stderr, flush=True)
        return EXIT_CODE
    except (UserError, OSError, ValueError, KeyError) as error:
        print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
