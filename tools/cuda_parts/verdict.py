"""What a command's exit status and output say of a part."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .catalogue import SANITIZERS
from .part import Part
from .result import NOT_RUN, RIGHT, WRONG

NO_TESTS, NOTHING_TO_MEASURE = 5, 2
TAIL_LINES = 60
_PASSED = re.compile(r"(\d+) passed")
_SKIPPED = re.compile(r"^SKIPPED \[\d+\] [^:]+(?::\d+)?: (.*)$", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.*)$", re.MULTILINE)
_NOT_SUPPORTED = re.compile(r"(Device not supported.*)")
_SANITIZER = re.compile(r"^=+ (ERROR SUMMARY: .*|RACECHECK SUMMARY: .*)$", re.MULTILINE)


def verdict(part: Part, status: int, output: str) -> tuple[str, str]:
    """Return how a part ended, and why."""
    if part.group in SANITIZERS and (found := _NOT_SUPPORTED.search(output)):
        return NOT_RUN, f"{part.group}: {found[1]}"
    if "pytest" in part.command:
        return _of_tests(status, output)
    if status == 0:
        return RIGHT, ""
    if status == NOTHING_TO_MEASURE:
        return NOT_RUN, (output.strip().splitlines() or ["nothing to measure with"])[0]
    return WRONG, f"exit status {status}: {_last_line(output)}"


def _of_tests(status: int, output: str) -> tuple[str, str]:
    passed = _PASSED.findall(output)
    if status in (0, NO_TESTS) and not passed:
        reasons = dict.fromkeys(_SKIPPED.findall(output))
        return NOT_RUN, "; ".join(reasons) or "no test was found"
    if status == 0:
        return RIGHT, ""
    found = _SANITIZER.findall(output)[-1:] + _FAILED.findall(output)[:1] or [_last_line(output)]
    return WRONG, f"exit status {status}: {'; '.join(found)}"


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def tail(output: str, lines: int = TAIL_LINES) -> str:
    return "\n".join(output.splitlines()[-lines:])


def figures(folder: Path) -> Mapping[str, Any]:
    """Return the figures that a part has left: objects by name, and lines of records by the name of their file.

    A file that its writer was killed at is left out.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json*")):
        with contextlib.suppress(OSError, ValueError):
            if path.suffix == ".jsonl":
                found[path.stem] = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
            elif path.suffix == ".json" and not path.name.startswith("trace."):
                found |= json.loads(path.read_text())
    return found
