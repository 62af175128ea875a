"""What is usual of coded results, so that those of a spike are known: see "After a spike" in docs/clipping.md.

After a gradient a thousand times as large as others, residuals are as large, and results beside which the next mean
gradient is next to nothing. With the ratio of both, clipping would see only that one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: Results are far larger than usual where they are so many times as large.
ABOVE = 3.0
#: Those of a round that empties residuals are larger anyway, by about 1 / sqrt(3 density) with a sparse method: far
#: larger where they are so many times as large, or where those before them were.
EMPTIED = ABOVE**4
#: The ratio then counts as at least the usual one divided by this.
BELOW = 2.0
#: What is usual moves towards what is measured: in step t of a code by a factor of 1 + 1/t, as results grow with
#: residuals that fill, and later as in this step; of more steps than :data:`AWAY` without a measurement, so many count.
SETTLED, AWAY = 20, 100


class Usual:
    """What is usual of the results of one code.

    Attributes:
        ratio: of norms; 0 before the first.
        made: the norm of what the code makes.
        large: when that was measured last, it was far larger.
        steps: of this code so far, at most :data:`SETTLED`.
        code: names it; 0 for that of the next step.
    """

    ratio: float
    made: float
    large: bool
    steps: int
    code: int

    def __init__(self) -> None:
        self.load({})

    def begin(self, code: int) -> None:
        """Begin a step whose results are of this code; what is usual of another one says nothing."""
        if self.code not in (0, code):
            self.load({})
        self.code = code

    def age_by_a_step(self) -> None:
        """Count a coded step."""
        self.steps = min(self.steps + 1, SETTLED)

    def take(self, ratio: float, made: float, age: int) -> None:
        """Take in a measurement, so many steps after the last one."""
        self.large = self._is_large(made, ABOVE)
        # A product, not a power: that differs between processors.
        most = math.prod([1 + 1 / max(1, self.steps)] * min(age, AWAY))
        self.ratio, self.made = _towards(ratio, self.ratio, most), _towards(made, self.made, most)

    def expect(self, growth: float) -> None:
        """Let results be so much larger from now on, beside equal gradients."""
        self.ratio, self.made = self.ratio / growth, self.made * growth

    def rescale(self, factor: float) -> None:
        """Let gradients be so much larger from now on, and results with them."""
        self.made *= factor

    def counted(self, ratio: float, emptied: float | None = None) -> float:
        """Return what a ratio counts as.

        Args:
            emptied: the norm of what the code made, in a round that empties residuals.
        """
        large = self.large or (emptied is not None and self._is_large(emptied, EMPTIED))
        return max(ratio, self.ratio / BELOW) if large else ratio

    def _is_large(self, made: float, above: float) -> bool:
        return made > above * self.made > 0.0

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """Return what has to be saved; empty before the first coded step."""
        names = {"usual": self.ratio, "made": self.made, "large": self.large, "known": self.steps, "code": self.code}
        return names if self.steps or self.ratio else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state` returned; of nothing, begin anew."""
        self.ratio, self.made = float(state.get("usual", 0.0)), float(state.get("made", 0.0))
        self.large, self.steps = bool(state.get("large")), int(state.get("known", 0))
        self.code = int(state.get("code", 0))


def _towards(now: float, usual: float, most: float) -> float:
    """Return what is usual, moved towards what is now by at most this factor; that itself where nothing is usual."""
    return min(max(now, usual / most), usual * most) if usual else now
