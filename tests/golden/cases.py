"""Small fixed inputs, and the payload bytes and frames that every version must make of them.

Payloads are on the wire between ranks that may run different builds, so their bytes may change
only together with a codec's ``wire_version``. To change them on purpose:

    python -m tests.golden.cases
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from horovod_compress.codecs.base import Algebra, Codec, variants_of
from horovod_compress.exchange import ring
from horovod_compress.exchange.wire import (
    GATHER,
    HEADER_BYTES,
    REDUCE,
    WIRE_VERSION,
    Address,
    FrameBuffer,
    NonFiniteCount,
    codec_id,
)
from horovod_compress.ops.keys import Key
from horovod_compress.schedule.plan import Bucket, TensorSpec
from tests.support.samples import Sample, samples
from tests.support.turns import BucketState, put, turn_of

FILE = Path(__file__).with_name("golden.json")
SEED, STEP, RANK, WORLD = 0x0123456789ABCDEF, 7, 2, 3
#: Within so many steps all kinds of rounds come.
MOST_ROUNDS = 20

#: Every sample of every method.
CODECS: dict[str, Sample] = {sample.name: sample for sample in samples()}
DTYPES = ("float32", "float64", "float16", "bfloat16")


def gradient(spec: TensorSpec, shift: int) -> torch.Tensor:
    """Return multiples of 1/16, with both zeros: exact in every type, without a random generator."""
    numbers = torch.arange(spec.count, dtype=torch.float64).add(shift).mul(37).remainder(101).sub(50).div(16)
    numbers[numbers == 0] = -0.0
    numbers[::29] = 0.0
    return numbers.to(getattr(torch, spec.dtype)).view(spec.shape)


def steps(codec: Codec) -> dict[str, int]:
    """Return a step for each kind of round that a method has, by the text that a case's name ends with."""
    found: dict[Codec, int] = {}
    for step in range(STEP, STEP + MOST_ROUNDS):
        found.setdefault(codec.for_step(step), step)
    assert set(found) == set(variants_of(codec))
    return {"" if step == STEP else f" @ step {step}": step for step in found.values()}


def payload(codec: Codec, dtype: str, step: int = STEP) -> bytes:
    """Return the bytes of one rank's payload, with its own preludes for those of all ranks."""
    bucket = Bucket(5, (TensorSpec("a", (3, 130), dtype), TensorSpec("b", (5,), dtype), TensorSpec("c", (), dtype)))
    state = BucketState(bucket, codec, 0, WORLD, lambda *_: ring)
    key = Key(SEED, step, bucket.index, RANK)
    turn = turn_of(state, key)
    for position, spec in enumerate(bucket.tensors):
        assert put(turn, position, gradient(spec, position)) == 0
    round_ = state.round(step)
    for number in range(len(round_.preludes)):
        round_.before(number, key)
    round_.encode(key)
    if round_.codec.algebra is Algebra.GATHER:
        return round_.work.regions["payload"][: round_.work.used].numpy().tobytes()
    return b"".join(array.view(torch.uint8).numpy().tobytes() for array in round_.work.regions.values())


def frames() -> dict[str, str]:
    marsit, verify = codec_id("marsit"), codec_id("verify")
    addresses = {
        "empty": (Address(marsit, REDUCE, 0, 0, 0, 0, 0, 0), NonFiniteCount(), b""),
        "reduce": (Address(marsit, REDUCE, 3, 70_000, 5, 2, 1, 4), NonFiniteCount(6, 2), bytes(range(23))),
        "gather": (
            Address(verify, GATHER, 65_535, (1 << 32) + 9, 7, 1, 2, 0, 0xFEDC_BA98_7654_3210),
            NonFiniteCount((1 << 32) - 1, 1),
            b"\xff" * 8,
        ),
    }
    return {name: frame(*given).hex() for name, given in addresses.items()}


def frame(address: Address, bad: NonFiniteCount, data: bytes) -> bytes:
    buffer = FrameBuffer(len(data))
    pieces = [torch.frombuffer(bytearray(data), dtype=torch.uint8)] if data else []
    packed = buffer.pack(address, bad, pieces)
    assert packed.numel() == HEADER_BYTES + len(data)
    return packed.numpy().tobytes()


def document() -> dict[str, Any]:
    """Return what the golden file should hold."""
    made = {}
    for name, sample in CODECS.items():
        codec = sample.codec()
        for suffix, step in steps(codec).items():
            found = {dtype: payload(codec, dtype, step).hex() for dtype in DTYPES}
            made[name + suffix] = {"version": codec.wire_version} | found
    return {"wire version": WIRE_VERSION, "frames": frames(), "payloads": made}


if __name__ == "__main__":
    FILE.write_text(json.dumps(document(), indent=1) + "\n")
    print(f"wrote {FILE}")
