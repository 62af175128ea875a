"""One rank's state as a file: a checked header of canonical JSON, then the tensors' bytes. Nothing is unpickled.

======  =====  ==================================================
offset  bytes  content, integers little-endian
======  =====  ==================================================
0       8      magic, ``HVCSTATE``
8       4      version of this layout, 1
12      4      CRC-32C of the header
16      8      bytes of the header
24             header: JSON, {"state": with numbers for tensors, "tensors": [dtype, shape, CRC-32C] of each}
               the tensors' bytes, one behind the other, in that order
======  =====  ==================================================
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CorruptFrameError
from . import sealed

_START = struct.Struct("<8sIIQ")
_MAGIC, _VERSION = b"HVCSTATE", 1
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


def parts(state: Mapping[str, Any]) -> Iterator[memoryview]:
    """Return what a file holds, in pieces; the state must not change meanwhile."""
    named = sealed.tensors(state)
    kinds = [[str(t.dtype).removeprefix("torch."), list(t.shape), sealed.crc(t)] for _, t in named]
    header = sealed.canonical({"state": sealed.outline(state), "tensors": kinds})
    yield memoryview(_START.pack(_MAGIC, _VERSION, sealed.crc(header), len(header)) + header)
    for _, tensor in named:
        yield sealed.raw(tensor).numpy().data


def parse(data: bytearray) -> dict[str, Any]:
    """Return the state of a file; its tensors share the memory of ``data``.

    Raises:
        CorruptFrameError: this is not, byte for byte, what was written.
    """
    header, at = _header(data)
    found: list[Tensor] = []
    for dtype, shape, crc in header["tensors"]:
        count, kind = math.prod(shape), _DTYPES[dtype]
        tensor = _tensor(data, at, count, kind)
        at += count * kind.itemsize
        _must(sealed.crc(tensor) == crc, f"the checksum of tensor {len(found)} is wrong")
        found.append(tensor.view(shape))
    _must(at == len(data), f"it should have {at} bytes, and has {len(data)}")
    state = _filled(header["state"], found)
    _must(isinstance(state, dict), "it holds no state")
    return dict(state)


def _header(data: bytearray) -> tuple[dict[str, Any], int]:
    """Return the checked header, and where the tensors begin."""
    _must(len(data) >= _START.size, f"it has only {len(data)} bytes")
    magic, version, crc, size = _START.unpack_from(data)
    _must(magic == _MAGIC, f"it begins with {bytes(magic)!r}, which is not {_MAGIC!r}")
    _must(
        version == _VERSION, f"its layout has version {version}, but this version of horovod-compress reads {_VERSION}"
    )
    end = _START.size + size
    _must(end <= len(data), f"it has {len(data)} bytes, and its header alone should end after {end}")
    text = bytes(data[_START.size : end])
    _must(sealed.crc(text) == crc, "the checksum of its header is wrong")
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


def _tensor(data: bytearray, at: int, count: int, dtype: torch.dtype) -> Tensor:
    size = count * dtype.itemsize
    _must(at + size <= len(data), f"it has {len(data)} bytes, and a tensor should end after {at + size}")
    if not count:
        return torch.empty(0, dtype=dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=at)
    return raw.view(dtype) if raw.data_ptr() % dtype.itemsize == 0 else raw.clone().view(dtype)


def _filled(part: Any, tensors: list[Tensor]) -> Any:
    """Return what :func:`sealed.outline` made plain, with its tensors."""
    if sealed.is_number_of_tensor(part):
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
