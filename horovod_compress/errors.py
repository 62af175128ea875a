"""The errors of this package: what was expected, what came, which rank and bucket, what to do."""

from __future__ import annotations

import contextlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

try:
    from horovod.common.exceptions import HorovodInternalError
except ImportError:  # the kernels and the simulation run without Horovod

    class HorovodInternalError(RuntimeError):  # type: ignore[no-redef]
        """Stand-in for Horovod's recoverable error where Horovod is not installed."""


class HorovodCompressError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        of_job: its numbers of ranks are those of the whole job, also where only some ranks exchange.
    """

    of_job = False


_Error = TypeVar("_Error", bound=HorovodCompressError)


def in_job(error: _Error) -> _Error:
    """Return an error, marked as one whose numbers of ranks are those of the whole job."""
    error.of_job = True
    return error


def anew(error: _Error) -> _Error:
    """Return an error to be raised once more, without the traceback of the first time, which keeps what it saw."""
    made = type(error)(*error.args)
    made.__dict__.update((name, value) for name, value in error.__dict__.items() if name != "__notes__")
    return made


class ConfigError(HorovodCompressError, ValueError):
    """An option, a parameter list or a usage that cannot work."""


class MismatchError(HorovodCompressError, ValueError):
    """The ranks disagree, on options at the start or on a result later.

    Attributes:
        about: which of the options, or which parameter, where ranks compared them at the start; else empty.
    """

    def __init__(self, text: str = "", about: str = "") -> None:
        super().__init__(text)
        self.about = about


class StateError(ConfigError, MismatchError):
    """A saved state that is malformed, or belongs to another job."""


class NonFiniteError(HorovodCompressError, FloatingPointError):
    """A gradient contains NaN or infinity, and ``nonfinite="raise"`` is set."""


class ExchangeError(HorovodCompressError, HorovodInternalError):  # type: ignore[misc]
    """An exchange failed or ran out of time; ``hvd.elastic.run`` recovers from it."""


class CorruptFrameError(ExchangeError):
    """The bytes received, or read from a checkpoint, are not those that were written."""


class DigestError(Exception):
    """A rank decodes with something else than this one. Internal: the reducer says what, and raises MismatchError.

    Attributes:
        peer: that rank.
    """

    def __init__(self, peer: int) -> None:
        super().__init__(f"rank {peer} decodes with something else than this rank")
        self.peer = peer


class PeerError(Exception):
    """A transport lost one peer. Internal: the reducer adds the context and raises ExchangeError.

    Attributes:
        peer: the rank at the other end.
        late: True when the deadline passed, False when the connection broke.
    """

    def __init__(self, peer: int, late: bool, detail: str) -> None:
        super().__init__(detail)
        self.peer, self.late, self.detail = peer, late, detail


def some_of(names: Iterable[str], most: int = 5) -> str:
    """Return the first of many names, and how many more there are: ``a, b, c, d, e and 12 more``."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Let an error in writing a file name that file: the one of a full disk does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def one_line(text: object, most: int = 2000) -> str:
    """Return a text that others wrote, as it may be printed: no line, colour or direction of its own.

    White space becomes one blank. Control and format characters and lone surrogates are escaped: a terminal would obey
    them, and a line break would let one rank write what looks like another's line.

    Args:
        most: number of characters to keep of it.
    """
    given = str(text)
    words = " ".join(given[:most].split())
    shown = "".join(each if unicodedata.category(each)[0] != "C" else ascii(each)[1:-1] for each in words)
    return f"{shown}..." if len(given) > most else shown


def without_addresses(text: str) -> str:
    """Return a text without the places of objects in memory, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
