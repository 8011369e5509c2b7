"""Rows of model files: what a user's own code does when it is imported, called, or run."""

from __future__ import annotations

from tests.bad_inputs import Row, model_text, text, thing

_TYPED = "plan model.py:build --mesh dp=2 --hardware cpu-local --out o"


def _model(says: str, code: int = 4, **parts: str) -> Row:
    return Row(_TYPED, code, says, text("model.py", model_text(**parts)), " ".join(parts.values()))


_CUMULATIVE = """
def build():
    model = Model()
    model.layer = nn.BatchNorm1d(8, momentum=None)
    return model, (torch.ones(4, 8),)
"""


def _exits(how: str, says: str) -> list[Row]:
    """The same wherever a model's code runs: on import, in the callable, in the forward."""
    return [_model(says, top=how), _model(says, build=how), _model(says, forward=how)]


ROWS = [
    *_exits("import sys; sys.exit(0)", "it ended the program: sys.exit(0)"),
    *_exits("raise SystemExit('bye')", "it ended the program: sys.exit(bye)"),
    *_exits("import os; os._exit(0)", "it ended the program: os._exit"),
    *_exits("import os; os.abort()", "it ended the program: os.abort"),
    *_exits("import os; os.execvp('true', ['true'])", "it ended the program: os.execv"),
    *_exits("raise RuntimeError()", "RuntimeError"),
    *_exits("raise RuntimeError('a\\nb' * 999)", "RuntimeError: a"),
    *_exits("raise GeneratorExit", "GeneratorExit")[:2],
    *_exits("import nosuchpackage", "No module named 'nosuchpackage'"),
    *_exits("import os; assert False, os.getcwd", "AssertionError"),
    *_exits("raise MemoryError", "MemoryError")[:2],
    _model("class S is no", top="class S(BaseException): pass\nraise S('class S is no')"),
    _model("UserWarning: x", top="import warnings; warnings.simplefilter('error'); warnings.warn('x')"),
    _model("SyntaxError", bottom="(("),
    _model("SyntaxError", bottom="x = 'never closed"),
    _model("null bytes", bottom="\x00"),
    _model("there is no function 'build'", 2, bottom="del build"),
    _model("there is no function 'build'", 2, bottom="build = 5"),
    _model("needs a value for its argument 'a'", 2, bottom="def build(a): pass"),
    _model("returned NoneType", build="return None"),
    _model("returned ()", build="return ()"),
    _model("returned Model", build="return Model()"),
    _model("returned generator", build="return (x for x in [1])"),
    _model("returned (Model, NoneType)", build="return Model(), None"),
    _model("example inputs as tuple of int", build="return Model(), (1,)"),
    _model("takes no 'y'", 2, build="return Model(), {'y': torch.ones(4, 8)}"),
    _model("returned (type, tuple)", build="return Model, (torch.ones(4, 8),)"),
    _model("targets are given, but no loss function", 2, build="return Model(), (torch.ones(4, 8),), 3"),
    _model("example inputs as tuple of nothing", build="return Model(), ()"),
    _model("too many positional arguments", build="return Model(), (torch.ones(4, 8),) * 2"),
    _model("same reduction dim", build="return Model(), (torch.ones(4, 9),)"),
    _model("can't compute in int64", 2, build="return Model(), (torch.ones(4, 8, dtype=torch.int64),)"),
    _model("BatchNorm1d(momentum=None) averages over all batches so far", bottom=_CUMULATIVE),
    _model("returns no tensor", forward="return None"),
    _model("returns no tensor", forward="return 3"),
    _model("returns no tensor", forward="return 'text'"),
    _model("returns no tensor", forward="return []"),
    _model("returns no tensor", forward="return {}"),
    _model("returns no tensor", forward="self.layer(x)"),
    _model("returns a Linear", forward="return self.layer"),
    _model("RecursionError", forward="return self.forward(x)"),
    _model("a tensor's value", forward="return self.layer(x).sum() if x.sum() > 0 else x.sum()"),
    Row(_TYPED, 4, "can't be imported", text("model.py", b"\xff\xfe"), "bytes"),
    Row(_TYPED, 2, "there is no function 'build'", text("model.py", ""), "an empty file"),
    Row(_TYPED, 2, "there is no file model.py", thing("model.py", "missing"), "missing"),
    Row(_TYPED, 2, "model.py is no regular file", thing("model.py", "folder"), "a folder"),
    Row(_TYPED, 2, "model.py is no regular file", thing("model.py", "fifo"), "a pipe"),
    Row(_TYPED, 2, "there is no file model.py", thing("model.py", "loop"), "a loop"),
    Row(_TYPED.replace("model.py:build", "model.py"), 2, "cannot find model"),
    Row(_TYPED.replace("model.py:build", "model.py:"), 2, "cannot find model"),
    Row(_TYPED.replace("model.py:build", ":build"), 2, "cannot find model"),
    Row(_TYPED.replace("model.py:build", "''"), 2, "cannot find model"),
    Row(_TYPED.replace("model.py:build", "no.such.module:build"), 2, "there is no module"),
    Row(_TYPED.replace("model.py:build", "json:nosuch"), 2, "there is no function 'nosuch'"),
    Row(_TYPED.replace("model.py:build", "json:dumps"), 2, "needs a value for its argument 'obj'"),
    Row(_TYPED.replace("model.py:build", "x.pt2"), 5, "there is no file x.pt2"),
    Row(_TYPED.replace("model.py:build", "x.pt2"), 5, "x.pt2 is not a saved", text("x.pt2", "hello"), "text"),
    Row(_TYPED.replace("model.py:build", "x.pt2"), 5, "x.pt2 is not a saved", text("x.pt2", ""), "empty"),
    Row(
        f"{_TYPED} --loss torch.nn.functional:mse_loss",
        2,
        "the loss function mse_loss is called with the model's output",
    ),
    Row(f"{_TYPED} --loss model.py:build", 2, "0 targets and 0 labels of the batch: too many positional arguments"),
    Row(f"{_TYPED} --with width=2", 2, "has no argument 'width'"),
    Row(f"{_TYPED} --verify-with width=2", 2, "has no argument 'width'"),
    Row("calibrate --hardware cpu-local --out x.toml --device cuda", 2, "there is no cuda device"),
    Row("calibrate --hardware cpu-local --out x.toml --device npu", 2, "there is no npu device"),
]
