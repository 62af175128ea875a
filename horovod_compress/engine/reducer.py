"""The reducer: owns buckets, residuals, buffers, the step counter and the exchange thread.

It is the only stateful object of the package. Gradients are offered in any order, from autograd's
thread, and taken in by a thread of their own; the exchange thread takes buckets in plan order as soon
as each is full, while backward still runs; results are fetched at the end of the step. Nothing but
``result`` blocks.

A gradient is held from its offer to its result and then overwritten in place: the residual rules
read it a second time at decoding, so no copy of ``gradient + residual`` is ever made, and the old
residual is still there should the bucket turn out not to be finite.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..codecs.base import Codec, Divides, Part
from ..codecs.left_plain import LeftPlain
from ..errors import ConfigError, ExchangeError, HorovodCompressError, MismatchError, NonFiniteError, PeerError
from ..exchange import device, gather
from ..exchange.base import Exchange, FramePool
from ..exchange.choose import Choose
from ..exchange.deadline import Deadline
from ..exchange.device import Host, Mark
from ..exchange.transports.base import Transport
from ..exchange.wire import Bad, codec_id
from ..observe.metrics import Metrics
from ..observe.overlap import Overlap
from ..observe.recorder import FlightRecorder
from ..ops.keys import Key
from ..options import Options
from ..schedule.plan import Bucket, Plan, TensorSpec
from ..schedule.watch import Watch
from .agreement.common_start import CommonStart, disagreement, note_of
from .agreement.notes import AWAITED, EXCHANGED, MEETING, Place, last_finished, note, verdict
from .agreement.uneven import Uneven, refusal
from .agreement.weights import Weights
from .station import Round, Station, nothing
from .worker import Worker

_log = logging.getLogger("horovod_compress")
_NOTES_SECONDS = 1.0
_CLOSE_SECONDS = 1.0
_TELL_SECONDS = 0.5
_LOOK_SECONDS = 1.0
#: How long a rank in an exchange may take to fail by itself after another one has, before its waits are called off.
_FLOOD_SECONDS = 0.5

#: What belongs to reducers whose device did not come to rest: its memory may still be written.
_UNRESTED: list[object] = []


class Reducer:
    """Reduces the gradients of one plan, step after step.

    Args:
        plan: the buckets; equal on every rank.
        codecs: the methods by number; see :class:`~horovod_compress.engine.methods.Methods`.
        transport: to the other ranks; the reducer closes it.
        collective: picks how a bucket's payloads become one.
        options: as given to the factory.
        devices: makes the device of a name; tests have devices of their own.
    """

    def __init__(
        self,
        plan: Plan,
        codecs: Sequence[Codec],
        transport: Transport,
        collective: Choose,
        options: Options,
        devices: Callable[[str], Host] | None = None,
    ) -> None:
        self.options, self.transport = options, transport
        self._devices = {name: (devices or device.of)(name) for name in device.check(b.device for b in plan.buckets)}
        self._codecs, self._choose = codecs, collective
        self.rank, self.world = transport.rank, transport.size
        self.step = 0
        #: 1 for the mean over ranks, the number of ranks for the sum; None if that is known only
        #: when the first result is asked for, and no bucket is decoded before.
        self.gain: float | None = 1.0
        self.metrics, self.recorder, self.overlap = Metrics(), FlightRecorder(), Overlap()
        self._pool = FramePool()
        self.uneven, self._start = Uneven(transport), CommonStart(transport)
        self._frozen: frozenset[int] = frozenset()  # see :meth:`freeze`
        self._done = 0  # steps exchanged, whatever their numbers
        #: Compares weights, where somebody shows them.
        self.weights: Weights | None = None
        #: Takes marks of time, while somebody wants to know them.
        self.watch: Watch | None = None
        self._take_plan(plan)
        self._changed = threading.Condition()
        self._failure: HorovodCompressError | None = None
        self._finished: tuple[int, int] | None = None  # the last step and bucket
        self._seen = False  # whether the training thread has seen the failure
        #: Called from the exchange thread if the training thread does not come for a failure.
        self.on_unseen: Callable[[str], None] = lambda text: None
        #: Whether the training thread waits for all ranks to meet, before it offers gradients.
        self.meeting = False
        #: Called before a gradient is taken; raises where the job that the ranks connected in is another one now.
        self.check_usable: Callable[[], None] = lambda: None
        self._closing = False
        self._closed = False
        self._told_of_dropped = False
        self._compared: tuple[int, str] = (0, "")  # what else they compare then, and what it stands for
        self._taker = Worker("hvc-offer", partial(self._worker_failed, "taking in gradients"))
        self._decoder = Worker(
            "hvc-decode", partial(self._worker_failed, "decoding"), lambda: self._on_devices("decoding")
        )
        self._broken: HorovodCompressError | None = None  # what one of these failed with
        self._flooded = False  # whether another rank has stopped
        self._note: dict[str, Any] | None = None  # left for the other ranks
        self._at: Place = (0, 0, AWAITED)
        self._thread = threading.Thread(target=self._run, name="hvc-exchange", daemon=True)
        self._thread.start()
        if self.world > 1:
            transport.on_abort(self._hear)

    def _take_plan(self, plan: Plan) -> None:
        self.plan = plan
        self.stations = [self._station(bucket) for bucket in plan.buckets]
        self._rest()  # memory is zero before a thread of another stream looks at it
        self._where = [(s, p) for s in self.stations for p in range(len(s.bucket.tensors))]
        self._hashes = torch.zeros(len(self.stations), dtype=torch.int64)

    def _station(self, bucket: Bucket) -> Station:
        where, link = self._devices[bucket.device], getattr(self.transport, "link", None)
        if link and link.where is not where:
            link = None
        staged = where.apart and not link
        return Station(bucket, self._codec_of(bucket), self.rank, self.world, self._choose, where, staged, link)

    @contextlib.contextmanager
    def _on_devices(self, work: str) -> Iterator[None]:
        """Do one thread's work, "exchanging" or "decoding", on its own streams."""
        with contextlib.ExitStack() as stack:
            for where in self._devices.values():
                stack.enter_context(getattr(where, work)())
            yield

    def _rest(self) -> None:
        for where in self._devices.values():
            where.rest()

    def _codec_of(self, bucket: Bucket) -> Codec:
        codec = self._codecs[bucket.method]
        return LeftPlain(codec, bool(codec.state(bucket))) if bucket.plain else codec

    def replan(self, plan: Plan) -> None:
        """Go on with other buckets, between two steps; every rank has to.

        What is kept for the elements of a tensor goes with it, bit by bit.

        Raises:
            ConfigError: a step is under way, the plan is not of the same tensors, or something is kept for
                whole buckets.
        """
        self.check_replan(plan)
        plan = plan.placed(tensor for bucket in self.plan.buckets for tensor in bucket.tensors)
        self._rest()
        kept, step = self.states(), self.next_step()
        with self._changed:
            self._take_plan(plan)
            for kind, tensors in self.states().items():
                for name, tensor in tensors.items():
                    tensor.copy_(kept[kind][name])
            for station in self.stations:
                station.resume(step)
            self._rest()
            self._changed.notify_all()

    def check_replan(self, plan: Plan) -> None:
        """Refuse buckets that :meth:`replan` could not go on with.

        Raises:
            ConfigError: says what they should be.
        """
        if not self.wait_idle(self.options.timeout):
            raise ConfigError(f"rank {self.rank}: buckets can be changed between two steps only; one is under way")
        plan.check_covers([tensor for bucket in self.plan.buckets for tensor in bucket.tensors])
        before, after = ({t.name: b.method for b in p.buckets for t in b.tensors} for p in (self.plan, plan))
        if before != after:
            name = next(name for name in before if before[name] != after[name])
            raise ConfigError(
                f"rank {self.rank}: {name} has a different method in the new buckets; its state would be lost"
            )
        if self.tables():
            raise ConfigError(
                f"rank {self.rank}: this method keeps {', '.join(sorted(self.tables())[:3])} for whole buckets, which "
                f'cannot be changed then; choose a fixed schedule such as "size:25MB"'
            )

    def next_step(self) -> int:
        """Return the step that the next gradient will belong to, between two steps."""
        return self.stations[0].finished + 1 if self.stations else self.step

    # ---- the training thread ----

    def offer(self, index: int, grad: Tensor) -> int:
        """Hand over one gradient; never blocks.

        Args:
            index: of the tensor, in plan order.
            grad: of the tensor's shape and dtype; it belongs to the reducer until ``result``.

        Returns:
            The step that the gradient belongs to, for ``result``.

        Raises:
            ConfigError: the gradient does not fit, or was offered before in this step.
            ExchangeError: an earlier exchange failed, or an earlier gradient could not be processed.
        """
        station, position = self._where[index]
        self._check_fits(station.bucket.tensors[position], grad, station.device)
        self._claim(station, position)
        if index in self._frozen:
            return self._offer_frozen(index, grad)
        key = self._key(station)  # not of self.step: the last bucket may still be under way
        self.overlap.offered(key.step)
        if station.device.apart:  # queued on the stream that the gradient comes from
            self._take_in(index, grad, key)
        else:
            self._taker.put(partial(self._take_in_later, index, grad, key))
        return key.step

    def skip(self, index: int) -> None:
        """Count a tensor in that has no dense gradient in this step, on any rank."""
        station, position = self._where[index]
        self._claim(station, position)
        self._count_in(station, position, 0)

    def _offer_frozen(self, index: int, grad: Tensor) -> int:
        """Count a frozen tensor in: its result is 0, and what is kept for it stays as it is."""
        station, position = self._where[index]
        step = station.finished + 1
        with torch.no_grad():
            station.leave_out(position, grad)
        if watch := self.watch:
            watch.offered(index)
        self._count_in(station, position, 0)  # last: another step may begin then
        return step

    def freeze(self, indices: Iterable[int]) -> None:
        """Exchange nothing for these tensors from the next step on; between two steps, and on every rank alike.

        Their results are 0. What is kept for them stays as it is, and is used again when they are no longer frozen.

        Args:
            indices: in plan order; all others are not frozen.
        """
        frozen = frozenset(indices)
        if frozen != self._frozen:
            with self._changed:
                self._frozen, self._start.due = frozen, True

    def _check_fits(self, tensor: TensorSpec, grad: Tensor, where: Host) -> None:
        if tuple(grad.shape) != tensor.shape or str(grad.dtype) != f"torch.{tensor.dtype}":
            raise ConfigError(
                f"rank {self.rank}: the gradient of {tensor.name} should be {tensor.dtype} of shape "
                f"{tensor.shape}, got {grad.dtype} of shape {tuple(grad.shape)}"
            )
        if grad.device != where.where:
            raise ConfigError(
                f"rank {self.rank}: the gradient of {tensor.name} is on {grad.device}, its parameter was on "
                f"{where.where} when the compression was made; move the model to its device first"
            )

    def _claim(self, station: Station, position: int) -> None:
        self.check_usable()  # first: an elastic job would retry the failure of the run before without end
        self._raise_failure()
        if self._closing:
            raise ConfigError(f"rank {self.rank}: this compression was closed; create a new one")
        with self._changed:
            if not station.claim(position, self.gain):
                raise ConfigError(
                    f"rank {self.rank}: the gradient of {station.bucket.tensors[position].name} was "
                    f"offered twice in step {station.finished + 1}; call the optimizer's step() or synchronize() "
                    f"after each backward pass; or two distributed optimizers share this model or compression, "
                    f"for example by a notebook cell that ran twice: create model, compression and optimizer again"
                )

    def _count_in(self, station: Station, position: int, nonfinite: int | Tensor) -> None:
        with self._changed:
            station.count_in(position, nonfinite)
            is_last = station.waits
            if station.full:
                self._changed.notify_all()
        if is_last:
            self._offer_waiting(station)

    def _offer_waiting(self, station: Station) -> None:
        """Hand a bucket's gradients to the codec that waited for the last one; the thread that brought it does."""
        key = self._key(station)
        where = (key.step, station.bucket, "all that waited")
        with self.metrics.timed("offer", where=where), torch.no_grad(), station.device.offering():
            try:
                counts = station.offer_waiting(key)
            except BaseException as error:
                station.refused = error  # for whoever waits for the bucket all the same
                raise
        with self._changed:
            station.count_waiting(counts)
            self._changed.notify_all()

    def result(self, index: int, step: int, gain: float | None = None) -> Tensor:
        """Wait for one result and return it: the gradient tensor that was offered, overwritten.

        Args:
            step: as ``offer`` returned it.
            gain: what the result is to be multiplied by, if that was not known at the offer; it
                holds for later steps too.

        Raises:
            ExchangeError: the exchange failed on this or another rank.
            NonFiniteError: a gradient was not finite, and that is to be an error.
            ConfigError: some tensor of the plan was not offered, so that nothing can come.
        """
        station, position = self._where[index]
        where = (step, station.bucket) if station.finished < step else ()
        with self.metrics.timed("wait", where=where):
            if self.gain is None:
                with self._changed:
                    self.gain = 1.0 if gain is None else gain
                    self._changed.notify_all()
            self._await(lambda: station.finished >= step, step)
        if station.error:
            self.settle(step)  # so that the next step can begin
            raise station.error
        grad = station.take(position)
        if gain is not None and gain != station.gain:
            grad.mul_(gain / (station.gain or 1.0))
            self.gain = gain
        return grad

    def settle(self, step: int) -> None:
        """Wait until a step that was offered whole is finished."""
        self._await(lambda: all(station.finished >= step for station in self.stations), step)

    def _await(self, ready: Callable[[], bool], step: int) -> None:
        """Wait for something of a step, and raise what keeps it from coming."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: ready() or bool(self._failure), _LOOK_SECONDS):
                    break
                self._check_all_offered(step)
            self.uneven.waits(step)  # without the lock: it asks the other ranks
            self._check_start()
        self._raise_failure()

    def _check_start(self) -> None:
        """Stop all ranks if others wait for an answer that this one will not give."""
        try:
            self._start.check(self._done)
        except MismatchError as error:
            self._worker_failed("waiting", error)

    def missing(self, step: int) -> list[str]:
        """Return the tensors that were not offered in a step that is under way."""
        return [name for s in self.stations if s.finished < step and not s.full for name in s.missing()]

    def _check_all_offered(self, step: int) -> None:
        for station in self.stations:
            if station.refused:
                raise ExchangeError(
                    f"rank {self.rank}: the gradients of bucket {station.bucket.index} could not be processed: "
                    f"{station.refused}; restart the job from a checkpoint"
                ) from station.refused
        if self._closing:
            raise ExchangeError(f"rank {self.rank}: this compression was closed while the optimizer waited for results")
        if missing := self.missing(step):
            raise ConfigError(
                f"rank {self.rank}: no gradient was offered in step {step} for "
                f"{len(missing)} parameter(s): {', '.join(missing[:5])}; give named_parameters with "
                f"exactly the parameters of this optimizer"
            )
        if not (self._thread.is_alive() and self._taker.alive() and self._decoder.alive()):
            raise ExchangeError(f"rank {self.rank}: a thread of the reducer ended unexpectedly; this is a bug")

    def failed(self) -> bool:
        """Return whether this rank has failed, for whatever reason; nothing more will come of it then."""
        return self._failure is not None

    def _raise_failure(self) -> None:
        if self._failure:
            self._seen = True
            raise type(self._failure)(*self._failure.args) from self._failure

    def _key(self, station: Station) -> Key:
        return Key(self.options.seed, station.finished + 1, station.bucket.index, self.rank)

    # ---- the thread that takes in gradients; on a device, the training thread ----

    def _take_in(self, index: int, grad: Tensor, key: Key) -> None:
        station, position = self._where[index]
        self.recorder.note(key.step, key.bucket, "offer")
        where = (key.step, station.bucket, station.bucket.tensors[position].name)
        with self.metrics.timed("offer", where=where), torch.no_grad():
            count = station.offer(position, grad, key, self.options.nonfinite == "zero")
        if watch := self.watch:
            watch.offered(index)
        self._count_in(station, position, count)  # last: another step may begin then

    def _take_in_later(self, index: int, grad: Tensor, key: Key) -> None:
        """Do so on the thread for it, where an error has no traceback that leads to the gradient."""
        try:
            self._take_in(index, grad, key)
        except HorovodCompressError:
            raise
        except Exception as error:
            station, position = self._where[index]
            raise ExchangeError(
                f"rank {self.rank}: the gradient of {station.bucket.tensors[position].name}, in bucket {key.bucket} of "
                f"step {key.step}, could not be processed: {type(error).__name__}: {error}; restart the job from a "
                f"checkpoint"
            ) from error

    # ---- the exchange thread ----

    def _run(self) -> None:
        try:
            with torch.no_grad(), self._on_devices("exchanging"):
                while self._one_step():
                    pass
        except _CalledOff as error:
            self._called_off(str(error))
        except PeerError as error:
            if isinstance(self._broken, _CalledOff):
                self._called_off(str(self._broken))
            elif self._broken:
                self._stop(self._broken)
            elif self._closing:
                self._stop(self._closed_in_exchange())
            else:
                self._fail(self._explain(error))
        except HorovodCompressError as error:
            self._stop(error)
        except BaseException as error:  # noqa: BLE001  anything else would leave the training thread waiting
            text = f"rank {self.rank}: {type(error).__name__} during {self.recorder.last()}: {error}"
            self._stop(ExchangeError(text))

    def _one_step(self) -> bool:
        """Exchange every bucket once; return False when the reducer is closed."""
        for station in self.stations:
            if not self._await_full(station):
                return not self._closing  # with other buckets, if they were changed
            step = self.step
            if self._start.due:
                self._agree_on_step()
            began = time.perf_counter()
            self._exchange(station)
            if station is self.stations[-1]:
                if self._verifying():
                    self._verify()
                if self.weights and self.weights.due(step):
                    self._compare(self.weights)
                self.step += 1
                self.metrics.steps += 1
            self._decoder.put(partial(self._deliver, station, step, began))
        return bool(self.stations)

    def _await_full(self, station: Station) -> bool:
        """Wait until a bucket is full and take it; return False when the reducer is closed, or the bucket is gone."""

        def ready() -> bool:
            return station.full or self._closing or bool(self._broken or self._flooded) or station not in self.stations

        self._at = self.step, station.bucket.index, AWAITED
        while True:
            with self._changed:
                if self._changed.wait_for(ready, _LOOK_SECONDS):
                    if self._broken or self._flooded:
                        raise self._broken or _CalledOff("another rank has stopped")
                    if self._closing or station not in self.stations:
                        return False
                    station.taken, self._at = True, (*self._at[:2], EXCHANGED)
                    return True
            self.uneven.check(self.step)  # without the lock: it asks the other ranks

    def _deliver(self, station: Station, step: int, began: float) -> None:
        self._account(station, step, began, time.perf_counter())
        with self._changed:
            self._finished = (step, station.bucket.index)
            self._done += station is self.stations[-1]
            station.finish(step)
            self._changed.notify_all()

    def _account(self, station: Station, step: int, began: float, ended: float) -> None:
        """Take note of when a bucket was exchanged and decoded; before it can be offered to again."""
        trace = self.metrics.trace
        self.overlap.delivered(began, ended)
        if trace:
            trace("result", began, ended, step, station.bucket)
        if station is self.stations[-1]:
            found = self.overlap.finish(step)
            if trace:
                trace("step", began, ended, step, None, found)

    def _exchange(self, station: Station) -> None:
        """Run a bucket's exchange; its result is decoded on the decoding thread, as it arrives."""
        bucket, key = station.bucket, self._key(station)
        if all(grad is None for grad in station.grads):  # sparse gradients only, which Horovod reduces itself
            self._hashes[bucket.index] = self._hash(station)
            return
        round_, deadline = station.round(self.step), Deadline(self.options.timeout)
        station.take_over(deadline)
        began = time.perf_counter()
        bad = self._preludes(station, round_, key, deadline)
        if not bad.count:
            bad = self._payload(station, round_, key, deadline)
        if self.watch and bad.count:
            self.watch.spoil()  # the round was cut short
        elif self.watch:
            self.watch.exchanged(bucket.index, time.perf_counter() - began)
        self.metrics.bytes_dense += 8 * bucket.count * (self.world - 1) / self.world
        self._decode_later(station, partial(self._complete, station, round_, key, bad, self._verifying()))

    def _preludes(self, station: Station, round_: Round, key: Key, deadline: Deadline) -> Bad:
        """Run the exchanges before the payload's; return the non-finite count over all ranks.

        Every rank has the same count after a prelude, so all leave out what follows, or none.
        """
        bad, bucket = Bad(), station.bucket.index
        for number, prelude in enumerate(round_.preludes):
            self.recorder.note(self.step, bucket, "prelude", number)
            with self.metrics.timed("encode", where=(key.step, station.bucket, f"encode for prelude {number}")):
                station.add_bad(round_.codec.begin(number, round_.work, key))
            exchange = self._new_exchange(bucket, codec_id(f"prelude {number}"), station.bad, deadline)
            with self.metrics.timed("exchange", where=(key.step, station.bucket, f"prelude {number}")):
                bad = prelude.run(exchange, round_.before(key))
            self.metrics.bytes_sent += exchange.bytes_sent
            if bad.count:
                break
        return bad

    def _payload(self, station: Station, round_: Round, key: Key, deadline: Deadline) -> Bad:
        """Encode and exchange the payload; return the non-finite count over all ranks."""
        bucket, where = station.bucket.index, (key.step, station.bucket)
        self.recorder.note(self.step, bucket, "encode")
        with self.metrics.timed("encode", where=where):
            station.add_bad(round_.encode(key))
        exchange = self._new_exchange(bucket, codec_id(round_.label), station.bad, deadline)

        def due(parts: list[Part]) -> None:
            with self.metrics.timed("encode", "exchange", where):
                round_.encode_parts(parts, key)

        def ready(parts: list[Part]) -> None:
            self._decode_later(station, partial(self._decode, station, round_, key, parts))

        with self.metrics.timed("exchange", where=where):
            bad = round_.exchange(exchange, key, due, ready)
        self.metrics.bytes_sent += exchange.bytes_sent
        return bad

    def _decode_later(self, station: Station, task: Callable[[], None]) -> None:
        """Give the decoding thread a task that follows on what this thread has queued."""
        mark = station.device.mark()
        self._decoder.put(task if mark is None else partial(_after, station.device, mark, task))

    # ---- the decoding thread ----

    def _decode(self, station: Station, round_: Round, key: Key, parts: list[Part]) -> None:
        gain = self._gain_of(station)
        self.recorder.note(key.step, key.bucket, "decode")
        began = time.perf_counter()
        with self.metrics.timed("decode", where=(key.step, station.bucket)):
            round_.decode(parts, key, gain)
        station.decoding += time.perf_counter() - began

    def _complete(self, station: Station, round_: Round, key: Key, bad: Bad, verifying: bool) -> None:
        """Decode what was not decoded part by part, and finish the result."""
        began = time.perf_counter()
        self.metrics.nonfinite += bad.count + bad.zeroed
        if bad.count:
            self._not_finite(station, bad, key.step)
        elif not round_.parts:
            gain = self._gain_of(station)
            self.recorder.note(key.step, key.bucket, "decode")
            with self.metrics.timed("decode", where=(key.step, station.bucket)):
                round_.decode_all(key, gain)
        if not bad.count:
            round_.keep()
            station.note_emptied()
        with self.metrics.timed("decode"):
            station.write_back()
        if (watch := self.watch) and not bad.count:
            station.device.wait(station.device.mark(), Deadline(self.options.timeout))  # until then it is only queued
            watch.decoded(key.bucket, station.decoding + time.perf_counter() - began)
        if verifying:
            self._hashes[key.bucket] = self._hash(station)
        if station.dropped and not self._told_of_dropped:
            self._tell_of_dropped(station)

    def _tell_of_dropped(self, station: Station) -> None:
        self._told_of_dropped = True
        name, number = next(iter(station.dropped.items()))
        _log.warning(
            "rank %d: %d value(s) kept for %s were not finite and have been dropped; no step of this method produces "
            "them: check what else writes to the compression's state, or this host's memory",
            *(self.rank, number, name),
        )

    def _worker_failed(self, work: str, error: BaseException) -> None:
        """Let the exchange thread fail, and with it this rank and the others."""
        text = f"rank {self.rank}: {type(error).__name__} in {work}: {error}"
        failure = error if isinstance(error, HorovodCompressError) else ExchangeError(text)
        with self._changed:
            self._broken = failure
            self._changed.notify_all()
        self._tell(**note_of(failure))

    def _gain_of(self, station: Station) -> float:
        """Return a bucket's gain. A mean multiplied afterwards would be rounded once more."""
        with self._changed:
            while station.gain is None:
                station.gain = 1.0 if self._closing or self._broken else self.gain
                if station.gain is None:
                    self._changed.wait()
            return station.gain

    def _new_exchange(self, bucket: int, codec: int, bad: Bad, deadline: Deadline | None = None) -> Exchange:
        def note(event: str, hop: int) -> None:
            self.recorder.note(self.step, bucket, event, hop)
            if trace := self.metrics.trace:
                now = time.perf_counter()
                trace("hop", now, now, self.step, None, f"{event} {hop}")

        deadline = deadline or Deadline(self.options.timeout)
        return Exchange(self.transport, codec, self.step, bucket, bad, deadline, self._pool, note)

    def _not_finite(self, station: Station, bad: Bad, step: int) -> None:
        """Give every rank NaN and keep the residual, so that a skipped step leaves no trace."""
        if self.options.nonfinite == "raise":
            where = f"; on this rank in {', '.join(station.bad_names)}" if station.bad_names else ""
            station.error = NonFiniteError(
                f"rank {self.rank}: {bad.count} gradient values of bucket {station.bucket.index} are "
                f"not finite in step {step}, the first on rank {bad.origin - 1}{where}; lower the "
                f'learning rate, clip, or choose nonfinite="propagate" with a gradient scaler'
            )
        for position, grad in enumerate(station.grads):
            if grad is not None:
                grad.fill_(float("nan"))
                station.drop_spoilt(position)  # where an offer did not tell whose value it was

    def time_exchange(self, bucket: int) -> float:
        """Exchange whatever a bucket's payload holds, and return the seconds; for measurements.

        Every rank has to call it, between two steps. No gradient and no residual is touched.

        Raises:
            ConfigError: a step is under way.
        """
        if not self.wait_idle(_CLOSE_SECONDS):
            raise ConfigError(f"rank {self.rank}: an exchange is timed between two steps only; one is under way")
        station = self.stations[bucket]
        key = self._key(station)
        round_ = station.round(key.step)
        exchange = self._new_exchange(bucket, codec_id(round_.label), Bad())
        began = time.perf_counter()
        with torch.no_grad(), station.device.exchanging():
            station.device.after(station.decoded)
            round_.exchange(exchange, key, nothing, nothing)
            mark = station.device.mark()  # payloads are still copied back, where the next step encodes its own
            station.device.wait(mark, exchange.deadline)
            station.decoded = mark
        seconds = time.perf_counter() - began
        self.metrics.bytes_sent += exchange.bytes_sent
        return seconds

    # ---- verification ----

    def _agree_on_step(self) -> None:
        """Compare step and plan at the start: ranks that resumed differently would misread each other.

        Raises:
            MismatchError: names each rank's step, or the ranks that are in the minority.
        """
        self._start.begin(self._done)
        plan = _signed(int(self.plan.fingerprint(), 16))
        mine = torch.tensor([self.step, plan, self._compared[0], self._hash_of_frozen()], dtype=torch.int64)
        exchange = self._new_exchange(0, codec_id("agree"), Bad())  # nothing here may depend on the plan
        exchange.step, exchange.transport = 0, self.transport.aside  # type: ignore[assignment]
        found, _ = gather.run(exchange, mine.view(torch.uint8))
        self.metrics.bytes_sent += exchange.bytes_sent
        steps, plans, values, frozen = zip(*(data.view(torch.int64).tolist() for data in found), strict=True)
        if len(set(steps)) > 1:
            told = ", ".join(f"rank {rank} at step {step}" for rank, step in enumerate(steps))
            raise MismatchError(
                f"rank {self.rank}: the ranks do not start at the same step: {told}; call "
                f"load_state_dict() on every rank, with the state that this rank saved at the same step"
            )
        if odd := _minority(plans):
            raise MismatchError(
                f"rank {self.rank}: the buckets differ between ranks, on rank(s) {odd} from the others; give every "
                f"rank the same schedule=, and call load_state_dict() on every rank or on none, with states of the "
                f"same step"
            )
        if odd := _minority(values):
            raise MismatchError(
                f"rank {self.rank}: the {self._compared[1]} differ between ranks, on rank(s) {odd} from the others; "
                f"broadcast the parameters before the first step, and resume every rank from the same step"
            )
        if odd := _minority(frozen):
            raise MismatchError(
                f"rank {self.rank}: the frozen parameters differ between ranks, on rank(s) {odd} from the others; call "
                f"requires_grad_() on every rank alike, between the same two steps"
            )
        self._start.held()

    def _hash_of_frozen(self) -> int:
        names = self.plan.names()
        text = "\n".join(sorted(names[index] for index in self._frozen)).encode()
        return _signed(ops.hash64(torch.frombuffer(bytearray(text), dtype=torch.uint8), 1)) if text else 0

    def _verifying(self) -> bool:
        every = self.options.verify_every
        return bool(every) and self.world > 1 and (self.step + 1) % every == 0

    def _hash(self, station: Station) -> int:
        value = station.bucket.index + 1
        for grad in station.grads:
            if grad is None:
                continue  # a sparse gradient, which Horovod reduces itself
            value = ops.hash64(grad.view(torch.uint8), value)
        return _signed(value)

    def _verify(self) -> None:
        """Compare the hash of every bucket's result across ranks.

        Raises:
            MismatchError: names the bucket and the ranks whose result is in the minority.
        """
        self._decoder.drain()
        if self._broken:
            raise self._broken
        exchange = self._new_exchange(len(self.stations), codec_id("verify"), Bad())
        with self.metrics.timed("verify", where=(self.step,)):
            found, _ = gather.run(exchange, self._hashes.view(torch.uint8))
        self.metrics.bytes_sent += exchange.bytes_sent
        self.metrics.verified += 1
        table = torch.stack([data.view(torch.int64) for data in found])
        for bucket in range(len(self.stations)):
            values = table[:, bucket].tolist()
            if odd := _minority(values):
                raise MismatchError(
                    f"rank {self.rank}: after step {self.step} the result of bucket {bucket} on "
                    f"rank(s) {odd} differs from that of the others; the model "
                    f"would diverge. Suspect memory or hardware there, and resume from a checkpoint"
                )

    def _compare(self, weights: Weights) -> None:
        """Show the other ranks the hashes of this one's weights."""
        names = self.plan.names()
        exchange = self._new_exchange(len(self.stations), codec_id("weights"), Bad())
        with self.metrics.timed("verify", where=(self.step,)):
            found, _ = gather.run(exchange, weights.hashes(self.step, len(names)).view(torch.uint8))
        self.metrics.bytes_sent += exchange.bytes_sent
        weights.compare(self.step, [data.view(torch.int64) for data in found], names)

    # ---- failure and end ----

    def _explain(self, error: PeerError) -> HorovodCompressError:
        """Abort, so that the other ranks fail too, and say which rank is to blame."""
        verb = f"did not answer within {self.options.timeout:g} s" if error.late else "is gone"
        where = self.recorder.last()
        what = f"rank {error.peer} {verb} during {where} ({error.detail})"
        return self._abort(what, peer=error.peer, late=error.late)

    def _abort(self, what: str, **reason: Any) -> HorovodCompressError:
        """Leave a note and break all connections; return the error, with what the other ranks' notes say."""
        mine = self._tell(**reason)
        notes = {**self.transport.notes(_NOTES_SECONDS), self.rank: mine}
        return (
            refusal(notes)
            or disagreement(notes)
            or ExchangeError(
                f"rank {self.rank}: {what}. {verdict(notes, self.world)} {last_finished(notes, self.world)} "
                f"Restart the job from a checkpoint; if a rank is only slow, raise timeout="
            )
        )

    def _place(self) -> Place:
        step, bucket, come = self._at
        return step, bucket, max(come, MEETING) if self.meeting else come

    def _tell(self, **reason: Any) -> dict[str, Any]:
        """Leave a note, if there is none yet, and break all connections; return the note."""
        with self._changed:
            first = self._note is None
            self._note = self._note or note(self.recorder.last(), self._place(), self._finished, **reason)
        if first:
            self.transport.abort(self._note)
        return self._note

    def _hear(self) -> None:
        """Fail with another rank, even where this one has nothing to exchange; and pass it on."""
        with self._changed:
            self._flooded = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._failure), _FLOOD_SECONDS)
        self._break_off("another rank has stopped", stuck=True)

    def call_off(self, why: str) -> HorovodCompressError | None:
        """Fail, as nothing more will come of this job, and return the error that says which ranks gave no sign of life.

        All ranks that are alive should come here, or fail by themselves, in about the same second.

        Args:
            why: what this rank has seen, for people.

        Returns:
            None if that could not be found out in time, or this reducer is being closed.
        """
        self._break_off(why)
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, _NOTES_SECONDS + _CLOSE_SECONDS)
            self._seen = self._failure is not None
            return self._failure and type(self._failure)(*self._failure.args)

    def _break_off(self, why: str, **more: Any) -> None:
        """Let the exchange thread fail, whatever it waits for, unless it does already."""
        with self._changed:
            if self._closing or self._failure or self._broken or self._note:
                return
            self._broken = _CalledOff(why)
            self._changed.notify_all()
        self._tell(ended=why, **more)

    def _called_off(self, why: str) -> None:
        self._fail(self._abort(f"{why}, after {self.recorder.last()}", ended=why))

    def _stop(self, failure: HorovodCompressError) -> None:
        """Fail for a reason of this rank's own, and let the other ranks know it."""
        self._tell(**note_of(failure))
        self._fail(failure)

    def _fail(self, failure: HorovodCompressError) -> None:
        self._taker.leave_out()
        self._decoder.leave_out()
        self.recorder.dump(self.rank, str(failure), world=self.world, host=socket.gethostname(), note=self._note)
        failure.__cause__ = None
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
        # The training thread may come to wait in Horovod only later: look again and again.
        look = time.monotonic() + _TELL_SECONDS
        while not (self._seen or self._closing):
            time.sleep(_TELL_SECONDS / 50)
            if time.monotonic() > look and not (self._seen or self._closing):
                self.on_unseen(str(failure))
                look = time.monotonic() + _TELL_SECONDS

    def close(self) -> None:
        """Stop the exchange thread and close the transport; safe to call twice.

        An exchange under way is called off, and fails on the other ranks.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._taker.leave_out()
        self._join()
        if self._exchanging():  # before the connections that a note takes are closed
            self._tell(**note_of(self._closed_in_exchange()))
        self.transport.close()
        self._join()
        for worker in (self._taker, self._decoder):
            worker.close(_CLOSE_SECONDS)
        if not (self._closed or self._comes_to_rest()):
            _UNRESTED.append((self.stations, self.transport))
        self._closed = True

    def _comes_to_rest(self) -> bool:
        """Wait until nothing is queued on our streams: the allocator knows only of the one that asked for memory."""
        deadline = Deadline(_CLOSE_SECONDS)
        try:
            for where in self._devices.values():
                for own in (where.exchanging, where.decoding, where.moving):
                    with own():
                        where.wait(where.mark(), deadline)
        except (ExchangeError, RuntimeError):  # CUDA's errors are the latter
            return False
        queueing = self._thread.is_alive() or self._decoder.alive()
        return not (queueing and any(where.apart for where in self._devices.values()))

    def _exchanging(self) -> bool:
        """Return whether the exchange thread still waits for others, a while after this reducer began to close."""
        return self._thread.is_alive() and self._thread is not threading.current_thread() and self._failure is None

    def _closed_in_exchange(self) -> ExchangeError:
        return ExchangeError(f"rank {self.rank} closed its compression during {self.recorder.last()}")

    def _join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    # ---- state ----

    def resume(self, step: int) -> None:
        """Go on at a step, between two steps; every rank has to."""
        self._rest()  # a state was loaded, on whatever stream
        with self._changed:
            self.step, self._start.due = step, True
            self.uneven.resume()
            if self.weights:
                self.weights.resume()
            for station in self.stations:
                station.resume(step)

    def next_steps(self, turn: int | None = None, *, plain: bool = False) -> None:
        """Choose what the coming steps exchange; every rank has to, between two steps.

        Args:
            turn: stands for the step where a method's rounds differ by it; None for the step.
            plain: exchange what is offered as it is, without the method and its state.
        """
        with self._changed:
            for station in self.stations:
                station.set_turn(turn, plain)

    def hold(self, step: int, exact: bool) -> None:
        """Choose what the coming step exchanges where a second moment is held; every rank has to, between two steps.

        Args:
            exact: it sends gradients without the method and its state there.
        """
        with self._changed:
            for station in self.stations:
                station.hold(step, exact)

    def exact_until(self) -> int:
        """Return the step at which the last method begins to compress."""
        return max((codec.exact_until() for codec in self._codecs), default=0)

    def divides(self) -> dict[str, Divides]:
        """Return, by tensor, where a second moment that is held divides."""
        return {tensor.name: station.divides() for station in self.stations for tensor in station.bucket.tensors}

    def divide_by(self, divisors: Mapping[str, Tensor]) -> None:
        """Let these divide the gradients of some tensors before they are encoded; between two steps.

        Args:
            divisors: flat, by name; equal on every rank.
        """
        for station in self.stations:
            named = enumerate(tensor.name for tensor in station.bucket.tensors)
            station.divisors.clear()
            station.divisors.update({position: divisors[name] for position, name in named if name in divisors})

    def convert_kept(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply what is kept for elements, flat and by tensor, between two steps: it has other units from now on."""
        if not factors:
            return
        for kept in self.states().values():
            for name in kept.keys() & factors.keys():
                kept[name].mul_(factors[name].to(kept[name].device))
        self._rest()

    def scale_errors(self, factors: Mapping[str, float]) -> None:
        """Multiply what waits to be sent, by tensor, between two steps; momentum stays as it is."""
        if not factors:
            return
        for kind, kept in self.states().items():
            for name in kept.keys() & factors.keys() if kind != "momentum" else ():
                kept[name].mul_(factors[name])
        self._rest()

    def compare_first(self, value: int, what: str) -> None:
        """Let the next exchange begin with a comparison across ranks; between two steps.

        Args:
            value: 64 bits that have to be equal on every rank.
            what: it stands for, in the plural.
        """
        with self._changed:
            self._compared = (_signed(value), what)
            self._start.due = True

    def scale_kept(self, factor: float) -> None:
        """Multiply all that is kept, between two steps: gradients are so much larger from now on.

        Raises:
            ConfigError: a step is under way.
        """
        if not self.wait_idle(self.options.timeout):
            raise ConfigError(
                f"rank {self.rank}: a gradient scaler is updated between two steps only; one is under way"
            )
        with torch.no_grad():
            for kept in (*self.states().values(), self.tables()):
                for tensor in kept.values():
                    tensor.mul_(factor)
        self._rest()

    def clear_where_sent(self, index: int, momenta: Sequence[Tensor]) -> None:
        """Let a method empty these where this rank's payload carried a value: momentum masking.

        Args:
            momenta: of the shape of the tensor at ``index`` and contiguous.
        """
        station, position = self._where[index]
        station.set_momenta(position, [momentum.view(-1) for momentum in momenta])

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Return what is kept for every element: by what it is, then by tensor; these are views."""
        found: dict[str, dict[str, Tensor]] = {}
        for station in self.stations:
            station.device.after(station.decoded)
            for kind, kept in station.state.items():
                for position, tensor in enumerate(station.bucket.tensors):
                    found.setdefault(kind, {})[tensor.name] = kept[station.span(position)]
        return found

    def tables(self) -> dict[str, Tensor]:
        """Return what is kept for whole buckets, by bucket and name."""
        for station in self.stations:
            station.device.after(station.decoded)
        return {f"{s.bucket.index} {name}": table for s in self.stations for name, table in s.tables.items()}

    def carries(self) -> dict[str, Tensor]:
        """Return what merging keeps on this rank, by bucket and what it belongs to."""
        for station in self.stations:
            station.device.after(station.decoded)
        return {f"{s.bucket.index} {name}": kept for s in self.stations for name, kept in s.carry().items()}

    def residuals(self) -> dict[str, Tensor]:
        """Return the residual of every tensor that has one, by name; these are views."""
        return self.states().get("residual", {})

    def residual_norm(self) -> float:
        """Return the Euclidean norm of all residuals of this rank."""
        squares = [float(torch.linalg.vector_norm(r)) ** 2 for r in self.residuals().values() if r.numel()]
        return sum(squares) ** 0.5

    def idle(self) -> bool:
        """Return whether no step is under way."""
        with self._changed:
            finished = {station.finished for station in self.stations}
            return len(finished) <= 1 and not any(station.busy for station in self.stations)

    def wait_idle(self, seconds: float) -> bool:
        """Wait until the exchange thread has finished what was offered; return whether it has."""
        end = time.monotonic() + seconds
        while not self.idle() and time.monotonic() < end and not self._failure:
            time.sleep(0.001)
        self._raise_failure()
        return self.idle()


class _CalledOff(HorovodCompressError):
    """The exchanges of this rank were called off from outside."""


def _after(where: Host, mark: Mark, task: Callable[[], None]) -> None:
    """Do a task whose work on a device follows on a mark."""
    where.after(mark)
    task()


def _signed(bits: int) -> int:
    """Return 64 bits as the int64 that they are."""
    return bits - (1 << 64) if bits >> 63 else bits


def _minority(values: Sequence[int]) -> str:
    """Return the ranks whose value is not that of most, in words; among as many, the lowest rank's counts."""
    usual = max(set(values), key=lambda value: (values.count(value), -values.index(value)))
    return ", ".join(str(rank) for rank, value in enumerate(values) if value != usual)
