"""What every part of a compression stands on: its reducer, and the other ranks."""

from __future__ import annotations

from typing import Any

from ...engine.job import Gathering, Job
from ...engine.methods import Methods
from ...engine.reducer import Reducer
from ...errors import ConfigError, ExchangeError
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
