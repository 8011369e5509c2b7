"""One capture with dynamic dims gives the graph at every size: the graph that a capture there gives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autoshard.errors import CaptureError, UserError
from autoshard.graph_capture.capture import capture
from autoshard.graph_capture.dynamic_export.concrete import resized as with_size
from autoshard.graph_capture.dynamic_sizes.graph_numbers import numbers_of, shape_at, sizes_of
from autoshard.graph_capture.dynamic_sizes.numbers import ends_of, kind_of, resized
from autoshard.ir import graph_json
from autoshard.ir.graph import Graph
from autoshard.replay.command_line import dynamic_text
from tests.captured import captured
from tests.dynamic_models import spec
from tests.slow import slow

WORDS = "batch=4..32/4,sequence=8..64/8"
IMAGE = "batch=4..32/4,height=16..64/4@pixels.2,width=16..64/4@pixels.3"
TWO = "batch=4..16/4,source=4..32/4@source.1,target=2..16/2@target.1"


def captured_at(name: str, graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """A capture of its own."""

    def called(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        values = list(inputs)
        for size in graph.dynamic:
            for tensor, dim in size.dims:
                place = graph.inputs.index(tensor)
                values[place] = with_size(values[place], dim, sizes[size.name])
        return tuple(values)

    return capture(spec(name), {}, called_with=called)


@pytest.mark.parametrize(
    ("name", "text", "sizes"),
    [
        ("words", WORDS, {"batch": 12, "sequence": 40}),
        slow("words", WORDS, {"batch": 4, "sequence": 8}),
        slow("image", IMAGE, {"batch": 8, "height": 24, "width": 52}),
        slow("two", TWO, {"batch": 12, "source": 28, "target": 10}),
        ("halving", "batch=4..32/4,height=8..64/4@x.2,width=8..64/4@x.3", {"batch": 8, "height": 44, "width": 12}),
        ("lstm", "batch=2..32,sequence=2..64@input.1", {"batch": 5, "sequence": 11}),
        slow("gru", "batch=2..32,sequence=2..64@input.1", {"batch": 5, "sequence": 11}),
        slow("counting", "batch=2..32,sequence=2..64@x.1", {"batch": 7, "sequence": 33}),
    ],
)
def test_the_graph_at_a_size_is_that_of_a_capture_there(name: str, text: str, sizes: dict[str, int]) -> None:
    graph = capture(spec(name), {}, dynamic=(text,))
    assert sizes_of(graph) == {size.name: size.most for size in graph.dynamic}
    carried, there = resized(graph, sizes), captured_at(name, graph, sizes)
    assert numbers_of(carried) == numbers_of(there) and ends_of(carried) == ends_of(there)
    assert [kind_of(carried, op) for op in carried.ops] == [kind_of(there, op) for op in there.ops]
    assert [op.saved for op in carried.ops] == [op.saved for op in there.ops]
    assert all(shape_at(graph, t.name, sizes) == t.shape for t in there.tensors)


def test_a_graph_keeps_its_sizes_in_its_file_and_says_them_again() -> None:
    graph = captured(spec("words"), {}, dynamic=(WORDS,))
    assert graph_json.loads(graph_json.dumps(graph)) == graph
    text = dynamic_text(graph)
    assert text == "batch=4..32/4@0.0@1.0,sequence=8..64/8@0.1@1.1"
    assert capture(spec("words"), {}, dynamic=(text,)) == graph
    assert graph_json.graph_hash(graph) != graph_json.graph_hash(resized(graph, {"batch": 4}))


@pytest.mark.slow
def test_the_models_own_code_declares_sizes() -> None:
    graph = capture(spec("declared"), {})
    (size,) = graph.dynamic
    assert (size.name, size.least, size.most, size.divisor, size.dims) == ("batch", 4, 64, 4, (("x", 0), ("labels", 0)))
    (other,) = capture(spec("declared"), {}, dynamic=("batch=8../8",)).dynamic
    assert (other.least, other.most) == (8, 0)


REFUSED = [
    ("branching", "batch=8..512/8", r"over the whole range: with batch 104 .* `if x.shape\[0\] > self.most:`"),
    ("comparing", "rows=2..32@x.0,columns=2..32@x.1", r"columns and rows can't be .* `if x.shape"),
    ("fixed", "batch=2..8,sequence=6..24/6", r"sequence can't be dynamic at .*`return .* must match the size"),
    ("halving", "batch=2..8,height=9..65@x.2", r"conv2d \(aten.conv2d\) at .* does not follow the dynamic sizes"),
    ("scaling", "batch=2..8,sequence=4..64/4", r"other of mul .* is a float that follows .*: 0.125 at batch 8"),
    ("words", "batch=2..8,sequence=2..128", r"sequence can't be dynamic|64 positions"),
    ("words", "batch=4..32@ids.0@labels.1", r"the dims of batch differ .*: ids.0 \(4\), labels.1 \(8\)"),
    ("words", "batch=4..32,rows=4..8@0.0", r"dim 0 of ids is both batch and rows"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_model_that_fixes_a_size_is_refused_with_its_line(number: int) -> None:
    name, text, message = REFUSED[number]
    with pytest.raises(UserError) as caught:
        capture(spec(name), {}, dynamic=(text,))
    assert re.search(message, caught.value.message), caught.value.message


def test_a_branch_that_stays_on_one_side_is_none() -> None:
    assert capture(spec("branching"), {}, dynamic=("batch=8..96/8",)).dynamic
    assert capture(spec("branching"), {}, dynamic=("batch=104..512/8",)).dynamic


def test_sizes_that_are_not_allowed_are_refused() -> None:
    graph = captured(spec("words"), {}, dynamic=(WORDS,))
    for sizes in ({"batch": 6}, {"batch": 64}, {"rows": 4}):
        with pytest.raises(UserError, match=r"try: --sizes batch=(8|32),sequence=64$"):
            resized(graph, sizes)
    with pytest.raises(UserError, match="the plan has no dynamic sizes"):
        resized(replace(graph, dynamic=()), {"batch": 4})
    with pytest.raises(CaptureError):
        capture(spec("fixed"), {}, dynamic=("sequence=12..24/6",))
