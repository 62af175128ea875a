"""Whatever a parser is given, it returns what was written or refuses it in words, and never anything else."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from horovod_compress.cli.plan import models
from horovod_compress.engine.saved import checksums, state_folder
from horovod_compress.errors import ConfigError, CorruptFrameError, StateError
from horovod_compress.exchange.wire import HEADER_BYTES, Address, FrameBuffer, NonFiniteCount
from horovod_compress.schedule.plan import Plan
from tests.golden import cases
from tests.golden.test_golden import GOLDEN
from tests.support.marks import slow

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
NAMES = st.sampled_from(["method", "tensors", "plain", "x"])
BUCKET = st.dictionaries(
    NAMES, JSON | st.lists(st.tuples(st.text(max_size=4), JSON, st.sampled_from(["float32", "x"])))
)
DUE = Address(7, 0, 1, 5, 2, 3, 4, 6)


@given(JSON | st.lists(BUCKET, max_size=3))
def test_plans(document: Any) -> None:
    text = json.dumps(document)
    try:
        plan = Plan.from_document(json.loads(text))
    except ConfigError:
        return
    assert Plan.from_document(json.loads(json.dumps(plan.document()))) == plan


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_plan_files(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.plan"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        assert isinstance(Plan.load(path), Plan)


@given(st.binary(max_size=300) | st.text(alphabet='name,shapecm\n0123456789x.#" ', max_size=200))
def test_shape_files(tmp_path_factory: pytest.TempPathFactory, data: bytes | str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.csv"
    path.write_bytes(data if isinstance(data, bytes) else f"name,shape,macs\n{data}".encode())
    with contextlib.suppress(ValueError):
        assert models.load(str(path)).tensors


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES + 40), st.integers(0, 40))
def test_frames(data: bytes, length: int) -> None:
    frame = FrameBuffer(40)
    frame.memory[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with pytest.raises(CorruptFrameError):
        frame.check(DUE, length)


@given(st.binary(max_size=200), st.integers(0, 1 << 64 - 1), st.booleans())
def test_state_files(data: bytes, size: int, is_signed: bool) -> None:
    """Also with a good beginning, and a header whose checksum is right."""
    start = checksums._START.pack(b"HVCSTATE", 1, checksums.crc(data), len(data) if is_signed else size)
    for whole in (data, start + data):
        try:
            checksums.parse(bytearray(whole))
        except CorruptFrameError:
            continue
        assert is_signed


@given(JSON, st.lists(st.tuples(JSON, JSON, JSON), max_size=2), JSON)
def test_headers_of_state_files(state: Any, tensors: list[Any], rest: Any) -> None:
    for header in ({"state": state, "tensors": tensors}, {"state": {"a": {"tensor": 0}}, "tensors": tensors}, rest):
        text = checksums.canonical(header)
        start = checksums._START.pack(b"HVCSTATE", 1, checksums.crc(text), len(text))
        with contextlib.suppress(CorruptFrameError):
            assert isinstance(checksums.parse(bytearray(start + text)), dict)


@given(JSON | JSON.map(lambda value: {"manifest": value, "crc32c": 0}), st.binary(max_size=100), st.booleans())
def test_manifests(tmp_path_factory: pytest.TempPathFactory, document: Any, data: bytes, is_json: bool) -> None:
    folder: Path = tmp_path_factory.getbasetemp()
    (folder / state_folder.MANIFEST).write_bytes(json.dumps(document).encode() if is_json else data)
    with pytest.raises((CorruptFrameError, StateError)):
        state_folder.manifest(folder)


def _flips(payload: bytes) -> int:
    """Return how many flipped bits of a frame with a payload are not noticed."""
    frame = FrameBuffer(len(payload))
    frame.pack(DUE, NonFiniteCount(), [torch.frombuffer(bytearray(payload), dtype=torch.uint8)])
    frame.check(DUE, len(payload))  # the control
    missed = 0
    for bit in range(8 * (HEADER_BYTES + len(payload))):
        frame.memory[bit // 8] ^= 1 << bit % 8
        try:
            frame.check(DUE, len(payload))
            missed += 1
        except CorruptFrameError:
            pass
        frame.memory[bit // 8] ^= 1 << bit % 8
    return missed


@pytest.mark.parametrize("name", ["sparse_binary density=0.01", *slow(*sorted(GOLDEN["payloads"]))])
def test_every_flipped_bit_of_a_golden_payload_is_found(name: str) -> None:
    """Those that are gathered too."""
    payloads = GOLDEN["payloads"]
    found = payloads.get(name) or next(p for known, p in sorted(payloads.items()) if known.startswith(name.split()[0]))
    for dtype in cases.DTYPES:
        assert _flips(bytes.fromhex(found[dtype])) == 0
