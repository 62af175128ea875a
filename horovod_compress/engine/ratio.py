"""The ratio of norms that results are handed back times, and when it is measured, see :mod:`.norms`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .saved.checksums import is_list, is_number

#: The ratio is measured in one coded step of this many in the long run.
EVERY = 10
#: Before that, the distance to the next measurement is the number of coded steps so far, divided by this: gradients
#: change most in the beginning. So the first fifty steps all measure.
SPREAD = 25
#: And it is at most the number of coded steps since residuals were empty, divided by this: they grow while they fill,
#: and results with them.
FILLING = 2
#: Results are handed back times the mean of so many measurements: those of one bit are larger in one step than in
#: another.
RECENT = 3
#: A measurement that differs by this much from that mean is the first one of a new state of things.
JUMP = math.log(1.5)
#: Ratios this near to 1 count as 1: such results are handed back as they are, to the bit.
NEAR = math.log(1.125)
#: A norm or a ratio that has changed by this much makes what exact rounds have found out of date.
FAR = 3.0
#: After a gradient a thousand times as large as others, residuals are as large, and results beside which the next mean
#: gradient is next to nothing: with their ratio, clipping would see only that one. So where results are this many times
#: as large as usual (in a round that empties residuals, that squared), the ratio counts as at least the usual one
#: divided by BELOW.
ABOVE, BELOW = 3.0, 2.0
#: What is usual moves towards what is measured: in coded step t by a factor of 1 + 1/t, as residuals grow when they
#: first fill, and later as in this step; of more steps than :data:`AWAY` without a measurement, so many count.
SETTLED, AWAY = 20, 100
#: A ratio beyond this, or below its reciprocal, is none: float32 has no room for results times it.
BEYOND = 2.0**60


class Ratio:
    """The ratio of norms, and what is kept beside it from step to step; equal on every rank.

    Attributes:
        recent: as measured last, at most :data:`RECENT` times; the last one comes last.
        usual: follows these slowly; 0 before the first.
        made: the norm of what the code makes, likewise.
        large: it was far above that when it was measured last.
        code: names the code that all of this is of; 0 before the first.
        norm: of the mean gradient, as measured last.
        stale: what exact rounds have found is out of date: norms or ratios have run away since.
        off: the ranks have agreed to hand back results as they are.
        age: coded steps since the measurement.
        steps: coded steps so far, as far as they count, see :data:`SPREAD`.
        filling: those since residuals were empty.
        keeps: coded rounds keep something, so that results may grow; not saved.
    """

    recent: list[float]
    usual: float
    made: float
    large: bool
    code: int
    norm: float
    stale: bool
    off: bool
    age: int
    steps: int
    filling: int
    keeps: bool
    _since: tuple[float, float] | None  # the first norm after the last exact round, and the ratio of full residuals

    def __init__(self) -> None:
        self.load({})

    @property
    def value(self) -> float | None:
        """The ratio; None before the first measurement.

        Where every step measures it moves too fast for a mean.
        """
        recent = self.recent[-1:] if self.distance == 1 else self.recent
        return math.fsum(recent) / len(recent) if recent else None

    @property
    def distance(self) -> int:
        """In one coded step of so many the ratio is measured now."""
        if not self.keeps and len(self.recent) == RECENT and all(counted(ratio) == 1.0 for ratio in self.recent):
            return EVERY  # what the method makes has the right norm
        return max(1, min(EVERY, self.steps // SPREAD, self.filling // FILLING))

    @property
    def due(self) -> bool:
        """Whether the coming coded step measures it."""
        return not self.recent or self.age + 1 >= self.distance

    def age_by_a_step(self) -> None:
        """Count a coded step."""
        self.age += 1
        self.steps, self.filling = min(self.steps + 1, SPREAD * EVERY), min(self.filling + 1, FILLING * EVERY)

    def skip_the_beginning(self) -> None:
        """Be measured as in the long run, once the first measurement is there: for benchmarks, on every rank alike."""
        self.steps, self.filling = SPREAD * EVERY, FILLING * EVERY

    def take(self, norm: float, made: float, *, empties: bool) -> None:
        """Take in a measurement.

        Args:
            norm: of the exact mean.
            made: the norm of what the code made.
            empties: it was a round that sent all that waited, whose ratio says nothing of others.
        """
        self.norm = norm
        if empties:
            self.filling = 0
            return
        now, before = norm / made, self.value
        self.large, most = self._is_large(made), self._pace()
        self.usual, self.made = _towards(now, self.usual, most), _towards(made, self.made, most)
        if before is not None and abs(math.log(now / before)) > JUMP:
            self.recent, self.filling = [], 0
        self.recent, self.age = [*self.recent, now][-RECENT:], 0
        first, ratio = self._since or (norm, now)
        if self.keeps and self.steps < FILLING * EVERY:
            ratio = now  # that results grow while residuals first fill says nothing of what exact rounds have found
        self._since = first, ratio
        self.stale = norm > FAR * first or not 1 / FAR < now / ratio < FAR

    def refresh(self) -> None:
        """Begin to look for changes anew, as in an exact round."""
        self._since, self.stale = None, False

    def rescale(self, factor: float) -> None:
        """Let norms be those of gradients that are so much larger, as a gradient scaler makes them."""
        self.norm *= factor
        self.made *= factor
        if self._since:
            self._since = self._since[0] * factor, self._since[1]

    def used(self) -> float:
        """Return what results are handed back times."""
        value = self.value
        return 1.0 if self.off or value is None else self._counted(value, self.large)

    def counted(self, norm: float, made: float, *, empties: bool) -> float:
        """Return what the ratio of a step counts as that was just taken in, see :meth:`take`."""
        return self._counted(norm / made, self._is_large(made, ABOVE**2) if empties else self.large)

    def _counted(self, ratio: float, large: bool) -> float:
        return counted(max(ratio, self.usual / BELOW) if large else ratio)

    def _is_large(self, made: float, above: float = ABOVE) -> bool:
        return made > above * self.made > 0.0

    def _pace(self) -> float:
        """Return the most by which what is usual moves now. A product, not a power: that differs between processors."""
        step = 1 + 1 / max(1, min(self.steps, SETTLED))
        return math.prod([step] * min(self.age, AWAY))

    def begin(self, code: int) -> None:
        """Begin a step whose results are of this code; what is usual of another one says nothing."""
        if self.code != code:
            self.usual, self.made, self.large = 0.0, 0.0, False
        self.code = code

    def state(self) -> dict[str, Any]:
        """Return what has to be saved; empty where nothing was measured."""
        *earlier, last = self.recent or [0.0]
        if not (self.recent or self.steps or self.off):
            return {}
        numbers = {"ratio": last, "norm": self.norm, "age": self.age, "since": list(self._since or ())}
        if self.usual:
            numbers |= {"usual": self.usual, "made": self.made, "large": self.large, "code": self.code}
        # What goes on from a state of before is saved like that, to the byte, until it has measured.
        others = {"earlier": earlier, "steps": self.steps, "filling": self.filling} if self.steps else {}
        return numbers | others | {"stale": self.stale, "off": self.off}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state` returned; of nothing, begin anew.

        States of before have one ratio, and neither a usual one nor numbers of steps, which begin anew.
        """
        self.keeps = True
        ratios = [*state.get("earlier", ()), state.get("ratio", 0.0)]
        self.recent = [float(ratio) for ratio in ratios if ratio]
        self.steps, self.filling = int(state.get("steps", 0)), int(state.get("filling", 0))
        self.usual, self.made = float(state.get("usual", 0.0)), float(state.get("made", 0.0))
        self.large, self.code = bool(state.get("large")), int(state.get("code", 0))
        self.norm, self.age = float(state.get("norm", 0.0)), int(state.get("age", 0))
        since = state.get("since")
        self._since = (float(since[0]), float(since[1])) if since else None
        self.stale, self.off = bool(state.get("stale")), bool(state.get("off"))


_NUMBERS = {"ratio", "usual", "made", "code", "norm", "age", "steps", "filling"}
_LISTS = {"earlier": range(RECENT), "since": (0, 2)}  # of numbers, and how long they may be
_FLAGS = {"large", "stale", "off"}


def check_state(state: object) -> bool:
    """Return whether a saved state has the form of what :meth:`Norms.state` returns."""
    if not isinstance(state, Mapping) or not set(state) <= {"wait", *_NUMBERS, *_LISTS, *_FLAGS}:
        return False
    return (
        is_list(state.get("wait", []), lambda name: isinstance(name, str))
        and all(is_number(state.get(name, 0)) for name in _NUMBERS)
        and all(
            is_list(found := state.get(name, []), _is_ratio) and len(found) in long for name, long in _LISTS.items()
        )
        and all(type(state.get(name, False)) is bool for name in _FLAGS)
    )


def _towards(now: float, usual: float, most: float) -> float:
    """Return what is usual, moved towards what is now by at most this factor; that itself where nothing is usual."""
    return min(max(now, usual / most), usual * most) if usual else now


def _is_ratio(value: object) -> bool:
    return is_number(value) and value != 0


def counted(ratio: float) -> float:
    """Return what a ratio counts as: near 1, as 1."""
    return 1.0 if abs(math.log(ratio)) < NEAR else ratio
