"""What a compression tells of itself: counters, where they are reported, and parameters that it does not exchange."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ConfigError, some_of
from ..observe import verdict
from ..observe.metrics import AtAnyTime, Stats
from ..observe.reports import PrometheusFile, Reports, TensorBoard, check_every
from ..options import plain
from .session import Session, before_each_step, exchanged, outside, weakly


class Counters:
    """What one compression counts, and where that is reported.

    Args:
        method: its name.

    Attributes:
        reports: to the log, and to wherever else they are asked for.
    """

    def __init__(self, session: Session, method: str) -> None:
        self._session, self._method = session, method
        self._published: list[tuple[Any, ...]] = []
        self._lost = 0.0
        reducer = session.reducer
        self._kept, self._ratio, self._overlap = reducer.kept, reducer.norms.ratio, reducer.context.overlap
        self.reports = Reports(
            reducer.metrics,
            self.at_any_time,
            self.stats,
            reducer.next_step,
            f"rank {session.job.number}: {method}",
            line=reducer.world > 1,  # with one rank there is nothing to exchange
            tells=reducer.rank == 0,
            pace=verdict.Pace(reducer.metrics, self._overlap),
            total_steps=reducer.options.total_steps,
            verdict=self._verdict,
        )

    def in_words(self) -> str:
        """Return the method, the options that are not the defaults, and the ratio so far with what it is worth."""
        reducer = self._session.reducer
        asked = filter(None, (self._session.methods.differing(), reducer.options.differing()))
        number = len(reducer.plan.buckets)
        state = f"{' '.join(asked)}: {number} bucket{'s' * (number != 1)}, step {reducer.step}"
        return "; ".join((state, self._verdict() or "nothing sent yet"))

    def _verdict(self) -> str:
        """Return in words what compression is worth; of updates only the ratio is known."""
        reducer, steps = self._session.reducer, self._session.steps
        if self.reports.updates:
            return verdict.ratio(reducer.metrics)
        is_exact, total = steps.is_exact if steps.foresees() else None, reducer.options.total_steps
        return verdict.in_words(reducer.metrics, self.reports.pace, is_exact, reducer.step, total)

    def stats(self) -> Stats:
        """Return all counters, see :meth:`~.compression.BaseCompression.stats`."""
        reducer, tuner = self._session.reducer, self._session.steps.tuner
        last = max(0, reducer.step - 1)  # a function given to by_step may not know of steps to come
        return {
            **self.at_any_time(),
            "residual_norm": self._kept.residual_norm(self._session.steps.divisors()),
            "buckets": len(reducer.plan.buckets),
            "collectives": sorted({state.round(last).collective.name for state in reducer.buckets}),
            "plain_buckets": sum(bucket.plain for bucket in reducer.plan.buckets),
            "tuned": tuner is None or tuner.done,
            "method": self._method,
            "norm_ratio": self._ratio.used(),
            "gradient_norm": self._ratio.norm,
            "residual_lost": self._lost,
        }

    def at_any_time(self) -> AtAnyTime:
        """Return what can be read in the middle of a step too."""
        return {**self._session.reducer.metrics.document(), **self._overlap.document()}

    def publish(
        self, tensorboard: Any, prometheus: str | os.PathLike[str] | None, every: int, labels: Mapping[str, str] | None
    ) -> None:
        """Report at regular intervals, see :meth:`~.compression.BaseCompression.publish`."""
        every = plain(every)
        check_every(every)  # also where nothing is written: else the ranks that write would fail alone
        number = self._session.job.number
        file = None if prometheus is None else PrometheusFile(prometheus, number, self._method, labels)
        board = None if tensorboard is None else TensorBoard(tensorboard)
        writer = _writers.get(file.path.resolve()) if file else None
        if file and writer and not writer.is_over():
            raise ConfigError(
                f"{file.path} is already in use by a compression of this process; give each its own file name, or "
                "close() the other one first"
            )
        if board:
            self.reports.add(board, every)
        if file:
            self.reports.add(file, every)
            _writers[file.path.resolve()] = self._session
        self._published.append((tensorboard, prometheus, every, labels))

    def lost(self, norm: float) -> None:
        """Count what was lost with ranks of an elastic job."""
        self._lost = math.hypot(self._lost, norm)

    def follow(self, before: Counters) -> None:
        """Count and report on from where others of the same compression, among other ranks, have ended."""
        self._lost = before._lost
        self._session.reducer.metrics.go_on(before._session.reducer.metrics)
        self.reports.follow(before.reports)
        for asked in before._published:
            self.publish(*asked)

    def end(self) -> None:
        """Leave the files to other compressions."""
        for path in [path for path, writer in _writers.items() if writer is self._session]:
            del _writers[path]


_writers: weakref.WeakValueDictionary[Path, Session] = weakref.WeakValueDictionary()  # by the files of this process


# ---- parameters that are trained but not exchanged, as they were frozen when that was planned ----

_log = logging.getLogger("horovod_compress")


class Unexchanged:
    """Warns once, in the first step in which such a parameter has a gradient.

    Args:
        others: returns the parameters that are not exchanged, by name.
        words: what was created while they were frozen, and what to create again so that they are exchanged.
    """

    _text = (
        "%s: has a gradient that is never reduced, because it was frozen or missing when %s were created; each rank "
        "trains it on its own data, so it will differ between ranks, as without compression. Set requires_grad before "
        "you create them, and freeze it later; or, to train it from here on, create %s again"
    )

    def __init__(self, others: Callable[[], Iterable[tuple[str, nn.Parameter]]], *words: str) -> None:
        self._others, self._words = others, words
        self._told = False

    def look(self, optimizer: Any = None) -> None:
        """Look at the gradients of a step, whenever they are all there.

        Args:
            optimizer: takes them; None if that is known.
        """
        if self._told:
            return
        with_gradient = [(name, p) for name, p in self._others() if p.grad is not None and p.requires_grad]
        if with_gradient and optimizer is not None:
            taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
            with_gradient = [(name, p) for name, p in with_gradient if id(p) in taken and not exchanged(p)]
        found = [name for name, _ in with_gradient]
        if not found:
            return
        self._told = True
        _log.warning(self._text, some_of(found), *self._words)


class Strangers(Unexchanged):
    """The same of parameters that only an optimizer is known to have: something else may reduce their gradients."""

    _module: Callable[[], nn.Module | None] = staticmethod(lambda: None)

    _text = (
        "%s: the optimizer has it, and no compression of this program exchanges its gradient, as it was given to none, "
        "or added later; unless something else reduces it, each rank trains it on its own data"
    )

    def __init__(self, session: Session) -> None:
        late: weakref.WeakValueDictionary[str, nn.Parameter] = weakref.WeakValueDictionary()
        super().__init__(lambda: (*session.strangers(), *(one for one in late.items() if not session.knows(one[1]))))
        self._session, self._late = session, late
        self._lengths: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def follow(self, module: nn.Module) -> Callable[[], object]:
        """Look for parameters that a module has got since, as by a new layer, with an optimizer of their own.

        Returns:
            Ends it.
        """
        self._module = weakref.ref(module)
        return before_each_step(weakly(self._look_at), gradients=True)

    def _look_at(self, optimizer: Any) -> None:
        """Look at an optimizer that is about to make a step: at what it has, only if that is new."""
        module = self._module()
        if self._told or module is None:
            return
        if self._lengths.get(optimizer) != (length := sum(len(group["params"]) for group in optimizer.param_groups)):
            self._lengths[optimizer] = length
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            given = outside(optimizer.param_groups, lambda p: id(p) not in names or self._session.knows(p), names)
            self._late.update(given)
        if self._late:
            self.look()
