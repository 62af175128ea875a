"""Reports of a running compression: one line in the log, scalars for TensorBoard, a file for Prometheus.

All are made between two steps, on the training thread, from the same counters. A step without a report costs a look
at the clock and a comparison of two numbers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import cache
from math import inf
from typing import Any, Protocol

from ..errors import ConfigError
from .metrics import Metrics
from .verdict import Pace
from .window import Window, between

#: Steps after which the log has a line; before the end, where the training is shorter.
LINE_AFTER = 100

_log = logging.getLogger("horovod_compress")


class Destination(Protocol):
    """Where reports go."""

    def write(self, step: int, stats: Mapping[str, Any], window: Window) -> None:
        """Write one report.

        Args:
            step: the number of the next step, which a resumed training goes on with.
            stats: all counters.
            window: the steps since the last report.
        """


class Reports:
    """The reports of one compression.

    Args:
        metrics: its counters, which are looked at in every step.
        counters: returns what can be read at any time.
        stats: returns all that is counted, which may take a pass over the residuals; between two steps.
        next_step: returns the number of the next step.
        name: of the rank and the method, for the log.
        line: write the line.
        pace: how long steps take.
        total_steps: the length of the training, if known.
        verdict: returns, in words, what compression is worth.

    Attributes:
        updates: these are exchanges of updates, which no backward pass hides.
    """

    def __init__(
        self,
        metrics: Metrics,
        counters: Callable[[], Mapping[str, Any]],
        stats: Callable[[], Mapping[str, Any]],
        next_step: Callable[[], int],
        name: str,
        *,
        line: bool,
        pace: Pace,
        total_steps: int | None = None,
        verdict: Callable[[], str] = str,
    ) -> None:
        self._metrics, self._counters, self._stats = metrics, counters, stats
        self._next_step, self._name = next_step, name
        self.pace, self.updates = pace, False
        after = LINE_AFTER if total_steps is None else max(2, min(LINE_AFTER, total_steps - 1))
        self._series = [_Series(_Line(self, name, verdict), after, 0, once=True)] if line else []
        self._plan()

    def add(self, destination: Destination, every: int) -> None:
        """Report there after each ``every`` steps from now on.

        Raises:
            ConfigError: ``every`` is no such number.
        """
        if type(every) is not int or every < 1:
            raise ConfigError(f"every should be a whole number of steps, at least 1, got {every!r}")
        self._series.append(_Series(destination, every, self._metrics.steps))
        self._plan()

    def look(self) -> None:
        """Make the reports that are due; between two steps."""
        self.pace.begin_step()
        if self._metrics.steps >= self._due:
            self._make()

    def _make(self) -> None:
        steps, now = self._metrics.steps, time.perf_counter()
        due = [series for series in self._series if steps >= series.due]
        stats = cache(self._stats)
        for series in due:
            try:
                if series.began:
                    series.write(self._next_step(), self._counters() if series.once else stats(), now)
                else:
                    series.begin(self._counters(), now)
            except Exception as error:  # noqa: BLE001  training goes on without it
                series.put_off(steps)
                if not series.failed:
                    _log.warning("%s: a report was not written, and training goes on: %s", self._name, error)
                series.failed = True
        self._series = [series for series in self._series if not series.ended]
        self._plan()

    def _plan(self) -> None:
        """Note when to look again."""
        self._due = min((series.due for series in self._series), default=inf)


class _Series:
    """The reports to one destination; one that reports once is given what can be read at any time, not all.

    The first step after it was made is in no window: it includes whatever came before training.
    """

    def __init__(self, destination: Destination, every: int, steps: int, *, once: bool = False) -> None:
        self._destination, self._every, self.once = destination, every, once
        self._first = steps + every
        self._last: tuple[Mapping[str, Any], float] | None = None
        self.due = steps + 1
        self.ended = self.failed = False

    @property
    def began(self) -> bool:
        return self._last is not None

    def begin(self, counters: Mapping[str, Any], now: float) -> None:
        self._last, self.due = (counters, now), max(self._first, counters["steps"] + 1)

    def write(self, step: int, stats: Mapping[str, Any], now: float) -> None:
        assert self._last
        before, then = self._last
        self._last, self.due, self.ended = (stats, now), stats["steps"] + self._every, self.once
        self._destination.write(step, stats, between(before, stats, now - then))

    def put_off(self, steps: int) -> None:
        """Come again later, after an error."""
        self.due = max(self.due, steps + self._every)


class _Line:
    """Writes what the first steps came to into the log."""

    def __init__(self, reports: Reports, name: str, verdict: Callable[[], str]) -> None:
        self._reports, self._name, self._verdict = reports, name, verdict

    def write(self, step: int, stats: Mapping[str, Any], window: Window) -> None:
        whole = between({}, stats, 0.0)
        if self._reports.updates:
            _log.info(
                "%s, the first %d exchanges: %.1f times fewer bytes than a float32 ring, %.3g s from one to the next",
                self._name,
                stats["steps"],
                whole.times_fewer_bytes,
                window.seconds_per_step,
            )
            return
        _log.info(
            "%s, the first %d steps: %s; %.0f %% of the exchange hidden behind the backward pass, %.3g s a step",
            self._name,
            stats["steps"],
            self._verdict(),
            100 * whole.overlap,
            window.seconds_per_step,
        )


class TensorBoard:
    """Reports to a ``SummaryWriter``, or what has its ``add_scalar``.

    Raises:
        ConfigError: it has none.
    """

    def __init__(self, writer: Any) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise ConfigError(
                f"tensorboard should be a SummaryWriter of torch.utils.tensorboard, or None, got {writer!r:.200}"
            )
        self._writer = writer

    def write(self, step: int, stats: Mapping[str, Any], window: Window) -> None:
        values = {
            "times_fewer_bytes": window.times_fewer_bytes,
            "overlap": window.overlap,
            "seconds_per_step": window.seconds_per_step,
            "residual_norm": stats["residual_norm"],
            "nonfinite": stats["nonfinite"],
        }
        steps = max(1, window.steps)
        phases = {f"seconds/{phase}": seconds / steps for phase, seconds in window.phases.items()}
        for name, value in (values | phases).items():
            self._writer.add_scalar(f"hvc/{name}", value, step)
