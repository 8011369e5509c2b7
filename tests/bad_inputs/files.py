"""Rows of damaged files: graphs, plans, packages, profiles, measurements, and places to write to."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from tests.bad_inputs import GRAPH, PLAN, PROFILE, P, Row, at, swap, text, thing

DEEP = "[" * 100_000
NAN, INFINITE = {"float": "nan"}, {"float": "inf"}
_OPERATOR = {"module": "antigravity", "targets": ["my.op"], "text": ""}


def _recipe(target: str, *arguments: Any) -> list[dict[str, Any]]:
    return [{"paths": ["h.0.fc.weight"], "calls": [{"target": target, "arguments": arguments, "keywords": []}]}]


_RECIPE = {"paths": ["h.0.fc.weight"], "calls": [{"target": "os.system", "arguments": [], "keywords": []}]}
SAVED = {"operands": [], "results": [], "extra_bytes": 0, "aliases": []}

_NO_FILES = (
    ("", "is not JSON"),
    ("{", "is not JSON"),
    ("[]", "is not an autoshard"),
    ("null", "is not an autoshard"),
    ("{}", "is not an autoshard"),
    ("\x00" * 9, "is not JSON"),
    (DEEP, "nested too deep"),
    ('{"a":' * 100_000, "nested too deep"),
    ("\ufeff{}", "is not JSON"),
    (b"\xff\xfe\x00", "not a text file"),
    ('{"a": NaN}', "NaN is no number"),
    ('{"a": 1, "a": 1}', "the key 'a' stands in an object twice"),
    ('{"a": -Infinity}', "-Infinity is no number"),
    ('{"a": ' + "9" * 5000 + "}", "a number of 5000 digits"),
    ('{"a": ' + "9" * 309 + "}", "a number of 309 digits"),
    ('{"a": 1e999}', "1e999 is no number that a computer has"),
)
_THINGS = ("folder", "fifo", "loop", "dangling", "missing", "empty")


def _graph(place: str, value: Any, says: str) -> Row:
    return Row(P, 5, says, at(GRAPH, place, value), f"{place} = {value!r}")


GRAPHS = [
    *(Row(P, 5, says, text(GRAPH, content), repr(content[:9])) for content, says in _NO_FILES),
    *(Row(P, 5, GRAPH, thing(GRAPH, kind), kind) for kind in _THINGS),
    Row(P, 5, "is damaged", swap(GRAPH, '"ops": [', '"ops": [], "oops": ['), "ops renamed"),
    Row(P, 5, "the key 'ops' stands in an object twice", swap(GRAPH, '"ops": [', '"ops": [], "ops": ['), "ops twice"),
    Row(P, 5, "autoshard graph", swap(GRAPH, "autoshard.graph", "autoshard.plan"), "kind"),
    _graph("schema_version", 99, "schema version 99"),
    _graph("schema_version", None, "schema version None"),
    _graph("tensors", ..., "lacks 'tensors'"),
    _graph("zzz", 1, "unknown key 'zzz'"),
    _graph("tensors.0.shape", [8, 17], "shapes contradict"),
    _graph("tensors.0.shape", [8], "shapes contradict"),
    _graph("tensors.0.shape", [9, 16], "shapes contradict"),
    _graph("tensors.2.shape", [17, 16], "shapes contradict"),
    _graph("tensors.3.shape", [17], "shapes contradict"),
    _graph("tensors.4.shape", [8, 17], "op linear_0 (aten.linear): its shapes contradict"),
    _graph("tensors.5.shape", [8, 15], "op relu_0 (aten.relu): its shapes contradict"),
    _graph("tensors.0.shape", [-8, 16], "negative size"),
    _graph("tensors.0.shape", [8.5, 16], "is float, expected int"),
    _graph("tensors.0.shape", ["8", 16], "is str, expected int"),
    _graph("tensors.0.shape", [True, 16], "is bool, expected int"),
    _graph("tensors.0.shape", None, "is null, expected a list"),
    _graph("tensors.0.shape", [10**30, 16], "larger than 4 PiB"),
    _graph("tensors.0.shape", [1] * 2000, "has 2000 dims"),
    _graph("tensors.0.dtype", "float7", "unknown dtype 'float7'"),
    _graph("tensors.0.dtype", 3, "is int, expected str"),
    _graph("tensors.0.requires_grad", 1, "is int, expected bool"),
    _graph("tensors.0.name", "y", "tensor y appears twice"),
    _graph("tensors.0.name", "", "input, parameter or buffer x has no tensor"),
    _graph("tensors.0.name", "\ud800", "no text"),
    _graph("tensors.0.extra", 1, "unknown key 'extra'"),
    _graph("tensors.4", ..., "linear_0"),
    _graph("ops", [], "neither stored, given nor produced"),
    _graph("ops.0", ..., "linear_0"),
    _graph("ops.1.operands", ["relu_1"], "reads relu_1 before it is produced"),
    _graph("ops.0.operands", ["x", "w0", "b0", "b0"], "op linear_0 (aten.linear)"),
    _graph("ops.0.operands", ["x"], "op linear_0 (aten.linear)"),
    _graph("ops.0.operands", [1, 2, 3], "is int, expected str"),
    _graph("ops.0.results", ["x"], "makes x a second time"),
    _graph("ops.0.results", [], "reads linear_0 before it is produced"),
    _graph("ops.0.target", "", "has the target ''"),
    _graph("ops.0.target", "aten.conv2d", "op linear_0 (aten.conv2d)"),
    _graph("ops.0.target", "aten.embedding", "op linear_0 (aten.embedding)"),
    _graph("ops.0.target", "aten.nosuch", "op linear_0: there is no operator aten.nosuch"),
    _graph("ops.0.target", "aten.__class__", "op linear_0: there is no operator aten.__class__"),
    _graph("ops.0.target", "autoshard.nosuch", "op linear_0: there is no operator autoshard.nosuch"),
    _graph("schemas", ["aten:relu"], "'aten:relu' is no schema of an operator"),
    _graph("schemas", ["aten::relu(Tensor self, =1) -> Tensor"], "'=1' is no argument of a schema"),
    _graph("recipes", [_RECIPE], "call 0 of the recipe of h.0.fc.weight is 'os.system'"),
    *(
        _graph("ops.1.target", target, f"op relu_0: {target} is none that a graph may call")
        for target in (
            "aten.from_file",
            "aten.set_",
            "aten.resize_",
            "aten.pin_memory",
            "aten.fbgemm_linear_fp16_weight",
            "aten._nested_view_from_buffer",
            "aten._sparse_coo_tensor_unsafe",
            "aten.record_stream",
            "prim.data",
            "c10d.broadcast_",
            "_c10d_functional.wait_tensor",
            "inductor._alloc_from_pool",
            "quantized.add",
            "profiler._record_function_enter",
            "symm_mem.one_shot_all_reduce",
        )
    ),
    *(
        _graph("ops.1.target", target, f"op relu_0: nothing in it says where {target} comes from")
        for target in ("os.system", "builtins.eval", "torch.load", "my.op", "sys.exit")
    ),
    *(
        _graph("ops.1.target", target, "has the target")
        for target in (
            "import_module.os",
            "load_library.x",
            "__import__.os",
            "aten.relu;import os",
            "aten.relu\n",
            "aten.{0}",
            "aten.relu(__import__('os').system('x'))",
            "aten.%s",
            "aten.\u202eulr",
            "aten.relu.default",
        )
    ),
    Row(
        P,
        2,
        "names the module antigravity, which the package would import to register my.op",
        at(GRAPH, "registrations", [_OPERATOR]),
        "a module to import",
    ),
    Row(
        f"{P} --allow-module antigravit",
        2,
        "names the module antigravity",
        at(GRAPH, "registrations", [_OPERATOR]),
        "another module is allowed",
    ),
    Row(f"{P} --allow-module ''", 2, "--allow-module '': expected the name of a module"),
    Row(f"{P} --allow-module 'os;x'", 2, "--allow-module 'os;x': expected the name of a module"),
    *(
        _graph("registrations", [{**_OPERATOR, "module": module}], "no name of a module")
        for module in ("os;x", "../os", "os.", "os\nimport x", "{os}")
    ),
    _graph("registrations", [{**_OPERATOR, "targets": ["aten.relu"]}], "registers 'aten.relu', torch's own"),
    _graph("registrations", [{**_OPERATOR, "targets": ["x'); import os; ('"]}], "not namespace.name"),
    *(
        _graph(
            "recipes", _recipe(target, *args), f"the recipe of h.0.fc.weight: {target} is none that a graph may call"
        )
        for target, *args in (
            ("aten.from_file.default", "planted", True, 4),
            ("aten.from_file.out", "planted", True, 4),
            ("aten.set_.source_Storage",),
            ("aten.save.default",),
            ("aten.nosuch.default",),
            ("aten._pin_memory.default",),
            ("aten.fbgemm_linear_fp16_weight.default",),
            ("aten.hypot.nosuch",),
        )
    ),
    _graph("recipes", _recipe("aten.full.default", "__import__('os')", 1), "has \"__import__('os')\""),
    _graph("recipes", _recipe("aten.full.default", "%0"), "which is not there yet"),
    _graph("recipes", _recipe("prim.rand.default"), "is 'prim.rand.default'"),
    _graph("ops.0.attributes", {}, "is dict, expected a list"),
    _graph("ops.0.attributes", [["a"]], "has 1 entries, expected 2"),
    _graph("ops.0.attributes", [["a", 1], ["a", 2]], "appears twice"),
    _graph("ops.0.name", "relu_0", "op relu_0 appears twice"),
    _graph("ops.0.saved", None, "is null, expected an object"),
    _graph("ops.0.saved", {**SAVED, "operands": [9]}, "saves operand (9,) of 3"),
    _graph("ops.0.saved", {**SAVED, "extra_bytes": -1}, "saves -1 bytes"),
    _graph("ops.0.saved", {**SAVED, "extra_bytes": 10**40}, "bytes"),
    _graph("ops.0.saved", {**SAVED, "extra_bytes": NAN}, "is dict, expected int"),
    _graph("inputs", [], "before it is produced"),
    _graph("inputs", ["x", "y", "x"], "appears twice"),
    _graph("inputs", "xy", "is str, expected a list"),
    _graph("outputs", [], "no outputs"),
    _graph("outputs", ["x"], "the loss loss is no output"),
    _graph("outputs", ["nosuch"], "output nosuch has no tensor"),
    _graph("loss", "nosuch", "the loss nosuch has no tensor"),
    _graph("loss", "x", "not a scalar"),
    _graph("precision", "fp8", "the precision is 'fp8'"),
    _graph("optimizer", "lion", "the optimizer is 'lion'"),
    _graph("training", 1, "is int, expected bool"),
    _graph("discovered", [["nosuch", "a -> a"]], "op nosuch, which there is not"),
    _graph("discovered", [["linear_0", "garbage"]], "op linear_0: rule 'garbage'"),
    _graph("parameters.0.path", "h.1.fc.weight", "appears twice"),
    _graph("parameters.0.path", "", "is no path"),
    _graph("parameters.0.tensor", "nosuch", "nosuch has no tensor"),
    _graph("buffer_updates", [["w0", "x"]], "is no buffer"),
]


def _plan(place: str, value: Any, says: str, verb: str = "simulate") -> Row:
    return Row(f"{verb} pkg", 5, says, at(PLAN, place, value), f"{place} = {value!r}")


PLANS = [
    *(Row("simulate pkg", 5, says, text(PLAN, content), repr(content[:9])) for content, says in _NO_FILES),
    *(Row("report pkg", 5, "plan.json", thing(PLAN, kind), kind) for kind in _THINGS),
    *(Row("explain pkg", 5, "graph.json", thing("pkg/graph.json", kind), f"graph {kind}") for kind in _THINGS),
    *(Row(f"{verb} none", 5, "there is no package at none") for verb in ("simulate", "report", "explain", "verify")),
    *(Row(f"{verb} .", 5, "is not a package") for verb in ("simulate", "report", "explain", "verify")),
    Row("diff pkg none", 5, "there is no package at none"),
    Row("diff none pkg", 5, "there is no package at none"),
    Row("simulate ''", 2, "DIR '': expected a name"),
    _plan("schema_version", 1, "schema version 1"),
    _plan("mesh", "dp=2,tp=0", "axis tp has size 0"),
    _plan("mesh", "dp=100000000", "has 100000000 devices", "explain"),
    _plan("mesh", "dp=2", "expected a placement for each axis"),
    _plan("mesh", 4, "is int, expected str"),
    _plan("graph_hash", "0" * 64, "is not the graph that"),
    _plan("precision", "bf16-mixed", "its precision is 'bf16-mixed'"),
    _plan("optimizer", "lion", "its optimizer is 'lion'"),
    _plan("ops", [], "it lacks the operator linear_0"),
    _plan("ops.0", ..., "it lacks the operator linear_0", "explain"),
    _plan("ops.0.op", "nosuch", "it lacks the operator linear_0", "report"),
    _plan("ops.0.strategy", "garbage", "has no strategy 'garbage'"),
    _plan("ops.0.strategy", "", "has no strategy ''"),
    _plan("ops.0.forward_seconds", NAN, "forward_seconds is nan"),
    _plan("ops.0.forward_seconds", INFINITE, "forward_seconds is inf"),
    _plan("ops.0.forward_seconds", -1.0, "expected at least 0"),
    _plan("ops.0.forward_seconds", "1 s", "is str, expected"),
    _plan("predicted_seconds", NAN, "plan.predicted_seconds is nan", "report"),
    _plan("predicted_peak_bytes", NAN, "plan.predicted_peak_bytes is nan", "diff pkg"),
    _plan("certificate.lower_bound_seconds", NAN, "lower_bound_seconds is nan"),
    _plan("inputs.0.layout", "S9 S9", "it has no dim 9"),
    _plan("inputs.0.layout", "S0", "expected a placement for each axis"),
    _plan("inputs.0.layout", "S0 Q", "not a placement: 'Q'"),
    _plan("inputs.0.layout", "S0/3 R", "does not divide dim 0"),
    _plan("inputs.0.layout", "S0/0 R", "does not divide dim 0"),
    _plan("parameters.0.layout", "S9 S9", "it has no dim 9", "explain"),
    _plan("parameters.0.name", "nosuch", "it lacks the parameter w0"),
    _plan("parameters", [], "it lacks the parameter w0"),
    _plan("redistributions.0.tensor", "nosuch", "the model has no tensor nosuch"),
    _plan("redistributions.0.target", "S9 S9", "S9 S9"),
    _plan("redistributions.0.source", "S1 S1", "starts at `S1 S1`"),
    _plan("redistributions.0.steps", [], "ends at"),
    _plan("redistributions.0.steps.0.axes", ["xp"], "xp"),
    _plan("redistributions.0.steps.0.forward", "teleport", "'teleport'"),
    _plan("redistributions.0.consumers", ["nosuch"], "the model has no operator nosuch"),
    _plan("redistributions.0.forward_seconds", NAN, "forward_seconds is nan"),
    _plan("redistributions", [], "no redistribution leads there"),
    _plan("hardware_text", "", "is missing"),
    _plan("hardware_text", DEEP, "plan.json, profile a100-80g-sxm"),
    _plan("zzz", 1, "unknown key 'zzz'"),
    *(
        Row("report pkg", 5, "verification.json", text("pkg/verification.json", content), repr(content[:9]))
        for content in ("", "[]", "{}", DEEP, '{"passed": "yes"}', b"\xff")
    ),
    *(
        Row(f"{P[:-1]}pkg", 5, "manifest.json", text("pkg/manifest.json", content), f"manifest {content[:9]!r}")
        for content in ("", "[]", DEEP, '{"kind": "autoshard.package", "files": {"../x": ""}}')
    ),
]

_EMPTY = '{"kind": "autoshard.package", "files": {}}'
_EDITED = "plan.json was edited since autoshard wrote it"


def _manifest(name: str, kind: str, says: str) -> Row:
    """A file of this name, said to be ours, is something else."""

    def damage(folder: Path) -> None:
        at("pkg/manifest.json", f"files.{name}", "0" * 64)(folder)
        thing(f"pkg/{name}", kind)(folder)

    return Row(f"{P[:-1]}pkg", 2, says, damage, f"the manifest names a {kind}")


def _whole(name: str, kind: str) -> tuple[Row, ...]:
    typed = ("report pkg", "simulate pkg", "explain pkg", "diff pkg pkg", "verify pkg")
    return tuple(Row(verb, 5, name, thing(f"pkg/{name}", kind), f"{name} {kind}") for verb in typed)


PACKAGES = [
    *(
        Row(f"{verb} pkg", 5, _EDITED, at(PLAN, place, value), f"{place} = {value!r}")
        for verb in ("report", "simulate", "explain", "diff pkg", "verify")
        for place, value in (("mesh", "dp=2,tp=8"), ("predicted_seconds", 1e-9), ("model", "os:getcwd"))
    ),
    Row("report pkg", 5, _EDITED, text("pkg/manifest.json", _EMPTY), "no digests"),
    Row("simulate pkg", 5, "graph.json was edited", at("pkg/graph.json", "call", "x"), "the graph's call"),
    *(_manifest("sub", kind, "pkg/sub was edited since autoshard wrote it") for kind in ("folder", "fifo", "loop")),
    *(_manifest("train", kind, "pkg/train was edited") for kind in ("endless", "empty")),
    *(row for kind in ("folder", "fifo", "loop") for row in _whole("manifest.json", kind)),
    *(row for kind in ("fifo", "dangling") for row in _whole("plan.json", kind)),
    *(
        Row(f"{P[:-1]}pkg", 5, "is damaged", text("pkg/manifest.json", _EMPTY.replace("{}", files)), files)
        for files in ('{"../x": ""}', '{"/etc/passwd": ""}', '{"": ""}', '{"a\\u0000b": ""}', '{"a": 1}', '["a"]')
    ),
    *(
        Row("report pkg", 5, f"{name}.json", thing(f"pkg/{name}.json", kind), f"{name} {kind}")
        for name in ("verification", "styles") for kind in ("folder", "fifo")
    ),
    *(
        Row("report pkg", 5, "styles.json", text("pkg/styles.json", content), f"styles {content[:9]!r}")
        for content in ("", "{}", "[1]", "[{}]", DEEP, '[{"name": 1e999}]', "\ufeff[]")
    ),
]  # fmt: skip

_TRACE = "compare pkg t.json"
_EVENT = '{"ph": "X", "name": "x", "ts": %s, "dur": %s}'
TRACES = [
    Row(_TRACE, 5, "t.json: No such file"),
    *(Row(_TRACE, 5, "t.json", thing("t.json", kind), kind) for kind in ("folder", "fifo", "loop", "endless", "empty")),
    *(
        Row(_TRACE, 5, "t.json", text("t.json", content), repr(content[:40]))
        for content in (
            "", "{", "[]", "null", "1", '"x"', "[1]", "[[]]", '{"traceEvents": 5}', '{"traceEvents": {"a": 1}}', DEEP,
            "\ufeff[]", b"\xff\xfe", b"\x1f\x8b", b"\x1f\x8b\x08\x00aaaaaaaaaaaa", gzip.compress(b"[]", mtime=0)[:-4],
            f"[{_EVENT % ('NaN', 1)}]", f"[{_EVENT % (1, 1e999)}]", f"[{_EVENT % ('1e999', 1)}]",
            f"[{_EVENT % ('[]', 1)}]", f"[{_EVENT % ('null', 1)}]", '[{"ph": "X", "dur": 1}]',
            f"[{_EVENT % ('9' * 5000, 1)}]",
        )
    ),
]  # fmt: skip

_BANDWIDTH = 'bandwidth = { value = "300 GB/s"'
_MEMORY = 'memory = { value = "80 GiB"'
PROFILES = [
    *(
        Row("profiles mine.toml", 5, says, text(PROFILE, content), repr(content[:9]))
        for content, says in (
            ("", "errors"),
            ("x", "is not TOML"),
            ("a = " + DEEP, "nested too deep"),
            ("a = 1\na = 2", "is not TOML"),
            ("schema = 2", "expected 1, got 2"),
            (b"\xff\xfe", "not a text file"),
            ("\x00", "is not TOML"),
            ("#" * (1 << 20) + "\n", "larger than 1 MiB"),
            ("# a\n" * 500_000, "larger than 1 MiB"),
        )
    ),
    *(
        Row("profiles mine.toml", 5, "mine.toml", thing(PROFILE, kind), kind)
        for kind in ("folder", "fifo", "loop", "endless")
    ),
    *(
        Row(f"plan {GRAPH} --mesh dp=2 --hardware mine.toml --out o", 5, says, swap(PROFILE, old, new), new)
        for old, new, says in (
            (_MEMORY, 'memory = { value = "80"', "is not a quantity of bytes"),
            (_MEMORY, 'memory = { value = "0 GiB"', "expected more than zero"),
            (_MEMORY, 'memory = { value = "-1 GiB"', "not negative"),
            (_MEMORY, "memory = { value = 80", "with its unit in quotes"),
            (_MEMORY, "memory = { value = nan", "with its unit in quotes"),
            (_MEMORY, 'memroy = { value = "80 GiB"', "did you mean 'memory'?"),
            (_BANDWIDTH, 'bandwidth = { value = "300 GiB"', "is not a quantity of bandwidth"),
            ("value = 0.92", "value = nan", "got nan"),
            ("value = 0.92", "value = 1.5", "expected a fraction"),
            ("value = 0.92", "value = true", "expected a number"),
            ("devices = 8 ", "devices = 0 ", "expected a positive integer"),
            ("devices = 8 ", "devices = -8 ", "expected a positive integer"),
            ("devices = 8 ", "devices = 8.5 ", "expected a positive integer"),
            ("devices = 8 ", "devices = 7 ", "do not fit together"),
            ('topology = "switch"', 'topology = "swich"', "did you mean 'switch'?"),
            ("[[links]]", "[[lnks]]", "lnks"),
            ("schema = 1", "schema = true", "schema"),
            ("devices = 8 ", f"devices = {'9' * 60} ", "a number of 200 bits"),
            ("value = 0.92", "value = inf", "got inf"),
            ("devices_per_node = 8", "devices_per_node = 0", "expected a positive integer"),
            ('kind = "datasheet"', 'kind = "guess"', "got 'guess'"),
        )
    ),
    Row(
        f"plan {GRAPH} --mesh dp=2 --hardware mine.toml --out o", 5, "cost model",
        text(PROFILE, 'schema = 1\ncostmodel = "nvidia-z9"\n'), "costmodel",
    ),
    Row("profiles mine.toml", 5, "none.toml", text(PROFILE, 'schema = 1\ncostmodel = "none.toml"\n'), "no costmodel"),
]  # fmt: skip

_CALIBRATE = "calibrate --hardware cpu-local --out new.toml --measured m.json"
MEASURED = [
    Row(_CALIBRATE, 5, "can't read the measurements m.json"),
    *(
        Row(_CALIBRATE, 5, "m.json", text("m.json", content), repr(content[:20]))
        for content in (
            "", "[]", "{}", "null", DEEP, b"\xff", '{"matmul": 5}', '{"matmul": [NaN]}',
            '{"matmul": [1], "attention": [1], "memory": [1], "machine": "x", "dispatch_seconds": 1}',
            '{"matmul": [{}], "attention": [{}], "memory": [{}], "machine": "x", "dispatch_seconds": 1}',
            '{"matmul": {}, "attention": {}, "memory": {}, "machine": "x", "dispatch_seconds": 1}',
        )
    ),
]  # fmt: skip

_E = "estimate --hardware a100-80g-sxm --layers 2 --hidden 64 --heads 4 --sequence 32 --vocabulary 100 --batch 8"
PLACES = [
    *(
        Row(f"{typed} {option} '{place}'", 2, says)
        for typed, option in ((_E, "-o"), ("report pkg", "-o"), ("simulate pkg", "-o"), (f"trace {GRAPH}", "-o"))
        for place, says in (
            ("/", "can't write /"),
            ("", "expected a name"),
            (".", "can't write ."),
            ("pkg", "it is a folder"),
            ("none/x", "No such file"),
            ("mine.toml/x", "Not a directory"),
            ("/dev/full/x", "Not a directory"),
            ("n" * 300, "too long"),
        )
    ),
    *(
        Row(P[:-1] + f"'{place}'", 2, says)
        for place, says in (
            ("/", "holds something else"),
            ("", "--out '': expected a name"),
            (".", "holds something else"),
            ("mine.toml", "is a file, expected a folder"),
            ("mine.toml/x", "mine.toml"),
            ("n" * 300, "too long"),
        )
    ),
    Row(P, 2, "can't write", thing("o", "loop"), "--out is a loop"),
    Row(P[:-1] + "pkg", 2, "was edited since autoshard wrote it", text("pkg/train.py", "mine\n"), "edited"),
    Row("simulate pkg --export chakra -o mine.toml", 2, "is a file: --export writes a folder"),
    Row("simulate pkg --export chakra -o mine.toml/x", 2, "Not a directory"),
    Row("simulate pkg --export memory -o /proc/x", 2, "can't write /proc/x"),
]  # fmt: skip

ROWS = [*GRAPHS, *PLANS, *PACKAGES, *TRACES, *PROFILES, *MEASURED, *PLACES]
