"""A started compression, from its first step to its end, and what becomes of one that nobody uses."""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..codecs.work import together
from ..engine.agreement import differences
from ..engine.agreement.differences import Way
from ..engine.job import Gathering, Job
from ..engine.methods import Methods
from ..engine.optimizer.step_hooks import uncompiled, with_gradients
from ..engine.reducer import Reducer
from ..engine.shards import is_divided, local
from ..errors import ConfigError, ExchangeError, HorovodCompressError, NonFiniteError, in_job
from .gather import why_not_together
from .steps import Named, Steps

T = TypeVar("T")
Gather = Callable[[Any, Gathering], list[Any]]  # of a job: returns every rank's value

_log = logging.getLogger("horovod_compress")

#: Numbers what ranks meet for while a program makes its compressions and optimizers.
meetings = itertools.count()


class Session:
    """The started engine of one compression, with what a front has to know of its steps.

    Args:
        given: the parameters that the compression was given, by name.
        name: what all ranks call this compression, and no other one that they have.

    Attributes:
        name: that.
        name_of_all: what the ranks of all rows call it; empty before they have met.
        others: those that were given and are not exchanged, as they were frozen.
        lock: with two devices there are two threads of autograd, and both hand gradients over.
        under_way: gradients handed over whose results were not fetched yet.
        step: the one that these belong to.
        compared: all ranks are known to hand over gradients alike.
        unused: nothing was handed over yet, no update optimizer has the compression, and nobody was told.
        attached: the optimizer needs no tokens.
        exchanges: "gradients" or "updates".
        updating: the optimizer in update mode; None where there is none.
    """

    def __init__(self, job: Job, methods: Methods, reducer: Reducer, given: Named, name: str) -> None:
        self.name, self.name_of_all = name, name if job.row is None else ""
        self.job, self.methods, self.reducer, self.failure = job, methods, reducer, reducer.failure
        self._progress = reducer.context.progress
        self.steps = Steps(reducer, methods, given, self._gather_times)
        self.others = [(name, parameter) for name, parameter in given if not parameter.requires_grad]
        self.lock = threading.RLock()
        self.under_way, self.step = 0, -1
        self.compared, self.unused, self.attached = False, True, False
        self.exchanges = "gradients"
        self.updating: Any = None
        _sessions.add(self)

    def refuse_closed(self) -> None:
        """Refuse to begin with what was closed or has failed.

        Raises:
            HorovodCompressError: what it has failed with.
            ConfigError: it was closed.
        """
        self.failure.raise_if_failed()
        if self.failure.closing:
            raise ConfigError(f"this compression was closed {self.failure.closed}")

    def is_over(self) -> bool:
        """Return whether nothing will be exchanged any more: closed, failed, or of ranks that are no longer there."""
        if self.failure.closing or self.failure.failed():
            return True
        try:
            self.job.check()
        except ConfigError:
            return True
        return False

    def strangers(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what attached optimizers have, with a gradient, and no compression of this process knows, by name."""
        for optimizer in self.steps.optimizers:
            yield from outside(optimizer.param_groups, lambda p: p.grad is None or self.knows(p), {})

    def knows(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter was given to this compression, or another one of this process exchanges it."""
        if id(parameter) in self.steps.index or any(parameter is other for _, other in self.others):
            return True
        return any(id(parameter) in one.steps.index for one in _sessions)

    # ---- the other ranks ----

    def met_all(self, names: Iterable[str]) -> None:
        """Take note that the ranks of all rows have met, and what each calls this compression."""
        self.name_of_all = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]

    def gather(self, value: Any, name: str, *, by_name: bool = False) -> list[Any]:
        """Return every rank's value.

        Args:
            name: of what they meet for, in two words, and a third one where that has several stages.

        Raises:
            ExchangeError: not every rank arrived in time, or they are at different stages, or with different
                compressions; or this one has heard that some rank has failed.
        """
        return self._gather_alike(self.job.gather, [self.name, name], value, by_name)

    def gather_all(self, value: Any, name: str, *, by_name: bool = False) -> list[Any]:
        """Return every rank's value; where there are rows, by those, which are in the order of the session's ranks.

        Raises:
            ExchangeError: see :meth:`gather`.
        """
        return self._gather_alike(self.job.gather_all, [self.name_of_all, name], value, by_name)

    def _gather_alike(self, gather: Gather, mine: list[str], value: Any, by_name: bool) -> list[Any]:
        with self._saying_more():
            found = self._gather(gather, [mine, value], mine[-1], by_name)
            if told := why_not_together([theirs for theirs, _ in found], self.job.number):
                raise in_job(ExchangeError(told))
        return [theirs for _, theirs in found]

    @contextmanager
    def _saying_more(self) -> Iterator[None]:
        """Raise what this rank has failed with, if it has, where ranks do not meet."""
        try:
            yield
        except ExchangeError:
            self.reducer.wait_idle(0.0)
            raise

    def _gather_times(self, value: Any) -> list[Any] | None:
        """Return every rank's measured times, None where some rank begins a step of another compression.

        They would wait for each other, so all compressions meet by one name. Where that fails, no rank goes on.
        """
        with self.calling_off(purpose := "hvc.tuning"):
            found = self._gather(self.job.gather, [self.name, value], purpose)
            return [theirs for _, theirs in found] if {name for name, _ in found} == {self.name} else None

    @contextmanager
    def calling_off(self, purpose: str) -> Iterator[None]:
        """Let no rank go on where ranks do not meet, for this purpose, within a step.

        Raises:
            ExchangeError: not all came, or another rank has called it off.
        """
        with self._progress.meeting(purpose):  # still while it fails: ranks that are behind did not come
            try:
                yield
            except ExchangeError as error:
                why = str(error).removeprefix(f"rank {self.job.number}: ").rstrip(".")
                raise (self.failure.call_off(why) or error) from error

    def _gather(self, gather: Gather, value: Any, name: str, by_name: bool = False) -> list[Any]:
        purpose = ".".join(name.split(".")[:2])
        asked = Gathering(purpose, self.reducer.options.longest_seconds, by_name=by_name, failed=self.failure.failed)
        with self._progress.meeting(purpose):
            return gather(value, asked)

    # ---- a step ----

    def begin_step(self, is_attached: Callable[[], bool], report: Callable[[], None]) -> bool:
        """Begin a step where nothing is under way; return whether the parameters have other numbers now.

        Args:
            is_attached: returns whether this rank does without what others would have to wait for; called once.
            report: makes the reports that are due.
        """
        self.job.check()
        self.unused = False
        if not self.compared:
            with self.lock:
                if not self.compared:
                    self._compare(is_attached())
        if self.under_way:
            return False
        report()
        return self.steps.begin()

    def _compare(self, attached: bool) -> None:
        """At the first gradient, see that all ranks hand over theirs alike, to the same optimizer."""
        self.steps.settle_moments()
        mine = Way(
            self.name,
            attached,
            self.steps.second_moment(),
            self.steps.options(),
            self.steps.sparse,
        )
        with self._saying_more():
            found = [Way(**way) for way in self._gather(self.job.gather, asdict(mine), "hvc.attach", by_name=True)]
        with differences.explaining(self.failure.ranks_in_words):
            differences.check(found)
        self.compared = True

    def offer(self, index: int, grad: Tensor) -> int:
        """Hand over one gradient, by the number of its parameter; return its step."""
        self.step = step = self.reducer.offer(index, grad)
        self.under_way += 1
        return step

    def skip_sparse(self, indices: Sequence[int], step: int) -> None:
        """Count parameters in whose gradients are sparse in this step, on every rank.

        Raises:
            MismatchError: they are dense on some rank.
            ExchangeError: an exchange has failed, or some rank did not say whether its gradients are sparse.
        """
        reducer, failure = self.reducer, self.failure
        if indices:
            plan = reducer.plan.names()
            with failure.of_all("sparse gradients"):
                reducer.sparse.meet(step, frozenset(plan[index] for index in indices), failure.failed)
            failure.raise_if_failed()
        for index in indices:
            reducer.skip(index)

    def is_sparse(self, parameter: nn.Parameter) -> bool:
        """Return whether gradients of a parameter are known to be sparse, so that the ranks do not exchange them."""
        if not (names := self.reducer.sparse.names):
            return False
        index = self.steps.index.get(id(parameter))
        return index is not None and self.reducer.plan.names()[index] in names

    def agree(self, mine: NonFiniteError | None) -> NonFiniteError | None:
        """Return the error that training can go on after, of this rank or of those that have other shards.

        Raises:
            ExchangeError: not all of them came in time; this rank's column cannot go on without them.
        """
        try:
            return self.job.agree(mine, self.reducer.options.longest_seconds)
        except ExchangeError as error:
            self.failure.report("a step", in_job(error))
            raise

    def result(self, index: int, step: int, result_scale: float | None = None) -> Tensor:
        """Wait for one result and return it, see :meth:`~horovod_compress.engine.reducer.Reducer.result`."""
        try:
            result = self.reducer.result(index, step, result_scale)
        except HorovodCompressError:
            self.under_way = 0  # nobody fetches the other results of this step
            raise
        self.under_way -= 1
        return result


#: Those of this process, also of compressions that were closed.
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def exchanged(parameter: nn.Parameter) -> bool:
    """Return whether some compression of this process exchanges a parameter, and goes on."""
    return any(id(parameter) in one.steps.index and not one.is_over() for one in _sessions)


def outside(
    groups: Iterable[dict[str, Any]], exchanged: Callable[[nn.Parameter], bool], names: Mapping[int, str]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what an optimizer has and ranks do not exchange, with names for people.

    Args:
        exchanged: returns whether they do, or need not.
        names: of some parameters, by identity.
    """
    for number, group in enumerate(groups):
        for place, parameter in enumerate(group["params"]):
            if not exchanged(parameter):
                where = f"parameter {place} of group {number}, of shape {tuple(parameter.shape)}"
                yield names.get(id(parameter)) or where, parameter


def gradient_of(parameter: nn.Parameter, sparse: bool = False) -> Tensor:
    """Return a parameter's gradient; zeros where no backward pass has brought one, as all ranks hand over the same.

    Args:
        sparse: as an embedding's gradient: no rows, each of which were dense.
    """
    if parameter.grad is None and sparse:
        rows, device = parameter.new_empty(0, *parameter.shape[1:]).detach(), parameter.device
        none = torch.empty(1, 0, dtype=torch.int64, device=device)
        parameter.grad = torch.sparse_coo_tensor(none, rows, parameter.shape, check_invariants=False, device=device)
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)


def drop_zeros(frozen: Iterable[nn.Parameter]) -> None:
    """Let no frozen parameter have a gradient of zeros, with which momentum and weight decay would move it.

    Programs leave them there that clear gradients in place.
    """
    # Of what ranks have parts of, each would decide by its own.
    dense = [p for p in frozen if p.grad is not None and not p.grad.is_sparse and not is_divided(p)]
    filled = together([p.grad.any() for p in dense if p.grad is not None])  # one wait on a GPU
    for parameter, is_filled in zip(dense, filled, strict=True):
        if not is_filled:
            parameter.grad = None


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


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
    ours = frozenset(map(id, parameters))

    def look(optimizer: Any) -> None:
        if unused(False) is None:
            end()
            return
        mine = (p for group in optimizer.param_groups for p in group["params"] if id(p) in ours)
        # Horovod's broadcast of an optimizer's state makes a step with gradients of zeros.
        if any(p.grad is not None and (p.grad.is_sparse or bool(local(p.grad).any())) for p in mine):
            end()
            _log.warning("%s", unused(True))

    end = before_each_step(look, gradients=True)
    return end


def before_each_step(look: Callable[[Any], object], *, gradients: bool = False) -> Callable[[], object]:
    """Have something called with each optimizer that is about to make a step; return what ends that.

    Args:
        gradients: it looks at those of the step, so it comes after the closure that makes them.
    """
    number, looks = next(_numbers), _looks_at_gradients if gradients else _looks
    _hook()
    looks[number] = look
    return lambda: looks.pop(number, None)


#: What looks at each step of an optimizer, by number. Torch goes through its hooks while threads may end these, so it
#: has one of ours that stays.
_looks: dict[int, Callable[[Any], object]] = {}
_looks_at_gradients: dict[int, Callable[[Any], object]] = {}
_numbers = itertools.count()


@cache
def _hook() -> object:
    def look(optimizer: Any, *given: Any) -> tuple[Any, Any] | None:
        _look_by(_looks, optimizer)
        if not _looks_at_gradients:
            return None  # and leave alone what other optimizers are given
        return with_gradients(partial(_look_by, _looks_at_gradients, optimizer), *given)

    return register_optimizer_step_pre_hook(uncompiled(look))


def _look_by(looks: dict[int, Callable[[Any], object]], optimizer: Any) -> None:
    for each in list(looks.values()):
        each(optimizer)


def weakly(call: Callable[..., T]) -> Callable[..., T | None]:
    """Return a bound method without what keeps its object alive: for threads, which would keep it for ever."""
    method = weakref.WeakMethod(call)

    def found(*given: Any) -> T | None:
        bound = method()
        return None if bound is None else bound(*given)

    return found
