"""What a rank remembers of what it did not send.

With ``x = gradient + residual`` and the consensus result ``G``:

===========  ==============================  ===================================================
rule         residual afterwards             source
===========  ==============================  ===================================================
``none``     there is none
``own``      ``x`` minus what ``x`` became   ordinary error feedback (Seide et al. 2014; Karimireddy
             in this rank's own payload      et al. 2019)
``global``   ``x - G``                       Marsit's global compensation (Wu et al. 2022, Alg. 1)
===========  ==============================  ===================================================

``own`` is bounded whatever the other ranks hold. ``global`` makes the parameters follow the mean
gradient exactly up to the mean residual, but on ranks whose data differ the residuals drift apart
until a full-precision round empties them.

The rules are applied by the decode kernels, in the pass that writes the result; a residual is
float32, or float64 for float64 gradients, and is left as it was when a bucket is not finite.
"""

from __future__ import annotations

from typing import Literal, get_args

Feedback = Literal["none", "own", "global"]

RULES: tuple[str, ...] = get_args(Feedback)
