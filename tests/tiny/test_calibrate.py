"""The fits find what made the data; what is fitted is what is predicted; the command writes files that load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoshard.calibrate import Attention, Collectives, Products, cross_validate, fit
from autoshard.calibrate.fitted_models import GROUPS, MEMORY_KINDS, Free, MemoryModel, Rows
from autoshard.calibrate.least_squares import take
from autoshard.calibrate.machine_fit import KIND, calibrate
from autoshard.calibrate.measured_shapes import attentions, group_sizes, message_bytes, products
from autoshard.calibrate.network_fit import NetworkFit, level_between_nodes, network_fit, with_network
from autoshard.cli.commands import main
from autoshard.cluster.hardware import Hardware, load_hardware, parse_hardware
from autoshard.costs import collective_seconds
from autoshard.costs.collective import joint_seconds
from autoshard.costs.compute import local_op_seconds
from autoshard.errors import UsageError
from autoshard.ir.local_op import LocalOp, LocalTensor
from autoshard.ir.mesh import Mesh
from tests.slow import quick_at

A100, CPU = load_hardware("a100-80g-sxm"), load_hardware("cpu-local")


def constants_of(hardware: Hardware, group: str) -> dict[str, float]:
    return {key.removeprefix(f"{group}."): value for key, value in hardware.constants if key.startswith(f"{group}.")}


# --- what is fitted is what is predicted ------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 64), (512, 1024, 4096), (8192, 8192, 8192)])
def test_products_as_the_search_prices_them(m, n, k):
    rows = {name: np.array([float(value)]) for name, value in (("m", m), ("n", n), ("k", k), ("item_bytes", 2))}
    family = Products(A100.peak_flops("bfloat16"), A100.memory_bandwidth, A100.constant("matmul.fill"))
    x, w, y = (LocalTensor(shape, "bfloat16", False) for shape in ((m, k), (n, k), (m, n)))
    priced = local_op_seconds(A100, LocalOp("aten.linear", (x, w, None), (y,)))[0]
    assert family.seconds(constants_of(A100, "matmul"), rows)[0] == pytest.approx(priced)


def test_attention_as_the_search_prices_it():
    sizes = {"batch": 4, "length": 2048, "heads": 16, "kv_heads": 4, "head_dim": 64, "item_bytes": 2}
    family = Attention(A100.peak_flops("bfloat16"), A100.memory_bandwidth)
    fitted = family.seconds(constants_of(A100, "attention"), {key: np.array([float(v)]) for key, v in sizes.items()})
    query, key = (LocalTensor((4, heads, 2048, 64), "bfloat16", False) for heads in (16, 4))
    op = LocalOp("aten.scaled_dot_product_attention", (query, key, key), (query,), causal=True)
    assert fitted[0] == pytest.approx(local_op_seconds(A100, op)[0])


@pytest.mark.parametrize("name", ["a100-80g-sxm", "h200-141g-sxm", "b200-180g-sxm"])
@pytest.mark.parametrize("kind", KIND)
def test_collectives_as_the_search_prices_them(name, kind):
    hardware = load_hardware(name)
    link = hardware.links[0]
    for members, size in ((2, 3e3), (8, 5e6), (8, 1e9)):
        rows = {
            "kind": GROUPS.index(KIND[kind]), "members": members, "bytes": size,
            "bandwidth": link.bandwidth * link.efficiency, "reduced": kind == "all_reduce" and members == 8,
        }  # fmt: skip
        columns = {key: np.array([float(value)]) for key, value in rows.items()}
        gains = constants_of(hardware, "collective") | ({"all_reduce.in_network": 1.0} if link.reduces_from > 8 else {})
        fitted = Collectives(link.latency_seconds).seconds(gains, columns)[0]
        assert fitted == pytest.approx(collective_seconds(hardware, Mesh((("tp", members),)), 0, kind, size))


# --- the fits find what made the data ---------------------------------------------------------------------------------

TRUE = {
    "matmul": {"launch": 4e-6, "compute": 0.7, "memory": 0.6, "exponent": 1.8, "depth": 2e-6, "split": 900.0},
    "attention": {"launch": 9e-6, "compute": 0.5, "memory": 0.6, "exponent": 1.4, "head": 8.0, "chain": 6e-9},
    "memory": {"launch": 3e-6, "cache_excess": 2.0, "cache_size": 3e6}
    | {kind: 0.2 + 0.1 * index for index, kind in enumerate(MEMORY_KINDS)},
    "collective": {"launch": 40e-6}
    | {
        f"{kind}.{key}": value * (1 + 0.2 * index)
        for index, kind in enumerate(GROUPS)
        for key, value in (("step", 0.9), ("setup", 3e-5), ("setup_step", 0.5), ("switch", 3e5), ("efficiency", 0.8),
                           ("ramp", 0.4))
    }
    | {"ring.scatter": 0.5},
}  # fmt: skip


def columns(table: list[dict[str, float]]) -> dict[str, np.ndarray]:
    return {key: np.array([float(row[key]) for row in table]) for key in table[0]}


def measured() -> dict[str, object]:
    """As `worker` writes it, from the formulas with the constants above."""
    peak, bandwidth = CPU.peak_flops("float32"), CPU.memory_bandwidth
    generator = np.random.default_rng(3)
    product = [{**row, "item_bytes": 4} for row in products(peak, 2**22, generator)]
    model = Products(peak, bandwidth, CPU.constant("matmul.fill"))
    for row in product:
        m, n, k = row["m"], row["n"], row["k"]
        shapes = {"seconds": (m, n, k), "dgrad_seconds": (m, k, n), "wgrad_seconds": (n, k, m)}
        for name, (rows, width, inner) in shapes.items():
            one = columns([{"m": rows, "n": width, "k": inner, "item_bytes": 4}])
            row[name] = float(model.seconds(TRUE["matmul"], one)[0]) * (1.25 if name == "wgrad_seconds" else 1.0)
    attention = [{**row, "item_bytes": 4} for row in attentions(peak, generator)]
    there = Attention(peak, bandwidth).seconds(TRUE["attention"], columns(attention))
    for row, seconds in zip(attention, there, strict=True):
        row |= {"seconds": seconds, "backward_seconds": (seconds - 9e-6) * 2.5 / 0.8 + 9e-6}
    memory = [{"kind": i, "bytes": 10.0**e} for i in range(len(MEMORY_KINDS)) for e in (4, 5, 6, 7, 8)]
    for row, seconds in zip(memory, MemoryModel(bandwidth).seconds(TRUE["memory"], columns(memory)), strict=True):
        row |= {"kind": MEMORY_KINDS[row["kind"]], "seconds": seconds}
    link = CPU.links[0]
    collective = [
        {"kind": kind, "members": members, "bytes": float(size)}
        for kind in KIND for members in (2, 4) for size in message_bytes(2**24)
    ]  # fmt: skip
    rows = columns([
        {**row, "kind": GROUPS.index(KIND[row["kind"]]), "reduced": 0, "scattered": row["kind"] == "reduce_scatter"}
        for row in collective
    ])  # fmt: skip
    rows["bandwidth"] = np.full_like(rows["bytes"], link.bandwidth * link.efficiency)
    seconds = Collectives(link.latency_seconds, scatters=True).seconds(TRUE["collective"], rows)
    for row, one in zip(collective, seconds, strict=True):
        row["seconds"] = float(one)
    return {
        "machine": "a machine of formulas", "dispatch_seconds": 0.0, "matmul": product, "attention": attention,
        "memory": memory, "collective": collective,
    }  # fmt: skip


MEASURED = measured()


def test_a_calibration_finds_the_constants():
    calibration = calibrate(MEASURED, CPU, "float32", "a test")
    assert {family.name: family.error < 0.03 for family in calibration.families} == dict.fromkeys(TRUE, True)
    entries = {entry.key: entry.value for entry in calibration.entries}
    assert entries["matmul.compute"] == pytest.approx(0.7, rel=0.05)
    assert entries["matmul.wgrad"] == pytest.approx(0.8, rel=0.05) and entries["matmul.dgrad"] == pytest.approx(
        1.0, rel=0.05
    )
    assert entries["attention.backward"] == pytest.approx(0.8, rel=0.05)
    assert entries["memory.elementwise"] == pytest.approx(0.3, rel=0.1)
    assert entries["collective.ring.scatter"] == pytest.approx(0.5, rel=0.1)
    assert calibration.launch_seconds == pytest.approx(3e-6, rel=0.1)


def test_one_disturbed_measurement_changes_little():
    rows = columns(list(MEASURED["matmul"]))  # type: ignore[attr-defined]
    model = Products(CPU.peak_flops("float32"), CPU.memory_bandwidth, CPU.constant("matmul.fill"))
    clean = model.seconds(fit(model, rows).constants, rows)
    disturbed = {**rows, "seconds": np.where(np.arange(len(clean)) == 5, 10 * rows["seconds"], rows["seconds"])}
    assert np.abs(model.seconds(fit(model, disturbed).constants, rows) / clean - 1).max() < 0.05


class Level:
    """A model of one constant: all rows take as long."""

    group = "level"
    free = (Free("level", 1.0, 100.0),)

    def seconds(self, constants: Mapping[str, float], rows: Rows) -> np.ndarray:
        return np.full_like(rows["seconds"], constants["level"])


def test_held_out_rows_are_not_fitted():
    rows = {"seconds": np.array([3.0, 3.0, 6.0, 3.0, 6.0])}
    slow = rows["seconds"] == 6
    places, errors = cross_validate(Level(), rows, lambda generator: slow, draws=2)
    assert places.tolist() == [2, 4, 2, 4] and errors == pytest.approx(-0.5, abs=1e-4)
    drawn = [cross_validate(Level(), rows, lambda g: g.random(5) < 0.5, draws=6) for _ in range(2)]
    assert drawn[0][0].tolist() == drawn[1][0].tolist() and drawn[0][1].tolist() == drawn[1][1].tolist()
    assert take(rows, slow)["seconds"].tolist() == [6.0, 6.0]


# --- what is measured -------------------------------------------------------------------------------------------------


def test_shapes_stay_within_the_device():
    for rate, largest in ((1e11, 2**22), (3e14, 2**28)):
        shapes = products(rate, largest, np.random.default_rng(0))
        assert len(shapes) == 40 and max(2 * row["m"] * row["n"] * row["k"] for row in shapes) <= 0.03 * rate
        assert max(row["m"] * row["n"] for row in shapes) <= largest
        assert len(attentions(rate, np.random.default_rng(0))) == 40
    assert group_sizes(8) == [2, 4, 8] and group_sizes(6) == [2, 4, 6] and group_sizes(2) == [2]
    assert message_bytes(2**14) == [2**10, 2**11, 2**12, 2**13, 2**14]
    assert message_bytes(2**28)[-1] == 2**28 and message_bytes(2**14, every=2) == [2**10, 2**12, 2**14]


# --- the command ------------------------------------------------------------------------------------------------------


def request(folder: Path, *words: str, data: object = MEASURED) -> int:
    path = folder / "measured.json"
    path.write_text(json.dumps(data))
    return main(["calibrate", "--hardware", "cpu-local", "--measured", str(path), *words])


def test_a_reduce_scatter_has_a_rate_of_its_own(tmp_path: Path) -> None:
    """Half of an all-gather's, as gloo sums on the host; what is fitted is what is predicted."""
    assert request(tmp_path, "--out", str(tmp_path / "mine.toml")) == 0
    hardware, mesh = load_hardware(str(tmp_path / "mine.toml")), Mesh((("tp", 2),))
    for row in MEASURED["collective"]:  # type: ignore[attr-defined]
        if row["members"] == 2 and row["bytes"] == 2**24:
            priced = collective_seconds(hardware, mesh, 0, row["kind"], row["bytes"])
            assert priced == pytest.approx(row["seconds"], rel=0.05), row["kind"]
    assert collective_seconds(CPU, mesh, 0, "reduce_scatter", 1e7) == collective_seconds(
        CPU, mesh, 0, "all_gather", 1e7
    )


def test_the_command_writes_a_profile_that_loads(tmp_path, capsys):
    assert request(tmp_path, "--out", str(tmp_path / "mine.toml")) == 0
    hardware = load_hardware(str(tmp_path / "mine.toml"))
    assert hardware.name == "mine" and hardware.calibrated
    assert hardware.constant("matmul.compute") == pytest.approx(0.7, rel=0.05)
    assert hardware.launch_seconds == pytest.approx(3e-6, rel=0.1)
    assert hardware.constant("error.matmul") < 0.03
    assert replace(hardware, name="", text="").links == replace(CPU, name="", text="").links
    out = capsys.readouterr().out
    assert "matmuls" in out and f"--hardware {tmp_path / 'mine.toml'}" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["measured.json", "mine-costs.toml", "mine.toml"]
    assert request(tmp_path, "--out", str(tmp_path / "mine.toml")) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "data", "code", "says"),
    [
        (["--out", "mine.txt"], MEASURED, 2, "ends in .toml"),
        (["--out", "nowhere/mine.toml"], MEASURED, 2, "there is no folder"),
        (["--out", "m.toml", "--processes", "99"], MEASURED, 2, "at most 16 devices"),
        (["--out", "m.toml", "--dtype", "float16"], MEASURED, 2, "can't compute in float16"),
        (["--out", "m.toml"], {**MEASURED, "matmul": []}, 5, "matmul is missing"),
        (["--out", "m.toml"], {**MEASURED, "memory": [{"kind": "default"}]}, 5, "memory[0]: bytes, seconds is missing"),
    ],
)
def test_requests_that_can_not_be_met(tmp_path, monkeypatch, capsys, words, data, code, says):
    monkeypatch.chdir(tmp_path)
    assert request(tmp_path, *words, data=data) == code
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["measured.json"]


# --- the network between nodes ---------------------------------------------------------------------------------------


def across(hardware: Hardware, axes: tuple[int, ...], nodes: tuple[int, ...] = (2, 4)) -> list[dict[str, object]]:
    """What collectives over one device a node, or all, take on `hardware`."""
    rows: list[dict[str, object]] = []
    for count in nodes:
        mesh = Mesh((("node", count), ("device", hardware.devices_per_node)))
        for kind in KIND:
            for size in message_bytes(2**26):
                seconds = joint_seconds(hardware, mesh, axes, kind, float(size))
                rows.append({"kind": kind, "nodes": count, "bytes": size, "seconds": seconds})
    return rows


@pytest.mark.parametrize("name", quick_at(["a100-80g-sxm", "v100-32g-sxm2", "l40s-48g"], 2))
def test_the_network_is_found(name):
    """A network of a third of the bandwidth and four times the latency is told as that."""
    datasheet = load_hardware(name)
    level = level_between_nodes(datasheet)
    link = datasheet.links[level]
    slow = replace(link, bandwidth=link.bandwidth / 3, latency_seconds=link.latency_seconds * 4)
    true = replace(datasheet, links=(*datasheet.links[:level], slow, *datasheet.links[level + 1 :]))
    fitted = network_fit({"between": across(true, (0,)), "whole": across(true, (0, 1))}, datasheet)
    assert fitted.bandwidth == pytest.approx(link.bandwidth * link.efficiency / 3, rel=0.02)
    assert fitted.latency_seconds == pytest.approx(link.latency_seconds * 4, rel=0.05)
    assert fitted.error < 0.02 and fitted.whole_error < 0.02
    written = parse_hardware(with_network(datasheet.text, fitted, datasheet, "a test"))
    mesh = Mesh((("node", 4), ("device", datasheet.devices_per_node)))
    for axes in ((0,), (0, 1)):
        for kind in KIND:
            predicted = joint_seconds(written, mesh, axes, kind, 2.0**24)
            assert predicted == pytest.approx(joint_seconds(true, mesh, axes, kind, 2.0**24), rel=0.03)
    assert written.links[:level] == datasheet.links[:level]
    assert written.links[level].bandwidth == link.bandwidth  # the datasheet's stands beside what was measured
    rewritten = with_network(written.text, replace(fitted, bandwidth=1e9), written, "another test")
    assert parse_hardware(rewritten).links[level].efficiency * link.bandwidth == pytest.approx(1e9)


def test_a_profile_of_one_node_has_no_network():
    with pytest.raises(UsageError, match="describes no links between nodes of 16"):
        level_between_nodes(CPU)


@pytest.mark.parametrize(
    ("hardware", "world", "local", "options", "told"),
    [
        ("a100-80g-sxm", 16, 8, ("--processes", "2"), "--processes and torchrun both start processes"),
        ("a100-80g-sxm", 16, 4, (), "torchrun started 4 processes a node, a100-80g-sxm has 8"),
        ("cpu-local", 32, 32, (), "torchrun started 32 processes: cpu-local has at most 16"),
        ("cpu-local", 4, 2, (), "describes no links between nodes of 16"),
    ],
)
def test_what_torchrun_started_is_what_the_profile_describes(
    hardware, world, local, options, told, tmp_path, monkeypatch, capsys
):
    for key, value in {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "RANK": 0}.items():
        monkeypatch.setenv(key, str(value))
    assert main(["calibrate", "--hardware", hardware, "--out", str(tmp_path / "own.toml"), *options]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_source_with_quotes_is_written_as_toml():
    """The machine's name comes from outside."""
    datasheet = load_hardware("a100-80g-sxm")
    fitted = NetworkFit(datasheet.links[-1].name, 1e9, 1e-5, 7, 0.01, 0.01)
    written = parse_hardware(with_network(datasheet.text, fitted, datasheet, 'a "quoted" name \\ of mine'))
    assert written.links[-1].bandwidth * written.links[-1].efficiency == pytest.approx(1e9)
