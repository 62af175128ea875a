"""What a run leaves behind: curves, statistics, hashes, and the JSON file of them."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import statistics
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from files import write_whole

WARM_UP = 5  # steps left out of the step time: first allocations, first plan, first connections


def parameter_hash(parameters: Iterable[Tensor]) -> str:
    """Return the SHA-256 of all parameters' bytes, in order."""
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(_bytes(parameter))
    return digest.hexdigest()


def state_hash(state: Any) -> str:
    """Return the SHA-256 of a nested state, whatever order its dictionaries are in."""
    digest = hashlib.sha256()
    _feed(digest, state)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(_bytes(value))
    else:
        digest.update(repr(value).encode())


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def spread(seconds: list[float]) -> dict[str, float | int] | None:
    """Return median and quartiles after the warm-up, or None when too few steps ran."""
    measured = seconds[WARM_UP:]
    if len(measured) < 2:
        return None
    first, middle, third = statistics.quantiles(measured, n=4, method="inclusive")
    return {"median": middle, "q1": first, "q3": third, "count": len(measured)}


def exchange_seconds(stats: dict[str, Any]) -> float | None:
    """Return the exchange time per step, or None where the method does not tell."""
    total = stats.get("seconds", {}).get("exchange")
    return total / stats["steps"] if total is not None and stats.get("steps") else None


def versions() -> dict[str, str]:
    """Return the versions that decide the numbers."""
    found = {"python": platform.python_version()}
    for package in ("torch", "horovod", "horovod-compress", "numpy", "scikit-learn"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def command_line() -> str:
    """Return the command, with the script's name alone: its folder says nothing."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def write_json(path: str, record: dict[str, Any]) -> None:
    """Write a record, whole or not at all."""
    text = json.dumps(_plain(record), indent=1, allow_nan=False)
    write_whole(Path(path), lambda temporary: temporary.write_text(text + "\n"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # tensor and NumPy scalars
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no word for it, and many readers refuse NaN
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
