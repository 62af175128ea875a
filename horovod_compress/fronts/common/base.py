"""What a compression is under every front: its start, its state, its counters, and what begins a step."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from ...codecs.base import Codec
from ...engine import checkpoint
from ...engine.agreement import way
from ...engine.job import Job
from ...engine.methods import Methods
from ...engine.parameters import listed
from ...engine.reducer import Reducer
from ...errors import ConfigError, ExchangeError
from ...observe import trace as recording
from ...observe.prometheus import PrometheusFile
from ...observe.reports import Reports, TensorBoard
from ...observe.trace import Trace
from ...schedule.plan import Plan
from . import saving
from .factories import Factories
from .scale import check_scaler
from .startup import before_handshake, start
from .steps import Steps

Scaler = TypeVar("Scaler")

_log = logging.getLogger("horovod_compress")


class BaseCompression(Factories):
    """A compression, without what depends on the framework."""

    def __init__(
        self, method: str | Codec | Methods, named_parameters: Any, options: Mapping[str, Any], job: Job
    ) -> None:
        self.method = str(getattr(method, "name", method))
        self._job = job
        self._reducer: Reducer | None = None
        self._under_way = 0  # gradients handed over whose results were not fetched yet
        self._comparing = threading.Lock()
        self._compared_ways = False  # whether all ranks are known to hand over gradients alike
        if not job.included():
            return
        with before_handshake(job):
            named: Any = listed(named_parameters)
        self._methods, self._reducer = start(method, named, options, job)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)  # else the connections and threads of the reducer would stay
            self._prepare(self._reducer)
            self._steps = Steps(self._reducer, self._methods, named, self._share)
            self._take_order()
            # Not a number of this process: others may have made more compressions, or fewer.
            self._tuning_name = f"hvc.tuning.{self._reducer.plan.fingerprint()}"
            self._reducer.offering.check_usable = job.check
            self._reports = self._begin_reports(self._reducer)
            _open.add(self)
            recording.follow(self._reducer, job.number, self.method)
            undo.pop_all()

    def _prepare(self, reducer: Reducer) -> None:
        """Set what the reducer asks of the front; no gradient has been offered yet."""
        raise NotImplementedError

    def _begin_reports(self, reducer: Reducer) -> Reports:
        name = f"rank {self._job.number}: {self.method}"
        line = reducer.rank == 0 and reducer.world > 1  # with one rank there is nothing to exchange
        return Reports(reducer.metrics, self._counters, self.stats, reducer.next_step, name, line=line)

    def _running(self) -> Reducer:
        if self._reducer is None:
            raise ConfigError(self._not_here())
        return self._reducer

    def _not_here(self) -> str:
        """Return why there is no reducer, for people."""
        raise NotImplementedError

    # ---- a step ----

    def _way(self) -> bool:
        """Return whether this rank does without what others would have to wait for; called once, before a gradient."""
        raise NotImplementedError

    def _take_order(self) -> None:
        """Take note that the parameters have other numbers now, where that matters."""

    def _begin_step(self) -> None:
        """Begin a step where nothing is under way."""
        self._job.check()
        if not self._compared_ways:
            with self._comparing:  # with two devices there are two threads of autograd, and both come here
                if not self._compared_ways:
                    self._compare_ways()
        if not self._under_way:
            self._reports.look()
            if self._steps.begin():
                self._take_order()

    def _compare_ways(self) -> None:
        """At the first gradient, see that all ranks hand over theirs alike, to the same optimizer."""
        reducer, attached = self._running(), self._way()
        self._steps.settle_moments()
        mine = way.Way(reducer.plan.fingerprint(), attached, self._steps.second_moment())
        way.check_all(self.allgather_object(asdict(mine), "hvc.attach", by_name=True))
        self._compared_ways = True

    def _offer(self, index: int, grad: Any) -> int:
        step = self._running().offer(index, grad)
        self._under_way += 1
        return step

    def allgather_object(self, value: Any, name: str, *, by_name: bool = False) -> list[Any]:
        """Return every rank's value.

        Raises:
            ExchangeError: not every rank arrived in time, or this one has heard that some rank has failed.
        """
        reducer = self._running()
        failed = reducer.failure.failed
        try:
            return self._job.gather(value, name, reducer.options.timeout, by_name=by_name, failed=failed)
        except ExchangeError:
            reducer.wait_idle(0.0)  # raises what this rank has failed with, which says more
            raise

    def _share(self, value: Any) -> list[Any]:
        reducer = self._running()
        reducer.context.progress.meeting = True
        try:
            return self._job.gather(value, self._tuning_name, reducer.options.timeout, failed=reducer.failure.failed)
        except ExchangeError as error:
            raise (
                reducer.failure.call_off(str(error).removeprefix(f"rank {self._job.number}: ").rstrip(".")) or error
            ) from error
        finally:
            reducer.context.progress.meeting = False

    # ---- what users call ----

    def follow(self, scaler: Scaler) -> Scaler:
        """Rescale residuals whenever a gradient scaler changes its scale; return the scaler.

            scaler = compression.follow(torch.amp.GradScaler())

        Gradients arrive multiplied by the scale, so residuals contain it too. Without this, unsent residual would
        count too much or too little after a change of the scale. States of both may be loaded in any order, before or
        after this. Save the scaler by its ``state_dict()``.

        Raises:
            ConfigError: in update mode, where nothing is scaled; or this follows a scaler already.
        """
        if self._follows_none():
            raise ConfigError(
                "follow() takes the gradient scaler of one optimizer, once; in update mode nothing is scaled, "
                "leave it out"
            )
        check_scaler(scaler)
        if self._reducer:
            self._steps.scale.follow(scaler)
        return scaler

    def _follows_none(self) -> bool:
        """Return whether there is nothing to follow, or a scaler is followed already."""
        return bool(self._reducer and self._steps.scale.scaler is not None)

    def stats(self) -> dict[str, Any]:
        """Return this rank's counters.

        Returns:
            ``steps``, ``bytes_sent`` (bytes handed to the transport, headers included), ``bytes_dense`` (bytes that a
            float32 ring would have sent), ``seconds`` per phase, ``residual_norm``, ``nonfinite`` (NaN and infinite
            values offered by all ranks together, however they are treated), ``verified`` (steps whose results were
            compared across ranks), ``buckets``, ``plain_buckets`` (those that the schedule leaves uncompressed),
            ``collectives`` in use, ``tuned`` (no search for buckets is in progress), ``method``, ``overlap`` (the share
            of the exchange time that the backward pass hides, 0 to 1) and the ``overlap_seconds`` it is computed from:
            see :class:`horovod_compress.observe.overlap.Overlap`.
        """
        reducer = self._running()
        return self._counters() | {
            "residual_norm": reducer.kept.residual_norm(),
            "buckets": len(reducer.plan.buckets),
            "collectives": sorted({state.round(reducer.step).collective.name for state in reducer.buckets}),
            "plain_buckets": sum(bucket.plain for bucket in reducer.plan.buckets),
            "tuned": self._steps.tuner is None or self._steps.tuner.done,
            "method": self.method,
        }

    def _counters(self) -> dict[str, Any]:
        """Return what can be read at any time."""
        reducer = self._running()
        return reducer.metrics.document() | reducer.context.overlap.document()

    def publish(
        self,
        *,
        tensorboard: Any = None,
        prometheus: str | os.PathLike[str] | None = None,
        every: int = 100,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Report the counters of this rank every some steps, for TensorBoard, for Prometheus, or both.

            compression.publish(tensorboard=SummaryWriter("runs/first") if rank == 0 else None)
            compression.publish(prometheus="/var/lib/node_exporter/train.prom", labels={"job_name": "first"})

        docs/monitoring.md has the names of all values. A report that cannot be written is a warning, and training goes
        on.

        Args:
            tensorboard: a ``SummaryWriter``, or what has its ``add_scalar``; None on ranks that have none.
            prometheus: a file that ends in ``.prom``, in the folder of the node exporter's textfile collector; each
                rank writes its own, ``train.rank3.prom``.
            every: steps from one report to the next.
            labels: of every value for Prometheus, beside ``rank`` and ``method``. A host that runs several jobs or
                models needs one that tells them apart.

        Raises:
            ConfigError: one of these cannot work.
        """
        if not self._reducer:
            return
        if prometheus is not None:
            self._reports.add(PrometheusFile(prometheus, self._job.number, self.method, labels), every)
        if tensorboard is not None:
            self._reports.add(TensorBoard(tensorboard), every)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's step and residuals; every rank saves its own, between two steps."""
        reducer = self._running()
        self._check_between_steps()
        return checkpoint.save(reducer, self._methods, self._steps.state())

    def load_state_dict(self, state: Mapping[str, Any], residuals: str = "restore") -> None:
        """Restore a state, whole or not at all; every rank has to, between the same two steps.

        Args:
            residuals: "restore", or "reset" to continue with empty residuals, for example after a change of the number
                of ranks.

        Raises:
            ConfigError: a step is under way.
            StateError: the state is malformed, or not of this method, rank, number of ranks, model or plan.
            CorruptFrameError: it is not what was saved, by its checksums.
        """
        self.check_state(state, residuals)
        self._take_state(state, residuals)

    def check_state(self, state: Mapping[str, Any], residuals: str = "restore") -> None:
        """Refuse a state that could not be loaded; nothing is changed.

        Raises:
            ConfigError, CorruptFrameError: see :meth:`load_state_dict`.
        """
        self._check_between_steps()
        self._running()
        self._steps.check(state, residuals)

    def _take_state(self, state: Mapping[str, Any], residuals: str) -> None:
        self._steps.load(state, residuals, begun=self._compared_ways)
        self._take_order()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the state of all ranks in a folder that they share; every rank has to call it, between two steps.

        The folder holds one file a rank and a manifest, and changes from the checkpoint of before to the new one at
        once: a save that is cut off, or finds the disk full, leaves the one of before.

        Raises:
            ConfigError: some rank could not write its part, and says why; every rank raises it.
        """
        reducer = self._running()
        saving.save(folder, self.state_dict, reducer.rank, lambda value: self.allgather_object(value, "hvc.save"))

    def load(self, folder: str | os.PathLike[str], residuals: str = "refuse") -> None:
        """Restore what :meth:`save` left in a folder; every rank has to call it, between the same two steps.

        Either every rank restores its part, or none changes anything.

        Args:
            residuals: with another number of ranks than at the time of saving, "refuse" is an error, "redistribute"
                deals out what waits to be sent, and "reset" begins with empty residuals, also with the same number.

        Raises:
            ConfigError: a step is under way on some rank.
            StateError: the checkpoint is not of this method, model, schedule or number of ranks, or there is none.
            CorruptFrameError: a file is not, byte for byte, what was written.
        """
        reducer = self._running()
        owned = {name for codec in self._methods.codecs for variant in codec.variants() for name in variant.folded}
        state, how = saving.load(
            folder, residuals, (reducer.rank, reducer.world), owned, self.check_state,
            lambda value: self.allgather_object(value, "hvc.load"),
        )  # fmt: skip
        self._take_state(state, how)

    def _check_between_steps(self) -> None:
        if self._under_way:
            raise ConfigError(
                f"rank {self._job.number}: a step is under way; the compression state can be saved and loaded "
                f"between steps only: call the optimizer's step() or synchronize() first"
            )

    @property
    def plan(self) -> Plan:
        """The buckets in use."""
        return self._running().plan

    def close(self) -> None:
        """Stop the exchange thread and close the connections; safe to call twice. In a fork it does nothing."""
        if self._reducer and not self._job.forked():
            self._reducer.close()
        _open.discard(self)


def begin_trace(path: str | os.PathLike[str], rank: int, steps: int | range | None, events: int) -> Trace:
    """Record a timeline of all compressions of this process, also of those created later."""
    found = recording.begin(path, rank, steps, events)
    for compression in list(_open):
        found.follow(compression._running(), compression.method)
    return found


_open: weakref.WeakSet[BaseCompression] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for compression in list(_open):
        try:
            compression.close()
        except Exception as error:  # noqa: BLE001  the others are to be closed all the same
            _log.warning("closing a compression at exit failed: %s", error)
