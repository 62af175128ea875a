"""A started compression, from its first step to its end, and what becomes of one that nobody uses or closes."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..engine.job import Gathering, Job
from ..engine.methods import Methods
from ..engine.optimizer.hooks import uncompiled
from ..engine.reducer import Reducer
from ..errors import ConfigError, ExchangeError
from .steps import Steps


class Running:
    """A compression that may exchange, unless this rank is not in it."""

    method: str
    _job: Job
    _methods: Methods
    _steps: Steps
    _reducer: Reducer | None
    _under_way: int  # gradients handed over whose results were not fetched yet
    _compared_ways: bool  # whether all ranks are known to hand over gradients alike

    def _running(self) -> Reducer:
        if self._reducer is None:
            raise ConfigError(self._not_here())
        return self._reducer

    def is_over(self) -> bool:
        """Return whether nothing will be exchanged any more: closed, failed, or of ranks that are no longer there."""
        if self._reducer is None or self._reducer.failure.closing or self._reducer.failure.failed():
            return True
        try:
            self._job.check()
        except ConfigError:
            return True
        return False

    def _not_here(self) -> str:
        """Return why there is no reducer, for people."""
        raise NotImplementedError

    def _take_order(self) -> None:
        """Take note that the parameters have other numbers now, where that matters."""

    def allgather_object(self, value: Any, name: str, *, by_name: bool = False) -> list[Any]:
        """Return every rank's value.

        Raises:
            ExchangeError: not every rank arrived in time, or this one has heard that some rank has failed.
        """
        reducer = self._running()
        limit, failed = reducer.options.longest_seconds, reducer.failure.failed
        asked = Gathering(name, limit, by_name=by_name, failed=failed)
        try:
            with reducer.context.progress.meeting():
                return self._job.gather(value, asked)
        except ExchangeError:
            reducer.wait_idle(0.0)  # raises what this rank has failed with, which says more
            raise


T = TypeVar("T")

_log = logging.getLogger("horovod_compress")


# ---- a compression that was created and then forgotten ----


def look_for_steps(parameters: Iterable[nn.Parameter], unused: Callable[[bool], str | None]) -> Callable[[], object]:
    """Warn at the first step of an optimizer that has gradients for a compression which got none of them.

    Args:
        parameters: those of the compression.
        unused: returns the warning, None once the compression is in use or gone, and after a call with True, for
            which it was given; must not keep the compression alive.

    Returns:
        Ends it.
    """
    ours, number = frozenset(map(id, parameters)), next(_numbers)

    def look(optimizer: Any) -> None:
        if unused(False) is None:
            _looks.pop(number, None)
            return
        mine = (p for group in optimizer.param_groups for p in group["params"] if id(p) in ours)
        # Horovod's broadcast of an optimizer's state makes a step with gradients of zeros.
        if any(p.grad is not None and (p.grad.is_sparse or bool(p.grad.any())) for p in mine):
            _looks.pop(number, None)
            _log.warning("%s", unused(True))

    _hook()
    _looks[number] = look
    return lambda: _looks.pop(number, None)


#: What looks at each step of an optimizer, by number. Torch goes through its hooks while threads may end these, so it
#: has one of ours that stays.
_looks: dict[int, Callable[[Any], None]] = {}
_numbers = itertools.count()


@cache
def _hook() -> object:
    def look(optimizer: Any, *given: Any) -> None:
        for each in list(_looks.values()):
            each(optimizer)

    return register_optimizer_step_pre_hook(uncompiled(look))


def weakly(call: Callable[..., T], otherwise: T) -> Callable[..., T]:
    """Return a bound method without what keeps its object alive: for threads, which would keep it for ever."""
    method = weakref.WeakMethod(call)

    def found(*given: Any) -> T:
        bound = method()
        return otherwise if bound is None else bound(*given)

    return found


class Closing:
    """What is closed with a compression: by whoever calls that, or once nobody refers to the compression any more.

    At the end of the program others see to it.
    """

    def __init__(self, compression: object, job: Job) -> None:
        self._job, self._closers = job, list[Callable[[], object]]()
        self._finalizer = weakref.finalize(compression, _dropped, job, self._closers)
        self._finalizer.atexit = False

    def add(self, close: Callable[[], object]) -> None:
        """Close this too, after all others; it must not keep the compression alive."""
        self._closers.append(close)

    def close(self) -> None:
        """Close everything; safe to call twice. In a fork it does nothing."""
        self._finalizer.detach()
        for close in () if self._job.forked() else self._closers:
            close()


def _dropped(job: Job, closers: Sequence[Callable[[], object]]) -> None:
    """Close on a thread of its own: the garbage collector comes from any thread, with whatever lock that holds."""
    if not job.forked():
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end
            _thread.start_new_thread(_start, (closers,))  # threading has locks of its own, for which this does not wait


def _start(closers: Sequence[Callable[[], object]]) -> None:
    """Close on a thread that Python knows, and forgets again."""
    threading.Thread(target=_close, args=(closers,), name="hvc-dropped", daemon=True).start()


def _close(closers: Sequence[Callable[[], object]]) -> None:
    for close in closers:
        try:
            close()
        except Exception as error:  # noqa: BLE001  the others are to be closed all the same
            _log.warning("closing a compression that was dropped failed: %s", error)
