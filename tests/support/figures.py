"""Figures that a test leaves for the report of tools/cuda_check.py, which sets the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER = "HVC_CHECK_FIGURES"


def folder() -> Path | None:
    """Return where figures and files go; None where nothing asks for them."""
    given = os.environ.get(FOLDER)
    if not given:
        return None
    Path(given).mkdir(parents=True, exist_ok=True)
    return Path(given)


def figure(name: str, value: Any) -> None:
    """Leave one figure, of plain data; the last one of a name counts."""
    if where := folder():
        (where / f"{name.replace(':', '').replace(' ', '_')}.json").write_text(json.dumps({name: value}))
