"""One backward pass: the buckets that DistributedDataParallel waits for, and who completes them.

A communication hook must not wait: where the hooks of ranks fire in different orders, each would wait for the others.
So it returns a future. A thread fetches the results when the last bucket was handed over, and completes the futures:
DistributedDataParallel may wait for them inside a lock, as it does in the first step of a static graph.

An error set on such a future would reach the training thread as a RuntimeError about types. So futures are completed
whatever happened, with an error only where nothing else is left, and the error is raised by a callback at the end of
the backward pass, before DistributedDataParallel looks at what came. Where training may go on, it is raised by another
one after that, when all is as after any step.

With ``find_unused_parameters=True``, a hook gets zeros for a parameter that this rank has not used, and whether some
other rank has used it is known at the end of the backward pass only, from an all-reduce of DistributedDataParallel's.
If none has, it drops the result. So what is kept for the parameters that this rank has not used is set aside before
their zeros are offered, and put back if the result was dropped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...engine.context import Worker
from ...engine.kept import Kept
from ...engine.optimizer.step_hooks import uncompiled
from ...errors import ExchangeError, HorovodCompressError, NonFiniteError
from ..session import weakly

_LOOK_SECONDS = 1.0

#: A future, the bucket's memory, and what was offered of it: parameters by number, and their step.
Pending = tuple[Any, Tensor, list[tuple[int, int]]]


class Backward:
    """The buckets of one backward pass.

    Args:
        result: waits for one result, by the number of the parameter and the step.
        alive: returns whether the thread that completes is there.
    """

    def __init__(self, result: Callable[[int, int], Tensor], alive: Callable[[], bool]) -> None:
        self._result, self._alive = result, alive
        self._pending: list[Pending] = []
        self._whole, self._done = False, threading.Event()
        #: Sparse gradients, by the number of their parameters: torch reduces them.
        self.sparse: list[int] = []
        #: Called after the last result was fetched.
        self.settle: Callable[[], object] = lambda: None
        #: Called when DistributedDataParallel has ended this pass too.
        self.afterwards: Callable[[], None] | None = None
        #: The parameters that buckets have brought, by identity.
        self.brought: set[int] = set()
        #: Buckets come without numbers, so that none is known to be the last one.
        self.unnumbered = False
        self._error: HorovodCompressError | None = None
        #: Called with an error after which training cannot go on.
        self.gives_up: Callable[[HorovodCompressError], None] = lambda error: None

    def add(self, buffer: Tensor, offered: list[tuple[int, int]]) -> Any:
        """Return the future of a bucket whose gradients were offered."""
        on: Any = [buffer.device] if buffer.is_cuda else None
        future: Any = torch.futures.Future(devices=on)
        self._pending.append((future, buffer, offered))
        return future

    def add_to_last(self, offered: list[tuple[int, int]]) -> None:
        """Fetch these results too, which belong to no bucket."""
        self._pending[-1][2].extend(offered)

    def offered(self) -> set[int]:
        """Return the parameters that were offered so far, by number."""
        return {index for _, _, offered in self._pending for index, _ in offered} | {*self.sparse}

    def has_all(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether buckets without numbers have brought the gradients of all parameters that are trained."""
        trained = (parameter for parameter in parameters if parameter.requires_grad)
        return self.unnumbered and all(id(parameter) in self.brought for parameter in trained)

    def complete(self) -> None:
        """Fetch all results and complete the futures; on a thread of its own, after the last bucket."""
        try:
            for _, _, offered in self._pending:
                for index, step in offered:
                    self._result(index, step)
            self.settle()
        except BaseException as error:  # noqa: BLE001  the training thread raises it
            self._note(error)
        finally:
            self._release()

    def give_up(self, error: BaseException) -> None:
        """Complete the futures without results, where there is no thread to fetch them."""
        self._note(error)
        self._release()

    def _note(self, error: BaseException) -> None:
        """Keep the first error, for the training thread."""
        if not self._error:
            ours = isinstance(error, HorovodCompressError)
            text = f"fetching results failed: {type(error).__name__}: {error}"
            self._error = error if ours else ExchangeError(text)  # type: ignore[assignment]

    def _release(self) -> None:
        """Complete every future, also after one that cannot be: a device in error fails each call upon it."""
        try:
            for future, buffer, _ in self._pending:
                try:
                    with torch.cuda.device(buffer.device) if buffer.is_cuda else contextlib.nullcontext():
                        future.set_result(buffer)
                except BaseException as error:  # noqa: BLE001  the training thread raises it
                    self._note(error)
                    with contextlib.suppress(Exception):
                        future.set_exception(error)
            self._pending = []
        finally:
            self._done.set()

    def close(self) -> None:
        """Note that the last bucket was handed over."""
        self._whole = True

    def end(self) -> None:
        """At the end of the backward pass, on the thread that ends it: raise what went wrong.

        Raises:
            HorovodCompressError: see :meth:`~horovod_compress.engine.reducer.Reducer.result`.
            ExchangeError: nobody is left to fetch the results.
        """
        if not self._whole:
            return  # DistributedDataParallel says so itself: some parameters have got no gradient
        while not self._done.wait(_LOOK_SECONDS) and self._alive():
            pass
        if not self._done.is_set():
            raise ExchangeError(
                "the thread that fetches results has ended in the middle of a backward pass: either the compression "
                "was closed, or an error ended it, which is logged above; restart the job from a checkpoint"
            )
        if self.afterwards:
            at_the_end(self.afterwards)
        error, self._error = self._error, None
        if isinstance(error, NonFiniteError):
            at_the_end(raising(error))
        elif error:
            self.gives_up(error)
            raise error


def raising(error: Exception) -> Callable[[], None]:
    """Return what raises an error."""

    def end() -> None:
        raise error

    return end


def at_the_end(call: Callable[[], None]) -> None:
    """Have something called at the end of this backward pass, after what was asked for before."""
    torch.autograd.Variable._execution_engine.queue_callback(partial(_uncompiled(), call))


@cache
def _uncompiled() -> Callable[[Callable[[], None]], None]:
    """Return what calls something as it is, where a step is compiled with its backward pass."""
    return uncompiled(lambda call: call())


_log = logging.getLogger("horovod_compress")
_CLOSE_SECONDS = 1.0


class Fetching:
    """Completes backward passes, in the order in which they come.

    Args:
        rank: for messages.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._ended, self._handing = rank, False, threading.Lock()
        self._worker = Worker("hvc-results", self._failed)

    def alive(self) -> bool:
        """Return whether the thread is there."""
        return self._worker.alive()

    def hand_over(self, backward: Backward) -> None:
        """Have the results of a backward pass fetched; another thread may be closing this."""
        with self._handing:  # else the thread could end between the look and the task
            if self.alive() and not self._ended:
                self._worker.put(backward.complete)
                return
        backward.give_up(
            ExchangeError(f"rank {self._rank}: this compression was closed in the middle of a backward pass")
        )

    def close(self) -> None:
        """End the thread after the passes given before; safe to call twice."""
        with self._handing:
            self._ended = True
        self._worker.close(_CLOSE_SECONDS)

    def _failed(self, error: BaseException) -> None:
        """Note that nobody fetches results any more."""
        with self._handing:
            self._ended = True
        _log.error("rank %s: the thread that fetches results failed: %r", self._rank, error)


# ---- parameters that no rank uses ----

#: What was kept for a tensor, with its number in the plan, and its gradient in DistributedDataParallel's bucket.
Aside = tuple[int, dict[str, Tensor], Tensor, Tensor]


def looks_for_unused(model: DistributedDataParallel) -> bool:
    """Return whether a step may leave parameters out; a static graph leaves out the same ones in every step."""
    return bool(model.find_unused_parameters) and not getattr(model, "static_graph", False)


class Unused:
    """Follows which parameters of a model the ranks use.

    Args:
        model: it looks for unused parameters.
        kept: what the reducer keeps from step to step.
    """

    def __init__(self, model: DistributedDataParallel, kept: Kept) -> None:
        self._model, self._kept = weakref.ref(model), kept  # the model holds the hook, and so this
        self._used: set[int] = set()  # by identity, as all here
        self._aside: dict[int, Aside] = {}
        # Called once a gradient is added up, and before DistributedDataParallel's own hook. A hook of the parameter
        # itself is called by torch.autograd.grad too, which adds nothing to gradients.
        note = weakly(self._note)
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(note)

    def _note(self, parameter: Tensor) -> None:
        self._used.add(id(parameter))

    def begin(self) -> None:
        """Begin a backward pass: an error may have ended the one before."""
        self._aside.clear()

    def set_aside(self, parameters: Sequence[Tensor], numbers: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Keep what belongs to the unused ones of a bucket, before their gradients are offered."""
        for parameter, number, grad in zip(parameters, numbers, grads, strict=True):
            if id(parameter) not in self._used:
                self._aside[id(parameter)] = (number, self._kept.set_aside(number), grad, grad.clone())

    def settle(self, brought: Collection[int]) -> None:
        """At the end of a backward pass, after DistributedDataParallel's own: put back what no rank has used.

        Args:
            brought: all parameters that it has handed gradients over for.
        """
        aside, self._aside = self._aside, {}
        self._used.clear()
        model = self._model()
        if not aside or model is None:
            return
        order = [id(parameter) for parameter in model.module.parameters() if id(parameter) in brought]
        reducer: Any = model.reducer
        used = reducer._get_local_used_map().tolist()  # by how many ranks; DDP's join() asks the same way
        with torch.no_grad():
            for parameter, ranks in zip(order, used, strict=True):
                if not ranks and parameter in aside:
                    number, saved, grad, given = aside[parameter]
                    self._kept.put_back(number, saved)
                    grad.copy_(given)  # a gradient of before may lie there
