"""The options of update mode: checked, completed from a preset, and compared across ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..engine import names
from ..engine.agreement.differences import difference
from ..engine.names import pairs
from ..engine.optimizer import exact_rounds, family, momentum, second_moment as moments
from ..engine.optimizer.local_steps import Settings
from ..engine.optimizer.outer import Factory
from ..errors import ConfigError, MismatchError
from ..options import PRESETS, plain
from ..schedule.by_name import OPTIONAL
from .session import Session

_SHARED_BY_DEFAULT = ("marsit",)
#: Settings by what users call them, where that differs.
_AS_GIVEN = {
    "delay": "communication_delay",
    "shared": "a shared second moment",
    "warmup": "warmup_steps",
    "masking": "momentum_masking",
    "outer": "an outer optimizer",
}
TAKEN = (
    "a compression serves one optimizer: make another one for DistributedUpdateOptimizer, or for the optimizer whose "
    "gradients are to be exchanged"
)


@dataclasses.dataclass(frozen=True)
class UpdateOptions:
    """What a program gives update mode; see :func:`~horovod_compress.fronts.updates.distributed_update_optimizer`."""

    communication_delay: int | None = None
    outer_optimizer: Factory | Mapping[str, Any] | None = None
    warmup_exchanges: int | float = 0
    overlap: int | None = None
    fragments: int = 1
    mixing: float = 1.0
    clip: str | None = None
    second_moment: str = "auto"
    warmup_steps: int | None = None
    rebuild_every: int | None = None
    momentum_masking: bool = True

    def completed(self, method: str) -> UpdateOptions:
        """Return these as plain numbers, with what the preset of that name says where nothing was given."""
        preset = PRESETS[method].updates if method in PRESETS else {}
        given = {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        missing = {name: value for name, value in preset.items() if given[name] is None}
        return UpdateOptions(**given | missing)


def settings_of(optimizer: torch.optim.Optimizer, session: Session, given: UpdateOptions) -> Settings:
    """Return the checked options.

    Raises:
        ConfigError: one is out of range, or does not fit the optimizer or the compression.
    """
    if hasattr(optimizer, "_updates") or hasattr(optimizer, "_allreduce_grad_async"):
        raise ConfigError("give DistributedUpdateOptimizer the plain optimizer, not a distributed one")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS evaluates the model several times per step, which update mode does not support")
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ConfigError(
            f"{type(optimizer).__name__} makes the weights of its eval() from a second copy, of which each rank has "
            "its own in update mode: every rank would evaluate and save another model; choose an optimizer without "
            "eval(), or exchange gradients"
        )
    _check_session(session)
    methods, choice = session.methods, given.second_moment
    momentum.refuse_twice(optimizer, methods, session.steps.named, updates=True)
    delay = methods.communication_delay() if given.communication_delay is None else given.communication_delay
    overlap, rounds = given.overlap or 0, {"warmup_steps": given.warmup_steps, "rebuild_every": given.rebuild_every}
    moments.check_options(choice, communication_delay=delay, **rounds)
    if type(given.momentum_masking) is not bool:
        raise ConfigError(f"momentum_masking should be True or False, got {given.momentum_masking!r}")
    _check_exchanges(given, delay, overlap, len(session.reducer.plan.buckets))
    fits = family.may_share(optimizer, choice, updates=True)
    # With an outer optimizer ranks exchange too seldom for it, and each rank's own serves.
    by_default = methods.name in _SHARED_BY_DEFAULT and given.outer_optimizer is None
    shared = fits and (choice == "shared" or by_default)
    if not shared and session.reducer.rank == 0 and session.reducer.world > 1:
        family.tell_unused(rounds, of_all=session.reducer.options.warmup_steps is not None)
    return Settings(
        delay,
        shared,
        (given.warmup_steps or exact_rounds.WARMUP_STEPS) if shared else 0,
        given.rebuild_every or methods.full_precision_every() or exact_rounds.REBUILD_EVERY,
        given.momentum_masking,
        _warmup_exchanges(given.warmup_exchanges, session.reducer.options.total_steps),
        overlap,
        given.fragments,
        float(given.mixing),
        given.clip,
        given.outer_optimizer is not None,
    )


def _check_exchanges(given: UpdateOptions, delay: int, overlap: int, buckets: int) -> None:
    """Refuse exchanges that do not fit into the delay, or the buckets.

    Raises:
        ConfigError: says what would.
    """
    fragments, mixing = given.fragments, given.mixing
    if type(fragments) is not int or not 1 <= fragments <= delay:
        raise ConfigError(
            f"fragments should be a whole number from 1 to communication_delay={delay}, as one is exchanged after a "
            f"local step, got {fragments!r}"
        )
    if fragments > buckets:
        raise ConfigError(
            f"fragments={fragments} needs as many buckets, and this plan has {buckets}; give the compression a finer "
            'schedule, such as schedule="size:1MB"'
        )
    if type(overlap) is not int or not 0 <= overlap <= delay // fragments:
        raise ConfigError(
            f"overlap should be a whole number from 0 to {delay // fragments}, the local steps from one exchange to "
            f"the next with communication_delay={delay} and fragments={fragments}, got {overlap!r}"
        )
    if isinstance(mixing, bool) or not isinstance(mixing, (int, float)) or not 0 < mixing <= 1:
        raise ConfigError(f"mixing should be above 0 and at most 1, got {mixing!r}")
    if given.clip not in (None, "median"):
        raise ConfigError(f'clip should be None or "median", got {given.clip!r}')


def _warmup_exchanges(given: float, total_steps: int | None) -> int:
    """Return the number of local steps that are each exchanged at the start.

    Raises:
        ConfigError: says what it should be.
    """
    if type(given) is int and given >= 0:
        return given
    if type(given) is not float or not 0 <= given < 1:
        raise ConfigError(
            f"warmup_exchanges should be a whole number of local steps, or a share of them below 1, got {given!r}"
        )
    if given and total_steps is None:
        raise ConfigError(
            f"warmup_exchanges={given} is a share of the training, whose length is not known: give the compression "
            "total_steps=, or warmup_exchanges a number of local steps"
        )
    return round(given * (total_steps or 0))


def _check_session(session: Session) -> None:
    """Refuse what update mode cannot work with.

    Raises:
        ConfigError: the compression is in use already, or has an option that would hide errors.
    """
    reducer, steps = session.reducer, session.steps
    if session.exchanges == "updates" or session.attached or session.compared or steps.met or reducer.step:
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


def in_plan_order(
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


def agree(session: Session, settings: Settings | None, options: Mapping[str, str] | None, problem: str | None) -> None:
    """Compare the options with the other ranks; a rank that has to refuse takes part.

    Args:
        options: of the optimizer; None for one that goes on after a reset of an elastic job, which gives its own to
            those that join.

    Raises:
        ConfigError: some rank refuses, or options of update mode differ.
        MismatchError: options of the optimizers differ.
    """
    mine = dataclasses.asdict(settings) if settings else None
    found = session.gather_all([session.job.number, problem, mine, options], "hvc.update")
    for rank, refusal, *_ in found:
        if refusal:
            raise ConfigError(refusal if refusal == problem else f"rank {rank}: {refusal}")
    shown = {rank: shown for rank, _, _, shown in found}
    if None not in shown.values() and (told := difference(shown)):
        raise MismatchError(told)
    first, _, expected, _ = found[0]
    for rank, _, theirs, _ in found:
        for name, value in (expected or {}).items():
            if theirs[name] != value:
                raise ConfigError(
                    f"options of DistributedUpdateOptimizer differ: {_AS_GIVEN.get(name, name)} is {value!r} on rank "
                    f"{first} and {theirs[name]!r} on rank {rank}; give every rank the same"
                )
