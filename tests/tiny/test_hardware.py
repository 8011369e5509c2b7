from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from autoshard.errors import InvalidFileError, UsageError
from autoshard.hardware import (
    PRECISION_DTYPES,
    check_mesh,
    check_precision,
    hardware_text,
    list_profiles,
    load_hardware,
    parse_hardware,
)
from autoshard.mesh import Mesh
from autoshard.resources import data_folder

KINDS = {"measured", "datasheet", "derived", "default"}


def test_shipped_profiles():
    assert list_profiles() == ("a100-80g-sxm", "ascend-910a", "cpu-local")


@pytest.mark.parametrize("name", list_profiles())
def test_profile_embeds_and_parses_back(name):
    hardware = load_hardware(name)
    again = parse_hardware(hardware_text(hardware))
    assert again == hardware and hash(again) == hash(hardware)
    assert hardware.name == name
    assert hardware.text.startswith((data_folder("hardware_profiles") / f"{name}.toml").read_text().rstrip())


@pytest.mark.parametrize("name", list_profiles())
def test_every_figure_has_a_source(name):
    hardware = load_hardware(name)
    keys = {figure.key for figure in hardware.figures}
    assert {"device.memory", "device.memory_bandwidth", "links[0].bandwidth", "constants.matmul.compute"} <= keys
    assert all(figure.kind in KINDS and len(figure.source) > 5 for figure in hardware.figures)
    unsourced = [path for path in _numbers(tomllib.loads(hardware.text)) if path.rsplit(".", 1)[-1] not in NO_FIGURE]
    assert not unsourced


NO_FIGURE = {"schema", "devices", "devices_per_node"}


def _numbers(data, path=""):
    """Dotted paths of numbers that are no figure."""
    if isinstance(data, dict) and not {"value", "kind", "source"} <= data.keys():
        for key, value in data.items():
            yield from _numbers(value, f"{path}.{key}")
    elif isinstance(data, list):
        for item in data:
            yield from _numbers(item, path)
    elif isinstance(data, int | float):
        yield path


def test_a100_figures():
    hardware = load_hardware("a100-80g-sxm")
    assert hardware.memory_bytes == 80 * 2**30
    assert hardware.usable_memory_bytes == pytest.approx(0.92 * 80 * 2**30)
    assert hardware.peak_flops("bfloat16") == 312e12
    assert hardware.memory_bandwidth == 2039e9
    assert hardware.devices_per_node == 8


@pytest.mark.parametrize(
    ("name", "near"), [("a100", "a100-80g-sxm"), ("ascend-910", "ascend-910a"), ("CPU_local", "cpu-local")]
)
def test_unknown_profile_lists_and_suggests(name, near):
    with pytest.raises(UsageError) as error:
        load_hardware(name)
    assert all(profile in error.value.message for profile in list_profiles())
    assert near in error.value.hint


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidFileError, match=r"nowhere\.toml"):
        load_hardware(str(tmp_path / "nowhere.toml"))


def test_own_profile_by_path(tmp_path):
    text = (data_folder("hardware_profiles") / "cpu-local.toml").read_text().replace('"cpu-local"', '"mine"')
    path = tmp_path / "mine.toml"
    path.write_text(text)
    hardware = load_hardware(str(path))
    assert hardware.name == "mine" and hardware.constant("matmul.launch") == pytest.approx(3e-6)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("[device]", "[divice]", "device.memory"),
        ('value = "80 GiB"', 'value = "80 parsecs"', "device.memory"),
        ('value = "80 GiB"', "value = 80", "device.memory"),
        ('value = "80 GiB"', 'value = "0 GiB"', "device.memory"),
        ("usable_memory = { value = 0.92", "usable_memory = { value = 1.92", "device.usable_memory"),
        ('value = "300 GB/s", kind = "datasheet"', 'value = "300 GB/s", kind = "guessed"', "links[0].bandwidth.kind"),
        ('topology = "switch"', 'topology = "torus"', "links[0].topology"),
        ("devices = 4480", "devices = 12", "links"),
        ("devices = 8 ", 'devices = "8" ', "links[0].devices"),
        ("schema = 1", "schema = 2", "schema"),
        ('costmodel = "nvidia-a100"', 'costmodel = "nvidia-b100"', "costmodel"),
        ('name = "a100-80g-sxm"', "name = 5", "name"),
        ('value = "312 TFLOP/s"', 'value = "312 TFLOP"', "device.peak.bfloat16"),
    ],
)
def test_damaged_profile_names_the_key(old, new, key):
    text = (data_folder("hardware_profiles") / "a100-80g-sxm.toml").read_text()
    assert old in text
    with pytest.raises(InvalidFileError) as error:
        parse_hardware(text.replace(old, new, 1), "mine.toml")
    assert f"mine.toml: {key}: " in error.value.message


def test_damaged_constants_name_the_key():
    text = hardware_text(load_hardware("a100-80g-sxm")).replace("exponent = { value = 1.53", "exponent = { value = nan")
    with pytest.raises(InvalidFileError, match=r"constants\.matmul\.exponent"):
        parse_hardware(text)


def test_broken_toml_says_where():
    with pytest.raises(InvalidFileError, match=r"mine\.toml is not TOML"):
        parse_hardware("schema = [", "mine.toml")


def test_precision_that_the_device_lacks():
    with pytest.raises(UsageError) as error:
        check_precision(load_hardware("ascend-910a"), "bf16-mixed")
    assert "ascend-910a has no bfloat16" in error.value.message
    assert error.value.hint == "--precision fp32"
    check_precision(load_hardware("ascend-910a"), "fp32")
    for precision in PRECISION_DTYPES:
        check_precision(load_hardware("a100-80g-sxm"), precision)
    with pytest.raises(UsageError, match="fp12"):
        check_precision(load_hardware("a100-80g-sxm"), "fp12")


def test_peak_of_a_dtype_that_the_device_lacks():
    with pytest.raises(UsageError, match="ascend-910a can't compute in bfloat16"):
        load_hardware("ascend-910a").peak_flops("bfloat16")


def test_mesh_larger_than_the_cluster():
    hardware = load_hardware("cpu-local")
    check_mesh(hardware, Mesh.parse("dp=4,tp=4"))
    with pytest.raises(UsageError, match="dp=4,tp=8 has 32 devices: cpu-local describes at most 16"):
        check_mesh(hardware, Mesh.parse("dp=4,tp=8"))


def test_no_torch():
    code = "import sys, autoshard.hardware, autoshard.costs, autoshard.simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
