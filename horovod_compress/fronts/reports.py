"""What a compression tells of itself: counters, where they are reported, and parameters that it does not exchange."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..engine.reducer import Reducer
from ..errors import ConfigError
from ..observe import verdict
from ..observe.prometheus import PrometheusFile
from ..observe.reports import Reports, TensorBoard
from ..observe.stats import AtAnyTime, Stats
from .session import Running


class Counters(Running):
    """A compression that counts."""

    _reports: Reports

    def _begin_reports(self, reducer: Reducer) -> Reports:
        name = f"rank {self._job.number}: {self.method}"
        line = reducer.rank == 0 and reducer.world > 1  # with one rank there is nothing to exchange
        return Reports(
            reducer.metrics,
            self._counters,
            self.stats,
            reducer.next_step,
            name,
            line=line,
            pace=verdict.Pace(reducer.metrics, reducer.context.overlap),
            total_steps=reducer.options.total_steps,
            verdict=self._verdict,
        )

    def _in_words(self) -> str:
        """Return the method, the options that are not the defaults, and the ratio so far with what it is worth."""
        if self._reducer is None:
            return f"{self.method}: not on this rank"
        reducer = self._reducer
        asked, number = (
            filter(None, (self._methods.differing(), reducer.options.differing())),
            len(reducer.plan.buckets),
        )
        state = f"{' '.join(asked)}: {number} bucket{'s' * (number != 1)}, step {reducer.step}"
        return "; ".join((state, self._verdict() or "nothing sent yet"))

    def _verdict(self) -> str:
        """Return in words what compression is worth; of updates only the ratio is known."""
        reducer = self._running()
        if self._reports.updates:
            return verdict.ratio(reducer.metrics)
        total = reducer.options.total_steps
        return verdict.in_words(reducer.metrics, self._reports.pace, self._steps.is_exact, reducer.step, total)

    def stats(self) -> Stats:
        """Return this rank's counters, a dictionary; :class:`~horovod_compress.observe.stats.Stats` has its keys.

        steps, exact_steps            finished steps, and those in which nothing was compressed
        bytes_sent                    bytes handed to the transport, headers included
        bytes_exact, bytes_compressed the parts of it that were gradients as plain numbers, and compressed ones
        bytes_dense                   bytes that a float32 ring would have sent
        times_fewer_bytes             the ratio of bytes_dense and bytes_sent
        seconds                       by phase
        residual_norm                 the norm of what waits
        norm_ratio                    what compressed gradients are handed back times, so that they have the norm of
                                      the exact mean
        gradient_norm                 that norm, as last measured; 0 before that
        nonfinite                     NaN and infinite values offered by all ranks together, however treated
        verified                      steps whose results were compared across ranks
        buckets, plain_buckets        how many there are, and how many of them the schedule leaves uncompressed
        collectives                   those in use
        tuned                         no search for buckets is in progress
        method                        its name
        overlap, overlap_seconds      the share of the exchange time that the backward pass hides, 0 to 1, and the
                                      seconds it is computed from
        """
        reducer = self._running()
        return {
            **self._counters(),
            "residual_norm": reducer.kept.residual_norm(),
            "buckets": len(reducer.plan.buckets),
            "collectives": sorted({state.round(reducer.step).collective.name for state in reducer.buckets}),
            "plain_buckets": sum(bucket.plain for bucket in reducer.plan.buckets),
            "tuned": self._steps.tuner is None or self._steps.tuner.done,
            "method": self.method,
            "norm_ratio": reducer.norms.ratio.used(),
            "gradient_norm": reducer.norms.ratio.norm,
        }

    def _counters(self) -> AtAnyTime:
        """Return what can be read at any time."""
        reducer = self._running()
        return {**reducer.metrics.document(), **reducer.context.overlap.document()}

    def publish(
        self,
        *,
        tensorboard: Any = None,
        prometheus: str | os.PathLike[str] | None = None,
        every: int = 100,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Report the counters of this rank at regular intervals, to TensorBoard, to Prometheus, or to both.

            compression.publish(tensorboard=SummaryWriter("runs/first") if rank == 0 else None)
            compression.publish(prometheus="/var/lib/node_exporter/train.prom", labels={"job_name": "first"})

        docs/monitoring.md has the names of all values. A report that cannot be written causes a warning, and training
        continues.

        Args:
            tensorboard: a ``SummaryWriter``, or an object with its ``add_scalar``; None on ranks that have none.
            prometheus: a file that ends in ``.prom``, in the folder of the node exporter's textfile collector; each
                rank writes its own, ``train.rank3.prom``. Each compression needs its own file name.
            every: steps from one report to the next.
            labels: to add to every value for Prometheus, besides ``rank`` and ``method``. A host that runs several
                jobs or models needs one that distinguishes them.

        Raises:
            ConfigError: one of these cannot work; then nothing is reported.
        """
        if not self._reducer:
            return
        file = None if prometheus is None else PrometheusFile(prometheus, self._job.number, self.method, labels)
        board = None if tensorboard is None else TensorBoard(tensorboard)
        if file:
            _check_free(file.path)
        if board:
            self._reports.add(board, every)
        if file:
            self._reports.add(file, every)
            _writers[file.path.resolve()] = self

    def _end_reports(self) -> None:
        """Leave the files to other compressions."""
        for path in [path for path, writer in _writers.items() if writer is self]:
            del _writers[path]


_writers: weakref.WeakValueDictionary[Path, Counters] = weakref.WeakValueDictionary()  # by the files of this process


def _check_free(path: Path) -> None:
    """Refuse a file that another compression would write over.

    Raises:
        ConfigError: it is in use.
    """
    writer = _writers.get(path.resolve())
    if writer is not None and not writer.is_over():
        raise ConfigError(
            f"{path} is already in use by a compression of this process; give each its own file name, or close() the "
            "other one first"
        )


# ---- parameters that are trained but not exchanged, as they were frozen when that was planned ----

#: Name at most so many.
_NAMED = 5

_log = logging.getLogger("horovod_compress")


class Unexchanged:
    """Warns once, in the first step in which such a parameter has a gradient.

    Args:
        others: returns the parameters that are not exchanged, by name.
        planned: what was created while they were frozen.
        again: what to create again so that they are exchanged.
    """

    def __init__(self, others: Callable[[], Iterable[tuple[str, nn.Parameter]]], planned: str, again: str) -> None:
        self._others, self._words = others, (planned, again)
        self._told = False

    def look(self) -> None:
        """Look at the gradients of a step; whenever they are all there."""
        if self._told:
            return
        found = [name for name, parameter in self._others() if parameter.grad is not None and parameter.requires_grad]
        if not found:
            return
        self._told = True
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        _log.warning(
            "%s%s: has a gradient that is never reduced, because it was frozen or missing when %s were created; each "
            "rank trains it on its own data, so it will differ between ranks, as without compression. Set "
            "requires_grad before you create them, and freeze it later; or, to train it from here on, create %s again",
            *(", ".join(found[:_NAMED]), more, *self._words),
        )
