"""Results are compared across ranks, every tensor of a bucket."""

from __future__ import annotations

import contextlib

import pytest
import torch

from horovod_compress.errors import MismatchError
from tests.support.local import Fleet, random_grads, spec

TENSORS = [spec("a", 40), spec("b", 3, 5), spec("c", 70)]


@pytest.mark.parametrize("wrong", [0, 1, 2, None])
def test_one_wrong_bit_of_one_result_is_noticed(wrong: int | None) -> None:
    with Fleet(3, TENSORS, "none", verify_every=1) as fleet:
        state = fleet.reducers[1].buckets[0]
        usual = state.write_back

        def write_back() -> None:
            usual()
            if wrong is not None:
                grad = state.memory.grads[wrong]
                assert grad is not None
                grad.view(torch.int32)[4] ^= 1

        state.write_back = write_back  # type: ignore[method-assign]

        def steps() -> None:
            for number in range(3):
                fleet.step(random_grads(3, TENSORS, seed=number))

        differs = pytest.raises(MismatchError, match=r"result of bucket 0 on rank\(s\) 1 differs")
        with differs if wrong is not None else contextlib.nullcontext():  # the control
            steps()
