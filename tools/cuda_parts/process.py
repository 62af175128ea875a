"""The command of a part while it runs. Its output goes to a file; when it is ended, so is all that it has started."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from marked_processes import kill_marked

ROOT = Path(__file__).resolve().parents[2]
_MARK = "HVC_CHECK_PART"  # in the environment of every process of a part
#: There too, with the folder of results: what a check leaves behind when it is killed is found by the next one.
_FOLDER = "HVC_CHECK_FOLDER"
_PATIENCE = 60.0  # a process with much memory on a GPU takes its time to end


class Process:
    """A command under way.

    Args:
        folder: of the results of all parts.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: Path, limit: float, folder: Path
    ) -> None:
        self.began, self.limit, self._output = time.monotonic(), limit, output
        self._mark = uuid.uuid4().hex
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        ours = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", _MARK: self._mark, _FOLDER: str(folder.absolute())}
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment, **ours},
                cwd=ROOT,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def status(self) -> int | None:
        """Return the exit status, None while it runs."""
        return self._process.poll()

    def overran(self) -> bool:
        return self.seconds > self.limit

    def end(self) -> str:
        """Kill whatever is left of it, children in sessions of their own too; return what could not be ended, or ""."""
        try:
            if self._process.poll() is None:
                self._process.kill()
            kill_marked(_MARK, self._mark, _PATIENCE)
            self._process.wait(_PATIENCE)
        except (OSError, subprocess.TimeoutExpired) as error:
            self._process.poll()
            return str(error)
        return ""

    def output(self) -> str:
        return self._output.read_text(errors="replace")


def end_left_over(folder: Path) -> str:
    """Kill the parts of an earlier check in this folder that was killed; return what could not be ended, or ""."""
    try:
        kill_marked(_FOLDER, str(folder.absolute()), _PATIENCE)
    except OSError as error:
        return str(error)
    return ""
