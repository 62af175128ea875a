"""A timeline of this process's compressions in a Horovod job."""

from __future__ import annotations

import os

import horovod.torch as hvd

from ...errors import ConfigError
from ...observe.trace import MAX_EVENTS, Trace
from ..compression import begin_trace


def trace(path: str | os.PathLike[str], steps: int | range | None = None, *, events: int = MAX_EVENTS) -> Trace:
    """Record a timeline of all compressions of this process, also of those created later.

        with hvc.trace("trace.json", steps=20):
            train()

    Each rank writes its own file: ``trace.rank3.json``, or with its number in place of ``{rank}`` if the path
    contains that. chrome://tracing and https://ui.perfetto.dev open it; docs/timeline.md explains the rows. The file is
    written when the step after the last one begins, when the trace is closed, or at the end of the process, and appears
    complete or not at all. If writing fails, that is logged, and training continues. ``HVC_TRACE=path`` in the
    environment does the same without changing the program, with ``HVC_TRACE_STEPS`` as "20" or "100:110".

    Args:
        path: of the file.
        steps: number of steps, from the next one on, or a range of step numbers as ``stats()["steps"]`` counts them;
            None for all, until ``close()``.
        events: largest number of events per compression; its recording then ends with a warning. An event takes about
            140 bytes in memory and in the file.

    Raises:
        ConfigError: the file cannot be written, ``steps`` is wrong, Horovod is not initialized, or another trace is
            being recorded.
    """
    if not hvd.is_initialized():
        raise ConfigError("hvc.trace() needs the number of this rank: call hvd.init() first")
    return begin_trace(path, hvd.rank(), steps, events)
