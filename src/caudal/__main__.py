"""`python -m caudal` and the `caudal` command."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line. Returns the exit code."""
    from caudal.cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
