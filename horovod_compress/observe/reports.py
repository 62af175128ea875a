"""Reports of a running compression: one line in the log, scalars for TensorBoard, a file for Prometheus.

All are made between two steps, on the training thread, from the same counters. A step without a report costs a look
at the clock and a comparison of two numbers.

Prometheus' file is for the textfile collector of its node exporter, in version 0.0.4 of the text format: for each
metric a line HELP, a line TYPE, and a line for each of its series.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from math import inf, isnan
from typing import Any, NamedTuple, Protocol

from ..errors import ConfigError
from .files import check_writable, path_of, replace_whole
from .metrics import Metrics, Window, between
from .verdict import Pace

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


def check_every(every: object) -> None:
    """Refuse what is no number of steps.

    Raises:
        ConfigError: says what it should be.
    """
    if type(every) is not int or every < 1:
        raise ConfigError(f"every should be a whole number of steps, at least 1, got {every!r}")


class Reports:
    """The reports of one compression.

    Args:
        metrics: its counters, which are looked at in every step.
        counters: returns what can be read at any time.
        stats: returns all that is counted, which may take a pass over the residuals; between two steps.
        next_step: returns the number of the next step.
        name: of the rank and the method, for the log.
        line: there is one, which this rank writes or another one.
        tells: this rank writes it.
        pace: how long steps take.
        total_steps: the length of the training, if known.
        verdict: returns, in words, what compression is worth.

    Attributes:
        updates: these are exchanges of updates, which no backward pass hides.
        told: the line was written, here or by another rank.
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
        tells: bool = True,
        pace: Pace,
        total_steps: int | None = None,
        verdict: Callable[[], str] = str,
    ) -> None:
        self._metrics, self._counters, self._stats = metrics, counters, stats
        self._next_step, self._name = next_step, name
        self.pace, self.updates, self.told = pace, False, False
        after = LINE_AFTER if total_steps is None else max(2, min(LINE_AFTER, total_steps - 1))
        self._series = [_Series(_Line(self, name, verdict, tells), after, 0, once=True)] if line else []
        self._plan()

    def add(self, destination: Destination, every: int) -> None:
        """Report there after each ``every`` steps from now on."""
        self._series.append(_Series(destination, every, self._metrics.steps))
        self._plan()

    def follow(self, before: Reports) -> None:
        """Go on from where the reports of the same compression, among other ranks, have ended: the line comes once."""
        if before.told:
            self.told = True
            self._series = [series for series in self._series if not series.once]
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
        self.told = self.told or any(series.ended for series in due)
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

    def __init__(self, reports: Reports, name: str, verdict: Callable[[], str], tells: bool) -> None:
        self._reports, self._name, self._verdict, self._tells = reports, name, verdict, tells

    def write(self, step: int, stats: Mapping[str, Any], window: Window) -> None:
        if not self._tells:
            return
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


_ENDING = ".prom"  # the collector reads no other file
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_OURS = ("rank", "method", "phase")


class Metric(NamedTuple):
    """One metric with its series.

    Attributes:
        series: values by what labels they have beside those of all metrics.
    """

    name: str
    kind: str
    help: str
    series: Mapping[tuple[tuple[str, str], ...], float]


class PrometheusFile:
    """Writes the file of one rank.

    Args:
        path: of all ranks; the number of the rank is put before its ending.
        labels: of every series, beside the rank and the method.

    Raises:
        ConfigError: the file cannot be written or would not be read, or a label is not allowed.
    """

    def __init__(
        self, path: str | os.PathLike[str], rank: int, method: str, labels: Mapping[str, str] | None = None
    ) -> None:
        self.path = path_of(path, rank, "metrics file", f"train{_ENDING}")
        if self.path.suffix != _ENDING:
            raise ConfigError(
                f"prometheus should be a path that ends in {_ENDING}, because others are ignored; got "
                f"{os.fspath(path)!r}"
            )
        self._labels = {"rank": str(rank), "method": method, **_checked({} if labels is None else labels)}
        check_writable(self.path, "metrics file")

    def write(self, step: int, stats: Mapping[str, Any], window: Window) -> None:
        """Replace the file.

        Raises:
            OSError: it could not be written.
        """
        replace_whole(self.path, text_of(metrics_of(stats, window), self._labels))


def _checked(labels: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(labels, Mapping):
        raise ConfigError(f'labels should be names with values, such as {{"job_name": "first"}}, got {labels!r:.200}')
    for name in labels:
        if not isinstance(name, str) or not _LABEL.fullmatch(name) or name in _OURS:
            raise ConfigError(
                f"a label should have a name of letters, digits and _, and not be one of {', '.join(_OURS)}; "
                f"got {name!r}"
            )
    return {name: str(value) for name, value in labels.items()}


def metrics_of(stats: Mapping[str, Any], window: Window) -> Iterator[Metric]:
    """Yield what is reported of a compression.

    Args:
        stats: its counters.
        window: the steps since the last report.
    """

    def one(name: str, kind: str, text: str, value: float) -> Metric:
        return Metric(f"hvc_{name}", kind, text, {(): value})

    busy, hidden = stats["overlap_seconds"]["busy"], stats["overlap_seconds"]["hidden"]
    yield one("steps_total", "counter", "Steps exchanged by this process.", stats["steps"])
    yield one("exact_steps_total", "counter", "Steps in which nothing went through the method.", stats["exact_steps"])
    yield one("sent_bytes_total", "counter", "Bytes sent to other ranks, headers included.", stats["bytes_sent"])
    yield one("exact_bytes_total", "counter", "Of these, gradients as numbers.", stats["bytes_exact"])
    yield one("compressed_bytes_total", "counter", "Of these, compressed gradients.", stats["bytes_compressed"])
    yield one("dense_bytes_total", "counter", "Bytes a float32 ring would have sent.", stats["bytes_dense"])
    yield one("exchange_seconds_total", "counter", "Time in which gradients were exchanged.", busy)
    yield one("hidden_seconds_total", "counter", "Part of the exchange behind the backward pass.", hidden)
    yield Metric(
        "hvc_phase_seconds_total", "counter", "Time by phase; phases overlap.",
        {(("phase", phase),): seconds for phase, seconds in stats["seconds"].items()},
    )  # fmt: skip
    yield one("nonfinite_values_total", "counter", "NaN and infinite values offered by all ranks.", stats["nonfinite"])
    yield one("verified_steps_total", "counter", "Steps compared across ranks.", stats["verified"])
    yield one("step_seconds", "gauge", "Mean duration of a step since the last report.", window.seconds_per_step)
    yield one("residual_norm", "gauge", "Euclidean norm of the unsent residual.", stats["residual_norm"])
    yield one("buckets", "gauge", "Buckets of the plan.", stats["buckets"])
    yield one("plain_buckets", "gauge", "Buckets that the schedule leaves uncompressed.", stats["plain_buckets"])


def text_of(metrics: Iterator[Metric], labels: Mapping[str, str]) -> str:
    """Return metrics in the text format, each series with these labels."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for own, value in metric.series.items():
            said = ",".join(f'{name}="{_escaped(text)}"' for name, text in {**labels, **dict(own)}.items())
            lines.append(f"{metric.name}{{{said}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if isnan(value):
        return "NaN"
    return {inf: "+Inf", -inf: "-Inf"}.get(value, repr(value))
