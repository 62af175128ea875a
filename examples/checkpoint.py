"""Save and load everything a run needs to continue as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from files import write_whole

# What must not change between saving and loading, or the run would be another run.
FIXED = (
    "task",
    "method",
    "optimizer",
    "seed",
    "batch",
    "shards",
    "update_mode",
    "delay",
    "outer_options",
    "warmup_exchanges",
    "overlap",
    "fragments",
    "second_moment",
    "momentum",
    "beta2",
    "exact_steps",
)


def rank_file(name: str) -> Path:
    """Return this rank's file: residuals differ between ranks, so each has its own."""
    return Path(f"{name}.rank{hvd.rank()}")


def save(name: str, step: int, chosen: Any, model: nn.Module, optimizer: Any, compression: Any) -> None:
    """Write this rank's checkpoint."""
    state = {
        "step": step,
        "world": hvd.size(),
        "fixed": {key: getattr(chosen, key) for key in FIXED},
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "compression": compression.state_dict(),
    }
    write_whole(rank_file(name), lambda path: torch.save(state, path))


def load(name: str, chosen: Any, model: nn.Module, optimizer: Any, compression: Any) -> int:
    """Put this rank's checkpoint into freshly built objects and return its step.

    Raises:
        ValueError: the file is missing, damaged, or of another run.
    """
    path = rank_file(name)
    state = _read(path)
    _check(path, state, chosen)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    compression.load_state_dict(state["compression"])
    return int(state["step"])


def _read(path: Path) -> dict[str, Any]:
    try:
        # weights_only keeps a stranger's file harmless: nothing in it is executed.
        # To the CPU first: it may have been saved on a GPU, and is loaded into tensors that have their place.
        return dict(torch.load(path, weights_only=True, map_location="cpu"))
    except Exception as error:
        raise ValueError(f"cannot read checkpoint {path}: {error}") from error


def _check(path: Path, state: dict[str, Any], chosen: Any) -> None:
    if state["world"] != hvd.size():
        raise ValueError(f"checkpoint {path} was saved by {state['world']} ranks, but this run has {hvd.size()}")
    for key, saved in state["fixed"].items():
        if saved != getattr(chosen, key):
            raise ValueError(f"checkpoint {path} has {key}={saved}, but this run has {key}={getattr(chosen, key)}")
