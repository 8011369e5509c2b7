"""Errors shown to a user: each has an exit code, and says what, where, and what to try."""

from __future__ import annotations

NAMED = 3  # names, pins or numbers that a message lists
ROWS = 20  # of a long table that are shown


class UserError(Exception):
    """A mistake in the user's input. `hint` says what to try; shown without a traceback."""

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  try: {self.hint}" if self.hint else self.message


class UsageError(UserError):
    """A wrong option, mesh, name or combination of them."""

    exit_code = 2


class InfeasibleError(UserError):
    """No plan was found that fits. `proven`: none exists; the message says so in words."""

    exit_code = 3

    def __init__(self, message: str, hint: str = "", *, proven: bool = True) -> None:
        super().__init__(message, hint)
        self.proven = proven


class CaptureError(UserError):
    """The model can't be captured."""

    exit_code = 4


class InvalidFileError(UserError):
    """A file is missing, damaged, or of another kind or version."""

    exit_code = 5


class CheckError(UserError):
    """A verification ran and failed."""

    exit_code = 6
