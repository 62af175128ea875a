"""Saved states with checksums, in memory and as files, so that a change of any byte is found when one is loaded.

A state is plain data and tensors by name. Its checksums are a CRC-32C of each tensor, in the order of sorted names, and
one of everything else: names, numbers, types, shapes, and the tensors' checksums.

As a file, one rank's state is a checked header of canonical JSON, then the tensors' bytes. Nothing is unpickled.

======  =====  ==================================================
offset  bytes  content, integers little-endian
======  =====  ==================================================
0       8      magic, ``HVCSTATE``
8       4      version of this layout, 1
12      4      CRC-32C of the header
16      8      bytes of the header
24             header: JSON, {"state": with numbers for tensors, "tensors": [dtype, shape, CRC-32C] of each}
               the tensors' bytes, one after the other, in that order
======  =====  ==================================================
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...errors import CorruptFrameError, StateError
from ...ops.checksums import bytes_of

# ---- in memory -----------------------------------------------------------------------------------

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
    return bytes_of(tensor.detach().cpu())


def _checksums(state: Mapping[str, Any]) -> dict[str, Any]:
    found: list[tuple[str, Tensor]] = []
    document = _outline(state, "", found)
    of_tensors = [crc(tensor) for _, tensor in found]
    kinds = [kind_of(tensor) for _, tensor in found]
    return {"tensors": of_tensors, "rest": crc(canonical([document, kinds, of_tensors]))}


def _outline(value: Any, where: str, found: list[tuple[str, Tensor]], depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        _check_tensor(value, where)
        found.append((where, value))
        return {"tensor": len(found) - 1}
    by_name = isinstance(value, Mapping) and all(type(name) is str for name in value)
    if depth < _DEEPEST and by_name and not is_number_of_tensor(value):
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


def kind_of(tensor: Tensor) -> str:
    """Return the dtype and the shape of a tensor, in words."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def is_number(value: object) -> bool:
    """Return whether a part of a state is a finite number, at least 0."""
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def is_list(value: object, of: Callable[[object], bool]) -> bool:
    """Return whether a part of a state is a list of such values."""
    return isinstance(value, (list, tuple)) and all(map(of, value))


# ---- as a file -----------------------------------------------------------------------------------

_START = struct.Struct("<8sIIQ")
_MAGIC, _VERSION = b"HVCSTATE", 1
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


def parts(state: Mapping[str, Any]) -> Iterator[memoryview]:
    """Return what a file holds, in pieces; the state must not change meanwhile."""
    named = tensors(state)
    kinds = [[str(t.dtype).removeprefix("torch."), list(t.shape), crc(t)] for _, t in named]
    header = canonical({"state": outline(state), "tensors": kinds})
    yield memoryview(_START.pack(_MAGIC, _VERSION, crc(header), len(header)) + header)
    for _, tensor in named:
        yield raw(tensor).numpy().data


def parse(data: bytearray | memoryview) -> dict[str, Any]:
    """Return the state of a file; its tensors share the memory of ``data``.

    Raises:
        CorruptFrameError: this is not, byte for byte, what was written.
    """
    header, at = _header(data)
    found: list[Tensor] = []
    for dtype, shape, expected in header["tensors"]:
        count, kind = math.prod(shape), _DTYPES[dtype]
        tensor = _tensor(data, at, count, kind)
        at += count * kind.itemsize
        _must(crc(tensor) == expected, f"the checksum of tensor {len(found)} is wrong")
        found.append(tensor.view(shape))
    _must(at == len(data), f"it should have {at} bytes, and has {len(data)}")
    state = _filled(header["state"], found)
    _must(isinstance(state, dict), "it holds no state")
    return dict(state)


def _header(data: bytearray | memoryview) -> tuple[dict[str, Any], int]:
    """Return the checked header, and where the tensors begin."""
    _must(len(data) >= _START.size, f"it has only {len(data)} bytes")
    magic, version, expected, size = _START.unpack_from(data)
    _must(magic == _MAGIC, f"it begins with {bytes(magic)!r}, which is not {_MAGIC!r}")
    _must(
        version == _VERSION, f"its layout has version {version}, but this version of horovod-compress reads {_VERSION}"
    )
    end = _START.size + size
    _must(end <= len(data), f"it has {len(data)} bytes, and its header alone should end after {end}")
    text = bytes(data[_START.size : end])
    _must(crc(text) == expected, "the checksum of its header is wrong")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    _must(_is_header(header), "its header is malformed")
    return header, end


def _is_header(header: Any) -> bool:
    tensors = header.get("tensors") if isinstance(header, dict) else None
    return isinstance(tensors, list) and "state" in header and all(map(_is_tensor, tensors))


def _is_tensor(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 3 or type(entry[0]) is not str or entry[0] not in _DTYPES:
        return False
    shape, crc = entry[1:]
    return isinstance(shape, list) and type(crc) is int and all(type(size) is int and size >= 0 for size in shape)


def _tensor(data: bytearray | memoryview, at: int, count: int, dtype: torch.dtype) -> Tensor:
    size = count * dtype.itemsize
    _must(at + size <= len(data), f"it has {len(data)} bytes, and a tensor should end after {at + size}")
    if not count:
        return torch.empty(0, dtype=dtype, device="cpu")
    raw = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=at)
    return raw.view(dtype) if raw.data_ptr() % dtype.itemsize == 0 else raw.clone().view(dtype)


def _filled(part: Any, tensors: list[Tensor]) -> Any:
    """Return what :func:`outline` made plain, with its tensors."""
    if is_number_of_tensor(part):
        _must(0 <= part["tensor"] < len(tensors), "its header names a tensor that is not there")
        return tensors[part["tensor"]]
    if isinstance(part, dict):
        return {name: _filled(value, tensors) for name, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, tensors) for value in part]
    return part


def _must(holds: bool, problem: str) -> None:
    if not holds:
        raise CorruptFrameError(f"this file is not an intact saved compression: {problem}")
