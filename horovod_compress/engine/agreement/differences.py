"""In what ranks differ, in words: in what they decode with, and in how they hand which gradients over."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import ExchangeError, HorovodCompressError, MismatchError, some_of

if TYPE_CHECKING:  # `inspect` reads notes, and needs no torch
    from ...exchange.transports.transport import Transport

# ---- ranks in words ------------------------------------------------------------------------------

#: List at most this many ranks: nobody reads thousands.
_MOST = 64


def listed(ranks: Iterable[int]) -> str:
    """Return ``0, 2``; of very many the first, and how many more there are."""
    return some_of(map(str, ranks), _MOST)


def by_value(values: Sequence[Any] | Mapping[int, Any]) -> str:
    """Return ``rank 0 = 8, ranks 1, 2 = 4`` for the values of all ranks, or by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    return ", ".join(f"rank{'s' if len(who) > 1 else ''} {listed(who)} = {value}" for value, who in ranks.items())


def minority(values: Sequence[int] | Sequence[str]) -> str:
    """Return the ranks whose value is not that of most, in words; among as many, the lowest rank's counts."""
    usual = max(set(values), key=lambda value: (values.count(value), -values.index(value)))
    return listed(rank for rank, value in enumerate(values) if value != usual)


def explained(text: str, ranks_in_words: str) -> str:
    """Return a text with what the numbers of ranks in it mean, unless that is their place in the job, or it says so."""
    return f"{text}. {ranks_in_words}" if ranks_in_words and ranks_in_words not in text else text


@contextlib.contextmanager
def explaining(ranks_in_words: str) -> Iterator[None]:
    """Let an error say what the numbers of ranks in it mean, see :func:`explained`."""
    try:
        yield
    except HorovodCompressError as error:
        if not error.of_job:
            error.args = (explained(str(error), ranks_in_words),)
        raise


# ---- what a rank decodes with --------------------------------------------------------------------

#: What is shown, and what to do where it differs.
RESULT_SCALE = "what results are multiplied by"
WHO_STEPS = "who does the optimizer's step (step=)"
SECOND_MOMENT = "the second moment that gradients are divided by"
ROUND = "the kind of round"
COUNTERS = "how far update mode is"
GRADIENT_SCALE = "the scale of the gradient scaler"
RATIO = "the ratio of norms"
TABLES = "what the tables of the method hold"

_ADVICE = {
    RESULT_SCALE: "give the optimizer the same op= on every rank: Average multiplies by 1, Sum by the number of ranks",
    WHO_STEPS: "attach or register the optimizer with the same step= on every rank",
    SECOND_MOMENT: "give every rank the same optimizer with the same options, load its state on every rank or on none "
    "(hvd.broadcast_optimizer_state gives all ranks that of rank 0), broadcast the weights before the first step, and "
    "call step() equally often",
    ROUND: "call the optimizer's step() after each exchange on every rank or on none",
    COUNTERS: "call step() and flush() equally often on every rank",
    GRADIENT_SCALE: "give every rank a gradient scaler with the same options, and load its state on every rank",
    RATIO: "load states of the same step on every rank",
    TABLES: "call load_state_dict() with the same residuals= on every rank, each with a state of the same step",
}

_ABSENT = "(not there)"
_OF_ALL = "give every rank the same optimizer, and register or attach it on every rank"
_OF_OPTIONS = "give every rank the same optimizer, with the same options, at all times"


class Operands:
    """What one rank decodes with in the coming step, in words: equal on every rank, or results differ in silence.

    A result is a function of consensus bytes and of a few things that each rank has by itself: what it multiplies
    results by, a second moment that is held, tables that a method keeps for a bucket. A program that treats one rank
    differently changes them there. So every rank shows them before each step, and a digest of these words is in the
    header of every frame. Where digests differ, the ranks' notes say in what.

    Attributes:
        shown: by name.
        digest: 64 bits that stand for all of it; 0 where nothing is shown.
        step: it is of.
    """

    def __init__(self) -> None:
        self.shown: dict[str, str] = {}
        self.digest = self.step = 0

    def show(self, name: str, value: object) -> None:
        """Show something, in place of what was shown by this name; None for nothing. Between two steps."""
        if self.shown.get(name) == (None if value is None else str(value)):
            return
        if value is None:
            del self.shown[name]
        else:
            self.shown[name] = str(value)
        text = json.dumps(self.shown, sort_keys=True).encode()
        self.digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def difference(shown: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Return in words what differs first between ranks, and what to do; None if nothing does.

    Args:
        shown: by rank.
    """
    for name in dict.fromkeys(name for each in shown.values() for name in each):
        values = {rank: str(each.get(name, _ABSENT)) for rank, each in sorted(shown.items())}
        if len(set(values.values())) > 1:
            advice = _OF_ALL if _ABSENT in values.values() else _ADVICE.get(name, _OF_OPTIONS)
            return f"{name} differs between ranks: {by_value(values)}; {advice}"
    return None


# ---- how gradients are handed over ---------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How one rank is about to hand over gradients: attached, or through Horovod's tokens; to which optimizer.

    A rank that uses tokens waits inside Horovod for those of the others, which an attached rank never sends. So the
    ranks compare their ways once, at the first gradient, while none of them waits for anything else.

    Attributes:
        name: of the compression; where first gradients may be of several, ranks may meet with different ones.
        attached: whether it needs no tokens.
        second_moment: whose the optimizer's is, in words.
        options: what else the optimizer does, by name, in words.
        sparse: the parameters whose gradients are known to be sparse.
    """

    name: str
    attached: bool
    second_moment: str
    options: Mapping[str, str] = field(default_factory=dict)
    sparse: Sequence[str] = ()


def check(ways: Sequence[Way]) -> None:
    """Compare the ways of all ranks; every rank comes to the same end.

    Raises:
        MismatchError: names the ranks that are attached, and those that are not; or what their optimizers do
            otherwise.
    """
    if len({way.name for way in ways}) > 1:
        return  # of several compressions, each with an optimizer of its own
    attached = [rank for rank, way in enumerate(ways) if way.attached]
    tokens = [rank for rank, way in enumerate(ways) if not way.attached]
    if attached and tokens:
        raise MismatchError(
            f"attach() was called on rank(s) {listed(attached)}, and not on rank(s) {listed(tokens)}; call "
            f"compression.attach(optimizer) on every rank, before the first backward pass, or on none"
        )
    shown = {rank: way.options for rank, way in enumerate(ways)}
    before = {rank: {name: each[name] for name in each if name != WHO_STEPS} for rank, each in shown.items()}
    if told := difference(before):
        raise MismatchError(told)
    check_sparse({rank: way.sparse for rank, way in enumerate(ways)})
    kinds = [way.second_moment for way in ways]
    if len(set(kinds)) > 1:
        other = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
        raise MismatchError(
            f"the second moment of the optimizer is {kinds[0]} on rank 0, and {kinds[other]} on rank {other}; give "
            f"every rank the same optimizer, with the same options of attach() or register(), and load the states of "
            "optimizer and compression on every rank or on none"
        )
    if told := difference(shown):  # who does the step may follow from whose the second moment is
        raise MismatchError(told)


# ---- whose gradients are sparse ------------------------------------------------------------------

_SPARSE = "sparse"
_POLL_SECONDS = 0.002


class Sparse:
    """Compares whose gradients are sparse: they are no part of an exchange, so no frame speaks of them.

    A rank that skips a bucket which another one exchanges would send frames of the next bucket, of another length. So a
    rank with sparse gradients leaves word of them, and skips none before all others have left theirs. One that has only
    dense gradients leaves no word; it sees that of the others while it waits for results.

    Args:
        seconds: waits for other ranks at most so long.

    Attributes:
        names: those of this rank's that are sparse.
    """

    def __init__(self, transport: Transport, seconds: float) -> None:
        self._transport, self._seconds = transport, seconds
        self.names: frozenset[str] = frozenset()

    def meet(self, step: int, names: frozenset[str], failed: Callable[[], object]) -> None:
        """Wait until all ranks have the same sparse gradients, where others than before are sparse.

        Args:
            failed: returns whether an exchange has failed, so that no more words will come.

        Raises:
            MismatchError: names the first that is not sparse on all ranks.
            ExchangeError: some rank has left no word in time.
        """
        if names == self.names:
            return
        self.names, end = names, time.monotonic() + self._seconds
        self._say(step)
        while True:
            found = self._said(step)
            check_sparse({rank: theirs for rank, (at, theirs) in found.items() if at == step})
            waits = [rank for rank in range(self._transport.size) if found.get(rank, (0, None))[1] != names]
            if not waits or failed():
                return
            if time.monotonic() > end:
                raise ExchangeError(
                    f"rank {self._transport.rank}: the gradients of {some_of(sorted(names))} are sparse, and "
                    f"rank(s) {listed(waits)} did not say within {self._seconds:g} s whether theirs are; look at "
                    "their output"
                )
            time.sleep(_POLL_SECONDS)

    def check(self, step: int) -> None:
        """Refuse to wait for ranks that have other sparse gradients in this step.

        Raises:
            MismatchError: see :meth:`meet`.
        """
        now = {rank: names for rank, (at, names) in self._said(step).items() if at == step}
        if any(names != self.names for names in now.values()):
            self._say(step)  # they wait for it
            check_sparse({**now, self._transport.rank: self.names})

    def refuse_dense(self, name: str) -> None:
        """Refuse a dense gradient of a parameter that had sparse ones.

        Raises:
            MismatchError: it is one.
        """
        if name in self.names:
            raise MismatchError(
                f"rank {self._transport.rank}: the gradient of {name} is dense, and was sparse before, on every rank; "
                "keep sparse= of its embedding as it is, and its weight out of other modules"
            )

    def _say(self, step: int) -> None:
        self._transport.say(_SPARSE, json.dumps([step, *sorted(self.names)]))

    def _said(self, step: int) -> dict[int, tuple[int, frozenset[str]]]:
        """Return what ranks have said last, up to a step, and in which one."""
        words = {rank: json.loads(word) for rank, word in self._transport.said(_SPARSE).items()}
        return {rank: (at, frozenset(names)) for rank, (at, *names) in words.items() if at <= step}


def check_sparse(found: Mapping[int, Collection[str]]) -> None:
    """Compare the parameters whose gradients are sparse.

    Args:
        found: by rank, of those that are known.

    Raises:
        MismatchError: names the first that differs, and the ranks.
    """
    for name in sorted({name for names in found.values() for name in names}):
        sparse = [rank for rank, names in sorted(found.items()) if name in names]
        if dense := sorted(found.keys() - set(sparse)):
            raise MismatchError(
                f"the gradient of {name} is sparse on rank(s) {listed(sparse)}, and dense or none on rank(s) "
                f"{listed(dense)}; give its embedding the same sparse= on every rank, and use it in the first step on "
                "every rank, or write sparse=False"
            )
