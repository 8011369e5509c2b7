"""The wheel: one name in site-packages, every data file of the clone inside the package, and it works from there."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.hangs import HANGS

ROOT = Path(__file__).resolve().parents[2]
DATA = ("costmodels", "examples", "hardware_profiles", "reports")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


def tree(folder: str) -> set[str]:
    files = {path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    return {path.relative_to(ROOT).as_posix() for path in files if not path.name.startswith(".")}


def test_the_wheel_holds_the_tree(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    data = {f"autoshard/_data/{name}" for folder in DATA for name in tree(folder)}
    assert names == tree("autoshard") | data
    assert {name.split("/")[2] for name in data} == set(DATA)


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    """Licence, typing and the Pythons that the tests run on; README's first command finds its model."""
    archive = zipfile.ZipFile(wheel)
    (member,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = archive.read(member).decode()
    assert "License-Expression: Apache-2.0\n" in metadata and "Requires-Python: >=3.11\n" in metadata
    declared = [line.split(" :: ")[-1] for line in metadata.splitlines() if line.startswith("Classifier: Programming")]
    assert declared == ["3.11", "3.12", "3.13"]
    assert archive.read(member.replace("METADATA", "licenses/LICENSE")) == (ROOT / "LICENSE").read_bytes()
    assert "autoshard/py.typed" in archive.namelist()


def test_a_missing_example_is_found_in_the_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        "import sys; sys.path.insert(0, 'site')\n"
        "from autoshard.cli.commands import main; sys.exit(main(['plan', 'examples/gpt2.py:build', '--mesh', 'dp=2',"
        " '--hardware', 'cpu-local']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 2
    shipped = tmp_path / "site" / "autoshard" / "_data" / "examples" / "gpt2.py"
    assert done.stderr.splitlines()[-1] == f"  try: {shipped}:build" and shipped.is_file()


def test_it_works_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        "import sys; sys.path.insert(0, 'site')\n"
        "import autoshard; assert 'site' in autoshard.__file__, autoshard.__file__\n"
        "from autoshard.cli.commands import main; sys.exit(main(['profiles']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    assert "cpu-local" in done.stdout
