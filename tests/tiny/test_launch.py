"""`autoshard launch`: what each scheduler reads, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from autoshard.cli import commands
from autoshard.emit import readme_use
from autoshard.ir import graph_json
from autoshard.launchers import launch_files
from tests.graphs import mlp_graph
from tests.hangs import HANGS
from tests.slow import quick_at

PACKAGE = Path(launch_files.__file__).parents[1]
ON = {
    "torchrun": "torchrun.sh",
    "ssh": "ssh.sh",
    "slurm": "slurm.sbatch",
    "kubernetes": "kubernetes.yaml",
    "mpirun": "mpirun.sh",
    "ray": "ray_job.py",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    graph_json.save(mlp_graph(1), "mlp.json")
    words = ["plan", "mlp.json", "--mesh", "dp=2,tp=8", "--hardware", "a100-80g-sxm", "--strategy", "random:1"]
    assert commands.main([*words, "--out", "a b$(x)"]) == 0
    capsys.readouterr()
    return Path("a b$(x)")


def launched(*words: str) -> int:
    return commands.main(["launch", "a b$(x)", *words])


@pytest.mark.parametrize("on", quick_at(ON, 0, 1, 4, 5))
def test_the_file_of_each(package: Path, capsys: pytest.CaptureFixture[str], on: str) -> None:
    hosts = ["--hosts", "n1,n2"] if on == "ssh" else []
    assert launched("--on", on, *hosts, "--options", "--steps 3 --save 'my $checkpoints'", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    file = package / "launch" / ON[on]
    text = file.read_text(encoding="utf-8")
    assert printed["file"] == str(file) and "--steps" in text and "{{" not in text
    if on == "kubernetes":
        job = yaml.safe_load(text)
        trainer = job["spec"]["trainer"]
        assert trainer["args"] == ["--backend", "nccl", "--steps", "3", "--save", "my $checkpoints"]
        assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
        assert "image" not in trainer, "that of the runtime"
        assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
        models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
        assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job, "the published models know every field"
    elif on == "ray":
        compile(text, str(file), "exec")
    else:
        checked = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, timeout=HANGS)
        assert checked.returncode == 0 and not checked.stderr
        assert "'my $checkpoints'" in text or ("'my \\$checkpoints'" in text and on == "ssh")
    if on == "slurm":
        assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n" in text and "--gpus-per-node=8" in text


@pytest.mark.parametrize(
    "name", ["a #b", "a]b", "{x}", "a,b", "a: b", "yes", "null", "1" * 60, "é😀\n\x7f\\'\"", f"{'a' * 49} b"]
)
def test_any_name_of_a_folder_in_yaml(package: Path, name: str) -> None:
    package.rename(name)
    assert commands.main(["launch", name, "--on", "kubernetes", "--image", "1.0", "--options", "--save yes"]) == 0
    job = yaml.safe_load((Path(name) / "launch" / "kubernetes.yaml").read_text(encoding="utf-8"))
    trainer = job["spec"]["trainer"]
    assert (trainer["command"], trainer["image"]) == (["torchrun", f"/package/{name}/train.py"], "1.0")
    assert trainer["args"][2:] == ["--save", "yes"]
    assert re.fullmatch("[a-z]([a-z0-9-]{0,61}[a-z0-9])?", job["metadata"]["name"])


def test_a_package_for_several_numbers_of_devices(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes on with fewer nodes where a plan for fewer devices is in it."""
    words = ["plan", "mlp.json", "--devices", "2,1", "--hardware", "a100-80g-sxm", "--out", "two"]
    assert commands.main(words) == 0
    assert "1        all=1" in capsys.readouterr().out
    assert commands.main(["launch", "two", "--on", "torchrun"]) == 0
    assert '"${PROCESSES:-2}"' in (tmp_path / "two" / "launch" / "torchrun.sh").read_text(encoding="utf-8")
    for on, said in (
        ("torchrun", "--nnodes 1:2 --max-restarts"),
        ("slurm", "from 1 on: sbatch --nodes=N"),
    ):
        assert commands.main(["launch", "two", "--on", on, "--nodes", "2"]) == 0
        file = tmp_path / "two" / "launch" / ON[on]
        assert said in file.read_text(encoding="utf-8")
        checked = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, timeout=HANGS)
        assert checked.returncode == 0 and not checked.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    quick_at(
        [
            (["--devices", "4,4"], "--devices names 4 twice"),
            (["--devices", "4,2", "--mesh", "dp=4"], "--mesh dp=4 is one number of devices"),
            (["--devices", "4,x"], "--devices 'x': expected a whole number"),
            (["--devices", "4,"], "--devices '': expected a whole number"),
            (["--devices", "2,1", "--pareto"], "--pareto: the front is of one number"),
            (
                ["--devices", "16,3", "--stages", "2", "--micro-batches", "4"],
                "3 devices are not equally many for each",
            ),
            (["--devices", "2,1", "--memory-limit", "6 KiB"], "for 1 device: "),
        ],
        0,
        1,
        4,
        5,
        6,
    ),
)
def test_numbers_of_devices_that_cannot_be(
    package: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert commands.main(["plan", "mlp.json", "--hardware", "a100-80g-sxm", *words, "--out", "no"]) in (2, 3)
    assert said in capsys.readouterr().err and not Path("no").exists()


def test_what_is_refused(package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    refused = {
        ("--on", "ssh"): "ssh needs the hosts' names",
        ("--on", "ssh", "--hosts", "a,-oProxyCommand=x"): "is no name of a host",
        ("--on", "slurm", "--nodes", "3"): "16 devices can't stand on 3 nodes",
        ("--on", "slurm", "--nodes", "2", "--hosts", "a"): "--nodes 2, but --hosts names 1",
        ("--on", "slurm", "--options", "'"): "--options '",
        ("--on", "slurm", "--options", "--stepz 3"): "train.py has no option --stepz\n  try: --steps\n",
        ("--on", "ray", "--options", "--steps x"): "argument --steps: invalid int value: 'x'\n  try: train.py --help",
        ("--on", "ray", "--options", "--schedule cos"): "  try: --schedule cosine\n",
        ("--on", "ssh", "--hosts", "a,b", "--options", "--sizes batch=8"): "train.py has no option --sizes",
        ("--on", "slurm", "--options", "--steps 1 --keep"): "argument --keep: expected one argument",
        ("--on", "slurm", "--options", "3"): "unrecognized arguments: 3",
        ("--on", "kubernetes", "--image", "a b;c"): "--image a b;c: expected the name of an image",
        ("--on", "slurm", "--start"): "there is no sbatch on this machine",
        ("--on", "torchrun", "--start"): "torchrun is started on each node by itself",
    }
    for words, message in refused.items():
        assert launched(*words) == 2 and message in capsys.readouterr().err, words
    (package / "launch" / "slurm.sbatch").write_text("edited")
    assert launched("--on", "slurm") == 5 and "was edited since" in capsys.readouterr().err
    (package / "run_options.py").write_text("parser.add_argument(f'--{mine}')", encoding="utf-8")
    assert launched("--on", "ray", "--options=--mine") == 0, "what is edited is not known"


def test_what_a_launcher_does_not_use_is_said(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--hosts", "a,b", "--minutes", "3", "--grace", "3", "--image", "x", "--python", "y"]
    unused = {
        "torchrun": "the names of --hosts, --minutes, --grace, --image, --python",
        "ssh": "--minutes, --grace, --image",
        "slurm": "the names of --hosts, --image",
        "kubernetes": "the names of --hosts, --minutes, --python",
    }
    for on, options in unused.items():
        assert launched("--on", on, *given) == 0
        assert capsys.readouterr().err == f"note: --on {on} does not use {options}\n"
    assert launched("--on", "slurm", "--minutes", "3") == 0 and not capsys.readouterr().err


def test_torchrun_on_several_nodes_says_what_each_needs(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launched("--on", "torchrun") == 0
    printed = capsys.readouterr().out.splitlines()[-1].partition(": ")
    assert (
        printed[0] == "next, on each node"
        and printed[2] == f"NODE=0 FIRST_NODE=host bash '{package}/launch/torchrun.sh'"
    )


def constant(path: str, name: str) -> int:
    """Of a file that can't be imported without torch."""
    matched = re.search(rf"^{name} = (\d+)", (PACKAGE / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert matched
    return int(matched[1])


def test_exit_codes_are_those_of_the_runtime() -> None:
    assert "\nEXIT_STOPPED = os.EX_TEMPFAIL" in (PACKAGE / "emit/runtime/stop_signals.py").read_text("utf-8")
    assert constant("emit/runtime/nonfinite.py", "EXIT_CODE") == readme_use.exit_code("nonfinite")


@pytest.mark.parametrize(
    ("hardware", "backend", "resource"),
    quick_at(
        [
            ("ascend-910b1", "hccl", "huawei.com/Ascend910"),
            ("mi300x-192g", "nccl", "amd.com/gpu"),
            ("cpu-local", "gloo", ""),
        ],
        1,
    ),
)
def test_devices_are_those_of_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hardware: str, backend: str, resource: str
) -> None:
    monkeypatch.chdir(tmp_path)
    graph_json.save(mlp_graph(1), "mlp.json")
    words = ["plan", "mlp.json", "--mesh", "dp=2", "--hardware", hardware, "--strategy", "dp", "--out", "out"]
    assert commands.main(words) == commands.main(["launch", "out", "--on", "kubernetes"]) == 0
    trainer = yaml.safe_load(Path("out/launch/kubernetes.yaml").read_text(encoding="utf-8"))["spec"]["trainer"]
    assert trainer["args"][:2] == ["--backend", backend]
    assert trainer.get("resourcesPerNode") == ({"limits": {resource: 2}} if resource else None)
