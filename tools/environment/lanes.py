"""Work side by side: the first failure ends the others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed


def side_by_side(*lanes: Callable[[], None], stop: Callable[[], None]) -> None:
    """Runs each in a thread of its own, and returns when all have ended.

    Args:
        stop: makes the lanes that still run end soon, with an exception; called once one has failed, or this thread
            was interrupted.

    Raises:
        Exception: the one with which the first lane failed, after the others have ended.
    """
    with ThreadPoolExecutor(max_workers=len(lanes)) as pool:
        try:  # around the beginning too: the pool waits for a lane that nobody has stopped
            for future in as_completed([pool.submit(lane) for lane in lanes]):
                future.result()
        except BaseException:
            stop()
            raise
