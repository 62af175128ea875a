"""What a compression does through the resets of an elastic job: it goes on among other ranks, with what waits.

All ranks of before pool what waits if some are about to leave; if one has failed, each goes back to the last commit.
After the reset they connect again, rank 0 gives new ranks what is equal on all, and each takes its share of what waits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from ...engine.saved import checksums
from ...engine.saved.redistribute import Carried, common_of, pooled, resized
from ...errors import ConfigError, ExchangeError, HorovodCompressError, NonFiniteError
from ..gather import COMMIT, ELASTIC
from ..scale import Scale
from ..session import Session
from .compression import Compression
from .job import HorovodJob, add_up, broadcast
from .neighbour import Neighbour, on_host

#: Broadcast or add up so many bytes at once.
_PIECE = 1 << 28

_log = logging.getLogger("horovod_compress")

State = dict[str, Any]


@dataclass(frozen=True)
class _Shown:
    """What a rank shows the others when they meet after a reset.

    Attributes:
        member: it was there before.
        step: that it would go on at.
        pooled: it has what waited on all ranks of before.
        rank, world: those of before.
        summed: results are sums over ranks.
        norms: of what waited on all ranks of before, at the last commit, as far as they are known.
        holds: of which rank it has a copy, see :mod:`.neighbour`; -1 for none.
        committed: the step of its last commit.
        scaler: the state of the gradient scaler that is followed.
    """

    member: bool
    step: int
    pooled: bool
    rank: int
    world: int
    summed: bool
    norms: Sequence[float]
    holds: int
    committed: int
    scaler: Mapping[str, Any]


class Resets:
    """What one compression does through the resets of its job.

    Args:
        copies: neighbours hold copies of what waits.
    """

    def __init__(self, compression: Compression, *, copies: bool = False) -> None:
        session = compression._here()
        if compression._job.process_set is not hvd.global_process_set:
            raise ConfigError(
                "an elastic state takes a compression of all ranks: Horovod's other process sets end at a reset"
            )
        if session.reducer.options.exchange == "hierarchical":
            raise ConfigError(
                'exchange="hierarchical" keeps what waits in shares of hosts, which change in an elastic job: use '
                'exchange="auto"'
            )
        self._compression, self._lock = compression, threading.RLock()
        self._committed = self._state()  # as a failure would restore it
        self._before: State = self._committed  # what this rank goes on with after a reset
        self._pooled: State | None = None  # likewise, of all ranks of before together
        self._scaler = self._scale().scaler_state()  # at the last commit
        self._norms: list[float] = []  # of what waited on all ranks then
        self._coming: list[float] | None = None  # at the next one, which all ranks have shown
        self._neighbour, self._copies = Neighbour(), copies
        self._due = self._member = False
        self._late = False  # it has joined since the last commit of the others
        self._unloaded = False  # ranks are connected, and have not begun to go on
        compression._resets = self

    # ---- what a state calls ----

    def save(self) -> None:
        """Copy all that is kept to host memory, in the place of the last copy."""
        coming, self._coming = self._coming, None
        if not self._due:
            if coming is None:
                self._compression._saved.settle()
            self._committed = self._before = {}  # one copy at a time: if there is no memory for it, there is none then
            self._before = self._copied()
            self._scaler = self._scale().scaler_state()
        self._committed, self._norms = self._before, coming or []
        if coming is not None and not self._is_due():
            self._neighbour.take()
        else:  # nothing was shown of it
            self._neighbour.forget()
        self._late = False

    def restore(self) -> None:
        """Go back to the last commit, as soon as ranks are together again.

        Raises:
            ConfigError: this rank has failed to make it.
        """
        self._before, self._coming = self._last_commit(), None
        self._member = self._member and not self._late  # the others go back to where it was not there
        if self._pooled is not None and self._pooled["step"] != self._before["step"]:
            self._pooled = None
        self._end_session()
        self._scale().load_scaler(self._scaler)

    def go_on(self) -> None:
        """At a gradient: after a reset, connect the ranks that are there, and share what waits."""
        if self._is_due():
            with self._lock:
                if self._is_due():
                    for _, meet in self.meetings():
                        meet()
                    self.sync()

    def meetings(self) -> list[tuple[int, Callable[[], None]]]:
        """Return what ranks have to meet for after a reset, numbered as in the program, by which new ranks meet."""
        if not self._is_due():
            return []
        found = [(self._compression._number, self._connect)]
        if (optimizer := self._compression._here().updating) is not None:
            found.append((optimizer._number, partial(self._agree, optimizer)))
        return found

    def _connect(self) -> None:
        """Connect the ranks that are there; they have nothing yet."""
        if not self._due:  # nobody has said before that there would be a reset
            self._before, self._pooled = self._state_or_committed(), None
            self._end_session()
        compression, before = self._compression, self._compression._here()
        compression._restart(HorovodJob(hvd.global_process_set, goes_on=True))
        compression._here().updating = before.updating
        if (scaler := before.steps.scale.scaler) is not None:
            compression._here().steps.scale.follow(scaler)
        self._due, self._unloaded = False, True

    def _agree(self, optimizer: Any) -> None:
        """Let the optimizer in update mode go on among these ranks."""
        optimizer._go_on(self._compression, self._compression._here())

    def sync(self) -> None:
        """Let all ranks go on together, each with its share of what waited.

        Raises:
            ExchangeError: some rank did not come; all go back to the last commit.
        """
        session = self._compression._here()
        if not self._unloaded:
            self._before, self._pooled = self._state(), None
        mine, before = self._pooled or self._before, self._before
        shown = _Shown(
            self._member, before["step"], self._pooled is not None, before["rank"], before["world"], self._is_summed(),
            self._norms, self._neighbour.rank, self._committed.get("step", -1), self._scale().scaler_state(),
        )  # fmt: skip
        found = [_Shown(**each) for each in session.gather(asdict(shown), f"{ELASTIC}.sync")]
        stays = _who_stays(found)
        self._scale().load_scaler(found[0].scaler)
        if self._unloaded or not all(stays):
            self._take(self._share(session, mine, found, stays))
        at = self._compression._here().reducer.step
        if all(each.committed == at for each, stay in zip(found, stays, strict=True) if stay):
            self.begin_commit()
            self.save()  # as of the same commit, among these ranks
        elif not stays[session.reducer.rank]:
            self._committed, self._late = self._state(), True
        self._before, self._pooled = self._committed, None
        self._member, self._unloaded, self._compression._job.goes_on = True, False, False

    # ---- before ranks leave ----

    def part(self) -> None:
        """On all ranks, of which some are about to leave: pool what waits, and close the connections.

        Raises:
            ExchangeError, HorovodInternalError: some rank has failed; all go back to the last commit.
        """
        if self._is_due():
            return  # nothing was exchanged since they parted
        session, compression = self._compression._here(), self._compression
        if (optimizer := session.updating) is not None:
            with contextlib.suppress(NonFiniteError):  # on all ranks alike, whose weights are the common ones then
                optimizer.flush()  # what each rank has moved on its own
        kept = session.reducer.kept
        waiting = kept.withholding.waiting()
        counts = {name: tensor.numel() for name, tensor in waiting.items()}
        found = session.gather([bool(session.under_way), counts], f"{COMMIT}.parting")
        if any(under_way for under_way, _ in found):
            raise ExchangeError(
                f"rank {session.job.number}: hosts change while a step is under way; the job goes back to its last "
                "commit. Call commit() and check_host_updates() between two steps"
            )
        self._before = self._state()
        every = {name: count for _, theirs in found for name, count in theirs.items()}
        methods = session.methods
        self._pooled = pooled(self._before, self._add_up, len(found), methods.folded(), methods.coded(), every)
        session.gather(None, f"{COMMIT}.pooled")  # all have it
        self._end_session()
        if compression._here().reducer.rank == 0:
            _log.info("hosts change: what waits on %d rank(s) was shared among all of them", len(found))

    def _add_up(self, tensor: Tensor) -> None:
        """Let a tensor be its sum over ranks."""
        job, seconds = self._compression._job, self._compression._here().reducer.options.longest_seconds
        pieces = tensor.split(_PIECE // tensor.element_size()) if job.size > 1 and tensor.numel() else ()
        for number, piece in enumerate(pieces):
            add_up(piece, f"{ELASTIC}.{tensor.dtype}.{number}", job.process_set, seconds)

    def begin_commit(self) -> None:
        """Show the other ranks how much :meth:`save` is about to keep, so that they know what is lost with this one.

        And give it a copy, where ranks hold copies. Where one of them fails meanwhile, all go back to the commit of
        before, and have what belongs to that.
        """
        if self._is_due():
            return
        self._compression._saved.settle()
        session = self._compression._here()
        kept, size = session.reducer.kept, 0
        if self._copies:
            size = self._neighbour.prepare({"state": kept.whole(), "waiting": kept.withholding.waiting()})
        norm = kept.residual_norm(session.steps.divisors())
        found = session.gather([norm, size, int(hvd.local_size())], f"{COMMIT}.commit")
        sizes = [size for _, size, _ in found]
        if bool(min(sizes)) != bool(max(sizes)):
            raise ConfigError("some ranks were given neighbour_copy=True and some not; give all ranks the same")
        if self._copies:
            on_a_host = max(local for *_, local in found)
            ahead = on_a_host if on_a_host < len(found) else 1  # Horovod gives up the whole host of a rank that dies
            self._neighbour.exchange(sizes, ahead, self._compression._job, session.reducer.options.longest_seconds)
            session.gather(None, f"{COMMIT}.copies")  # all have theirs
        self._coming = [norm for norm, *_ in found]

    def end_commit(self) -> None:
        """What was shown is of one commit, also of one that did not come about."""
        self._coming = None

    # ---- what goes on ----

    def _share(self, session: Session, mine: State, found: Sequence[_Shown], stays: Sequence[bool]) -> State:
        """Return the state with which this rank goes on."""
        rank, (owned, coded) = session.reducer.rank, (session.methods.folded(), session.methods.coded())
        all_pooled = all(each.pooled for each, stay in zip(found, stays, strict=True) if stay) and any(stays)
        whole: Mapping[str, Any] = mine
        if not all_pooled:
            mine = self._before
            whole = common_of(mine, coded)
        if not all(stays) or len({each.step for each in found}) > 1:
            whole = self.received(whole if rank == 0 else None)
        before, now = mine["world"] if stays[rank] else found[0].world, len(found)
        less, more = before / now, now / before  # residuals enter a mean over ranks, or a sum
        summed = found[0].summed
        if all_pooled:
            scale = less if summed else 1.0
            carried = Carried(scale, scale if rank == 0 else 0.0, owned, coded)
            kept: Mapping[str, Any] | None = mine if stays[rank] else whole
        else:
            carried = Carried(1.0 if summed else more, less if summed else 1.0, owned, coded)
            kept = mine if stays[rank] else None
            if stays[rank] and self._neighbour.rank in _gone(found, stays):
                kept = self._neighbour.added_to(mine)
            self._tell_lost(found, stays)
        self._compression._saved.load(whole, "reset")  # its plan, for the shapes of what follows
        return resized(self._state(), kept, whole, carried)

    def _take(self, state: State) -> None:
        compression = self._compression
        compression._saved.load(state, "restore")
        compression._renumber(compression._here())
        if compression._attached and not compression._here().steps.met:
            compression._attach_again()

    def received(self, state: Mapping[str, Any] | None) -> State:
        """Return the state that rank 0 gives."""
        compression = self._compression
        session, group = compression._here(), compression._job.process_set
        memory = bytearray()
        for part in checksums.parts(state) if state is not None else ():
            memory += part
        size = session.gather(len(memory), f"{ELASTIC}.size")[0]
        memory = memory or bytearray(size)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        for number, at in enumerate(range(0, size, _PIECE)):
            piece = tensor[at : at + _PIECE]
            broadcast(piece, f"{ELASTIC}.state.{number}", group, session.reducer.options.longest_seconds)
        return checksums.parse(memory)

    def _tell_lost(self, found: Sequence[_Shown], stays: Sequence[bool]) -> None:
        """Say how much was lost with ranks that are gone."""
        before, held = found[0], {each.holds for each, stay in zip(found, stays, strict=True) if stay}
        gone = sorted(_gone(found, stays) - held)
        if not gone or not before.member:
            return
        known = [norm if rank in gone else 0.0 for rank, norm in enumerate(before.norms)]
        rest = math.hypot(*(norm for rank, norm in enumerate(before.norms) if rank not in gone))
        lost = math.hypot(*known)
        self._compression._counters.lost(lost)
        if (lost or not before.norms) and self._compression._here().reducer.rank == 0:
            _log.warning(
                "rank(s) %s of %d are gone, and with them residual that was not sent: %s",
                *(", ".join(map(str, gone)), before.world),
                f"its norm was {lost:.3g} at the last commit, that of the others {rest:.3g}" if before.norms else
                "its norm is not known",
            )  # fmt: skip

    # ---- small things ----

    def _is_due(self) -> bool:
        """Return whether ranks have to connect again."""
        return self._due or self._compression._job.run.replaced()

    def _is_summed(self) -> bool:
        return any(getattr(optimizer, "op", None) == hvd.Sum for optimizer in self._compression._watched)

    def _scale(self) -> Scale:
        return self._compression._here().steps.scale

    def _state(self) -> State:
        """Return a copy of all that is kept, in host memory."""
        self._compression._saved.settle()
        return self._copied()

    def _copied(self) -> State:
        return on_host(self._compression._saved.copied(partial(Tensor.to, device="cpu", copy=True)))

    def _state_or_committed(self) -> State:
        try:
            return self._state()
        except HorovodCompressError:  # a step has failed, or is under way
            return self._last_commit()

    def _last_commit(self) -> State:
        if not self._committed:
            raise ConfigError(
                f"rank {self._compression._job.number}: the job goes back to its last commit, of which this rank "
                "should have a copy, and has none: its commit() raised an error while it copied, for example because "
                "memory ran out. Let that error end the rank, so that another one takes its place, or commit() again"
            )
        return self._committed

    def _end_session(self) -> None:
        """Close the connections, which others may take for a failure else; leave the optimizers to torch alone."""
        if self._due:
            return
        self._due = True
        compression = self._compression
        session = compression._here()
        session.under_way = 0  # nobody fetches the results of a step that was given up
        if (optimizer := session.updating) is not None:
            optimizer._updates.give_up()
        compression._closing.close()
        session.steps.release()


def _who_stays(found: Sequence[_Shown]) -> list[bool]:
    """Return which ranks go on with what they have.

    Those that were there before do. One of them may have come to its last commit before a failure, and others not: what
    waits on those is of a step before, which is closer than nothing. Rank 0, whose weights all get, may be new itself.
    """
    if found[0].member:
        return [each.member for each in found]
    return [not each.member and each.step == found[0].step for each in found]


def _gone(found: Sequence[_Shown], stays: Sequence[bool]) -> set[int]:
    """Return the ranks of before that are not there any more."""
    return set(range(found[0].world)) - {each.rank for each, stay in zip(found, stays, strict=True) if stay}
