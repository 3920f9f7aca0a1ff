"""What comes from standard input."""

from __future__ import annotations

import sys


def read_stdin() -> str:
    """All of standard input as text; bytes that are no UTF-8 become U+FFFD."""
    return sys.stdin.buffer.read().decode("utf-8", errors="replace")
