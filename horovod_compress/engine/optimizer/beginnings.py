"""Exact rounds for second moments that begin: the first ones of a training, and more where one begins later.

Where a layer is frozen at first, or the loss comes to it later, its second moment begins when others have been held for
long; where a program clears an optimizer's state, all begin anew. One compressed gradient would then be all that is
held: that of a method that sends few elements is 0 nearly everywhere, and what is divided by that moves as far as a
step may. So some rounds are exact again, as at the start, and what they have made is held.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from ...codecs.work import together
from ...errors import some_of
from ..shards import local
from .exact_rounds import ExactRounds
from .held_moment import HeldMoment

_log = logging.getLogger("horovod_compress")


class Beginnings:
    """Until when rounds are exact because second moments begin; equal on every rank.

    Args:
        rounds: the exact ones of the training.
        tells: says in the log when rounds are exact again.

    Attributes:
        until: rounds before this step are exact; 0 once what they have made is held.
        begun: the optimizer had made a step when it was last looked at.
    """

    def __init__(self, rounds: ExactRounds, *, tells: bool) -> None:
        self._rounds, self._tells = rounds, tells
        self.until, self.begun = rounds.warmup, False

    def look(
        self, step: int, done: Mapping[str, float | None], held: Mapping[str, HeldMoment], divides: Mapping[str, str]
    ) -> dict[str, bool]:
        """Look for second moments that begin later than others, or anew, before the first gradient of a step.

        Args:
            done: how many steps the optimizer has done with each parameter; None where it has no state.

        Returns:
            by parameter, whether a coded gradient may be all that is in it; rounds are exact from this one on.
        """
        self.begun = self.begun or any(done.values())
        if step < self.until or step in self._rounds:
            return {}
        few, ends = self._rounds.anew, self.until > 0
        most = (few - 1) // 2 if ends else few  # of what began amid exact rounds, less than half saw it
        found = []
        for name, steps in done.items():
            known = held.get(name)
            anew = (steps or 0.0) < min(known.since, few) if known else 0 < (steps or 0.0) <= most
            if anew and divides[name] != "never":
                found.append(name)
        self._again(step, found)
        return {name: not ends or name in held for name in found}

    def look_at_zeros(self, step: int, used: Sequence[tuple[str, Tensor | None, HeldMoment]]) -> list[str]:
        """Look for the first gradients of parameters that had only zeros until now.

        Args:
            used: coded results, with what is held, by name.

        Returns:
            the parameters; for them, rounds are exact from a step on.
        """
        zeros = []
        for name, grad, held in used:
            if held.is_zero is None:
                held.is_zero = bool(held.moment.numel()) and not bool(held.floor.any())  # a mean for each row
            if held.is_zero and grad is not None:
                zeros.append((name, local(grad)))
        have = together([grad.any() for _, grad in zeros]) if zeros else ()
        found = [name for (name, _), has in zip(zeros, have, strict=True) if has]
        self._again(step, found)
        return found

    def _again(self, step: int, names: Sequence[str]) -> None:
        if not names:
            return
        self.until = step + self._rounds.anew
        if self._tells:
            _log.info(
                "a second moment begins only now, that of %s: the next %d rounds are exact, as at the start",
                *(some_of(names), self._rounds.anew),
            )

    def saved(self, step: int) -> int:
        """Return what :meth:`load` takes before a step: 0 where that follows from the step and from what is held."""
        if self._rounds.every == 1:  # all rounds are exact, and nothing is ever held
            return 0
        return self.until if self.until > self._rounds.warmup or step > self._rounds.warmup else 0

    def load(self, until: int, step: int, *, held: bool) -> None:
        """Go on with a step from a saved state, with or without second moments that are held."""
        self.begun = False
        self.until = until or (0 if held or step > self._rounds.warmup else self._rounds.warmup)
