"""The reducer: one rank's gradients in, the results of all ranks out, step after step.

All state between steps is its own. What moves is a :class:`.turn.Turn`, one bucket in one step:

    offer     the training thread hands a gradient over; a thread of its own takes it in
    exchange  the exchange thread takes turns in plan order, each as soon as its bucket is full (:mod:`.exchanging`)
    decode    a third thread decodes results as they arrive
    result    the training thread waits for them; nothing else blocks

What stays of a bucket between its turns is in :mod:`.buckets`; what all parts share is the :mod:`.context`. Beside
that way there are :mod:`.failure`, :mod:`.comparison`, :mod:`.norms` and :mod:`.kept`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..codecs.base import Codec
from ..errors import ConfigError, ExchangeError, MismatchError, some_of
from ..exchange.choose import Choose
from ..exchange.device import Device
from ..exchange.hosts import LocalHost
from ..exchange.transports.transport import Transport
from ..observe.metrics import Metrics
from ..options import Options
from ..schedule.plan import Plan
from ..schedule.trial import Watch
from . import kept
from .agreement.differences import Sparse
from .agreement.notes import CLOSED, Uneven, leave_word, why_closed
from .bucket.fits import refuse_shared
from .bucket.rounds import Next as Next  # what `buckets.choose` takes
from .buckets import Buckets, BucketState
from .comparison import Start, Verification
from .context import Context, Hooks as Hooks
from .devices import Devices
from .exchanging import Exchanging, Offered, Offering
from .failure import Failure
from .kept import Kept
from .norms import Norms
from .patience import Patience
from .turn import Turn

_LOOK_SECONDS = _CLOSE_SECONDS = 1.0

#: What belongs to reducers whose device did not come to rest: its memory may still be written.
_UNRESTED: list[object] = []


class Reducer:
    """Reduces the gradients of one plan, step after step.

    Args:
        plan: the buckets; equal on every rank.
        codecs: the methods by number; see :class:`~horovod_compress.engine.methods.Methods`.
        transport: to the other ranks; the reducer closes it.
        collective: picks how a bucket's payloads become one.
        devices: makes the device of a name; tests have devices of their own.
        host: this rank's, where ranks share hosts.

    Attributes:
        result_scale: what results are multiplied by: 1 for the mean over ranks, the number of ranks for the sum.
    """

    def __init__(
        self,
        plan: Plan,
        codecs: Sequence[Codec],
        transport: Transport,
        collective: Choose,
        options: Options,
        devices: Callable[[str], Device] | None = None,
        hooks: Hooks | None = None,
        host: LocalHost | None = None,
    ) -> None:
        self.rank, self.world, self.options = transport.rank, transport.size, options
        self._hooks, self.result_scale = (hooks := hooks or Hooks()), 1.0
        where = Devices((b.device for b in plan.buckets), devices)
        self.context = context = Context(transport, options, where, host, hooks.meetings, hooks.among)
        self.buckets = buckets = Buckets(context, plan, codecs, collective, alone=hooks.exact_alone and self.world == 1)
        self.failure = failure = Failure(context, hooks)
        self.norms = norms = Norms(context, buckets)
        self.start = Start(context, buckets, norms.settings)
        self.verification = Verification(context, buckets, hooks.ranks_in_words)
        self.sparse = Sparse(transport, options.longest_seconds)
        self._uneven = Uneven(transport, hooks.in_join)
        self.kept = Kept(context, buckets, self.wait_idle)
        self._turns: dict[int, Turn] = {}  # by bucket; the last one's results are there until the next one begins
        self._offering = Offering(context, failure, norms)
        agreed = self.start, self._uneven, self.verification
        self._exchanging = Exchanging(context, buckets, self._turns, failure, agreed, norms)
        self._exchanging.thread.start()
        if self.world > 1:
            transport.on_abort(failure.hear)
            Patience(context, failure).start()

    # ---- offer: the training thread ----

    def offer(self, index: int, grad: Tensor) -> int:
        """Hand over one gradient; never blocks. Returns the step that it belongs to, for ``result``.

        Args:
            index: of the tensor, in plan order.
            grad: of the tensor's shape and dtype; it belongs to the reducer until ``result``.

        Raises:
            ConfigError: the gradient does not fit, or was offered before in this step.
            ExchangeError: an earlier exchange failed, or an earlier gradient could not be processed.
        """
        buckets, context = self.buckets, self.context
        buckets.check_fits(index, grad)
        if grad.is_neg():  # as the imaginary part of a conjugate is: its memory holds the other sign
            grad.data = grad.resolve_neg()
        if self.sparse.names and index not in buckets.frozen:
            with self.failure.of_all("sparse gradients"):
                self.sparse.refuse_dense(self.plan.names()[index])
        state, position = buckets.where(index)
        if buckets.addresses[0] != state.finished + 1:
            buckets.addresses = state.finished + 1, {}
        taken, at = buckets.addresses[1], grad.data_ptr()
        if taken.get(at, index) != index and grad.numel():
            names = self.plan.names()
            refuse_shared(names[index], names[taken[at]], state.finished + 1, self.rank)
        turn = self._claim(state, position)
        taken[at] = index  # of what is claimed: what was refused may be freed now
        step = turn.key.step
        if context.watch:
            context.watch.offered(index)
        if index in buckets.frozen:
            with torch.no_grad():
                turn.leave_out(position, grad)
            self._offering.leave_out(turn, position)
            return step
        context.overlap.offered(step)
        self._offering.take(Offered(turn, position, grad))
        return step

    def skip(self, index: int) -> None:
        """Count a tensor in that has no dense gradient in this step, on any rank."""
        state, position = self.buckets.where(index)
        self._offering.leave_out(self._claim(state, position), position)

    def _claim(self, state: BucketState, position: int) -> Turn:
        """Announce a gradient; return the turn of its bucket, which begins with the first one."""
        number = state.bucket.index
        if self.failure.error or self.failure.closing:
            self._refuse_more()
        with self.context.changed:
            turn = self._turns.get(number)
            if turn is None or turn.over:
                self._hooks.check_usable()
                factor = self.norms.factor(number)
                turn = self._turns[number] = Turn(state, self.context, self.result_scale, factor)
            if turn.claim(position):
                return turn
        self._hooks.check_usable()
        raise ConfigError(
            f"rank {self.rank}: the gradient of {state.bucket.tensors[position].name} was offered twice in step "
            f"{state.finished + 1}; call the optimizer's step() or synchronize() after each backward pass. If two "
            "distributed optimizers share this model or compression, for example because a notebook cell ran twice, "
            "create model, compression and optimizer again"
        )

    def _refuse_more(self) -> None:
        self._hooks.check_usable()  # first: an elastic job would retry the failure of the run before without end
        self.failure.raise_if_failed()
        raise ConfigError(f"rank {self.rank}: this compression was closed {self.failure.closed}")

    # ---- result ----

    def sum_up(self, summed: bool, /) -> None:
        """Let results be sums over ranks from the next step on, or means."""
        self.kept.summed = summed
        self.result_scale = float(self.world) if summed else 1.0

    def result(self, index: int, step: int, result_scale: float | None = None) -> Tensor:
        """Wait for one result and return it: the gradient tensor that was offered, overwritten.

        Args:
            step: as ``offer`` returned it.
            result_scale: what results are multiplied by, if that is known only now; it holds for later steps too.

        Raises:
            ExchangeError: the exchange failed on this or another rank.
            NonFiniteError: a gradient was not finite, and that is to be an error.
            ConfigError: some tensor of the plan was not offered, so that nothing can come.
        """
        state, position = self.buckets.where(index)
        if state.finished < step or self.failure.error:
            with self.context.progress.fetching(), self.context.metrics.timed("wait", where=(step, state.bucket)):
                self._await(lambda: state.finished >= step, step)
        turn = self._turns[state.bucket.index]
        if turn.error:
            self.settle(step)  # so that the next step can begin
            raise turn.error
        grad = turn.take(position)
        self.buckets.addresses[1].pop(grad.data_ptr(), None)  # its memory may be another one's before the step is over
        if result_scale is not None and result_scale != turn.result_scale:
            grad.mul_(result_scale / turn.result_scale)
            self.result_scale = result_scale
        if result_scale is not None and self.world > 1:
            self.kept.summed = result_scale != 1.0
        return grad

    def settle(self, step: int) -> None:
        """Wait until a step that was offered whole is finished."""
        self._await(lambda: all(state.finished >= step for state in self.buckets), step)

    def missing(self, step: int) -> list[str]:
        """Return the tensors that were not offered in a step that is under way."""
        found: list[str] = []
        with self.context.changed:
            for state in (state for state in self.buckets if state.finished < step):
                turn = self._turns.get(state.bucket.index)
                found += turn.missing() if turn and not turn.over else [tensor.name for tensor in state.bucket.tensors]
        return found

    def _await(self, ready: Callable[[], bool], step: int) -> None:
        """Wait for something of a step, and raise what keeps it from coming."""
        changed, failure = self.context.changed, self.failure
        while True:
            with changed:
                if changed.wait_for(lambda: ready() or failure.error, _LOOK_SECONDS):
                    break
                self._check_coming(step)
                done = self.context.progress.done  # without this step, which may end at any moment
            self._uneven.waits(step)  # without the lock: it asks the other ranks
            try:
                self.start.check(done)
                self.sparse.check(step)
            except MismatchError as error:  # others wait for an answer that this rank will not give: stop them
                failure.report("waiting", error)
        if failure.error:
            failure.raise_if_failed()

    def _check_coming(self, step: int) -> None:
        """Raise what keeps a step from ever coming to an end."""
        for number, turn in self._turns.items():
            if refused := turn.refused:
                raise ExchangeError(
                    f"rank {self.rank}: the gradients of bucket {number} could not be processed: {refused}; restart "
                    "the job from a checkpoint"
                ) from refused
        if self.failure.closing:
            raise ExchangeError(
                f"rank {self.rank}: while the optimizer waited for results, this compression was closed "
                f"{self.failure.closed}"
            )
        if missing := self.missing(step):
            raise ConfigError(
                f"rank {self.rank}: no gradient was offered in step {step} for {len(missing)} parameter(s): "
                f"{some_of(missing)}; give named_parameters with exactly the parameters of this optimizer"
            )
        if not (self._exchanging.thread.is_alive() and self.failure.workers_alive()):
            raise ExchangeError(f"rank {self.rank}: a thread of the reducer ended unexpectedly; this is a bug")

    # ---- between two steps ----

    @property
    def metrics(self) -> Metrics:
        """What is counted."""
        return self.context.metrics

    @property
    def plan(self) -> Plan:
        """The buckets in use."""
        return self.buckets.plan

    @property
    def step(self) -> int:
        """The step that is exchanged, or will be next."""
        return self.context.progress.step

    def next_step(self) -> int:
        """Return the step that the next gradient will belong to."""
        return self.buckets.next_step()

    def idle(self) -> bool:
        """Return whether no step is under way."""
        with self.context.changed:
            finished = {state.finished for state in self.buckets}
            return len(finished) <= 1 and all(turn.over for turn in self._turns.values())

    def wait_idle(self, seconds: float) -> bool:
        """Wait until the exchange thread has finished what was offered; return whether it has."""
        end = time.monotonic() + seconds
        while not self.idle() and time.monotonic() < end and not self.failure.error:
            time.sleep(0.001)
        self.failure.raise_if_failed()
        return self.idle()

    def settled(self) -> bool:
        """Wait for the end of a step that was offered whole; return whether none is under way."""
        return self.idle() or self.wait_idle(self.options.longest_seconds)

    @property
    def watch(self) -> Watch | None:
        """What takes marks of time, while somebody wants to know them; chosen between two steps."""
        return self.context.watch

    @watch.setter
    def watch(self, watch: Watch | None) -> None:
        self.context.watch = watch

    def freeze(self, indices: Iterable[int]) -> None:
        """Exchange nothing for these tensors, by place in the plan, from the next step on; on every rank alike.

        Their results are 0. What is kept for them stays, and is used again when they are no longer frozen.
        """
        self.start.freeze(frozenset(indices))

    def resume(self, step: int) -> None:
        """Go on at a step, between two steps; every rank has to."""
        self.context.devices.synchronize()  # a state was loaded, on whatever stream
        with self.context.changed:
            self.context.progress.step = step
            self.kept.tables_touched = True
            self.start.again()
            self._uneven.resume()
            self.verification.resume()
            for state in self.buckets:
                state.resume(step)
            for turn in self._turns.values():
                turn.over = True  # of steps that never came about, or whose results were taken
            self._turns.clear()
            self._offering.forget()
            self.buckets.addresses = -1, {}

    def check_replan(self, plan: Plan) -> None:
        """Refuse buckets that :meth:`replan` could not go on with.

        Raises:
            ConfigError: says what they should be.
        """
        if not self.settled():
            raise ConfigError(f"rank {self.rank}: buckets can be changed between steps only, and a step is under way")
        kept.check_plan(self.context, self.buckets, plan)

    def replan(self, plan: Plan) -> None:
        """Go on with other buckets, between two steps; every rank has to.

        What is kept for a tensor goes with it, bit by bit, and what tables hold as far as the method can tell.

        Raises:
            ConfigError: see :meth:`check_replan`.
        """
        self.check_replan(plan)
        self.start.again()  # ranks compare their buckets: one of them may have no memory for these, and go back
        kept.replan(self.context, self.buckets, self.kept, plan)
        self.kept.tables_touched = True
        with self.context.changed:
            self._turns.clear()

    # ---- the end ----

    def leave_word(self, why: str) -> None:
        """Tell the other ranks why this one leaves, if it is the first, and has not failed."""
        if not self.failure.has_left_note():
            leave_word(self.context.transport, why)

    def close(self, how: str = CLOSED) -> None:
        """Stop all threads and close the transport; safe to call twice. Other ranks fail in an exchange under way.

        Args:
            how: it came to that, in words for whoever goes on.
        """
        first, transport, exchanging = self.failure.close(how), self.context.transport, self._exchanging
        self._offering.worker.leave_out()
        exchanging.join(_CLOSE_SECONDS)
        if exchanging.thread.is_alive() and exchanging.thread is not threading.current_thread():
            self.failure.tell_of_closing()  # before the connections that a note takes are closed
        elif first:
            self.leave_word(why_closed(how))
        transport.close()
        exchanging.join(_CLOSE_SECONDS)
        for worker in (self._offering.worker, exchanging.decoding):
            worker.close(_CLOSE_SECONDS)
        self.context.metrics.trace = None

        def queueing() -> bool:
            return exchanging.thread.is_alive() or exchanging.decoding.alive()

        if first and not self.context.devices.come_to_rest(_CLOSE_SECONDS, queueing):
            _UNRESTED.append((self.buckets, transport))


def time_exchange(reducer: Reducer, bucket: int) -> float:
    """Exchange whatever a bucket's payload holds, and return the seconds; for measurements, on every rank.

    Raises:
        ConfigError: a step is under way.
    """
    if not reducer.wait_idle(_CLOSE_SECONDS):
        raise ConfigError(f"rank {reducer.rank}: an exchange can be timed between steps only, and a step is under way")
    return reducer._exchanging.time(reducer.buckets[bucket])
