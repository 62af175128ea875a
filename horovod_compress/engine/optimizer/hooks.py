"""Hooks around an optimizer's step, which torch.compile is to leave alone: what they look at changes in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Hook = TypeVar("Hook", bound=Callable[..., Any])


def uncompiled(hook: Hook) -> Hook:
    """Return a hook that a compiled step calls as it is; it would be compiled again and again, up to torch's limit."""
    import torch._dynamo  # not with the package: it takes a second, and any optimizer has brought it

    found: Hook = torch._dynamo.disable(hook)
    return found
