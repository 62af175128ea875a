"""Which rounds are exact where a second moment is held: the first ones, and some after that.

Gradients change most at the start of a training, so a second moment that stands for few steps is soon out of date.
Rounds that are ever further apart keep up with that: the next exact round comes when a third more steps have passed, up
to a largest distance. A training of 1,000 steps then has 36 of them instead of 50.

Exact rounds weigh most in a short training. Where its length is known, only a tenth of it is exact at the start, and at
most 14 rounds with methods that need few; the next exact round then comes when as many steps again have passed: 13 in
100 steps, 18 in 300. From 600 steps on it is ten rounds, and half as many steps: 25 in 1,000. (Each sends as much as
the other. In 300 steps of text the second ended 10 % behind once, and in 1,000 steps of a perceptron the first 9 %.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...codecs.base import FULL_PRECISION_EVERY

#: How many exact rounds begin the training, and how many rounds there are for each one after that, by default.
WARMUP_STEPS, REBUILD_EVERY = 30, 50
#: The same for methods that need few of them, with which the distance grows up to the second number.
FEW_WARMUP_STEPS, FEW_REBUILD_EVERY = 20, 100
#: The distance to the next exact round is one in so many of the steps so far. The second number is for known lengths,
#: and the last one for those of methods that need few.
GROWTH, QUICK_GROWTH, QUICKEST_GROWTH = 3, 2, 1
#: Where the length is known, one step in so many is exact at its start.
START_SHARE = 10
#: At most so many where few are needed: below so many steps, and otherwise.
MOST_AT_START, SHORT, MOST_AT_START_OF_LONG = 14, 600, 10


@dataclass(frozen=True)
class ExactRounds:
    """The exact rounds of a training.

    Attributes:
        warmup: number of initial exact rounds, at least 1.
        every: after these, one round in this many is exact.
        growth: the distance begins at one in so many of the steps so far, and grows up to ``every``; 0 for equal ones.
        short: so many of the initial ones may send 8 bits: none that somebody asked for.
        asked: of those, so many at the start that somebody asked for after all.
        anew: so many where a second moment begins later, by default as many as at the start.
    """

    warmup: int
    every: int
    growth: int = 0
    short: int = 0
    asked: int = 0
    anew: int = 0
    _early: frozenset[int] = field(init=False, default=frozenset(), compare=False)  # those at growing distances
    _regular: int = field(init=False, default=0, compare=False)  # from here on they are ``every`` rounds apart

    def __post_init__(self) -> None:
        early, last = [], self.warmup - 1
        while self.growth and (distance := max(1, (last + 1) // self.growth)) < self.every:
            last += distance
            early.append(last)
        object.__setattr__(self, "anew", self.anew or self.warmup)
        object.__setattr__(self, "_early", frozenset(early))
        object.__setattr__(self, "_regular", last + self.every if self.growth else self.warmup)

    def __contains__(self, step: int) -> bool:
        regular = step >= self._regular and (step - self._regular) % self.every == 0
        return step < self.warmup or step in self._early or regular

    def __str__(self) -> str:
        grows = "up to " if self.growth else ""
        short = f" (8 bits will do for {self.short - self.asked})" if self.short > self.asked else ""
        return f"warmup_steps={self.warmup}{short} and rebuild_every={grows}{self.every}"

    def in_words(self) -> str:
        """Return them for people."""
        if self.growth:
            return f"the first {self.warmup} rounds, then ever fewer, down to one in {self.every},"
        return f"the first {self.warmup} rounds and then one in {self.every}"


def usual(full_precision_every: int, few: bool) -> ExactRounds:
    """Return the default exact rounds of a method.

    Args:
        full_precision_every: the method's own; 0 if it has none.
        few: the method needs few, see ``Law.few_exact``.
    """
    if few and not 0 < full_precision_every < FULL_PRECISION_EVERY:  # who asks for more rounds gets them
        return ExactRounds(FEW_WARMUP_STEPS, max(FEW_REBUILD_EVERY, full_precision_every), growth=GROWTH)
    return ExactRounds(FEW_WARMUP_STEPS if few else WARMUP_STEPS, full_precision_every or REBUILD_EVERY)


def chosen(
    full_precision_every: int,
    few: bool,
    warmup_steps: int | None = None,
    rebuild_every: int | None = None,
    total_steps: int | None = None,
) -> ExactRounds:
    """Return the exact rounds of a method; where somebody gives a number of them, distances are equal.

    Args:
        full_precision_every, few: see :func:`usual`.
        total_steps: the length of the training, if known.
    """
    if warmup_steps is None and rebuild_every is None:
        found = usual(full_precision_every, few)
        found = found if total_steps is None else _shortened(found, total_steps)
        return replace(found, short=found.warmup)
    plain = usual(full_precision_every, few=False)
    short = 0 if warmup_steps else plain.warmup
    return ExactRounds(warmup_steps or plain.warmup, rebuild_every or plain.every, short=short)


def _shortened(rounds: ExactRounds, total_steps: int) -> ExactRounds:
    """Return exact rounds for a training of known length; methods that need many have fewer only if it is short."""
    most, growth = rounds.warmup, QUICK_GROWTH
    if rounds.growth:
        short = total_steps < SHORT
        most, growth = (MOST_AT_START, QUICKEST_GROWTH) if short else (MOST_AT_START_OF_LONG, QUICK_GROWTH)
    first = max(1, min(total_steps // START_SHARE, most))
    return rounds if first == rounds.warmup else replace(rounds, warmup=first, growth=growth, anew=first)
