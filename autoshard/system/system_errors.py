"""Errors that are neither a user's words nor a bug: a full disk, no memory, a package that is not installed."""

from __future__ import annotations

import errno

from autoshard.errors import CaptureError, UsageError, UserError

# What the system refuses whatever a program does. Others, such as a file that is not there, would be our own fault.
REFUSED = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM,
     errno.EIO, errno.ENOMEM, errno.EAGAIN, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
)  # fmt: skip
NEEDED = ("torch", "numpy", "scipy", "networkx", "pulp", "highspy", "matplotlib", "jinja2", "rich")


def as_user_error(error: Exception) -> UserError | None:
    """The same in a sentence; None where it is a bug."""
    if isinstance(error, OSError) and error.errno in REFUSED:
        where = f"{error.filename}: " if error.filename else ""
        return UsageError(f"{where}{error.strerror}", "`df -h`, `ulimit -a` and the permissions show what is short")
    if isinstance(error, MemoryError):
        return UsageError("there is not enough memory", "a smaller model, or a machine with more")
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in NEEDED:
        return UsageError(f"{error.name} can't be imported: {error}", "pip install autoshard, or what the line names")
    return None


def ended(stopped: SystemExit) -> CaptureError:
    """A model's code called `sys.exit`."""
    code = "" if stopped.code is None else repr(stopped.code)
    return CaptureError(
        f"the model's code ended the program: sys.exit({code})",
        'the call under `if __name__ == "__main__":`, so that importing the file only defines things',
    )
