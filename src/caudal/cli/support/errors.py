"""Errors on the command line: one clear message on standard error and an exit code that means something."""

from __future__ import annotations

import errno
import os
import sys

from caudal.core import (
    CaudalError,
    DownloadError,
    InsufficientMemoryError,
    InvalidModelFileError,
    InvalidRequestError,
    InvalidSettingError,
    ModelNotFoundError,
    UnsupportedModelError,
)

EXIT_CODES = {
    0: "success",
    1: "failure",
    2: "wrong usage",
    3: "model not found",
    4: "not a valid model file",
    5: "valid model file, but not supported",
    6: "not enough memory",
    7: "address already in use",
    8: "download failed",
    130: "interrupted (Ctrl-C)",
}

_CODES: tuple[tuple[type[CaudalError], int], ...] = (
    (InvalidSettingError, 2),
    (InvalidRequestError, 2),  # an option out of its range, or a prompt that does not fit
    (ModelNotFoundError, 3),
    (InvalidModelFileError, 4),
    (UnsupportedModelError, 5),
    (InsufficientMemoryError, 6),
    (DownloadError, 8),
)


def exit_code(error: BaseException) -> int:
    """The exit code for an error; see EXIT_CODES."""
    if any(isinstance(e, OSError) and e.errno == errno.EADDRINUSE for e in (error, error.__cause__)):
        return 7
    if isinstance(error, MemoryError):
        return 6
    return next((code for kind, code in _CODES if isinstance(error, kind)), 1)


def report_error(error: BaseException) -> int:
    """Print the error and return its exit code. A reader that closed our output early is no error to report."""
    if isinstance(error, BrokenPipeError):
        # Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    message = "not enough memory" if isinstance(error, MemoryError) else describe(error)
    print(f"caudal: {message}", file=sys.stderr)
    return exit_code(error)


def describe(error: BaseException) -> str:
    """An error's message for people: those of the system come without Python's brackets around them."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
