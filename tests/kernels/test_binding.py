"""What Python passes and does not fit is refused, never cut to size."""

from __future__ import annotations

import pytest
import torch

from horovod_compress.ops import dispatch, legality

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


def test_counts_on_a_device_are_cleared_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call gets some that no other one has, on its own stream; the memory is the CPU's here."""
    cleared: list[tuple[int, str]] = []

    def zeros(number: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        cleared.append((number, device))
        return torch.full((number,), 0, dtype=dtype)

    monkeypatch.setattr(dispatch, "_CLEARED", 8)
    monkeypatch.setattr(dispatch, "_left", {})
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    given = [dispatch._counts_from_zero(number, 0, 7) for number in (3, 5, 1, 8, 9)]
    assert cleared == [(8, "cuda:0"), (8, "cuda:0"), (8, "cuda:0"), (9, "cuda:0")]
    given += [dispatch._counts_from_zero(2, *place) for place in ((0, 8), (1, 7), (0, 8))]
    assert cleared[4:] == [(8, "cuda:0"), (8, "cuda:1")]
    for value, counts in enumerate(given, 1):
        assert not counts.any()
        counts.add_(value)
    assert [len(counts) for counts in given] == [3, 5, 1, 8, 9, 2, 2, 2]
    assert all(bool((counts == value).all()) for value, counts in enumerate(given, 1))
    dispatch._counts_from_zero(3, 0, 2)  # the stream that every thread has of its own
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    dispatch._counts_from_zero(2, 0, 8)
    assert cleared[6:] == [(3, "cuda:0"), (2, "cuda:0")]
