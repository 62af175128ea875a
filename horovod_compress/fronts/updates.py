"""Update mode: local optimizer steps, then the ranks' weight updates are exchanged instead of gradients.

    base = weights                                  at the first of n local steps
    weights = local optimizer step                  n times, on this rank's own gradients
    weights = base + mean over ranks of C(weights - base)

Sparse Binary Compression and Marsit are themselves formulated this way: what the optimizer makes of a gradient
(momentum, weight decay, learning rate) is compressed, not the gradient itself. ``n``, the communication delay, divides
the bytes once more. With an outer optimizer, that one steps on the base, with the mean as its gradient (DiLoCo).
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..engine.optimizer.family import options_of
from ..engine.optimizer.local_steps import Schedule, Settings
from ..engine.optimizer.outer import Factory, Outer
from ..engine.optimizer.step_hooks import calls_hooks, in_words, uncompiled
from ..engine.optimizer.update_moment import SharedSecondMoment
from ..engine.optimizer.updates import UpdateExchange
from ..errors import ConfigError, NonFiniteError
from .session import Session, meetings
from .update_options import UpdateOptions, agree, in_plan_order, settings_of

STATE_KEY = "horovod_compress"
_OF_TORCH, _FRAMES = "torch.distributed.checkpoint.state_dict", 10
_OF_OPTIMIZERS = {"_get_optim_state_dict", "_init_optim_state"}


def distributed_update_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    compression: Any,
    communication_delay: int | None = None,
    *,
    outer_optimizer: Factory | Mapping[str, Any] | None = None,
    warmup_exchanges: float = 0,
    overlap: int | None = None,
    fragments: int = 1,
    mixing: float = 1.0,
    clip: str | None = None,
    second_moment: str = "auto",
    warmup_steps: int | None = None,
    rebuild_every: int | None = None,
    momentum_masking: bool = True,
    replicate: Any = None,
) -> torch.optim.Optimizer:
    """Make an optimizer take local steps and exchange weight updates, and return it; call this on every rank.

    It is used as before: the same class, parameter groups and state. Weight decay, gradient clipping
    and momentum act locally, before the exchange. Learning-rate schedules count local steps. Buffers,
    such as BatchNorm's, belong to each rank, as under Horovod. ``flush()`` exchanges what local steps
    have done since the last exchange. With one rank, the optimizer is unchanged.

    Args:
        optimizer: a plain optimizer of ``torch.optim``, not one of Horovod's.
        named_parameters: the parameters of the optimizer, as given to the compression.
        compression: a compression that nothing else uses.
        communication_delay: local steps between exchanges; by default what the compression's preset
            says, else 1.
        outer_optimizer: makes the optimizer that steps on the common weights, with the exchanged mean update as
            gradient, such as ``functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``, whose
            options alone will do, too. It is ``outer`` of what is returned. With several local steps, methods then
            have full-precision rounds only if more of them are asked for than one in 50. None adds the mean update as
            it is (Douillard et al. 2023, DiLoCo, algorithm 1).
        warmup_exchanges: number of local steps at the start that are each exchanged, without the outer optimizer, or
            with the compression's ``total_steps=`` a share of these, below 1.
        overlap: local steps that go on while an exchange is under way, before its result is applied; 0 waits for it.
        fragments: parts of the weights, whole buckets, that are exchanged by turns within the delay, one at a time
            (Douillard et al. 2025, Streaming DiLoCo, section 2.2).
        mixing: what part of the way weights go towards the common ones in an exchange; 1 for all of it.
        clip: "median" makes an update that is longer than the median of the ranks' as short as that before it is
            sent, so that one rank with bad data does not spoil the rest; ranks meet for it before each exchange.
        second_moment: of Adam and AdamW: "shared" updates it from the mean gradient over ranks, in
            full-precision rounds only; "own" leaves it to each rank; "auto" shares it with marsit, if there is no outer
            optimizer.
        warmup_steps: with a shared second moment, number of initial steps with uncompressed gradients;
            at least 1, by default 30.
        rebuild_every: with a shared second moment, the number of exchanges from one full-precision
            round to the next; by default that of the method, else 50.
        momentum_masking: whether to reset momentum to 0 where this rank's update was sent, with methods
            that send only some elements.
        replicate: for a model that ``fully_shard`` divides, with a compression of :mod:`horovod_compress.fsdp`: the
            dimension of the mesh along which it is replicated. Each rank exchanges its shard then.

    Raises:
        ConfigError: these do not fit together, or differ between ranks; it says what would fit.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or not calls_hooks(optimizer):
        raise ConfigError(
            f"the optimizer should be one of torch.optim, such as SGD, got {in_words(optimizer)}; of a wrapper, give "
            "the optimizer that it wraps"
        )
    if isinstance(compression, type) or not callable(getattr(compression, "_for_updates", None)):
        raise ConfigError(
            f"compression should be what hvc.Compression.marsit(model.named_parameters()) or another method's function "
            f"returns, got {compression!r:.200}"
        )
    session: Session | None = compression._for_updates(replicate)
    if session is None:
        return optimizer  # a rank outside the process set trains by itself, as under Horovod
    session.refuse_closed()
    given = UpdateOptions(
        communication_delay, outer_optimizer, warmup_exchanges, overlap, fragments, mixing, clip, second_moment,
        warmup_steps, rebuild_every, momentum_masking,
    ).completed(compression.method)  # fmt: skip
    norms = (lambda norm: _norms_of_all(compression._here(), norm)) if given.clip else None
    settings, exchange = _agreed(optimizer, list(named_parameters), session, given, norms)
    return _wrapped(optimizer, compression, session, exchange, settings)


def _agreed(
    optimizer: torch.optim.Optimizer,
    named_parameters: list[tuple[str, nn.Parameter]],
    session: Session,
    given: UpdateOptions,
    norms: Callable[[float], list[float]] | None,
) -> tuple[Settings, UpdateExchange]:
    """Return the options and what exchanges by them, once all ranks are known to have the same ones.

    Raises:
        ConfigError, MismatchError: some rank refuses, or the ranks differ.
    """
    problem, settings, exchange, options = None, None, None, options_of(optimizer)
    try:
        settings = settings_of(optimizer, session, given)
        parameters = in_plan_order(optimizer, named_parameters, session)
        exchange = UpdateExchange(session.reducer, parameters, settings.masking, settings.mixing, norms)
        if given.outer_optimizer is not None:
            exchange.outer = Outer(given.outer_optimizer, exchange.base)
            if settings.delay > 1:  # residuals that come all at once cost learning there, and bytes
                exchange.kind = "compressed"
            options |= exchange.outer.shown()
    except ConfigError as error:
        problem = str(error)
    agree(session, settings, options, problem)
    assert settings is not None and exchange is not None
    return settings, exchange


def _norms_of_all(session: Session, norm: float) -> list[float]:
    """Return the norm of every rank's update; where ranks have shards of one, of all that these make up."""
    row = session.job.row
    with session.calling_off(purpose := "hvc.clip"):
        shards, found = row.size if row else 1, session.gather_all(norm, purpose)
    return [math.hypot(*found[at : at + shards]) for at in range(0, len(found), shards)]


def _wrapped(
    optimizer: torch.optim.Optimizer, compression: Any, session: Session, exchange: UpdateExchange, settings: Settings
) -> torch.optim.Optimizer:
    """Return the optimizer as one of update mode. From now on the session refuses gradients."""
    kind: Any = type(f"Update{type(optimizer).__name__}", (UpdateMode, type(optimizer)), {})
    made = kind.__new__(kind)
    made.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    named = dict(zip(session.reducer.plan.names(), exchange.parameters, strict=True))
    moment = SharedSecondMoment(made, named) if settings.shared else None
    made._updates = Schedule(made, exchange, settings, moment)
    made._number = next(meetings)
    made._serve(compression, session)
    made._check_caller = compression._check_update_step
    made._compression = compression
    made._last_hook = made.register_step_pre_hook(uncompiled(partial(_before_step, made))).id
    # Before the exchange, if one follows. And the compression is in use as long as the optimizer.
    made.register_step_post_hook(uncompiled(lambda *given: compression._counters.reports.look()))
    return made


def _before_step(made: Any, stepped: torch.optim.Optimizer, *given: object) -> None:
    """Before a local step: the optimizer that was given has the same hooks, and is easily taken for the one returned.

    Raises:
        ConfigError: it makes a step, whose update nobody would exchange.
    """
    session, updates = made._compression._session, made._updates
    if stepped is made:
        updates.prepare()
    elif not isinstance(stepped, UpdateMode) and session and not session.is_over() and not _called_by_torch():
        made._check_caller()  # it has its own words for some
        raise ConfigError(
            "this optimizer was given to DistributedUpdateOptimizer, which returned another one: write optimizer = "
            "hvc.DistributedUpdateOptimizer(optimizer, ...), and use only that; nothing exchanges the steps of this one"
        )


def _left_out(groups: Iterable[dict[str, Any]], exchanged: Container[Any]) -> str | None:
    """Return in words a parameter that is stepped with this rank's own gradient, None if there is none.

    Args:
        groups: of an optimizer.
        exchanged: the parameters whose updates ranks exchange.
    """
    for number, group in enumerate(groups):
        for place, parameter in enumerate(group["params"]):
            if parameter not in exchanged and parameter.requires_grad and parameter.grad is not None:
                return f"parameter {place} of group {number}, of shape {tuple(parameter.shape)},"
    return None


class UpdateMode:
    """Put before an optimizer's class: its own ``step`` becomes the local step."""

    _updates: Schedule
    _number: int  # of the meeting in which its ranks agreed
    _planned: frozenset[nn.Parameter]  # those that are exchanged; none with one rank
    _last_hook: int
    _check_caller: Callable[[], None]  # refuses a step that is none
    _compression: Any
    _stepping = False  # also in what comes before and after the step of its own class, which torch knows of
    _agree: Callable[[NonFiniteError | None], NonFiniteError | None]  # with ranks that have other shards
    _optimizer_step_pre_hooks: OrderedDict[int, Any]
    param_groups: list[dict[str, Any]]
    #: A gradient scaler then calls ``step`` even if this rank's gradients overflowed: ranks stay in step.
    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one local step, and the exchange with the other ranks if it is due.

        Raises:
            ConfigError: a parameter needs a gradient that was frozen when the compression was made.
            ExchangeError: another rank failed or is late; the weights are those after the last
                exchange that this rank finished.
            NonFiniteError: an update, or in the warm-up a gradient, is not finite on some rank; see
                the text for what was set back.
        """
        both = [name for name in ("grad_scale", "found_inf") if name in self.__dict__]
        scaler: dict[str, Any] = {name: self.__dict__.pop(name) for name in both}
        if _called_by_torch():
            return None  # what follows is refused
        self._check_caller()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._planned and (found := _left_out(self.param_groups, self._planned)):
            raise ConfigError(
                f"{found} now needs a gradient but is not exchanged, because it was frozen when the compression was "
                "created; create the compression while it needs a gradient, and freeze it later"
            )
        skip = bool(scaler.get("found_inf") is not None and scaler["found_inf"] > 0)
        if not skip and (scale := scaler.get("grad_scale")) is not None:
            for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
        self._together(partial(self._updates.step, self._local_step, skip, scaled="found_inf" in scaler))
        self.__dict__.update(scaler)  # the scaler removes them itself, but not after an error
        return loss

    def _serve(self, compression: Any, session: Session) -> None:
        """Let a session, whose ranks have agreed, exchange the updates of this optimizer, and no gradients."""
        reducer = session.reducer
        session.exchanges, session.unused = "updates", False
        reducer.sum_up(False)
        compression._counters.reports.updates = True
        if session.steps.tuner:
            session.steps.tuner.stop()
        session.updating = self
        self._planned = frozenset(session.steps.parameters if reducer.world > 1 else ())
        self._agree = session.agree

    def _go_on(self, compression: Any, session: Session) -> None:
        """After a reset of an elastic job, go on with the ranks of another session.

        Raises:
            ConfigError: they have other options.
        """
        agree(session, self._updates.settings, None, None)
        self._updates.go_on(session.reducer)
        self._serve(compression, session)

    # The local step calls the hooks; torch would wrap this method too when a state is loaded.
    step.hooked = True  # type: ignore[attr-defined]

    def _local_step(self) -> None:
        self._optimizer_step_pre_hooks.move_to_end(self._last_hook)  # others may change gradients
        super().step()  # type: ignore[misc]

    def flush(self) -> None:
        """Exchange what local steps have done since the last exchange; every rank has to.

        After it all ranks have the same weights: at the end of training, or before an evaluation.
        """
        self._together(self._updates.flush)

    @torch.no_grad()
    def _together(self, do: Callable[[], object]) -> None:
        """Do what may find values that are not finite; all ranks raise the same error then, whatever shard they have.

        Raises:
            NonFiniteError: some value is not finite on some rank.
        """
        mine, self._stepping = None, True
        try:
            do()
        except NonFiniteError as error:
            mine = error
        finally:
            self._stepping = False
        if found := self._agree(mine):
            raise found

    @property
    def outer(self) -> torch.optim.Optimizer | None:
        """The outer optimizer, for a schedule of its rate, which counts exchanges; None if there is none."""
        made = self._updates.outer
        return made.optimizer if made else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the plan of exchanges is made already.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "add parameter groups before you create DistributedUpdateOptimizer, which plans its exchanges then"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and of the exchange; each rank saves its own.

        Raises:
            ConfigError: somebody asks for it who leaves the exchange out.
        """
        if _called_by_torch():
            raise ConfigError(
                "torch.distributed.checkpoint leaves out what an optimizer in update mode has to save of its exchange: "
                "save optimizer.state_dict() itself, on each rank"
            )
        state = self._state()
        self._updates.saved = True
        return state

    def _state(self) -> dict[str, Any]:
        return {**super().state_dict(), STATE_KEY: self._updates.state_dict()}  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; load the model as well.

        Raises:
            ConfigError: the state is not of an update-mode optimizer, or of another model.
        """
        if STATE_KEY not in state_dict:
            raise ConfigError(
                "this state was not saved by a DistributedUpdateOptimizer, or not all of it: load that of a plain "
                "optimizer into it before you wrap it, and save optimizer.state_dict() itself"
            )
        rest = {name: part for name, part in state_dict.items() if name != STATE_KEY}
        self._updates.check(state_dict[STATE_KEY])
        groups = self.param_groups
        super().load_state_dict(rest)  # type: ignore[misc]
        # A schedule made with the optimizer as it was before it was wrapped looks into this list.
        groups[:] = self.param_groups
        self.param_groups = groups
        self._updates.load_state_dict(state_dict[STATE_KEY])


def _called_by_torch() -> bool:
    """Return whether a part of torch calls that saves what torch's own optimizers have, and drops the rest.

    It also makes a step, for an optimizer without state, with rates of 0 that it restores afterwards.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is not None and frame.f_code.co_name in _OF_OPTIMIZERS:
            return bool(frame.f_globals.get("__name__") == _OF_TORCH)
        frame = frame.f_back if frame else None
    return False
