"""Why a capture failed: the reason and the hint for each kind of error that torch.export raises."""

from __future__ import annotations

import inspect
import re
import sys

import torch

from autoshard.errors import CaptureError, UserError
from autoshard.graph_capture.tracing.source_lines import culprit, headline, library_function

_REWRITE = "let shapes and branches follow from sizes, not from values; or capture a part of the model"
_IN_LIBRARY = (
    "a setting of {library} with which its code does not ask for values; or a function of your own in the place of "
    "{function}, before the model is built: --verify compares with that"
)
# A loop over the experts that tokens hit, as transformers writes it: of a class with other ways, and of one without.
_EXPERTS = (
    'experts_implementation="batched_mm" in the configuration that the model is built from ("grouped_mm" for long '
    "batches): it computes the same without asking which experts are hit"
)
_LOOP = (
    "every expert on all tokens, weighed by 0 where it was not chosen (for e in range(number of experts): "
    "out = out + expert(x) * weight[:, e, None]), in place of {function}, before the model is built: --verify compares "
    "with that"
)
_PLAIN = (
    "call model(*inputs) in Python, on the CPU: it must run, with a mask that hides something too (traced, a library "
    "leaves no mask out); --debug shows where torch.export gave up"
)
_RETURN = "return the loss alone; give a transformers model use_cache=False"
VMAP_HINT = "the operators on the whole batch instead of torch.vmap"
UNSEEN = "the forward uses a tensor that was made out of sight"
UNSEEN_HINT = (
    "tensor operations in the forward itself: no other thread, no torch.vmap with out_dims, no function that hides its "
    "tensors"
)
_UNHELD = "the forward uses a tensor of the constructor's that no module holds"
_REGISTERED = "read it as self.NAME: a closure, a list or a global keeps the tensor that the constructor made"
_OWN_HINTS = {UNSEEN: UNSEEN_HINT, _UNHELD: _REGISTERED}
_REASONS = (
    (
        r"data-dependent|GuardOnDataDependent|DataDependentOutput|_local_scalar_dense|is_nonzero|non-nested SymInt",
        "the program depends on a tensor's value",
    ),
    (r"__obj_flatten__|PackedParams|quantized::", "a quantised module has no gradient and no real tensors"),
    (r"DynamicOutputShape|nonzero|masked_select", "the shape of a result depends on a tensor's value"),
    (r"FakeTensorDeviceMismatch", _UNHELD),
    (r"fake tensor in the exported program constant's list", UNSEEN),
)  # fmt: skip


def capture_failure(model: torch.nn.Module, error: BaseException) -> CaptureError:
    """Why a model cannot be captured, where in its code, and what to try."""
    name, place = type(model).__name__, culprit(error)
    if (refusal := autoshard_error(error)) is not None:
        where = "" if isinstance(refusal, CaptureError) or not place else f"{place}: "
        return CaptureError(f"{name} can't be captured: {where}{refusal.message}", refusal.hint)
    text = f"{type(error).__name__}: {error}"
    if returned := re.search(r"Found <class '(?:.*\.)?(\w+)'> in output", text):
        return CaptureError(
            f"{name} can't be captured: its forward returns a {returned[1]}, which is no tensor", _RETURN
        )
    if reason := failure_reason(error):
        what = f"{reason} at {place}" if place else reason
    else:
        what = f"{place}: {headline(error)}" if place else headline(error)
    return CaptureError(f"{name} can't be captured: {what}", _hint(error) if reason else _PLAIN)


def failure_reason(error: BaseException) -> str:
    """Reason why torch.export does not take the program; "" for another error."""
    text = f"{type(error).__name__}: {error}"
    return next((reason for pattern, reason in _REASONS if re.search(pattern, text)), "")


def _hint(error: BaseException) -> str:
    """Hint for what torch.export does not take; if values decide, for the user's own code or for that of a library."""
    if (reason := failure_reason(error)) in _OWN_HINTS:
        return _OWN_HINTS[reason]
    function = library_function(error)
    if (place := culprit(error)) and "expert" in place:
        has_others = "use_experts_implementation" in function_text(function)
        return _EXPERTS if has_others else _LOOP.format(function=function or "that loop")
    return _IN_LIBRARY.format(library=function.partition(".")[0], function=function) if function else _REWRITE


def function_text(function: str) -> str:
    """The source of the class that a library's function stands in, with what decorates it; "" where there is none."""
    place, _, owner = function.rpartition(".")[0].rpartition(".")
    member = getattr(sys.modules.get(place), owner, None)
    try:
        return inspect.getsource(member) if inspect.isclass(member) else ""
    except (OSError, TypeError):
        return ""


def autoshard_error(error: BaseException | None) -> UserError | None:
    """Error that autoshard raised while torch ran the forward, however it was wrapped on its way; None if another."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error
