"""The ratio of norms that results are handed back times, and when it is measured, see :mod:`.norms`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .saved.checksums import is_list, is_number
from .usual import Usual

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
#: A ratio beyond this, or below its reciprocal, is none: float32 has no room for results times it.
BEYOND = 2.0**60


class Ratio:
    """The ratio of norms, and what is kept beside it from step to step; equal on every rank.

    Attributes:
        recent: as measured last, at most :data:`RECENT` times; the last one comes last.
        usual: of results and of the ratio.
        norm: of the mean gradient, as measured last.
        stale: what exact rounds have found is out of date: norms or ratios have run away since.
        off: the ranks have agreed to hand back results as they are.
        age: coded steps since the measurement.
        steps: coded steps so far, as far as they count, see :data:`SPREAD`.
        filling: those since residuals were empty.
        keeps: coded rounds keep something, so that results may grow; not saved.
    """

    recent: list[float]
    usual: Usual
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
        if not self.keeps and len(self.recent) == RECENT and all(_near(ratio) == 1.0 for ratio in self.recent):
            return EVERY  # what the method makes has the right norm
        return max(1, min(EVERY, self.steps // SPREAD, self.filling // FILLING))

    @property
    def due(self) -> bool:
        """Whether the coming coded step measures it."""
        return not self.recent or self.age + 1 >= self.distance

    def age_by_a_step(self) -> None:
        """Count a coded step."""
        self.age += 1
        self.usual.age_by_a_step()
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
        self.usual.take(now, made, self.age)
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
        self.usual.rescale(factor)
        if self._since:
            self._since = self._since[0] * factor, self._since[1]

    def used(self) -> float:
        """Return what results are handed back times."""
        value = self.value
        return 1.0 if self.off or value is None else _near(self.usual.counted(value))

    def counted(self, norm: float, made: float, *, empties: bool) -> float:
        """Return what the ratio of a step counts as that was just taken in, see :meth:`take`."""
        return _near(self.usual.counted(norm / made, emptied=made if empties else None))

    def expect(self, growth: float) -> None:
        """Let results be so much larger from now on, beside equal gradients: residuals follow a lower learning rate."""
        self.usual.expect(growth)
        if math.log(growth) > JUMP:
            self.recent, self.filling = [], 0  # what was measured says nothing of them

    def state(self) -> dict[str, Any]:
        """Return what has to be saved; empty where nothing was measured."""
        *earlier, last = self.recent or [0.0]
        if not (self.recent or self.steps or self.off):
            return {}
        numbers = {"ratio": last, "norm": self.norm, "age": self.age, "since": list(self._since or ())}
        # What goes on from a state of before is saved like that, to the byte, until it has measured.
        others = {"earlier": earlier, "steps": self.steps, "filling": self.filling} if self.steps else {}
        return numbers | self.usual.state() | others | {"stale": self.stale, "off": self.off}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state` returned; of nothing, begin anew.

        States of before have one ratio, and neither a usual one nor numbers of steps, which begin anew.
        """
        self.keeps = True
        ratios = [*state.get("earlier", ()), state.get("ratio", 0.0)]
        self.recent = [float(ratio) for ratio in ratios if ratio]
        self.steps, self.filling = int(state.get("steps", 0)), int(state.get("filling", 0))
        self.usual = Usual()
        self.usual.load(state)
        self.norm, self.age = float(state.get("norm", 0.0)), int(state.get("age", 0))
        since = state.get("since")
        self._since = (float(since[0]), float(since[1])) if since else None
        self.stale, self.off = bool(state.get("stale")), bool(state.get("off"))


_NUMBERS = {"ratio", "usual", "made", "known", "code", "norm", "age", "steps", "filling"}
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


def _is_ratio(value: object) -> bool:
    return is_number(value) and value != 0


def _near(ratio: float) -> float:
    """Return what a ratio counts as: near 1, as 1."""
    return 1.0 if abs(math.log(ratio)) < NEAR else ratio
