"""How a part ended, in a file that a later call reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

RIGHT, WRONG, NOT_RUN = "right", "wrong", "not run"


@dataclass(frozen=True)
class Result:
    """The end of a part.

    Args:
        result: ``right``, ``wrong`` or ``not run``.
        reason: why, unless it is right.
        key: of the sources and the machine that it holds for, see :mod:`.machine`.
        expected: seconds to reserve for it next time.
        output: the last lines.
        figures: by name.
    """

    part: str
    result: str
    reason: str = ""
    seconds: float = 0.0
    key: str = ""
    expected: float | None = None
    output: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: the call may be ended at any moment."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


class Results:
    """The files of all parts in a folder.

    Args:
        key: what a result must hold for to count.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, part: str) -> Result | None:
        """Return a part's last result, whatever it holds for; None without one that can be read."""
        try:
            return Result(**json.loads((self.folder / f"{part}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def current(self, part: str) -> Result | None:
        """Return a part's result if it holds for these sources and this machine."""
        found = self.read(part)
        return found if found and found.key == self.key else None

    def is_right(self, part: str) -> bool:
        found = self.current(part)
        return found is not None and found.result == RIGHT

    def is_wrong(self, part: str) -> bool:
        found = self.current(part)
        return found is not None and found.result == WRONG

    def write(self, result: Result) -> None:
        text = json.dumps(asdict(replace(result, key=self.key)), indent=1) + "\n"
        write_whole(self.folder / f"{result.part}.json", text)

    def figures_of(self, part: str) -> Path:
        """Return where a part leaves its figures."""
        return self.folder.parent / "figures" / part
