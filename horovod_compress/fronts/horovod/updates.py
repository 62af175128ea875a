"""Update mode: local optimizer steps, then the ranks' weight updates are exchanged instead of gradients.

    base = weights                                  at the first of n local steps
    weights = local optimizer step                  n times, on this rank's own gradients
    weights = base + mean over ranks of C(weights - base)

Sparse Binary Compression and Marsit are themselves formulated this way: what the optimizer makes of a gradient
(momentum, weight decay, learning rate) is compressed, not the gradient itself. ``n``, the communication delay, divides
the bytes once more.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ...engine import names
from ...engine.agreement.differences import difference
from ...engine.names import pairs
from ...engine.optimizer import family, momentum, second_moment as moments
from ...engine.optimizer.family import options_of, uncompiled
from ...engine.optimizer.second_moment import REBUILD_EVERY, WARMUP_STEPS
from ...engine.optimizer.update_moment import SharedSecondMoment
from ...engine.optimizer.updates import Schedule, Settings, UpdateExchange
from ...errors import ConfigError, MismatchError
from ...schedule.by_name import OPTIONAL
from ..session import Session
from .gradients import left_out
from .private import in_broadcast_optimizer_state

_STATE_KEY = "horovod_compress"
_SHARED_BY_DEFAULT = ("marsit",)
TAKEN = (
    "a compression serves one optimizer: make another one for DistributedUpdateOptimizer or for "
    "hvd.DistributedOptimizer"
)


def distributed_update_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    compression: Any,
    communication_delay: int | None = None,
    *,
    second_moment: str = "auto",
    warmup_steps: int = WARMUP_STEPS,
    rebuild_every: int | None = None,
    momentum_masking: bool = True,
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
        second_moment: of Adam and AdamW: "shared" updates it from the mean gradient over ranks, in
            full-precision rounds only; "own" leaves it to each rank; "auto" shares it with marsit.
        warmup_steps: with a shared second moment, number of initial steps with uncompressed gradients;
            at least 1.
        rebuild_every: with a shared second moment, the number of exchanges from one full-precision
            round to the next; by default that of the method, else 50.
        momentum_masking: whether to reset momentum to 0 where this rank's update was sent, with methods
            that send only some elements.

    Raises:
        ConfigError: these do not fit together, or differ between ranks; it says what would fit.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"the optimizer should be one of torch.optim, such as SGD, got {optimizer!r:.200}")
    if isinstance(compression, type) or not callable(getattr(compression, "_for_updates", None)):
        raise ConfigError(
            f"compression should be what hvc.Compression.marsit(model.named_parameters()) or another method's function "
            f"returns, got {compression!r:.200}"
        )
    session: Session | None = compression._for_updates()
    if session is None:
        return optimizer  # a rank outside the process set trains by itself, as under Horovod
    problem, settings, parameters = None, None, []
    try:
        settings = _settings(
            optimizer, session, communication_delay, second_moment, warmup_steps, rebuild_every, momentum_masking
        )
        parameters = _in_plan_order(optimizer, named_parameters, session)
    except ConfigError as error:
        problem = str(error)
    _agree(session, settings, options_of(optimizer), problem)
    assert settings is not None
    kind: Any = type(f"Update{type(optimizer).__name__}", (_UpdateMode, type(optimizer)), {})
    made = kind.__new__(kind)
    made.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    # From now on the session exchanges updates, and refuses gradients.
    reducer, reports = session.reducer, compression._counters.reports
    session.exchanges, session.unused, reducer.result_scale = "updates", False, 1.0
    reports.updates = True
    if session.steps.tuner:
        session.steps.tuner.stop()
    named = dict(zip(reducer.plan.names(), parameters, strict=True))
    moment = SharedSecondMoment(made, named) if settings.shared and reducer.world > 1 else None
    made._updates = Schedule(made, UpdateExchange(reducer, parameters, settings.masking), settings, moment)
    made._planned = frozenset(parameters if reducer.world > 1 else ())
    made._last_hook = made.register_step_pre_hook(uncompiled(lambda *given: made._updates.prepare())).id
    # Before the exchange, if one follows. And the compression is in use as long as the optimizer.
    made.register_step_post_hook(uncompiled(lambda *given: compression._counters.reports.look()))
    return made


def _settings(
    optimizer: torch.optim.Optimizer,
    session: Session,
    delay: int | None,
    second_moment: str,
    warmup: int,
    rebuild_every: int | None,
    masking: bool,
) -> Settings:
    """Return the checked options.

    Raises:
        ConfigError: one is out of range, or does not fit the optimizer or the compression.
    """
    if isinstance(optimizer, _UpdateMode) or hasattr(optimizer, "_allreduce_grad_async"):
        raise ConfigError("give DistributedUpdateOptimizer the plain optimizer, not a distributed one")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS evaluates the model several times per step, which update mode does not support")
    _check_session(session)
    methods = session.methods
    momentum.refuse_twice(optimizer, methods, session.steps.named, updates=True)
    delay = methods.communication_delay() if delay is None else delay
    every = rebuild_every if rebuild_every is not None else methods.full_precision_every() or REBUILD_EVERY
    moments.check_options(second_moment, communication_delay=delay, warmup_steps=warmup, rebuild_every=every)
    if type(masking) is not bool:
        raise ConfigError(f"momentum_masking should be True or False, got {masking!r}")
    fits = family.may_share(optimizer, second_moment, updates=True)
    shared = fits and (second_moment == "shared" or methods.name in _SHARED_BY_DEFAULT)
    return Settings(delay, shared, warmup if shared else 0, every, masking)


def _check_session(session: Session) -> None:
    """Refuse what update mode cannot work with.

    Raises:
        ConfigError: the compression is in use already, or has an option that would hide errors.
    """
    reducer, steps = session.reducer, session.steps
    if session.exchanges == "updates" or session.attached or session.compared or reducer.step:
        raise ConfigError(TAKEN)
    if steps.scale.scaler is not None:
        raise ConfigError("this compression follows a gradient scaler, and updates are not scaled; leave follow() out")
    if session.methods.masked:
        raise ConfigError(
            "masked() leaves out elements of gradients, and local weights differ between ranks; give update mode "
            "the method without it"
        )
    if steps.tuner and reducer.options.schedule != OPTIONAL:
        raise ConfigError(
            "adaptive schedules hide exchanges behind the backward pass, which update mode does not "
            'have; choose a fixed schedule such as "size:25MB"'
        )
    if any(bucket.plain for bucket in reducer.plan.buckets):
        raise ConfigError(
            "this plan leaves buckets uncompressed, which was chosen for gradients; give update mode a fixed "
            'schedule such as "size:25MB"'
        )
    if reducer.options.nonfinite == "zero":
        raise ConfigError(
            'nonfinite="zero" has no meaning for weight updates: momentum and local weights would stay '
            'non-finite; choose "propagate" or "raise"'
        )


def _in_plan_order(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]], session: Session
) -> list[nn.Parameter]:
    """Return the parameters in the order of the plan.

    Raises:
        ConfigError: optimizer, named_parameters and compression do not have the same ones.
    """
    given = pairs(named_parameters)
    changed = names.of_pairs(given)
    named = {changed.get(name, name): parameter for name, parameter in given if parameter.requires_grad}
    parameters = list(session.steps.parameters)
    if any(named.get(name) is not mine for name, mine in zip(session.reducer.plan.names(), parameters, strict=True)):
        raise ConfigError("named_parameters should be those that the compression was made with")
    known = {id(parameter) for parameter in parameters}
    of_optimizer = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if known != {id(parameter) for parameter in of_optimizer}:
        raise ConfigError(
            f"the optimizer should have the {len(known)} parameters of the compression, it has {len(of_optimizer)}, "
            "not all of them the same; create both with model.named_parameters()"
        )
    return parameters


def _agree(session: Session, settings: Settings | None, options: Mapping[str, str], problem: str | None) -> None:
    """Compare the options with the other ranks; a rank that has to refuse takes part.

    Args:
        options: of the optimizer.

    Raises:
        ConfigError: some rank refuses, or options of update mode differ.
        MismatchError: options of the optimizers differ.
    """
    mine = dataclasses.asdict(settings) if settings else None
    found = session.gather([problem, mine, options], "hvc.update", by_name=True)
    for rank, (refusal, *_) in enumerate(found):
        if refusal:
            raise ConfigError(refusal if refusal == problem else f"rank {rank}: {refusal}")
    if told := difference({rank: shown for rank, (_, _, shown) in enumerate(found)}):
        raise MismatchError(told)
    for rank, (_, theirs, _) in enumerate(found):
        for name, value in (found[0][1] or {}).items():
            if theirs[name] != value:
                raise ConfigError(
                    f"DistributedUpdateOptimizer was given {name}={value!r} on rank 0 and {theirs[name]!r} on rank "
                    f"{rank}; give every rank the same"
                )


class _UpdateMode:
    """Put before an optimizer's class: its own ``step`` becomes the local step."""

    _updates: Schedule
    _planned: frozenset[nn.Parameter]  # those that are exchanged; none with one rank
    _last_hook: int
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
        if in_broadcast_optimizer_state():
            raise ConfigError(
                "hvd.broadcast_optimizer_state() does not support an optimizer in update mode, whose state belongs to "
                "each rank; broadcast only the parameters, before the first step"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._planned and (found := left_out(self.param_groups, self._planned)):
            raise ConfigError(
                f"{found} now needs a gradient but is not exchanged, because it was frozen when the compression was "
                "created; create the compression while it needs a gradient, and freeze it later"
            )
        both = [name for name in ("grad_scale", "found_inf") if name in self.__dict__]
        scaler: dict[str, Any] = {name: self.__dict__.pop(name) for name in both}
        try:
            skip = bool(scaler.get("found_inf") is not None and scaler["found_inf"] > 0)
            if not skip and (scale := scaler.get("grad_scale")) is not None:
                for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
                    if parameter.grad is not None:
                        parameter.grad.div_(scale)
            with torch.no_grad():
                self._updates.step(self._local_step, skip, scaled="found_inf" in scaler)
        finally:
            self.__dict__.update(scaler)  # the scaler removes them itself
        return loss

    # The local step calls the hooks; torch would wrap this method too when a state is loaded.
    step.hooked = True  # type: ignore[attr-defined]

    def _local_step(self) -> None:
        self._optimizer_step_pre_hooks.move_to_end(self._last_hook)  # others may change gradients
        super().step()  # type: ignore[misc]

    def flush(self) -> None:
        """Exchange what local steps have done since the last exchange; every rank has to.

        After it all ranks have the same weights: at the end of training, or before an evaluation.
        """
        with torch.no_grad():
            self._updates.exchange(rebuild=False)  # gradients may be cleared by now, or those of other data

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the plan of exchanges is made already.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "add parameter groups before you create DistributedUpdateOptimizer, which plans its exchanges then"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and of the exchange; each rank saves its own."""
        return {**super().state_dict(), _STATE_KEY: self._updates.state_dict()}  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; load the model as well.

        Raises:
            ConfigError: the state is not of an update-mode optimizer, or of another model.
        """
        if _STATE_KEY not in state_dict:
            raise ConfigError(
                "this state was not saved by a DistributedUpdateOptimizer; load it into the plain optimizer before "
                "you wrap it"
            )
        rest = {name: part for name, part in state_dict.items() if name != _STATE_KEY}
        self._updates.check(state_dict[_STATE_KEY])
        groups = self.param_groups
        super().load_state_dict(rest)  # type: ignore[misc]
        # A schedule made with the optimizer as it was before it was wrapped looks into this list.
        groups[:] = self.param_groups
        self.param_groups = groups
        self._updates.load_state_dict(state_dict[_STATE_KEY])
