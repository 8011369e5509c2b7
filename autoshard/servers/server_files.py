"""Files that a package for parameter servers adds to one of a single device: servers, workers and their driver."""

from __future__ import annotations

from pathlib import Path

from autoshard.cluster.hardware import backend_of, parse_hardware
from autoshard.ir.plan import Plan
from autoshard.servers.server_request import ROWWISE, SAME

DEVICES = {"nccl": "cuda", "hccl": "npu", "gloo": "cpu"}
EMIT = Path(__file__).parents[1] / "emit"
FILES = ("train_servers.py", "server_options.py", "server_actors.py")  # of emit/package, for such packages alone
_README = """
## Parameter servers

`python train_servers.py --steps 100` trains on {count} servers and {workers} workers, which are processes of Ray
(`pip install ray`); `--address auto` uses a Ray cluster that is running. {how} Servers hold the parameters
and the optimizer's state; a worker gets the rows of tables that its batch reads. Workers may end, come back and join
(`--workers MIN:MAX`). If a server ends, all go back to the last snapshot, of every `--snapshot-every` steps, and a line
says how many steps are done again. `--eval-data FILE:FUNCTION` has workers compute the loss of these batches, after
`--eval-every` steps and at the end. `--save`, `--resume` and `--weights` are those of `train.py`, and
`train_servers.py --to-original checkpoints model.safetensors` writes the original model's weights. `train.py` trains
the same model on one device.
"""


def server_files(plan: Plan) -> dict[str, str]:
    """Files of a plan with servers; none without servers."""
    spec = plan.servers
    if not spec.count:
        return {}
    constants = {
        "SERVERS": spec.count, "WORKERS": spec.workers, "MOST_WORKERS": spec.most_workers, "STALENESS": spec.staleness,
        "TABLES": list(spec.tables), "TABLE_OPTIMIZER": ROWWISE if spec.rowwise else SAME,
        "DEVICE": DEVICES[backend_of(parse_hardware(plan.hardware_text))],
    }  # fmt: skip
    lines = [
        '"""Parameter servers, as planned. STALENESS None: all shares of a step are of the same parameters."""',
        "",
    ]
    files = {"server_plan.py": "\n".join([*lines, *(f"{name} = {value!r}" for name, value in constants.items()), ""])}
    for path in sorted((EMIT / "runtime" / "servers").glob("*.py")):
        files[f"runtime/servers/{path.name}"] = path.read_text(encoding="utf-8")
    return files


def server_readme(plan: Plan) -> str:
    """The part of README.md; "" without servers."""
    spec = plan.servers
    if not spec.count:
        return ""
    workers = str(spec.workers) if spec.workers == spec.most_workers else f"{spec.workers} to {spec.most_workers}"
    old = f"Each gradient is applied as it comes, at most {spec.staleness} updates old."
    how = "A step's gradients are added up before the update." if spec.staleness is None else old
    return _README.format(count=spec.count, workers=workers, how=how)
