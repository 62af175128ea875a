"""What a bucket exchanges in the coming steps, and the names of its kinds of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...codecs.base import Codec


@dataclass(frozen=True)
class Next:
    """What a bucket exchanges in the coming steps.

    Attributes:
        kind: "method" for the rounds of its method; "plain" for what is offered as it is, without the method and its
            state; "halved" likewise, with float32 sent as bfloat16. Beside a second moment that is held, "coded" for
            the rounds of a method that need it, without its own full-precision rounds, and "exact" for what the second
            moment is renewed by, in 16 bits: what a square is made of need not be known any better.
        index: stands for the step where a method's rounds differ by it; None for the step.
    """

    kind: Literal["method", "plain", "halved", "coded", "exact"] = "method"
    index: int | None = None


def labels(variants: Sequence[Codec]) -> dict[Codec, str]:
    """Return a label for each kind of round: its name, and a number from the second one of that name on."""
    labels: dict[Codec, str] = {}
    seen: dict[str, int] = {}
    for codec in variants:
        seen[codec.name] = number = seen.get(codec.name, 0) + 1
        labels[codec] = codec.name if number == 1 else f"{codec.name} {number}"
    return labels
