"""Checksums of a saved state, so that a change of any of its bytes is found when it is loaded.

A state is plain data and tensors by name. Its checksums are a CRC-32C of each tensor, in the order of sorted names, and
one of everything else: names, numbers, types, shapes, and the tensors' checksums.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import CorruptFrameError, StateError

KEY = "checksums"
_DEEPEST = 12  # states have five levels
_PLAIN_BITS = 64


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with its checksums."""
    return {**state, KEY: _checksums(state)}


def check(state: Mapping[str, Any]) -> None:
    """Refuse a state that is not, byte for byte, what :func:`sealed` returned.

    Raises:
        CorruptFrameError: names the tensor, or says that it is something else.
        StateError: the state holds anything but plain data and dense tensors.
    """
    saved, found = state.get(KEY), _checksums({name: part for name, part in state.items() if name != KEY})
    if canonical(outline({KEY: saved})) == canonical({KEY: found}):
        return
    theirs = saved.get("tensors") if isinstance(saved, Mapping) else None
    names = [name for name, _ in tensors(state)]
    if isinstance(theirs, list) and len(theirs) == len(names):
        odd = [name for name, mine, other in zip(names, found["tensors"], theirs, strict=True) if mine != other]
    else:
        odd = []
    what = f"the checksum of {odd[0]} has changed" if odd else "the checksum of its names and numbers has changed"
    raise CorruptFrameError(
        f"the saved compression state is corrupt: {what} since it was saved; load another copy, or an earlier state, "
        "and check where it was stored"
    )


def tensors(state: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the tensors of a state, in the order of sorted names.

    Raises:
        StateError: the state holds anything but plain data and dense tensors.
    """
    found: list[tuple[str, Tensor]] = []
    _outline(state, "", found)
    return found


def outline(state: Mapping[str, Any]) -> Any:
    """Return a state as plain data, with a number in the place of each tensor.

    Raises:
        StateError: the state holds anything but plain data and dense tensors.
    """
    return _outline(state, "", [])


def canonical(document: Any) -> bytes:
    """Return plain data as bytes: equal data give equal bytes."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def crc(data: Tensor | bytes) -> int:
    """Return the CRC-32C of bytes, or of a tensor's memory."""
    if isinstance(data, bytes):
        return ops.crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else 0
    return ops.crc32c(raw(data))


def raw(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in host memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _checksums(state: Mapping[str, Any]) -> dict[str, Any]:
    found: list[tuple[str, Tensor]] = []
    document = _outline(state, "", found)
    of_tensors = [crc(tensor) for _, tensor in found]
    kinds = [_kind(tensor) for _, tensor in found]
    return {"tensors": of_tensors, "rest": crc(canonical([document, kinds, of_tensors]))}


def _outline(value: Any, where: str, found: list[tuple[str, Tensor]], depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        _check_tensor(value, where)
        found.append((where, value))
        return {"tensor": len(found) - 1}
    if depth < _DEEPEST and isinstance(value, Mapping) and not is_number_of_tensor(value) and _by_name(value):
        return {name: _outline(value[name], f"{where} {name}".strip(), found, depth + 1) for name in sorted(value)}
    if depth < _DEEPEST and type(value) in (list, tuple):
        return [_outline(part, f"{where} {index}".strip(), found, depth + 1) for index, part in enumerate(value)]
    if value is None or type(value) in (bool, str, float):
        return value
    if type(value) is int and value.bit_length() <= _PLAIN_BITS:
        return value
    raise StateError(
        f"the saved compression state should hold plain data and tensors, by name; {where or 'it'} is "
        f"{type(value).__name__}: {value!r:.80}; load what state_dict() returned"
    )


def is_number_of_tensor(value: object) -> bool:
    """Return whether this stands for a tensor in what :func:`outline` returned."""
    return isinstance(value, Mapping) and list(value) == ["tensor"] and type(value["tensor"]) is int


def _by_name(value: Mapping[Any, Any]) -> bool:
    return all(type(name) is str for name in value)


def _check_tensor(tensor: Tensor, where: str) -> None:
    problem = (
        f"{tensor.layout}" if tensor.layout is not torch.strided else
        "on the device meta, without values" if tensor.is_meta else
        "quantized" if tensor.is_quantized else
        "nested" if tensor.is_nested else
        "complex" if tensor.is_complex() else ""
    )  # fmt: skip
    if problem:
        raise StateError(
            f"the saved compression state should hold dense tensors; {where} is {problem}; save it again with this "
            f"version"
        )


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
