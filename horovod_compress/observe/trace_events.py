"""Recorded times as events in Chrome's trace format, which chrome://tracing and Perfetto open.

Rows of one compression, top down: steps with their overlap, backward, wait, the decoding thread, then one row for
each bucket. Two spans of a row are apart, or one lies within the other: what viewers ask for.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, NamedTuple

from ..schedule.plan import Bucket
from .metrics import StepOverlap

TraceEvent = dict[str, Any]

#: Horovod's own timeline has a process for each tensor, numbered from 0; ours have to differ.
_FIRST_PROCESS = 1_000_000
_STEPS, _BACKWARD, _WAIT, _DECODE, _BUCKETS = range(5)
_ROWS = {_STEPS: "steps", _BACKWARD: "backward: first to last gradient", _WAIT: "wait for results", _DECODE: "decode"}


class Span(NamedTuple):
    """One block of time, in seconds of ``time.perf_counter``.

    Attributes:
        phase: one of :data:`.metrics.PHASES`, "hop" (a moment within an exchange), "result" (from the beginning of a
            bucket's exchange to its result) or "step" (ends with the last result).
        detail: a name, or the step's :class:`StepOverlap`.
    """

    phase: str
    began: float
    ended: float
    step: int
    bucket: Bucket | None = None
    detail: Any = ""


def process_of(rank: int, number: int) -> int:
    """Return the process that stands for a compression, the ``number``-th of its rank."""
    return _FIRST_PROCESS * (number + 1) + rank


def events_of(records: Iterable[Span], process: int, name: str, epoch: float) -> list[TraceEvent]:
    """Return the events of one compression.

    Args:
        records: those of a thread in order of their ends.
        name: of the process in the viewer.
        epoch: the time since 1970 at 0 of ``time.perf_counter``, in seconds.
    """
    timeline = _Timeline(process, epoch)
    for record in records:
        timeline.add(record)
    return timeline.finish(name)


class _Timeline:
    def __init__(self, process: int, epoch: float) -> None:
        self._process, self._epoch = process, epoch
        self._events: list[TraceEvent] = []
        self._rows: dict[int, int] = {}  # by id: to hash a bucket is to hash all its tensors
        self._buckets: dict[Bucket, int] = {}  # the row of each; buckets that come back after others have the same one
        self._hops: list[Span] = []
        self._exchanged: dict[int, float] = {}  # by row, the end of the last exchange
        self._backward: dict[int, tuple[float, float]] = {}  # by step
        self._ends = {_STEPS: 0.0, _BACKWARD: 0.0}

    def add(self, record: Span) -> None:
        getattr(self, f"_{record.phase}", self._in_bucket)(record)

    def finish(self, name: str) -> list[TraceEvent]:
        """Return all events, those that name rows included."""
        for step in list(self._backward):  # those that did not come to an end
            self._take_backward(step)
        named = [self._meta("process_name", name=name), self._meta("process_sort_index", sort_index=self._process)]
        names = _ROWS | {row: _name(bucket) for bucket, row in self._buckets.items()}
        for row, text in names.items():
            named.append(self._meta("thread_name", row, name=text))
            named.append(self._meta("thread_sort_index", row, sort_index=row))
        return named + sorted(self._events, key=lambda event: (event["ts"], -event.get("dur", 0)))

    # ---- one method for each phase that is not simply a span in its bucket's row ----

    def _offer(self, record: Span) -> None:
        began, _ = self._backward.get(record.step, (record.began, 0.0))
        self._backward[record.step] = (began, record.ended)
        self._in_bucket(record)

    def _hop(self, record: Span) -> None:
        self._hops.append(record)

    def _exchange(self, record: Span) -> None:
        """Add an exchange and its hops, each of which lasts until the next one begins."""
        if record.bucket is None:  # of what is measured of all buckets
            self._hops.clear()
            self._span(_STEPS, record, record.detail)
            return
        row = self._in_bucket(record)
        self._exchanged[row] = record.ended
        hops = [hop for hop in self._hops if hop.began >= record.began]
        self._hops.clear()
        starts = [Span("hop", record.began, record.began, record.step, None, "until the first hop"), *hops]
        for hop, end in zip(starts, [*(hop.began for hop in hops), record.ended], strict=True):
            if hops:
                self._span(row, hop._replace(ended=end), hop.detail)

    def _decode(self, record: Span) -> None:
        self._span(_DECODE, record, f"bucket {_index(record)}")

    def _result(self, record: Span) -> None:
        """Add what is left of the decoding when the exchange is over; the parts before are in the row of decoding."""
        row = self._row(record)
        began = self._exchanged.pop(row, None)
        if began is not None and began >= record.began:
            self._span(row, record._replace(phase="decode", began=began), "decode")

    def _wait(self, record: Span) -> None:
        self._span(_WAIT, record, f"bucket {_index(record)}")

    def _verify(self, record: Span) -> None:
        self._span(_STEPS, record, "verify")

    def _step(self, record: Span) -> None:
        began = min(record.began, self._take_backward(record.step))
        found: StepOverlap = record.detail
        shown = {"overlap": round(found.share, 4), "busy_ms": 1e3 * found.busy, "hidden_ms": 1e3 * found.hidden}
        self._span_after(_STEPS, record._replace(began=began), f"step {record.step}", shown)
        counter = {"name": "overlap", "ph": "C", "ts": self._micros(record.ended), "pid": self._process}
        self._events.append(counter | {"args": {"share": round(found.share, 4)}})

    def _take_backward(self, step: int) -> float:
        """Add what is known of a step's backward pass, and return when it began."""
        began, ended = self._backward.pop(step, (inf, inf))
        if began < inf:
            self._span_after(_BACKWARD, Span("backward", began, ended, step), f"step {step}")
        return began

    # ---- spans ----

    def _in_bucket(self, record: Span) -> int:
        row = self._row(record)
        self._span(row, record, record.detail or record.phase)
        return row

    def _row(self, record: Span) -> int:
        bucket = record.bucket
        assert bucket is not None
        if id(bucket) not in self._rows:
            self._rows[id(bucket)] = self._buckets.setdefault(bucket, _BUCKETS + len(self._buckets))
        return self._rows[id(bucket)]

    def _span_after(self, row: int, record: Span, name: str, shown: TraceEvent | None = None) -> None:
        """Add a span that the next step's may follow but not meet: one bucket of it may begin before."""
        began = max(record.began, self._ends[row])
        self._ends[row] = max(began, record.ended)
        self._span(row, record._replace(began=began, ended=self._ends[row]), name, shown)

    def _span(self, row: int, record: Span, name: str, shown: TraceEvent | None = None) -> None:
        began = self._micros(record.began)
        event = {"name": name, "cat": record.phase, "ph": "X", "ts": began, "dur": self._micros(record.ended) - began}
        self._events.append(event | {"pid": self._process, "tid": row, "args": {"step": record.step, **(shown or {})}})

    def _micros(self, seconds: float) -> int:
        # Whole numbers: fractions of so many microseconds would be rounded, and spans that touch would overlap.
        return round((self._epoch + seconds) * 1e6)

    def _meta(self, kind: str, row: int | None = None, **arguments: Any) -> TraceEvent:
        place = {} if row is None else {"tid": row}
        return {"name": kind, "ph": "M", "pid": self._process, **place, "args": arguments}


def _index(record: Span) -> int:
    assert record.bucket is not None
    return record.bucket.index


def _name(bucket: Bucket) -> str:
    number = len(bucket.tensors)
    nbytes = bucket.count * int("".join(filter(str.isdigit, bucket.dtype))) // 8
    plain = ", uncompressed" if bucket.plain else ""
    return f"bucket {bucket.index} ({number} tensor{'s' if number > 1 else ''}, {_size(nbytes)}{plain})"


def _size(nbytes: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"
