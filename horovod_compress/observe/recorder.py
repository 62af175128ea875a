"""The last events of a rank, for the message of a failure and for what is looked at afterwards."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

_log = logging.getLogger("horovod_compress")

#: What goes on beside an exchange, on other threads.
_BESIDE = ("offer", "decode")


class FlightRecorder:
    """The last events of this rank, for the message and the post-mortem of a fault."""

    def __init__(self, size: int = 256) -> None:
        self.events: deque[tuple[float, int, int, str, int]] = deque(maxlen=size)
        self._last: tuple[float, int, int, str, int] | None = None

    def note(self, step: int, bucket: int, event: str, hop: int = -1) -> None:
        noted = (time.time(), step, bucket, event, hop)
        self.events.append(noted)
        if event not in _BESIDE or self._last is None:
            self._last = noted  # kept apart: many offers may follow a stuck exchange

    def last(self) -> str:
        """Describe the last event of an exchange in words; offers go on beside it."""
        if self._last is None:
            return "nothing yet"
        _, step, bucket, event, hop = self._last
        return f"{event}{f' {hop}' if hop >= 0 else ''} of bucket {bucket}, step {step}"

    def document(self, rank: int, failure: str, **more: Any) -> dict[str, Any]:
        """Return the events as plain data, the oldest first."""
        names = ("time", "step", "bucket", "event", "hop")
        events = [dict(zip(names, event, strict=True)) for event in list(self.events)]
        return {"rank": rank, "time": time.time(), "failure": failure, "events": events, **more}

    def dump(self, rank: int, failure: str, **more: Any) -> None:
        """Write ``rank<N>.json`` to the folder of ``HVC_DUMP_DIR``, if that is set.

        It never raises: a full disk must not hide the failure that there is to report.

        Args:
            failure: the error's text.
            more: what else is known, as plain data.
        """
        folder = os.environ.get("HVC_DUMP_DIR", "")
        if not folder:
            return
        try:
            path = Path(folder) / f"rank{rank}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps(self.document(rank, failure, **more)) + "\n")
            temporary.replace(path)  # a reader sees all of it or nothing
        except OSError as error:
            _log.warning("HVC_DUMP_DIR=%s: the flight record of rank %d was not written: %s", folder, rank, error)
