"""Optimizers that are known: their options, in words, and where they keep a second moment.

One table has the optimizers whose second moment can be held; there is a warning for others that keep one. Each entry
says where an optimizer keeps what it divides by, and what it makes of it. For the rule that most share, a running mean
of squares, see :class:`~.second_moment.Form`; those here differ in how the second moment moves. Packages other than
torch are known by name: they need not be installed.
"""

from __future__ import annotations

import inspect
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...errors import ConfigError
from ..shards import local
from .second_moment import ADAM, BOUND, BRIEF, MOST_BRIEF, BareMoment, Form, Group, Moment, State, wide
from .step_hooks import uncompiled

# ---- options, in words: ranks whose optimizers differ would train different models ---------------

OF_OPTIMIZER = "the optimizer's "
_HOW = {"foreach", "fused", "capturable", "differentiable"}


def options_of(optimizer: Any) -> dict[str, str]:
    """Return an optimizer's class and the options of its parameter groups, by name, for a comparison across ranks.

    Only what some optimizer of torch's knows too is compared: what a program adds to a group is its own.
    """
    found = {f"{OF_OPTIMIZER}class": type(optimizer).__name__}
    groups = optimizer.param_groups
    for number, group in enumerate(groups):
        where = f" of parameter group {number}" if len(groups) > 1 else ""
        for name in sorted(_known() & set(group)):
            if (text := _in_words(group[name])) is not None:
                found[f"{OF_OPTIMIZER}{name}{where}"] = text
    return found


def _in_words(value: Any) -> str | None:
    """Return a plain value in words; None for what is none."""
    if isinstance(value, Tensor):
        return repr(float(value)) if value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        parts = [_in_words(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else None


@cache
def _known() -> frozenset[str]:
    """Return the options of torch's optimizers, but for those that only say how they compute."""
    kinds = [kind for kind in vars(torch.optim).values() if inspect.isclass(kind)]
    names = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return frozenset(names - {"params", "defaults", "args", "kwargs"} - _HOW)


# ---- the second moment ---------------------------------------------------------------------------

_log = logging.getLogger("horovod_compress")


@dataclass(frozen=True)
class Largest(Form):
    """As in Adamax: no mean of squares but the largest |gradient|, which fades. What is held is its square.

    The step divides by this gradient's own size where that is larger, as it always does. Eps is part of both, but held
    where there has been a gradient only: elsewhere V is 0, as that of others.
    """

    second: str = "exp_inf"

    def corrected(self, group: Group, state: State, steps: float) -> Tensor:
        largest = wide(state[self.second])  # eps where all gradients have been 0
        return (largest.square() * (largest > 1.01 * float(group["eps"]))).contiguous()

    def move(self, held: BareMoment, group: Group, grad: Tensor, steps: float) -> None:
        faded = held.moment.mul_(self.betas(group)[1] ** (2 * steps))
        torch.maximum(faded, grad.abs().add_(float(group["eps"])).mul_(grad != 0).square_(), out=held.moment)
        held.steps += steps
        held.derive()

    def write(self, group: Group, state: State, grad: Tensor, held: Moment, now: float, *, exact: bool = False) -> None:
        beta1, beta2 = self.betas(group)
        first = wide(state[self.first]).lerp(grad, 1 - beta1)
        least = first.div_((1 - beta1**now) * BOUND).abs_()
        roots = ops.take_roots(held.squares(exact=exact))
        local(state[self.second]).copy_(torch.maximum(roots, least).div_(beta2))


@dataclass(frozen=True)
class Total(Form):
    """As in Adagrad: the sum of all squares. No step is longer than the learning rate, in Adagrad itself and here."""

    second: str = "sum"
    first: str = ""

    def betas(self, group: Group) -> tuple[float, float]:
        return 0.0, 1.0  # it forgets nothing

    def corrected(self, group: Group, state: State, steps: float) -> Tensor:
        return wide(state[self.second]).clone(memory_format=torch.contiguous_format)

    def move(self, held: BareMoment, group: Group, grad: Tensor, steps: float) -> None:
        held.moment.addcmul_(grad, grad, value=steps)
        held.steps += steps
        held.derive()

    def take_coded(self, held: Moment, group: Group, grad: Tensor) -> None:
        held.steps = min(held.steps + BRIEF, MOST_BRIEF) if held.steps < 1 else BRIEF
        held.moment.addcmul_(grad, grad)
        held.derive()

    def forget(self, held: Moment, group: Group) -> None:
        held.steps = 0.0
        held.moment.fill_(group["initial_accumulator_value"])

    def write(self, group: Group, state: State, grad: Tensor, held: Moment, now: float, *, exact: bool = False) -> None:
        coming = grad.square()
        local(state[self.second]).copy_(torch.maximum(held.squares(exact=exact), coming).sub_(coming))


def _is_mean(group: Group) -> bool:
    return 0 < float(group["betas"][1]) < 1 and not group.get("amsgrad")


def _is_plain_rmsprop(group: Group) -> bool:
    return 0 < float(group["alpha"]) < 1 and not group["centered"]


#: By package and class: the form, and whether it is that with the options of a group.
TABLE: dict[tuple[str, str], tuple[Form, Callable[[Group], bool]]] = {
    ("torch", "Adam"): (ADAM, _is_mean),
    ("torch", "AdamW"): (ADAM, _is_mean),
    ("torch", "NAdam"): (Form(), _is_mean),
    ("torch", "RAdam"): (Form(), _is_mean),
    ("torch", "Adamax"): (Largest(), _is_mean),
    ("torch", "RMSprop"): (Form("square_avg", first="", decay="alpha", unbiased=False), _is_plain_rmsprop),
    ("torch", "Adagrad"): (Total(), lambda group: True),
    ("schedulefree", "AdamWScheduleFree"): (Form(first="", count="k", decoupled=True), _is_mean),
    ("schedulefree", "RAdamScheduleFree"): (Form(first="", count="k", decoupled=True), _is_mean),
}
_HELD = "Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, RMSprop unless centered, and schedulefree's AdamW and RAdam"


def _listed(optimizer: Any) -> type | None:
    """Return the class of an optimizer that is in the table, itself or one that it derives from."""
    return next((kind for kind in type(optimizer).__mro__ if _key(kind) in TABLE), None)


def _key(kind: type) -> tuple[str, str]:
    return kind.__module__.partition(".")[0], "" if _is_horovod_s(kind) else kind.__qualname__


def form_of(optimizer: Any) -> Form:
    """Return the form of an optimizer for which :func:`may_share` was true."""
    kind = _listed(optimizer)
    assert kind is not None
    return TABLE[_key(kind)][0]


def has_first_moment(optimizer: Any) -> bool:
    """Return whether the first beta is known to be a momentum; Lion's and schedulefree's say something else."""
    kind = _listed(optimizer)
    return kind is not None and bool(TABLE[_key(kind)][0].first)


def may_share(optimizer: Any, second_moment: str, *, updates: bool = False) -> bool:
    """Return whether the second moment of an optimizer may be held, as far as the optimizer goes.

    Args:
        updates: of weights are exchanged: for Adam and AdamW only.

    Raises:
        ConfigError: it is to be shared, and cannot be.
    """
    kind = _listed(optimizer)
    form, is_so = TABLE[_key(kind)] if kind else (None, lambda group: False)
    fits = all(map(is_so, optimizer.param_groups)) and (form is ADAM or not updates)
    if second_moment == "shared" and not fits:
        raise ConfigError(
            f'second_moment="shared" is for {"Adam and AdamW" if updates else _HELD}, with a second beta above 0 and '
            f'without amsgrad; got {type(optimizer).__name__}: leave it at "auto", or choose "own"'
        )
    return fits and (second_moment == "shared" or (second_moment == "auto" and _is_stock(optimizer, kind)))


def refuse_no_eps(optimizer: Any, world: int) -> None:
    """Refuse an optimizer that would divide by nothing; with one rank, nothing is compressed.

    Raises:
        ConfigError: says why.
    """
    if world > 1 and not all(group["eps"] for group in optimizer.param_groups):
        raise ConfigError(
            f"{type(optimizer).__name__} with eps=0 would divide 0 by 0 where a compressed gradient is 0: give it an "
            'eps, such as 1e-8; second_moment="own" accepts it for methods that never send zeros'
        )


def _is_stock(optimizer: Any, listed: Any) -> bool:
    """Return whether the step is that of the table: another one may have another use for the state that is written."""
    steps = [vars(kind)["step"] for kind in type(optimizer).__mro__ if "step" in vars(kind) and not _is_horovod_s(kind)]
    # Torch writes a wrapped step into each class of which it makes the first optimizer.
    return bool(steps) and inspect.unwrap(steps[0]) is inspect.unwrap(listed.step)


def is_exactly(optimizer: Any, *kinds: type) -> bool:
    """Return whether an optimizer is of one of these classes itself, or Horovod's wrapper of one, and steps as such."""
    own = next(kind for kind in type(optimizer).__mro__ if not _is_horovod_s(kind))
    return own in kinds and _is_stock(optimizer, own)


def _is_horovod_s(kind: type) -> bool:
    return "_allreduce_grad_async" in vars(kind)


#: Names of state that is made of squares of gradients, in torch and in other packages.
_SQUARES = re.compile(r"_sq|square|_var\b|exp_inf|second|^(sum|v|state2|fim|variance)$")


def squares_in(optimizer: Any) -> str | None:
    """Return the name of the state in which an optimizer keeps squares of gradients, None if nothing shows any.

    Two betas and an eps show it under any name, beside a state of several tensors: Lion and its kin have only one.
    """
    groups = optimizer.param_groups
    as_adam = any("eps" in g and isinstance(g.get("betas"), Iterable) and len(tuple(g["betas"])) > 1 for g in groups)
    for parameter, state in optimizer.state.items():
        grad = getattr(parameter, "grad", None)
        if not isinstance(state, Mapping) or (grad is not None and grad.is_sparse):  # which is never compressed
            continue
        tensors = [str(name) for name, value in state.items() if isinstance(value, Tensor) and value.numel() > 1]
        named = [name for name in map(str, state) if _SQUARES.search(name)]
        if found := named or (tensors if as_adam and len(tensors) > 1 else []):
            return found[0] if named else found[-1]
    return None


def tell_unused(given: Mapping[str, int | None], *, of_all: bool) -> None:
    """Warn of options that choose the exact rounds of a shared second moment, where there is none.

    Args:
        given: by name, None where there is none.
        of_all: the compression has its own number of exact steps at the start.
    """
    if words := " and ".join(f"{name}={number}" for name, number in given.items() if number is not None):
        asks = given.get("warmup_steps") is not None and not of_all
        _log.warning(
            "ignored: %s, as ranks share no second moment with this method and optimizer%s",
            words,
            ". For exact steps at the start of the training, give warmup_steps= to the compression, as in "
            "hvc.Compression.marsit(..., warmup_steps=100)" * asks,
        )


#: Whether this rank tells of what an optimizer's state shows, None once that was looked at: an elastic job meets its
#: optimizers again after each reset, and another rank may be the one that tells.
_tells: weakref.WeakKeyDictionary[Any, bool | None] = weakref.WeakKeyDictionary()


def look_for_squares(optimizer: Any, *, tells: bool) -> None:
    """Look at the state of an optimizer once, after its first step, which shows whether it keeps squares of gradients.

    Args:
        tells: warn of them, as nobody holds them. Of several calls before that step, the last one counts.
    """
    if optimizer not in _tells:
        optimizer.register_step_post_hook(uncompiled(_look))
    elif _tells[optimizer] is None:
        return
    _tells[optimizer] = tells


def _look(optimizer: Any, *given: Any) -> None:
    tells = _tells.get(optimizer)
    if tells is None or all(isinstance(state, Mapping) and not state for state in optimizer.state.values()):
        return  # or it has skipped its step
    _tells[optimizer] = None  # torch walks over its hooks now, so this one stays
    if tells and (found := squares_in(optimizer)):
        _tell_of_squares(optimizer, found)


def _tell_of_squares(optimizer: Any, found: str) -> None:
    kind, other = _listed(optimizer), ""
    if kind is not None and not _is_stock(optimizer, kind):
        other = f'; "shared" holds it, if step() uses its state as that of {kind.__name__} does'
    _log.warning(
        "%s computes its second moment (%s) from compressed gradients, so its steps become too small and training "
        "slower. It is held for %s, without amsgrad: choose one of these, or a method that sends more, such as "
        'global_qsgd or fp16. second_moment="own" accepts it without a warning%s',
        *(type(optimizer).__name__, found, _HELD, other),
    )
