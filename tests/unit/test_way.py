"""The way of a gradient: through how few files of the package it leads, from its offer to its result."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import horovod_compress
from tests.support.local import Fleet, random_grads, spec

PACKAGE = Path(horovod_compress.__file__).parent
#: What moves bytes and what computes is the same for all.
NOT_COUNTED = ("exchange", "ops")
#: A limit to be lowered, and never raised.
MOST_FILES = 12
WORLD, WARM, STEPS = 2, 5, 10


class Watch:
    """Notes in which files of the package functions are called, on every thread that starts while it is there."""

    def __init__(self) -> None:
        self._seen: set[str] | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._seen is not None and event == "call":
            self._seen.add(frame.f_code.co_filename)

    @contextmanager
    def noting(self, seen: set[str]) -> Iterator[None]:
        self._seen = seen
        try:
            yield
        finally:
            self._seen = None


@contextmanager
def watched() -> Iterator[Watch]:
    before, watch = (sys.getprofile(), threading.getprofile()), Watch()
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield watch
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])


def way_of_a_gradient(method: str = "marsit") -> list[str]:
    """Return the files in which functions are called between the offer of a gradient and its result, on any thread.

    Those of every steady step: what comes now and then, such as a look at the other ranks, is not on the way.
    """
    tensors, steps = [spec("only", 9, 31)], Counter[str]()
    with watched() as watch, Fleet(WORLD, tensors, method, verify_every=0) as fleet:
        for number in range(WARM + STEPS):
            grads, seen = random_grads(WORLD, tensors, seed=number), set[str]()
            assert all(reducer.wait_idle(10.0) for reducer in fleet.reducers)
            with watch.noting(seen):
                for reducer, mine in zip(fleet.reducers, grads, strict=True):
                    step = reducer.offer(0, mine["only"])
                for reducer in fleet.reducers:
                    reducer.result(0, step)
            if number >= WARM:
                steps.update(seen)
    paths = [
        Path(name).relative_to(PACKAGE) for name, n in steps.items() if n == STEPS and PACKAGE in Path(name).parents
    ]
    return sorted(path.as_posix() for path in paths if path.parts[0] not in NOT_COUNTED)


def test_the_way_of_a_gradient_is_short() -> None:
    found = way_of_a_gradient()
    print(f"{len(found)} files:", *found, sep="\n")
    assert len(found) <= MOST_FILES, "a gradient leads through more files than it did: " + ", ".join(found)


def test_what_is_on_the_way_is_seen() -> None:
    """The control: on the training thread, and on those of the reducer."""
    found = way_of_a_gradient("topk")
    assert "codecs/topk.py" in found and "codecs/marsit.py" not in found
    assert "codecs/marsit.py" in way_of_a_gradient()
