"""What all parts of one reducer share: where it runs, its one lock, and what is counted."""

from __future__ import annotations

import threading
import time

from ..exchange.collective import Exchange, FramePool
from ..exchange.device import Deadline
from ..exchange.transports.transport import Transport
from ..exchange.wire import NonFiniteCount, codec_id
from ..observe.files import FlightRecorder
from ..observe.metrics import Metrics, Overlap
from ..ops.keys import Key
from ..options import Options
from ..schedule.trial import Watch
from .agreement.operands import Operands
from .devices import Devices
from .progress import Progress


class Context:
    """One rank, as its reducer's parts see it."""

    def __init__(self, transport: Transport, options: Options, devices: Devices) -> None:
        self.transport, self.options, self.devices = transport, options, devices
        self.rank, self.world = transport.rank, transport.size
        #: The lock of all counters that several threads use, notified when one of them changes.
        self.changed = threading.Condition()
        self.progress = Progress()
        #: What this rank decodes with in the step under way.
        self.operands = Operands()
        #: See :attr:`Reducer.result_scale`.
        self.result_scale: float | None = 1.0
        self.metrics, self.recorder, self.overlap = Metrics(), FlightRecorder(), Overlap()
        #: Takes marks of time, while somebody wants to know them.
        self.watch: Watch | None = None
        self.pool = FramePool()

    def key(self, step: int, bucket: int) -> Key:
        """Return what the random bits of this rank depend on."""
        return Key(self.options.seed, step, bucket, self.rank)

    def exchange(self, bucket: int, label: str, bad: NonFiniteCount, deadline: Deadline | None = None) -> Exchange:
        """Begin an exchange of the step under way.

        Args:
            label: names in frames what is exchanged.
            bad: the values of this rank that are not finite.
        """

        def note(event: str, hop: int) -> None:
            self.recorder.note(self.progress.step, bucket, event, hop)
            if trace := self.metrics.trace:
                now = time.perf_counter()
                trace("hop", now, now, self.progress.step, None, f"{event} {hop}")

        deadline = deadline or Deadline(self.options.longest_seconds)
        codec, step, digest = codec_id(label), self.progress.step, self.operands.digest
        return Exchange(self.transport, codec, step, bucket, bad, deadline, self.pool, note, digest)
