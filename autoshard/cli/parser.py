"""The options of every verb, as an argparse parser."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autoshard import __version__
from autoshard.cli.option_values import LARGEST, module, path, quantity, several, whole
from autoshard.constraints.size_histogram import MOST_POINTS
from autoshard.errors import UsageError

Verb = Callable[[argparse.Namespace], int]
DEFAULT_OUT = "autoshard-out"
EXIT_CODES = (
    "Exit codes: 0 ok, 1 bug, 2 usage, 3 no plan fits, 4 model not captured, 5 invalid file, 6 check failed, "
    "130 interrupted."
)


class Parser(argparse.ArgumentParser):
    """argparse with our one-sentence errors; a misspelt option is reported before one that is missing because of it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, before = self._option_string_actions, list(args or ())
        if not any(isinstance(action, argparse._SubParsersAction) for action in self._actions):
            for word in before[: before.index("--")] if "--" in before else before:
                name = word.partition("=")[0]
                if " " not in name and (name.startswith("--") or re.fullmatch("-[A-Za-z]", name)) and name not in known:
                    words = {option.lstrip("-"): option for option in known}  # the dashes are alike in all
                    near = [words[word] for word in difflib.get_close_matches(name.lstrip("-"), words, 1)]
                    raise UsageError(f"{self.prog} has no option {name}", near[0] if near else f"{self.prog} --help")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, _meant(message, self.prog) or f"{self.prog} --help")


def _meant(message: str, prog: str) -> str:
    """Nearest existing choice to an invalid one, as typed: `--export profiler`, `autoshard plan`."""
    match = re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message)
    if not match:
        return ""
    choices = re.findall(r"[\w.-]+", match[3])
    begun = [choice for choice in choices if match[2] and choice.startswith(match[2])]
    near = begun or difflib.get_close_matches(match[2], choices, 1)
    if not near:
        return ""
    return f"{match[1] if match[1].startswith('-') else prog} {near[0]}"


def parser(verbs: Sequence[Verb], words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The parser; `options.run` is the verb's function, whose name and docstring the help shows. `words`: what was
    typed; other verbs then get no options, as these take a while to make."""
    result = Parser(
        prog="autoshard",
        allow_abbrev=False,
        description="Automatic parallelism for PyTorch: plan, verify, simulate, and write a training package.",
        epilog=EXIT_CODES,
    )
    result.add_argument("--version", action="version", version=f"autoshard {__version__}")
    added = result.add_subparsers(metavar="VERB", required=True, parser_class=Parser)
    for run in verbs:
        subparser = _verb(added, run)
        if words is None or run.__name__ in words:
            _OPTIONS[run.__name__](subparser)
    return result


def _verb(verbs: Any, run: Verb) -> argparse.ArgumentParser:
    text = (run.__doc__ or "").strip()
    parser: argparse.ArgumentParser = verbs.add_parser(run.__name__, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    kinds = "file.py:callable, package.module:callable, a torch.export .pt2 file, or a graph saved by `autoshard trace`"
    parser.add_argument("model", metavar="MODEL", help=kinds)
    _add_pairs(parser, "--with", "arguments", "keyword arguments for the callable")
    loss = "module:function or file.py:function that computes the loss from the model's output (and targets or labels)"
    parser.add_argument("--loss", metavar="FUNCTION", help=loss)
    text = "with a saved graph: a module that its package may import, for custom operators; repeatable"
    read = module("--allow-module")
    parser.add_argument("--allow-module", action="append", type=read, default=[], metavar="NAME", help=text)
    parser.add_argument("--precision", choices=["fp32", "bf16-mixed", "fp16-mixed", "fp8-mixed"], help="default fp32")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], help="default adamw")
    parser.add_argument("--eval", action="store_true", help="plan inference: model.eval(), no backward")
    sizes = "sizes that change from step to step, such as batch=8..512/8,sequence=128..4096/64: the range, and what "
    sizes += "divides them; NAME=…@INPUT.DIM for other dims. One plan is then for all of them"
    parser.add_argument("--dynamic", action="append", default=[], metavar="SIZES", help=sizes)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    output = path("--output")
    parser.add_argument(
        "-o", "--output", "--out", type=output, required=True, metavar="FILE", help="such as model.graph.json"
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--mesh", help="named mesh axes, slowest links first: dp=2,tp=2; or give --devices to search for a mesh"
    )
    known = "see `autoshard profiles`, or a .toml file; NAME:8,NAME:8 for two kinds of devices"
    parser.add_argument("--hardware", required=True, metavar="NAME", help=known)
    out = f"default {DEFAULT_OUT}/"
    parser.add_argument("-o", "--out", type=path("--out"), default=Path(DEFAULT_OUT), metavar="DIR", help=out)
    devices = "number of devices: searches for the best mesh, or checks --mesh. Several with commas (8,6,4): a plan "
    devices += "for each, and train.py runs the one for the processes that start"
    parser.add_argument("--devices", type=several("--devices"), metavar="N", help=devices)
    limit, read = 'per device, such as "60 GiB"; default: the profile\'s', quantity("--memory-limit", "bytes")
    parser.add_argument("--memory-limit", type=read, metavar="SIZE", help=limit)
    _add_step_options(parser)
    _add_servers(parser)
    _add_search_options(parser)
    styles = "best (default), a well-known baseline (dp, fsdp, hsdp, megatron, megatron-sp, fsdp-tp), or random:SEED"
    parser.add_argument("--strategy", default="best", metavar="NAME", help=styles)
    often = "how often steps have which dynamic sizes: a file that `autoshard sizes` wrote, or NAME=N,NAME=N:WEIGHT "
    often += "with ; between: the expected step is minimised, memory is held at the largest sizes"
    parser.add_argument("--sizes", metavar="FILE", help=often)
    split = "split the sizes into at most so many buckets, each with strategies of its own over one layout of the "
    split += "parameters, where that makes the expected step shorter; with --sizes (default 1)"
    parser.add_argument("--buckets", type=_count("--buckets", MOST_POINTS), default=1, metavar="K", help=split)
    _add_no_cache(parser)
    modes = "stand-alone, data-parallel, semi-auto (data parallel except for pins) or auto (default)"
    parser.add_argument("--mode", metavar="NAME", help=modes)
    parser.add_argument("--pareto", action="store_true", help="also show the Pareto front of step time and memory")
    parser.add_argument(
        "--verify", action="store_true", help="run the package against the original model on this machine"
    )
    _add_verify_options(parser)


def _add_servers(parser: argparse.ArgumentParser) -> None:
    servers = "train on N parameter servers, which hold the parameters and the optimizer's state: a package for Ray"
    parser.add_argument("--parameter-servers", type=whole("--parameter-servers"), metavar="N", help=servers)
    workers = "workers of the servers, one device each, or the least and the most of them; default 1"
    parser.add_argument("--workers", metavar="W|MIN:MAX", help=workers)
    each = "apply the gradient of each micro-batch at once, not those of a step together"
    parser.add_argument("--asynchronous", action="store_true", default=None, help=each)
    age = "with --asynchronous: the most updates between a worker's reading of parameters and its gradient's; default "
    age += "2W"
    parser.add_argument("--staleness", type=whole("--staleness", 0), metavar="K", help=age)
    tables = "of tables whose rows alone are read: rowwise-adagrad (default), or same as of all others"
    parser.add_argument("--table-optimizer", metavar="NAME", help=tables)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    loader = "file.py:function that yields batches, as train.py --data takes it"
    parser.add_argument("loader", metavar="LOADER", help=loader)
    named = "the dynamic sizes, as `autoshard plan --dynamic` takes them"
    parser.add_argument("--dynamic", action="append", required=True, metavar="SIZES", help=named)
    most = "batches to read; default 10000"
    parser.add_argument("--batches", type=whole("--batches"), default=10_000, metavar="N", help=most)
    out = "default sizes.json"
    output = path("--output")
    parser.add_argument("-o", "--output", "--out", type=output, default=Path("sizes.json"), metavar="FILE", help=out)


def _add_no_cache(parser: argparse.ArgumentParser) -> None:
    text = "do not use the search cache (~/.cache/autoshard/searches, or $AUTOSHARD_CACHE)"
    parser.add_argument("--no-cache", action="store_true", help=text)


def _add_step_options(parser: argparse.ArgumentParser) -> None:
    counts = "micro-batches per step (gradient accumulation), each of the example inputs' batch size; default 1"
    names = "--micro-batches", "--micro-size", "--accumulate"
    parser.add_argument(*names, type=whole("--micro-batches"), metavar="M", help=counts)
    samples = "samples per step: the example inputs' batch size times the number of micro-batches. With --devices and "
    samples += "no --mesh, the mesh, stages, micro-batches, recomputation and ZeRO are searched together; each option "
    samples += "below is then auto, a value, or comma-separated values"
    parser.add_argument("--global-batch", type=whole("--global-batch"), metavar="B", help=samples)
    one = "samples per replica and micro-batch"
    parser.add_argument("--micro-batch", type=_count("--micro-batch"), metavar="N", help=one)
    shares = "on several kinds of devices, slices of a step's micro-batches per kind, or per coordinate of the first "
    shares += "mesh axis, e.g. 12,4; or auto (default there: the shortest step); or equal"
    parser.add_argument("--batch-shares", metavar="N,N", help=shares)
    second = "degree of {} parallelism (mesh axis {}) in a search with --devices and --global-batch; default 1; auto "
    second += "tries more where {} (a slow search)"
    long = second.format("context", "cp", "sequences are long")
    many = second.format("expert", "ep", "the model has experts")
    parser.add_argument("--context-parallel", type=_count("--context-parallel"), metavar="N", help=long)
    parser.add_argument("--expert-parallel", type=_count("--expert-parallel"), metavar="N", help=many)
    zero = "ZeRO level over the replicas of a weight: 0 off; 1 shards weights and optimizer state, one gather a step; "
    zero += "2 also reduce-scatters gradients for each micro-batch; 3 also gathers weights for each micro-batch; or "
    zero += "auto"
    parser.add_argument("--zero", metavar="Z", help=zero)
    parser.add_argument("--enable-parallel-optimizer", action="store_true", help="same as --zero 1 (MindSpore's name)")
    scattered = "same as --zero 2 (MindSpore's name): accumulated gradients are sharded"
    parser.add_argument("--gradient-accumulation-shard", action="store_true", help=scattered)
    small = "with --enable-parallel-optimizer: keep parameters up to KB unsharded; default 64"
    read = whole("--parallel-optimizer-threshold", 0)
    parser.add_argument("--parallel-optimizer-threshold", type=read, metavar="KB", help=small)
    stages = "pipeline stages; each has its own devices, with the mesh --mesh; default 1"
    parser.add_argument("--stages", "--pipeline-stages", type=_count("--stages"), metavar="S", help=stages)
    place = "auto: which of --stages places runs what is not placed, by the shortest step; none: place() of the model "
    place += "has no effect"
    parser.add_argument("--place", metavar="HOW", help=place)
    mesh = "the mesh of one place, e.g. 1:dp=2,tp=2; repeatable; other places have the mesh --mesh"
    parser.add_argument("--place-mesh", action="append", default=[], metavar="PLACE:MESH", help=mesh)
    parts = "model chunks per stage, for the interleaved schedule; default 1"
    parser.add_argument("--virtual-stages", type=_count("--virtual-stages"), metavar="V", help=parts)
    parser.add_argument("--schedule", metavar="NAME", help="pipeline schedule: gpipe, 1f1b (default) or interleaved")
    blocks = "activation checkpointing of each block: none (default), selective (recompute cheap operators), full, "
    blocks += "communicated or selective+communicated (keep results of collectives); in a search with --global-batch "
    blocks += "also comma-separated values, and tensors (decide for each result)"
    parser.add_argument("--recompute", metavar="WHAT", help=blocks)


def _count(option: str, most: int = LARGEST) -> Callable[[str], int | str]:
    """A number, auto, or several numbers with commas."""
    read = whole(option, most=most)

    def count(text: str) -> int | str:
        words = text.split(",")
        numbers = [read(word) for word in words if word.strip() != "auto"]
        return numbers[0] if len(words) == len(numbers) == 1 else text

    return count


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    levels = "objective: 0 ratio (least communication and replicated computation), 1 memory, 2 speed (default)"
    parser.add_argument("--level", default="2", help=levels)
    pin = "fix a decision; repeatable: a parameter, input, operator, module or pattern = Shard(0)@tp, or ((4, 2), "
    pin += "None); or stage:MODULE=0"
    parser.add_argument("--pin", action="append", default=[], metavar="WHAT=HOW", help=pin)
    pins = "read pins from a .toml or .json file"
    parser.add_argument("--pins", type=path("--pins"), dest="pins_file", metavar="FILE", help=pins)
    parser.add_argument("--solver", help="auto (default), dp, ilp, propagation, recursive, exhaustive")
    engine = "engine of --solver ilp: highs (default), pulp:CBC, pulp:GUROBI, …"
    parser.add_argument("--ilp-engine", metavar="ENGINE", help=engine)
    without = "do not use all-to-all collectives"
    parser.add_argument("--no-all-to-all", action="store_false", dest="all_to_all", help=without)
    fuse = "bucket collectives; repeatable: all_reduce, all_gather or reduce_scatter = a bucket size such as 25MiB, "
    fuse += "auto (by the cost model) or none; all_reduce=index:10,20; or auto or none for all"
    parser.add_argument("--fuse", action="append", default=[], metavar="WHAT=HOW", help=fuse)
    limit = "stop the search after this CPU time, such as 30s, and use the best plan so far; Ctrl-C does the same"
    parser.add_argument("--time-limit", type=quantity("--time-limit", "seconds"), metavar="TIME", help=limit)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=path("DIR"), metavar="DIR", help="a package, or its plan.json")
    what = "a parameter, input, operator, module or pattern; default: the most expensive choices"
    parser.add_argument("what", nargs="?", metavar="WHAT", help=what)
    why = 'cost of this alternative, such as "Shard(1)@tp", or the reason why it is not possible'
    parser.add_argument("--why-not", metavar="HOW", help=why)


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", type=path("A"), metavar="A", help="a package, or its plan.json")
    parser.add_argument("other", type=path("B"), metavar="B", help="another plan of the same model")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=path("DIR"), metavar="DIR", help="a package written by `autoshard plan`")
    _add_verify_options(parser)


def _add_verify_options(parser: argparse.ArgumentParser) -> None:
    _add_pairs(
        parser,
        "--verify-with",
        "verify_with",
        "callable's arguments for verification, say a smaller model (n_layer=2)",
    )
    backends = "gloo (default): one process per device, up to 16; lockstep: all devices in one process"
    parser.add_argument("--backend", choices=["gloo", "lockstep"], help=backends)
    parser.add_argument("--full", action="store_true", help="verify at full size (slow)")


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=path("DIR"), metavar="DIR", help="a package, or its plan.json")
    output = "default DIR/timeline.json, or DIR/FORMAT/"
    parser.add_argument("-o", "--output", "--out", type=path("--output"), metavar="PATH", help=output)
    formats = "profiler (torch.profiler traces, one a rank), chakra (execution traces), memory (torch memory snapshot)"
    parser.add_argument("--export", choices=["profiler", "chakra", "memory"], help=f"another format: {formats}")
    parser.add_argument("--compiled", action="store_true", help="simulate train.py --compile")
    sizes = "simulate a step of these dynamic sizes, such as batch=16,sequence=256; default: the largest"
    parser.add_argument("--sizes", metavar="NAME=N,…", help=sizes)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=path("DIR"), metavar="DIR", help="a package, or its plan.json")
    trace = "torch.profiler trace of one rank of a run of the package (.json or .json.gz)"
    parser.add_argument("trace", type=path("TRACE"), metavar="TRACE", help=trace)
    out = "write a hardware profile fitted to the run, and its cost constants as FILE-costs.toml"
    parser.add_argument("-o", "--out", type=path("--out"), metavar="FILE.toml", help=out)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=path("DIR"), metavar="DIR", help="a package, or its plan.json")
    other = "a second package: write a page that compares the two; default DIR/diff.html"
    parser.add_argument("other", nargs="?", type=path("OTHER"), metavar="OTHER", help=other)
    parser.add_argument(
        "-o", "--output", "--out", type=path("--output"), metavar="FILE", help="default DIR/report.html"
    )
    parser.add_argument("--svg", action="store_true", help="write only the picture of the plan; default DIR/plan.svg")


def _add_profiles(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this profile")


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hardware", required=True, metavar="NAME", help="the profile to start from (peaks and links)")
    out = "the profile to write; its cost constants are written next to it"
    parser.add_argument("-o", "--out", required=True, type=path("--out"), metavar="FILE.toml", help=out)
    parser.add_argument("--device", choices=["cpu", "cuda", "npu"], default="cpu", help="default cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="default float32"
    )
    several = "also measure collectives among N processes; default 1"
    parser.add_argument("--processes", type=whole("--processes"), default=1, metavar="N", help=several)
    earlier = "fit these earlier measurements instead of measuring"
    parser.add_argument("--measured", type=path("--measured"), metavar="FILE", help=earlier)


def _add_prove(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operators", nargs="*", metavar="OP", help="such as aten.linear or linear; default: all")
    several = "mesh to prove on; repeatable; default tp=2, tp=3 and dp=2,tp=2"
    parser.add_argument("--mesh", action="append", default=[], help=several)
    seeds = "random inputs per strategy; default 1"
    parser.add_argument("--seeds", type=whole("--seeds"), default=1, metavar="N", help=seeds)


def _add_pairs(parser: argparse.ArgumentParser, option: str, dest: str, text: str) -> None:
    parser.add_argument(option, dest=dest, nargs="+", action="extend", type=_pair, default=[], metavar="K=V", help=text)


def _pair(text: str) -> tuple[str, str | int | float | bool]:
    """`n_layer=2` -> ("n_layer", 2): integers, floats, true and false are recognised, the rest is text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def _add_estimate(parser: argparse.ArgumentParser) -> None:
    from autoshard.cli import estimate_options  # imports all of `estimate`

    estimate_options.add_options(parser)


def _add_launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=path("DIR"), metavar="DIR", help="a package")
    known = ["torchrun", "ssh", "slurm", "kubernetes", "mpirun", "ray"]
    parser.add_argument("--on", required=True, choices=known, help="launcher or scheduler")
    nodes = "number of nodes; default: as few as the profile allows"
    parser.add_argument("--nodes", type=whole("--nodes"), metavar="N", help=nodes)
    parser.add_argument("--hosts", metavar="A,B,…", help="names of the nodes, in rank order")
    text = "options of train.py; default '--steps 1000 --save checkpoints --save-every 100 --keep 2 --resume auto'"
    parser.add_argument("--options", metavar="WORDS", help=text)
    parser.add_argument("--minutes", type=whole("--minutes"), metavar="N", help="time limit of the Slurm job")
    grace = "seconds between the signal and the kill (Slurm, Kubernetes), to save a checkpoint; default 120"
    parser.add_argument("--grace", type=whole("--grace"), default=120, metavar="N", help=grace)
    parser.add_argument(
        "--image",
        default="",
        metavar="NAME",
        help="container image on Kubernetes; default: the image of the training runtime",
    )
    parser.add_argument(
        "--python", default="python", metavar="PATH", help="Python interpreter on the nodes; default python"
    )
    parser.add_argument("--start", action="store_true", help="also start the job")


_OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "trace": _add_trace,
    "sizes": _add_sizes,
    "plan": _add_plan,
    "verify": _add_verify,
    "simulate": _add_simulate,
    "compare": _add_compare,
    "report": _add_report,
    "explain": _add_explain,
    "diff": _add_diff,
    "estimate": _add_estimate,
    "profiles": _add_profiles,
    "calibrate": _add_calibrate,
    "prove": _add_prove,
    "launch": _add_launch,
}
