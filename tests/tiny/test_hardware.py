from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from autoshard.cluster.hardware import (
    PRECISION_DTYPES,
    check_mesh,
    check_precision,
    hardware_text,
    list_profiles,
    load_hardware,
    parse_hardware,
)
from autoshard.errors import InvalidFileError, UsageError
from autoshard.ir.mesh import Mesh
from autoshard.system.files import data_folder

KINDS = {"measured", "datasheet", "derived", "default"}


def test_shipped_profiles():
    assert set(list_profiles()) >= {
        "a100-40g-sxm", "a100-80g-sxm", "ascend-910a", "ascend-910b1", "ascend-910b2", "ascend-910b3", "ascend-910b4",
        "ascend-910c", "b200-180g-sxm", "cpu-local", "h100-80g-sxm", "h200-141g-sxm", "l40s-48g", "mi300x-192g",
        "rtx-4090-24g", "v100-32g-sxm2",
    }  # fmt: skip


@pytest.mark.parametrize("name", list_profiles())
def test_profile_embeds_and_parses_back(name):
    hardware = load_hardware(name)
    reparsed = parse_hardware(hardware_text(hardware))
    assert reparsed == hardware and hash(reparsed) == hash(hardware)
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


NO_FIGURE = {"schema", "devices", "devices_per_node", "ports", "rails"}


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


def a100_text() -> str:
    return (data_folder("hardware_profiles") / "a100-80g-sxm.toml").read_text()


def fault(text: str) -> str:
    with pytest.raises(InvalidFileError) as error:
        parse_hardware(text, "mine.toml")
    return error.value.message


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


@pytest.mark.parametrize(
    ("old", "new", "key", "says"),
    [
        ('value = "80 GiB"', 'value = "80 parsecs"', "device.memory", "not a quantity of bytes"),
        ('value = "80 GiB"', 'value = "80"', "device.memory", "expected a number and a unit, such as"),
        ('value = "80 GiB"', "value = 80", "device.memory", "with its unit in quotes"),
        ('value = "80 GiB"', 'value = "0 GiB"', "device.memory", "more than zero"),
        ("usable_memory = { value = 0.92", "usable_memory = { value = 1.92", "device.usable_memory", "fraction"),
        ('value = "300 GB/s", kind = "datasheet"', 'value = "300 GB/s", kind = "datasheat"',
         "links[0].bandwidth.kind", "did you mean 'datasheet'?"),
        ('source = "12 NVLink3 x 25 GB/s"', 'sauce = "12 NVLink3 x 25 GB/s"',
         "links[0].bandwidth.sauce", "did you mean 'source'?"),
        ('topology = "switch"', 'topology = "torus"', "links[0].topology", "expected switch, mesh, ring"),
        ('topology = "switch"', 'topology = "swich"', "links[0].topology", "did you mean 'switch'?"),
        ("devices = 4480", "devices = 12", "links[1].devices", "larger multiple of the level below"),
        ("devices = 8 ", 'devices = "8" ', "links[0].devices", "positive integer"),
        ("schema = 1", "schema = 2", "schema", "expected 1, got 2"),
        ('costmodel = "nvidia-a100"', 'costmodel = "nvidia-a10"', "costmodel", "did you mean 'nvidia-a100'?"),
        ('name = "a100-80g-sxm"', "name = 5", "name", "expected text"),
        ('value = "312 TFLOP/s"', 'value = "312 TFLOP"', "device.peak.bfloat16", "flop_rate"),
        ("memory_bandwidth = ", "memory_bandwith = ", "device.memory_bandwith", "did you mean 'memory_bandwidth'?"),
        ("[device.peak]", "[device.peaks]", "device.peaks", "did you mean 'peak'?"),
        ("devices_per_node = 8", "devices_per_node = 5000", "devices_per_node", "the links join 4480"),
        ("devices_per_node = 8", "devices_per_node = 6", "devices_per_node", "groups of 8 devices (links[0])"),
        ("rails = true", 'rails = "yes"', "links[1].rails", "true or false"),
        ("rails = true", "ports = 0", "links[1].ports", "positive integer"),
        ("bfloat16 = {", "bfloat = {", "device.peak.bfloat", "did you mean"),
    ],
)  # fmt: skip
def test_damaged_profile_names_key_and_line(old, new, key, says):
    text = a100_text()
    assert old in text
    damaged = text.replace(old, new, 1)
    message = fault(damaged)
    assert f"mine.toml:{line_of(damaged, new)}: {key}: " in message and says in message
    assert "faults" not in message


def test_a_missing_key_is_told_at_its_table():
    text = a100_text()
    message = fault("\n".join(line for line in text.splitlines() if not line.startswith("memory_bandwidth")))
    assert f"mine.toml:{line_of(text, '[device]')}: device.memory_bandwidth: is missing" in message
    assert "[device]" not in fault(text.replace("[device]", "[divice]", 1)).splitlines()[0]


def test_all_faults_are_told_at_once():
    text = a100_text().replace('"80 GiB"', '"80"').replace("devices = 4480", "devices = 12")
    text = text.replace("launch_overhead", "launch_overhed").replace('costmodel = "nvidia-a100"', 'costmodel = "x"')
    lines = fault(text).splitlines()
    assert lines[0] == "4 errors:"
    assert [line.split(": ")[1] for line in lines[1:]] == [
        "costmodel", "device.memory", "device.launch_overhed", "links[1].devices",
    ]  # fmt: skip


def test_faults_of_the_constants_are_told_with_their_own_file():
    path = data_folder("costmodels") / "nvidia-a100.toml"
    text = path.read_text().replace("exponent = {", "exponnent = {", 1)
    whole = f"{a100_text()}\n{text}"
    message = fault(whole)
    assert f"mine.toml:{line_of(whole, 'exponnent')}: constants.matmul.exponnent: " in message
    assert "did you mean 'exponent'?" in message


EDGES = 'topology = "edges"\nedges = {{ value = {edges}, kind = "datasheet", source = "a drawing" }}'


@pytest.mark.parametrize(
    ("edges", "says"),
    [
        ("[[0, 1, 1], [1, 2, 1]]", "node 3 can't be reached"),
        ("[[0, 9, 1]]", "nodes of this level are 0 to 7"),
        ("[[0, 0, 1]]", "to itself"),
        ("[[0, 1, 0]]", "at least 1 link"),
        ("[[0, 1, 1], [1, 0, 1]]", "joined twice"),
        ("[[0, 1]]", "expected [node, node, number of links]"),
        ('"all"', "expected [[node, node, number of links]"),
    ],
)
def test_an_impossible_graph_of_links(edges, says):
    text = a100_text().replace('topology = "switch"', EDGES.format(edges=edges), 1)
    message = fault(text)
    assert f"mine.toml:{line_of(text, 'edges = {')}: links[0].edges: " in message and says in message


def test_edges_need_their_topology():
    text = a100_text().replace('topology = "switch"', EDGES.format(edges="[[0, 1, 1]]").replace('"edges"', '"ring"'), 1)
    assert "are only read where topology" in fault(text)
    assert "joins 8 nodes, here there are 560" in fault(
        a100_text().replace('topology = "switch"', 'topology = "cube-mesh"')
    )


def test_edges_make_a_graph():
    ring = str([[node, (node + 1) % 8, 2] for node in range(8)])
    hardware = parse_hardware(a100_text().replace('topology = "switch"', EDGES.format(edges=ring), 1))
    assert hardware.links[0].graph.degree == 4 and len(hardware.links[0].graph.edges) == 8


def test_ports_are_shared_by_the_devices_of_a_node():
    assert load_hardware("a100-80g-sxm-4hdr").links[1].bandwidth == 12.5e9
    assert load_hardware("rtx-4090-24g").links[1].bandwidth == 12.5e9 / 8


def test_damaged_constants_name_the_key():
    text = hardware_text(load_hardware("cpu-local")).replace("exponent = { value = 2.0", "exponent = { value = nan")
    with pytest.raises(InvalidFileError, match=r"constants\.matmul\.exponent"):
        parse_hardware(text)
    text = hardware_text(load_hardware("cpu-local")).replace("exponent = { value = 2.0", "exponent = { value = 0.5")
    with pytest.raises(InvalidFileError, match=r"constants\.matmul\.exponent: expected at least 1, got 0.5"):
        parse_hardware(text)


def test_constants_by_path(tmp_path):
    constants = (data_folder("costmodels") / "cpu.toml").read_text().replace('value = "50 us"', 'value = "60 us"')
    (tmp_path / "own.toml").write_text(constants)
    text = (data_folder("hardware_profiles") / "cpu-local.toml").read_text().replace('"cpu"', '"own.toml"')
    (tmp_path / "mine.toml").write_text(text)
    hardware = load_hardware(str(tmp_path / "mine.toml"))
    assert hardware.constant("collective.launch") == pytest.approx(60e-6)
    (tmp_path / "own.toml").write_text(constants.replace("launch", "lunch"))
    with pytest.raises(InvalidFileError) as error:
        load_hardware(str(tmp_path / "mine.toml"))
    assert f"{tmp_path / 'own.toml'}:{line_of(constants, 'launch =')}: constants.matmul.lunch" in error.value.message


def test_devices_without_measurements_say_so():
    assert load_hardware("a100-80g-sxm").calibrated
    assert not any(load_hardware(name).calibrated for name in list_profiles() if name.startswith("ascend"))


def test_broken_toml_says_where():
    with pytest.raises(InvalidFileError, match=r"mine\.toml is not TOML"):
        parse_hardware("schema = [", "mine.toml")


def test_precision_that_the_device_lacks():
    with pytest.raises(UsageError) as error:
        check_precision(load_hardware("ascend-910a"), "bf16-mixed")
    assert "ascend-910a has no bfloat16" in error.value.message
    assert error.value.hint == "--precision fp32 or --precision fp16-mixed"
    check_precision(load_hardware("ascend-910a"), "fp32")
    with pytest.raises(UsageError, match="a100-80g-sxm has no float8") as error:
        check_precision(load_hardware("a100-80g-sxm"), "fp8-mixed")
    assert "--precision bf16-mixed" in (error.value.hint or "")
    check_precision(load_hardware("h100-80g-sxm"), "fp8-mixed")
    for precision in {*PRECISION_DTYPES} - {"fp8-mixed"}:
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
    code = (
        "import sys, autoshard.cluster.hardware, autoshard.costs, autoshard.simulation\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
