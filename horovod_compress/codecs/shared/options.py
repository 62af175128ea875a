"""What methods check their options with."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError


def whole(value: Any) -> bool:
    """Return whether an option is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_choice(name: str, value: Any, *allowed: str | int | bool) -> None:
    """Refuse an option that is none of the values that it can have.

    Raises:
        ConfigError: says which these are.
    """
    # Types count too: 1 is not True, nor 16.0 the 16 that ranks and checkpoints compare.
    if not any(type(value) is type(one) and value == one for one in allowed):
        *first, last = (f'"{one}"' if isinstance(one, str) else str(one) for one in allowed)
        raise ConfigError(f"{name} should be {', '.join(first)} or {last}, got {value!r}")
