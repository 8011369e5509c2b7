# mypy: ignore-errors
"""Errors that the person who started a run can mend."""

from __future__ import annotations


class UserError(Exception):
    """Something the person who started this can mend: shown without a traceback, by rank 0."""


class BatchError(UserError):
    """The same, of a batch that one rank got: shown by that rank."""


class ElsewhereError(UserError):
    """The same, of which another rank knows more: shown by that one."""
