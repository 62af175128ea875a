"""What a state has of second moments that are held: its form, and what does not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import StateError
from ..saved.checksums import is_number

_OF_THE_SAME = "load the state of the same model"


def check_state(
    state: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size], needs: Collection[str]
) -> None:
    """Refuse a saved second moment that is not of these parameters.

    Args:
        needs: the parts that one has to have beside the tensor.

    Raises:
        ConfigError: names the parameter.
    """
    for name, saved in state.items():
        moment = _moment_of(name, saved, needs)
        if name not in shapes:
            raise StateError(f"there is a saved second moment of {name}, and no such parameter; {_OF_THE_SAME}")
        if moment.shape != shapes[name]:
            raise StateError(
                f"the saved second moment of {name} should be of shape {tuple(shapes[name])}, got "
                f"{tuple(moment.shape)}; {_OF_THE_SAME}"
            )
        if not bool((moment >= 0).all()):
            raise StateError(
                f"the saved second moment of {name} should be at least 0, got {float(moment.min())}; load a state "
                "that was saved at a step that went well"
            )


def _moment_of(name: object, saved: object, needs: Collection[str]) -> Tensor:
    """Return the tensor of a saved second moment, whose other parts are numbers.

    Raises:
        StateError: it is malformed.
    """
    parts = dict(saved) if isinstance(saved, Mapping) else {}
    has_all = parts.keys() >= {*needs}
    moment, stand_in, divides = parts.pop("moment", None), parts.pop("stand_in", None), parts.pop("divides", False)
    fits = isinstance(moment, Tensor) and moment.dtype in (torch.float32, torch.float64)
    numbers = {*parts} <= {"steps", "since", "eps", "usual"}
    fits = fits and has_all and numbers and type(divides) is bool and all(map(is_number, parts.values()))
    fits = fits and (stand_in is None or _stands_in(stand_in, moment))
    if not fits or not parts["steps"]:
        raise StateError(
            f"the saved second moment of {name!r:.100} should be a dense tensor of at least 32 bits with its "
            f"{', '.join(needs)}, got {_in_words(saved):.200}; load what state_dict() returned"
        )
    assert isinstance(moment, Tensor)
    return moment


def _stands_in(given: object, moment: Tensor) -> bool:
    """Return whether this may stand in for rows of a second moment."""
    shape = [*moment.shape[:1], *[1] * (moment.dim() - 1)]
    if not isinstance(given, Tensor) or given.dtype is not moment.dtype or [*given.shape] != shape:
        return False
    return bool((given >= 0).all())


def tensors_of(saved: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Return copies of the tensors of a saved second moment, on a device."""
    found = {name: part for name, part in saved.items() if isinstance(part, Tensor)}
    return {name: part.to(device, copy=True).contiguous() for name, part in found.items()}


def _in_words(saved: object) -> str:
    """Return the parts of a saved second moment, of which the tensor may be large."""
    if not isinstance(saved, Mapping):
        return repr(saved)
    kinds = {name: f"{p.dtype} of shape {tuple(p.shape)}" for name, p in saved.items() if isinstance(p, Tensor)}
    return ", ".join(f"{name}: {kinds.get(name) or repr(part)}" for name, part in saved.items())
