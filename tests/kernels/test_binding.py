"""What Python passes and does not fit is refused, never cut to size."""

from __future__ import annotations

import pytest
import torch

from horovod_compress.ops import legality

pytestmark = pytest.mark.skipif(legality.REFERENCE is not None, reason="there is no binding: these are NumPy's kernels")

WORDS = 8


def bernoulli(key: object) -> torch.Tensor:
    out = torch.zeros(WORDS, dtype=torch.int64)
    legality.CPU.bernoulli_words(out.data_ptr(), WORDS, 1, 2, key, 0, 1)
    return out


@pytest.mark.parametrize("word", [(1 << 32) + 1, -1, 1 << 64, -(1 << 64)])
@pytest.mark.parametrize("place", range(6))
def test_a_word_of_a_key_that_does_not_fit(place: int, word: int) -> None:
    key = [1, 2, 3 << 8, 4, 5, 6]
    assert bool(bernoulli(key).any())  # the control
    key[place] = word
    with pytest.raises(TypeError):
        bernoulli(key)


def test_words_of_a_key_up_to_the_largest() -> None:
    most = (1 << 32) - 1
    assert not torch.equal(bernoulli([most] * 6), bernoulli([most, most, most, most, 0, most]))


@pytest.mark.parametrize("row", [(1, 2), (1, 1 << 63), (1, "2"), 3])
def test_a_row_that_is_none(row: object) -> None:
    """Of a batch: too short, too large, and not of numbers."""
    with pytest.raises(TypeError):
        legality.CPU.norm_offer([row], 0, 0, 0, 1)
