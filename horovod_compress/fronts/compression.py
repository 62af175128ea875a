"""What a compression is under every front: its start, and what begins a step; and what a copy of one is: none."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from ..codecs.base import Codec
from ..codecs.masked import Masked
from ..engine import names
from ..engine.agreement import leaving, way
from ..engine.job import Gathering, Job
from ..engine.methods import Methods
from ..engine.parameters import listed
from ..engine.reducer import Reducer
from ..errors import ConfigError, ExchangeError, HorovodCompressError
from ..observe import trace as recording
from ..observe.trace import Trace
from ..schedule.plan import Plan
from .reports import Counters
from .saving import Checkpoints
from .session import Closing, look_for_steps, weakly
from .startup import before_handshake, start
from .steps import Steps

Scaler = TypeVar("Scaler")

_NAMED = 5  # at most, in messages

_log = logging.getLogger("horovod_compress")


#: What other modules of this package call, and nobody else.
_OURS = {"allgather_object", "begin_updates", "check_momentum", "check_state", "check_updates", "communication_delay"}
_OURS |= {"exchange", "full_precision_every", "included", "is_over", "parameters"}


class Copied:
    """Stands for a compression, whose connections cannot be copied, wherever a framework would call it."""

    def exchange(self, *given: Any, **options: Any) -> NoReturn:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a compression cannot be copied or saved with its model or optimizer, and this is a copy: create another "
            "one, for the copied model and an optimizer of its own"
        )

    compress = decompress = attach = register = exchange


def copied(text: str) -> Copied:
    """Return what comes out of a copy.

    Args:
        text: is logged.
    """
    _log.warning("%s", text)
    return Copied()


class _Listed(type):
    """A class of which ``dir()`` shows what is public, as a prompt that completes names does."""

    def __dir__(cls) -> list[str]:
        return _public(super().__dir__())


def _public(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("_") and name not in _OURS)


class BaseCompression(Checkpoints, Counters, metaclass=_Listed):
    """A compression, without what depends on the framework."""

    _unused = False  # nothing was handed over yet, and no model or optimizer has this
    _how_to_use: str
    _what_copies_lack: str
    _told_reduced = False  # that it is in no copy

    def __init__(
        self,
        method: str | Codec | Masked | Methods = "",
        named_parameters: Any = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        job: Job | None = None,
        **others: Any,
    ) -> None:
        if job is None or others:
            raise ConfigError(
                "Compression is not called directly: write hvc.Compression.marsit(model.named_parameters()), or "
                "another method, or hvc.Compression.create(method, model.named_parameters())"
            )
        self.method = str(getattr(method, "name", method))
        self._job = job
        self._reducer, self._under_way = None, 0
        #: With two devices there are two threads of autograd, and both hand gradients over.
        self._handing_over, self._compared_ways = threading.RLock(), False
        if not job.included():
            return
        with before_handshake(job):
            named, method, options, said = names.in_arguments(listed(named_parameters), method, options)
        self._methods, self._reducer = start(method, named, options, job)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)  # else the connections and threads of the reducer would stay
            self._closing = Closing(self, job)
            self._closing.add(self._reducer.close)
            self._prepare(self._reducer)
            self._steps = Steps(self._reducer, self._methods, named, self._share)
            #: Those that were given and are not exchanged, as they were frozen.
            self._others = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
            self._take_order()
            # Not a number of this process: others may have made more compressions, or fewer.
            self._tuning_name = f"hvc.tuning.{self._reducer.plan.fingerprint()}"
            self._reducer.offering.check_usable = job.check
            self._reports = self._begin_reports(self._reducer)
            self._unused = True
            self._closing.add(look_for_steps(self._steps.parameters, weakly(self._why_unused, None)))
            _open.add(self)
            recording.follow(self._reducer, job.number, self.method)
            undo.pop_all()
        if said and job.rank == 0:
            _log.info("%s", said)

    def _prepare(self, reducer: Reducer) -> None:
        """Set what the reducer asks of the front; no gradient has been offered yet."""
        raise NotImplementedError

    def __dir__(self) -> list[str]:
        return _public(super().__dir__())

    def __reduce__(self) -> Any:
        if not self._told_reduced:  # a model is copied or saved with its hook, an optimizer with its compression
            self._told_reduced = True
            _log.warning(
                "a compression is not saved or copied with its model or optimizer: save compression.state_dict(), or "
                "compression.save(folder)"
            )
        return copied, (self._what_copies_lack,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._in_words()}>"

    # ---- a step ----

    def _way(self) -> bool:
        """Return whether this rank does without what others would have to wait for; called once, before a gradient."""
        raise NotImplementedError

    def _begin_step(self) -> None:
        """Begin a step where nothing is under way."""
        self._job.check()
        self._unused = False
        if not self._compared_ways:
            with self._handing_over:
                if not self._compared_ways:
                    self._compare_ways()
        if not self._under_way:
            self._reports.look()
            if self._steps.begin():
                self._take_order()

    def _leave_step(self) -> bool:
        """Give up a step whose results nobody fetches any more; return whether it was exchanged on all ranks."""
        if not self._under_way:
            return False
        reducer = self._running()
        try:
            self._skip_sparse(reducer, self._step_under_way)
            if missing := reducer.missing(self._step_under_way):  # it would wait for them in vain
                raise ConfigError(
                    f"rank {self._job.number}: the optimizer's load_state_dict() was called during an exchange, with "
                    f"{len(missing)} gradient(s) still missing ({', '.join(missing[:_NAMED])}); call the optimizer's "
                    "synchronize() first, on every rank"
                )
            if not reducer.wait_idle(reducer.options.longest_seconds):
                raise ExchangeError(f"rank {self._job.number}: an exchange did not end before load_state_dict()")
        except ConfigError:
            raise
        except HorovodCompressError:  # it has failed and is over
            self._under_way = 0
            return False
        self._under_way = 0
        return True

    def _compare_ways(self) -> None:
        """At the first gradient, see that all ranks hand over theirs alike, to the same optimizer."""
        reducer, attached = self._running(), self._way()
        self._steps.settle_moments()
        mine = way.Way(reducer.plan.fingerprint(), attached, self._steps.second_moment(), self._steps.options())
        way.check_all(self.allgather_object(asdict(mine), "hvc.attach", by_name=True))
        self._compared_ways = True

    def _offer(self, index: int, grad: Any) -> int:
        step = self._running().offer(index, grad)
        self._under_way += 1
        self._step_under_way = step
        return step

    def _skip_sparse(self, reducer: Reducer, step: int) -> None:
        """Count in gradients of a step that the framework reduces, where nobody has done so."""

    def _share(self, value: Any) -> list[Any]:
        reducer = self._running()
        limit, failed = reducer.options.longest_seconds, reducer.failure.failed
        try:
            with reducer.context.progress.meeting():
                return self._job.gather(value, Gathering(self._tuning_name, limit, failed=failed))
        except ExchangeError as error:
            raise (
                reducer.failure.call_off(str(error).removeprefix(f"rank {self._job.number}: ").rstrip(".")) or error
            ) from error

    def _why_unused(self, tells: bool) -> str | None:
        """Return how to use this, if training goes on without it, until somebody is told."""
        unused, self._unused = self._unused, self._unused and not tells
        if not unused or self.is_over() or self._running().rank:
            return None
        return f"{self.method} has compressed nothing: it was created, but never given to {self._how_to_use}"

    # ---- what users call ----

    def follow(self, scaler: Scaler) -> Scaler:
        """Rescale residuals whenever a gradient scaler changes its scale; return the scaler.

            scaler = compression.follow(torch.amp.GradScaler())

        Gradients arrive multiplied by the scale, so residuals contain it too. Without this, unsent residual would
        count too much or too little after a change of the scale. States of both may be loaded in any order, before or
        after this. Save the scaler by its ``state_dict()``.

        Raises:
            ConfigError: in update mode, where nothing is scaled; or this compression already follows a scaler; or this
            is none.
        """
        if self._follows_none():
            raise ConfigError(
                "follow() takes the gradient scaler of one optimizer, once; in update mode nothing is scaled, so "
                "leave it out"
            )
        if not all(callable(getattr(scaler, name, None)) for name in ("update", "get_scale")):
            raise ConfigError(f"follow() takes a gradient scaler such as torch.amp.GradScaler(), got {scaler!r:.200}")
        if self._reducer:
            self._steps.scale.follow(scaler)
        return scaler

    def _follows_none(self) -> bool:
        """Return whether there is nothing to follow, or a scaler is followed already."""
        return bool(self._reducer and self._steps.scale.scaler is not None)

    @property
    def plan(self) -> Plan:
        """The buckets in use."""
        return self._running().plan

    def close(self) -> None:
        """Stop the exchange thread and close the connections; safe to call twice. In a fork it does nothing."""
        if self._reducer:
            self._closing.close()
        self._end_reports()
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
    why = leaving.why_ended()
    for compression in list(_open):
        try:
            if not compression._job.forked():
                leaving.leave_word(compression._running().context.transport, why)
            compression.close()
        except Exception as error:  # noqa: BLE001  the others are to be closed all the same
            _log.warning("closing a compression at exit failed: %s", error)
