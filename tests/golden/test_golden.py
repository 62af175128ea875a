"""Bytes that went over the wire once stay what they were, until a wire version says otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from horovod_compress.codecs.registry import methods
from horovod_compress.exchange.wire import HEADER_BYTES, WIRE_VERSION
from tests.golden import cases

GOLDEN: dict[str, Any] = json.loads(cases.FILE.read_text())


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", cases.CODECS)
def test_payloads(name: str, dtype: str) -> None:
    codec = cases.CODECS[name].codec()
    for suffix, step in cases.steps(codec).items():
        golden = GOLDEN["payloads"][name + suffix]
        assert golden["version"] == codec.wire_version
        assert cases.payload(codec, dtype, step).hex() == golden[dtype]


def test_frames() -> None:
    assert GOLDEN["wire version"] == WIRE_VERSION
    assert cases.frames() == GOLDEN["frames"]


def test_the_file_holds_every_case() -> None:
    """A new codec's payloads are added with `python -m tests.golden.cases`."""
    due = {name + suffix for name, sample in cases.CODECS.items() for suffix in cases.steps(sample.codec())}
    assert set(GOLDEN["payloads"]) == due
    # No two methods send the same: samples of one method may, where they differ in what is not sent.
    first = [json.dumps(GOLDEN["payloads"][s.name]) for s in cases.CODECS.values() if s.number == 0]
    assert len(set(first)) == len(first) == len(methods())


def test_golden_bytes_by_hand() -> None:
    """A few bytes computed without the package, so that a wrong file would not prove itself right."""
    header = bytes.fromhex(GOLDEN["frames"]["reduce"])[:HEADER_BYTES]
    assert header[:4] == b"HVCF" and int.from_bytes(header[40:48], "little") == 23
    assert int.from_bytes(header[12:16], "little") == 70_000 and header[48:60] == bytes(12)
    first = cases.gradient(cases.TensorSpec("a", (390,), "float32"), 0)
    dense = bytes.fromhex(GOLDEN["payloads"]["none"]["float32"])
    assert dense[: 4 * 390] == first.numpy().tobytes()
    half = bytes.fromhex(GOLDEN["payloads"]["fp16"]["float32"])
    assert half[: 2 * 390] == first.to(torch.float16).numpy().tobytes()
    fixed = next(name for name in cases.CODECS if name.startswith("marsit merge=sampled step_size=0.125"))
    signs = bytes.fromhex(GOLDEN["payloads"][fixed]["float32"])
    for element, value in enumerate(first.tolist()):
        assert signs[element // 8] >> element % 8 & 1 == (value >= 0)
    padding = int.from_bytes(signs[:56], "little") >> 390
    assert padding == 0
