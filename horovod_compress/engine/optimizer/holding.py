"""Whether the second moment of an optimizer is held, and which rounds are exact for that."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..reducer import Reducer
from . import family, second_moment as moments
from .exact_rounds import chosen
from .held import HeldSecondMoment
from .stepping import may_step

_log = logging.getLogger("horovod_compress")
#: By optimizer, what was said of its exact rounds: an elastic job holds it again after each reset.
_told: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def hold(
    optimizer: Any,
    reducer: Reducer,
    named: Iterable[tuple[str, nn.Parameter]],
    full_precision_every: int = 0,
    second_moment: str = "own",
    warmup_steps: int | None = None,
    rebuild_every: int | None = None,
    *,
    step: str = "torch",
) -> HeldSecondMoment | None:
    """Return what holds the second moment of an optimizer, or None where it is left alone.

    Args:
        named: the parameters of the optimizer, as the reducer has them.
        full_precision_every: that of the method; 0 if it has none.
        warmup_steps, rebuild_every: choose the exact rounds; None for what suits the method.
        step: "auto" moves weights here, where the optimizer is known to the letter.

    Raises:
        ConfigError: these options have no meaning, or not with this optimizer.
    """
    given = {"warmup_steps": warmup_steps, "rebuild_every": rebuild_every}
    moments.check_options(second_moment, **given)
    fits = family.may_share(optimizer, second_moment)
    steps = may_step(optimizer, step, torch.optim.Adam, torch.optim.AdamW)
    buckets = reducer.buckets
    if all(divides == "never" for divides in buckets.divides().values()):
        return None
    if not fits:
        if second_moment == "auto" and reducer.world > 1:
            family.look_for_squares(optimizer, tells=reducer.rank == 0)
        return None
    family.refuse_no_eps(optimizer, reducer.world)
    few = all(each.law.few_exact for each in buckets.divided())
    rounds = chosen(full_precision_every, few, warmup_steps, rebuild_every, reducer.options.total_steps)
    if late := buckets.exact_until():
        rounds = replace(rounds, warmup=max(late, rounds.warmup), asked=late, anew=rounds.warmup)
    if (words := rounds.in_words()) != _told.get(optimizer):
        _told[optimizer] = words
        if reducer.rank == 0:
            _log.info(
                "the second moment of %s is shared: %s are exact and update it, and the others leave it unchanged",
                *(type(optimizer).__name__, words),
            )
    return HeldSecondMoment(optimizer, reducer, dict(named), rounds, steps)
