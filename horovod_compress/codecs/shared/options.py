"""What methods check their options with."""

from __future__ import annotations

from typing import Any

from ...options import check_choice as check_choice


def whole(value: Any) -> bool:
    """Return whether an option is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)
