"""What all parts of one reducer share: where it runs, its one lock, how far it is, and what is counted.

Beside the :class:`Context` these are its :class:`Progress`, the :class:`Worker` threads, the :class:`Hooks` by which it
asks the framework, and the counts of what is :class:`NonFinite`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..codecs.work import Counts
from ..exchange.collective import Exchange, FramePool
from ..exchange.device import Deadline, Device
from ..exchange.hosts import Group, LocalHost
from ..exchange.transports.transport import Transport
from ..exchange.wire import NonFiniteCount, codec_id
from ..observe.metrics import FlightRecorder, Metrics, Overlap
from ..ops.keys import Key
from ..options import Options
from ..schedule.plan import TensorSpec
from ..schedule.trial import Watch
from .agreement.differences import Operands
from .agreement.purposes import ALL, ExchangeUnderWay, Meetings, MeetingUnderWay
from .devices import Devices

#: Numbers of buckets in keys.
_BUCKETS = 1 << 16
#: How far a rank has come with a bucket: its gradients are awaited, all ranks meet first, it is being exchanged.
AWAITED, MEETING, EXCHANGED = range(3)
#: A step, a bucket, and how far the rank has come with it.
Position = tuple[int, int, int]

# ---- how far a rank has come ---------------------------------------------------------------------


class Progress:
    """How far a rank has come: for its frames, for its note if it fails, and for what the ranks compare.

    Its exchange and decoding threads write it.

    Args:
        meetings: those of this process.
        among: the ranks of this compression, see :class:`.agreement.purposes.MeetingUnderWay`.
    """

    def __init__(self, meetings: Meetings, among: int = ALL) -> None:
        #: The step of the exchange thread.
        self.step = 0
        #: Steps exchanged, whatever their numbers.
        self.done = 0
        #: The last step and bucket whose result is there.
        self.finished: tuple[int, int] | None = None
        self.meetings, self._among = meetings, among
        self._meets: dict[MeetingUnderWay, float] = {}  # what threads meet all ranks of this one for, and since when
        self._exchanges: float | None = None  # since when a bucket is exchanged
        self._delivers: float | None = None  # since when results of other ranks of this host are awaited
        self._at: Position = (0, 0, AWAITED)

    def awaits(self, bucket: int) -> None:
        """Note that the gradients of a bucket are awaited."""
        self._exchanges = None
        self._at = self.step, bucket, AWAITED
        self.ends()

    def exchanges(self) -> None:
        """Note that this bucket is being exchanged."""
        self._at = self.step, self._at[1], EXCHANGED
        self._exchanges = time.monotonic()
        self.meetings.exchanges[self] = ExchangeUnderWay(self.step)

    def ends(self) -> None:
        """Note that nothing is exchanged, now or any more."""
        self.meetings.exchanges.pop(self, None)

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Note that a thread waits for a result; if it is the main one, it offers no gradients meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.meetings.fetched = self
        try:
            yield
        finally:
            self.meetings.fetched = None

    @contextlib.contextmanager
    def meeting(self, name: str) -> Iterator[None]:
        """Note that a thread waits for all ranks to meet; if it is the one that trains, it offers no gradients then.

        Args:
            name: of what they meet for, see :mod:`.agreement.purposes`.
        """
        in_backward = torch._C._current_graph_task_id() != -1  # which has threads of its own on a GPU
        trains = threading.current_thread() is threading.main_thread() or in_backward
        begun = self.meetings.begin(name, self._among, trains)
        self._meets[begun] = time.monotonic()
        try:
            yield
        finally:
            del self._meets[begun]
            self.meetings.end(begun)

    def meets_for(self) -> str | None:
        """Return the name of what this rank meets the others of this compression for; None if it does not."""
        return next((meeting.name for meeting in [*self._meets]), None)

    @contextlib.contextmanager
    def delivering(self) -> Iterator[None]:
        """Note that the decoding thread waits for other ranks of this host."""
        self._delivers = time.monotonic()
        try:
            yield
        finally:
            self._delivers = None

    def waits_since(self) -> float | None:
        """Return since when this rank has been in what needs all ranks, on the monotonic clock; None if it is not."""
        found = [*self._meets.values(), self._exchanges, self._delivers]
        return next((since for since in found if since is not None), None)

    def place(self) -> Position:
        """Return where the rank is, to be compared with others."""
        step, bucket, come = self._at
        return step, bucket, max(come, MEETING) if self._meets else come


# ---- threads for work that others need not wait for ----------------------------------------------

Task = Callable[[], None]

_LOOK_SECONDS = 1.0


class Worker:
    """A thread that runs tasks one after the other, in the order in which they were given.

    Args:
        name: of the thread.
        failed: called on this thread with the first error of a task; later tasks are
            left out then.
        within: returns a context that all tasks run in.
    """

    def __init__(
        self,
        name: str,
        failed: Callable[[BaseException], None],
        within: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._failed, self._within = failed, within
        self._leaves_out = False
        self._tasks: queue.SimpleQueue[Task | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Task) -> None:
        """Have a task run; never blocks."""
        self._tasks.put(task)

    def drain(self) -> None:
        """Wait until all tasks given before are done or skipped, or the thread has ended."""
        done = threading.Event()
        self._tasks.put(done)
        while not done.wait(_LOOK_SECONDS) and self.alive():
            pass

    def leave_out(self) -> None:
        """Skip all tasks that have not begun: their results are no longer needed."""
        self._leaves_out = True

    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, seconds: float) -> None:
        """End the thread after the tasks given before; safe to call twice."""
        self._tasks.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        with torch.no_grad(), self._within():
            while (task := self._tasks.get()) is not None:
                if isinstance(task, threading.Event):
                    task.set()
                elif not self._leaves_out:
                    try:
                        task()
                    except BaseException as error:  # noqa: BLE001  somebody waits for what comes of it
                        self._leaves_out = True
                        with contextlib.suppress(Exception):  # this thread has to go on: others wait for it to drain
                            self._failed(error)
                del task  # it may hold the last reference to a gradient


# ---- the context ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hooks:
    """What a reducer asks of the framework that it runs in. All are quick, and keep no compression alive.

    Attributes:
        check_usable: called with the first gradient of a bucket, and where one is refused, on the training thread;
            raises where the job that the ranks connected in is another one now.
        on_unseen: called with a failure that the training thread has not come for, twice a second, on the exchange
            thread.
        in_join: returns whether this rank is in ``hvd.join()``; asked once a second where there is nothing to exchange.
        exact_alone: whether one rank alone has its gradients back as they are, with what waits: this framework leaves
            them to torch where the job has one rank from its beginning to its end.
        records: a folder for flight records within that of the job, where several ranks of it have one number.
        run: what all ranks call this run of the framework, and no other one, in flight records.
        ranks_in_words: what the numbers of ranks in an error mean, where that is not their place in the whole job.
        meetings: of this process, in all of its compressions; None for those of this one.
        among: the ranks of this one, by their numbers in the whole job, as :func:`.agreement.purposes.bits`.
    """

    check_usable: Callable[[], None] = lambda: None
    on_unseen: Callable[[str], None] = lambda text: None
    in_join: Callable[[], bool] = lambda: False
    exact_alone: bool = False
    ranks_in_words: str = ""
    records: str = ""
    run: str = ""
    meetings: Meetings | None = None
    among: int = ALL


class Context:
    """One rank, as its reducer's parts see it.

    Args:
        host: this rank's host, where the ranks of one host exchange in memory that they share.
        meetings, among: see :class:`Hooks`.

    Attributes:
        between: the ranks that methods exchange among: all of them, or those of one place on every host.
    """

    def __init__(
        self,
        transport: Transport,
        options: Options,
        devices: Devices,
        host: LocalHost | None = None,
        meetings: Meetings | None = None,
        among: int = ALL,
    ) -> None:
        self.transport, self.options, self.devices, self.host = transport, options, devices, host
        self.rank, self.world = transport.rank, transport.size
        self.between: Transport | Group = host.between if host else transport
        self._seconds = options.longest_seconds
        #: The lock of all counters that several threads use, notified when one of them changes.
        self.changed = threading.Condition()
        self.progress = Progress(meetings or Meetings(transport.rank), among)
        #: What this rank decodes with in the step under way.
        self.operands = Operands()
        self.metrics, self.recorder, self.overlap = Metrics(), FlightRecorder(), Overlap()
        #: Takes marks of time, while somebody wants to know them.
        self.watch: Watch | None = None
        self.pool = FramePool()

    @property
    def shares(self) -> int:
        """Into how many shares buckets are cut, one for each rank of this host where these share memory."""
        return self.host.within.size if self.host else 1

    def verifies(self) -> bool:
        """Return whether the results of the step under way are compared across ranks."""
        every = self.options.verify_every
        return bool(every) and self.world > 1 and (self.progress.step + 1) % every == 0

    def deadline(self) -> Deadline:
        """Return the end of a wait that begins now, for the other ranks or for a device."""
        return Deadline(self._seconds)

    def key(self, step: int, bucket: int) -> Key:
        """Return what random bits depend on that concern a bucket as a whole."""
        return Key(self.options.seed, step, bucket, self.rank)

    def coding_key(self, step: int, bucket: int) -> Key:
        """Return what the random bits of a method depend on; the shares of one bucket have bits of their own."""
        shift = self.host.within.rank * (_BUCKETS // self.shares) if self.host else 0  # see check_number()
        return Key(self.options.seed, step, (bucket + shift) % _BUCKETS, self.between.rank)

    def exchange(
        self,
        bucket: int,
        label: str,
        bad: NonFiniteCount,
        deadline: Deadline | None = None,
        among: Transport | Group | None = None,
    ) -> Exchange:
        """Begin an exchange of the step under way.

        Args:
            label: names in frames what is exchanged.
            bad: the values of this rank that are not finite.
            among: the ranks that exchange; None for all of them.
        """

        def note(event: str, hop: int) -> None:
            self.recorder.note(self.progress.step, bucket, event, hop)
            if trace := self.metrics.trace:
                now = time.perf_counter()
                trace("hop", now, now, self.progress.step, None, f"{event} {hop}")

        deadline = deadline or self.deadline()
        codec, step, digest = codec_id(label), self.progress.step, self.operands.digest
        through, ranks = among or self.transport, among.ranks if isinstance(among, Group) else ()
        return Exchange(through, codec, step, bucket, bad, deadline, self.pool, note, digest, ranks)  # type: ignore[arg-type]


# ---- values that are not finite --------------------------------------------------------------------


class NonFinite:
    """The values of one turn's gradients that are not finite: counted as they come, told to all in frame headers.

    Args:
        fetched: where counts are fetched to from the device.

    Attributes:
        bad: what the other ranks get.
        names: the tensors with such values.
    """

    def __init__(self, tensors: Sequence[TensorSpec], device: Device, fetched: Tensor, rank: int) -> None:
        self._tensors, self._device, self._fetched, self._rank = tensors, device, fetched, rank
        self.bad = NonFiniteCount()
        self.names: list[str] = []
        self._unread: list[tuple[Sequence[int], Tensor]] = []
        self._zeroed = [0] * len(tensors)  # by position, as offers may come on several threads

    def add(self, counts: dict[int, int] | None) -> None:
        """Note values that are not finite, by position."""
        for position, count in (counts or {}).items():
            self.bad = self.bad.plus(NonFiniteCount(count, self._rank + 1))
            self.names.append(self._tensors[position].name)

    def add_of(self, positions: Sequence[int], counts: Counts) -> None:
        """Note the counts of some tensors, which may be on a device whose streams need not be waited for yet."""
        if isinstance(counts, Tensor):
            self._unread.append((positions, counts))
            return
        for position, count in zip(positions, counts, strict=True):
            if isinstance(count, Tensor):
                self._unread.append(([position], count))
            elif count:
                self.add({position: count})

    def set_zero(self, position: int, grad: Tensor, where: Tensor) -> None:
        """Let some values of a gradient be 0, and count them."""
        grad.masked_fill_(where, 0.0)
        self._zeroed[position] += int(where.sum())

    def take_over(self, host: NonFiniteCount, means: NonFiniteCount) -> None:
        """Let the counts be those of this rank's host.

        Args:
            host: of the gradients of its ranks.
            means: of their means, where all gradients were finite: sums may overflow.
        """
        self.bad = host if host.count else host.plus(means)
        self.bad = self.bad.plus(NonFiniteCount(zeroed=sum(self._zeroed)))
        self._zeroed = [0] * len(self._zeroed)

    def read(self, deadline: Deadline) -> None:
        """Read all counts, as this thread's stream follows on the offers.

        Raises:
            ExchangeError: the device did not come to them before the deadline.
        """
        self.bad = self.bad.plus(NonFiniteCount(zeroed=sum(self._zeroed)))
        self._zeroed = [0] * len(self._zeroed)
        if not self._unread:
            return
        positions = [position for some, _ in self._unread for position in some]
        counts = [count.view(-1) for _, count in self._unread]
        device = self._device
        device.keep(counts)
        found = counts[0] if len(counts) == 1 else torch.cat(counts)
        if device.is_accelerator:
            row = self._fetched[: len(positions)]
            device.copy(row, found)  # one copy for all
            device.wait(device.record_event(), deadline)
            found = row
        self.add({position: number for position, number in zip(positions, found.tolist(), strict=True) if number})
