"""What the picture of deviations says holds: cascading compression leaves the exact mean, Marsit's merges do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import figures_deviation as shown

RANKS, ROUNDS, WORDS = (2, 4, 16), 16, 40


@pytest.fixture(scope="module")
def found() -> dict[int, dict[str, tuple[float, float]]]:
    return {ranks: shown.deviations(ranks, ROUNDS, WORDS) for ranks in RANKS}


def test_a_sign_drawn_anew_at_every_hop_multiplies_the_deviation(found: dict) -> None:
    single = [found[ranks][shown.DRAWN][0] for ranks in RANKS]
    hop = (64 * WORDS) ** 0.5  # each hop multiplies the norm by the root of the elements
    assert single[1] / single[0] > hop**2 / 4 and single[2] / single[1] > (hop / 2) ** 12


def test_a_sign_taken_anew_at_every_hop_has_a_bias_that_grows_with_ranks(found: dict) -> None:
    few, more, many = (found[ranks][shown.MEAN_SIGN][1] for ranks in RANKS)
    assert few < 0.95 * more and more < 0.95 * many


@pytest.mark.parametrize("name", [shown.SAMPLED, shown.RING, shown.OWNERS])
def test_marsit_s_merges_stay_where_they_are(found: dict, name: str) -> None:
    single, together = zip(*(found[ranks][name] for ranks in RANKS), strict=True)
    assert max(single) < 1.1
    assert max(together) < 1.1 * together[0] < found[2][shown.MEAN_SIGN][1]


def test_the_exact_mean_has_no_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "aggregates", lambda *given: {"exact": lambda grads, step: grads.mean(axis=0)})
    single, together = shown.deviations(8, 4, 5)["exact"]
    assert single == 0 and together < 1e-12


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    shown.draw(tmp_path / "deviation.png", (2, 4), 2, 5)
    assert (tmp_path / "deviation.png").stat().st_size > 10_000
