"""A pipeline's package: model_parallel.py, with what its stages share, and a file for each part of the model."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from autoshard.code_text import WIDTH, quoted
from autoshard.emit.classes import class_texts
from autoshard.emit.code_lines import docstring, statement
from autoshard.emit.header import Header
from autoshard.emit.markers.marker_check import check_markers
from autoshard.emit.model_file import (
    HOLDER,
    build_labels,
    check_followed,
    facts,
    gradient_buckets,
    head_lines,
    imports,
    labels_context,
    names_in,
    weight_buckets,
    with_sizes,
)
from autoshard.emit.user_operators import registering_lines
from autoshard.errors import UsageError
from autoshard.ir.plan import Plan
from autoshard.ir.program import LocalValue, Program
from autoshard.program.schedules.pipeline_schedule import chain_order
from autoshard.program.schedules.place_order import placed_order
from autoshard.program.stage_programs import counting_program, handed_from, handed_to, shared_parameters, stage_programs
from autoshard.replay.other_sizes import OtherSizes, SizeNumber, followed
from autoshard.replay.size_texts import sum_text


def part_files(program: Program, plan: Plan, header: Header) -> dict[str, str]:
    """File name -> text."""
    parts = stage_programs(program, plan)
    files = {"model_parallel.py": _common_file(program, parts, header)}
    sources = handed_from(parts, program)
    others = [header.others.each(lambda other, n=n: stage_programs(other, plan)[n]) for n in range(len(parts))]  # type: ignore[misc]
    for number, part in enumerate(parts):
        origins = _source_lines(sources[number], part)
        files[f"part_{number}.py"] = _part_file(part, others[number], program, number, len(parts), header, origins)
    return files


def _source_lines(sources: Sequence[tuple[int, int]], part: Program) -> list[str]:
    pairs = ", ".join(map(str, sources))
    comment = "# Of each: the part that gives it, and its place among what that one gives."
    layouts = ", ".join(quoted(str(part.value(name).layout)) for name in part.outputs)
    lines = [comment, *statement(f"SOURCES: list[tuple[int, int]] = [{pairs}]", 0)]
    return [*lines, *statement(f"GIVEN: list[str] = [{layouts}]  # the layouts of what it gives", 0)]


def _part_file(
    part: Program, others: OtherSizes, whole: Program, number: int, count: int, header: Header, origins: Sequence[str]
) -> str:
    name = f"Part{number}"
    stage = whole.step.part_stages[number]
    modules = tuple((path, name if path == "" else kind) for path, kind in part.modules)
    modules = modules if "" in dict(modules) else (("", name), *modules)
    title = f"Part {number} of {count} of {whole.name}, on {'place' if whole.step.placed else 'stage'} {stage}."
    sized = others.each(lambda other: replace(other, modules=modules))
    package = with_sizes(replace(part, modules=modules), sized, title=title)
    check_followed(header.dynamic, package.others)
    code = "\n\n\n".join("\n".join(lines) for lines in class_texts(package))
    registering = registering_lines(header.registrations)
    names = names_in("\n".join([code, *registering]))
    handed = [
        f"    Handed({part.value(v).shape}, torch.{part.value(v).dtype}, {quoted(str(part.value(v).layout))}, "
        f"{part.value(v).requires_grad}{_at_sizes(part.value(v), part, others)}),"
        for v in handed_to(part, whole)
    ]
    taken = [part.value(v).tensor for v in part.inputs if v in whole.inputs]
    known = [count.op for count in whole.label_counts]
    losses = [str(known.index(count.op)) for count in part.label_counts]
    lines = [
        "",
        "# What earlier parts give, in order: global shape, dtype, layout, and if it carries a gradient.",
        *(["HANDED = [", *handed, "]"] if handed else ["HANDED: list[Handed] = []"]),
        *origins,
        *statement(f"INPUTS: list[str] = [{', '.join(map(quoted, taken))}]  # of the model's, after these", 0),
        *statement(f"LABELS: list[int] = [{', '.join(losses)}]  # its losses in LABEL_COUNTS", 0),
    ]
    end = ["def build_part(mesh: ParallelMesh) -> nn.Module:", '    """Uninitialised."""']
    end.append(f"    return {package.tree.root.name}(mesh)")
    head = [docstring(title, 0), imports(names | {"Handed"}), registering, lines]
    text = ["\n".join("\n".join(part_) for part_ in head if part_)]
    text += [HOLDER.strip("\n")] * ("Holder" in names)
    text += [code, "\n".join(end), "\n".join(gradient_buckets(part)), "\n".join(weight_buckets(part))]
    whole_text = "\n\n\n".join(text) + "\n"
    check_markers(whole_text, [package])
    return whole_text


def _slot_lines(program: Program, parts: Sequence[Program]) -> list[str]:
    """Lines on the order in which stages or places run what."""
    step, last = program.step, next(number for number, part in enumerate(parts) if part.loss)
    if step.placed:
        sources = handed_from(parts, program)
        order = placed_order(step.schedule, step.part_stages, sources, last, step.micro_batches)
    else:
        order = chain_order(step.schedule, step.stages, step.micro_batches, step.virtual_stages)
    rows = textwrap.wrap(" ".join(map(str, order)), WIDTH - 8)
    comment = f"# Forwards (F) and backwards (B) as micro-batch.part, in the order that all {step.word}s keep to."
    return [comment, 'SLOTS = """', *(f"    {row}" for row in rows), '"""']


def _at_sizes(value: LocalValue, part: Program, others: OtherSizes) -> str:
    """The global shape as a function of the dynamic sizes; "" without any."""
    if not others:
        return ""
    values = [value.shape, *(other.value(value.name).shape for other in others.programs)]
    shape = followed(values, part.mesh, others)
    assert isinstance(shape, tuple)
    names = dict(enumerate(others.names))
    texts = [sum_text(size.polynomial, names) if isinstance(size, SizeNumber) else str(size) for size in shape]
    if None in texts:
        raise UsageError(f"{value.tensor}, which a stage hands on, does not follow the dynamic sizes", "other stages")
    return f", lambda {', '.join(others.names)}: ({', '.join(map(str, texts))}{',' if len(texts) == 1 else ''})"


def _common_file(program: Program, parts: Sequence[Program], header: Header) -> str:
    last = next(number for number, part in enumerate(parts) if part.loss)
    counting = counting_program(program, parts)
    labels = labels_context(counting, header.others)
    if labels is not None:
        check_followed(header.dynamic, labels.others)
    classes = class_texts(labels) if labels is not None else []
    code = "\n\n\n".join("\n".join(lines) for lines in classes)
    count = len(parts)
    modules = [f"import part_{number}" for number in range(count)]
    first = imports(names_in(code) | {"Places"})
    at = next(i for i, line in enumerate(first) if line.startswith("from runtime"))
    shared = shared_parameters(parts, program.step)
    head = [
        head_lines(program, header),
        [*first[:at], *modules, *first[at:]],
        facts(replace(program, label_counts=counting.label_counts), header, shared=shared, loss_part=last),
    ]
    names = ", ".join(f"part_{number}" for number in range(count))
    lines = [
        f"SCHEDULE = {quoted(program.step.schedule)}",
        *_slot_lines(program, parts),
        *statement(f"PARTS = ({names})", 0),
        "GRADIENT_BUCKETS = [part.GRADIENT_BUCKETS for part in PARTS]",
        "WEIGHT_BUCKETS = [part.WEIGHT_BUCKETS for part in PARTS]",
    ]
    end = [
        "def build_model(mesh: ParallelMesh) -> nn.ModuleList:",
        '    """The parts of this rank\'s stage; parameters and buffers are uninitialised."""',
        "    assert mesh.stages is not None",
        "    return nn.ModuleList([PARTS[number].build_part(mesh) for number in mesh.stages.parts])",
        "",
        "",
        "def build_pipeline(model: nn.ModuleList, mesh: ParallelMesh) -> Places:",
        f'    """What runs the micro-batches of a step through the {program.step.word}s."""',
        "    handed = [part.HANDED for part in PARTS]",
        "    inputs = [[list(INPUTS).index(name) for name in part.INPUTS] for part in PARTS]",
        "    labels = [part.LABELS for part in PARTS]",
        "    sources = [part.SOURCES for part in PARTS]",
        "    given = [part.GIVEN for part in PARTS]",
        '    ahead = SCHEDULE == "interleaved"',
        "    return Places(model, mesh, SLOTS, PART_STAGES, LOSS_PART, handed, sources, inputs, labels, given, ahead)",
        "",
        "",
        *build_labels(labels),
    ]
    text = ["\n".join("\n".join(part) for part in (*head, lines) if part), *([code] if code else []), "\n".join(end)]
    whole_text = "\n\n\n".join(text) + "\n"
    check_markers(whole_text, [labels])
    return whole_text
