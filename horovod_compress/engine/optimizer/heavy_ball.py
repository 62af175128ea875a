"""What an optimizer's momentum makes of compressed gradients: some methods do not bear it, others hardly.

With momentum b a result counts 1 / (1 - b) times over the steps that follow. Upon a method's own momentum that grows
without end. And what waited for many steps before it was sent counts late and so many times: at a learning rate that
suits uncompressed training the loss may rise. So it may with one bit from the first step on, when gradients are
largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ...codecs.base import Codec
from ...errors import ConfigError
from ..methods import Methods

Named = Iterable[tuple[str, nn.Parameter]]

#: Waiting for so many steps, times how often a result counts, is too long for a rate that suits uncompressed training.
LONG = 100
#: A result that counts so many times makes errors of the first steps dangerous.
FAST = 5


def refuse_twice(optimizer: Any, methods: Methods, named: Named, updates: bool = False) -> None:
    """Refuse an optimizer's momentum upon a method's own.

    Args:
        updates: of weights are exchanged: Adam's first moment is in them too.

    Raises:
        ConfigError: says which of them to leave out.
    """
    for group, codec in _pairs(optimizer, methods, named):
        kept = _kept(group, updates)
        for option in ("momentum", "beta"):
            value = float(getattr(codec, option, 0.0))
            if kept and value:
                raise ConfigError(
                    f"{type(optimizer).__name__} has {kept[0]}, and {codec.name} keeps a momentum of its own, "
                    f"{option}={value:g}: together they diverge; give the optimizer {kept[1]}, or {codec.name} "
                    f"{option}=0"
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
    """Return what to tell the user of an optimizer whose momentum a method hardly bears with these options."""
    return _waits(optimizer, methods, named) or _starts(optimizer, methods, named)


def _starts(optimizer: Any, methods: Methods, named: Named) -> str | None:
    """Return it for one bit from the first step on: at a high rate that alone made training diverge."""
    if methods.warmup:
        return None
    for group, codec in _pairs(optimizer, methods, named):
        if (
            _times(group) >= FAST
            and codec.divides() == "before"
            and codec.feedback() == "own"
            and codec.share_sent() == 1
        ):
            return (
                f"{codec.name} compresses from the first step, when gradients are largest, and momentum="
                f"{_momentum(group):g} lets each result count {_times(group):.0f} times: at a high learning rate that "
                f"may diverge where uncompressed training does not; set warmup_steps=30"
            )
    return None


def _waits(optimizer: Any, methods: Methods, named: Named) -> str | None:
    """Return it for values that are sent late, and then count too much."""
    pairs = _pairs(optimizer, methods, named)
    found = [(codec.share_sent(), codec.name, group) for group, codec in pairs if _momentum(group)]
    share, name, group = min(found, key=lambda one: one[0], default=(1.0, "", {}))
    times = _times(group)
    if share == 1 or times / share < LONG:
        return None
    return (
        f"with {name} an element is sent about once in {1 / share:.0f} steps, and momentum={_momentum(group):g} lets "
        f"what waited count {times:.0f} times: a learning rate that suits uncompressed training may be far too high; "
        f"lower it, give the optimizer momentum=0, or send more with density="
    )


def _pairs(optimizer: Any, methods: Methods, named: Named) -> Iterator[tuple[Mapping[str, Any], Codec]]:
    """Return every group with each kind of round that its parameters have."""
    names = {id(parameter): name for name, parameter in named}
    for group in optimizer.param_groups:
        codecs = {methods.codec(names[id(p)]) for p in group["params"] if id(p) in names}
        for codec in codecs:
            yield from ((group, kind) for kind in dict.fromkeys((codec, *codec.variants())))


def _momentum(group: Mapping[str, Any]) -> float:
    """Return the momentum of SGD and the like. Adam divides its own out again."""
    return float(group.get("momentum") or 0.0)


def _times(group: Mapping[str, Any]) -> float:
    """Return how many times a result counts."""
    own = _momentum(group)
    return (1 - float(group.get("dampening") or 0.0)) / (1 - own) if own < 1 else math.inf
