"""The emitted package as text: a golden model, the linter, and what each part of a program turns into."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import Header, package
from autoshard.emit.code_lines import broken, split_commas, statement
from autoshard.emit.expressions import ExpressionWriter
from autoshard.emit.header import Input, integer_bound, strategy_words
from autoshard.emit.model_file import model_file
from autoshard.emit.user_operators import copied_files, module_names, readme_section, registering_lines
from autoshard.graph_capture.training.precision import apply_precision
from autoshard.ir.graph import FreeSize, Graph, Op, Parameter, Registration, Tensor
from autoshard.ir.layout import AxisShard, LocalSize, Replicate
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import GradientBucket, Program
from autoshard.program.lower import lower
from autoshard.replay.free_sizes import UNTRIED
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests.graphs import mlp_graph
from tests.hangs import HANGS
from tests.programs import Maker, residual_model

# --- the emitted package as text: a golden model, the linter, and what each part of a program turns into ---


GOLDEN = Path(__file__).with_name("emitted_residual.py.txt")


def residual_program(blocks: int = 3) -> Program:
    """Megatron-parallel residual blocks under data parallelism; an embedding cut unevenly along the vocabulary."""
    make = Maker(Mesh.parse("dp=2,tp=2"))
    make.modules += [("", "Net"), ("embed", "Embedding"), ("h", "ModuleList")]
    ids, target = make.input("ids", (4, 6), "S0 R", "int64"), make.input("target", (4, 6, 8), "S0 R")
    table = make.parameter("embed.weight", (7, 8), "R S0", "R+ S0")
    axes = (("vocabulary", ("tp",)),)
    embedded = [("embedding", (4, 6, 8), "S0 P")]
    variant = "vocabulary_parallel_embedding"
    x = make.compute("aten.embedding", (table, ids), embedded, "embed", variant, axes, size=7)
    x = make.collective("embedding_1", x, "tp", "R", "h.0.up", "sum the partial embedding over tp")
    for n in range(blocks):
        path = f"h.{n}"
        make.modules += [(path, "Block"), (f"{path}.up", "Linear"), (f"{path}.down", "Linear")]
        names = (("up.weight", (16, 8), "S0"), ("up.bias", (16,), "S0"), ("down.weight", (8, 16), "S1"))
        up, up_bias, down = [make.parameter(f"{path}.{k}", shape, f"R {tp}", f"R+ {tp}") for k, shape, tp in names]
        bias = make.parameter(f"{path}.down.bias", (8,), "R R", "R+ R")
        why = f"linear_{2 * n} is cut over tp: the gradient of x is summed in backward"
        y = make.collective(f"x_{n}", x, "tp", "R+", f"{path}.up", why)
        hidden = [(f"linear_{2 * n}", (4, 6, 16), "S0 S2")]
        y = make.compute("aten.linear", (y, up, up_bias), hidden, f"{path}.up")
        y = make.compute("aten.relu", (y,), [(f"relu_{n}", (4, 6, 16), "S0 S2")], path)
        why = f"linear_{2 * n + 1} is partial over tp: {bias} is counted once"
        counted = make.collective(f"bias_{n}", bias, "tp", "P", f"{path}.down", why)
        partial = [(f"linear_{2 * n + 1}", (4, 6, 8), "S0 P")]
        y = make.compute("aten.linear", (y, down, counted), partial, f"{path}.down")
        y = make.collective(f"y_{n}", y, "tp", "R", path, f"sum the partial linear_{2 * n + 1} over tp")
        shape = (4, 6, 8)
        attributes = {"p": 0.1, "index": n, "shape": shape, "layout": "S0 R"}
        y = make.compute("aten.dropout", (y,), [(f"drop_{n}", shape, "S0 R")], path, "random_dropout", **attributes)
        x = make.compute("aten.add", (x, y), [(f"add_{n}", shape, "S0 R")], path, alpha=1)
    loss = make.compute("aten.mse_loss", (x, target), [("mse_loss", (), "P R")], "", "parallel_mse_loss", count=192)
    paths = tuple(p.path for p in reversed(make.parameters))
    return make.program((loss,), loss, buckets=(GradientBucket(("dp",), "float32", paths),), name="residual")


def header(program: Program) -> Header:
    inputs = (Input("ids", (4, 6), "int64", "S0 R", 0, 7), Input("target", (4, 6, 8), "float32", "S0 R"))
    words = strategy_words(program)
    bare = Header(
        "0123456789abcdef", "autoshard plan net.py:build", "autoshard 0", "cpu-local", words, inputs, 1e-3, 2**20
    )
    return replace(bare, free_sizes=(FreeSize("batch", UNTRIED.format("batch"), 0, 0),))


def test_an_axis_over_which_nothing_is_cut_is_said_to_divide_nothing() -> None:
    """A model so small that repeating it is fastest."""
    graph = mlp_graph(2, 4, 8)
    plan = search(graph, load_hardware("a100-80g-sxm"), SearchRequest(Mesh.parse("dp=2")))
    program = lower(plan, graph)
    assert all(value.layout.placements[0] == Replicate() for value in program.values)
    assert strategy_words(program) == ("dp (2): divides nothing: its devices repeat the same work",)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_a_weight_that_is_cast_before_it_is_gathered_is_not_said_to_be_used_in_parts(precision: str) -> None:
    graph = apply_precision(mlp_graph(2, 64, 256), precision)
    plan = search(graph, load_hardware("h100-80g-sxm"), SearchRequest(Mesh.parse("dp=2,tp=1"), strategy="fsdp"))
    one, other = strategy_words(lower(plan, graph))
    assert "parameters in shards that are gathered for use" in one and "cuts" not in one.partition("; ")[2]
    assert other == "tp (1): one device, nothing to divide"


def test_golden_model() -> None:
    """AUTOSHARD_UPDATE_GOLDEN=1 writes it anew: read the diff."""
    program = residual_program()
    text = model_file(program, header(program))
    if os.environ.get("AUTOSHARD_UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_the_package_is_clean_for_the_linter_and_the_compiler(tmp_path: Path) -> None:
    program = residual_program()
    for name, text in package(program, header(program)).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert "autoshard" not in text or name in ("model_parallel.py", "README.md"), name
        assert "import autoshard" not in text and "from autoshard" not in text
        if name.endswith(".py"):
            compile(text, name, "exec")
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", str(tmp_path)]
        done = subprocess.run(ruff, capture_output=True, text=True, encoding="utf-8", timeout=HANGS)
        assert done.returncode == 0, done.stdout + done.stderr


def test_equal_programs_give_equal_text_and_depth_adds_no_code() -> None:
    two, five = residual_program(2), residual_program(5)
    first, second = (model_file(two, header(two)) for _ in range(2))
    assert first == second
    longer = model_file(five, header(five))
    code = [
        line for line in longer.splitlines() if line not in first.splitlines() and not line.startswith(("h.", "dp"))
    ]
    assert [line for line in code if "range(" in line] and len(code) < 12, code


def test_buffers_are_written_back_where_they_are_held() -> None:
    make = Maker(Mesh.parse("dp=2"))
    make.modules += [("", "Net"), ("norm", "BatchNorm1d")]
    x = make.input("x", (8, 4), "R")
    mean, var = (make.parameter(f"norm.{n}", (4,), "R", buffer=True) for n in ("running_mean", "running_var"))
    results = [("out", (8, 4), "R"), ("new_mean", (4,), "R"), ("new_var", (4,), "R")]
    attributes = {"training": True, "momentum": 0.1, "eps": 1e-5}
    out = make.compute("aten.batch_norm", (x, None, None, mean, var), results, "norm", **attributes)
    program = make.program((out,), updates=((mean, "new_mean"), (var, "new_var")))
    text = model_file(program, replace(header(program), inputs=()))
    assert "with torch.no_grad():" in text
    assert "local(self.norm.running_mean).copy_(" in text and "local(self.norm.running_var).copy_(" in text


def test_steps_over_several_axes_name_them_and_both_layouts() -> None:
    make = Maker(Mesh.parse("dp=2,tp=2"))
    x = make.input("x", (8, 12), "S0 S1")
    weight = make.parameter("weight", (8, 12), "S0 S0")
    used = make.move("weight_1", weight, "R+ S1", regathered=True)
    x = make.move("x_1", x, "S1 S0")
    x = make.compute("aten.mul", (x, make.move("weight_2", used, "S1 S0")), [("mul", (8, 12), "S1 S0")])
    x = make.move("mul_1", x, "S0 S0")
    x = make.move("mul_2", x, "R R", by_table=True)
    text = model_file(program := make.program((x,)), header(program))
    for line in (
        'self.dp_tp = mesh.joint(("dp", "tp"))',
        'exchange(local(self.weight), self.dp_tp, (8, 12), "S0 S0", "R+ S1", again=True)',
        'exchange(x, self.dp_tp, (8, 12), "S0 S1", "S1 S0")',
        "all_gather(x, self.dp_tp, 0)",
    ):
        assert line in text, text


def test_what_attention_reads_is_named_after_its_operands() -> None:
    """Through every move on the way there."""
    make = Maker(Mesh.parse("dp=2"))
    x, operands = make.input("x", (4, 6, 8), "S0"), []
    for n in range(3):
        weight = make.parameter(f"w{n}", (8, 8), "R", "R+")
        y = make.compute("aten.linear", (x, weight, None), [(f"linear_{n}", (4, 6, 8), "S0")])
        y = make.compute("aten.reshape", (y,), [(f"reshape_{n}", (4, 6, 2, 4), "S0")], shape=(2, 6, 2, 4))
        y = make.collective(f"whole_{n}", y, "dp", "R")
        y = make.compute("aten.transpose", (y,), [(f"transpose_{n}", (4, 2, 6, 4), "R")], dim0=1, dim1=2)
        operands.append(make.collective(f"cut_{n}", y, "dp", "S0"))
    out = make.compute("aten.scaled_dot_product_attention", tuple(operands), [("attention", (4, 2, 6, 4), "S0")])
    text = model_file(program := make.program((out,)), header(program))
    forward = text.partition("def forward")[2].partition("def build_model")[0]
    assigned = dict.fromkeys(re.findall(r"^ +(\w+) = ", forward, re.M))
    assert list(assigned)[:-1] == ["query", "key", "value"], text


def test_only_results_that_are_read_and_have_a_gradient_wait_for_a_weight() -> None:
    """The new statistics of a batch norm pass by what its backward gathers; what nobody reads has no name."""
    make = Maker(Mesh.parse("dp=2"))
    x, shard = make.input("x", (8, 4), "S0"), make.parameter("weight", (4,), "S0")
    mean, var = (make.parameter(name, (4,), "R", buffer=True) for name in ("mean", "var"))
    weight = make.move("weight_1", shard, "R+", regathered=True)
    results = [("out", (8, 4), "S0"), ("new_mean", (4,), "R"), ("new_var", (4,), "R")]
    attributes = {"training": True, "momentum": 0.1, "eps": 1e-5}
    out = make.compute("aten.batch_norm", (x, weight, None, mean, var), results, **attributes)
    make.values = [replace(v, requires_grad=v.requires_grad and v.name != "new_mean") for v in make.values]
    make.instructions[-1] = replace(make.instructions[-1], regathered=(weight,))  # type: ignore[call-arg]
    text = model_file(program := make.program((out,), updates=((mean, "new_mean"),)), header(program))
    assert re.search(r"^ +x, _, _, y, _ = .*batch_norm", text, re.M), text  # nobody reads the new variance
    assert re.search(r"^ +regather_before\(x, weight\)$", text, re.M), text


def test_a_sequential_root_keeps_its_numbered_names() -> None:
    make = Maker(Mesh.parse("dp=2"))
    make.modules += [("", "Sequential"), ("0", "Linear"), ("2", "Linear")]
    x = make.input("x", (8, 4), "R")
    first, second = make.parameter("0.weight", (4, 4), "R"), make.parameter("2.weight", (4, 4), "R")
    x = make.compute("aten.linear", (x, first, None), [("linear", (8, 4), "R")], "0")
    x = make.compute("aten.linear", (x, second, None), [("linear_1", (8, 4), "R")], "2")
    program = make.program((x,))
    text = model_file(program, replace(header(program), inputs=()))
    assert '"0.weight"' in text and 'local(self.layers["2"].weight)' in text and "(nn.Module)" in text


def test_a_list_is_one_in_whatever_order_its_modules_run() -> None:
    make = Maker(Mesh.parse("dp=2"))
    make.modules += [("", "Net"), ("a.h", "ModuleList")]
    x = make.input("x", (8, 4), "R")
    for n in (10, *reversed(range(10))):
        weight = make.parameter(f"a.h.{n}.weight", (4, 4), "R")
        x = make.compute("aten.linear", (x, weight, None), [(f"linear_{n}", (8, 4), "R")], f"a.h.{n}")
    text = model_file(program := make.program((x,)), replace(header(program), inputs=()))
    assert "h=nn.ModuleList(" in text and "local(self.a.h[10].weight)" in text, text


def looped_program(with_labels: bool) -> Program:
    """Three blocks that carry one value, read another in every turn and make a third, of which the last is used."""
    make = Maker(Mesh.parse("dp=2"))
    make.modules += [("", "Net"), ("h", "ModuleList")]
    x, y = make.input("x", (8, 4), "S0"), make.input("y", (8, 4), "S0")
    labels = make.input("labels", (8,), "S0", "int64") if with_labels else None
    for n in range(3):
        make.modules.append((f"h.{n}", "Block"))
        for k in range(5):
            x = make.compute("aten.add", (x, y), [(f"add_{n}_{k}", (8, 4), "S0")], f"h.{n}", alpha=1)
        side = make.compute("aten.relu", (x,), [(f"relu_{n}", (8, 4), "S0")], f"h.{n}")
    x = make.compute("aten.add", (x, side), [("sum", (8, 4), "S0")], "", alpha=1)
    if labels is not None:
        labels = make.compute("aten.view", (labels,), [("view", (8,), "S0")], "", dtype="int64", size=(4,))
        x = make.compute("aten.embedding", (x, labels), [("loss", (8, 4), "S0")], "")
    return make.program((x,))


def test_loops_over_a_part_of_a_list_and_over_what_is_no_list() -> None:
    def heads(program: Program) -> list[str]:
        return re.findall(r"^ +for block in (.*):$", model_file(program, replace(header(program), inputs=())), re.M)

    assert heads(residual_model(3)) == ["self.h"]
    assert heads(residual_model(5, odd=2)) == ["self.h[:2]", "self.h[3:]"]
    assert heads(residual_model(6, odd=4)) == ["self.h[:4]"]
    assert heads(residual_model(6, odd=0)) == ["self.h[1:]"]
    assert heads(residual_model(2, first=1)) == ['(self.h["1"], self.h["2"])']


def test_whole_numbers_behind_a_loop_have_names() -> None:
    """A loop's slots are no values: asked for their kind they have none."""
    text = model_file(program := looped_program(with_labels=True), header(program))
    assert "labels.reshape(4)" in text


def test_no_result_of_a_loop_takes_the_name_of_what_every_turn_reads() -> None:
    text = model_file(program := looped_program(with_labels=False), header(program))
    (loop,) = re.findall(r"^ +(.* = block\(.*\))\n +(.*)$", text, re.M)
    assert loop == ("x, z = block(x, y)", "x = x + z"), text


def test_synthetic_integers_fit_all_that_they_index() -> None:
    names = {"ids": (4, 2), "big": (9, 3), "small": (5, 3), "a": (4, 2, 3), "b": (4, 3), "column": (4,), "picked": (4,)}
    tensors = [Tensor(name, shape, "float32") for name, shape in names.items() if name not in ("ids", "column")]
    tensors += [Tensor("ids", (4, 2), "int64"), Tensor("column", (4,), "int64"), Tensor("free", (4,), "int64")]
    ops = (
        Op("a", "aten.embedding", ("big", "ids"), (), ("a",)),
        Op("column", "aten.select", ("ids",), (("dim", 1), ("index", 0)), ("column",)),
        Op("b", "aten.index_select", ("small", "column"), (("dim", 0),), ("b",)),
        Op("picked", "aten.index", ("b", "column", "column"), (), ("picked",)),
    )
    stored = (Parameter("big", "big"), Parameter("small", "small"))
    graph = Graph("g", tuple(tensors), ("ids", "free"), stored, (), ops, ("picked",), None)
    assert integer_bound(graph, "ids") == 3  # rows of 9 and of 5, columns of 3
    assert integer_bound(graph, "free") == 2
    bag = Op("a", "autoshard.embedding_bags", ("big", "ids", None, None), (), ("a",))
    assert integer_bound(replace(graph, ops=(bag,)), "ids") == 9
    for shape in ((4, 6), (6,)):  # scores of six classes for each row, and for one
        scores = replace(graph, tensors=tuple(replace(t, shape=shape) if t.name == "b" else t for t in tensors))
        loss = Op("a", "aten.cross_entropy_loss", ("b", "free", None), (), ("a",))
        assert integer_bound(replace(scores, ops=(loss,)), "free") == 6


def spell(target: str, operands: tuple[str | None, ...], **attributes: object) -> str:
    return ExpressionWriter(lambda size: f"self.local_{size.size}", "self.device").spell(target, operands, attributes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "operands", "attributes", "expected"),
    [
        ("aten.linear", ("x", "w", "b"), {}, "F.linear(x, w, b)"),
        ("aten.linear", ("x", "w", None), {}, "F.linear(x, w)"),
        ("autoshard.linear_in_out", ("x", "w", "b"), {}, "F.linear(x, w.t(), b)"),
        ("aten.add", ("x", "y"), {"alpha": 1}, "x + y"),
        ("aten.add", ("x", "y"), {"alpha": 2}, "torch.ops.aten.add(x, y, alpha=2)"),
        ("aten.pow", ("x",), {"self": 2.0}, "2.0**x"),
        ("aten.rsub", ("x",), {"other": 1, "alpha": 1}, "1 - x"),
        ("aten.reshape", ("x",), {"shape": (2, LocalSize(7, (AxisShard("tp"),)))}, "x.reshape(2, self.local_7)"),
        ("aten.to", ("x",), {"dtype": "bfloat16", "copy": False}, "x.to(torch.bfloat16)"),
        ("aten.slice", ("x",), {"dim": 1, "start": 1, "end": 2**63 - 1, "step": 1}, "x[:, 1:]"),
        ("aten.cat", ("x", "y"), {"dim": -1}, "torch.cat([x, y], dim=-1)"),
        ("aten.arange", (), {"end": 4, "pin_memory": False}, "torch.arange(4, device=self.device)"),
        ("aten.unheard_of", ("x", None), {"k": 3}, "torch.ops.aten.unheard_of(x, None, k=3)"),
        ("mine.op", ("x",), {"name": 'a"b'}, 'torch.ops.mine.op(x, name="a\\"b")'),
        ("aten.full_like", ("x",), {"fill_value": float("-inf")}, 'torch.full_like(x, float("-inf"))'),
    ],
)  # fmt: skip
def test_spelling(target: str, operands: tuple[str | None, ...], attributes: dict[str, object], expected: str) -> None:
    assert spell(target, operands, **attributes) == expected


def test_a_call_as_people_write_it_where_it_says_all() -> None:
    """What it has no word for must have its default; else the operator is called by its schema."""
    schema = "aten::elu(Tensor self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor"
    speller = ExpressionWriter(lambda size: str(size), "self.device", (schema,))
    usual = {"alpha": 2.0, "scale": 1, "input_scale": 1}
    assert speller.spell("aten.elu", ("x",), usual) == "F.elu(x, alpha=2.0)"
    assert speller.spell("aten.elu", ("x",), {**usual, "scale": 1.5}) == "torch.ops.aten.elu.default(x, 2.0, 1.5)"


def test_long_statements_break_as_the_formatter_breaks_them() -> None:
    arguments = ", ".join(f"argument_{i}" for i in range(9))
    assert statement(f"x = function({arguments})", 1)[1:-1] == [f"        {arguments}"]
    arguments = ", ".join(f"argument_{i}" for i in range(12))
    lines = statement(f"x = function({arguments})", 1, "why")
    assert lines[0] == "    # why" and lines[2] == "        argument_0," and lines[-1] == "    )"
    assert all(len(line) <= 120 for line in lines)


_words = st.text("ghjk", min_size=1, max_size=9)
_calls = st.recursive(
    _words | _words.map(lambda word: f"({word},)"),
    lambda inner: st.tuples(_words, st.lists(inner, max_size=4)).map(lambda call: f"{call[0]}({', '.join(call[1])})"),
    max_leaves=12,
)


@given(st.sampled_from(["", "ghjkghjk = "]), _calls, st.integers(5, 40), st.sampled_from(["", ","]))
def test_broken_lines_mean_the_same_and_are_short(target: str, call: str, width: int, tail: str) -> None:
    text = target + call
    lines = broken(text, width, tail)
    assert ast.dump(ast.parse("\n".join(lines))) == ast.dump(ast.parse(text))
    can_be_split = re.search(r"\([^()].*\)$", text) is not None
    assert (len(lines) > 1) == (can_be_split and len(text) + len(tail) > width)
    for line in lines[:-1] if can_be_split else ():  # a name and its bracket, or one element of a tuple, stays whole
        assert len(line) <= width or re.fullmatch(r" *([g-k]+ = )?(\(?[g-k]+[(),]*|[(),]+)", line)


def test_commas_in_quotes_and_brackets_do_not_split() -> None:
    assert split_commas('a, f(b, c), "d, e", [1, 2]') == ["a", "f(b, c)", '"d, e"', "[1, 2]"]
    assert broken("x" * 200, 100) == ["x" * 200]


# --- a package is the same text in every process, whatever order sets of names have there ---


EMITTED = """
import hashlib
from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.estimate.transformer import Transformer
from autoshard.estimate.transformer_graph import transformer_graph
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search

graph = transformer_graph(Transformer(1, 64, 4, 16, 128), 8, "bf16-mixed", "adamw").graph
for level in (0, 1):
    request = SearchRequest(Mesh.parse("dp=4"), strategy="fsdp", level=level)
    plan = search(graph, load_hardware("a100-80g-sxm"), request)
    text = emit(lower(plan, graph), plan, graph)["model_parallel.py"]
    assert "del " in text
    print(hashlib.sha256(text.encode()).hexdigest())
"""


def emitted(seed: int) -> str:
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": root, "AUTOSHARD_CACHE": "off"}
    done = subprocess.run([sys.executable, "-c", EMITTED], env=environment, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.mark.slow
def test_the_order_of_sets_does_not_show() -> None:
    assert len({emitted(seed) for seed in range(2)}) == 1


# --- copies of the user's files in a package: their names, and the statements that import them ---


FILES = (
    Registration("", ("a.unknown",)),
    Registration("kernels.fused", ("b.one", "b.two")),
    Registration("my-model", ("c.one",), "import torch\n"),
    Registration("my_model", ("d.one",), "import math\n"),
)


def test_files_get_names_that_can_be_imported() -> None:
    assert module_names(FILES) == ["", "kernels.fused", "user_operators.my_model", "user_operators.my_model2"]
    files = copied_files(FILES)
    assert files.pop("user_operators/__init__.py").startswith('"""')
    assert files == {"user_operators/my_model.py": "import torch\n", "user_operators/my_model2.py": "import math\n"}
    assert [module_names([Registration(name, (), "x")])[0] for name in ("2b", "class", "__init__")] == [
        "user_operators._2b", "user_operators.class_", "user_operators._init__"
    ]  # fmt: skip


def test_nothing_is_copied_where_names_do() -> None:
    assert copied_files(FILES[:2]) == {} and copied_files(()) == {}
    assert registering_lines(()) == [] and readme_section(()) == ""


def test_the_model_file_imports_each() -> None:
    assert registering_lines(FILES) == [
        "",
        'register_operators("", "a.unknown")',
        'register_operators("kernels.fused", "b.one", "b.two")',
        'register_operators("user_operators.my_model", "c.one")',
        'register_operators("user_operators.my_model2", "d.one")',
    ]
    text = readme_section(FILES)
    assert "`b.one`, `b.two`: `import kernels.fused`, which must be installed or on `PYTHONPATH`" in text
