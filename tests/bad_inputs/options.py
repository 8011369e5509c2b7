"""Rows of what is typed: verbs, options, units, meshes, pins, and combinations that contradict each other."""

from __future__ import annotations

from tests.bad_inputs import GRAPH, P, Row, text

E = "estimate --hardware a100-80g-sxm --layers 4 --hidden 64 --heads 4 --sequence 32 --vocabulary 100 --batch 8"
M = "plan model.py:build --hardware a100-80g-sxm --out o"
LONG = "9" * 5000

VERBS = [
    Row("", 2, "arguments are required: VERB"),
    Row("pln", 2, "invalid choice: 'pln'"),
    Row("profiles --frob", 2, "no option --frob"),
    Row("plan", 2, "MODEL"),
    Row(f"plan {GRAPH}", 2, "--hardware"),
    Row(f"plan {GRAPH} --hardware cpu-local", 2, "--mesh, or --devices to search for one"),
    Row("profiles x y", 2, "unrecognized arguments: y"),
    Row("diff pkg", 2, "required: B"),
    Row("diff pkg pkg pkg", 2, "unrecognized arguments: pkg"),
    Row("explain", 2, "required: DIR"),
    Row("verify", 2, "required: DIR"),
    Row("simulate", 2, "required: DIR"),
    Row("report", 2, "required: DIR"),
    Row(f"trace {GRAPH}", 2, "-o"),
    Row("estimate", 2, "--layers"),
    Row("calibrate --hardware cpu-local", 2, "--out"),
    Row(f"{P} --output x", 2, "no option --output"),
    Row(f"{P} -q", 2, "autoshard plan has no option -q"),
    Row("simulate pkg --export perfetto", 2, "invalid choice: 'perfetto'"),
    Row("verify pkg --backend nccl", 2, "invalid choice: 'nccl'"),
    Row("calibrate --hardware cpu-local --out x.toml --device tpu", 2, "invalid choice: 'tpu'"),
    Row("calibrate --hardware cpu-local --out x.toml --dtype int8", 2, "invalid choice: 'int8'"),
]

UNITS = [
    *(
        Row(f"{P} --memory-limit '{size}'", 2, f"--memory-limit '{size}'{says}")
        for size, says in {
            "0 GiB": ": expected more than zero",
            "0.0B": ": expected more than zero",
            "-1 GiB": ": expected a finite quantity of bytes",
            "1e400 GiB": ": expected a finite quantity of bytes",
            "0": " is not a quantity of bytes",
            "60": " is not a quantity of bytes",
            "": " is not a quantity of bytes",
            " ": " is not a quantity of bytes",
            "GiB": " is not a quantity of bytes",
            "60 gib": " is not a quantity of bytes",
            "60 GB/s": " is not a quantity of bytes",
            "60 s": " is not a quantity of bytes",
            "nan GiB": " is not a quantity of bytes",
            "inf GiB": " is not a quantity of bytes",
            "0x10 GiB": " is not a quantity of bytes",
            "1,5 GiB": " is not a quantity of bytes",
            "1_000 GiB": " is not a quantity of bytes",
            "６０ GiB": " is not a quantity of bytes",
            "60 GiB GiB": " is not a quantity of bytes",
        }.items()
    ),
    *(
        Row(f"{P} --time-limit '{time}'", 2, f"--time-limit '{time}'{says}")
        for time, says in {
            "0 s": ": expected more than zero",
            "-1 s": ": expected a finite quantity of seconds",
            "1e999 s": ": expected a finite quantity of seconds",
            "10": " is not a quantity of seconds",
            "": " is not a quantity of seconds",
            "soon": " is not a quantity of seconds",
            "5 GiB": " is not a quantity of seconds",
            "nan s": " is not a quantity of seconds",
            "10 seconds": " is not a quantity of seconds",
        }.items()
    ),
    *(
        Row(f"{E} --host-dispatch '{time}'", 2, f"--host-dispatch '{time}'")
        for time in ("", "10", "-1 us", "x", "5 GB", "1e999 s")
    ),
]

MESHES = [
    *(
        Row(f"plan {GRAPH} --hardware a100-80g-sxm --out o --mesh '{mesh}'", 2, says)
        for mesh, says in {
            "": "the mesh is empty",
            " ": "the mesh is empty",
            "dp": "expected name=size, got 'dp'",
            "2x2": "expected name=size, got '2x2'",
            "dp=": "expected name=size, got 'dp='",
            "=2": "expected name=size, got '=2'",
            ",": "expected name=size, got ''",
            "dp=2,": "expected name=size, got ''",
            "dp=2;tp=2": "expected name=size",
            "dp=2 tp=2": "expected name=size",
            "dp=-2": "expected name=size, got 'dp=-2'",
            "dp=2.0": "expected name=size, got 'dp=2.0'",
            "dp=1e3": "expected name=size, got 'dp=1e3'",
            "dp=２": "expected name=size",
            "2dp=2": "expected name=size",
            "d-p=2": "expected name=size",
            "dp=0": "axis dp has size 0",
            "dp=2,tp=0": "axis tp has size 0",
            "dp=2,dp=2": "axis dp is named twice",
            "dp=4481": "describes at most 4480",
            "dp=100000000": "describes at most 4480",
            "dp=999999999999999999": "describes at most 4480",
            f"dp={LONG}": "a number of 5000 digits",
            "a=1,b=1,c=1,d=1,e=1,f=1,g=1,h=1,i=1": "the mesh has 9 axes, expected at most 8",
            ",".join(f"a{n}=2" for n in range(12)): "the mesh has 12 axes, expected at most 8",
            "d" * 100 + "=2": "expected at most 64 letters",
        }.items()
    ),
    *(
        Row(f"plan {GRAPH} --hardware a100-80g-sxm --out o --devices '{number}'", 2, says)
        for number, says in {
            "0": "--devices '0': expected a whole number, at least 1",
            "-1": "--devices '-1': expected a whole number, at least 1",
            "x": "--devices 'x': expected a whole number",
            "": "--devices '': expected a whole number",
            "1.5": "--devices '1.5': expected a whole number",
            "1e3": "--devices '1e3': expected a whole number",
            "4481": "--devices 4481: a100-80g-sxm describes at most 4480",
            "10000000": "describes at most 4480",
            LONG: "expected a whole number",
        }.items()
    ),
    Row(f"{P} --devices 8", 2, "the mesh dp=2,tp=2 has 4 devices, but --devices says 8"),
    Row("prove relu --mesh tp=100000000", 2, "at most 64"),
    Row("prove relu --mesh tp=x", 2, "expected name=size, got 'tp=x'"),
    Row("prove relu --mesh ''", 2, "the mesh is empty"),
]

CHOICES = [
    Row(f"{P} --precision fp8", 2, "invalid choice: 'fp8'"),
    Row(f"{P} --optimizer lion", 2, "invalid choice: 'lion'"),
    Row(f"{P} --precision bf16-mixed", 2, "--precision can't change the saved graph"),
    Row(f"{P} --optimizer sgd", 2, "--optimizer can't change the saved graph"),
    Row(f"{P} --eval", 2, "--eval can't change the saved graph"),
    Row(f"{P} --with n=2", 2, "--with can't change the saved graph"),
    Row(f"{P} --with n", 2, "expected NAME=VALUE, got 'n'"),
    Row(f"{P} --with", 2, "--with"),
    Row(f"{P} --with 1x=2", 2, "expected NAME=VALUE, got '1x=2'"),
    Row(f"{P} --verify", 2, "the original model is needed to verify"),
    Row(f"{P} --verify-with n=2", 2, "the original model is needed to verify"),
    Row(f"{P} --full", 2, "the original model is needed to verify"),
    Row(f"{P} --backend lockstep", 2, "the original model is needed to verify"),
    Row(f"{M} --mesh dp=2 --full --verify-with n=2", 2, "full size and n at once"),
    Row(f"{M} --mesh dp=2 --stages 4 --micro-batches 2", 2, "2 micro-batches for 4 stages"),
    Row(f"{M} --mesh dp=2 --stages 2 --virtual-stages 2 --micro-batches 3", 2, "micro-batches in groups of 2"),
    *(
        Row(f"{typed} -", 2, f"{option} -: expected a name, for autoshard reads and writes files and folders")
        for typed, option in {
            P.removesuffix(" o"): "--out",
            f"trace {GRAPH} -o": "--output",
            f"{P} --pins": "--pins",
            "simulate pkg -o": "--output",
            "report pkg -o": "--output",
            "simulate": "DIR",
            "verify": "DIR",
            f"{E} -o": "--output",
            "compare pkg t.json -o": "--out",
            "calibrate --hardware cpu-local --out": "--out",
        }.items()
    ),
    Row(f"{P} --level fast", 2, "unknown level 'fast'"),
    Row(f"{P} --level 3", 2, "unknown level '3'"),
    Row(f"{P} --level ''", 2, "unknown level ''"),
    Row(f"{P} --solver fastest", 2, "unknown solver 'fastest'"),
    Row(f"{P} --solver exhaustive", 2, "exhaustive search over"),
    Row(f"{P} --solver ilp --ilp-engine gurobbi", 2, "the ilp engine 'gurobbi' is not known"),
    Row(f"{P} --strategy fastest", 2, "unknown strategy 'fastest'"),
    *(Row(f"{P} --strategy random:{seed}", 2, "expected a whole number") for seed in ("x", "", "-1")),
    Row(f"plan {GRAPH} --devices 4 --hardware cpu-local --out o --strategy random:1", 2, "needs a mesh"),
    Row(f"{P} --memory-limit '1 KiB'", 3, "proved: no plan of mesh"),
    Row(f"plan {GRAPH} --mesh dp=2 --hardware '' --out o", 2, "unknown hardware profile ''"),
    Row(f"plan {GRAPH} --mesh dp=2 --hardware a100 --out o", 2, "unknown hardware profile 'a100'"),
    Row(f"plan {GRAPH} --mesh dp=2 --hardware .. --out o", 2, "unknown hardware profile '..'"),
    Row(f"plan {GRAPH} --mesh dp=2 --hardware none.toml --out o", 5, "none.toml: No such file"),
    Row("plan model.py:build --precision bf16-mixed --mesh dp=2 --hardware ascend-910a", 2, "has no bfloat16"),
    Row("profiles zzz", 2, "unknown hardware profile 'zzz'"),
    Row("profiles none.toml", 5, "can't read the hardware profile none.toml"),
    Row("prove nosuch", 2, "there is no rule for 'nosuch'"),
    Row("prove ''", 2, "there is no rule for ''"),
    Row("prove relu --seeds 0", 2, "--seeds '0': expected a whole number, at least 1"),
    Row("prove relu --seeds 99999999999", 2, "expected a whole number, from 1 to 16777216"),
    Row("explain pkg nosuch", 2, "is called 'nosuch'"),
    Row("explain pkg --why-not 'Shard(0)@tp'", 2, "--why-not needs to know where"),
    Row("explain pkg h.0.fc --why-not x", 2, "no mesh axis in 'x'"),
    Row("explain pkg h.0.fc --why-not ''", 2, "--why-not ''"),
    Row("explain pkg h.0.fc.weight --why-not 'Shard(0)@xp'", 2, "unknown mesh axis 'xp'"),
    Row("calibrate --hardware cpu-local --out x", 2, "ends in .toml"),
    Row("calibrate --hardware cpu-local --out mine.toml", 2, "mine.toml exists already"),
    Row("calibrate --hardware cpu-local --out none/x.toml", 2, "there is no folder none"),
    Row("calibrate --hardware cpu-local --out x.toml --processes 0", 2, "--processes '0': expected a whole number"),
    Row("calibrate --hardware cpu-local --out x.toml --processes 17", 2, "at most 16 devices"),
    Row("calibrate --hardware ascend-910a --out x.toml --dtype bfloat16", 2, "can't compute in bfloat16"),
]  # fmt: skip

PINS = [
    *(
        Row(f"{P} --pin '{pin}'", 2, says)
        for pin, says in {
            "": "expected WHAT=HOW",
            "h.0.fc": "expected WHAT=HOW",
            "h.0.fc=": "pin 'h.0.fc='",
            "=Shard(0)@tp": "pin '=Shard(0)@tp'",
            "h.9.fc=Shard(0)@tp": "is called 'h.9.fc'",
            "h.0.fc=Shard(0)@xp": "unknown mesh axis 'xp'",
            "h.0.fc=Shrad(0)@tp": "pin",
            "h.0.fc=Shard(2)@tp": "the nearest offered",
            "h.0.fc=((2, 2), (2, 2), None)": "it needs 8 devices",
            "h.0.fc=((3, 1), (1, 1), None)": "3 shards",
            "h.0.fc=((0, 1), (1, 1), None)": "a cut must be at least 1, got 0",
            "h.0.fc=((1.5, 1), (1, 1), None)": "expected whole numbers",
            "h.0.fc=((((": "can't read the cuts",
            "modul:fc=n@tp": "unknown kind 'modul'",
        }.items()
    ),
    Row(f"{P} --pins ''", 2, "--pins '': expected a name"),
    Row(f"{P} --pins none.toml", 5, "can't read the pins none.toml"),
    Row(f"{P} --pins pkg", 5, "can't read the pins pkg"),
    *(
        Row(f"{P} --pins pins{kind}", 5, says, text(f"pins{kind}", content), repr(content[:20]))
        for kind, content, says in (
            (".toml", "a = = b", "is not TOML"),
            (".toml", "a = " + "[" * 100_000, "nested too deep"),
            (".toml", "a = 1\na = 2", "is not TOML"),
            (".toml", b"\xff\xfe", "not a text file"),
            (".toml", "x = 5", "x is 5, expected text or a list"),
            (".toml", "pins = 5", "expected a table"),
            (".json", "", "is not JSON"),
            (".json", "{", "is not JSON"),
            (".json", "[" * 100_000, "nested too deep"),
            (".json", "[]", "expected a table"),
            (".json", '{"x": NaN}', "NaN is no number"),
            (".json", '{"x": 1}', "expected text or a list"),
        )
    ),
]  # fmt: skip

ESTIMATES = [
    *(
        Row(f"{E} --{name} '{value}'", 2, says)
        for name, value, says in (
            ("batch", "9999999", "at most 100000 together"),
            ("batch", "0", "--batch '0': expected a whole number"),
            ("batch", "x", "--batch 'x': expected a whole number"),
            ("batch", "1e3", "--batch '1e3'"),
            ("batch", "", "--batch ''"),
            ("batch", LONG, "expected a whole number"),
            ("layers", "0", "--layers '0'"),
            ("layers", "10000000", "layers 10000000: expected at most"),
            ("hidden", "63", "4 heads do not divide hidden 63"),
            ("hidden", "100000000000", "--hidden '100000000000': expected a whole number"),
            ("heads", "3", "3 heads do not divide hidden 64"),
            ("heads", "-4", "--heads '-4'"),
            ("sequence", "0", "--sequence '0'"),
            ("sequence", "100000000000", "--sequence '100000000000': expected a whole number"),
            ("vocabulary", "0", "--vocabulary '0'"),
            ("vocabulary", "999999999999", "--vocabulary '999999999999': expected a whole number"),
            ("dp", "10000000", "is no multiple of micro-batch 1 x dp 10000000"),
            ("dp", "3", "is no multiple of micro-batch 1 x dp 3"),
            ("tp", "3", "tp 3 does not divide 4 heads"),
            ("pp", "7", "4 layers are too few for 7 pipeline chunks"),
            ("pp", "-1", "--pp '-1'"),
            ("interleave", "2", "needs the interleaved schedule"),
            ("kv-heads", "3", "3 KV heads do not divide 4 heads"),
            ("kv-heads", "-4", "--kv-heads '-4'"),
            ("feedforward", "-1", "--feedforward '-1'"),
            ("micro-batch", "0", "--micro-batch '0'"),
            ("micro-batch", "3", "is no multiple of micro-batch 3"),
            ("zero", "4", "invalid choice: 4"),
            ("zero", "x", "invalid int value: 'x'"),
            ("schedule", "foo", "invalid choice: 'foo'"),
            ("precision", "fp4", "invalid choice: 'fp4'"),
        )
    ),
    Row(f"{E} --dp 8 --batch 8000 --tp 4 --pp 2 --hardware cpu-local", 2, "describes at most"),
    Row(f"{E} --precision fp16 --hardware cpu-local", 2, "--precision fp16: cpu-local has no float16"),
    Row(f"{E} --tp 2 --sequence 33 --sequence-parallel", 2, "does not divide the sequence 33"),
]

_N, _BILLION = "a number of 5000 digits", "1000000000"
NUMBERS = [
    *(
        Row(f"{P} --strategy random:{seed}", 2, "expected a whole number of at most 18 digits")
        for seed in ("9" * 99, "9" * 19, "１", "1.5", "nan", "1e3", "0x1", "+1")
    ),
    Row(f"{P} --strategy random:{LONG}", 2, _N),
    *(
        Row(f"{P} {option} {value}", 2, says)
        for option, value, says in (
            ("--micro-batches", "10000000", "10000000 micro-batches through 1 part of the model: expected at most"),
            ("--stages 2 --micro-batches", "10000000", "through 2 parts of the model: expected at most 100000"),
            ("--micro-batches", LONG, "expected a whole number"),
            ("--global-batch", "10000000000", "expected a whole number, from 1 to 16777216"),
            ("--global-batch", "800000000", "expected a whole number, from 1 to 16777216"),
            ("--global-batch", "8000000", "1000000 micro-batches through 1 part of the model"),
            ("--stages", _BILLION, "expected a whole number, from 1 to 16777216"),
            ("--stages", "nan", "--stages 'nan': expected a whole number"),
            ("--stages", "2,-1", "--stages '-1': expected a whole number"),
            ("--virtual-stages", _BILLION, "expected a whole number, from 1 to 16777216"),
            ("--micro-batch", LONG, "expected a whole number"),
            ("--context-parallel", _BILLION, "expected a whole number, from 1 to 16777216"),
            ("--expert-parallel", "-1", "expected a whole number, at least 1"),
            ("--zero", "9" * 99, "expected auto, or of 0, 1, 2, 3"),
            ("--zero", "-1", "expected auto, or of 0, 1, 2, 3"),
            ("--recompute", "''", "unknown recomputation ''"),
            ("--schedule", "''", "unknown schedule ''"),
            ("--level", "9" * 99, "unknown level"),
            ("--pin", f"h.0.fc=Shard({LONG})@tp", _N),
            ("--pin", f"h.0.fc.weight=Shard({'9' * 99})@tp", "the nearest offered"),
            ("--pin", f"stage:h.0={LONG}", _N),
            ("--pin", f"'h.0.fc=(({LONG}, 1), (1, 1), None)'", _N),
            ("--fuse", f"all_reduce=index:{LONG}", _N),
            ("--fuse", "all_reduce=1e400MiB", "--fuse 'all_reduce=1e400MiB'"),
            ("--fuse", "all_reduce=-1MiB", "--fuse 'all_reduce=-1MiB'"),
            ("--fuse", "all_reduce=nanMiB", "--fuse 'all_reduce=nanMiB'"),
            ("--with", f"n={LONG}", _N),
        )
    ),
    Row(f"{E} --search --devices {_BILLION}", 2, "--devices '1000000000': expected a whole number, from 1 to 16777216"),
    Row(f"{E} --search --devices 8 --top {_BILLION}", 2, "'1000000000': expected a whole number, from 1 to 16777216"),
    Row(f"explain pkg h.0.fc.weight --why-not Shard({LONG})@tp", 2, _N),
    Row(f"verify {LONG}", 2, _N),
]  # fmt: skip

ROWS = [*VERBS, *UNITS, *MESHES, *CHOICES, *PINS, *ESTIMATES, *NUMBERS]
