"""The compression object that Horovod's stock optimizer is given."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import horovod
import horovod.torch as hvd
from torch import Tensor

from ...engine.job import Job
from ...engine.optimizer.second_moment import names_of
from ...engine.optimizer.step_hooks import builds_state
from ...engine.optimizer.taker import refuse_lists
from ...engine.reducer import Hooks
from ...errors import ConfigError, ExchangeError, HorovodCompressError, NonFiniteError, some_of
from .. import factories
from ..compression import BaseCompression
from ..factories import RanksOption, add_factories, of_an_object
from ..fresh import FreshGradients
from ..session import Session, before_each_step, in_backward, weakly
from ..update_options import TAKEN
from . import gradients
from .gradients import (
    Finder,
    Handed,
    Tokens,
    leave_before_loading,
    leave_frozen,
    refuse_fewer,
    refuse_foreign,
    take_operation,
)
from .job import HorovodJob
from .private import (
    await_tokens,
    calling_optimizer,
    densified_parameter,
    end_all_waits,
    explain,
    forget_step,
    hand_over_rest,
    has_begun,
    in_join,
    results_due,
    waits_for_tokens,
)

if TYPE_CHECKING:
    from .factory_types import Factories
else:
    Factories = object  # the functions are added below

_log = logging.getLogger("horovod_compress")
_PRIVATE_API = "0.28."  # the Horovod versions whose private methods attach() was written for


class Compression(BaseCompression, Factories):
    """A compression for ``hvd.DistributedOptimizer(compression=...)``.

    Create one by the name of a method, ``Compression.marsit(model.named_parameters(), ...)``, after
    ``hvd.init()`` and on every rank; the ranks then compare their options.

    ``hvc.available()`` lists the methods; ``help(hvc.Compression.marsit)`` shows a method's options, and those of
    all methods, with their defaults.

    Raises:
        ConfigError: an option or the parameter list cannot work, on this or another rank.
        MismatchError: the ranks were given different options, parameters or versions.
        ExchangeError: not every rank arrived in time.
    """

    _job: HorovodJob
    _how_to_use = "an optimizer; write hvd.DistributedOptimizer(..., compression=compression)"
    _what_copies_lack = (
        "a copy of an optimizer of Horovod's has no compression: create compression and optimizer for the copied model"
    )
    _ranks_in_words = "process set"
    _logged = False
    _attached: Sequence[Any] = ()  # the optimizers that attach() was given
    _attached_with: tuple[Sequence[Any], dict[str, Any]]  # and its options
    _resets: Any = None  # what follows the resets of an elastic job, where its state has this compression
    _watched: tuple[Any, ...] = ()  # those that have our hooks
    _fresh: FreshGradients | None = None
    _settled = -1  # the step whose sparse gradients were looked for

    def _hooks(self, job: Job) -> Hooks:
        return Hooks(job.check, weakly(self._wake), in_join, exact_alone=True)

    def _begin(self, session: Session) -> None:
        reducer = session.reducer
        self._tokens, self._handed = Tokens(reducer.rank, reducer.world, len(reducer.plan.names())), Handed()
        self._renumber(session)
        if reducer.world > 1:
            self._fresh = FreshGradients(session.steps.parameters)
            self._closing.add(weakly(self._fresh.close))
        self._closing.add(before_each_step(weakly(self._know_at_step)))

    def _renumber(self, session: Session) -> None:
        self._settled = -1
        self._finder = Finder(session.steps.parameters, session.job.number)

    # ---- the resets of an elastic job ----

    def _current(self) -> Session:
        if self._resets is not None:
            self._resets.go_on()
        return self._session or self._here()

    def _restart(self, job: HorovodJob) -> None:
        """Connect other ranks once the session of before has ended; nothing is kept, and no optimizer known yet."""
        counters, self._job, self._logged = self._counters, job, False
        self._connect()
        self._counters.follow(counters)

    def _attach_again(self) -> None:
        """Let the optimizers that attach() was given take the results of these ranks, too."""
        session, (options, named) = self._here(), self._attached_with
        refuse_fewer(self._attached, session)
        self._meet(session, self._attached, *options, **named)
        take_operation(session.reducer, self._attached[0].op)
        session.attached = True

    def _check_update_step(self) -> None:
        self._current()
        if builds_state():
            raise ConfigError(
                "hvd.broadcast_optimizer_state() does not support an optimizer in update mode, whose state belongs to "
                "each rank; broadcast only the parameters, before the first step"
            )

    # ---- Horovod's contract ----

    @of_an_object
    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Accept a gradient; Horovod all-reduces the one-element token that this returns."""
        session = self._current()
        if session.exchanges == "updates":
            raise ConfigError(TAKEN)
        repeat = self._is_repeat(session, calling_optimizer(self))
        with self._tokens.whole_steps(self, session.failure.failed, session.steps.index):
            with session.lock:
                if not repeat:
                    self._begin_step()
                index = self._index_of(session, tensor)
                return self._tokens.of(index), tensor if repeat else (index, session.offer(index, tensor))

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return the result for a token; other tensors pass through."""
        if not isinstance(ctx, tuple):
            return tensor if ctx is None else ctx
        index, step = ctx
        op = getattr(calling_optimizer(self), "op", None)
        return self._result(self._here(), index, step, self._tokens.result_scale(tensor.item(), op))

    def attach(
        self,
        optimizer: Any,
        *others: Any,
        second_moment: str = "auto",
        warmup_steps: int | None = None,
        rebuild_every: int | None = None,
        match_norm: bool = True,
        step: str = "auto",
    ) -> Any:
        """Connect a stock optimizer without tokens, or several; return the optimizer, or a tuple of them.

        With one optimizer, the bits are the same as without it; of several, only the first would be known. It saves one
        tiny all-reduce per parameter, and failures of other ranks reach the training thread as :class:`ExchangeError`.
        It uses private methods of Horovod 0.28; with another version it leaves the optimizer unchanged.

        Call it on every rank or on none, before the first backward pass: the ranks compare this at the first gradient.

        Args:
            optimizer: what ``hvd.DistributedOptimizer(..., compression=compression)`` returned.
            others: likewise; each has parameters of its own, and all make a step for each exchange.
            second_moment: "shared" updates that of Adam and its kin in exact rounds and holds it in between;
                docs/second_moment.md has the optimizers. "own" leaves it to the optimizer. "auto" is "shared" for
                these with methods that need it, else "own", with a warning if the optimizer keeps one that cannot be
                held. "auto" also applies without ``attach()``.
            warmup_steps: with a shared second moment, number of exact rounds at the start; at least 1. None for 30, or
                20 with ``marsit`` and three values.
            rebuild_every: with a shared second moment, one round in this many is exact after that. None for the
                method's ``full_precision_every``, else 50; with ``marsit`` and three values, and no smaller
                ``full_precision_every``, for intervals that grow up to 100.
            match_norm: hand back compressed gradients with the norm of the exact mean, for clipping and for logs, and
                take that factor out again before the optimizer's step; see docs/clipping.md. False hands back what
                the method makes.
            step: who moves the weights. "auto": where the optimizer is SGD itself, or Adam or AdamW with a shared
                second moment, one kernel does in one pass what torch's step does, whose hooks run all the same; see
                docs/second_moment.md. "torch" leaves it to torch.

        Raises:
            ConfigError: an optimizer was created with another compression, process set or operation, or has parameters
                of another one, or all of them lack some of the compression's, or gradients were exchanged before.
        """
        refuse_lists(optimizers := (optimizer, *others))
        session, given = self._session, optimizers if others else optimizer
        if session and session.exchanges == "updates":
            raise ConfigError(TAKEN)
        if session and session.compared:
            raise ConfigError(
                "call attach() before the first backward pass, on every rank, right after "
                "hvd.DistributedOptimizer(...); this compression has already exchanged gradients; "
                "for another optimizer, create model, compression and optimizer again"
            )
        refuse_foreign(optimizers, self)
        for each in optimizers:
            self._check_same_ranks(each)
        if not session:
            return given
        refuse_fewer(optimizers, session)
        options = (second_moment, warmup_steps, rebuild_every), {"match_norm": match_norm, "step": step}
        self._meet(session, optimizers, *options[0], **options[1])
        if not horovod.__version__.startswith(_PRIVATE_API):
            _log.warning("Horovod %s is unknown to attach(); using the stock path instead", horovod.__version__)
            return given
        take_operation(session.reducer, optimizers[0].op)
        for each in optimizers:
            gradients.take_gradients(each, self)
        self._attached, session.attached, self._attached_with = optimizers, True, options
        return given

    def _why_unused(self, tells: bool) -> str | None:
        # Before its first step, Horovod's optimizer has yet to hand over what is missing; with one rank, it never does.
        alone = self._session is not None and self._session.reducer.world == 1
        return None if alone or calling_optimizer(self) is not None else super()._why_unused(tells)

    # ---- the optimizer ----

    def _is_attached(self) -> bool:
        session = self._here()
        optimizer = None if self._attached else calling_optimizer(self)
        if optimizer is not None:
            self._know(session, optimizer)
        return bool(self._attached)

    def _know_at_step(self, optimizer: Any) -> None:
        """Know an optimizer in time for a closure that makes the gradients within its first step."""
        if self._session is None or getattr(optimizer, "_compression", None) is not self or self._session.steps.met:
            return
        session = self._session
        exchanges = session.exchanges == "gradients" and session.reducer.world > 1 and not session.is_over()
        same = getattr(optimizer, "process_set", None) is self._job.process_set  # else it may exchange nothing here
        if exchanges and same and not builds_state():
            self._know(session, optimizer)

    def _know(self, session: Session, optimizer: Any) -> None:
        """Look at an optimizer without ``attach()``, before its first gradient."""
        self._check_same_ranks(optimizer)
        if not any(optimizer is other for other in self._watched):
            explain(optimizer, self._why_ended)
        if not session.steps.met:
            self._meet(session, [optimizer], "auto")

    def _meet(self, session: Session, optimizers: Sequence[Any], *options: Any, **named: Any) -> None:
        """Look at the optimizers that take the results."""
        steps = session.steps
        if (op := getattr(optimizers[0], "op", None)) in (hvd.Average, hvd.Sum):  # else the first token is refused
            take_operation(session.reducer, op)
        for optimizer in optimizers:
            # attach() may have refused an option before
            if not steps.met and not any(optimizer is other for other in self._watched):
                self._watched += (optimizer,)
                gradients.watch_steps(optimizer, lambda: self._here().reducer, names_of(session.others))
                leave_frozen(optimizer, lambda: self._here().steps.frozen)
                leave_before_loading(optimizer, self._leave_step)
        steps.meet(optimizers, *options, **named)

    def _check_same_ranks(self, optimizer: Any) -> None:
        """Refuse an optimizer of other ranks, some of which would wait for ranks that never come.

        Raises:
            ConfigError: names both process sets.
        """
        mine = self._job.process_set
        if getattr(optimizer, "process_set", mine) is not mine:  # that for Adasum has none
            raise ConfigError(
                f"rank {hvd.rank()}: the optimizer uses process set {optimizer.process_set}, the compression {mine}; "
                "give both the same process_set="
            )

    # ---- gradients ----

    def _index_of(self, session: Session, tensor: Tensor) -> int:
        """Return the index of the parameter whose gradient this is, or a dense copy of it."""
        index = self._finder.look(tensor, first=not session.under_way)
        if index is None and (parameter := densified_parameter(tensor)) is not None:
            index = session.steps.index.get(id(parameter))
        if index is None:
            raise ConfigError(self._finder.why_unknown(tensor))
        return index

    def _is_repeat(self, session: Session, optimizer: Any) -> bool:
        """Return whether this call belongs to a second synchronize() of an optimizer in the same step.

        ``step()`` after ``synchronize()`` without ``skip_synchronize()`` hands every result over
        once more. All ranks hold the same results then, so they are their own mean; reducing them
        again would corrupt the residuals. Horovod marks the optimizer in between, but also where the program has left
        the step out: its gradients are others then, or cleared.
        """
        if in_backward():  # first: every gradient asks
            return False
        waits = session.under_way and len(self._attached) < 2  # of several, others' results may not be fetched yet
        if waits or optimizer is None or not optimizer._synchronized or has_begun(optimizer):
            return False
        return self._handed.repeat(optimizer._requires_update)

    def _settle(self, session: Session, step: int) -> None:
        """Before the first result of a step, hand over the rest of it."""
        if session.under_way and self._settled != step:
            self._settled = step
            for optimizer in self._attached if len(self._attached) > 1 else ():
                hand_over_rest(optimizer)  # a bucket may have parameters of several
            self._skip_sparse(session, step)

    def _result(self, session: Session, index: int, step: int, result_scale: float | None = None) -> Tensor:
        try:
            self._settle(session, step)
            result = session.result(index, step, result_scale)
            self._handed.note(session.steps.parameters[index])
            return result
        except HorovodCompressError as error:
            for optimizer in self._attached or filter(None, [calling_optimizer(self)]):
                if isinstance(error, NonFiniteError):  # on all ranks alike, and training may go on
                    await_tokens(optimizer)
                forget_step(optimizer)
            raise

    def _skip_sparse(self, session: Session, step: int) -> None:
        """Count in the parameters whose gradients Horovod reduces itself, as they are sparse."""
        reducer = session.reducer
        reducer.settle(step - 1)  # a bucket of sparse gradients only is awaited by nobody else
        missing, of = set(reducer.missing(step)), zip(reducer.plan.names(), session.steps.parameters, strict=True)
        sparse = [at for at, (name, p) in enumerate(of) if name in missing and p.grad is not None and p.grad.is_sparse]
        session.skip_sparse(sparse, step)

    def _leave_step(self, optimizer: Any) -> bool:
        """Give up a step whose results an optimizer does not fetch; return whether it was exchanged on all ranks."""
        session = self._here()
        if not session.under_way:
            return False
        reducer, rank = session.reducer, session.job.number
        try:
            self._skip_sparse(session, session.step)
            if missing := reducer.missing(session.step):  # it would wait for them in vain
                raise ConfigError(
                    f"rank {rank}: the optimizer's load_state_dict() was called during an exchange, with "
                    f"{len(missing)} gradient(s) still missing ({some_of(missing)}); call the optimizer's "
                    "synchronize() first, on every rank"
                )
            if not reducer.wait_idle(reducer.options.longest_seconds):
                raise ExchangeError(f"rank {rank}: an exchange did not end before load_state_dict()")
        except ConfigError:
            raise
        except HorovodCompressError:  # it has failed and is over
            session.under_way = 0
            return False
        # Others may yet fetch theirs, for which nothing more is to be handed over.
        session.under_way = sum(results_due(other) for other in self._attached if other is not optimizer)
        self._settled = session.step
        return True

    # ---- failures ----

    def _wake(self, failure: str) -> None:
        """Tell of a failure that the training thread has not come for, as it may be in Horovod.

        Horovod waits for the tokens of a silent rank without limit, and has no other way to call a wait
        off than to shut down, on all ranks. Its error then says nothing of the reason.
        """
        joined = in_join()
        waits_for_us = bool(self._attached) or (self._session and self._session.exchanges == "updates")
        if self._job.run.replaced() or (waits_for_us and not joined):
            return  # it waits for our results only
        if not self._logged:
            self._logged = True
            _log.error("%s", failure)
        if joined or waits_for_tokens(self):
            end_all_waits()

    def _why_ended(self, optimizer: Any, said: str) -> HorovodCompressError | None:
        """Return the error for the end of Horovod in the middle of a step, None where nothing is known."""
        session = self._here()
        found = session.failure.call_off(f"Horovod has ended and says {said!r}")
        if found is not None:
            session.under_way = 0  # nobody fetches the other results of this step
            forget_step(optimizer)
        return found


add_factories(
    Compression,
    RanksOption("process_set", hvd.global_process_set, factories.PROCESS_SET, HorovodJob),
    refused=("compress", "decompress", "attach", "follow"),
)
