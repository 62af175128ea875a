"""Saved states that tests change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod_compress.engine.saved import checksums


def resealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a changed state with the checksums that it would have been saved with, so that these refuse nothing."""
    return checksums.sealed({name: part for name, part in state.items() if name != checksums.KEY})
