"""What compressions of torch's process groups have in common: the optimizer, and what ends a backward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from ...engine.agreement.notes import last_error
from ...engine.job import Job
from ...engine.optimizer.step_hooks import stepping
from ...engine.optimizer.taker import kinds_of, refuse_lists
from ...engine.reducer import Hooks
from ...errors import ConfigError
from ..compression import BaseCompression
from ..reports import Strangers
from ..session import Session, weakly
from ..update_options import TAKEN
from . import checks
from .job import TorchJob
from .unwrapped import Unwrapped

_log = logging.getLogger("horovod_compress")


class TorchCompression(BaseCompression):
    """A compression among the ranks of a process group; its fronts say which gradients these exchange."""

    _job: TorchJob
    _unwrapped: Callable[[], Unwrapped | None] = staticmethod(lambda: None)  # the module keeps it
    _strangers: Strangers
    _told = _registered = False
    _asked = False  # register() was called; where it has refused the model, its error has said so

    def _hooks(self, job: Job) -> Hooks:
        self._told = False
        return Hooks(job.check, weakly(self._tell))

    def _tell(self, failure: str) -> None:
        """Tell of a failure that the training thread has not come for: it may wait in a collective of torch's."""
        if not self._told:
            self._told = True
            _log.error("%s", failure)

    def _look(self) -> None:
        """Look for gradients that nobody is known to exchange, when all of a pass are there."""
        session = self._here()
        if not session.job.rank and session.job.size > 1:
            self._strangers.look()

    def _watch(self, module: nn.Module) -> None:
        """Tell of parameters that a module has got since, as by a new layer, and that nobody exchanges."""
        job = self._here().job
        if not job.rank and job.size > 1:
            self._closing.add(self._strangers.follow(module))

    # ---- the optimizer ----

    def _attach_all(self, optimizer: Any, **options: Any) -> None:
        """Attach what :meth:`register` was given: nothing, an optimizer, or several in a list."""
        if isinstance(optimizer, (list, tuple)):
            self.attach(*optimizer, **options)
        elif optimizer is not None:
            self.attach(optimizer, **options)

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
        """Register the optimizer that applies the results, or several; return it, or a tuple of them.

        Some methods need to know it: they share Adam's second moment between the ranks, make the first steps exact if
        the optimizer has momentum, or refuse momentum on top of their own. Without this call, the second moment is
        left to the optimizer.

        Args:
            optimizer: of ``torch.optim``, of the parameters that this compression was given.
            others: likewise; each has parameters of its own, and all make a step for each exchange.
            second_moment: "shared" updates that of Adam and its kin in exact rounds and holds it in between;
                docs/second_moment.md has the optimizers. "own" leaves it to the optimizer. "auto" is "shared" for
                these with methods that need it, else "own", with a warning if the optimizer keeps one that cannot be
                held.
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
            ConfigError: one has other parameters, or those of another, or divides its state among the ranks, or
                gradients were exchanged before.
        """
        refuse_lists((optimizer, *others))
        session, given = self._joined(), (optimizer, *others) if others else optimizer
        if not session:
            return given
        session.refuse_closed()
        if session.exchanges == "updates":
            raise ConfigError(TAKEN)
        steps = session.steps
        if session.compared:
            raise ConfigError(
                "call attach() before the first backward pass, on every rank, right after the optimizer is created; "
                "this compression has already exchanged gradients for "
                f"{kinds_of(steps.optimizers) or 'one that it does not know'}; "
                "for another optimizer, close() it, create another compression and register that"
            )
        optimizers = [stepping(each) for each in (optimizer, *others)]
        for each in optimizers:
            checks.refuse_sharded(each, own=second_moment == "own" or not _needs_held(session))
            checks.check_optimizer(each, [*steps.named, *session.others])
        steps.meet(optimizers, second_moment, warmup_steps, rebuild_every, match_norm=match_norm, step=step)
        return given

    def _is_attached(self) -> bool:
        session = self._here()
        if _needs_held(session) and not session.steps.met and session.reducer.rank == 0:
            _log.warning(
                "%s was given no optimizer: write compression.register(model, optimizer), or "
                "compression.attach(optimizer). Without it, Adam's second moment is computed from compressed "
                "gradients, and the exact first steps that momentum needs are left out",
                self.method,
            )
        return True

    def _why_unused(self, tells: bool) -> str | None:
        if (text := super()._why_unused(tells)) is None or not self._registered:
            return text
        return (
            f"{self.method} has compressed nothing: an optimizer makes a step with gradients that came by no "
            "backward() of the registered model, or within no_sync(), so each rank trains alone. torch.autograd.grad() "
            "calls no hooks: write loss.backward()"
        )

    # ---- the end ----

    def close(self) -> None:
        quiet = self._asked or self._job.forked() or last_error()  # an error says why nothing was trained
        if not quiet and (text := self._why_unused(True)):
            _log.warning("%s", text)  # no optimizer has made a step
        super().close()


def _needs_held(session: Session) -> bool:
    """Return whether some method learns better with a second moment that is held."""
    return any(divides != "never" for divides in session.reducer.buckets.divides().values())
