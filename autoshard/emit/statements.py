"""The statements of one forward: operators, visible collectives, calls of inner modules and loops over them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from autoshard import redistribute
from autoshard.code_text import fresh, quoted
from autoshard.emit.code_lines import statement
from autoshard.emit.nested_calls import with_brackets
from autoshard.emit.variable_liveness import Liveness
from autoshard.ir.plan import ATTENTION, KEEP_ALL, KEEP_SOME, PLAIN, policy_results
from autoshard.ir.program import Collective, Compute, DimCut, LocalAttribute
from autoshard.program.early_reductions import ColumnParallel
from autoshard.program.module_scopes import RANDOM, random_index, results_of
from autoshard.program.module_tree import Loop, ModuleCall
from autoshard.rules.algebra.float8_products import IN_FLOAT8, IN_OUT
from autoshard.rules.host_tables import TABLE
from autoshard.rules.operators import record

if TYPE_CHECKING:
    from autoshard.emit.classes import ClassWriter

_DEFAULTS: dict[str, LocalAttribute] = {
    "ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean", "keepdim": False, "padding_idx": -1,
    "is_causal": False, "scale": None, "enable_gqa": False,
}  # fmt: skip
_ELEMENTWISE = frozenset(f"aten.{name}" for name in ("add", "sub", "mul", "div", "dropout", "relu", "gelu", "silu"))


class Body:
    """Writes the statements of a forward."""

    def __init__(self, owner: ClassWriter) -> None:
        self.owner = owner
        self.program = owner.package.program
        self.names = owner.naming.names
        self.pending: dict[str, str] = {}  # value -> the expression that a later statement takes in
        self.sources: dict[str, tuple[str | None, bool]] = {}  # of what is pending, see `_source`
        self.holding = Liveness(self.program, owner.definition, owner.nested, owner.package.gathered)

    def items(self) -> Iterator[tuple[str, list[str]]]:
        """(op, lines), in order: lines that call an operator under its name, all others under ""."""
        body = self.owner.definition.body
        for i, item in enumerate(body):
            for new, value in self.owner.naming.copies.get(i, []):
                yield "", statement(f"{new} = {self.text(value)}", 2)
            if isinstance(item, ModuleCall):
                yield "", self._call(item)
            elif isinstance(item, Loop):
                yield "", self._loop(i, item)
            elif isinstance(item, Collective):
                yield "", self._assign(item.result, self._collective(item), self._reason(item))
            else:
                if i in self.owner.nested:
                    self.sources[item.results[0]] = self._source(item)
                    self.pending[item.results[0]] = self._expression(item)
                    yield item.op, []
                    continue
                yield item.op, self._compute(item)
                if item.regathered:
                    yield "", self._regather(item)
            if done := self.holding.after(i, self.names):
                yield "", statement(f"del {', '.join(done)}", 2)

    def _regather(self, op: Compute) -> list[str]:
        """Statement by which this operator's backward first gathers weights again. It follows the operator at once."""
        results = results_of(op)[-1:] if isinstance(op, ColumnParallel) else results_of(op)
        names = [self.names[v] for v in results if self.program.value(v).requires_grad and self.names[v] != "_"]
        weights = ", ".join(map(self.owner.operand, op.regathered))
        if len(names) == 1:
            return statement(f"regather_before({names[0]}, {weights})", 2)
        several = ", ".join(names)
        return statement(f"{several} = regather_before(({several}), {weights})", 2) if names else []

    def text(self, value: str | None) -> str:
        return "None" if value is None else self.owner.operand(value)

    def _assign(self, value: str, expression: str, comment: str = "") -> list[str]:
        return statement(f"{self.names[value]} = {expression}", 2, comment)

    def _targets(self, results: list[str | None]) -> str:
        return ", ".join("_" if value is None else self.names[value] for value in results)

    # --- calls ---

    def _call(self, call: ModuleCall) -> list[str]:
        expression = self._called(
            self.owner.access(call.path), [self.text(value) for value in call.arguments], call.keep
        )
        code = f"{self._targets(list(call.results))} = {expression}" if call.results else expression
        return statement(code, 2, _saved_comment(call.keep))

    def _called(self, module: str, arguments: list[str], keep: str) -> str:
        """The call of a module, or one that backward recomputes."""
        if keep == KEEP_ALL:
            return f"{module}({', '.join(arguments)})"
        self.owner.uses_random = True
        plain = PLAIN.get(keep, keep)  # collectives say themselves that they are kept
        value = _places(keep) if keep.startswith(KEEP_SOME) else quoted(plain)
        more = [f"keep={value}"] if plain != "input" else []
        return f"recomputed({', '.join([module, self.owner.ours('random'), *arguments, *more])})"

    def _loop(self, i: int, loop: Loop) -> list[str]:
        stem, _, first = loop.paths[0].rpartition(".")
        each, held = self.owner.container(stem)
        start, stop = int(first), int(first) + len(loop.paths)
        if not held.is_list:
            each = f"({', '.join(map(self.owner.access, loop.paths))})"
        elif len(loop.paths) < len(held.items):
            each += f"[{start or ''}:{stop if stop < len(held.items) else ''}]"
        variable = fresh("block", self.names.values())
        carried, slots = dict(loop.carried), self.owner.naming.carried
        arguments = [slots[i, a] if a in carried else self.text(value) for a, value in enumerate(loop.arguments)]
        targets = {r: slots[i, a] for a, r in carried.items()}
        results = [targets.get(r) or ("_" if v is None else self.names[v]) for r, v in enumerate(loop.results)]
        inner_call = f"{', '.join(results)} = {self._called(variable, arguments, loop.keep)}"
        return [*statement(f"for {variable} in {each}:", 2), *statement(inner_call, 3, _saved_comment(loop.keep))]

    # --- operators ---

    def _expression(self, op: Compute) -> str:
        """The call of an operator including what has effects around it, the same in every position."""
        expression = self._variant(op) if op.variant else self._plain(op)
        if op.op not in self.owner.package.counted:
            return expression
        self.owner.uses_labels = True
        return f"counted({expression}, {self.owner.ours('labels')})"

    def _compute(self, op: Compute) -> list[str]:
        expression = self._expression(op)
        results = list(results_of(op))
        if isinstance(op, ColumnParallel) and op.moves is not None:
            return statement(f"{self._left(op)} = {expression}", 2, self._reason(op.moves))
        if len(results) == 1:
            left = self._left(op)
            if left != self.names[results[0]]:
                return statement(f"{left} = {expression}", 2)
            return self._assign(results[0], expression, self._layout_note(op))
        return statement(f"{self._left(op)} = {expression}", 2)

    def _left(self, op: Compute) -> str:
        names = [self.names[value] for value in results_of(op)]
        if op.variant:
            return ", ".join(names)
        return self.owner.speller.assigned(op.target, op.operands, self.owner.attributes(op), names)

    def _plain(self, op: Compute) -> str:
        within = {value: f"within_{i}_" for i, value in enumerate(op.operands) if value in self.pending}
        texts = [None if v is None else within.get(v) or self.text(v) for v in op.operands]
        texts = self._sent(op, texts)
        if op.results and op.results[0] in self.owner.package.casts:
            return f"cast_weight({texts[0]}, torch.{self.program.value(op.results[0]).dtype})"
        expression = self.owner.speller.spell(op.target, texts, self.owner.attributes(op))
        expression = with_brackets(expression, {word: self.pending.pop(value) for value, word in within.items()})
        self.owner.uses_device |= self.owner.speller.device in expression
        return self._brought(op, expression)

    def _sent(self, op: Compute, texts: Sequence[str | None]) -> list[str | None]:
        """Operands as passed: for a look-up on the host, all but the table are sent there."""
        there = [op.host and i != TABLE and text is not None for i, text in enumerate(texts)]
        return [f"to_host({text})" if sent else text for text, sent in zip(texts, there, strict=True)]

    def _brought(self, op: Compute, expression: str) -> str:
        """Expression that moves a look-up's result from the host to the device."""
        if not op.host:
            return expression
        self.owner.uses_device = True
        return f"to_device({expression}, {self.owner.speller.device})"

    def _variant(self, op: Compute) -> str:
        """A call of a runtime function."""
        if isinstance(op, ColumnParallel) and op.moves is not None:
            return self._column_parallel(op, op.moves)
        operands = [str(text) for text in self._sent(op, [v and self.text(v) for v in op.operands])]
        if op.variant == "random_attention":
            operands += ["None"] * (4 - len(operands))
        else:
            operands = operands[: max((i + 1 for i, value in enumerate(op.operands) if value is not None), default=0)]
        if op.variant in RANDOM:
            self.owner.uses_random = True
            operands.append(self.owner.ours("random"))
        keywords = {k: v for k, v in self.owner.attributes(op).items() if not (k in _DEFAULTS and v == _DEFAULTS[k])}
        arguments = [f"{name}={self._argument(op, name, value)}" for name, value in keywords.items()]
        for role, axes in op.axes:
            names = [self.owner.axis(axis) for axis in axes]
            arguments.append(f"{role}=({', '.join(names)}{',' if len(names) == 1 else ''})")
        return self._brought(op, f"{op.variant}({', '.join([*operands, *arguments])})")

    def _argument(self, op: Compute, name: str, value: LocalAttribute) -> str:
        if name != "index" or op.variant not in RANDOM:
            return self.owner.speller.literal(value)
        number = random_index(op)
        assert number is not None
        if self.owner.is_root:
            return str(number)
        offset = number - self.owner.definition.random_base
        return self.owner.ours("first_random") + (f" + {offset}" if offset else "")

    def _layout_note(self, op: Compute) -> str:
        """Layout of a result, if it differs from that of the first operand."""
        first, moves = self._source(op)
        result = self.program.value(op.results[0])
        if moves or first is None or self.program.value(first).layout == result.layout or not result.shape:
            return ""
        return f"{result.shape} {result.layout.on(self.program.mesh)}"

    def _source(self, op: Compute) -> tuple[str | None, bool]:
        """First variable that the operator's result is made of, and whether it is only moved or changed elementwise."""
        moves = record(op.target).keeps_name or op.target in _ELEMENTWISE
        for value in op.operands:
            if value in self.sources:
                first, moved = self.sources[value]
                return first, moves and moved
            if value is not None and value in self.names:
                return value, moves
        return None, moves

    # --- collectives ---

    def _collective(self, step: Collective) -> str:
        arguments = [self.text(step.operand), self.owner.axis(*step.axes)]
        if step.forward in redistribute.BY_INDEX:
            return self._by_index(step, arguments)
        name, grad = redistribute.runtime_call(step.before[0], step.after[0], step.regathered, step.once)
        if step.joined is not None and step.cut is not None:
            arguments += [str(step.joined.dim), str(step.cut.dim), *self._cut(step, step.joined, "joined_", True)]
            arguments += self._cut(step, step.cut, "cut_", False)
        elif (cut := step.joined or step.cut) is not None:
            arguments += [str(cut.dim), *self._cut(step, cut, "", step.joined is not None)]
        arguments += [f"grad={quoted(grad)}"] if grad is not None and grad != redistribute.CALLS[name] else []
        arguments += _retention_arguments(step)
        return f"{name}({', '.join(arguments)})"

    def _column_parallel(self, op: ColumnParallel, moves: Collective) -> str:
        """Arguments: the axis, then the weight and addend, then how the input is gathered, if it is."""
        first, weight, *added = op.operands
        turned = ".t()" if op.target in IN_OUT else ""
        arguments = [self.text(first), self.owner.axis(*moves.axes), self.text(weight) + turned]
        arguments += [self.text(value) for value in added if value is not None]
        if moves.joined is not None:
            arguments += [f"dim={moves.joined.dim}", *self._cut(moves, moves.joined, "", True)]
        arguments += ["float8=True"] if op.target in IN_FLOAT8.values() else []
        arguments += _retention_arguments(moves)
        return f"{op.variant}({', '.join(arguments)})"

    def _by_index(self, step: Collective, arguments: list[str]) -> str:
        """Arguments of an exchange: the global shape, and the layouts before and after."""
        before, after = (self.program.value(name) for name in (step.operand, step.result))
        shape = self.owner.speller.literal(self.owner.shape(before))
        arguments += [shape, quoted(str(before.layout)), quoted(str(after.layout))]
        arguments += ['by="all_gather"'] if "gather" in (step.forward, step.backward) else []
        arguments += ["again=True"] if step.regathered else _retention_arguments(step)
        return f"exchange({', '.join(arguments)})"

    def _cut(self, step: Collective, cut: DimCut, prefix: str, joined: bool) -> list[str]:
        """Keywords of a sharded dim that differ from the defaults."""
        arguments = [f"{prefix}blocks={cut.blocks}"] if cut.blocks != 1 else []
        arguments += [f"{prefix}unit={cut.unit}"] if cut.unit != 1 else []
        if joined and not self._divides(step, cut):
            arguments.insert(0, f"{prefix}size={self.owner.size(cut.size)}")
        return arguments

    def _divides(self, step: Collective, cut: DimCut) -> bool:
        """Does every device along the axis hold an equal part, so that the runtime can compute the length?"""
        mesh = self.program.mesh
        local = self.program.value(step.operand).local_shape[cut.dim]
        parts = math.prod(mesh.axis_size(axis) for axis in step.axes)
        if local.is_even(mesh) and cut.size.is_even(mesh):
            return local.largest(mesh) * parts == cut.size.largest(mesh)
        return False

    def _reason(self, step: Collective) -> str:
        """The reason, with graph names replaced by those that a reader of the class knows."""
        inner = _last_name(step.module) if step.module != self.owner.definition.path else ""

        def readable(match: re.Match[str]) -> str:
            word = match[0]
            if word == self.program.value(step.operand).tensor:
                return next((n for n in map(self.names.get, (step.result, step.operand)) if n and n != "_"), word)
            if word in self.owner.package.targets and not step.reason.startswith("sum the "):
                return inner or self.owner.package.targets[word]
            return word

        return re.sub(r"[A-Za-z_]\w*", readable, step.reason)


def _retention_arguments(step: Collective) -> list[str]:
    return ["kept=True"] if step.reused else []


def _last_name(path: str) -> str:
    """Short name of a module: `c_fc` of h.0.mlp.c_fc, `emb.0` of emb.0."""
    parts = path.split(".")
    start = next((i for i in reversed(range(len(parts))) if not parts[i].isdecimal()), 0)
    return ".".join(parts[start:])


def _places(keep: str) -> str:
    """`(0, 2, "attention")`: the results that a policy keeps."""
    places = [quoted(place) if place == ATTENTION else place for place, _ in policy_results(keep)]
    return f"({', '.join(places)}{',' * (len(places) == 1)})"


def _saved_comment(keep: str) -> str:
    """A comment that names the kept results."""
    if keep in PLAIN:
        return "kept: what its collectives gave"
    return f"kept: {', '.join(module for _, module in policy_results(keep))}" if keep.startswith(KEEP_SOME) else ""
