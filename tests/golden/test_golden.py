"""Bytes that went over the wire once stay what they were, until a wire version says otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from horovod_compress.codecs import registry
from horovod_compress.wire import HEADER_BYTES, WIRE_VERSION
from tests.golden import cases

GOLDEN: dict[str, Any] = json.loads(cases.FILE.read_text())


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", cases.CODECS)
def test_payloads(name: str, dtype: str) -> None:
    method, options = cases.CODECS[name]
    codec = registry.create(method, **options)
    assert GOLDEN["payloads"][name]["version"] == codec.wire_version
    assert cases.payload(codec, dtype).hex() == GOLDEN["payloads"][name][dtype]


def test_frames() -> None:
    assert GOLDEN["wire version"] == WIRE_VERSION
    assert cases.frames() == GOLDEN["frames"]


def test_the_file_holds_every_case() -> None:
    assert set(GOLDEN["payloads"]) == set(cases.CODECS)
    assert {method for method, _ in cases.CODECS.values()} == {"none", "fp16", "bf16", "marsit", "global_qsgd"}
    assert len({json.dumps(entry) for entry in GOLDEN["payloads"].values()}) == len(cases.CODECS)


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
    signs = bytes.fromhex(GOLDEN["payloads"]["marsit fixed"]["float32"])
    for element, value in enumerate(first.tolist()):
        assert signs[element // 8] >> element % 8 & 1 == (value >= 0)
    padding = int.from_bytes(signs[:56], "little") >> 390
    assert padding == 0
