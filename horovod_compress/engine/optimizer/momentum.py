"""What compressed gradients meet in an optimizer: its momentum, and its learning rates.

With momentum b a result counts 1 / (1 - b) times over the steps that follow. Upon a method's own momentum that grows
without end. And what waited for many steps before it was sent counts late and that often: at a learning rate that suits
uncompressed training the loss may rise. So it may with coarse codes from the first step on, when gradients are largest:
such trainings begin with exact rounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import nn

from ...codecs.base import Codec, variants_of
from ...codecs.work import LAST
from ...errors import ConfigError, StateError
from ..kept import Kept
from ..methods import Methods
from . import family

Named = Iterable[tuple[str, nn.Parameter]]

#: Waiting for so many steps, times how often a result counts, is too long for a rate that suits uncompressed training.
LONG = 100
#: A result that counts so many times makes errors of the first steps dangerous.
FAST = 5
#: How many exact rounds begin such a training by default; one in so many where its length is known, at most as many.
EXACT_FIRST, EXACT_SHARE = 30, 10


def refuse_twice(optimizer: Any, methods: Methods, named: Named, updates: bool = False) -> None:
    """Refuse an optimizer's momentum upon a method's own.

    Args:
        updates: of weights are exchanged: Adam's first moment is in them too.

    Raises:
        ConfigError: says which of them to leave out.
    """
    for group, codec in _pairs(optimizer, methods, named):
        kept, own, option = _kept(group, updates), _own(codec), codec.momentum_option
        if kept and own:
            raise ConfigError(
                f"{type(optimizer).__name__} has {kept[0]}, and {codec.name} applies its own momentum, "
                f"{option}={own:g}: together they diverge; give the optimizer {kept[1]}, or {codec.name} {option}=0"
            )


def _kept(group: Mapping[str, Any], updates: bool) -> tuple[str, str] | None:
    """Return in words what momentum is upon that of a method, and how to have none."""
    if _momentum(group):
        return f"momentum={_momentum(group):g}", "momentum=0"
    betas = tuple(map(float, group.get("betas", ())))
    if not (updates and betas and betas[0]):
        return None
    return f"betas={betas}", f"betas={(0.0, *betas[1:])}"


def advice(optimizer: Any, methods: Methods, named: Named) -> str | None:
    """Return what to tell the user of momentum, the optimizer's or a method's own, that these options hardly bear."""
    waits = []
    for group, codec in _pairs(optimizer, methods, named):
        if told := _told_of_method(optimizer, group, codec):
            return told
        own = _own(codec)  # then the optimizer may have none, see refuse_twice()
        times, share = 1 / (1 - own) if own else _times(group), codec.properties().share_sent
        if share < 1 and times != 1 and times / share >= LONG:
            owner = codec.name if own else "the optimizer"
            waits.append((times / share, share, times, own or _momentum(group), codec.name, owner))
    if not waits:
        return None
    _, share, times, momentum, name, owner = max(waits, key=itemgetter(0))
    return (
        f"with {name} an element is sent about once in {1 / share:.0f} steps, and momentum={momentum:g} counts delayed "
        f"gradients {times:.0f} times: a learning rate that suits uncompressed training may be far too high; lower it, "
        f"give {owner} momentum=0, or send more with density="
    )


def _told_of_method(optimizer: Any, group: Mapping[str, Any], codec: Codec) -> str | None:
    """Return what to tell of a method with which an optimizer hardly learns, whatever the rate."""
    found = codec.properties()
    if isinstance(optimizer, torch.optim.LBFGS) and (found.divides != "never" or found.share_sent < 1):
        return (
            f"LBFGS takes the curvature from differences of gradients, which {codec.name} changes more than one step "
            "does: training may learn nothing or diverge; choose global_qsgd, qsgd with 8 bits, fp16 or none"
        )
    kept, own = _kept(group, updates=True), _own(codec)
    if not (kept and own and family.has_first_moment(optimizer)):
        return None
    return (
        f"{type(optimizer).__name__} has {kept[0]}, and {codec.name} applies its own momentum, "
        f"{codec.momentum_option}={own:g}: together they follow gradients late, and training may diverge at a learning "
        f"rate that suits either; give the optimizer {kept[1]}, or {codec.name} {codec.momentum_option}=0"
    )


def exact_first(optimizer: Any, methods: Methods, named: Named, total_steps: int | None = None) -> int:
    """Return how many first rounds should be exact: at a high rate, these alone can make training diverge if coded.

    So many as :data:`EXACT_FIRST` says where a result counts :data:`FAST` times and the method asks for it.

    Args:
        total_steps: the length of the training, if known.
    """
    pairs = _pairs(optimizer, methods, named)
    if not any(_times(group) >= FAST and _begins_exact(codec) for group, codec in pairs):
        return 0
    return EXACT_FIRST if total_steps is None else max(1, min(EXACT_FIRST, total_steps // EXACT_SHARE))


def _begins_exact(codec: Codec) -> bool:
    found = codec.properties()
    return codec.exact_first and found.feedback == "own" and found.divides == "before"


def _pairs(optimizer: Any, methods: Methods, named: Named) -> Iterator[tuple[Mapping[str, Any], Codec]]:
    """Return every group with each kind of round that its parameters have."""
    names = {id(parameter): name for name, parameter in named}
    for group in optimizer.param_groups:
        codecs = {methods.codec(names[id(p)]) for p in group["params"] if id(p) in names}
        for codec in codecs:
            yield from ((group, kind) for kind in dict.fromkeys((codec, *variants_of(codec))))


def _own(codec: Codec) -> float:
    """Return the momentum that a method applies itself."""
    return float(getattr(codec, codec.momentum_option, 0.0))


def _momentum(group: Mapping[str, Any]) -> float:
    """Return the momentum of SGD and the like. Adam divides its own out again."""
    return float(group.get("momentum") or 0.0)


def _times(group: Mapping[str, Any]) -> float:
    """Return how many times a result counts."""
    own = _momentum(group)
    return (1 - float(group.get("dampening") or 0.0)) / (1 - own) if own < 1 else math.inf


# ---- learning rates ------------------------------------------------------------------------------

#: A change is followed once it has come to so much: every time costs a pass over the residuals. Where momentum goes on
#: from the last result, which follows every change, so does what waits.
SMALL = 0.05
#: No single change multiplies residuals by more than this. What a fall leaves out, the next rise leaves out too: then
#: residuals of before are what they were.
MOST = 10.0


class Rates:
    """Keeps residuals in step with the learning rates of an optimizer.

    A residual holds gradients of earlier steps. Uncompressed training would have applied them at the learning rates of
    those steps; sent later, they are applied at that of a later step. So when the rate changes from a to b, residuals
    are multiplied by a / b, as in dist-EF-SGD (Zheng, Huang and Kwok, NeurIPS 2019, arXiv:1905.10936, algorithm 1).

    Args:
        optimizer: only the rates of its groups are read.
        named: its parameters by name, as the reducer has them.
        at_once: names of parameters whose residuals follow every change, however small.
    """

    #: What its state is saved under: the rates that residuals stand for, and those of the last step if they differ.
    saved: ClassVar[Sequence[str]] = ("rates", "rates_seen")

    def __init__(
        self, optimizer: Any, kept: Kept, named: Iterable[tuple[str, nn.Parameter]], at_once: Collection[str] = ()
    ) -> None:
        self._optimizer, self._kept, self._at_once = optimizer, kept, frozenset(at_once)
        self._names = {id(parameter): name for name, parameter in named}
        self._followed: list[float] = []  # the rate, by group, that residuals stand for; 0 until there is one
        self._seen: list[float] = []  # that of the last step; it is less where a fall was not followed all the way

    def begin(self) -> float:
        """Let residuals stand for the rate of the coming step; between two steps.

        Returns:
            The factor of those that grow most; 1 where none grows.
        """
        groups = self._optimizer.param_groups
        self._followed += [0.0] * (len(groups) - len(self._followed))
        self._seen += self._followed[len(self._seen) :]
        factors: dict[str, float] = {}
        for index, group in enumerate(groups):
            before, seen, now = self._followed[index], self._seen[index], float(group["lr"])
            if now <= 0 or now == seen:
                continue  # with a rate of 0 nothing is applied, so nothing is applied wrongly
            self._seen[index], wanted = now, before / now
            factor = min(wanted, MOST if now < seen else 1.0)
            found = self._of_group(group, factor)
            if before and abs(math.log(wanted)) < SMALL and self._at_once.isdisjoint(found):
                continue
            self._followed[index] = now if factor == wanted or not before else before / factor
            factors |= found if before else {}
        return self._kept.scale_errors(factors)

    def state(self) -> dict[str, list[float]]:
        """Return rates by group, under the names in :attr:`saved`."""
        seen = [] if self._seen == self._followed else self._seen
        return dict(zip(self.saved, (list(self._followed), list(seen)), strict=False))

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take what :meth:`state` returned; names may be missing."""
        self._followed = list(state.get(self.saved[0], ()))
        seen = zip_longest(state.get(self.saved[-1], ()), self._followed, fillvalue=0.0)
        self._seen = [rate or followed for rate, followed in seen]

    # ---- the same by parameter, as the order of several optimizers may change ----

    def by_name(self) -> dict[str, dict[str, float]]:
        """Return :meth:`state` by parameter."""
        found: dict[str, dict[str, float]] = {}
        for saved, rates in self.state().items():
            each = [self._of_group(*pair) for pair in zip(self._optimizer.param_groups, rates, strict=False)]
            found[saved] = {name: rate for mine in each for name, rate in mine.items()}
        return found

    def of_names(self, saved: Mapping[str, float]) -> list[float]:
        """Return rates by group, of those by parameter; 0 where there are none to go on from.

        Raises:
            StateError: parameters of one group have different rates.
        """
        found = []
        for group in self._optimizer.param_groups:
            rates = {saved[name]: name for name in self._of_group(group, 1.0) if name in saved}
            if len(rates) > 1:
                (one, first), (other, second), *_ = rates.items()
                raise StateError(
                    f"the saved state has learning rate {one:g} for {first} and {other:g} for {second}, which are in "
                    'one group now: give them the groups they were saved with, or pass residuals="reset"'
                )
            found.append(next(iter(rates), self._unknown(group)))
        return found

    def _unknown(self, group: Mapping[str, Any]) -> float:
        """Return the rate to follow from for a group of which nothing was saved."""
        return 0.0

    def _of_group(self, group: Mapping[str, Any], factor: float) -> dict[str, float]:
        return {self._names[id(p)]: factor for p in group["params"] if id(p) in self._names}


class LastRates(Rates):
    """Keeps what goes on from the last result in step with the learning rates of an optimizer.

    The last step moved weights by its rate a times the result; for the heavy ball that is a / b times the result at the
    rate b of the coming step: each change is followed, however small. What of it is not sent waits, and goes on to
    follow as all that waits does, see :class:`Rates`: together they keep the heavy ball at any rate. Neither grows by
    more than :data:`MOST` at once, as what does not follow a rate back would be applied when that is large again.
    """

    saved: ClassVar[Sequence[str]] = ("last_rates",)

    def begin(self) -> float:
        groups = self._optimizer.param_groups
        self._followed += [float(group["lr"]) for group in groups[len(self._followed) :]]
        factors: dict[str, float] = {}
        for index, group in enumerate(groups):
            before, now = self._followed[index], float(group["lr"])
            self._followed[index] = now
            if now != before and now > 0:  # with a rate of 0 nothing moves, and nothing goes on from there
                factors |= self._of_group(group, min(before / now, MOST))
        return self._kept.scale_errors(factors, last=True)

    def _unknown(self, group: Mapping[str, Any]) -> float:
        return float(group["lr"])


def rates_of(optimizer: Any, kept: Kept, named: Named, follow_lr: bool) -> list[Rates]:
    """Return what keeps all that is kept in step with the learning rates of an optimizer."""
    goes_on = kept.states().get(LAST, {}).keys()
    following = [(name, parameter) for name, parameter in named if follow_lr or name in goes_on]
    found = [Rates(optimizer, kept, following, goes_on)] if following else []
    return [*found, LastRates(optimizer, kept, following)] if goes_on else found
