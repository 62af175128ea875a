"""End all ranks together when one of them cannot go on.

Ranks must agree before any leaves: horovodrun kills the others as soon as one exits,
and the message of the first rank could be lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

import horovod.torch as hvd

Made = TypeVar("Made")


def stop_if_any(problem: str | None) -> None:
    """End every rank if any has a problem; the first rank says whose and what.

    Every rank must call this, with None where all is well.
    """
    problems = hvd.allgather_object(problem, name="train.problem")
    for rank, text in enumerate(problems):
        if text:
            _stop(f"rank {rank}: {text}" if len(set(problems)) > 1 else text)


def together(make: Callable[[], Made]) -> Made:
    """Return what `make` makes, or end every rank if any rank could not.

    Only the errors of wrong input are caught: a ValueError (as every configuration
    error is) or a TypeError (an option that the method does not know).
    """
    made, problem = None, None
    try:
        made = make()
    except (ValueError, TypeError) as error:
        problem = str(error)
    stop_if_any(problem)
    return cast(Made, made)


def stop_unless_equal(what: str, value: int) -> None:
    """End every rank if they do not all have the same value."""
    values = hvd.allgather_object(value, name="train.equal")
    if len(set(values)) > 1:
        _stop(f"{what} differs between the ranks: {values}")


def _stop(text: str) -> NoReturn:
    if hvd.rank() == 0:
        print(f"train.py: {text}", file=sys.stderr, flush=True)
    hvd.barrier()
    sys.exit(2)
