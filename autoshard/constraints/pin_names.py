"""Names by which a pin refers to inputs, parameters, buffers and operators of a graph: by path, module or pattern."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase

from autoshard.constraints.pins import Pin
from autoshard.errors import NAMED, UsageError
from autoshard.ir.graph import CAST, Graph
from autoshard.rules.operators import constants

Named = tuple[str, str]  # input, parameter, buffer or op; the name of the tensor or operator


def named(graph: Graph, pin: Pin) -> list[Named]:
    """Tensors and operators that `pin.what` names, in the graph's order: an exact name before patterns, and of patterns
    modules first. UsageError where it names nothing, with the nearest names."""
    names = graph.once(_names)
    kinds = [pin.kind] if pin.kind else ["parameter", "input", "op", "module"]
    for kind in kinds:
        if pin.what in names[kind]:
            return names[kind][pin.what]
    for kind in [pin.kind] if pin.kind else ["module", "parameter", "input", "op"]:
        matches = [n for name, entries in names[kind].items() if fnmatchcase(name, pin.what) for n in entries]
        if matches:
            return list(dict.fromkeys(matches))
    known = [name for kind in kinds for name in names[kind]]
    inner = f"{pin.what}.*"
    near = [inner] if any(fnmatchcase(name, inner) for name in names["module"]) else []
    if "op" in kinds:
        near += [op.name for op in graph.ops if op.name in names["op"] and _is_called(op.target, pin.what)]
    near += difflib.get_close_matches(pin.what, known, n=NAMED, cutoff=0.3)
    near = list(dict.fromkeys([*near, *known[: 0 if near else NAMED]]))[:NAMED]
    what = f"{pin.kind} is" if pin.kind else "parameter, input, operator or module is"
    quoted = f"pin {pin.text!r}: " if pin.text != pin.what else ""  # a name alone is no pin: explain asks, too
    raise UsageError(f"{quoted}no {what} called {pin.what!r}", " or ".join(near) or "autoshard explain DIR lists them")


def _is_called(target: str, what: str) -> bool:
    """True if a user would call the operator so: `matmul` for `aten.matmul`, and for a product with a weight."""
    op_name = target.rpartition(".")[2]
    return what in op_name or op_name in what or (what in ("matmul", "mm") and op_name.startswith("linear"))


def _names(graph: Graph) -> dict[str, dict[str, list[Named]]]:
    """Kind of name -> name -> what it names. Operators that depend on nothing are the same everywhere and can't be
    pinned. A module stands for the operators of its code: a cast that mixed precision makes of weights and inputs is
    pinned by its own name, unless the module has nothing else."""
    names: dict[str, dict[str, list[Named]]] = {"parameter": {}, "input": {}, "op": {}, "module": {}}
    names["input"] = {name: [("input", name)] for name in graph.inputs}
    for kind, tensors in (("parameter", graph.parameters), ("buffer", graph.buffers)):
        for stored in tensors:
            names["parameter"] |= {path: [(kind, stored.tensor)] for path in (stored.path, *stored.ties)}
    fixed = constants(graph)
    free = [op for op in graph.ops if not set(op.results) <= fixed]
    busy = {op.module for op in free if op.target != CAST}
    for op in free:
        names["op"][op.name] = [("op", op.name)]
        if op.target != CAST or op.module not in busy:
            names["module"].setdefault(op.module, []).append(("op", op.name))
    return names
