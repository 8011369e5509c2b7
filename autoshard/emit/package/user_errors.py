# mypy: ignore-errors
"""Errors that the person who started a run can mend."""

from __future__ import annotations


class UserError(Exception):
    """Something the person who started this can mend: shown without a traceback, by rank 0."""


class BatchError(UserError):
    """A UserError about a batch that one rank got: shown by that rank."""


class ElsewhereError(UserError):
    """A UserError of which another rank knows more: shown by that one."""
