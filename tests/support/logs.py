"""What the package logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told() -> Iterator[list[str]]:
    """Collect the package's warnings."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("horovod_compress")
    log.addHandler(handler)
    try:
        yield texts
    finally:
        log.removeHandler(handler)
