"""From a PyTorch model to a Graph: torch.export, then passes that each say one thing."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autoshard.errors import CaptureError, UsageError, UserError
from autoshard.graph_capture.call_record import record
from autoshard.graph_capture.constructor.initial_distributions import InitWatcher, watch_library_init
from autoshard.graph_capture.constructor.recipes import flag_values, recipes_of, separate_draws, with_copies
from autoshard.graph_capture.constructor.strided import in_memory_order
from autoshard.graph_capture.dynamic_export.concrete import concrete, places_at
from autoshard.graph_capture.dynamic_export.dynamic_export import DynamicDims, dynamic_dims, export_with
from autoshard.graph_capture.dynamic_sizes.numbers import follows_of, points_of
from autoshard.graph_capture.input_ranges import input_ranges
from autoshard.graph_capture.load_model import load_exported, load_model
from autoshard.graph_capture.module_requests import ignored_requests, module_requests
from autoshard.graph_capture.operator_strategies import marks, noted
from autoshard.graph_capture.overloads import note_schemas
from autoshard.graph_capture.passes.canonical import canonical
from autoshard.graph_capture.passes.embedding_bags import dense_gradients, fold_bags
from autoshard.graph_capture.passes.expert_blocks import fold_experts
from autoshard.graph_capture.passes.linear_layers import fold_linears
from autoshard.graph_capture.passes.noops import drop_noops, merge_reshapes
from autoshard.graph_capture.passes.op_names import rename
from autoshard.graph_capture.passes.operator_patterns import fold_formulas
from autoshard.graph_capture.passes.recurrent_layers import split_layers
from autoshard.graph_capture.passes.repeated_constants import duplicated_constants
from autoshard.graph_capture.passes.repeated_heads import fold_repeats, fold_shared_heads
from autoshard.graph_capture.passes.rewrite import deadcode
from autoshard.graph_capture.passes.rotations import fold_rotations
from autoshard.graph_capture.random_operators import refuse_random
from autoshard.graph_capture.registrations import note_registrations
from autoshard.graph_capture.tracing.capture_failures import UNSEEN, UNSEEN_HINT
from autoshard.graph_capture.tracing.complex_numbers import real_pairs
from autoshard.graph_capture.tracing.data_dependence import FlagBuffers
from autoshard.graph_capture.tracing.exporting import export, is_fake, plain_export
from autoshard.graph_capture.tracing.fills import draws, op_name, plain_creation
from autoshard.graph_capture.tracing.functionalise import functionalise
from autoshard.graph_capture.tracing.inline_regions import AUTOCAST_OFF, inline
from autoshard.graph_capture.tracing.own_gradients import resolve
from autoshard.graph_capture.tracing.python_state import modes_put_back
from autoshard.graph_capture.tracing.size_constants import recognise_masks
from autoshard.graph_capture.tracing.source_lines import node_quote
from autoshard.graph_capture.tracing.unchanged_model import guarded
from autoshard.graph_capture.training.loss import choose_loss, refuse_untrained
from autoshard.graph_capture.training.overwritten_buffers import keep_overwritten, note_saved
from autoshard.graph_capture.training.precision import LOW, PRECISIONS, apply_precision
from autoshard.graph_capture.training.requires_grad import mark_gradients, mark_reached
from autoshard.graph_capture.translate import constant_op, tensor_of, translate
from autoshard.graph_capture.two_runs.both_modes import quickly_alike
from autoshard.graph_capture.two_runs.float_casts import casts_of, put_back, set_apart, widened
from autoshard.graph_capture.two_runs.graph_difference import difference
from autoshard.graph_capture.two_runs.modes import frozen_modules, set_mode
from autoshard.graph_capture.two_runs.second_call import changing_line, refuse_change
from autoshard.graph_capture.variables import variables_of
from autoshard.ir.graph import OPTIMIZERS, SAME, Graph, Op, Parameter, Tensor
from autoshard.ir.graph_check import check

_FROZEN = "a changed value under another name (an embedding: no max_norm); a buffer for what the forward updates"
_UNREGISTERED = "self.register_buffer(...) for it: a buffer is kept from step to step, and saved"
PASSES: tuple[Callable[[Graph], Graph], ...] = (
    canonical, dense_gradients, split_layers, mark_reached, drop_noops, fold_linears, fold_bags, merge_reshapes,
    drop_noops, fold_experts, fold_repeats, fold_shared_heads, fold_rotations, fold_formulas, deadcode,
    duplicated_constants, refuse_random, rename, mark_gradients, refuse_untrained, note_saved,
)  # fmt: skip


def capture(
    spec: str,
    arguments: Mapping[str, Any],
    precision: str = "fp32",
    optimizer: str = "adamw",
    training: bool = True,
    called_with: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple,
    dynamic: tuple[str, ...] = (),
) -> Graph:
    """The graph of what the user named (see `load_model`), built without memory for its values.

    `called_with`: the inputs to capture it with, made of its example inputs; not of an exported program.
    `dynamic`: sizes of them that change from step to step, as --dynamic has them; or those of `set_inputs`.
    """
    _check_options(precision, optimizer)
    if spec.endswith(".pt2"):
        if dynamic:
            raise UsageError(f"--dynamic: {spec} is an exported program, whose sizes are fixed", "the model's own code")
        graph = _finish(load_exported(spec), None, InitWatcher(), spec, precision, optimizer, training)
        return replace(graph, evaluation=_EXPORTED) if training else graph
    watcher = InitWatcher()
    with guarded(spec.rpartition(":")[0]):
        with watcher:
            model, inputs = load_model(spec, arguments)
        watch_library_init(model, watcher)
        inputs = called_with(inputs)
        dims = dynamic_dims(model, inputs, dynamic)
        first = called_with is tuple  # not of the sizes that a search asks for
        graph = _capture(model, inputs, watcher, spec, precision, optimizer, training, dims=dims, first=first)
        return replace(graph, evaluation=_evaluation(model, inputs, watcher)) if training and first else graph


def capture_model(
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    precision: str = "fp32",
    optimizer: str = "adamw",
    training: bool = True,
    source: str = "",
    keep_modes: bool = False,
    dynamic: tuple[str, ...] = (),
) -> Graph:
    """The graph of `model(*inputs)`: a model built for real, on meta, or fake. Leaves the model as it was.

    `keep_modes`: `training` says whether gradients are computed, and each module keeps its own mode.
    """
    _check_options(precision, optimizer)
    named = source or type(model).__name__
    with guarded():
        watcher = InitWatcher()
        dims = dynamic_dims(model, inputs, dynamic)
        graph = _capture(model, inputs, watcher, named, precision, optimizer, training, keep_modes, dims)
        with_eval = training and not keep_modes
        return replace(graph, evaluation=_evaluation(model, inputs, watcher)) if with_eval else graph


def _check_options(precision: str, optimizer: str) -> None:
    for option, value, known in (("precision", precision, tuple(PRECISIONS)), ("optimizer", optimizer, OPTIMIZERS)):
        if value not in known:
            raise UsageError(f"unknown {option} {value!r}", f"one of {', '.join(known)}")


def _capture(
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    watcher: InitWatcher,
    source: str,
    precision: str,
    optimizer: str,
    training: bool,
    keep_modes: bool = False,
    dims: DynamicDims | None = None,
    first: bool = True,
) -> Graph:
    with modes_put_back(model):
        if not keep_modes:
            set_mode(model, training)
        frozen = frozen_modules(model) if training and not keep_modes else ()
        flags = FlagBuffers(model, flag_values(model, watcher.recorder.calls))
        inputs = dims.traced_inputs(inputs) if dims else inputs
        calls = partial(changing_line, model, inputs, lambda module, args: export(module, args, flags)[0])
        changing = calls() if first else ""
        casts = casts_of(model, inputs, precision) if PRECISIONS[precision] else {}
        by = partial(export_with, dims) if dims else plain_export
        program, assumed = export(model, inputs, flags, partial(set_apart, casts, by) if casts else by)
        facts = (model, watcher, source, precision, optimizer, training)
        graph = (
            _finish(program, *facts) if dims is None else _dynamic(program, dims, lambda fixed: _finish(fixed, *facts))
        )
        refuse_change(changing)
        updated = {tensor for tensor, _ in graph.buffer_updates}
        flags.check(
            path for buffer in graph.buffers if buffer.tensor in updated for path in (buffer.path, *buffer.ties)
        )
        ranges, columns = input_ranges(graph, inputs, watcher.recorder.calls)
        annotated = replace(
            graph,
            assumed=(*graph.assumed, *assumed, *ignored_requests(model), *frozen),
            input_ranges=ranges,
            column_ranges=columns,
            module_requests=module_requests(model),
        )
        return replace(annotated, call=record(model, inputs, program))


def _dynamic(program: Any, dims: DynamicDims, finish: Callable[[Any], Graph]) -> Graph:
    """The graph at the largest sizes, with the numbers that follow them."""
    inputs = [str(name) for name in program.graph_signature.user_inputs]
    sizes = dims.sizes_of(inputs)
    points = points_of(sizes, dims.planned)
    graphs = [finish(concrete(program, places_at(sizes, point))) for point in points]
    follows = follows_of(graphs, points, [size.name for size in sizes])
    return replace(graphs[0], dynamic=sizes, follows=follows)


_OTHERWISE = "in evaluation the model computes something else"
_EXPORTED = "an exported program keeps the mode in which it was exported"


def _evaluation(model: torch.nn.Module, inputs: tuple[Any, ...], watcher: InitWatcher) -> str:
    """SAME where `model.eval()` computes the forward of training without dropout, else where not."""
    alike = quickly_alike(model, inputs)
    if isinstance(alike, str) and alike:
        return f"{_OTHERWISE}, at {alike}"
    if alike:
        return SAME
    graphs = []
    try:
        with modes_put_back(model):
            for training in (True, False):
                set_mode(model, training)
                flags = FlagBuffers(model, flag_values(model, watcher.recorder.calls))
                graphs.append(_raw(export(model, inputs, flags)[0], model, watcher, training=False))
    except UserError as error:
        return f"in evaluation {error.message}"
    where = difference(*graphs)
    return f"{_OTHERWISE}, at {where}" if where else SAME


def _finish(
    program: Any,
    model: torch.nn.Module | None,
    watcher: InitWatcher,
    source: str,
    precision: str,
    optimizer: str,
    training: bool,
) -> Graph:
    try:
        graph = _raw(program, model, watcher, training)
    except CaptureError as error:
        name = type(model).__name__ if model is not None else source
        raise CaptureError(f"{name} can't be captured: {error.message}", error.hint) from error
    _check_regions(program.graph, precision)
    graph = replace(graph, source=source, name=_name(source), optimizer=optimizer)
    marked = marks(graph)
    for run in PASSES:
        graph = run(graph)
    graph = noted(graph, marked)
    graph = note_schemas(note_registrations(keep_overwritten(apply_precision(graph, precision))))
    check(graph)
    return graph


def _check_regions(graph: fx.Graph, precision: str) -> None:
    """CaptureError where a region with autocast turned off holds what mixed precision would lower."""
    for node in graph.nodes:
        if PRECISIONS[precision] and node.meta.get(AUTOCAST_OFF) and f"aten.{op_name(node)}" in LOW:
            raise CaptureError(
                f"the forward turns autocast off, which --precision {precision} would not keep, at {node_quote(node)}",
                "--precision fp32; or leave the region out",
            )


def _raw(program: Any, model: torch.nn.Module | None, watcher: InitWatcher, training: bool) -> Graph:
    """Export graph -> functional fx graph -> Graph before any pass."""
    module = program.graph_module
    inline(module)
    resolve(module)
    stored = _Stored(program, model, watcher)
    written = _without_refilled(functionalise(module.graph, stored.parameter_nodes if training else set()), stored)
    wide = put_back(module.graph)
    real_pairs(module.graph)
    replaced = plain_creation(module.graph)
    written = {node: replaced.get(value, value) for node, value in written.items()}
    in_memory_order(module.graph)
    recognise_masks(module.graph, stored.real_constants)
    ops, tensors, name = translate(module.graph, stored.names)
    for node in written:
        if node in stored.parameter_nodes:
            raise CaptureError(f"the forward changes the parameter {stored.path_of(node)} in place", _FROZEN)
        if node in stored.real_constants and node.users:  # its old value, which the call before has left
            what = f"the forward changes a tensor in place that is no buffer, at {node_quote(written[node])}"
            raise CaptureError(what, _UNREGISTERED)
    outputs, called = _outputs(program, name)
    if not outputs:
        raise CaptureError("its forward returns no tensor", "`return loss` at its end")
    recipes = recipes_of(stored.values, stored.parameters, stored.buffers, watcher.calls)
    copied = with_copies(stored.values, (*stored.parameters, *stored.buffers), watcher.draw_of, recipes)
    graph = Graph(
        name="",
        tensors=(*stored.tensors.values(), *tensors.values()),
        inputs=stored.inputs,
        parameters=copied[: len(stored.parameters)],
        buffers=copied[len(stored.parameters) :],
        ops=(*stored.constant_ops, *ops),
        outputs=outputs,
        loss=None,
        training=training,
        buffer_updates=tuple(
            (stored.names[node], name(value)) for node, value in written.items() if node in stored.buffer_nodes
        ),
        modules=_modules(module.graph, model),
        variables=tuple((name(node), variable) for node, variable in variables_of(module.graph)),
        widened=tuple(name(node) for node in widened(module.graph, wide)),
        recipes=recipes,
        assumed=separate_draws(stored.values, copied, watcher.recorder, recipes),
    )
    return choose_loss(mark_reached(graph), called) if training else graph


def _without_refilled(written: dict[fx.Node, fx.Node], stored: _Stored) -> dict[fx.Node, fx.Node]:
    """Drop caches from `written`: buffers given another size by constants alone, which the graph makes in each call."""
    updates = {}
    for node, value in written.items():
        old, new = node.meta["val"], value.meta["val"]
        if node not in stored.buffer_nodes or (old.shape, old.dtype) == (new.shape, new.dtype):
            updates[node] = value
        elif not _is_constant(value, stored, written.keys()):
            what = f"the forward gives the buffer {stored.path_of(node)} another size, at {node_quote(value)}"
            raise CaptureError(what, _RESIZED)
    return updates


def _is_constant(value: fx.Node, stored: _Stored, written: Container[fx.Node]) -> bool:
    """True if `value` comes only from literals and buffers that nothing writes, without random draws."""
    seen, waiting = set(), [value]
    while waiting:
        node = waiting.pop()
        if draws(node) or node in stored.parameter_nodes or node in written or node.name in stored.inputs:
            return False
        waiting += [each for each in node.all_input_nodes if each not in seen]
        seen |= {*node.all_input_nodes}
    return True


_RESIZED = "register it with the size and dtype that the forward gives it"


class _Stored:
    """The placeholders of an export: inputs, parameters and buffers by tensor (ties once), literal constants."""

    def __init__(self, program: Any, model: torch.nn.Module | None, watcher: InitWatcher) -> None:
        signature = program.graph_signature
        self.program, self.signature, self.watcher = program, signature, watcher
        self.nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        self.values = _stored_values(program, model)
        self.order = {path: i for i, path in enumerate(self.values)}
        self.names: dict[fx.Node, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.constant_ops: list[Op] = []
        self.real_constants: dict[fx.Node, torch.Tensor] = {}
        self.inputs = self._user_inputs()
        self.parameter_nodes, self.parameters = self._group(signature.inputs_to_parameters)
        self.buffer_nodes, self.buffers = self._group(signature.inputs_to_buffers)
        self._literals(signature.inputs_to_lifted_tensor_constants)

    def path_of(self, node: fx.Node) -> str:
        return str((self.signature.inputs_to_parameters | self.signature.inputs_to_buffers)[node.name])

    def _user_inputs(self) -> tuple[str, ...]:
        names = [n for n in self.signature.user_inputs if isinstance(n, str) and n in self.nodes]
        for name in names:
            self._add(self.nodes[name], name)
            value = self.nodes[name].meta["val"]
            if value.requires_grad and value.is_floating_point():  # the gradient goes on into the caller's program
                self.tensors[name] = replace(self.tensors[name], requires_grad=True)
        return tuple(names)

    def _add(self, node: fx.Node, name: str) -> None:
        self.names[node] = name
        self.tensors[name] = tensor_of(name, node.meta["val"], node)

    def _group(self, paths: Mapping[str, str]) -> tuple[set[fx.Node], tuple[Parameter, ...]]:
        """One Parameter per tensor, in state-dict order; its path is the first of its names."""
        shared: dict[int, list[tuple[str, str]]] = {}
        for name, path in sorted(paths.items(), key=lambda item: self.order.get(item[1], 0)):
            shared.setdefault(self._identity(path), []).append((name, path))
        parameters = []
        for group in shared.values():
            (first, path), *others = group
            for name, _ in group:
                self._add(self.nodes[name], first)
            parameters.append(self._parameter(first, path, tuple(other for _, other in others)))
        return {self.nodes[name] for name in paths}, tuple(parameters)

    def _identity(self, path: str) -> int:
        return id(self.values[path]) if path in self.values else hash(path)

    def _parameter(self, name: str, path: str, ties: tuple[str, ...]) -> Parameter:
        value = self.values.get(path)
        trainable = isinstance(value, torch.nn.Parameter) and value.requires_grad
        persistent = path not in self.signature.non_persistent_buffers
        init = self.watcher.init_of(value) if value is not None else ()
        return Parameter(name, path, ties, trainable, persistent, init)

    def _literals(self, paths: Mapping[str, str]) -> None:
        for name, path in paths.items():
            value, node = self.program.constants[path], self.nodes[name]
            if is_fake(value):
                raise CaptureError(f"{UNSEEN}{_first_use(node)}", UNSEEN_HINT)
            if (owner := self._owner(value)) is not None:
                what = f"the forward reaches the parameter {owner} other than through its module{_first_use(node)}"
                raise CaptureError(what, "reach it through its module: a list of parameters is an nn.ParameterList")
            if value.requires_grad:
                what = f"the forward uses a tensor with a gradient that is no parameter of a module{_first_use(node)}"
                raise CaptureError(what, "an attribute of the module, or an argument of the function")
            op, tensor = constant_op(name, value)
            self.constant_ops.append(op)
            self.names[node], self.tensors[name], self.real_constants[node] = name, tensor, value

    def _owner(self, value: torch.Tensor) -> str | None:
        """The parameter that a literal is, held in a list, say."""
        same = _identity(value)
        parameters = self.signature.inputs_to_parameters.values()
        return next((str(path) for path in parameters if _identity(self.values[path]) == same), None)


def _first_use(node: fx.Node) -> str:
    user = next(iter(node.users), None)
    return f" at {node_quote(user)}" if user is not None else ""


def _stored_values(program: Any, model: torch.nn.Module | None) -> dict[str, Any]:
    """Parameters and buffers by every path, ties as the same object, in state-dict order."""
    if model is None:
        first: dict[Any, Any] = {}
        values = {**program.state_dict, **program.constants}
        return {path: first.setdefault(_identity(value), value) for path, value in values.items()}
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _identity(value: Any) -> Any:
    """Equal for the tied parameters of a loaded program: two objects on one storage."""
    if not isinstance(value, torch.Tensor) or value.device.type == "meta":
        return id(value)  # torch.export.save keeps no ties of tensors without values
    return (value.untyped_storage()._cdata, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype)


def _outputs(program: Any, name: Callable[[fx.Node], str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The tensor outputs, and what the forward calls each: `['loss']`, `.loss`, `[0]`."""
    (returned,) = next(iter(reversed(program.graph.nodes))).args
    # A class may look at what it is made of: each is given a tensor of its own.
    stand_ins = {x: torch.empty_like(x.meta["val"], device="meta") for x in returned if isinstance(x, fx.Node)}
    leaves = [stand_ins[x] if isinstance(x, fx.Node) else x for x in returned]
    names = {id(leaf): name(x) for x, leaf in stand_ins.items()}
    tree = torch.utils._pytree.tree_unflatten(leaves, program.call_spec.out_spec)
    labels: dict[str, str] = {}
    for path, leaf in torch.utils._pytree.tree_leaves_with_path(tree):
        if id(leaf) in names:
            labels.setdefault(names[id(leaf)], torch.utils._pytree.keystr(path))
    return tuple(dict.fromkeys(names.values())), labels


def _modules(graph: fx.Graph, model: torch.nn.Module | None) -> tuple[tuple[str, str], ...]:
    """Module path -> short class name: all of the model's, or those that the exported nodes passed through."""
    if model is not None:
        return tuple((path, type(module).__name__) for path, module in model.named_modules())
    return tuple(sorted(dict(_stacks(graph)).items()))


def _stacks(graph: fx.Graph) -> Iterable[tuple[str, str]]:
    for node in graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            name = kind if isinstance(kind, str) else kind.__qualname__
            yield path.partition("@")[0], name.rpartition(".")[2]


def _name(source: str) -> str:
    place = source.rpartition(":")[0] or source
    return Path(place).stem if place.endswith((".py", ".pt2")) else place.rpartition(".")[2]
