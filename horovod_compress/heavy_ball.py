"""What an optimizer's momentum makes of compressed gradients: some methods do not bear it, others hardly.

With momentum b a result counts 1 / (1 - b) times over the steps that follow. Upon a method's own momentum that grows
without end. And what waited for many steps before it was sent counts late and so many times: at a learning rate that
suits uncompressed training the loss may rise.
"""

from __future__ import annotations

from typing import Any

from .errors import ConfigError
from .methods import Methods

#: Waiting for so many steps, times 1 / (1 - momentum), is too long for a rate that suits uncompressed training.
LONG = 100


def refuse_twice(optimizer: Any, methods: Methods) -> None:
    """Refuse SGD's momentum upon a method's own.

    Raises:
        ConfigError: says which of them to leave out.
    """
    own, found = _momentum(optimizer), methods.own_momenta()
    if own and found:
        name, (option, value) = next(iter(found.items()))
        raise ConfigError(
            f"{type(optimizer).__name__} has momentum={own:g}, and {name} keeps a momentum of its own, {option}="
            f"{value:g}: together they diverge; give the optimizer momentum=0, or {name} {option}=0"
        )


def advice(optimizer: Any, methods: Methods) -> str | None:
    """Return what to tell the user of an optimizer whose momentum makes what waits count too much."""
    own, found = _momentum(optimizer), methods.shares_sent()
    if not own or not found:
        return None
    name, share = min(found.items(), key=lambda item: item[1])
    if 1 / share / (1 - own) < LONG:
        return None
    return (
        f"with {name} an element is sent about once in {1 / share:.0f} steps, and momentum={own:g} lets what waited "
        f"count {1 / (1 - own):.0f} times: a learning rate that suits uncompressed training may be far too high; "
        f"lower it, give the optimizer momentum=0, or send more with density="
    )


def _momentum(optimizer: Any) -> float:
    """Return SGD's momentum, the most of all groups. Adam divides its own out again."""
    return max((float(group.get("momentum", 0.0)) for group in optimizer.param_groups), default=0.0)
