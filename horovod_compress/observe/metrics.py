"""Counters of one reducer, the clock that fills them, how much the backward pass hides, and the last events."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

from .files import replace_whole

_log = logging.getLogger("horovod_compress")


class OverlapSeconds(TypedDict):
    """Seconds in which an exchange was under way, and those of them that the backward pass hid."""

    busy: float
    hidden: float


class CounterValues(TypedDict):
    """What :class:`Metrics` counts.

    Attributes:
        steps: finished steps.
        bytes_sent: bytes handed to the transport, headers included.
        bytes_exact, bytes_compressed: the parts of it that were gradients as numbers, of 8 bits in the first exact
            rounds and of 16 or more otherwise, and compressed ones; the rest are comparisons and meetings of hosts.
        bytes_dense: bytes that a float32 ring would have sent.
        times_fewer_bytes: the ratio of ``bytes_dense`` and ``bytes_sent``.
        exact_steps: those in which nothing went through the method.
        seconds: per phase; ``wait`` is how long the training thread waited for results, the others add up over
            buckets and overlap with the backward pass.
        nonfinite: NaN and infinite values offered by all ranks together, however they are treated.
        verified: steps whose results were compared across ranks.
    """

    steps: int
    bytes_sent: int
    bytes_exact: int
    bytes_compressed: int
    bytes_dense: int
    times_fewer_bytes: float
    exact_steps: int
    seconds: dict[str, float]
    nonfinite: int
    verified: int


class Hidden(TypedDict):
    """What :class:`Overlap` counts.

    Attributes:
        overlap: the share of the exchange time that the backward pass hides, 0 to 1.
        overlap_seconds: what it is computed from.
    """

    overlap: float
    overlap_seconds: OverlapSeconds


class AtAnyTime(CounterValues, Hidden):
    """What can be read at any time."""


class Stats(AtAnyTime):
    """What ``stats()`` returns.

    Attributes:
        residual_norm: the norm of what waits.
        buckets, plain_buckets: number of all, and of those that the schedule leaves uncompressed.
        collectives: those of the last step.
        tuned: no search for buckets is in progress.
        method: its name.
        norm_ratio: what compressed gradients are handed back times, so that they have the norm of the exact mean.
        gradient_norm: that norm, as last measured; 0 before that.
        residual_lost: the norm of what was lost with ranks of an elastic job that failed.
    """

    residual_norm: float
    buckets: int
    collectives: list[str]
    plain_buckets: int
    tuned: bool
    method: str
    norm_ratio: float
    gradient_norm: float
    residual_lost: float


class StepOverlap(NamedTuple):
    """Seconds of one step, or of several.

    Attributes:
        busy: at least one bucket was between the beginning of its exchange and its result.
        hidden: the part of these before the last gradient of their step was offered.
    """

    busy: float
    hidden: float

    @property
    def share(self) -> float:
        """The share that is hidden, from 0 to 1; 0 where nothing was exchanged."""
        return self.hidden / self.busy if self.busy else 0.0


class Overlap:
    """Measures how much of the exchanges runs while gradients still arrive.

    A bucket is *busy* from when the exchange thread begins with it, all its gradients being there, until its result
    can be fetched: preludes, encoding, exchange with the waiting for slower ranks, decoding, and the comparison of
    results where one is due. Times in which several buckets are busy count once. What lies before the last gradient
    of the step was offered is *hidden*: the training thread was still in the backward pass. So a single bucket
    hides nothing, by definition, and the first of many buckets hides most. Skipped tensors are no gradients.

    It costs a look at the clock for each gradient, and two for each bucket.
    """

    def __init__(self) -> None:
        self._busy = self._hidden = 0.0
        self._last_offer: dict[int, float] = {}  # by step: the next one may begin before the last result
        self._spans: list[tuple[float, float]] = []

    def offered(self, step: int) -> None:
        """Mark that a gradient was offered, on the thread of the backward pass."""
        self._last_offer[step] = time.perf_counter()

    def delivered(self, began: float, ended: float) -> None:
        """Mark a bucket's exchange and result, in order, on the decoding thread."""
        self._spans.append((began, ended))

    def finish(self, step: int) -> StepOverlap:
        """Count the buckets since the last call as those of a step, and return its seconds."""
        end = self._last_offer.pop(step, -inf)
        found = StepOverlap(covered(self._spans), covered(self._spans, end))
        self._spans.clear()
        self._busy += found.busy
        self._hidden += found.hidden
        return found

    @property
    def exposed(self) -> float:
        """Seconds over all finished steps that the backward pass did not hide."""
        return self._busy - self._hidden

    def document(self) -> Hidden:
        """Return the share over all finished steps, and the seconds that it is made of."""
        total = StepOverlap(self._busy, self._hidden)
        return {"overlap": total.share, "overlap_seconds": {"busy": total.busy, "hidden": total.hidden}}


def covered(spans: Iterable[tuple[float, float]], until: float = inf) -> float:
    """Return how long at least one of the spans was on, before a time; they are in order of their ends."""
    seconds, done = 0.0, -inf
    for began, ended in spans:
        stop = min(ended, until)
        seconds += max(0.0, stop - max(began, done))
        done = max(done, stop)
    return seconds


PHASES = ("offer", "encode", "exchange", "decode", "verify", "wait")


@dataclass
class Metrics:
    """What happened so far on this rank: :class:`CounterValues` as they are counted.

    Attributes:
        trace: called with (phase, began, ended, *where), while somebody records a timeline; on any thread.
    """

    steps: int = 0
    bytes_sent: int = 0
    bytes_exact: int = 0
    bytes_compressed: int = 0
    exact_steps: int = 0
    bytes_dense: float = 0.0
    nonfinite: int = 0
    verified: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    trace: Callable[..., None] | None = None
    _before: tuple[int, int] = (0, 0)  # exact and compressed bytes before the step under way

    @property
    def times_fewer_bytes(self) -> float:
        """The ratio: how many times the bytes a float32 ring would have sent; 0 where nothing was sent."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 0.0

    def sent(self, nbytes: int, *, exact: bool) -> None:
        """Count bytes of gradients."""
        self.bytes_sent += nbytes
        if exact:
            self.bytes_exact += nbytes
        else:
            self.bytes_compressed += nbytes

    def expect(self, nbytes: float) -> None:
        """Let so many bytes be what a ring in float32 would have sent, whatever was exchanged."""
        self.bytes_dense = nbytes

    def end_step(self) -> None:
        """Count a step."""
        before, self._before = self._before, (self.bytes_exact, self.bytes_compressed)
        self.exact_steps += self.bytes_exact > before[0] and self.bytes_compressed == before[1]
        self.steps += 1

    def go_on(self, before: Metrics) -> None:
        """Count on from what others have counted, before the first step."""
        for name in ("_before", *CounterValues.__annotations__.keys() - {"times_fewer_bytes", "seconds"}):
            setattr(self, name, getattr(before, name))
        self.seconds.update(before.seconds)

    def timed(self, phase: str, within: str | None = None, where: tuple[Any, ...] = ()) -> _Timed:
        """Add the time of a block to a phase, and take it from the one that it is a part of.

        Args:
            where: step, bucket and name for a timeline; without it the block is not shown.
        """
        return _Timed(self, phase, within, where)

    def document(self) -> CounterValues:
        counted = {name: getattr(self, name) for name in CounterValues.__annotations__}
        return cast(CounterValues, counted | {"bytes_dense": round(self.bytes_dense), "seconds": dict(self.seconds)})


class _Timed:
    """A block of :meth:`Metrics.timed`. Not a generator: those cost twice as much, and every gradient has some."""

    __slots__ = ("_began", "_metrics", "_phase", "_where", "_within")

    def __init__(self, metrics: Metrics, phase: str, within: str | None, where: tuple[Any, ...]) -> None:
        self._metrics, self._phase, self._within, self._where = metrics, phase, within, where

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        ended, metrics = time.perf_counter(), self._metrics
        metrics.seconds[self._phase] += ended - self._began
        if self._within:
            metrics.seconds[self._within] -= ended - self._began
        if self._where and (trace := metrics.trace):
            trace(self._phase, self._began, ended, *self._where)


@dataclass(frozen=True)
class Window:
    """Some steps of one rank.

    Attributes:
        steps: how many.
        seconds: of wall-clock time, all that happened between exchanges included.
        bytes_sent: handed to the transport.
        bytes_dense: what a ring in float32 would have sent.
        busy: seconds in which something was exchanged.
        hidden: the part of these behind the backward pass.
        phases: seconds by phase.
    """

    steps: int
    seconds: float
    bytes_sent: float
    bytes_dense: float
    busy: float
    hidden: float
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def times_fewer_bytes(self) -> float:
        """Return how many times the bytes a ring in float32 would have sent; 0 where nothing was sent."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 0.0

    @property
    def overlap(self) -> float:
        """Return the share of the exchange that is hidden, from 0 to 1; 0 where nothing was exchanged."""
        return self.hidden / self.busy if self.busy else 0.0

    @property
    def seconds_per_step(self) -> float:
        """Return the mean over these steps."""
        return self.seconds / self.steps if self.steps else 0.0


def between(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> Window:
    """Return what happened between two readings of a compression's ``stats()``."""
    names = ("steps", "bytes_sent", "bytes_dense")
    steps, sent, dense = (after[name] - before.get(name, 0) for name in names)
    overlap, earlier = after["overlap_seconds"], before.get("overlap_seconds", {})
    busy, hidden = (overlap[name] - earlier.get(name, 0.0) for name in ("busy", "hidden"))
    phases = {name: value - before.get("seconds", {}).get(name, 0.0) for name, value in after["seconds"].items()}
    return Window(steps, seconds, sent, dense, busy, hidden, phases)


# ---- the last events ----

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
            return "the start of this compression"
        _, step, bucket, event, hop = self._last
        return f"{event}{f' {hop}' if hop >= 0 else ''} of bucket {bucket}, step {step}"

    def document(self, rank: int, failure: str, **more: Any) -> dict[str, Any]:
        """Return the events as plain data, the oldest first."""
        names = ("time", "step", "bucket", "event", "hop")
        events = [dict(zip(names, event, strict=True)) for event in list(self.events)]
        return {"rank": rank, "time": time.time(), "failure": failure, "events": events, **more}

    def dump(self, rank: int, failure: str, where: str = "", **more: Any) -> None:
        """Write ``rank<N>.json`` to the folder of ``HVC_DUMP_DIR``, if that is set.

        It never raises: a full disk must not hide the failure that there is to report.

        Args:
            failure: the error's text.
            where: a folder within that one.
            more: what else is known, as plain data.
        """
        folder = os.environ.get("HVC_DUMP_DIR", "")
        if not folder:
            return
        try:
            path = Path(folder) / where / f"rank{rank}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_whole(path, json.dumps(self.document(rank, failure, **more)) + "\n")
        except OSError as error:
            _log.warning("HVC_DUMP_DIR=%s: the flight record of rank %d was not written: %s", folder, rank, error)
