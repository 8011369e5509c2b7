"""Where the operators of a graph that are not torch's come from, and what a package imports for them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from autoshard.emit.runtime.user_code import register_operators
from autoshard.errors import UsageError
from autoshard.graph_capture.capture import capture, capture_model
from autoshard.graph_capture.overloads import is_harmless, is_operator, schemas_of
from autoshard.ir import graph_json
from autoshard.ir.graph import OWN_NAMESPACES, Registration
from autoshard.rules.operators import OPERATORS
from autoshard.workflow import ModelRequest, read_graph

OPERATOR = """
import torch

@torch.library.custom_op("autoshard_user::NAME", mutates_args=())
def NAME(x: torch.Tensor) -> torch.Tensor:
    return x * 2

NAME.register_fake(torch.empty_like)
"""
LIBRARY = """
import torch

library = torch.library.Library("autoshard_old", "DEF")
library.define("NAME(Tensor x) -> Tensor")
library.impl("NAME", lambda x: x * 2, "CPU")

@torch.library.register_fake("autoshard_old::NAME")
def _(x):
    return torch.empty_like(x)
"""
MODEL = """
import torch, MODULE

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ops.TARGET(x)

def build():
    return Model(), (torch.zeros(4, 6),)
"""


def model(folder: Path, module: str, target: str) -> str:
    name = f"model_{module.replace('.', '_')}"
    (folder / f"{name}.py").write_text(MODEL.replace("MODULE", module).replace("TARGET", target))
    return f"{folder}/{name}.py:build"


def test_a_file_beside_the_model_is_kept_as_text(tmp_path: Path) -> None:
    text = OPERATOR.replace("NAME", "beside")
    (tmp_path / "registers_beside.py").write_text(text)
    graph = capture(model(tmp_path, "registers_beside", "autoshard_user.beside"), {})
    assert graph.registrations == (Registration("registers_beside", ("autoshard_user.beside",), text),)
    assert graph_json.loads(graph_json.dumps(graph)) == graph


def test_a_module_that_any_interpreter_finds_is_kept_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "registers_found.py").write_text(LIBRARY.replace("NAME", "found"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    graph = capture(model(tmp_path, "registers_found", "autoshard_old.found"), {})
    assert graph.registrations == (Registration("registers_found", ("autoshard_old.found",)),)


def test_a_module_of_a_package_is_kept_by_name(tmp_path: Path) -> None:
    (tmp_path / "user_package").mkdir()
    (tmp_path / "user_package" / "__init__.py").write_text(OPERATOR.replace("NAME", "outer"))
    (tmp_path / "user_package" / "kernels.py").write_text(OPERATOR.replace("NAME", "inner"))
    for module, target in (("user_package.kernels", "autoshard_user.inner"), ("user_package", "autoshard_user.outer")):
        graph = capture(model(tmp_path, module, target), {})
        assert graph.registrations == (Registration(module, (target,)),)


def test_an_operator_from_nowhere_is_told_apart() -> None:
    """Its definition is gone, and with it where it came from."""
    torch.library.custom_op("autoshard_user::made", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    torch.library.register_fake("autoshard_user::made", torch.empty_like)
    net = torch.nn.Module()
    net.forward = lambda x: torch.ops.autoshard_user.made(x)  # type: ignore[assignment]
    (registration,) = capture_model(net, (torch.zeros(2, 4),)).registrations
    assert registration.targets == ("autoshard_user.made",)


def test_graphs_of_torch_operators_alone_are_written_as_before() -> None:
    graph = capture_model(torch.nn.Linear(4, 4), (torch.zeros(2, 4),))
    assert not graph.registrations and "registrations" not in json.loads(graph_json.dumps(graph))


def test_what_is_registered_is_not_imported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "registers_late.py").write_text(OPERATOR.replace("NAME", "late"))
    register_operators("registers_late", "autoshard_user.late")
    assert torch.ops.autoshard_user.late(torch.ones(2)).tolist() == [2, 2]
    register_operators("no_such_module", "autoshard_user.late")


def test_what_can_not_be_registered_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "registers_nothing.py").write_text("")
    (tmp_path / "needs_more.py").write_text("import no_such_helper")
    importlib.invalidate_caches()
    with pytest.raises(ImportError, match="no_such_module on PYTHONPATH"):
        register_operators("no_such_module", "autoshard_user.lacking")
    with pytest.raises(ImportError, match=r"needs_more registers .*holds no_such_helper on PYTHONPATH"):
        register_operators("needs_more", "autoshard_user.lacking")
    with pytest.raises(ImportError, match=r"does not register autoshard_user\.lacking"):
        register_operators("registers_nothing", "autoshard_user.lacking")
    with pytest.raises(ImportError, match=r"nothing registers autoshard_user.lacking: import what does"):
        register_operators("", "autoshard_user.lacking")


def test_a_saved_graph_imports_what_was_confirmed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "user_kernels").mkdir()
    (tmp_path / "user_kernels" / "__init__.py").write_text(OPERATOR.replace("NAME", "confirmed"))
    graph, saved = capture(model(tmp_path, "user_kernels", "autoshard_user.confirmed"), {}), tmp_path / "g.json"
    graph_json.save(graph, saved)
    with pytest.raises(UsageError, match="names the module user_kernels") as refused:
        read_graph(ModelRequest(str(saved), {}))
    assert "--allow-module user_kernels" in refused.value.hint
    capsys.readouterr()
    assert read_graph(ModelRequest(str(saved), {}, modules=("user_kernels",))) == graph
    assert "the package imports user_kernels, which is to register autoshard_user.confirmed" in capsys.readouterr().err


def test_namespaces_of_torch_are_known() -> None:
    """An operator of one that is not would pass for a user's own."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas()} | {*torch._C._dispatch_get_all_op_names()}
    users = {"autoshard_user", "autoshard_old"}
    namespaces = {name.partition("::")[0] for name in names} - users
    assert not {name for name in namespaces - OWN_NAMESPACES if not sys_modules_register(name)}


def sys_modules_register(namespace: str) -> bool:
    """Is it of a library beside torch, which another test imported?"""
    return (
        namespace in {*sys.modules, "tests", "mine", "demo", "cplib", "only_once", "quantized_decomposed"}
        or "autoshard" in namespace
    )


def test_what_a_graph_may_call_touches_tensors_alone() -> None:
    targets = {schema.name.replace("::", ".", 1) for schema in torch._C._jit_get_all_schemas()}
    allowed = {target for target in targets if target.isascii() and is_operator(target) and is_harmless(target)}
    assert len(allowed) > 900
    assert not {target for target in allowed if "file" in target or "save" in target or "load" in target}
    calls = [getattr(getattr(torch.ops, ns), name) for ns, name in (target.split(".") for target in allowed)]
    schemas = [getattr(packet, overload)._schema for packet in calls for overload in packet.overloads()]
    texts = {a.name for schema in schemas for a in schema.arguments if "str" in str(a.type)}
    assert not texts & {"filename", "path", "name", "dir", "group_name", "func", "code"}
    assert {"aten.erfinv", "aten.fft_fft", "aten.linalg_svd", "prims.add", "aten.meshgrid"} <= allowed
    table = {target for target in OPERATORS if target.startswith("aten.") and is_operator(target)}
    odd = {target for target in table if schemas_of(target) and not is_harmless(target)}
    assert not odd, odd
