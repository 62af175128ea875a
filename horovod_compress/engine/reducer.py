"""The reducer: one rank's gradients in, the results of all ranks out, step after step.

It is the only stateful object of the package, and is made of parts. A gradient's way through them:

    offer     :mod:`.offering`     the training thread hands a gradient over; a thread of its own takes it in
    encode,   :mod:`.exchanging`   the exchange thread takes buckets in plan order, each as soon as it is full,
    exchange                       while backward still runs
    decode    :mod:`.decoding`     a third thread decodes results as they arrive
    result    :mod:`.waiting`      the training thread waits for them; nothing else blocks

What they work on are the :mod:`.buckets`, each with a state in :mod:`.bucket`; what they share is the :mod:`.context`.
Beside that way there are :mod:`.failure`, :mod:`.start`, :mod:`.verification`, :mod:`.norms`, :mod:`.kept`,
:mod:`.patience` and :mod:`.replanning`.

A gradient is held from its offer to its result and then overwritten in place: the residual rules
read it a second time at decoding, so no copy of ``gradient + residual`` is ever made, and the old
residual is still there should the bucket turn out not to be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from ..codecs.base import Codec
from ..errors import ConfigError
from ..exchange.choose import Choose
from ..exchange.device import Device
from ..exchange.transports.transport import Transport
from ..observe.metrics import Metrics
from ..options import Options
from ..schedule.plan import Plan
from . import replanning
from .agreement import leaving
from .agreement.uneven import Uneven
from .buckets import Buckets
from .context import Context
from .decoding import Decoding
from .devices import Devices
from .exchanging import Exchanging
from .failure import Failure
from .kept import Kept
from .norms import Norms
from .offering import Offering
from .patience import Patience
from .start import Start
from .verification import Verification
from .waiting import Waiting

_CLOSE_SECONDS = 1.0

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
        devices: Callable[[str], Device] | None = None,
    ) -> None:
        self.rank, self.world, self.options = transport.rank, transport.size, options
        self.context = context = Context(transport, options, Devices((b.device for b in plan.buckets), devices))
        self.buckets = buckets = Buckets(context, plan, codecs, collective)
        self.failure = failure = Failure(context)
        self.uneven, self.start = Uneven(transport), Start(context, buckets)
        self.verification = Verification(context, buckets)
        self.norms = norms = Norms(context, buckets)
        self.start.also_compares(norms.settings)
        self.offering = Offering(context, buckets, failure, norms)
        self._decoding = Decoding(context, buckets, failure, self.verification, norms)
        agreed = self.start, self.uneven
        self._exchanging = Exchanging(context, buckets, failure, (*agreed, self.verification), self._decoding, norms)
        self._waiting = Waiting(context, buckets, failure, agreed, self._exchanging)
        self.kept = Kept(context, buckets, self.wait_idle)
        self._exchanging.start()
        if self.world > 1:
            transport.on_abort(failure.hear)
            Patience(context, failure).start()

    # ---- one step ----

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
        return self.offering.offer(index, grad)

    def skip(self, index: int) -> None:
        """Count a tensor in that has no dense gradient in this step, on any rank."""
        self.offering.skip(index)

    def result(self, index: int, step: int, result_scale: float | None = None) -> Tensor:
        """Wait for one result and return it: the gradient tensor that was offered, overwritten.

        Args:
            step: as ``offer`` returned it.
            result_scale: what the result is to be multiplied by, if that was not known at the offer; it
                holds for later steps too.

        Raises:
            ExchangeError: the exchange failed on this or another rank.
            NonFiniteError: a gradient was not finite, and that is to be an error.
            ConfigError: some tensor of the plan was not offered, so that nothing can come.
        """
        return self._waiting.result(index, step, result_scale)

    def settle(self, step: int) -> None:
        """Wait until a step that was offered whole is finished."""
        self._waiting.settle(step)

    def missing(self, step: int) -> list[str]:
        """Return the tensors that were not offered in a step that is under way."""
        return self.buckets.missing(step)

    @property
    def metrics(self) -> Metrics:
        """What is counted."""
        return self.context.metrics

    # ---- between two steps ----

    @property
    def plan(self) -> Plan:
        """The buckets in use."""
        return self.buckets.plan

    @property
    def step(self) -> int:
        """The step that is exchanged, or will be next."""
        return self.context.progress.step

    def next_step(self) -> int:
        """Return the step that the next gradient will belong to, between two steps."""
        return self.buckets.next_step()

    def idle(self) -> bool:
        """Return whether no step is under way."""
        return self.buckets.idle()

    def wait_idle(self, seconds: float) -> bool:
        """Wait until the exchange thread has finished what was offered; return whether it has."""
        return self._waiting.wait_idle(seconds)

    @property
    def result_scale(self) -> float | None:
        """What results are multiplied by: 1 for the mean over ranks, the number of ranks for the sum.

        None if that is known only when the first result is asked for, and no bucket is decoded before.
        """
        return self.context.result_scale

    @result_scale.setter
    def result_scale(self, result_scale: float | None) -> None:
        self.context.result_scale = result_scale

    def freeze(self, indices: Iterable[int]) -> None:
        """Exchange nothing for these tensors from the next step on; between two steps, and on every rank alike.

        Their results are 0. What is kept for them stays as it is, and is used again when they are no longer frozen.

        Args:
            indices: in plan order; all others are not frozen.
        """
        self.start.freeze(frozenset(indices))

    def resume(self, step: int) -> None:
        """Go on at a step, between two steps; every rank has to."""
        self.context.devices.synchronize()  # a state was loaded, on whatever stream
        with self.context.changed:
            self.context.progress.step = step
            self.kept.tables_touched = True
            self.start.again()
            self.uneven.resume()
            if self.verification.weights:
                self.verification.weights.resume()
            for state in self.buckets:
                state.resume(step)

    def check_replan(self, plan: Plan) -> None:
        """Refuse buckets that :meth:`replan` could not go on with.

        Raises:
            ConfigError: says what they should be.
        """
        if not self.wait_idle(self.options.longest_seconds):
            raise ConfigError(f"rank {self.rank}: buckets can be changed between steps only, and a step is under way")
        replanning.check(self.context, self.buckets, plan)

    def replan(self, plan: Plan) -> None:
        """Go on with other buckets, between two steps; every rank has to.

        What is kept for the elements of a tensor goes with it, bit by bit, and what tables hold as far as the method
        can tell.

        Raises:
            ConfigError: a step is under way, the plan is not of the same tensors, or something is kept for
                whole buckets only.
        """
        self.check_replan(plan)
        replanning.replan(self.context, self.buckets, self.kept, plan)
        self.kept.tables_touched = True

    def time_exchange(self, bucket: int) -> float:
        """Exchange whatever a bucket's payload holds, and return the seconds; for measurements.

        Every rank has to call it, between two steps. No gradient and no residual is touched.

        Raises:
            ConfigError: a step is under way.
        """
        if not self.wait_idle(_CLOSE_SECONDS):
            raise ConfigError(f"rank {self.rank}: an exchange can be timed between steps only, and a step is under way")
        return self._exchanging.time(self.buckets[bucket])

    # ---- the end ----

    def close(self) -> None:
        """Stop the exchange thread and close the transport; safe to call twice.

        An exchange under way is called off, and fails on the other ranks.
        """
        first, transport = self.failure.close(), self.context.transport
        self.offering.worker.leave_out()
        self._exchanging.join(_CLOSE_SECONDS)
        if self._exchanging.waits():  # before the connections that a note takes are closed
            self.failure.tell_of_closing()
        elif first:
            leaving.leave_word(transport, leaving.why_closed())
        transport.close()
        self._exchanging.join(_CLOSE_SECONDS)
        workers = self.offering.worker, self._decoding.worker
        for worker in workers:
            worker.close(_CLOSE_SECONDS)

        def queueing() -> bool:
            return self._exchanging.alive() or workers[1].alive()

        if first and not self.context.devices.come_to_rest(_CLOSE_SECONDS, queueing):
            _UNRESTED.append((self.buckets, transport))
