"""Results are compared across ranks, every tensor of a bucket."""

from __future__ import annotations

import contextlib

import pytest
import torch

from horovod_compress.errors import MismatchError
from tests.support.local import Fleet, random_grads, spec
from tests.support.turns import Turn

TENSORS = [spec("a", 40), spec("b", 3, 5), spec("c", 70)]


@pytest.mark.parametrize("wrong", [0, 1, 2, None])
def test_one_wrong_bit_of_one_result_is_noticed(wrong: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Turn.write_back

    def write_back(turn: Turn) -> None:
        usual(turn)
        if wrong is not None and turn.key.rank == 1:
            grad = turn.state.memory.grads[wrong]
            assert grad is not None
            grad.view(-1).view(torch.int32)[4] ^= 1

    monkeypatch.setattr(Turn, "write_back", write_back)
    with Fleet(3, TENSORS, "none", verify_every=1) as fleet:

        def steps() -> None:
            for number in range(3):
                fleet.step(random_grads(3, TENSORS, seed=number))

        differs = pytest.raises(MismatchError, match=r"result of bucket 0 on rank\(s\) 1 differs")
        with differs if wrong is not None else contextlib.nullcontext():  # the control
            steps()
