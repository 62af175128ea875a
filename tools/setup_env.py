#!/usr/bin/env python3
"""Creates `.venv` with everything in it; run by `make setup`, and safe to run again at any time.

This file alone is written for Pythons of any age: one that is too old must get an answer, not a SyntaxError.
"""

import sys

OLDEST_PYTHON = (3, 10)


def too_old(version: "tuple[int, ...]") -> "str | None":
    """What to say to a Python that cannot run the rest, or None."""
    if version >= OLDEST_PYTHON:
        return None
    return (
        "make setup cannot go on: this is Python {}.{}, and horovod-compress needs 3.10 or newer.\n"
        "  Debian, Ubuntu:  sudo apt-get install python3 python3-venv python3-dev\n"
        "  Fedora:          sudo dnf install python3 python3-devel\n"
        "A newer Python beside this one is used with, for example:  make setup PYTHON=python3.12"
    ).format(version[0], version[1])


def main() -> int:
    message = too_old(sys.version_info[:2])
    if message:
        print(message, file=sys.stderr)
        return 1
    # What builds Horovod lies in the package, which has it too: `hvd-compress build-horovod`.
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from environment.steps import run_from_command_line

    return run_from_command_line(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
