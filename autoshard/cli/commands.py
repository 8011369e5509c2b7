"""The command line: argparse, one function a verb. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoshard.cli.json_output import print_json
from autoshard.cli.launch_verb import launch
from autoshard.cli.option_values import check_digits
from autoshard.cli.parser import parser
from autoshard.cli.sizes_verb import sizes
from autoshard.code_text import typed
from autoshard.errors import CheckError, InfeasibleError, UsageError, UserError
from autoshard.system import terminal
from autoshard.system.files import as_user_error, ended, write_text
from autoshard.system.process_memory import infrequent_gc
from autoshard.system.progress import step

if TYPE_CHECKING:
    from autoshard.api.planned import CapturedModel, PlannedModel
    from autoshard.cluster.hardware import Hardware
    from autoshard.constraints.verify_request import VerifyRequest
    from autoshard.search.search_request import SearchRequest

_LONG = re.compile(r"\S{400,}")
BUG_REPORT = "this is a bug in autoshard, not in your input; `--debug` shows where"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code: 0 done, 1 bug, 130 interrupted, else that of the UserError."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        terminal.prepare()
        _check_words(words)
        options = _parsed(words)
        check_digits(words)
        result = _run(options)
        terminal.flush()
        return result
    except UserError as error:
        return _fail(error, error.exit_code, words)
    except KeyboardInterrupt:
        print("autoshard: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # stdout closed by the reader
        return 141
    except Exception as error:
        message = as_user_error(error)
        if message is not None:
            return _fail(message, message.exit_code, words)
        return _fail(UserError(f"{type(error).__name__}: {error}", BUG_REPORT), 1, words)


def _check_words(words: Sequence[str]) -> None:
    """Raises UsageError for words that are not UTF-8: these can't be noted in a plan."""
    for word in words:
        if not word.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UsageError(f"{word!r} is not UTF-8", "another name, or a symbolic link to it")


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options. `--help` and `--version` end the program, once what they print is out."""
    try:
        return parser(VERBS, words).parse_args(words)
    except SystemExit:
        terminal.flush()
        raise


def _run(options: argparse.Namespace) -> int:
    """The verb. Only a model's own code ends the program by itself."""
    try:
        result: int = options.run(options)
    except SystemExit as stopped:
        raise ended(stopped) from stopped
    return result


def _fail(error: UserError, code: int, words: Sequence[str]) -> int:
    if "--debug" in words:
        raise
    lines = [f"autoshard: {_LONG.sub(_clipped, error.message)}"]
    if error.hint:
        lines.append(f"  {error.hint}" if code == 1 else f"  try: {error.hint}")
    print("\n".join(lines), file=sys.stderr)
    if "--json" in words:
        with contextlib.suppress(OSError):
            fields = {"message": error.message, "hint": error.hint, "exit_code": code}
            proven = {"proven": error.proven} if isinstance(error, InfeasibleError) else {}
            print_json({"error": fields | proven})
            terminal.flush()
    return code


def _clipped(word: re.Match[str]) -> str:
    """Beginning of a word that is too long for a user to read."""
    return f"{word[0][:60]}…"


# --- the verbs ------------------------------------------------------------------------------------------------------


@infrequent_gc()
def trace(options: argparse.Namespace) -> int:
    """Capture a model and save its graph."""
    with step(f"capturing {options.model}", options.json):
        captured = _captured(options)
    captured.save(options.output)
    counts = {"ops": len(captured.graph.ops), "parameters": captured.parameters}
    if options.json:
        print_json({"graph": str(options.output), "graph_hash": captured.hash, **counts})
    else:
        print(f"{options.output}: {counts['ops']} ops, {counts['parameters']:,} parameters")
        print(f"next: autoshard plan {typed(options.output)} --mesh dp=2,tp=2 --hardware a100-80g-sxm")
    return 0


@infrequent_gc()
def plan(options: argparse.Namespace) -> int:
    """Find the best plan and write the package."""
    from autoshard.api import elastic_plans, verbs
    from autoshard.api.settings import read_hardware
    from autoshard.system.process_memory import keep_freed
    from autoshard.text import plan_summary
    from autoshard.text.tables import terminal_width

    keep_freed()
    wanted, quiet = _wanted(options), options.json
    hardware = read_hardware(options.hardware)
    to_verify = _to_verify(options)
    settings: dict[str, Any] = {"arguments": dict(options.arguments), "precision": options.precision}
    settings |= {"loss": options.loss or None, "out": options.out, "to_verify": to_verify}
    verbs.check(options.model, hardware, wanted, **settings)
    numbers = elastic_plans.numbers_of_devices(options.devices)[1:]
    elastic_plans.check_elastic(wanted, numbers)
    for number in numbers:
        verbs.check(options.model, hardware, replace(wanted, devices=number), **settings)
    for sentence in wanted.ignored():
        print(f"warning: {sentence}", file=sys.stderr)
    with step(f"capturing {options.model}", quiet):
        if to_verify is not None and to_verify.arguments:
            verbs.check_sizes(options.model, to_verify.arguments)
        captured = _captured(options, wanted.searches_step)
    message: dict[str, Any] = {}
    if wanted.searches_step:
        planned, message = _searched_step(options, captured, hardware, wanted)
    else:
        with step(f"searching {wanted.mesh or f'meshes of {wanted.devices} devices'}", quiet):
            planned = verbs.planned(captured, hardware, wanted, False if options.no_cache else None, whole_plans=False)
    others, cached = [], not options.no_cache
    for number in numbers:
        with step(f"searching {number} devices", quiet):
            others.append(elastic_plans.planned_for(captured, hardware, wanted, number, None if cached else False))
    with step("writing the package", quiet):
        files = verbs.write_files(planned, options.out, others)
    plans = [planned.plan, *(other.plan for other in others)]
    summary = plan_summary.as_dict(planned.plan, planned.graph, planned.simulated.step.account)
    summary |= {"out": str(options.out), "files": files}
    summary |= {"searched_step": message} if message else {}
    summary |= {"ignored": list(planned.ignored), "pareto": [vars(point) for point in planned.front]}
    summary |= {"other_devices": [plan_summary.as_dict(other.plan, other.graph) for other in others]} if others else {}
    if not options.json:
        timeline = planned.simulated.timeline
        whole = planned.simulated.step
        print(plan_summary.summary(planned.plan, planned.graph, planned.styles, terminal_width(), timeline, whole))
        if planned.front:
            print("\n".join(["", *plan_summary.front_table(planned.front)]))
        if others:
            print(plan_summary.devices_text(plans, terminal_width()))
        print(f"written to {options.out}: {plan_summary.file_names(files)}")
    code = _verify(options, summary) if to_verify is not None else 0
    if options.json:
        print_json(summary)
    elif code == 0:
        print(f"next: {plan_summary.next_command(planned.plan, planned.graph, options.out, to_verify is not None)}")
    return code


def _to_verify(options: argparse.Namespace) -> VerifyRequest | None:
    from autoshard.api import settings

    return settings.verify_request(options.verify, options.backend, options.full, dict(options.verify_with))


def _captured(options: argparse.Namespace, several: bool = False) -> CapturedModel:
    from autoshard.api import verbs

    return verbs.capture(
        options.model,
        loss=options.loss or None,
        arguments=dict(options.arguments),
        precision=options.precision,
        optimizer=options.optimizer,
        training=not options.eval,
        allow_modules=options.allow_module,
        several=several,
        dynamic=options.dynamic,
    )


def _searched_step(
    options: argparse.Namespace, captured: CapturedModel, hardware: Hardware, wanted: SearchRequest
) -> tuple[PlannedModel, dict[str, Any]]:
    """The best whole step: its plan, and sentences about its search."""
    from autoshard.api.step_answer import planned_step
    from autoshard.text import step_text
    from autoshard.text.tables import terminal_width

    with step(f"searching steps of {wanted.devices} devices", options.json):
        answer = planned_step(captured, hardware, wanted)
    message = step_text.as_dict(answer.result, wanted)
    if not options.json:
        print("\n".join([*step_text.summary(answer.result, wanted, terminal_width()), ""]))
    return answer.plan, message | {"program_seconds": answer.program_seconds}


def _wanted(options: argparse.Namespace) -> SearchRequest:
    from autoshard.api import settings

    return settings.wanted(
        settings.read_mesh(options.mesh),
        max(options.devices) if options.devices else None,
        options.mode or "auto",
        settings.step_request(
            {name: getattr(options, name) for name in settings.STEP}, tuple(options.pin), options.pins_file
        ),
        settings.ON_COMMAND_LINE,
        level=options.level,
        pins=tuple(options.pin),
        memory_limit_bytes=options.memory_limit,
        time_limit_seconds=options.time_limit,
        servers=settings.server_request(vars(options)),
        **{name: getattr(options, name) for name in settings.FURTHER},
    )


def verify(options: argparse.Namespace) -> int:
    """Run a package against the original model and compare the numbers."""
    summary: dict[str, Any] = {"out": str(options.out)}
    code = _verify(options, summary)
    if options.json:
        print_json(summary)
    return code


def _verify(options: argparse.Namespace, summary: dict[str, Any]) -> int:
    from autoshard.api import verbs

    for number, folder in enumerate(verbs.packages_in(options.out)):
        with step(f"verifying {folder}", options.json):
            planned, arguments = verbs.load_plan(folder), dict(options.verify_with)
            result = verbs.verify(planned, backend=options.backend or "gloo", full=options.full, arguments=arguments)
        if number:
            summary.setdefault("other_verifications", []).append(result.as_dict())
        else:
            summary["verification"] = result.as_dict()
        if not options.json:
            print(result.summary())
        if not result.passed and options.json:
            return CheckError.exit_code
        if not result.passed:
            raise CheckError(result.failure, "the report and the files are left for you to look at")
    return 0


def simulate(options: argparse.Namespace) -> int:
    """Simulate a package's training step and write the timeline."""
    from autoshard.api import package_verbs, verbs
    from autoshard.text import plan_summary

    with step("simulating", options.json):
        planned = verbs.load_plan(options.plan)
        if options.sizes:
            planned = package_verbs.at_sizes(planned, options.sizes)
        if options.compiled:
            planned = package_verbs.compiled(planned)
        timeline = verbs.simulate(planned)
    if options.export:
        target, files = package_verbs.export(planned, options.export, options.output)
    else:
        target = package_verbs.write_timeline(planned, options.output)
        files = [target.name]
    if options.json:
        message = plan_summary.timeline_dict(timeline, planned.plan, planned.graph, planned.simulated.step)
        print_json(message | {"written": str(target), "files": files})
    else:
        print(
            plan_summary.timeline_summary(
                timeline, planned.plan, planned.graph, options.compiled, planned.simulated.step
            )
        )
        print(f"written to {target}" + (f": {plan_summary.file_names(files)}" if options.export else ""))
    return 0


def compare(options: argparse.Namespace) -> int:
    """Compare a torch.profiler trace of a real run with the prediction."""
    from autoshard.api import package_verbs, verbs
    from autoshard.calibrate import run_files
    from autoshard.trace_comparison import differences

    if options.out:
        run_files.check_out(options.out)
    with step("simulating", options.json):
        planned = verbs.load_plan(options.plan)
        verbs.simulate(planned)
    measured = package_verbs.read_run(planned, options.trace)
    comparison = package_verbs.compare(planned, measured)
    written = None
    if options.out:
        with step("fitting constants to the run", options.json):
            written = package_verbs.fit_run(planned, measured, options.out)
    if options.json:
        print_json(differences.as_dict(comparison) | {"calibration": run_files.as_dict(written) if written else None})
    else:
        print(differences.text(comparison), *(["", run_files.summary(written)] if written else []), sep="\n")
    return 0


def report(options: argparse.Namespace) -> int:
    """Write the HTML report of a package, a picture of its plan, or a comparison of two packages."""
    from autoshard.api import package_verbs, verbs

    if options.svg and options.other is not None:
        raise UsageError("--svg draws one plan, but two are named", f"autoshard report {typed(options.plan)} --svg")
    with step("rendering the report", options.json):
        planned = verbs.load_plan(options.plan)
        if options.other is not None:
            other = verbs.load_plan(options.other)
            kind, path = "diff", package_verbs.write_difference(planned, other, options.output)
        elif options.svg:
            kind, path = "picture", package_verbs.write_picture(planned, options.output)
        else:
            kind, path = "report", package_verbs.write_report(planned, options.output)
    if options.json:
        print_json({kind: str(path)})
    else:
        print(path)
    return 0


def estimate(options: argparse.Namespace) -> int:
    """Predict step time and memory of a transformer from its sizes, or search its configurations."""

    from autoshard.cli import estimate_options
    from autoshard.cluster.hardware import check_one_kind, load_hardware
    from autoshard.estimate import step as estimating
    from autoshard.estimate.packages.package_estimate import estimate_any
    from autoshard.estimate.text import estimate_text

    hardware = check_one_kind(load_hardware(options.hardware), "an estimate")
    dispatch = options.host_dispatch
    host = None if dispatch is None else replace(estimating.host_of(hardware), dispatch_seconds=dispatch)
    if options.search:
        return _search_runs(options, hardware, host)
    for name in ("devices", "top", "pareto"):
        if getattr(options, name) is not None:
            message = f"--{name} is for --search: without it, one configuration is estimated"
            raise UsageError(message, f"--devices {options.devices or 1024} --search")
    prediction = estimate_any(*estimate_options.read(options), hardware, host)
    if options.output:
        write_text(options.output, json.dumps(estimate_text.pipeline_trace(prediction)))
    if options.json:
        print_json(estimate_text.as_dict(prediction, hardware))
    else:
        print(estimate_text.text(prediction, hardware))
    return 0


def explain(options: argparse.Namespace) -> int:
    """Explain the decisions of a plan, and what alternatives would cost."""
    from autoshard.api import package_verbs, verbs
    from autoshard.text import explain
    from autoshard.text.tables import tty_width

    with step("explaining", options.json):
        explained = package_verbs.explain(verbs.load_plan(options.plan), options.what, options.why_not)
    if options.json:
        print_json(explain.as_dict(explained))
    else:
        print(explain.text(explained, tty_width()))
    return 0


def diff(options: argparse.Namespace) -> int:
    """Compare the decisions of two plans, and their predicted costs."""
    from autoshard.api import package_verbs, verbs
    from autoshard.text import plan_diff
    from autoshard.text.tables import tty_width

    difference = package_verbs.diff(verbs.load_plan(options.one), verbs.load_plan(options.other))
    if options.json:
        print_json(plan_diff.as_dict(difference))
    else:
        print(plan_diff.text(difference, tty_width()))
    return 0


def _search_runs(options: argparse.Namespace, hardware: Any, host: Any) -> int:
    from autoshard.cli import estimate_options
    from autoshard.estimate.packages.package_runs import best_runs_any
    from autoshard.estimate.text import best_runs_text

    space = estimate_options.space(options)
    with step(f"searching configurations of {space.devices} devices", options.json):
        best_runs = best_runs_any(space, hardware, options.top or 10, host, options.pareto is not None)
    if options.pareto:
        write_text(options.pareto, best_runs_text.front_picture(best_runs, hardware))
    if options.output:
        from autoshard.estimate.text.estimate_text import pipeline_trace

        write_text(options.output, json.dumps(pipeline_trace(best_runs.best[0])))
    if options.json:
        print_json(best_runs_text.as_dict(best_runs, hardware))
    else:
        print(best_runs_text.text(best_runs, hardware))
    return 0


def profiles(options: argparse.Namespace) -> int:
    """List the hardware profiles, or print one."""
    from autoshard.cluster.hardware import hardware_text, list_profiles, load_hardware

    names = [options.name] if options.name else list_profiles()
    by_name = {name: load_hardware(name) for name in names}
    if options.json:
        print_json({name: hardware_text(hardware) for name, hardware in by_name.items()})
    elif options.name:
        print(hardware_text(by_name[options.name]), end="")
    else:
        from autoshard.text.plan_summary import profile_table
        from autoshard.text.tables import tty_width

        print(profile_table(by_name, tty_width()))
    return 0


def calibrate(options: argparse.Namespace) -> int:
    """Measure this machine, fit the cost formulas, and write its hardware profile."""
    from autoshard.calibrate import calibrate_run

    request = calibrate_run.Request(
        options.hardware, options.out, options.device, options.dtype, options.processes, options.measured
    )
    with step(f"calibrating on {options.device}", options.json):
        written = calibrate_run.run(request)
    if written is None:  # the first process writes and says what was measured
        return 0
    if options.json:
        print_json(calibrate_run.as_dict(written))
    else:
        print(calibrate_run.summary(written))
    return 0


def prove(options: argparse.Namespace) -> int:
    """Prove the sharding rules numerically: every strategy of every operator, forward and backward."""
    from autoshard.verification.rule_table import outcome_dict, outcome_table, prove_table

    with step("proving the rules", options.json):
        outcomes = list(prove_table(options.operators, options.mesh, options.seeds))
    if options.json:
        print_json(outcome_dict(outcomes))
    else:
        print(outcome_table(outcomes))
    return CheckError.exit_code if any(outcome.failures for outcome in outcomes) else 0


VERBS = (
    trace,
    sizes,
    plan,
    verify,
    simulate,
    compare,
    report,
    explain,
    diff,
    estimate,
    profiles,
    calibrate,
    prove,
    launch,
)


if __name__ == "__main__":
    raise SystemExit(main())
