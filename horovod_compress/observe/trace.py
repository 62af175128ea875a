"""Recording of a timeline: what is recorded, how much of it, and where it is written.

Threads of a reducer append what they have done to a list, and nothing else; events are made of it at the end.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from types import TracebackType
from typing import Any, Protocol

from .. import __version__
from ..errors import ConfigError
from .files import check_writable, path_of, replace_whole
from .metrics import Metrics
from .trace_events import Span, TraceEvent, events_of, process_of

#: Some 30 MB in memory for each compression, and in the file.
MAX_EVENTS = 200_000
#: How long the end of a trace waits for another thread that writes the file.
_WRITE_SECONDS = 60.0

_log = logging.getLogger("horovod_compress")


class Recorded(Protocol):
    """What a trace has to know of a reducer."""

    @property
    def metrics(self) -> Metrics:
        """What is counted."""

    def next_step(self) -> int:
        """Return the number of the step that the next gradient belongs to."""

    def idle(self) -> bool:
        """Return whether nothing is under way."""


class Trace:
    """A timeline that is being recorded; a context manager that writes it at the end. See ``hvc.trace``.

    Attributes:
        path: the file of this rank.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int, steps: int | range | None, events: int) -> None:
        self.path, self._rank = path_of(path, rank, "timeline", "trace.json"), rank
        self._steps, self._limit = _checked(steps), events
        if type(events) is not int or events < 1:
            raise ConfigError(f"events should be a whole number, at least 1, got {events!r}")
        self._began = time.perf_counter()
        self._epoch = time.time() - self._began
        self._recordings: list[_Recording] = []
        self._lock, self._ending = threading.Lock(), False
        self._written = threading.Event()
        self._process = os.getpid()
        check_writable(self.path, "timeline")

    def follow(self, reducer: Recorded, method: str = "") -> None:
        """Record a reducer, from its next step on."""
        name = f"rank {self._rank}{f': {method}' if method else ''}"
        first, steps = reducer.next_step() + (0 if reducer.idle() else 1), self._steps
        if not isinstance(steps, range):
            steps = range(first, sys.maxsize if steps is None else first + steps)
        self._recordings.append(_Recording(reducer, name, steps, self._limit, self._ended))

    def close(self) -> None:
        """Stop recording and write the file, unless that has already happened; safe to call twice."""
        if os.getpid() != self._process:
            return  # a fork at its end, which has nothing to tell
        for recording in self._recordings:
            recording.stop()
        if self._is_first():
            self._write()  # on this thread: an interpreter that exits starts no other
        if not self._written.wait(_WRITE_SECONDS):
            _log.warning("rank %d: after %.0f s, %s is still being written", self._rank, _WRITE_SECONDS, self.path)
        atexit.unregister(self.close)

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ended(self) -> None:
        """Write once nothing is recorded any more, on a thread of its own: this one may be in the backward pass."""
        if any(recording.goes_on() for recording in self._recordings) or not self._is_first():
            return
        try:
            threading.Thread(target=self._write, name="hvc-trace", daemon=True).start()
        except RuntimeError:  # there are too many, or the interpreter is about to end
            self._write()

    def _is_first(self) -> bool:
        """Return whether it is on the caller to write, and let another trace begin."""
        global _current  # noqa: PLW0603  a process has one trace
        with self._lock:
            first, self._ending = not self._ending, True
        if _current is self:
            _current = None
        return first

    def _write(self) -> None:
        try:
            replace_whole(self.path, json.dumps(self._document()))
            _log.info("rank %d: the timeline is in %s", self._rank, self.path)
        except Exception as error:  # noqa: BLE001  training goes on without it
            what = f"{type(error).__name__}: {error}"
            _log.warning("rank %d: the timeline was not written to %s: %s", self._rank, self.path, what)
        finally:
            self._recordings.clear()  # whoever keeps this object shall not keep them
            self._written.set()

    def _document(self) -> dict[str, Any]:
        events: list[TraceEvent] = []
        for number, recording in enumerate(self._recordings):
            events += recording.events(process_of(self._rank, number), self._epoch)
        about = {
            "rank": self._rank,
            "horovod_compress": __version__,
            "began": datetime.fromtimestamp(self._epoch + self._began, timezone.utc).isoformat(),
            "clock": "microseconds since 1970 (UTC) by this host's clock at the beginning, steady from then on",
        }
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


class _Recording:
    """What one reducer did, in steps of a range."""

    def __init__(self, reducer: Recorded, name: str, steps: range, limit: int, ended: Callable[[], None]) -> None:
        self._metrics, self._name, self._ended = reducer.metrics, name, ended
        self._first, self._stop, self._limit = steps.start, steps.stop, limit
        self._records: list[tuple[Any, ...]] = []
        self.on = True
        self._metrics.trace = self._take

    def stop(self) -> None:
        if self.on:
            self.on, self._metrics.trace = False, None

    def goes_on(self) -> bool:
        """Return whether more may come: the reducer takes the hook out when it is closed."""
        return self.on and self._metrics.trace is not None

    def events(self, process: int, epoch: float) -> list[TraceEvent]:
        return events_of((Span(*record) for record in list(self._records)), process, self._name, epoch)

    def _take(self, phase: str, began: float, ended: float, step: int, *rest: Any) -> None:
        """Append a record; called on every thread of the reducer."""
        if self._first <= step < self._stop and self.on:
            self._records.append((phase, began, ended, step, *rest))
            if len(self._records) >= self._limit:
                self._end(f"is full after {self._limit} events, in step {step}; give steps= to choose what is recorded")
        elif step >= self._stop:  # not with the last result: the training thread's wait for it ends later
            self._end("")

    def _end(self, why: str) -> None:
        if self.on:
            self.stop()
            if why:
                _log.warning("%s: the timeline %s", self._name, why)
            self._ended()


_current: Trace | None = None
_asked = False  # whether HVC_TRACE was looked at


def begin(path: str | os.PathLike[str], rank: int, steps: int | range | None, events: int) -> Trace:
    """Make the trace that reducers are recorded in from now on.

    Raises:
        ConfigError: the file cannot be written, ``steps`` is wrong, or a trace is being recorded already.
    """
    global _current  # noqa: PLW0603  a process has one trace
    if _current:
        raise ConfigError(f"rank {rank}: a timeline is being recorded to {_current.path}; close() that one first")
    _current = Trace(path, rank, steps, events)
    atexit.register(_current.close)
    return _current


def follow(reducer: Recorded, rank: int, method: str) -> None:
    """Record a new reducer if a trace is on, or is asked for by ``HVC_TRACE``; never raises."""
    global _asked  # noqa: PLW0603  and asks for one once
    path = os.environ.get("HVC_TRACE", "")
    if path and not _asked and not _current:
        try:
            begin(path, rank, parse_steps(os.environ.get("HVC_TRACE_STEPS", "")), MAX_EVENTS)
        except ConfigError as error:
            _log.warning("HVC_TRACE=%s: no timeline is recorded: %s", path, error)
    _asked = True
    if _current:
        _current.follow(reducer, method)


def parse_steps(text: str) -> int | range | None:
    """Return what ``HVC_TRACE_STEPS`` says: "20" the first twenty, "100:110" these, "" all.

    Raises:
        ConfigError: it says something else.
    """
    try:
        numbers = [int(part) for part in text.split(":")] if text else []
        return None if not numbers else numbers[0] if len(numbers) == 1 else range(*numbers)
    except (TypeError, ValueError):
        raise ConfigError(f'HVC_TRACE_STEPS should be a number such as "20", or "100:110", got {text!r}') from None


def _checked(steps: int | range | None) -> int | range | None:
    if steps is None or (type(steps) is int and steps > 0):
        return steps
    if isinstance(steps, range) and steps.step == 1 and 0 <= steps.start < steps.stop:
        return steps
    raise ConfigError(f"steps should be a positive number, or a range such as range(100, 110), got {steps!r}")
